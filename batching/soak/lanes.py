"""The streams that the soak's threads share, and work that keeps one busy for a while."""

from __future__ import annotations

import contextlib
import random
from contextlib import AbstractContextManager
from typing import Any

import torch

_STREAMS = 5
_LONGEST_SPIN = 20_000_000
"""Cycles, about ten milliseconds: a slot comes round again much sooner, so its copy is really late."""


class Lanes:
    """A device without streams: one lane, and nothing on it is ever late."""

    count = 1

    def on(self, lane: int) -> AbstractContextManager[Any]:
        """`with` it, the calling thread works on this lane."""
        return contextlib.nullcontext()

    def stream(self, lane: int) -> Any:
        """For `Upload.wait`."""
        return None

    def delay(self, choice: random.Random) -> None:
        """Keep the lane that is current busy for a random while; what is queued next runs late."""

    def mark(self, lane: int) -> Any:
        """An event behind all that is queued on the lane, for `upload(after=…)`."""
        return None

    def finish(self) -> None:
        """Wait for all that is queued."""


class CudaLanes(Lanes):
    """Streams of one CUDA device. Lane 0 is the legacy default stream."""

    count = 1 + _STREAMS

    def __init__(self, device: torch.device) -> None:
        new_stream: Any = torch.cuda.Stream  # torch has no types for this and the next
        spin: Any = torch.cuda._sleep
        self._device = device
        self._spin = spin
        self._streams: list[Any] = [torch.cuda.default_stream(device)]
        self._streams += [new_stream(device) for _ in range(_STREAMS)]
        with self.on(0):
            spin(1)  # the first one pays for loading the kernel

    def on(self, lane: int) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._streams[lane])

    def stream(self, lane: int) -> Any:
        return self._streams[lane]

    def delay(self, choice: random.Random) -> None:
        self._spin(int(_LONGEST_SPIN ** choice.uniform(0.5, 1.0)))  # mostly short

    def mark(self, lane: int) -> Any:
        return self._streams[lane].record_event()

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)


def lanes_of(device: torch.device) -> Lanes:
    """The lanes of a device."""
    return CudaLanes(device) if device.type == "cuda" else Lanes()

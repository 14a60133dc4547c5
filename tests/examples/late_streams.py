"""A simulated device whose streams are late: copies, launches and waits run in the order of their stream, when told."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch

from staging.testing import SimulatedCopy, SimulatedDevice, SimulatedEvent


@attrs.define(eq=False)
class Work:
    """One thing queued on a stream."""

    run: Callable[[], object]
    awaits: SimulatedEvent | None = None
    finished: bool = False


class LateStreams(SimulatedDevice):
    """As on a GPU, a copy delivers its bytes when it runs, and what was launched behind it computes with these."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.queues: dict[int, deque[Work]] = defaultdict(deque)

    def launch(self, run: Callable[[], object], stream: int = 0) -> None:
        """Queue a call on a stream, behind all that is there."""
        self.queues[stream].append(Work(run))

    def advance(self, stream: int = 0) -> bool:
        """Run the oldest work of a stream; False when there is none, or it waits for an event of another stream."""
        queue = self.queues[stream]
        if not queue or (queue[0].awaits is not None and not super().done(queue[0].awaits)):
            return False
        work = queue.popleft()
        work.run()
        work.finished = True
        return True

    def finish_all(self) -> None:
        """Run all work of all streams."""
        while any(self.advance(stream) for stream in list(self.queues)):
            pass

    def copy(self, landing: torch.Tensor, source: torch.Tensor, stream: int) -> None:
        before = landing.clone()
        super().copy(landing, source, stream)  # which delivers at once
        landing.copy_(before)
        self.launch(partial(self._deliver, self.copies[-1]), stream)

    def record(self, event: SimulatedEvent, stream: int) -> None:
        super().record(event, stream)
        event.behind = tuple(self.queues[stream])  # type: ignore[assignment]

    def wait(self, stream: int, event: SimulatedEvent) -> None:
        super().wait(stream, event)
        self.queues[stream].append(Work(lambda: None, awaits=SimulatedEvent(event.behind)))  # as recorded by now

    def _deliver(self, copy: SimulatedCopy) -> None:
        self.finish(copy)  # which notes it when the source has changed
        copy.landing.copy_(copy.source)


class GuardTakenOut(LateStreams):
    """A device whose events say that every copy has finished."""

    def done(self, event: SimulatedEvent) -> bool:
        return True

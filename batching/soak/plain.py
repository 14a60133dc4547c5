"""The per-call way, for comparison: every column in a fresh pinned tensor, each with a copy of its own."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from staging import Layout
from staging._fill import write_column
from staging.layout import ROWS


class PlainWay:
    """Takes a `StagingPool`'s place in the soak. torch's allocator is what keeps its copies right."""

    memory = "pinned"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type != "cuda":
            self.memory = "pageable"

    def lease(self, layout: Layout, /, **lengths: int) -> PlainLease:
        """What stands in for a lease: nothing is reserved."""
        return PlainLease(self, layout, lengths)


class PlainLease:
    """Sends each column as it is written; the upload only collects the tensors."""

    def __init__(self, way: PlainWay, layout: Layout, lengths: dict[str, int]) -> None:
        self._way = way
        self._layout = layout
        self._lengths = lengths
        self._tensors: dict[str, torch.Tensor] = {}

    def __setitem__(self, name: str, values: Any) -> None:
        field = next(field for field in self._layout.fields if field.name == name)
        shape = (self._lengths[field.counts], *field.shape)
        host = torch.empty(shape, dtype=field.dtype, pin_memory=self._way.memory == "pinned" and all(shape))
        write_column(host.numpy(), values, field)  # filled as a slot is: what differs is the memory, copies and events
        self._tensors[name] = host.to(self._way.device, non_blocking=True)

    def write_records(self, records: list[bytes] | npt.NDArray[Any]) -> None:
        """The per-row fields, from records."""
        table = records if isinstance(records, np.ndarray) else self._layout.join(records)
        for field in self._layout.fields:
            if field.counts == ROWS:
                self[field.name] = table[field.name]

    def upload(self, out: torch.Tensor | None = None, after: Any = None) -> PlainUpload:
        """The tensors. The per-call way knows no fixed destination: `out` is left alone, and `after` not needed."""
        return PlainUpload(self._tensors, self._way.device)

    def discard(self) -> None:
        """There is nothing to give back."""

    def __enter__(self) -> PlainLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class PlainUpload(dict[str, torch.Tensor]):
    """The tensors by name, and where they were made."""

    def __init__(self, tensors: dict[str, torch.Tensor], device: torch.device) -> None:
        super().__init__(tensors)
        self._made_on = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def wait(self, stream: Any = None) -> None:
        """As `Upload.wait`. It waits for the whole stream: no event is charged to the per-call way's host time."""
        if self._made_on is None:
            return
        stream = torch.cuda.current_stream(self._made_on.device) if stream is None else stream
        if stream != self._made_on:
            stream.wait_stream(self._made_on)
            for tensor in self.values():
                tensor.record_stream(stream)

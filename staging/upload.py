"""Uploads: the named device tensors that one copy produced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from staging._slots import Slot
from staging.layout import ROWS, Plan

if TYPE_CHECKING:
    from staging.pool import StagingPool


class Upload(Mapping[str, torch.Tensor]):
    """The result of `Lease.upload()`: a mapping from field name to device tensor.

    The tensors are views of one fresh device allocation that belongs to the caller, so they live as long as anybody
    keeps one of them; none ever aliases a slot. Where a layout mixes per-row fields with others (tokens), the per-row
    fields get an allocation of their own, so that keeping a sampling column for thousands of steps does not keep the
    token ids of one. With `upload(out=…)` they are views of the caller's `out` instead.

    On the stream of the upload they can be used at once. On any other stream call `wait(stream)` first.
    """

    __slots__ = ("_allocations", "_generation", "_pool", "_slot", "_stream", "_tensors", "nbytes")

    def __init__(
        self,
        pool: StagingPool,
        slot: Slot,
        generation: int,
        plan: Plan,
        landing: torch.Tensor,
        rows: torch.Tensor | None,
        stream: Any,
        *,
        fresh: bool,
    ) -> None:
        self._pool = pool
        self._stream = stream
        self._slot = slot
        self._generation = generation
        self._allocations = ((landing,) if rows is None else (landing, rows)) if fresh else ()
        self._tensors = _views(plan, landing, rows)
        self.nbytes = plan.total
        """Bytes of the copy, padding included."""

    # By identity: a mapping's equality would compare tensors, and wait for the device.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"<Upload of {len(self._tensors)} fields, {self.nbytes} bytes, to {self._pool.device}>"

    def wait(self, stream: Any = None) -> None:
        """Let `stream` (default: the current one) use the tensors: it waits for the copy, the host does not.

        The device allocation is also marked as used by that stream, so dropping the tensors early does not hand
        their memory to somebody else while `stream` still reads it. `stream` is a `torch.cuda.Stream`. A tensor
        given as `out` is the caller's, whose lifetime on other streams is the caller's to see to. On the stream of the
        upload there is nothing to do, and nothing is done.
        """
        if stream is None:
            stream = self._pool._device.current_stream()
            if stream == self._stream:
                return
        self._pool._wait_for_upload(self._slot, self._generation, stream)
        for allocation in self._allocations:
            self._pool._device.record_stream(allocation, stream)


def _views(plan: Plan, landing: torch.Tensor, rows: torch.Tensor | None) -> dict[str, torch.Tensor]:
    # One typed view of the whole allocation for each dtype, then one strided view for each field: fewer calls than
    # slicing, viewing and shaping every field.
    typed: dict[tuple[bool, torch.dtype], tuple[torch.Tensor, int]] = {}
    tensors: dict[str, torch.Tensor] = {}
    for place in plan.places:
        field = place.field
        in_rows = rows is not None and field.counts == ROWS
        found = typed.get((in_rows, field.dtype))
        if found is None:
            view = (rows if rows is not None and in_rows else landing).view(field.dtype)
            found = typed[in_rows, field.dtype] = (view, int(view.storage_offset()))
        view, start = found
        element = place.row_element if in_rows else place.element
        tensors[field.name] = view.as_strided(place.shape, place.strides, start + element)
    return tensors

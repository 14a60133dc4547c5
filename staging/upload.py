"""Uploads: the named device tensors that one copy produced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from staging._slots import Slot
from staging.layout import Plan

if TYPE_CHECKING:
    from staging.pool import StagingPool


class Upload(Mapping[str, torch.Tensor]):
    """The result of `Lease.upload()`: a mapping from field name to device tensor.

    The tensors are views of one fresh device allocation that belongs to the caller, so they live as long as anybody
    keeps one of them; none ever aliases a slot. Where a layout mixes per-row fields with others (tokens), the per-row
    fields get an allocation of their own, so that keeping a sampling column for thousands of steps does not keep the
    token ids of one. With `upload(out=…)` they are views of the caller's `out` instead, the same objects for every
    upload of these lengths to it: do not change their shapes.

    On the stream of the upload they can be used at once. On any other stream call `wait(stream)` first.
    """

    __slots__ = (
        "_fresh",
        "_generation",
        "_landing",
        "_plan",
        "_pool",
        "_rows",
        "_slot",
        "_stream",
        "_tensors",
    )

    def __init__(
        self,
        pool: StagingPool,
        slot: Slot,
        generation: int,
        plan: Plan,
        landing: torch.Tensor,
        rows: torch.Tensor | None,
        stream: Any,
        tensors: dict[str, torch.Tensor],
        fresh: bool,
    ) -> None:
        self._pool = pool
        self._stream = stream
        self._slot = slot
        self._generation = generation
        self._plan = plan
        self._landing = landing
        self._rows = rows
        self._fresh = fresh
        self._tensors = tensors

    # By identity: a mapping's equality would compare tensors, and wait for the device.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def nbytes(self) -> int:
        """Bytes of the copy, padding included."""
        return self._plan.total

    def __getitem__(self, name: str) -> torch.Tensor:
        # Made when the first is asked for: ten views cost the host as many microseconds, and where a destination is
        # fixed they are there from the last time.
        return (self._tensors or self._views())[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._plan.by_name)

    def __len__(self) -> int:
        return len(self._plan.by_name)

    def __repr__(self) -> str:
        return f"<Upload of {len(self)} fields, {self.nbytes} bytes, to {self._pool.device}>"

    def wait(self, stream: Any = None) -> None:
        """Let `stream` (default: the current one) use the tensors: it waits for the copy, the host does not.

        The device allocation is also marked as used by that stream, so dropping the tensors early does not hand
        their memory to somebody else while `stream` still reads it. `stream` is a `torch.cuda.Stream`. A tensor
        given as `out` is the caller's, whose lifetime on other streams is the caller's to see to. On the stream of the
        upload there is nothing to do, and nothing is done.
        """
        device = self._pool._device
        if stream is None:
            stream = device.current_stream()
        if device.same_stream(stream, self._stream):
            return
        self._pool._wait_for_upload(self._slot, self._generation, stream)
        if self._fresh:
            device.record_stream(self._landing, stream)
            if self._rows is not None:
                device.record_stream(self._rows, stream)

    def _views(self) -> dict[str, torch.Tensor]:
        inference = self._landing.is_inference()
        if inference == torch.is_inference_mode_enabled():
            return self._make_views()
        with torch.inference_mode(
            inference
        ):  # in the mode of the upload, whatever it is where they are first looked at
            return self._make_views()

    def _make_views(self) -> dict[str, torch.Tensor]:
        # All pieces of an allocation by one call: slicing them one by one costs several times as much.
        plan = self._plan
        tensors: dict[str, torch.Tensor] = {}
        for whole, sizes, views in (
            ((self._landing, plan.pieces, plan.views),)
            if self._rows is None
            else ((self._landing, plan.pieces, plan.other_views), (self._rows, plan.row_pieces, plan.row_views))
        ):
            pieces = whole.split_with_sizes(sizes)
            for name, number, dtype, shape in views:
                piece = pieces[number].view(dtype)
                tensors[name] = piece if shape is None else piece.view(shape)
        self._tensors.update(tensors)  # all at once: another thread must not find some of them
        return tensors

"""Uploads: the named device tensors that one copy produced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from staging.lease import Lease


class Upload(dict[str, torch.Tensor]):
    """The result of `Lease.upload()`: a dictionary from field name to device tensor, in the order of the layout.

    The tensors are views of one fresh device allocation that belongs to the caller, so they live as long as anybody
    keeps one of them; none ever aliases a slot. Where a layout has more than 64 KiB of other fields (tokens), the
    per-row fields get an allocation of their own, so that keeping a sampling column for thousands of steps does not
    keep the token ids of one. With `upload(out=…)` they are views of the caller's `out` instead, the same objects for
    every upload of these lengths to it: do not change their shapes.

    On the stream of the upload they can be used at once. On any other stream call `wait(stream)` first.
    """

    __slots__ = ("_fresh", "_lease", "_stream")

    # The pool sets them: an __init__ of Python's would cost as much as three tensors.
    _lease: Lease
    """Which has ended."""
    _fresh: tuple[torch.Tensor, ...]
    """The fresh allocations; none where the destination is the caller's."""
    _stream: Any

    # By identity: a dictionary's equality would compare tensors, and wait for the device.
    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__  # type: ignore[assignment]

    @property
    def nbytes(self) -> int:
        """Bytes of the copy, padding included."""
        return self._lease.nbytes

    def __repr__(self) -> str:
        # Without the values: printing a tensor waits for the device.
        return f"<Upload of {len(self)} fields, {self.nbytes} bytes, to {self._lease._pool.device}>"

    def wait(self, stream: Any = None) -> None:
        """Let `stream` (default: the current one) use the tensors: it waits for the copy, the host does not.

        The device allocation is also marked as used by that stream, so dropping the tensors early does not hand
        their memory to somebody else while `stream` still reads it. `stream` is a `torch.cuda.Stream`. A tensor
        given as `out` is the caller's, whose lifetime on other streams is the caller's to see to. On the stream of the
        upload there is nothing to do, and nothing is done.
        """
        pool = self._lease._pool
        if stream is None:
            stream = pool._device.current_stream()
        if pool._device.same_stream(stream, self._stream):
            return
        pool._wait_for_upload(self._lease, stream)
        for fresh in self._fresh:
            pool._device.record_stream(fresh, stream)

"""Leases: the right to fill one slot, once."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from operator import countOf
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from staging._fill import readable, small_integers, write_column
from staging._prepared import Prepared
from staging._slots import Slot
from staging.errors import FieldError, LeaseError, shown
from staging.layout import ROWS, Layout, Place, Plan
from staging.upload import Upload

if TYPE_CHECKING:
    from staging._fixed import Destination
    from staging.pool import StagingPool


NOWHERE = Slot(-1, None)
"""Where a lease is that has no slot yet."""


class Lease:
    """The right to fill one slot. Write-only; it ends at `upload()` or `discard()` and cannot be used after.

    In order: write every field (`lease[name] = values`, or `write_records` for the per-row ones), then `upload()`
    once. As a context manager it is discarded at the end of the block unless it was uploaded in it.

    A lease belongs to one thread at a time. There is no way to look at the slot's memory: a numpy or torch view
    could not be taken back when the slot moves on.
    """

    __slots__ = ("__weakref__", "_claim", "_generation", "_plan", "_pool", "_prepared", "_slot", "_written")

    def __init__(self, pool: StagingPool, plan: Plan) -> None:
        self._pool = pool
        self._plan = plan
        # The ring binds it to a slot when it reserves one; until then it is not open.
        self._slot = NOWHERE
        self._generation = -1
        self._written = 0
        self._prepared: Prepared | None = None  # the slot's views, while it is open
        self._claim: object = None  # of the upload that ended it

    @property
    def layout(self) -> Layout:
        """The layout that was leased."""
        return self._plan.layout

    @property
    def lengths(self) -> dict[str, int]:
        """The lengths it was leased with, by what is counted."""
        return dict(self._plan.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes that `upload()` copies, padding included."""
        return self._plan.total

    @property
    def is_open(self) -> bool:
        """Whether it can still be written and uploaded."""
        return self._generation == self._slot.generation

    def __repr__(self) -> str:
        generation = max(self._generation, ~self._generation)  # see `StagingPool._discard`
        where = f"slot {self._slot.index}, generation {generation}" if self._plan.total else "no slot"
        lengths = ", ".join(f"{length} {count}" for count, length in self._plan.lengths.items())
        return f"<Lease of {self.layout.name!r}: {lengths}, {where}, {'open' if self.is_open else 'ended'}>"

    def __setitem__(self, name: str, values: Any) -> None:
        """Write one field: a list, tuple, numpy array or CPU tensor as long as the field, or one number for all.

        The values are copied now. Raises `FieldError`, naming field, row and value, for what does not fit exactly
        (booleans are not integers, nothing wraps); the field then counts as unwritten. `LeaseError` after the end.
        Floats are rounded to the field's dtype. Integers for a float field become a double first, so one beyond 2**53
        is rounded twice.
        """
        slot = self._slot
        prepared = self._prepared
        if (
            slot.generation == self._generation
            and (prepared is not None or slot.buffer is not None)
            and type(name) is str  # of a class of the caller's, looking it up would run code of theirs
        ):
            if prepared is None:
                prepared = self._prepare()
            column = prepared.columns.get(name)
            if column is None:
                column = prepared.column(self._place(name))
            kind = type(values)
            if kind is list or kind is tuple:
                if column.small:
                    numbers = small_integers(values)
                    self._check_open("write")  # again: code of the caller's may have run in it
                    column.small = numbers is not None
                    if numbers is not None and len(numbers) == column.length:
                        column.array.reshape(-1)[:] = numbers
                        self._written |= column.bit
                        return
                # Nothing but plain numbers of the usual type: counting them runs no code of theirs.
                if column.length == len(values) == countOf(map(type, values), column.usual):
                    written, bit = self._written, column.bit
                    if written & bit:
                        self._written = written & ~bit
                    try:
                        column.write(*values)
                    except (struct.error, OverflowError):
                        pass  # the slow way below says which value does not fit
                    else:
                        self._written = written | bit
                        return
            elif kind is np.ndarray and values.dtype == column.array.dtype and values.shape == column.array.shape:
                column.array[...] = values
                self._written |= column.bit
                return
        place = self._place(name)
        self._check_open("write")
        self._written &= ~place.bit
        # Into memory of its own first: code of the caller's may run in it, and end this very lease.
        written_aside: npt.NDArray[Any] = np.empty(place.shape, place.numpy_dtype)
        write_column(written_aside, values, place.field)
        self._check_open("write")
        self._column(place)[...] = written_aside
        self._written |= place.bit

    def write_parts(self, name: str, parts: Sequence[Any]) -> None:
        """Write one field from consecutive parts, e.g. the token ids of each request, whose lengths add up to its own.

        As `lease[name] = …` of all of them in one array, without making that: arrays of the field's dtype are copied
        to their place. Other parts (lists, tuples, CPU tensors, other dtypes) are converted and checked one by one. The
        values are copied now. Raises `FieldError`, naming field, part, row and value; the field then counts as
        unwritten. `LeaseError` after the end.
        """
        place = self._place(name)
        try:
            parts = list(parts)  # code of the caller's may run here, and end this very lease: before the check
        except TypeError:
            raise FieldError(f"field {place.field.name!r}: {shown(parts)} is not a sequence of parts") from None
        self._check_open("write")
        self._written &= ~place.bit
        if set(map(type, parts)) == {np.ndarray}:
            try:
                np.concatenate(parts, out=self._column(place), casting="no")
            except (TypeError, ValueError):
                pass  # below it is said what does not fit, or it is converted
            else:
                self._written |= place.bit
                return
        none = np.empty((0, *place.field.shape), place.numpy_dtype)
        self[name] = np.concatenate([none, *(_checked_part(place, number, part) for number, part in enumerate(parts))])

    def write_records(self, records: Sequence[bytes] | bytes | npt.NDArray[Any], layout: Layout | None = None) -> None:
        """Write the per-row fields of `layout` (default: the lease's own) from records, one for each row, in order.

        `records` are bytes made by `layout.pack`: a sequence with one for each row, all of them joined to one
        `bytes`, or what `layout.join` made of them. Joined by the caller only their number is checked. Every per-row
        field of `layout` must be a field of the leased layout with the same dtype and shape. Raises `FieldError` for
        a mismatch, `LeaseError` after the end.
        """
        plan = self._plan
        if layout is None:
            layout = plan.layout
        # Code of the caller's may run here, and end this very lease: before the check.
        joined = records if type(records) is bytes else _joined(records, layout, plan)
        slot = self._slot
        if self._generation != slot.generation:
            self._check_open("write")
        if slot.buffer is None or not joined:
            self._write_no_records(joined, layout)
            return
        prepared = self._prepared or self._prepare()
        targets = prepared.targets
        if targets.layout is not layout:
            if len(joined) != _bytes_of(layout, plan):
                raise _wrong_bytes(joined, layout, plan)
            targets = prepared.records(layout)
        elif len(joined) != targets.nbytes:
            raise _wrong_bytes(joined, layout, plan)
        self._written &= ~targets.bits
        targets.joined[:] = joined
        for target, source in targets.moves:
            target[...] = source
        self._written |= targets.bits

    def upload(self, out: Destination | torch.Tensor | None = None, after: Any = None) -> Upload:
        """Queue the one copy on the stream that is current now, and give up the slot; returns the device tensors.

        Without `out` the tensors are views of one fresh allocation that the caller owns. With `out`, of
        `pool.destination(…)` or a contiguous one-dimensional uint8 tensor on the pool's device, of at least `nbytes`,
        they are views of it, at addresses that stay the same from upload to upload; the copy then first waits, on the
        device, for the event `after` if one is given: whoever still reads `out` on another stream is the caller's to
        name.

        The slot is handed out again only after the event recorded behind the copy has passed.

        Raises `LeaseError` when the lease has ended or a field is unwritten, `FieldError` for an unsuitable `out`,
        `CaptureError` while a graph is being captured on the current stream (in these cases nothing was queued and
        the lease stays as it was), or the device's own error, after which the slot is quarantined.
        """
        return self._pool._upload(self, out, after)

    def discard(self) -> None:
        """Give the slot back without an upload. Discarding an ended lease does nothing."""
        self._pool._discard(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._generation == self._slot.generation:  # not uploaded, as it is in most blocks
            self.discard()

    def __copy__(self) -> Lease:
        raise LeaseError(f"{self!r} cannot be copied: it is the only right to its slot")

    def __reduce__(self) -> str:
        raise LeaseError(f"{self!r} cannot be copied or pickled: it is the only right to its slot")

    def _check_open(self, wish: str) -> None:
        slot = self._slot
        if slot.generation != self._generation:
            raise LeaseError(
                f"cannot {wish}: {self!r} has ended, the slot is at generation {slot.generation} now and may belong "
                f"to somebody else; take a new lease from {self._pool!r}"
            )

    def _place(self, name: object) -> Place:
        place = self._plan.by_name.get(name) if isinstance(name, str) else None
        if place is None:
            raise FieldError(
                f"layout {self.layout.name!r} has no field {name!r}; a lease is written a whole field at a time: "
                f"lease[name] = values, name one of {', '.join(self._plan.by_name)}"
            )
        return place

    def _prepare(self) -> Prepared:
        prepared = self._prepared = self._slot.views(self._plan)
        return prepared

    def _write_no_records(self, joined: bytes, layout: Layout) -> None:
        """There is nothing to move, but the layout and the number of records are checked."""
        if len(joined) != _bytes_of(layout, self._plan):
            raise _wrong_bytes(joined, layout, self._plan)
        for run in self._plan.record_runs(layout):
            self._written |= run.bits

    def _column(self, place: Place) -> npt.NDArray[Any]:
        if self._slot.buffer is None:
            return np.empty(place.shape, place.numpy_dtype)  # a lease of zero bytes: values are checked all the same
        return (self._prepared or self._prepare()).column(place).array


def _checked_part(place: Place, number: int, part: Any) -> npt.NDArray[Any]:
    part = readable(part)
    try:
        length = len(part)
    except TypeError:
        raise FieldError(
            f"part {number}: field {place.field.name!r}: {shown(part)} is not a list or array of values"
        ) from None
    try:
        return place.field.array(part, length)
    except FieldError as error:
        raise FieldError(f"part {number}: {error}") from None


def _joined(records: Sequence[bytes] | bytes | npt.NDArray[Any], layout: Layout, plan: Plan) -> bytes:
    """The bytes of all records, each of which is one of `layout`; their number is for `write_records` to compare."""
    if isinstance(records, (bytes, bytearray, memoryview)):  # bytes: of a class of the caller's
        return bytes(records)
    if not isinstance(records, np.ndarray):
        return layout._joined(records)
    if records.dtype is not layout.record_dtype and records.dtype != layout.record_dtype:
        raise FieldError(f"layout {layout.name!r}: not an array of its records (its dtype is {records.dtype})")
    rows = plan.lengths.get(ROWS, 0)
    if records.shape != (rows,):
        raise FieldError(f"layout {layout.name!r}: {rows} rows were leased, got records of shape {records.shape}")
    return records.tobytes()


def _bytes_of(layout: Layout, plan: Plan) -> int:
    """Of the records of all rows."""
    return plan.lengths.get(ROWS, 0) * layout.record_dtype.itemsize


def _wrong_bytes(joined: bytes, layout: Layout, plan: Plan) -> FieldError:
    return FieldError(
        f"layout {layout.name!r}: {plan.lengths.get(ROWS, 0)} rows were leased, whose records have "
        f"{_bytes_of(layout, plan)} bytes ({layout.record_dtype.itemsize} each), got {len(joined)}"
    )

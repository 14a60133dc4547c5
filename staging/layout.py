"""Layouts: which fields are uploaded together, and where each lies once the lengths are known."""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from staging._cut import Cut, Piece
from staging._fill import write_column
from staging.errors import FieldError, shown

ROWS = "rows"
"""What a per-request field counts. A record holds one request's values of these fields."""

ALIGNMENT = 16
"""Each field starts at a multiple of this many bytes: any dtype can be viewed there, and a kernel can load 16 bytes."""

KEPT_ALONG = 64 * 1024
"""Bytes that may lie in one device allocation with the per-row fields: the token ids of a usual chunk, 8192 of int64.
Who keeps a sampling column keeps them as well; a second allocation, and the copy into it, cost the host 10 us."""

_MOST_PLANS = 4096

DTYPES: dict[torch.dtype, tuple[npt.DTypeLike, str]] = {
    torch.bool: (np.bool_, "?"),
    torch.uint8: (np.uint8, "B"),
    torch.int8: (np.int8, "b"),
    torch.uint16: (np.uint16, "H"),
    torch.int16: (np.int16, "h"),
    torch.uint32: (np.uint32, "I"),
    torch.int32: (np.int32, "i"),
    torch.uint64: (np.uint64, "Q"),
    torch.int64: (np.int64, "q"),
    torch.float16: (np.float16, "e"),
    torch.float32: (np.float32, "f"),
    torch.float64: (np.float64, "d"),
}
"""torch dtype -> (numpy dtype, struct code). bfloat16 is missing because numpy has none."""

_NOT_A_COUNT = ("timeout", "layout", "self")


@attrs.frozen
class Field:
    """One named column of an upload.

    `name`: the key of the column, in the lease and in the upload.
    `dtype`: its torch dtype.
    `counts`: what its length counts, `"rows"` (requests) unless said otherwise, e.g. `"tokens"`.
    `shape`: the shape of one entry; `(1,)` makes the device tensor `(rows, 1)`.

    Raises `FieldError` for a dtype without a numpy twin and for names that cannot be used.
    """

    name: str
    dtype: torch.dtype
    counts: str = ROWS
    shape: tuple[int, ...] = ()

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise FieldError(f"a field's name is a non-empty string, not {self.name!r}")
        if type(self.name) is not str:  # looking one of a class of the caller's up would run code of theirs
            object.__setattr__(self, "name", str.__str__(self.name))
        if self.dtype not in DTYPES:
            known = ", ".join(sorted(str(dtype) for dtype in DTYPES))
            raise FieldError(f"field {self.name!r}: {self.dtype!r} cannot be staged; use one of {known}")
        if not isinstance(self.counts, str) or not self.counts.isidentifier() or self.counts in _NOT_A_COUNT:
            raise FieldError(
                f"field {self.name!r}: {self.counts!r} cannot name what it counts; use an identifier such as 'tokens'"
            )
        if not isinstance(self.shape, tuple) or any(type(extent) is not int or extent < 1 for extent in self.shape):
            raise FieldError(
                f"field {self.name!r}: the shape of one entry is a tuple of positive integers, not {self.shape!r}"
            )

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The numpy dtype of the same bytes."""
        return np.dtype(DTYPES[self.dtype][0])

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry."""
        return self.numpy_dtype.itemsize * math.prod(self.shape)

    def number(self, value: object) -> int | float | bool:
        """`value` as a Python number that this field's dtype can hold: exactly, or for floats after rounding.

        numpy scalars and 0-d CPU tensors are numbers; booleans are not integers. Raises `FieldError`, naming field and
        value, for anything else, also for a tensor on a device, since reading it would wait for the device.
        """
        if isinstance(value, torch.Tensor) and value.ndim == 0:
            if value.device.type != "cpu":
                raise self._refuse(value, "is on a device, and reading it would wait for the device")
            value = value.item()
        elif isinstance(value, np.ndarray) and value.ndim == 0:
            value = value[()]
        dtype = self.numpy_dtype
        if dtype.kind == "b":
            if isinstance(value, (bool, np.bool_)):
                return bool(value)
            raise self._refuse(value, "is not a boolean")
        numbers = (int, float, np.integer, np.floating)
        # numpy counts durations among its integers.
        if isinstance(value, (bool, np.bool_, np.timedelta64)) or not isinstance(value, numbers):
            raise self._refuse(value, f"is not a number, and {self.dtype} needs one")
        if dtype.kind in "iu":
            if isinstance(value, (float, np.floating)):
                raise self._refuse(value, f"is not an integer, and {self.dtype} needs one")
            bounds = np.iinfo(dtype)
            if not bounds.min <= int(value) <= bounds.max:
                raise self._refuse(value, f"does not fit {self.dtype}, which holds {bounds.min} to {bounds.max}")
            return int(value)
        try:
            as_float = float(value)
            with np.errstate(over="ignore"):
                fits = math.isfinite(dtype.type(as_float)) or not math.isfinite(as_float)
        except OverflowError:
            fits = False
        if not fits:
            raise self._refuse(value, f"is too large for {self.dtype}")
        return as_float

    def array(self, values: object, length: int) -> npt.NDArray[Any]:
        """`values` as a new host array of this field with `length` entries, converted and checked as a lease does it.

        Raises `FieldError`, naming field, row and value, for what does not fit exactly.
        """
        column: npt.NDArray[Any] = np.empty((length, *self.shape), self.numpy_dtype)
        write_column(column, values, self)
        return column

    def _refuse(self, value: object, why: str) -> FieldError:
        return FieldError(f"field {self.name!r}: {shown(value)} {why}")


@attrs.frozen(eq=False)
class Place:
    """Where one field lies in an upload: fixed by the layout and the lengths."""

    field: Field
    bit: int
    """1 << position of the field in its layout; the lease keeps what was written as a bit mask."""
    offset: int
    """Bytes from the start of the slot; a multiple of ALIGNMENT."""
    nbytes: int
    shape: tuple[int, ...]
    """Shape of the device tensor, (length, *field.shape)."""
    numpy_dtype: np.dtype[Any]


@attrs.frozen(eq=False)
class RecordRun:
    """Adjacent per-row fields of one element size: records are transposed a run at a time."""

    names: tuple[str, ...]
    bits: int
    """Their bits in the leased layout."""
    dtype: np.dtype[Any]
    """Of an unsigned integer as wide as their elements: the bytes are moved as they are."""
    record: int
    """Bytes from the start of a record to the first of them."""
    record_strides: tuple[int, ...]
    """From field to field, row to row and element to element of the records."""
    target: int
    """Bytes from the start of the slot to the first of them."""
    target_shape: tuple[int, ...]
    target_strides: tuple[int, ...]


@attrs.frozen(eq=False)
class Plan:
    """A layout with its lengths: every offset known, so the size is known before a slot is taken."""

    layout: Layout
    lengths: dict[str, int]
    places: tuple[Place, ...]
    by_name: dict[str, Place]
    fields: int
    """How many."""
    used: int
    """Bytes of the fields themselves."""
    padding: int
    """Bytes between and behind them."""
    total: int
    """Bytes of the one copy: the fields and the padding between them, a multiple of ALIGNMENT."""
    row_runs: tuple[tuple[int, int, int], ...]
    """(from, to, bytes) of each run of adjacent per-row fields, to give these an allocation of their own; empty where
    the others are no more than `KEPT_ALONG`, or there are none."""
    cut: Cut
    """Of the copy's destination, into all fields."""
    other_cut: Cut
    """The same, into those that are not per row."""
    row_cut: Cut
    """Of the per-row fields' own allocation; of nothing where there is none."""
    all_bits: int
    """The mask of fields that must be written before the upload (those that are not empty)."""

    def record_runs(self, layout: Layout) -> list[RecordRun]:
        """How records of `layout` are written to this plan's fields of the same names.

        Raises `FieldError` when a per-row field of `layout` is not a field here, with the same dtype and shape.
        """
        runs: list[RecordRun] = []
        size = layout.record_dtype.itemsize
        rows = self.lengths.get(ROWS, 0)
        for field in layout.fields:
            if field.counts != ROWS:
                continue
            place = self.by_name.get(field.name)
            if place is None or (place.field is not field and place.field != field):
                raise FieldError(f"layout {self.layout.name!r} has no field like {field!r} to write records to")
            width, elements = place.numpy_dtype.itemsize, math.prod(field.shape)
            record: int = layout.record_dtype.fields[field.name][1]  # type: ignore[index]
            last = runs[-1] if runs else None
            if (
                last is not None
                and elements == 1
                and last.target_shape[2] == 1
                and last.dtype.itemsize == width
                and record == last.record + width * len(last.names)
                and place.offset == last.target + last.target_strides[0] * len(last.names)
            ):
                runs[-1] = attrs.evolve(
                    last,
                    names=(*last.names, field.name),
                    bits=last.bits | place.bit,
                    target_shape=(len(last.names) + 1, rows, 1),
                )
                continue
            runs.append(
                RecordRun(
                    names=(field.name,),
                    bits=place.bit,
                    dtype=np.dtype(f"u{width}"),
                    record=record,
                    record_strides=(width, size, width),
                    target=place.offset,
                    target_shape=(1, rows, elements),
                    target_strides=(_aligned(rows * width * elements), width * elements, width),
                )
            )
        return runs


class Layout:
    """An ordered set of fields that are uploaded together.

    For given lengths it fixes each field's byte offset, a multiple of 16 in the order given, and the total.
    Layouts are immutable; two with the same fields are equal, and `a + b` joins two.

        SAMPLING = Layout([Field("temperatures", torch.float32, shape=(1,)), Field("top_ks", torch.int32)])
        record = SAMPLING.pack(temperatures=0.7, top_ks=40)   # one request's values, packed once

    Raises `FieldError` for no fields, two fields of one name, or something that is no field.
    """

    __slots__ = ("_hash", "_plans", "_struct", "fields", "name", "record_dtype")

    def __init__(self, fields: Iterable[Field], name: str = "") -> None:
        self.fields: tuple[Field, ...] = tuple(fields)
        """The fields, in the order in which they lie in a slot."""
        self.name = name or "layout"
        """For messages only; it does not take part in equality."""
        if not self.fields:
            raise FieldError(f"layout {self.name!r} has no fields; give it at least one")
        names: set[str] = set()
        for field in self.fields:
            if not isinstance(field, Field):
                raise FieldError(f"layout {self.name!r}: {field!r} is not a staging.Field")
            if field.name in names:
                raise FieldError(f"layout {self.name!r} has two fields named {field.name!r}; rename one")
            names.add(field.name)
        rows = [field for field in self.fields if field.counts == ROWS]
        self.record_dtype: np.dtype[Any] = np.dtype(
            [(field.name, field.numpy_dtype, field.shape) for field in rows] if rows else []
        )
        """The numpy dtype of one record: the per-row fields in order, packed without padding."""
        self._struct = struct.Struct(
            "<" + "".join(f"{math.prod(field.shape)}{DTYPES[field.dtype][1]}" for field in rows)
        )
        self._plans: dict[tuple[tuple[str, int], ...], Plan] = {}
        self._hash = hash(self.fields)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self.fields == other.fields)

    def __hash__(self) -> int:
        return self._hash

    def __add__(self, other: Layout) -> Layout:
        return Layout(self.fields + other.fields, f"{self.name}+{other.name}")

    def __repr__(self) -> str:
        fields = ", ".join(f"{f.name}: {str(f.dtype).removeprefix('torch.')} x {f.counts}" for f in self.fields)
        return f"<Layout {self.name!r}: {fields}>"

    @property
    def counts(self) -> tuple[str, ...]:
        """What the fields count, each once, in order of first use: the lengths that a lease must be given."""
        return tuple(dict.fromkeys(field.counts for field in self.fields))

    def nbytes(self, **lengths: int) -> int:
        """Bytes of one upload with these lengths, padding included; what `upload(out=)` must hold."""
        return self.plan(lengths).total

    def pack(self, **values: Any) -> bytes:
        """One request's values of the per-row fields, as a record for `Lease.write_records`.

        Values are Python or numpy numbers, for a field whose entries have more than one element a flat sequence.
        Raises `FieldError`, naming field and value, for a missing or unknown field and for a value that does not fit
        its dtype: nothing wraps and nothing turns into infinity.
        """
        flat: list[Any] = []
        for field in self.fields:
            if field.counts != ROWS:
                continue
            if field.name not in values:
                raise FieldError(f"layout {self.name!r}: a record needs a value for {field.name!r}")
            value = values.pop(field.name)
            elements = math.prod(field.shape)
            if elements == 1:
                parts = [value]
            elif isinstance(value, Iterable):
                parts = list(value)
            else:
                raise FieldError(f"field {field.name!r}: an entry has {elements} elements, got {shown(value)}")
            if len(parts) != elements:
                raise FieldError(
                    f"layout {self.name!r}, field {field.name!r}: an entry has {elements} elements, got {len(parts)}"
                )
            flat.extend(field.number(part) for part in parts)
        if values:
            unknown = next(iter(values))
            raise FieldError(f"layout {self.name!r} has no per-row field {unknown!r}")
        return self._struct.pack(*flat)

    def join(self, records: Sequence[bytes]) -> npt.NDArray[Any]:
        """Records of this layout as one read-only structured array of `record_dtype`, in order.

        Raises `FieldError` when the bytes are not a whole number of records, one for each item.
        """
        joined = self._joined(records)
        return np.frombuffer(joined, dtype=self.record_dtype) if joined else np.zeros(0, self.record_dtype)

    def _joined(self, records: Sequence[bytes]) -> bytes:
        """The same as bytes, for what needs no array of them."""
        size = self.record_dtype.itemsize
        if not set(map(len, records)) <= {size}:
            row = next(row for row, record in enumerate(records) if len(record) != size)
            raise FieldError(
                f"layout {self.name!r}: record {row} has {len(records[row])} bytes, its records have {size}; make them "
                f"with this layout's pack()"
            )
        return b"".join(records)

    def plan(self, lengths: Mapping[str, int]) -> Plan:
        """Every offset for these lengths; looked up when the same lengths were planned before.

        Raises `FieldError` for a missing, unknown, negative or non-integer length.
        """
        for length in lengths.values():
            if type(length) is not int:  # True and 1.0 would find the plan of 1
                lengths = {count: _length(length, count, self.name) for count, length in lengths.items()}
                break
        key = tuple(lengths.items())
        plan = self._plans.get(key)
        if plan is not None:
            return plan
        plan = self._make_plan(lengths)
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()  # lengths never repeat in this traffic; start over rather than grow for ever
        self._plans[key] = plan
        return plan

    def _make_plan(self, lengths: Mapping[str, int]) -> Plan:
        counted: dict[str, int] = {}
        for count in self.counts:
            if count not in lengths:
                raise FieldError(f"layout {self.name!r} needs the length of {count!r}: lease(layout, {count}=…)")
            counted[count] = lengths[count]
            if counted[count] < 0:
                raise FieldError(f"layout {self.name!r}: the length {count}={counted[count]} is negative")
        for count in lengths:
            if count not in counted:
                raise FieldError(f"layout {self.name!r} counts {', '.join(self.counts)}, not {count!r}")
        offsets, total = self._offsets(counted)
        filled = [(field, offset) for field, offset in zip(self.fields, offsets, strict=True) if counted[field.counts]]
        runs: list[tuple[int, int, int]] = []
        row_offsets: dict[str, int] = {}
        row_total = 0
        others = sum(counted[field.counts] * field.entry_bytes for field, _ in filled if field.counts != ROWS)
        if others > KEPT_ALONG:
            for field, offset in filled:
                if field.counts != ROWS:
                    continue
                row_offsets[field.name] = row_total
                nbytes = _aligned(counted[ROWS] * field.entry_bytes)
                if runs and runs[-1][0] + runs[-1][2] == offset:
                    runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + nbytes)
                else:
                    runs.append((offset, row_total, nbytes))
                row_total += nbytes
        pieces: list[Piece] = []
        row_pieces: list[Piece] = []
        places: list[Place] = []
        for position, (field, offset) in enumerate(zip(self.fields, offsets, strict=True)):
            nbytes = counted[field.counts] * field.entry_bytes
            shape = (counted[field.counts], *field.shape)
            places.append(Place(field, 1 << position, offset, nbytes, shape, field.numpy_dtype))
            viewed = shape if field.shape else None
            pieces.append((field.name, offset, nbytes, field.dtype, viewed))
            if field.name in row_offsets:
                row_pieces.append((field.name, row_offsets[field.name], nbytes, field.dtype, viewed))
        cut = Cut.of(pieces, total)
        used = sum(place.nbytes for place in places)
        return Plan(
            layout=self,
            lengths=counted,
            places=tuple(places),
            by_name={place.field.name: place for place in places},
            fields=len(places),
            used=used,
            padding=total - used,
            total=total,
            row_runs=tuple(runs),
            cut=cut,
            other_cut=Cut.of([piece for piece in pieces if piece[0] not in row_offsets], total, cut.dtype),
            row_cut=Cut.of(row_pieces, row_total, cut.dtype),
            all_bits=sum(place.bit for place in places if place.nbytes),
        )

    def _offsets(self, lengths: Mapping[str, int]) -> tuple[list[int], int]:
        offsets: list[int] = []
        end = 0
        for field in self.fields:
            offsets.append(end)
            end += _aligned(lengths[field.counts] * field.entry_bytes)
        return offsets, end


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _length(value: object, count: str, layout: str) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise FieldError(f"layout {layout!r}: the length {count}={value!r} is a boolean, not an integer")
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise FieldError(f"layout {layout!r}: the length {count}={shown(value)} is not an integer") from None

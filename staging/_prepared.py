"""What depends on a layout, its lengths and a slot alone: made once, and looked up for every further batch.

Views of a slot's memory cost a microsecond each, and a batch needs about ten: the columns that a lease writes, the
transposed targets of records, the source of the copy. None of them leaves the package.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from staging._device import HostBuffer
from staging._fill import PLAIN
from staging.layout import DTYPES, ROWS, Layout, Place, Plan

MOST = 256
"""Entries that a slot keeps: lengths that never repeat make it start over, rather than grow for ever."""

MANY = 128
"""Integers from which on a list of them is written faster by `small_integers`."""

Array = npt.NDArray[Any]


class Scratch:
    """Ordinary memory of one slot, where joined records lie while they are transposed into its fields."""

    __slots__ = ("_memory",)

    def __init__(self) -> None:
        self._memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def of(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """So many bytes of it. All users have the same: each writes before it reads."""
        if nbytes > len(self._memory):
            self._memory = np.empty(1 << (nbytes - 1).bit_length(), np.uint8)  # older views keep what they are of
        return self._memory[:nbytes]


class Prepared:
    """The views of one slot's buffer for one plan."""

    __slots__ = ("_plan", "_records", "_scratch", "array", "columns", "source", "targets")

    def __init__(self, plan: Plan, buffer: HostBuffer, scratch: Scratch) -> None:
        self._plan = plan
        self._scratch = scratch
        self._records: dict[Layout, Targets] = {}
        self.array = buffer.array
        self.source: Any = buffer.source(buffer.tensor[: plan.total].view(plan.cut.dtype))
        """What the copy reads, as the device is told of it."""
        self.columns: dict[str, Column] = {}
        """Those that were written so far, by name; `column` makes one."""
        self.targets = Targets(None, 0, 0, memoryview(b""), ())
        """Of the layout whose records were written last: looking one up hashes the layout, comparing does not."""

    def column(self, place: Place) -> Column:
        """One field's place in the slot."""
        name = place.field.name
        column = self.columns.get(name)
        if column is None:
            column = self.columns[name] = Column(place, self.array)
        return column

    def records(self, layout: Layout) -> Targets:
        """Where records of `layout` are written to; `FieldError` when they do not belong."""
        targets = self._records.get(layout)
        if targets is None:
            runs = self._plan.record_runs(layout)
            nbytes = self._plan.lengths[ROWS] * layout.record_dtype.itemsize
            scratch = self._scratch.of(nbytes)
            bits = 0
            moves: list[Move] = []
            for run in runs:
                bits |= run.bits
                target = np.ndarray(run.target_shape, run.dtype, self.array, run.target, run.target_strides)
                source = np.ndarray(run.target_shape, run.dtype, scratch, run.record, run.record_strides)
                moves.append((target, source))
            targets = self._records[layout] = Targets(layout, bits, nbytes, scratch.data, tuple(moves))
        self.targets = targets
        return targets


class Column:
    """One field of a slot: an array, and a function that packs plain Python numbers into its bytes."""

    __slots__ = ("array", "bit", "length", "offset", "pack", "small", "usual", "write")

    def __init__(self, place: Place, memory: npt.NDArray[np.uint8]) -> None:
        self.array: Array = np.ndarray(place.shape, place.numpy_dtype, memory, place.offset)
        self.bit = place.bit
        self.length = self.array.size if len(self.array) == self.array.size else -1
        """How many numbers a flat list of all values has; -1 where an entry is more than one."""
        self.offset = place.offset
        self.small = self.length >= MANY and place.numpy_dtype in (np.int32, np.int64)
        """Whether a list of it is looked at for integers of 32 bits first; not once it had another."""
        self.usual = PLAIN[place.numpy_dtype.kind][0]
        """The type that `pack` is for. It would take a boolean for an integer, or ask an object for its value."""
        # "=" and not "@", which lets a float32 overflow.
        self.pack: Callable[..., None] = struct.Struct(f"={self.array.size}{DTYPES[place.field.dtype][1]}").pack_into
        """Converts exactly as the dtype does, and raises where a value does not fit; in half of numpy's time."""
        self.write: Callable[..., None] = partial(self.pack, memory.data, place.offset)
        """The same, into this slot."""


Move = tuple[Array, Array]
"""Adjacent alike fields of records: where they go to in the slot, and where they lie in the scratch."""


@attrs.frozen(eq=False)
class Targets:
    """Where the records of one layout are written to in a slot."""

    layout: Layout | None
    bits: int
    """Of the fields that they write."""
    nbytes: int
    """Of all records together."""
    joined: memoryview
    """The scratch, where they are put first."""
    moves: tuple[Move, ...]

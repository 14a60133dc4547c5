"""What depends on a layout, its lengths and a slot alone: made once, and looked up for every further batch.

Views of a slot's memory cost a microsecond each, and a batch needs about ten: the columns that a lease writes, the
transposed targets of records, the source of the copy. None of them leaves the package.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from staging._device import HostBuffer
from staging._fill import PLAIN
from staging.layout import DTYPES, Layout, Place, Plan

MOST = 256
"""Entries that a slot keeps: lengths that never repeat make it start over, rather than grow for ever."""

Array = npt.NDArray[Any]


class Prepared:
    """The views of one slot's buffer for one plan."""

    __slots__ = ("_plan", "_records", "array", "columns", "source", "targets")

    def __init__(self, plan: Plan, buffer: HostBuffer) -> None:
        self._plan = plan
        self._records: dict[Layout, Targets] = {}
        self.array = buffer.array
        self.source: torch.Tensor = buffer.tensor[: plan.total].view(plan.cut.dtype)
        """What the copy reads."""
        self.columns: dict[str, Column] = {}
        """Those that were written so far, by name; `column` makes one."""
        self.targets = Targets(None, 0, ())
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
            bits = 0
            views: list[Run] = []
            for run in runs:
                bits |= run.bits
                target = np.ndarray(run.target_shape, run.dtype, self.array, run.target, run.target_strides)
                views.append((run.target_shape, run.dtype, run.record, run.record_strides, target))
            targets = self._records[layout] = Targets(layout, bits, tuple(views))
        self.targets = targets
        return targets


class Column:
    """One field of a slot: an array, and a function that packs plain Python numbers into its bytes."""

    __slots__ = ("array", "bit", "length", "offset", "pack", "usual")

    def __init__(self, place: Place, memory: npt.NDArray[np.uint8]) -> None:
        self.array: Array = np.ndarray(place.shape, place.numpy_dtype, memory, place.offset)
        self.bit = place.bit
        self.length = self.array.size if len(self.array) == self.array.size else -1
        """How many numbers a flat list of all values has; -1 where an entry is more than one."""
        self.offset = place.offset
        self.usual = PLAIN[place.numpy_dtype.kind][0]
        """The type that `pack` is for. It would take a boolean for an integer, or ask an object for its value."""
        # "=" and not "@", which lets a float32 overflow.
        self.pack: Callable[..., None] = struct.Struct(f"={self.array.size}{DTYPES[place.field.dtype][1]}").pack_into
        """Converts exactly as the dtype does, and raises where a value does not fit; in half of numpy's time."""


Run = tuple["tuple[int, ...]", "np.dtype[Any]", int, "tuple[int, ...]", Array]
"""Adjacent alike fields of records: shape, dtype, offset and strides there, and the array in the slot they go to."""


@attrs.frozen(eq=False)
class Targets:
    """Where the records of one layout are written to in a slot."""

    layout: Layout | None
    bits: int
    """Of the fields that they write."""
    runs: tuple[Run, ...]

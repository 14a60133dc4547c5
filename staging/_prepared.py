"""What depends on a layout, its lengths and a slot alone: made once, and looked up for every further batch.

Views of a slot's memory cost a microsecond each, and a batch needs about ten: the columns that a lease writes, the
transposed targets of records, the source of the copy. None of them leaves the package.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from staging._device import HostBuffer
from staging.layout import Layout, Place, Plan, RecordRun

MOST = 256
"""Entries that a slot keeps: lengths that never repeat make it start over, rather than grow for ever."""

Array = npt.NDArray[Any]


class Prepared:
    """The views of one slot's buffer for one plan."""

    __slots__ = ("_array", "_columns", "_plan", "_records", "source")

    def __init__(self, plan: Plan, buffer: HostBuffer) -> None:
        self._plan = plan
        self._array = buffer.array
        self._columns: dict[str, Array] = {}
        self._records: dict[Layout, list[tuple[RecordRun, Array]]] = {}
        self.source: torch.Tensor = buffer.tensor[: plan.total]
        """The bytes that the copy reads."""

    def column(self, place: Place) -> Array:
        """One field's place in the slot, of the field's dtype and shape."""
        name = place.field.name
        column = self._columns.get(name)
        if column is None:
            column = self._columns[name] = np.ndarray(place.shape, place.numpy_dtype, self._array, place.offset)
        return column

    def records(self, layout: Layout) -> list[tuple[RecordRun, Array]]:
        """Where records of `layout` are written to, by runs of alike fields; `FieldError` when they do not belong."""
        targets = self._records.get(layout)
        if targets is None:
            targets = [
                (run, np.ndarray(run.target_shape, run.dtype, self._array, run.target, run.target_strides))
                for run in self._plan.record_runs(layout)
            ]
            self._records[layout] = targets
        return targets

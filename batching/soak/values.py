"""What every upload of the soak carries: numbers that host and device work out from its stamp, each on its own.

A stamp is one integer for each upload, made of its number. It stands in the first column itself; every other element
is a hash of the stamp and of the element's position. So the device needs no second copy of the data to know
what should have arrived, and nothing is copied back to be compared: differences are counted where they are found.

All of it is only ever compared. Wrong bytes are wrong numbers, never an index or a pointer, so they crash nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import attrs
import numpy as np
import numpy.typing as npt
import torch

from staging import Field, Layout

STAMP = "stamp"
"""The first field of every layout."""

# A stamp holds its upload's number twice. So what arrives in a stamp's place can be told from a piece of another
# column, or from two stamps' halves: only between two whole stamps is there a distance.
_BITS = 28
_MASK = (1 << _BITS) - 1
_TAG = 0x57
_TWIN = 0xA5C3E71

_STEP = 0x1E3779B97F4A7C15
_MIX = 0x7FB5D329728EA185

_KINDS: dict[torch.dtype, tuple[int, torch.dtype, npt.DTypeLike, torch.dtype]] = {
    torch.bool: (1, torch.bool, np.bool_, torch.uint8),
    torch.uint8: (8, torch.int8, np.int8, torch.uint8),
    torch.int8: (8, torch.int8, np.int8, torch.uint8),
    torch.uint16: (16, torch.int16, np.int16, torch.int16),
    torch.int16: (16, torch.int16, np.int16, torch.int16),
    torch.uint32: (32, torch.int32, np.int32, torch.int32),
    torch.int32: (32, torch.int32, np.int32, torch.int32),
    torch.uint64: (64, torch.int64, np.int64, torch.int64),
    torch.int64: (64, torch.int64, np.int64, torch.int64),
    torch.float16: (11, torch.float16, np.float16, torch.int16),
    torch.float32: (24, torch.float32, np.float32, torch.int32),
    torch.float64: (53, torch.float64, np.float64, torch.int64),
}
"""dtype -> bits of the hash it holds exactly, the dtype these are converted to on the device and on the host, and the
integers of the same width that are compared: torch knows few operations on unsigned ones, and NaN equals nothing."""

DTYPES = tuple(_KINDS)

_Integers = TypeVar("_Integers", npt.NDArray[np.int64], torch.Tensor)


def stamp(number: int) -> int:
    """The stamp of upload `number`."""
    return _TAG << 2 * _BITS | number << _BITS | number ^ _TWIN


def number_of(stamps: _Integers) -> _Integers:
    """The upload's number in each of these."""
    return (stamps >> _BITS) & _MASK


def is_stamp(column: torch.Tensor) -> torch.Tensor:
    """Which of these are stamps at all."""
    return (column >> 2 * _BITS == _TAG) & (column & _MASK == number_of(column) ^ _TWIN)


@attrs.frozen(eq=False)
class Batch:
    """What one upload carries."""

    layout: Layout
    lengths: dict[str, int]
    number: int
    """Of the upload: later ones have higher numbers."""
    uniform: frozenset[str]
    """Fields that hold one number throughout, the one of their first position: written as a scalar."""

    @property
    def stamp(self) -> int:
        """What stands in the first column, and goes into all other values."""
        return stamp(self.number)

    def shape(self, field: Field) -> tuple[int, ...]:
        """Shape of the column."""
        return (self.lengths[field.counts], *field.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(self.lengths[field.counts] * field.entry_bytes for field in self.layout.fields)

    def spans(self) -> list[tuple[Field, int, int]]:
        """Every field but the stamp, with its first position and the one past its last: positions are the upload's."""
        spans: list[tuple[Field, int, int]] = []
        start = 0
        for field in self.layout.fields[1:]:
            stop = start + math.prod(self.shape(field))
            spans.append((field, start, stop))
            start = stop
        return spans


class HostValues:
    """Makes the columns of a batch, as numpy arrays."""

    def __init__(self, most: int) -> None:
        self._steps = np.arange(most, dtype=np.int64) * _STEP

    def columns(self, batch: Batch) -> dict[str, npt.NDArray[Any]]:
        """Every column, new and writable."""
        first = batch.layout.fields[0]
        columns: dict[str, npt.NDArray[Any]] = {STAMP: np.full(batch.shape(first), batch.stamp, np.int64)}
        spans = batch.spans()
        hashes = _hashes(self._steps[: spans[-1][2] if spans else 0], batch.stamp)
        for field, start, stop in spans:
            bits, _, dtype, _ = _KINDS[field.dtype]
            column = (hashes[start:stop] >> (64 - bits)).astype(dtype).view(field.numpy_dtype)
            if field.name in batch.uniform:
                column[:] = column[:1]
            columns[field.name] = column.reshape(batch.shape(field))
        return columns


class Tally:
    """What the checks of one thread on one stream have found: four numbers on the device, added to in stream order."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self.elements, self.checks, self.lowest, self.highest = numbers.unbind()


class WrongShape(Exception):
    """An upload's tensors are not the columns that were leased; needs no look at the device."""


class DeviceValues:
    """Works out on the device what an upload should hold, and counts there what differs. The host never waits."""

    def __init__(self, most: int, device: torch.device) -> None:
        self._steps = torch.arange(most, dtype=torch.int64, device=device) * _STEP

    def check(self, tensors: Mapping[str, torch.Tensor], batch: Batch, tally: Tally) -> None:
        """Queue the comparison on the current stream. Raises `WrongShape`; wrong bytes only show in `tally`."""
        for field in batch.layout.fields:
            tensor = tensors[field.name]
            if (tensor.dtype, tensor.shape) != (field.dtype, batch.shape(field)):
                raise WrongShape(
                    f"{field!r} came as {tensor.dtype} {tuple(tensor.shape)}, {batch.shape(field)} was leased"
                )
        wrong: list[torch.Tensor] = []
        column = tensors[STAMP]
        if column.numel():
            wrong.append(column != batch.stamp)
            distance = number_of(column) - batch.number
            low, high = torch.aminmax(torch.where(is_stamp(column), distance, 0))
            tally.lowest.copy_(torch.minimum(tally.lowest, low))
            tally.highest.copy_(torch.maximum(tally.highest, high))
        spans = batch.spans()
        hashes = _hashes(self._steps[: spans[-1][2] if spans else 0], batch.stamp)
        for field, start, stop in spans:
            if start == stop:
                continue
            bits, dtype, _, compared = _KINDS[field.dtype]
            last = start + 1 if field.name in batch.uniform else stop
            expected = (hashes[start:last] >> (64 - bits)).to(dtype).view(compared)
            wrong.append(tensors[field.name].reshape(-1).view(compared) != expected)
        if wrong:
            found = torch.cat(wrong).sum()
            tally.elements.add_(found)
            tally.checks.add_(found != 0)


def _hashes(steps: _Integers, stamp: int) -> _Integers:
    """One int64 for each position: its high bits depend on stamp and position. `steps` is position * _STEP."""
    key = stamp * _MIX % (1 << 64)
    x = steps + (key - (1 << 64) if key >> 63 else key)  # as int64 has it; all sums and products wrap
    x ^= x >> 31
    x *= _MIX
    return x

"""Writing one column: values of many kinds into a slot's bytes, exactly or not at all."""

from __future__ import annotations

import marshal
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from staging.errors import FieldError, shown

if TYPE_CHECKING:
    from staging.layout import Field

PLAIN: dict[str, tuple[type, ...]] = {"b": (bool,), "i": (int,), "u": (int,), "f": (float, int)}
"""Python types whose values a dtype of this kind takes without losing one unnoticed, the usual one first."""


def small_integers(values: list[Any] | tuple[Any, ...]) -> npt.NDArray[np.int32] | None:
    """`values` as int32, where all are plain Python integers that it holds; else None, as for booleans and for none.

    marshal, in its version 2, writes a list as five bytes and each such integer as five: a code of its own, and the
    number. So one pass in C finds out and packs, in half the time that types and numbers take one after the other.
    Code of the caller's may run: that of a value that is a buffer written in Python, and an audit hook.
    """
    if not values or type(values[0]) is not int:  # all would be written out before one is refused: arrays, say
        return None
    try:
        data = marshal.dumps([*values], 2)  # a list that no such code can empty under marshal's hands
    except Exception:  # there is something that has no place in it, or an audit hook says no
        return None
    count = len(data) // 5 - 1
    if not count or data[5::5] != b"i" * count:
        return None
    numbers: npt.NDArray[np.int32] = np.ndarray(count, "<i4", data, 6, (5,))
    return numbers


def write_column(column: npt.NDArray[Any], values: object, field: Field) -> None:
    """Copy `values` into `column`, the view of a slot for one field.

    Takes a list, tuple, numpy array, CPU tensor (each as long as the field) or one number for every entry. The
    values are read now; changing them afterwards changes nothing. Raises `FieldError`, naming field, row and value.
    """
    if type(values) is list or type(values) is tuple:
        if column.ndim > 1:
            if math.prod(field.shape) > 1 or (values and isinstance(values[0], (list, tuple))):
                _write_nested(column, values, field)
                return
            column = column.reshape(-1)  # entries of shape (1,) are written as plain numbers
        _write_list(column, values, field)
    elif isinstance(values, torch.Tensor) and values.ndim:
        if values.device.type != "cpu":
            raise FieldError(
                f"field {field.name!r}: the values are on {values.device}; staging starts from host memory, and "
                f"reading them back would wait for the device"
            )
        try:
            array = values.detach().numpy()
        except (TypeError, RuntimeError) as error:
            raise FieldError(f"field {field.name!r}: cannot read a {values.dtype} tensor ({error})") from error
        _write_array(column, array, field)
    elif isinstance(values, np.ndarray) and values.ndim:
        _write_array(column, values, field)
    else:
        plain = readable(values)
        if plain is not values:
            write_column(column, plain, field)
        else:
            column[...] = field.number(values)


def readable(values: object) -> object:
    """`values` as a list or an array where they are some other sequence; everything else as it is."""
    if type(values) is list or isinstance(values, (tuple, np.ndarray, np.generic, torch.Tensor, str, bytes, bytearray)):
        return list(values) if isinstance(values, tuple) and type(values) is not tuple else values
    if isinstance(values, Sequence):
        return list(values)
    return np.asarray(values) if hasattr(values, "__array__") else values


def _write_list(
    column: npt.NDArray[Any], values: list[Any] | tuple[Any, ...], field: Field, entry: int | None = None
) -> None:
    """`entry`: the row that `values` are the elements of; otherwise each value is a row."""
    if len(values) != len(column):
        raise _wrong_length(len(values), column, field)
    kind = column.dtype.kind
    if set(map(type, values)) <= set(PLAIN[kind]):
        try:
            if kind == "f" and column.dtype.itemsize < 8:
                with np.errstate(over="raise"):
                    column[:] = values
            else:
                column[:] = values
            return
        except (OverflowError, FloatingPointError):
            pass  # some value does not fit: the loop below names it
    for row, value in enumerate(values):
        try:
            column[row] = field.number(value)
        except FieldError as error:
            raise FieldError(f"row {row if entry is None else entry}: {error}") from None


def _write_array(column: npt.NDArray[Any], array: npt.NDArray[Any], field: Field) -> None:
    if array.shape != column.shape:
        if array.size != column.size or len(array) != len(column):
            raise _wrong_length(array.shape if array.ndim > 1 else len(array), column, field)
        array = array.reshape(column.shape)
    have, want = array.dtype.kind, column.dtype.kind
    if have == "O":
        write_column(column, (array if math.prod(field.shape) > 1 else array.reshape(-1)).tolist(), field)
        return
    if have not in {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}[want]:
        raise FieldError(f"field {field.name!r} is {field.dtype}, got an array of {array.dtype}")
    if want == "f" and have in "iu":
        array = array.astype(np.float64)  # as Python's integers go: through a double, so that all forms round alike
    if np.can_cast(array.dtype, column.dtype, "safe"):
        column[...] = array
        return
    if want in "iu":
        bounds = np.iinfo(column.dtype)
        wrong = (array < bounds.min) | (array > bounds.max)
    else:
        with np.errstate(over="ignore"):
            wrong = np.isinf(array.astype(column.dtype)) & np.isfinite(array)
    if wrong.any():
        row = int(np.argwhere(wrong.reshape(len(array), -1).any(axis=1))[0][0])
        value = array[row].item() if array.ndim == 1 else array[row]
        raise FieldError(f"row {row}: field {field.name!r}: {shown(value)} does not fit {field.dtype}")
    column[...] = array


def _write_nested(column: npt.NDArray[Any], values: list[Any] | tuple[Any, ...], field: Field) -> None:
    if len(values) != len(column):
        raise _wrong_length(len(values), column, field)
    for row, entry in enumerate(values):
        if isinstance(entry, torch.Tensor) and entry.device.type != "cpu":
            raise FieldError(f"row {row}: field {field.name!r}: the entry is on {entry.device}, not on the host")
        parts = np.ravel(np.asarray(entry, dtype=object))
        if parts.size != column[row].size:
            raise FieldError(
                f"row {row}: field {field.name!r}: an entry has {column[row].size} elements, got {parts.size}"
            )
        _write_list(column[row].reshape(-1), parts.tolist(), field, row)


def _wrong_length(got: object, column: npt.NDArray[Any], field: Field) -> FieldError:
    return FieldError(f"field {field.name!r}: {len(column)} {field.counts} were leased, got {got} values")

"""Writing one column: values of many kinds into a slot's bytes, exactly or not at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from staging.errors import FieldError
from staging.layout import Place, shown

_EXACT: dict[str, frozenset[type]] = {
    "b": frozenset({bool}),
    "i": frozenset({int}),
    "u": frozenset({int}),
    "f": frozenset({int, float}),
}
"""Python types whose lists numpy converts to a dtype of this kind without losing a value unnoticed."""


def write_column(column: npt.NDArray[Any], values: object, place: Place) -> None:
    """Copy `values` into `column`, the view of a slot for one field.

    Takes a list, tuple, numpy array, CPU tensor (each as long as the field) or one number for every entry. The
    values are read now; changing them afterwards changes nothing. Raises `FieldError`, naming field, row and value.
    """
    if type(values) is list or type(values) is tuple:
        if column.ndim > 1:
            if place.nbytes != place.shape[0] * place.numpy_dtype.itemsize:
                _write_nested(column, values, place)
                return
            column = column.reshape(-1)  # entries of shape (1,) are written as plain numbers
        _write_list(column, values, place)
    elif isinstance(values, torch.Tensor):
        if values.device.type != "cpu":
            raise FieldError(
                f"field {place.field.name!r}: the values are on {values.device}; staging starts from host memory, and "
                f"reading them back would wait for the device"
            )
        try:
            array = values.detach().numpy()
        except (TypeError, RuntimeError) as error:
            raise FieldError(f"field {place.field.name!r}: cannot read a {values.dtype} tensor ({error})") from error
        _write_array(column, array, place)
    elif isinstance(values, np.ndarray) and values.ndim:
        _write_array(column, values, place)
    elif hasattr(values, "__len__") and not isinstance(values, (str, bytes)) and not np.isscalar(values):
        write_column(column, list(values), place)  # type: ignore[call-overload]
    else:
        column[...] = place.field.number(values)


def _write_list(column: npt.NDArray[Any], values: list[Any] | tuple[Any, ...], place: Place) -> None:
    if len(values) != len(column):
        raise _wrong_length(len(values), place)
    kind = place.numpy_dtype.kind
    if _EXACT[kind].issuperset(map(type, values)):
        try:
            if kind == "f" and place.numpy_dtype.itemsize < 8:
                with np.errstate(over="raise"):
                    column[:] = values
            else:
                column[:] = values
            return
        except (OverflowError, FloatingPointError):
            pass  # some value does not fit: the loop below names it
    for row, value in enumerate(values):
        try:
            column[row] = place.field.number(value)
        except FieldError as error:
            raise FieldError(f"row {row}: {error}") from None


def _write_array(column: npt.NDArray[Any], array: npt.NDArray[Any], place: Place) -> None:
    if array.shape != column.shape:
        if array.size != column.size or len(array) != len(column):
            raise _wrong_length(array.shape if array.ndim > 1 else len(array), place)
        array = array.reshape(column.shape)
    have, want = array.dtype.kind, place.numpy_dtype.kind
    if have == "O":
        _write_list(column.reshape(-1), array.reshape(-1).tolist(), place)
        return
    if have not in {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}[want]:
        raise FieldError(f"field {place.field.name!r} is {place.field.dtype}, got an array of {array.dtype}")
    if np.can_cast(array.dtype, place.numpy_dtype, "safe"):
        column[...] = array
        return
    if want in "iu":
        bounds = np.iinfo(place.numpy_dtype)
        wrong = (array < bounds.min) | (array > bounds.max)
    else:
        with np.errstate(over="ignore"):
            wrong = np.isinf(array.astype(place.numpy_dtype)) & np.isfinite(array)
    if wrong.any():
        row = int(np.argwhere(wrong.reshape(len(array), -1).any(axis=1))[0][0])
        value = array[row].item() if array.ndim == 1 else array[row]
        raise FieldError(f"row {row}: field {place.field.name!r}: {shown(value)} does not fit {place.field.dtype}")
    column[...] = array


def _write_nested(column: npt.NDArray[Any], values: list[Any] | tuple[Any, ...], place: Place) -> None:
    if len(values) != len(column):
        raise _wrong_length(len(values), place)
    for row, entry in enumerate(values):
        parts = np.ravel(np.asarray(entry, dtype=object))
        if parts.size != column[row].size:
            raise FieldError(
                f"row {row}: field {place.field.name!r}: an entry has {column[row].size} elements, got {parts.size}"
            )
        _write_list(column[row].reshape(-1), parts.tolist(), place)


def _wrong_length(got: object, place: Place) -> FieldError:
    return FieldError(
        f"field {place.field.name!r}: {place.shape[0]} {place.field.counts} were leased, got {got} values"
    )

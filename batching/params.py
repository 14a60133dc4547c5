"""Sampling parameters: checked and frozen once, and packed into the record that batches are built from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batching.errors import SamplingValueError
from batching.needs import TOP_K_ALL, needs_of_row, needs_of_rows
from staging import Field, FieldError, Layout

GREEDY_BELOW = 1e-6
"""A temperature below this means greedy sampling: temperature 1.0 with top_k 1."""

DEFAULT_SEED = 42
"""The seed of a request without one, under deterministic sampling."""

SAMPLING = Layout(
    [
        Field("temperatures", torch.float32, shape=(1,)),
        Field("top_ps", torch.float32),
        Field("top_ks", torch.int32),
        Field("min_ps", torch.float32),
        Field("sampling_seed", torch.int64),
    ],
    name="sampling",
)
"""The five sampling columns. One request's record is 24 bytes."""

Table = npt.NDArray[Any]
"""A structured array of `SAMPLING.record_dtype`, one record for each request."""

FEW = 64
"""Up to so many requests it is faster to ask each what it needs than to look through the table."""


@attrs.frozen(eq=False)
class SamplingParams:
    """One request's sampling parameters: checked, normalised and packed when they are made.

        temperature: 0 or more; below 1e-6 means greedy and is stored as temperature 1.0 with top_k 1.
        top_p: in (0, 1]; 1 keeps everything.
        top_k: 1 or more, or -1 for the whole vocabulary, stored as 1 << 30. Not clamped to any vocabulary.
        min_p: in [0, 1]; 0 keeps everything.
        sampling_seed: any int64, or None; 0 and negative seeds are seeds.

    Ranges are checked after rounding to float32, the precision of the device. numpy scalars and 0-d CPU tensors are
    numbers; booleans are not. Raises `SamplingValueError`, naming field and value; `SamplingParams.of(rid, …)` names
    the request as well.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    sampling_seed: int | None = None
    record: bytes = attrs.field(init=False, repr=False)
    """The values as they are uploaded, made by `SAMPLING.pack`."""
    needs: int = attrs.field(init=False, repr=False)
    """What it needs of the sampler: bits of `batching.needs`."""

    def __attrs_post_init__(self) -> None:
        values = normalised(self, "sampling parameters")
        for name, value in zip(_NAMES, values, strict=True):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "record", _pack(values))
        object.__setattr__(self, "needs", needs_of_row(*values[1:4]))

    @classmethod
    def of(cls, rid: str, **values: Any) -> SamplingParams:
        """The same, for a request whose id then stands in the error."""
        try:
            return cls(**values)
        except SamplingValueError as error:
            raise SamplingValueError(f"request {rid!r}: {str(error).removeprefix('sampling parameters: ')}") from None
        except TypeError as error:
            known = ", ".join(_NAMES)
            raise SamplingValueError(f"request {rid!r}: {error}; sampling parameters are {known}") from None


_NAMES = ("temperature", "top_p", "top_k", "min_p", "sampling_seed")
_FIELDS = dict(zip(_NAMES, SAMPLING.fields, strict=True))
_Values = tuple[float, float, int, float, "int | None"]


def normalised(params: object, who: str) -> _Values:
    """The five values of any object with these attribute names, as they are stored. `who` begins the error."""
    temperature = _number(params, "temperature", who)
    top_k = _number(params, "top_k", who)
    top_p = _number(params, "top_p", who)
    min_p = _number(params, "min_p", who)
    if not temperature >= 0:
        raise _wrong(who, "temperature", temperature, "0 or more; 0 means greedy")
    if not 0 < np.float32(top_p) <= 1:
        raise _wrong(who, "top_p", top_p, "more than 0 and at most 1 (as float32); 1 keeps everything")
    if not 0 <= np.float32(min_p) <= 1:
        raise _wrong(who, "min_p", min_p, "from 0 to 1 (as float32); 0 keeps everything")
    if top_k != -1 and top_k < 1:
        raise _wrong(who, "top_k", top_k, "1 or more, or -1 for the whole vocabulary")
    seed = None if getattr(params, "sampling_seed", None) is None else _number(params, "sampling_seed", who)
    if temperature < GREEDY_BELOW:
        temperature, top_k = 1.0, 1
    return temperature, top_p, TOP_K_ALL if top_k == -1 else int(top_k), min_p, None if seed is None else int(seed)


def table_of(requests: Sequence[Any], params: list[Any] | None = None) -> Table:
    """The records of these requests as one table, in order; `params` are their parameters, where they are at hand.

    Requests with `SamplingParams` bring their record. Of others, with parameter objects of the same attribute names,
    the values are read and checked every time, since nobody can know when they change. Raises `SamplingValueError`,
    naming the request.
    """
    if params is None:
        params = [request.sampling_params for request in requests]
    if set(map(type, params)) <= {SamplingParams}:
        # Not SAMPLING.join, which measures every record: these were packed by it.
        return np.frombuffer(b"".join([one.record for one in params]), SAMPLING.record_dtype)
    return _foreign_table(requests, params)


def needs_of(table: Table, params: Sequence[Any] = ()) -> int:
    """What these requests need of the sampler together; their parameters save time, where they are at hand."""
    if 0 < len(params) <= FEW and set(map(type, params)) <= {SamplingParams}:
        return union([one.needs for one in params])
    return needs_of_rows(table["top_ps"], table["top_ks"], table["min_ps"])


def union(needs: Iterable[int]) -> int:
    """All bits together."""
    bits = 0
    for some in set(needs):  # few differ
        bits |= some
    return bits


def _foreign_table(requests: Sequence[Any], params: list[Any]) -> Table:
    table = np.empty(len(params), SAMPLING.record_dtype)
    try:
        temperatures = [one.temperature for one in params]
        top_ps = [one.top_p for one in params]
        top_ks = [one.top_k for one in params]
        min_ps = [one.min_p for one in params]
        seeds = [getattr(one, "sampling_seed", None) for one in params]
    except AttributeError:
        return _one_by_one(requests, table)
    plain = _types(temperatures, top_ps, min_ps) <= {int, float} and _types(top_ks, seeds) <= {int, type(None)}
    if not plain:
        return _one_by_one(requests, table)
    try:
        with np.errstate(over="raise"):
            table["temperatures"][:, 0] = temperatures
            table["top_ps"] = top_ps
            table["top_ks"] = top_ks
            table["min_ps"] = min_ps
            table["sampling_seed"] = [DEFAULT_SEED if seed is None else seed for seed in seeds]
    except (OverflowError, FloatingPointError, TypeError):
        return _one_by_one(requests, table)
    exact = np.array(temperatures, dtype=np.float64)  # the sign of a tiny one is gone after rounding
    in_range = (
        (exact >= 0)
        & (exact < math.inf)
        & (table["top_ps"] > 0)
        & (table["top_ps"] <= 1)
        & (table["min_ps"] >= 0)
        & (table["min_ps"] <= 1)
        & ((table["top_ks"] >= 1) | (table["top_ks"] == -1))
    )
    if not in_range.all():
        return _one_by_one(requests, table)
    table["top_ks"][table["top_ks"] == -1] = TOP_K_ALL
    greedy = exact < GREEDY_BELOW
    if greedy.any():
        table["temperatures"][greedy] = 1.0
        table["top_ks"][greedy] = 1
    return table


def _one_by_one(requests: Sequence[Any], table: Table) -> Table:
    """The slow way, value by value: for numbers of unusual types, and to name the one that is wrong."""
    for row, request in enumerate(requests):
        values = normalised(request.sampling_params, f"request {getattr(request, 'rid', row)!r}")
        table[row] = np.frombuffer(_pack(values), SAMPLING.record_dtype)[0]
    return table


def _pack(values: _Values) -> bytes:
    temperature, top_p, top_k, min_p, seed = values
    return SAMPLING.pack(
        temperatures=temperature,
        top_ps=top_p,
        top_ks=top_k,
        min_ps=min_p,
        sampling_seed=DEFAULT_SEED if seed is None else seed,
    )


def _types(*columns: Iterable[Any]) -> set[type]:
    return {kind for column in columns for kind in set(map(type, column))}


def _number(params: object, name: str, who: str) -> float:
    try:
        value = getattr(params, name)
    except AttributeError:
        raise SamplingValueError(f"{who}: {type(params).__name__} has no attribute {name!r}") from None
    try:
        checked = _FIELDS[name].number(value)
    except FieldError as error:
        reason = str(error).removeprefix(f"field {_FIELDS[name].name!r}: ")
        raise SamplingValueError(f"{who}: {name}: {reason}") from None
    if not math.isfinite(checked):
        raise _wrong(who, name, checked, "a finite number")
    return checked


def _wrong(who: str, name: str, value: object, wanted: str) -> SamplingValueError:
    return SamplingValueError(f"{who}: {name}: {value!r} is out of range; it must be {wanted}")

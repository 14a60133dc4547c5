"""The results document that `bench --json` writes, read and checked: the page is drawn from nothing else."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs

T = TypeVar("T")


@attrs.frozen
class Timing:
    """Host time of one strategy at one number of rows, in microseconds."""

    median: float
    lowest: float
    highest: float
    """Lowest and highest of the repeats' medians."""
    p99: float
    medians: tuple[float, ...]
    """One for each repeat."""
    samples: int
    copies: int | None
    still_busy: int | None
    """Batches at whose end the work queued before them was still running; only behind queued work."""
    of_quiet: float | None = None
    """How much longer than with nothing queued; only behind queued work."""

    def over(self, other: Timing) -> float | None:
        """The median of the ratios of each repeat's medians, as in the tables."""
        return ratio(self.medians, other.medians)


Gpu = tuple[float, ...] | None
"""GPU microseconds, one number for each repeat; None where the host had to wait."""
Timings = dict[int, dict[str, Timing]]
"""By rows, then by the name of the strategy."""


@attrs.frozen
class Document:
    """One run of the benchmark. A section that was not run is None."""

    about: dict[str, str | int | float | bool | None]
    """Device, versions, commit, repeats and whatever else the run said of itself."""
    queued_work_us: float | None
    """How much GPU work was queued before each batch of the section `queued`."""
    host: Timings | None
    queued: Timings | None
    copies: dict[int, dict[str, Gpu]] | None
    prefill: Timings | None
    kernel: dict[str, dict[str, Gpu]] | None
    kernel_variants: int | None
    packing: dict[str, tuple[float, ...]] | None
    claims: list[tuple[str, str, bool]]
    """What the project says of itself, what was measured, and whether it holds."""
    pool: dict[str, int] | None

    @property
    def on_gpu(self) -> bool:
        return self.about.get("cuda") is not None


class DocumentError(Exception):
    """A file that is not the document of a run, with the field that shows it."""


def ratio(these: Sequence[float], those: Sequence[float]) -> float | None:
    """The median of the ratios, repeat by repeat; None where they cannot be taken."""
    if len(these) != len(those) or not all(those):
        return None
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


def load(path: Path) -> Document:
    """The document in this file. Raises `DocumentError`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DocumentError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"{path} is not JSON ({error}); give the file that bench --json wrote") from error
    try:
        return parse(value)
    except DocumentError as error:
        raise DocumentError(f"{path}: {error}") from error


def parse(value: Any) -> Document:
    """The document, from what JSON holds. Raises `DocumentError`, which names the field."""
    top = _mapping(value, "the document", lambda one, _: one)
    for key in ("device", "cuda", "host", "queued", "copies", "prefill", "kernel", "packing", "claims", "pool"):
        if key not in top:
            raise DocumentError(f"there is no field {key!r}; give the file that bench --json wrote")

    def section(key: str, each: Callable[[Any, str], T]) -> dict[str, T] | None:
        return None if top.get(key) is None else _mapping(top[key], key, each, least=1)

    def by_rows(key: str, each: Callable[[Any, str], T]) -> dict[int, dict[str, T]] | None:
        found = section(key, lambda one, where: _mapping(one, where, each, least=1))
        return None if found is None else {_rows(rows, key): of_rows for rows, of_rows in found.items()}

    return Document(
        about={key: one for key, one in top.items() if key not in _SECTIONS and not isinstance(one, (dict, list))},
        queued_work_us=None if top.get("queued_work_us") is None else _number(top["queued_work_us"], "queued_work_us"),
        host=by_rows("host", _timing),
        queued=by_rows("queued", _timing),
        copies=by_rows("copies", _gpu),
        prefill=by_rows("prefill", _timing),
        kernel=section("kernel", lambda one, where: _mapping(one, where, _gpu, least=1)),
        kernel_variants=_count_or_none(top.get("kernel_variants"), "kernel_variants"),
        packing=section("packing", _numbers),
        claims=[_claim(one, f"claims[{at}]") for at, one in enumerate(_list(top["claims"], "claims"))],
        pool=section("pool", _count),
    )


_SECTIONS = ("queued_work_us", "kernel_variants", "host", "queued", "copies", "prefill", "kernel", "packing", "pool")


def _timing(value: Any, where: str) -> Timing:
    found = _mapping(value, where, lambda one, _: one)

    def at(key: str, read: Callable[[Any, str], T]) -> T:
        if key not in found:
            raise DocumentError(f"{where} has no {key!r}; give the file that bench --json wrote")
        return read(found[key], f"{where}, {key}")

    return Timing(
        median=at("median_us", _number),
        lowest=at("lowest_median_us", _number),
        highest=at("highest_median_us", _number),
        p99=at("p99_us", _number),
        medians=at("medians_us", _numbers),
        samples=at("samples", _count),
        copies=_count_or_none(found.get("copies"), f"{where}, copies"),
        still_busy=_count_or_none(found.get("still_busy"), f"{where}, still_busy"),
        of_quiet=None if found.get("of_quiet") is None else _number(found["of_quiet"], f"{where}, of_quiet"),
    )


def _claim(value: Any, where: str) -> tuple[str, str, bool]:
    found = _mapping(value, where, lambda one, _: one)
    claim, measured, holds = (found.get(key) for key in ("claim", "value", "holds"))
    if isinstance(claim, str) and isinstance(measured, str) and isinstance(holds, bool):
        return claim, measured, holds
    raise _wrong(value, where, "a claim with its value and whether it holds")


def _mapping(value: Any, where: str, each: Callable[[Any, str], T], least: int = 0) -> dict[str, T]:
    if not isinstance(value, Mapping) or len(value) < least:
        raise _wrong(value, where, "an object" if not least else "an object with entries")
    return {key: each(one, key if where == "the document" else f"{where}, {key}") for key, one in value.items()}


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _wrong(value, where, "a list")
    return value


def _gpu(value: Any, where: str) -> Gpu:
    return None if value is None else _numbers(value, where)


def _numbers(value: Any, where: str) -> tuple[float, ...]:
    found = tuple(_number(one, f"{where}[{at}]") for at, one in enumerate(_list(value, where)))
    if not found:
        raise _wrong(value, where, "a number for each repeat")
    return found


def _number(value: Any, where: str) -> float:
    # JSON as Python reads it knows NaN and Infinity; `bool` is an `int`.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MOST:
        raise _wrong(value, where, "a number of microseconds")
    return round(float(value), 6)  # picoseconds: so that what is not nothing is not too small to be drawn


def _count(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _wrong(value, where, "a whole number, 0 or more")
    return value


def _count_or_none(value: Any, where: str) -> int | None:
    return None if value is None else _count(value, where)


def _rows(text: str, where: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):
        raise _wrong(text, f"a key of {where}", "a number of rows")
    return int(text)


def _wrong(value: Any, where: str, wanted: str) -> DocumentError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:60]}…"
    return DocumentError(f"{where} is {shown}, not {wanted}; give the file that bench --json wrote")


_MOST = 1e12
"""Microseconds: eleven days. More is no measurement, and `nan <= _MOST` is false."""

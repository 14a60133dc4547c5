"""What a replay says at its end: the table and the JSON document, of one process and of all ranks of a job."""

from __future__ import annotations

import platform
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from batching.arguments import device_name, duration, pool_rows, size, table
from batching.replay.scheduler import Result
from staging import PoolStats, StagingPool
from staging.stats import PEAKS

_WIDEST = "host time per batch built"
"""The table's longest label."""


def report(name: str, pool: StagingPool, result: Result, stats: PoolStats, bad_rows: int) -> str:
    """The table of one process."""
    return table(
        [
            ("trace", _trace(name, bad_rows)),
            ("device", f"{device_name(pool.device)}, host memory {pool.memory}, torch {torch.__version__}"),
            ("requests", f"{result.requests:,} finished, {result.refused:,} refused as too long"),
            ("prompt tokens", f"{result.prompt_tokens:,}, {result.cached_tokens:,} of them cached"),
            ("longest prefix", f"{result.longest_prefix:,} tokens"),
            ("output tokens", f"{result.output_tokens:,}, {result.overrun_tokens:,} more thrown away"),
            ("steps", f"{result.prefill_steps:,} prefill, {result.decode_steps:,} decode, {result.filters:,} filters"),
            ("time", duration(result.wall_ns)),
            (_WIDEST, f"{_each(result.prefill_build_ns, result.prefill_steps)} prefill"),
            ("", f"{_each(result.decode_build_ns, result.decode_steps)} decode"),
            ("", f"{_each(result.filter_ns, result.filters)} filter"),
            *pool_rows(stats),
            ("mismatches", _mismatch_line(result)),
        ]
    )


def as_json(name: str, pool: StagingPool, result: Result, stats: PoolStats, bad_rows: int) -> dict[str, Any]:
    """The result of one process for machines: counts, nanoseconds, bytes."""
    return {
        "trace": name,
        "device": device_name(pool.device),
        "memory": pool.memory,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **attrs.asdict(result),
        "bad_rows": bad_rows,
        **_counted(result, stats),
    }


def row(label: str, value: str) -> str:
    """A row of the table that comes later, on one line so that a path can be copied."""
    return f"{label:<{len(_WIDEST) + 2}}{value}"


def mismatches(result: Result) -> int | None:
    """All of them; None where nothing was checked."""
    return None if result.mismatches is None else sum(result.mismatches.values())


# A job.


@attrs.frozen
class RankReport:
    """What one rank has done, as it is sent to the others."""

    rank: int
    device: str
    """Short: `cuda:1`."""
    document: dict[str, Any]
    """Its own `as_json`."""
    result: Result
    stats: PoolStats


def job_report(ranks: Sequence[RankReport], backend: str) -> str:
    """The table of a job: a row for each rank and one of their sum; then the slowest rank, and what their pools say."""
    first, total, stats = ranks[0].document, summed_results(ranks), summed_stats(ranks)
    slowest, fastest = _slowest(ranks), min(ranks, key=lambda one: one.result.wall_ns)
    behind = slowest.result.wall_ns / max(fastest.result.wall_ns, 1) - 1
    devices = ", ".join(dict.fromkeys(one.document["device"] for one in ranks))
    deepest = max(ranks, key=lambda one: one.stats.suggested_slots)
    alike = len({str(one.stats.advice()) for one in ranks}) == 1
    grid = [_cells(str(one.rank), one.device, one.result, one.stats) for one in ranks]
    rows = [
        ("trace", f"{_trace(first['trace'], first['bad_rows'])}, all of it by each rank"),
        ("ranks", f"{len(ranks)}, gathered through {backend}"),
        ("device", f"{devices}, host memory {first['memory']}, torch {first['torch']}"),
        ("requests", f"{total.requests:,} finished, {total.refused:,} refused as too long"),
        ("steps", f"{total.prefill_steps:,} prefill, {total.decode_steps:,} decode, {total.filters:,} filters"),
        ("slowest rank", f"{slowest.rank}, which took {100 * behind:.1f} % longer than rank {fastest.rank}"),
        ("time of a rank", _spread([one.result.wall_ns for one in ranks])),
        (_WIDEST, _spread([_build_ns(one.result) for one in ranks])),
        *[pair for pair in pool_rows(stats) if pair[0] != "advice"],  # which is on one ring, not on their sum
        ("advice", f"{'every rank' if alike else f'rank {deepest.rank}'}: {deepest.stats.advice()}"),
        *[("ranks differ", f"in {name}: {', '.join(map(str, each))}") for name, each in differences(ranks).items()],
        ("mismatches", _mismatch_line(total)),
    ]
    return f"{_grid([*grid, _cells('sum', '', total, stats)])}\n\n{table(rows)}"


def job_json(ranks: Sequence[RankReport], backend: str) -> dict[str, Any]:
    """The same for machines: the document of each rank, and their sum."""
    total, stats = summed_results(ranks), summed_stats(ranks)
    counted = _counted(total, stats)
    counted["pool"]["suggested_slots"] = max(one.stats.suggested_slots for one in ranks)  # of one pool, not of all
    return {
        "backend": backend,
        "slowest_rank": _slowest(ranks).rank,
        "differences": differences(ranks),
        "sum": {**attrs.asdict(total), **counted},
        "ranks": [{"rank": one.rank, **one.document} for one in ranks],
    }


def summed_stats(ranks: Sequence[RankReport]) -> PoolStats:
    """Counters and gauges are added; peaks are the highest of any rank, and so is `oldest_lag`."""
    highest = {*PEAKS, "oldest_lag"}
    values = {field.name: [getattr(one.stats, field.name) for one in ranks] for field in attrs.fields(PoolStats)}
    return PoolStats(**{name: max(each) if name in highest else sum(each) for name, each in values.items()})


def summed_results(ranks: Sequence[RankReport]) -> Result:
    """Counts and host times are added; the time and the longest prefix are the highest of any rank."""
    values = {field.name: [getattr(one.result, field.name) for one in ranks] for field in attrs.fields(Result)}
    found: list[dict[str, int] | None] = values.pop("mismatches")
    kinds: Counter[str] = Counter()
    for each in found:
        kinds.update(each or {})
    highest = ("longest_prefix", "wall_ns")
    added = {name: max(each) if name in highest else sum(each) for name, each in values.items()}
    return Result(**added, mismatches=None if None in found else dict(kinds))


def differences(ranks: Sequence[RankReport]) -> dict[str, list[int]]:
    """What the ranks did not do alike, by rank. The same trace and options give the same batches; only times differ."""
    names = [
        field.name for field in attrs.fields(Result) if not field.name.endswith("_ns") and field.name != "mismatches"
    ]
    values = {name: [getattr(one.result, name) for one in ranks] for name in names}
    return {name: each for name, each in values.items() if len(set(each)) > 1}


def _slowest(ranks: Sequence[RankReport]) -> RankReport:
    return max(ranks, key=lambda one: one.result.wall_ns)


def _cells(rank: str, device: str, result: Result, stats: PoolStats) -> dict[str, str]:
    """A row of the ranks' table, by column."""
    found = mismatches(result)
    return {
        "rank": rank,
        "device": device,
        "requests": f"{result.requests:,}",
        "time": duration(result.wall_ns) if device else "",
        "per batch": duration(_build_ns(result)),
        "leases": f"{stats.leases:,}",
        "waited": f"{stats.leases_waited:,}",
        "copies": f"{stats.uploads:,}",
        "avoided": f"{stats.copies_avoided:,}",
        "copied": size(stats.bytes_used),
        "mismatches": "–" if found is None else f"{found:,}",
    }


def _grid(rows: Sequence[dict[str, str]]) -> str:
    """Columns under their names, ranged right."""
    lines = [{name: name for name in rows[0]}, *rows]
    widths = {name: max(len(line[name]) for line in lines) for name in rows[0]}
    return "\n".join("  ".join(f"{line[name]:>{width}}" for name, width in widths.items()) for line in lines)


def _spread(ns: Sequence[float]) -> str:
    return f"{duration(min(ns))} min, {duration(statistics.median(ns))} median, {duration(max(ns))} max"


def _build_ns(result: Result) -> float:
    """Host time per batch built, of whatever kind."""
    batches = result.prefill_steps + result.decode_steps + result.filters
    return (result.prefill_build_ns + result.decode_build_ns + result.filter_ns) / max(batches, 1)


# Both.


def _counted(result: Result, stats: PoolStats) -> dict[str, Any]:
    """The numbers of the pool, and the mismatches, as JSON has them."""
    return {
        "uploads": stats.uploads,
        "in_flight_met": stats.met_in_flight,
        "mismatches": mismatches(result),
        "mismatches_by_kind": result.mismatches,
        "pool": stats.as_dict(),
    }


def _trace(name: str, bad_rows: int) -> str:
    return name + (f" ({bad_rows:,} malformed rows left out)" if bad_rows else "")


def _mismatch_line(result: Result) -> str:
    if result.mismatches is None:
        return "not checked"
    found = ", ".join(f"{count:,} in {kind}" for kind, count in result.mismatches.items() if count)
    return found or "0: tensors and tokens equal bit for bit"


def _each(total_ns: int, count: int) -> str:
    return duration(total_ns / count) if count else "no"

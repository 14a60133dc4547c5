"""`python -m batching replay`: recorded traffic through the scheduler, checked, with a table at the end."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import torch
from tqdm import tqdm

from batching.arguments import chosen_device, device_name, positive, wrapped
from batching.replay.observe import ObservedPool, ObservedScheduler
from batching.replay.scheduler import Result, Scheduler, Settings
from batching.replay.timeline import STEPS, Timeline, TimelineError
from batching.replay.trace import TraceError, builtin_trace, read_trace
from staging import PoolStats, StagingError, StagingPool
from staging._device import open_device

_SHOWN_BAD_ROWS = 5


def add_parser(commands: Any) -> None:
    """Add `replay` to the subparsers of `python -m batching`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay",
        help="replay recorded traffic through the pool and check every batch",
        description="Replay recorded traffic through a small scheduler whose every upload goes through a StagingPool. "
        "With --check (the default) each batch is also built the plain way and by a naive oracle, and tensors and "
        "sampled tokens are compared bit for bit.",
        epilog="Exit status: 0 done with 0 mismatches, 1 mismatches found, 2 it could not be run, 130 interrupted.",
    )
    parser.add_argument(
        "trace", nargs="?", type=Path, metavar="TRACE",
        help="an Azure CSV or Mooncake JSONL file, recognised by its content; without it a small built-in trace",
    )  # fmt: skip
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda if there is one"
    )
    parser.add_argument("--requests", type=positive, metavar="N", help="replay the first N requests only")
    parser.add_argument("--max-batch", type=positive, default=256, metavar="N", help="running requests (default 256)")
    parser.add_argument("--slots", type=positive, default=4, metavar="N", help="slots of the ring; it may grow to 2 N")
    parser.add_argument(
        "--ahead", type=_count, default=Settings().ahead, metavar="N",
        help="iterations built before the tokens of one are read (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--kv-tokens", type=positive, metavar="N", help="KV indices (default: room for ten of the longest requests)"
    )
    parser.add_argument(
        "--forward-us", type=float, default=Settings().forward_us, metavar="US",
        help="microseconds that a forward keeps a CUDA device busy (default %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--check", action=argparse.BooleanOptionalAction, default=True, help="compare every batch (default), or do not"
    )
    parser.add_argument(
        "--skip-bad-rows", action="store_true", help="leave malformed rows of TRACE out, and count them"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the result as JSON")
    parser.add_argument(
        "--timeline", type=Path, metavar="PATH",
        help="also write what host, device and slots did when, in the Chrome trace format, which Perfetto opens",
    )  # fmt: skip
    parser.add_argument(
        "--timeline-steps", type=positive, default=STEPS, metavar="N",
        help="iterations that the timeline records (default %(default)s)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The command itself; returns the exit status."""
    bad_rows: list[TraceError] = []
    timeline: Timeline | None = None
    unwritten: TimelineError | None = None
    stats: PoolStats | None = None
    try:
        device = chosen_device(arguments.device)
        with ExitStack() as stack:
            if arguments.timeline is not None:  # first: a place that cannot be written is found out at once
                seam = open_device(device)
                timeline = stack.enter_context(Timeline(arguments.timeline, seam, arguments.timeline_steps))
            if arguments.trace is None:
                trace = builtin_trace()[: arguments.requests]
            else:
                on_bad_row = bad_rows.append if arguments.skip_bad_rows else None
                trace = read_trace(arguments.trace, limit=arguments.requests, on_bad_row=on_bad_row)
            settings = Settings(
                max_batch=arguments.max_batch,
                ahead=arguments.ahead,
                kv_tokens=arguments.kv_tokens,
                forward_us=arguments.forward_us,
            )
            scheduler: Scheduler
            if timeline is None:
                pool = stack.enter_context(StagingPool(device, slots=arguments.slots, name="replay"))
                scheduler = Scheduler(trace, pool, settings, check=arguments.check)
            else:
                observed = ObservedPool(timeline, slots=arguments.slots, name="replay")
                pool = stack.enter_context(observed)
                scheduler = ObservedScheduler(timeline, trace, observed, settings, check=arguments.check)
            result = _replay(scheduler, len(trace))
            stats = pool.stats()
    except TimelineError as error:
        if stats is None:
            print(f"replay: {error}", file=sys.stderr)
            return 2
        unwritten, timeline = error, None  # the replay itself was done, and is reported
    except (TraceError, StagingError) as error:
        print(f"replay: {error}", file=sys.stderr)
        _tell_partial(timeline)
        return 2
    except KeyboardInterrupt:
        print("replay: interrupted", file=sys.stderr)
        _tell_partial(timeline)
        return 130
    for bad in bad_rows[:_SHOWN_BAD_ROWS]:
        print(f"left out: {bad.path}, line {bad.line}: {bad.reason}", file=sys.stderr)
    if len(bad_rows) > _SHOWN_BAD_ROWS:
        print(f"left out: {len(bad_rows) - _SHOWN_BAD_ROWS} more rows", file=sys.stderr)
    name = "built-in trace" if arguments.trace is None else arguments.trace.name
    print(report(name, pool, result, stats, len(bad_rows), timeline))
    if arguments.json is not None:
        try:
            arguments.json.write_text(json.dumps(as_json(name, pool, result, stats, len(bad_rows)), indent=2) + "\n")
        except OSError as error:
            print(f"replay: cannot write {arguments.json}: {error.strerror}", file=sys.stderr)
            return 2
    if unwritten is not None:
        print(f"replay: {unwritten}", file=sys.stderr)
        return 2
    return 1 if _mismatches(result) else 0


def report(
    name: str, pool: StagingPool, result: Result, stats: PoolStats, bad_rows: int, timeline: Timeline | None = None
) -> str:
    """The table at the end."""
    lines = [
        ("trace", name + (f" ({bad_rows} malformed rows left out)" if bad_rows else "")),
        ("device", f"{device_name(pool.device)}, host memory {pool.memory}, torch {torch.__version__}"),
        ("requests", f"{result.requests:,} finished, {result.refused:,} refused as too long"),
        ("prompt tokens", f"{result.prompt_tokens:,}, {result.cached_tokens:,} of them cached"),
        ("longest prefix", f"{result.longest_prefix:,} tokens"),
        ("output tokens", f"{result.output_tokens:,}, {result.overrun_tokens:,} more thrown away"),
        ("steps", f"{result.prefill_steps:,} prefill, {result.decode_steps:,} decode, {result.filters:,} filters"),
        ("time", f"{result.wall_ns / 1e9:.1f} s"),
        ("host time per batch built", f"{_each(result.prefill_build_ns, result.prefill_steps)} prefill"),
        ("", f"{_each(result.decode_build_ns, result.decode_steps)} decode"),
        ("", f"{_each(result.filter_ns, result.filters)} filter"),
        ("slots met in flight", f"{stats.met_in_flight:,}"),
        ("mismatches", _mismatch_line(result)),
    ]
    if timeline is not None:
        lines.append(("timeline", _timeline_line(timeline)))
    width = max(len(label) for label, _ in lines) + 2
    table = [f"{label:<{width}}{value}" for label, value in lines]
    numbers = [f"{key} {value:,}" for key, value in stats.as_dict().items() if value]
    table += wrapped(f"{'pool':<{width}}", numbers, width)
    return "\n".join(table)


def as_json(name: str, pool: StagingPool, result: Result, stats: PoolStats, bad_rows: int) -> dict[str, Any]:
    """The result for machines: counts, nanoseconds, bytes."""
    return {
        "trace": name,
        "device": device_name(pool.device),
        "memory": pool.memory,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **attrs.asdict(result),
        "bad_rows": bad_rows,
        "uploads": stats.uploads,
        "in_flight_met": stats.met_in_flight,
        "mismatches": _mismatches(result),
        "mismatches_by_kind": result.mismatches,
        "pool": stats.as_dict(),
    }


def _replay(scheduler: Scheduler, requests: int) -> Result:
    total = requests - scheduler.result.refused
    # disable=None: no bar where the output is no terminal.
    with tqdm(total=total, desc="replay", unit="request", disable=None, leave=False) as bar:
        return scheduler.run(bar.update)


def _timeline_line(timeline: Timeline) -> str:
    return f"{timeline.path}: {timeline.events:,} events of {timeline.iterations:,} iterations"


def _tell_partial(timeline: Timeline | None) -> None:
    """After a replay that was cut off: what was seen until then may be the most telling part."""
    if timeline is not None and timeline.events:
        print(f"replay: the timeline until then: {_timeline_line(timeline)}", file=sys.stderr)


def _mismatches(result: Result) -> int | None:
    return None if result.mismatches is None else sum(result.mismatches.values())


def _mismatch_line(result: Result) -> str:
    if result.mismatches is None:
        return "not checked"
    found = ", ".join(f"{count:,} in {kind}" for kind, count in result.mismatches.items() if count)
    return found or "0: tensors and tokens equal bit for bit"


def _each(total_ns: int, count: int) -> str:
    return f"{total_ns / 1e3 / count:,.0f} us" if count else "no"


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is not 0 or more")
    return value

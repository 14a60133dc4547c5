"""`python -m batching replay`: recorded traffic through the scheduler, checked, by one process or by many ranks."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from batching.arguments import (
    CommandError,
    chosen_device,
    is_out_of_memory,
    lessons,
    number,
    output,
    positive,
    whole,
    write_output,
)
from batching.replay.observe import ObservedPool, ObservedScheduler
from batching.replay.ranks import PATIENCE_S, START_S, Job
from batching.replay.report import RankReport, as_json, differences, job_json, job_report, mismatches, report, row
from batching.replay.scheduler import Result, Scheduler, Settings
from batching.replay.serve import MetricsServer
from batching.replay.timeline import STEPS, Timeline, TimelineError
from batching.replay.trace import TraceError, TraceRequest, builtin_trace, read_trace
from staging import StagingError, StagingPool
from staging._device import open_device

_SHOWN_BAD_ROWS = 5
_MOST_SLOTS = 1024
_MOST_ROWS = 1 << 16
_MOST_AHEAD = 1000
_DAY_S = 86_400
_MINUTE_US = 60_000_000

_DESCRIPTION = """\
Replay recorded traffic through a small scheduler whose every upload goes
through one StagingPool. With --check (the default) each batch is also built the
plain way and by a naive oracle, and tensors and sampled tokens are compared bit
for bit. Started by torchrun, each rank replays on a device of its own, and one
table is printed: docs/multi-gpu.md."""

_EXAMPLES = {
    "replay": "the built-in trace, every batch checked, on the GPU if there is one",
    "replay trace.csv --requests 1000": "the first 1000 requests of a recorded trace",
    "replay --slots 1 --ahead 4 --timeline replay.json": "too few slots; see the waits in https://ui.perfetto.dev",
    "replay trace.jsonl --metrics-port 9400 --metrics-hold 60": "a Prometheus scrapes the run, and its end",
    "replay trace.csv --no-check --json result.json": "no checks, the numbers for a script",
}


def add_parser(commands: Any) -> None:
    """Add `replay` to the subparsers of `python -m batching`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay",
        help="replay recorded traffic through the pool and check every batch",
        description=_DESCRIPTION,
        epilog=lessons(_EXAMPLES, {0: "done, 0 mismatches", 1: "mismatches found"}),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "trace", nargs="?", type=Path, metavar="TRACE",
        help="an Azure CSV or Mooncake JSONL file, recognised by its content; without it a small built-in trace",
    )  # fmt: skip
    parser.add_argument("--requests", type=positive, metavar="N", help="replay the first N requests only")
    parser.add_argument(
        "--skip-bad-rows", action="store_true", help="leave malformed rows of TRACE out, and count them"
    )
    parser.add_argument(
        "--check", action=argparse.BooleanOptionalAction, default=True, help="compare every batch (default), or do not"
    )
    machine = parser.add_argument_group("the scheduler and its pool")
    machine.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda if there is one"
    )
    machine.add_argument(
        "--slots", type=whole(1, _MOST_SLOTS), default=4, metavar="N",
        help="slots of the ring (default %(default)s); it may grow to 2 N",
    )  # fmt: skip
    machine.add_argument(
        "--ahead", type=whole(0, _MOST_AHEAD), default=Settings().ahead, metavar="N",
        help="iterations built before the tokens of one are read (default %(default)s)",
    )  # fmt: skip
    machine.add_argument(
        "--max-batch", type=whole(1, _MOST_ROWS), default=256, metavar="N",
        help="requests in the running batch (default %(default)s)",
    )  # fmt: skip
    machine.add_argument(
        "--kv-tokens", type=whole(1, torch.iinfo(torch.int32).max), metavar="N",
        help="KV indices (default: room for ten of the longest requests)",
    )  # fmt: skip
    machine.add_argument(
        "--forward-us", type=number(0, _MINUTE_US), default=Settings().forward_us, metavar="US",
        help="microseconds that a forward keeps a CUDA device busy (default %(default)g)",
    )  # fmt: skip
    results = parser.add_argument_group("what comes out, besides the table")
    results.add_argument("--json", type=output, metavar="PATH", help="the result as JSON")
    results.add_argument(
        "--timeline", type=Path, metavar="PATH",
        help="what host, device and slots did when, in the Chrome trace format, which Perfetto opens",
    )  # fmt: skip
    results.add_argument(
        "--timeline-steps", type=positive, default=STEPS, metavar="N",
        help="iterations that the timeline records (default %(default)s)",
    )  # fmt: skip
    results.add_argument(
        "--metrics-port", type=whole(0, 65_535), metavar="PORT",
        help="serve the pool's metrics to Prometheus on 127.0.0.1 while the replay runs; 0: a free port, which is "
        "printed (needs the extra 'metrics')",
    )  # fmt: skip
    results.add_argument(
        "--metrics-hold", type=number(0, _DAY_S), default=0, metavar="SECONDS",
        help="keep serving after the table until they were scraped once more, for so many seconds at the most "
        "(default 0)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The command itself, in one process or as one rank of a job; returns the exit status."""
    try:
        job = Job.from_environment()
    except CommandError as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2
    if job is None:
        return _run(arguments, None)
    with job:
        status = _run(arguments, job)
        if job.gathered and status != 130:
            job.leave(status, arguments.metrics_hold + PATIENCE_S)
        return status


def _run(arguments: argparse.Namespace, job: Job | None) -> int:
    who = "replay" if job is None else f"replay: rank {job.rank}"
    speaks = job is None or job.rank == 0
    timeline: Timeline | None = None
    try:
        if job is not None:
            job.join()
            arguments = job.own(arguments)
        _check(arguments)
        device = chosen_device(arguments.device)
        with ExitStack() as stack:
            # First what may not be to be had: a port, a place for the timeline.
            server = None
            if arguments.metrics_port is not None:
                labels = {} if job is None else {"rank": str(job.rank)}
                server = stack.enter_context(MetricsServer(arguments.metrics_port, labels))
                print(f"{who}: metrics at {server.address}", file=sys.stderr, flush=True)
            if arguments.timeline is not None:
                seam = open_device(device)
                timeline = stack.enter_context(Timeline(arguments.timeline, seam, arguments.timeline_steps))
            trace, left_out = _trace(arguments, speaks)
            pool = stack.enter_context(_pool(arguments, device, timeline))
            if server is not None:
                server.show(pool)
            scheduler = _scheduler(arguments, pool, timeline, trace)
            if job is not None:
                job.gather("start", None, START_S)  # all begin together, and find out now whether they can gather
            result = _replay(scheduler, len(trace), speaks)
            stats = pool.stats()
            name = "built-in trace" if arguments.trace is None else arguments.trace.name
            text, document = report(name, pool, result, stats, left_out), as_json(name, pool, result, stats, left_out)
            bad = bool(mismatches(result))
            if job is not None:
                mine = RankReport(job.rank, str(pool.device), document, result, stats)
                ranks = job.gather("result", mine, PATIENCE_S + result.wall_ns / 1e9)
                job.gathered = True
                text, document = job_report(ranks, job.backend), job_json(ranks, job.backend)
                bad = bad or bool(differences(ranks))
            if speaks:
                print(text, flush=True)
                if arguments.json is not None:
                    write_output(arguments.json, json.dumps(document, indent=2) + "\n")
            if server is not None and arguments.metrics_hold:
                server.hold(arguments.metrics_hold)  # before the pool is closed: its slots are in the numbers
        if timeline is not None and speaks:  # it is written when all slots have come back
            print(row("timeline", _timeline_line(timeline)))
        return 1 if bad else 0
    except (CommandError, StagingError, TimelineError, TraceError) as error:
        reason, status = str(error), 2
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = f"{str(error).splitlines()[0]}; use a smaller --max-batch or --kv-tokens, or fewer --requests"
        status = 2
    except KeyboardInterrupt as stopped:
        reason, status = " by ".join(["interrupted", *map(str, stopped.args)]), 130
    print(f"{who}: {reason}", file=sys.stderr)
    if timeline is not None and timeline.events:  # what was seen until then may be the most telling part
        print(f"{who}: the timeline until then: {_timeline_line(timeline)}", file=sys.stderr)
    if job is not None:
        job.fail(reason)
    return status


def _check(arguments: argparse.Namespace) -> None:
    """What no single option shows to be wrong."""
    if arguments.metrics_hold and arguments.metrics_port is None:
        raise CommandError("--metrics-hold keeps metrics up, and none are served; give --metrics-port as well")
    places = [path.absolute() for path in (arguments.json, arguments.timeline) if path is not None]
    if len(set(places)) < len(places):
        raise CommandError(f"--json and --timeline both name {arguments.json}; give each a file of its own")


def _trace(arguments: argparse.Namespace, speaks: bool) -> tuple[list[TraceRequest], int]:
    """The requests, and how many malformed rows were left out; the first of these are told by one who speaks."""
    if arguments.trace is None:
        return builtin_trace()[: arguments.requests], 0
    bad_rows: list[TraceError] = []
    on_bad_row = bad_rows.append if arguments.skip_bad_rows else None
    trace = read_trace(arguments.trace, limit=arguments.requests, on_bad_row=on_bad_row)
    for bad in bad_rows[: _SHOWN_BAD_ROWS if speaks else 0]:
        print(f"left out: {bad.path}, line {bad.line}: {bad.reason}", file=sys.stderr)
    if speaks and len(bad_rows) > _SHOWN_BAD_ROWS:
        print(f"left out: {len(bad_rows) - _SHOWN_BAD_ROWS:,} more rows", file=sys.stderr)
    return trace, len(bad_rows)


def _pool(arguments: argparse.Namespace, device: str, timeline: Timeline | None) -> StagingPool:
    try:
        if timeline is not None:
            return ObservedPool(timeline, slots=arguments.slots, name="replay")
        return StagingPool(device, slots=arguments.slots, name="replay")
    except ValueError as error:  # STAGING_MEMORY is another word
        raise CommandError(str(error)) from error


def _scheduler(
    arguments: argparse.Namespace, pool: StagingPool, timeline: Timeline | None, trace: list[TraceRequest]
) -> Scheduler:
    settings = Settings(
        max_batch=arguments.max_batch,
        ahead=arguments.ahead,
        kv_tokens=arguments.kv_tokens,
        forward_us=arguments.forward_us,
    )
    if timeline is not None and isinstance(pool, ObservedPool):
        return ObservedScheduler(timeline, trace, pool, settings, check=arguments.check)
    return Scheduler(trace, pool, settings, check=arguments.check)


def _replay(scheduler: Scheduler, requests: int, speaks: bool) -> Result:
    total = requests - scheduler.result.refused
    # disable=None: no bar where the output is no terminal.
    with tqdm(total=total, desc="replay", unit="request", disable=None if speaks else True, leave=False) as bar:
        return scheduler.run(bar.update)


def _timeline_line(timeline: Timeline) -> str:
    return f"{timeline.path}: {timeline.events:,} events of {timeline.iterations:,} iterations"

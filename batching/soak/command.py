"""`python -m batching soak`: random traffic through the pool for minutes, every upload checked, a table at the end."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import platform
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from tqdm import tqdm

from batching.arguments import (
    CommandError,
    chosen_device,
    device_name,
    duration,
    is_out_of_memory,
    lessons,
    number,
    output,
    pool_rows,
    positive,
    size,
    table,
    whole,
    write_output,
)
from batching.soak.plain import PlainWay
from batching.soak.traffic import Result, Settings, Soak, open_seam
from staging import StagingError, StagingPool

_PROGRESS_S = 2.0
_TIMEOUT_S = 60.0
"""For a lease. Long: a machine with few cores and many threads may keep one waiting, which is no fault of the pool."""


_MOST_THREADS = 1024
_MOST_SLOTS = 1024
_LEAST_S, _MONTH_S = 0.001, 2_592_000

_DESCRIPTION = """\
Random layouts, sizes, forms of values, threads, streams and delays on one
StagingPool, for minutes. The device works out what each upload should hold, and
counts what differs."""

_EXAMPLES = {
    "soak": "a minute of eight threads, on the GPU if there is one",
    "soak --seconds 300 --threads 24": "longer, with more threads",
    "soak --batches 500 --seed 7": "500 batches of each thread, with the choices of an earlier run",
    "soak --device cuda --no-guard --seconds 10": "the positive control: without its guard the pool must be caught",
    "soak --beside --batches 5000 --no-delays --warm": "host time of the pool beside that of the per-call way",
}


def add_parser(commands: Any) -> None:
    """Add `soak` to the subparsers of `python -m batching`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "soak",
        help="send random batches from many threads through the pool and check every upload on the device",
        description=_DESCRIPTION,
        epilog=lessons(
            _EXAMPLES,
            {
                0: "no mismatch",
                1: "mismatches (with --no-guard on CUDA that is what should come), an error in a thread, "
                "or statistics that do not add up",
                130: "interrupted (Ctrl-C), after a table of what was seen so far",
            },
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    traffic = parser.add_argument_group("the traffic")
    length = traffic.add_mutually_exclusive_group()
    length.add_argument(
        "--seconds", type=number(_LEAST_S, _MONTH_S), default=Settings().seconds, metavar="S",
        help="how long (default %(default)g)",
    )  # fmt: skip
    length.add_argument("--batches", type=positive, metavar="N", help="batches of each thread, in place of --seconds")
    traffic.add_argument(
        "--threads", type=whole(1, _MOST_THREADS), default=Settings().threads, metavar="N",
        help="threads that share the pool (default %(default)s)",
    )  # fmt: skip
    traffic.add_argument("--seed", type=int, metavar="N", help="of every random choice (default: a new one, printed)")
    traffic.add_argument(
        "--delays", action=argparse.BooleanOptionalAction, default=True,
        help="pauses of host and device at random (default), or none, to measure host time",
    )  # fmt: skip
    machine = parser.add_argument_group("the pool")
    machine.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda if there is one"
    )
    machine.add_argument(
        "--slots", type=whole(1, _MOST_SLOTS), default=4, metavar="N", help="slots of the ring (default %(default)s)"
    )
    machine.add_argument(
        "--max-slots", type=whole(1, _MOST_SLOTS), metavar="N", help="how far it may grow (default: twice --slots)"
    )
    machine.add_argument(
        "--warm", action="store_true", help="make all slots, in full size, before the traffic begins"
    )  # fmt: skip
    machine.add_argument(
        "--guard", action=argparse.BooleanOptionalAction, default=True,
        help="ask the event before a slot is reused (default); --no-guard is the positive control: never asked, which "
        "on CUDA must give mismatches within seconds",
    )  # fmt: skip
    machine.add_argument("--debug", action="store_true", help="the pool's debug mode")
    rival = parser.add_argument_group("the per-call way: each field pinned and copied by itself")
    way = rival.add_mutually_exclusive_group()
    way.add_argument("--plain", action="store_true", help="the same batches that way, without a pool")
    way.add_argument("--beside", action="store_true", help="through the pool, then that way")
    results = parser.add_argument_group("what comes out, besides the table")
    results.add_argument("--json", type=output, metavar="PATH", help="the result as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The command itself; returns the exit status."""
    seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
    settings = Settings(
        threads=arguments.threads,
        seconds=arguments.seconds,
        batches=arguments.batches,
        seed=seed,
        delays=arguments.delays,
        warm=arguments.warm,
    )
    results: list[Result] = []
    try:
        if arguments.plain and not arguments.guard:
            raise CommandError("--no-guard takes out the pool's guard, and --plain uses no pool; leave one away")
        try:
            seam = open_seam(chosen_device(arguments.device), guard=arguments.guard)
            pool = StagingPool(
                seam,
                slots=arguments.slots,
                max_slots=arguments.max_slots,
                slot_bytes=16 * 1024,  # small, so that slots are enlarged while others are in flight
                timeout=_TIMEOUT_S,
                debug=arguments.debug or None,
                name="soak",
            )
        except ValueError as error:
            raise CommandError(str(error)) from error
        # Before the traffic: a run that is killed can be repeated too.
        print(f"soak: seed {seed}, {device_name(pool.device)}", file=sys.stderr)
        with _without_dropped_notes(), pool:
            if not arguments.plain:
                results.append(_with_progress(Soak(pool, settings)))
            if arguments.plain or (arguments.beside and not _ended_early(results[0])):
                results.append(_with_progress(Soak(PlainWay(pool.device), settings)))
        print(report(pool.device, settings, results, guard=arguments.guard), flush=True)
        for result in results:
            if result.failure is not None:
                print(f"soak: {result.failure.rstrip()}", file=sys.stderr)
        if arguments.json is not None:
            document = as_json(pool.device, settings, results, guard=arguments.guard)
            write_output(arguments.json, json.dumps(document, indent=2) + "\n")
    except (CommandError, StagingError) as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"soak: {str(error).splitlines()[0]}; use fewer --threads or --slots", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("soak: interrupted", file=sys.stderr)
        return 130
    if any(result.interrupted for result in results):
        print("soak: interrupted", file=sys.stderr)
        return 130
    return 1 if any(result.bad_checks or result.failure is not None for result in results) else 0


def report(device: torch.device, settings: Settings, results: Sequence[Result], *, guard: bool) -> str:
    """The table at the end; with two results, one block for each."""
    lines = [
        ("device", f"{device_name(device)}, torch {torch.__version__}"),
        ("threads", f"{settings.threads}, {'with random delays' if settings.delays else 'without delays'}"),
        ("seed", f"{settings.seed}"),
    ]
    if not guard:
        lines.append(("guard", "taken out: mismatches are what this run is for"))
    for result in results:
        lines += _block(result)
    return table(lines)


def as_json(device: torch.device, settings: Settings, results: Sequence[Result], *, guard: bool) -> dict[str, Any]:
    """The result for machines: counts, nanoseconds, bytes."""
    return {
        "device": device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "guard": guard,
        "settings": attrs.asdict(settings),
        "results": [_as_json(result) for result in results],
    }


def _block(result: Result) -> list[tuple[str, str]]:
    ways = {"pool": "through the pool", "plain": "per call: each field pinned and copied by itself"}
    lines = [
        ("way", f"{ways[result.way]}, host memory {result.memory}"),
        ("time", duration(result.wall_ns) + (", ended early" if _ended_early(result) else "")),
        ("batches", f"{result.batches:,} begun, {result.uploads:,} uploaded"),
        ("uploaded", f"{result.fields:,} fields, {size(result.bytes)}"),
    ]
    if result.stats is not None:
        lines += pool_rows(result.stats)
    return [
        *lines,
        ("pinned allocations" if result.memory == "pinned" else "host allocations", _allocations_line(result)),
        ("host time per batch", _host_line(result)),
        ("mismatches", _mismatch_line(result)),
    ]


def _allocations_line(result: Result) -> str:
    if result.allocations is None:
        return "not counted"
    before, warm, after = result.allocations
    return f"{after:,} after the warm-up; {before:,} before the first batch, {warm:,} in the first tenth"


def _host_us(result: Result) -> dict[str, float]:
    """Microseconds; empty when nothing was measured."""
    if not len(result.host_ns):
        return {}
    parts = {"median": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
    values = np.quantile(result.host_ns, list(parts.values())) / 1e3
    return dict(zip(parts, values.tolist(), strict=True))


def _host_line(result: Result) -> str:
    return ", ".join(f"{name} {duration(us * 1e3)}" for name, us in _host_us(result).items()) or "not measured"


def _mismatch_line(result: Result) -> str:
    if result.bad_checks is None:
        return "not known: the device could not be asked"
    if not result.bad_checks:
        return f"0 in {result.checks:,} checks of whole uploads"
    return (
        f"{result.bad_checks:,} of {result.checks:,} checks, {result.bad_elements:,} elements; "
        f"stamps are {result.lowest:+,} to {result.highest:+,} uploads away (above 0: a later batch's)"
    )


def _ended_early(result: Result) -> bool:
    return result.interrupted or result.failure is not None


def _as_json(result: Result) -> dict[str, Any]:
    numbers = attrs.asdict(result, filter=attrs.filters.exclude("host_ns", "stats"))
    return {
        **numbers,
        "host_us": _host_us(result),
        "host_samples": len(result.host_ns),
        "pool": None if result.stats is None else result.stats.as_dict(),
    }


def _with_progress(soak: Soak) -> Result:
    settings = soak.settings
    in_batches = settings.batches is not None
    total = settings.batches * settings.threads if settings.batches is not None else round(settings.seconds)
    # disable=None: no bar where the output is no terminal.
    with tqdm(total=total, desc="soak", unit="batch" if in_batches else "s", disable=None, leave=False) as bar:
        shown = time.monotonic()

        def show(soak: Soak) -> None:
            nonlocal shown
            if bar.disable or time.monotonic() - shown < _PROGRESS_S:
                return
            shown = time.monotonic()
            bar.n = min(total, soak.batches if in_batches else int(soak.seconds))
            bar.set_postfix(batches=f"{soak.batches:,}", wrong=f"{soak.mismatches():,}")

        return soak.run(show)


@contextlib.contextmanager
def _without_dropped_notes() -> Iterator[None]:
    """The soak drops leases by the hundred, and the pool notes each in the log: these notes alone are kept out."""

    def wanted(record: logging.LogRecord) -> bool:
        return "was dropped without upload or discard" not in record.getMessage()

    log = logging.getLogger("staging")
    log.addFilter(wanted)
    try:
        yield
    finally:
        log.removeFilter(wanted)

"""`python -m batching soak`: random traffic through the pool for minutes, every upload checked, a table at the end."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import platform
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from tqdm import tqdm

from batching.arguments import chosen_device, device_name, positive, wrapped
from batching.soak.plain import PlainWay
from batching.soak.traffic import Result, Settings, Soak, open_seam
from staging import StagingError, StagingPool

_PROGRESS_S = 2.0
_TIMEOUT_S = 60.0
"""For a lease. Long: a machine with few cores and many threads may keep one waiting, which is no fault of the pool."""


def add_parser(commands: Any) -> None:
    """Add `soak` to the subparsers of `python -m batching`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "soak",
        help="send random batches from many threads through the pool and check every upload on the device",
        description="Random layouts, sizes, forms of values, threads, streams and delays on one StagingPool, for "
        "minutes. The device works out what each upload should hold, and counts what differs.",
        epilog="Exit status: 0 no mismatch, 1 mismatches (with --no-guard on CUDA that is what should come) or an "
        "error in a thread, 2 the soak could not be run, 130 interrupted; the table then shows what was seen so far.",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda if there is one"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=_seconds, default=Settings().seconds, metavar="S", help="default 60")
    length.add_argument("--batches", type=positive, metavar="N", help="batches of each thread, in place of --seconds")
    parser.add_argument("--threads", type=positive, default=Settings().threads, metavar="N", help="default 8")
    parser.add_argument("--slots", type=positive, default=4, metavar="N", help="slots of the ring (default 4)")
    parser.add_argument("--max-slots", type=positive, metavar="N", help="how far it may grow (default: twice --slots)")
    parser.add_argument("--seed", type=int, metavar="N", help="of every random choice (default: a new one, printed)")
    parser.add_argument(
        "--delays", action=argparse.BooleanOptionalAction, default=True,
        help="pauses of host and device at random (default), or none, to measure host time",
    )  # fmt: skip
    parser.add_argument(
        "--warm", action="store_true", help="make all slots, in full size, before the traffic begins"
    )  # fmt: skip
    parser.add_argument(
        "--guard", action=argparse.BooleanOptionalAction, default=True,
        help="ask the event before a slot is reused (default); --no-guard is the positive control: never asked, which "
        "on CUDA must give mismatches within seconds",
    )  # fmt: skip
    parser.add_argument("--debug", action="store_true", help="the pool's debug mode")
    way = parser.add_mutually_exclusive_group()
    way.add_argument(
        "--plain", action="store_true", help="the same batches the per-call way: each field pinned and copied by itself"
    )
    way.add_argument("--beside", action="store_true", help="through the pool, then the per-call way")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the result as JSON")
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
            raise StagingError("--no-guard takes out the pool's guard, and --plain uses no pool; leave one away")
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
            raise StagingError(str(error)) from error
        # Before the traffic: a run that is killed can be repeated too.
        print(f"soak: seed {seed}, {device_name(pool.device)}", file=sys.stderr)
        with _without_dropped_notes(), pool:
            if not arguments.plain:
                results.append(_with_progress(Soak(pool, settings)))
            if arguments.plain or (arguments.beside and not _ended_early(results[0])):
                results.append(_with_progress(Soak(PlainWay(pool.device), settings)))
    except StagingError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("soak: interrupted", file=sys.stderr)
        return 130
    print(report(pool.device, settings, results, guard=arguments.guard))
    for result in results:
        if result.failure is not None:
            print(f"soak: {result.failure.rstrip()}", file=sys.stderr)
    if arguments.json is not None:
        try:
            document = as_json(pool.device, settings, results, guard=arguments.guard)
            arguments.json.write_text(json.dumps(document, indent=2) + "\n")
        except OSError as error:
            print(f"soak: cannot write {arguments.json}: {error.strerror}", file=sys.stderr)
            return 2
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
    width = max(len(label) for label, _ in lines) + 2
    table = [f"{label:<{width}}{value}" for label, value in lines]
    for result in results:
        if result.stats is not None:
            numbers = [f"{key} {value:,}" for key, value in result.stats.as_dict().items() if value]
            table += wrapped(f"{'pool':<{width}}", numbers, width)
    return "\n".join(table)


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
        ("time", f"{result.wall_ns / 1e9:.1f} s" + (", ended early" if _ended_early(result) else "")),
        ("batches", f"{result.batches:,} begun, {result.uploads:,} uploaded"),
        ("uploaded", f"{result.fields:,} fields, {result.bytes:,} bytes"),
    ]
    stats = result.stats
    if stats is not None:
        outcomes = ("ready", "grown", "waited", "empty", "timed_out", "refused")
        counted = ((name, getattr(stats, f"leases_{name}")) for name in outcomes)
        lines += [
            ("leases", ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counted)),
            ("given back", f"{stats.discards:,} discarded, {stats.dropped:,} dropped"),
            ("slots met in flight", f"{stats.met_in_flight:,}"),
        ]
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
    return ", ".join(f"{name} {value:,.0f} us" for name, value in _host_us(result).items()) or "not measured"


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


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value

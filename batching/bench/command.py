"""`python -m batching bench`: rivals and ours, compared, then timed, with tables at the end."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from batching.arguments import chosen_device, positive
from batching.bench.document import DocumentError, load, parse
from batching.bench.page import page
from batching.bench.report import as_json, markdown
from batching.bench.sections import SECTIONS, Settings, bench_pool, compare_all, steps, time_all
from batching.bench.timing import Machine
from staging import StagingError, StagingPool

_MOST_ROWS = 1 << 16
_LEAST_REPEATS = 5


def add_parser(commands: Any) -> None:
    """Add `bench` to the subparsers of `python -m batching`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="measure the pool beside the ways engines upload today",
        description="Build the same batches in every way that engines use today and through a StagingPool; compare the "
        "results bit for bit, then time them. Tables are Markdown.",
        epilog="Exit status: 0 done, 1 results differ (nothing is timed then), 2 the benchmark could not be run.",
    )
    default = Settings()
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda if there is one"
    )
    parser.add_argument(
        "--rows", type=_rows, default=default.rows, metavar="N,N,…",
        help=f"requests in a batch (default {','.join(map(str, default.rows))})",
    )  # fmt: skip
    parser.add_argument(
        "--sections", type=_sections, default=SECTIONS, metavar="NAME,NAME,…",
        help=f"what to measure (default: all, {','.join(SECTIONS)})",
    )  # fmt: skip
    parser.add_argument(
        "--repeats", type=positive, default=default.repeats, metavar="N",
        help=f"repeats whose medians are compared (default %(default)s; fewer than {_LEAST_REPEATS} show nothing)",
    )  # fmt: skip
    parser.add_argument(
        "--batches", type=positive, default=default.batches, metavar="N",
        help="batches in each repeat (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--queued-batches", type=positive, default=default.queued_batches, metavar="N",
        help="batches in each repeat behind queued work (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=default.seed, metavar="N", help="of the generated requests")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the result as JSON")
    parser.add_argument(
        "--report", type=Path, metavar="PATH", help="also write one HTML page: before and after as a timeline, charts"
    )
    parser.add_argument(
        "--from", type=Path, dest="kept", metavar="PATH",
        help="measure nothing: write the page of --report from a result that --json kept",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The command itself; returns the exit status."""
    settings = Settings(
        rows=arguments.rows,
        repeats=arguments.repeats,
        batches=arguments.batches,
        queued_batches=arguments.queued_batches,
        sections=arguments.sections,
        seed=arguments.seed,
    )
    asked_to_measure = settings != Settings() or arguments.device != "auto" or arguments.json is not None
    mistake = _mistake(arguments.json, arguments.report, arguments.kept, asked_to_measure)
    if mistake:
        print(f"bench: {mistake}", file=sys.stderr)
        return 2  # now, rather than after minutes of measuring
    try:
        if arguments.kept is not None:
            _write(arguments.report, page(load(arguments.kept)))
            return 0
        with bench_pool(chosen_device(arguments.device)) as pool:
            return _run(pool, settings, arguments.json, arguments.report)
    except (DocumentError, _NotWritten) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except (StagingError, torch.OutOfMemoryError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        return 130


def _mistake(json_path: Path | None, report: Path | None, kept: Path | None, asked_to_measure: bool) -> str | None:
    """What is wrong with the paths, if anything."""
    if kept is not None and report is None:
        return f"--from {kept} says what to make a page of; say where with --report PATH"
    if kept is not None and asked_to_measure:
        return f"--from {kept} measures nothing; leave out every option but --report"
    given = [path for path in (json_path, report, kept) if path is not None]
    if len({path.resolve() for path in given}) < len(given):
        return f"{report} would be written over the result; give --report a path of its own"
    for path in (json_path, report):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            return f"cannot write {path}: it is a folder, or its folder does not exist"
    return None


def _run(pool: StagingPool, settings: Settings, json_path: Path | None, report: Path | None) -> int:
    machine = Machine(pool.device)
    # disable=None: no bar where the output is no terminal.
    with tqdm(total=steps(settings, pool.device), desc="bench", unit="step", disable=None, leave=False) as bar:
        found = compare_all(machine, pool, settings, bar.update)
        if found:
            bar.close()
            for line in found:
                print(f"bench: results differ: {line}", file=sys.stderr)
            return 1
        results = time_all(machine, pool, settings, bar.update)
    about = _about(pool, settings)
    print(markdown(about, settings, results))
    document = json.dumps(as_json(about, settings, results), indent=2) + "\n"
    if json_path is not None:
        _write(json_path, document)
    if report is not None:
        _write(report, page(parse(json.loads(document))))  # from what is kept, so that both ways make the same page
    return 0


class _NotWritten(Exception):
    """A file that could not be written, and why."""


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", errors="replace")  # JSON knows halves of surrogate pairs
    except OSError as error:
        raise _NotWritten(f"cannot write {path}: {error.strerror}") from error


def _about(pool: StagingPool, settings: Settings) -> dict[str, Any]:
    device = pool.device
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else "cpu, nothing is pinned",
        "cuda": torch.version.cuda if cuda else None,
        "host memory": pool.memory,
        "processor": f"{_processor()}, {os.cpu_count()} virtual cores",
        "torch threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "numpy": np.__version__,
        "commit": _commit(),
        "repeats": settings.repeats,
        "batches in a repeat": f"{settings.batches}, {settings.queued_batches} behind queued work",
        "seed": settings.seed,
        "compared": "every result bit for bit before timing: equal",
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of this checkout, if it is one and git is there."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _rows(text: str) -> tuple[int, ...]:
    rows = [positive(part) for part in text.split(",")]
    for one in rows:
        if one > _MOST_ROWS:
            raise argparse.ArgumentTypeError(f"{one} rows are more than {_MOST_ROWS}")
    return tuple(dict.fromkeys(rows))


def _sections(text: str) -> tuple[str, ...]:
    names = text.split(",")
    for name in names:
        if name not in SECTIONS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(SECTIONS)}")
    return tuple(dict.fromkeys(names))

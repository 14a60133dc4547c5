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
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The command itself; returns the exit status."""
    path: Path | None = arguments.json
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        print(f"bench: cannot write {path}: it is a folder, or its folder does not exist", file=sys.stderr)
        return 2  # now, rather than after minutes of measuring
    settings = Settings(
        rows=arguments.rows,
        repeats=arguments.repeats,
        batches=arguments.batches,
        queued_batches=arguments.queued_batches,
        sections=arguments.sections,
        seed=arguments.seed,
    )
    try:
        with bench_pool(chosen_device(arguments.device)) as pool:
            return _run(pool, settings, path)
    except (StagingError, torch.OutOfMemoryError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        return 130


def _run(pool: StagingPool, settings: Settings, path: Path | None) -> int:
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
    if path is not None:
        try:
            path.write_text(json.dumps(as_json(about, settings, results), indent=2) + "\n")
        except OSError as error:
            print(f"bench: cannot write {path}: {error.strerror}", file=sys.stderr)
            return 2
    return 0


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

"""Everything that has to be seen on a GPU, in sections; each one's output is kept as a file, and a summary as JSON.

python tests/run_gpu.py --out results                      # all sections, about half an hour
python tests/run_gpu.py --out results suite soak           # some of them
python tests/run_gpu.py --list

A section is one command with a time limit. It is as it should be when its exit status is the expected one: the soak
without its guard has to find mismatches. Exits 0 only when all are.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
SUITE = (PYTHON, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider")
SOAK = (PYTHON, "-m", "batching", "soak", "--device", "cuda")
KERNEL_TESTS = ("-k", "naive_loop or one_compiled or 64_bits")  # those that hold no stream


def words(*texts: str) -> tuple[str, ...]:
    """Command lines without quotes, as arguments."""
    return tuple(word for text in texts for word in text.split())


@attrs.frozen
class Section:
    """One command."""

    why: str
    command: tuple[str, ...]
    limit_s: int
    environment: dict[str, str] = attrs.Factory(dict)
    expected: int = 0


def allocator(setting: str) -> dict[str, str]:
    """torch's allocator, under both names of its variable."""
    return {"PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting}


SECTIONS = {
    "suite": Section("the GPU tests, torch's own allocator", SUITE, 300),
    "suite-expandable": Section("the same, expandable segments", SUITE, 300, allocator("expandable_segments:True")),
    "suite-async": Section("the same, cudaMallocAsync", SUITE, 300, allocator("backend:cudaMallocAsync")),
    "coverage": Section(
        "lines that the GPU tests run, beside those of docs/coverage.md",
        (*SUITE, "--cov", "--cov-report=term-missing:skip-covered"),
        400,
    ),
    "sanitizer": Section(
        "compute-sanitizer memcheck on the kernel's tests, every tensor an allocation of its own",
        words(
            "compute-sanitizer --tool memcheck --error-exitcode 9",
            f"{PYTHON} -m pytest -q -p no:cacheprovider tests/gpu/test_gpu_batch.py",
        )
        + KERNEL_TESTS,
        400,
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    ),
    "soak": Section("five minutes of random traffic", (*SOAK, "--seconds", "310", "--json", "{out}/soak.json"), 400),
    "soak-control": Section(
        "the same without the guard, which has to find mismatches",
        (*SOAK, "--seconds", "10", "--no-guard", "--json", "{out}/soak-control.json"),
        90,
        expected=1,
    ),
    "threads": Section(
        "24 threads x 5,000 batches: host time and pinned allocations, beside the per-call way's",
        (
            PYTHON,
            "-m",
            "batching",
            "bench",
            "--device",
            "cuda",
            "--sections",
            "threads",
            "--json",
            "{out}/threads.json",
        ),
        200,
    ),
    "bench": Section(
        "ours beside every rival",
        (PYTHON, "-m", "batching", "bench", "--device", "cuda", "--json", "{out}/bench.json"),
        500,
    ),
    "replay": Section(
        "the built-in trace, checked",
        (PYTHON, "-m", "batching", "replay", "--device", "cuda", "--json", "{out}/replay.json"),
        120,
    ),
}


def run(name: str, section: Section, out: Path) -> dict[str, object]:
    """Run one section; what it printed is in `<name>.txt`."""
    command = [part.replace("{out}", str(out)) for part in section.command]
    start = time.monotonic()
    if shutil.which(command[0]) is None:
        return {"as_expected": False, "status": None, "seconds": 0, "why": f"{command[0]} is not there"}
    with (out / f"{name}.txt").open("w") as file:
        try:
            status: int | None = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **section.environment},
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=section.limit_s,
            ).returncode
        except subprocess.TimeoutExpired:
            status = None
    seconds = round(time.monotonic() - start, 1)
    return {"as_expected": status == section.expected, "status": status, "seconds": seconds, "why": section.why}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run everything that has to be seen on a GPU.")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"some of {', '.join(SECTIONS)}; all by default")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder for outputs (gpu-results)")
    parser.add_argument("--list", action="store_true", help="say what there is")
    chosen = parser.parse_args(arguments)
    unknown = [name for name in chosen.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"there is no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    if chosen.list:
        for name, section in SECTIONS.items():
            print(f"{name}: {section.why}")
        return 0
    if subprocess.run([PYTHON, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]).returncode:
        parser.error("torch sees no CUDA device here: the tests would all be skipped")
    out: Path = chosen.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    summary: dict[str, object] = {}
    good = True
    for name in chosen.sections or SECTIONS:
        result = run(name, SECTIONS[name], out)
        good = good and bool(result["as_expected"])
        summary[name] = result
        word = "as expected" if result["as_expected"] else "NOT AS EXPECTED"
        print(f"{name}: {word}, status {result['status']}, {result['seconds']} s", flush=True)
        (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

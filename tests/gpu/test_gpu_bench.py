"""The benchmark on a real device: every strategy and both kernels right, the clocks usable, the command whole."""

from __future__ import annotations

import json

import pytest
import torch

from batching.__main__ import main
from batching.bench import kernels, prefill, strategies
from batching.bench.kernels import Case, Shape
from batching.bench.sections import SECTIONS, THREADS, bench_pool, compare
from batching.bench.timing import Machine, gpu_time


@pytest.mark.parametrize("make", [strategies.contenders, prefill.contenders])
@pytest.mark.parametrize("rows", [1, 3, 64, 1024])
def test_every_strategy_builds_what_the_oracle_says(make, rows):
    """On the device, bit for bit, with the copies that it says it makes."""
    with bench_pool("cuda") as pool:
        machine = Machine(pool.device)
        for runner in make(pool.device, pool, rows, 7):
            assert compare(runner, machine) == [], runner.name


@pytest.mark.parametrize(
    "shape",
    [Shape((0,), 128), Shape((5, 0, 1025), 513), Shape((64,) * 300, 8), Shape((20_000,) + (3,) * 99, 1)],
    ids=lambda shape: f"{len(shape.prefixes)} requests",
)
def test_both_kernels_write_the_expected_table(shape):
    """Compiled, not interpreted."""
    with bench_pool("cuda") as pool:
        assert Case(shape, pool).differences() == []


def test_one_variant_of_our_kernel_serves_all():
    """1 to 2048 requests, odd context lengths: right, and compiled once."""
    with bench_pool("cuda") as pool:
        assert kernels.exercise_variants(pool) == []
    assert kernels.variants() in (1, None)


def test_a_hold_lasts_as_long_as_it_says():
    """Within a factor of two: the host must finish a batch well inside of it."""
    machine = Machine(torch.device("cuda", torch.cuda.current_device()))
    begin = machine.mark()
    machine.hold(0.010)
    end = machine.mark()
    machine.settle()
    assert 5 < begin.elapsed_time(end) < 20


def test_gpu_time_is_of_the_gpu_and_says_where_the_host_waits():
    """A copy queued behind a hold has a time; one the host waits in has none."""
    machine = Machine(torch.device("cuda", torch.cuda.current_device()))
    source = torch.zeros(4096, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(4096, dtype=torch.uint8, device="cuda")
    numbers = gpu_time(machine, lambda: target.copy_(source, non_blocking=True), 20, 3)
    assert numbers is not None
    assert len(numbers) == 3
    assert min(numbers) > 0
    assert gpu_time(machine, lambda: target.copy_(source, non_blocking=False), 20, 1) is None


def test_the_command_runs_whole(tmp_path, capsys):
    """All sections but one that takes minutes, with little to do; ours never waits behind queued work."""
    path = tmp_path / "bench.json"
    few = ["--rows", "1,16", "--repeats", "2", "--batches", "4", "--queued-batches", "2"]
    few += ["--sections", ",".join(section for section in SECTIONS if section != THREADS)]
    assert main(["bench", "--device", "cuda", *few, "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    for part in ("## Host time behind queued work", "## GPU time of the copies", "## `write_cache_indices`"):
        assert part in printed
    assert "## What was to be shown" in printed
    found = json.loads(path.read_text())
    for name in (strategies.OURS_COLUMNS, strategies.OURS_RECORDS, strategies.FIXED_RECORDS):
        assert found["queued"]["16"][name]["still_busy"] == 4
    assert found["queued"]["16"][strategies.ON_DEVICE]["still_busy"] == 0
    assert found["host memory"] == "pinned"

"""What is measured, section by section: first compared, then timed. Everything returns plain numbers."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from batching.bench import kernels, observing, prefill, strategies, threads
from batching.bench.batches import differences, expected_flags, flags_of, make_requests
from batching.bench.strategies import Contender
from batching.bench.timing import Machine, NoCollection, Samples, gpu_time, measure
from batching.params import DEFAULT_SEED, SAMPLING, SamplingParams
from staging import PoolStats, StagingPool

HOST, QUEUED, COPIES, PREFILL, KERNEL, PACKING = "host", "queued", "copies", "prefill", "kernel", "packing"
PARTS, OBSERVING, THREADS = "parts", "observing", "threads"
SECTIONS = (HOST, QUEUED, COPIES, PREFILL, KERNEL, PACKING, PARTS, OBSERVING, THREADS)
NEEDS_GPU = {
    QUEUED: "there is no queue that the host could run ahead of",
    COPIES: "there are no events to time copies with",
    KERNEL: "the kernels are for a GPU",
    THREADS: "nothing is pinned",
}
"""Sections that are left out on the CPU, and why."""

_QUEUED_COPIES = 20
"""Batches of uploads that are timed together on the GPU; our pool gets as many slots there."""
_PACKED = 256
_FEW_ROWS = (1, 16, 256)


@attrs.frozen
class Settings:
    """How much is measured, and on what."""

    rows: tuple[int, ...] = (1, 4, 16, 64, 256, 1024)
    repeats: int = 7
    batches: int = 200
    queued_batches: int = 6
    sections: tuple[str, ...] = SECTIONS
    threads: int = 24
    thread_batches: int = 5000
    seed: int = 0
    shapes: tuple[kernels.Shape, ...] = kernels.SHAPES

    @property
    def few_rows(self) -> tuple[int, ...]:
        """Enough to show what depends little on them."""
        return tuple(rows for rows in self.rows if rows in _FEW_ROWS) or self.rows[:1]

    def has(self, section: str, device: torch.device) -> bool:
        return section in self.sections and (device.type == "cuda" or section not in NEEDS_GPU)


ByRows = dict[int, dict[str, Samples]]


@attrs.define
class Results:
    """What was measured; a section that was not run is None."""

    host: ByRows | None = None
    queued: ByRows | None = None
    copies: dict[int, dict[str, list[float] | None]] | None = None
    prefill: ByRows | None = None
    kernel: dict[str, dict[str, list[float] | None]] | None = None
    kernel_variants: int | None = None
    packing: dict[str, list[float]] | None = None
    parts: dict[int, dict[str, list[float]]] | None = None
    observing: ByRows | None = None
    threads: dict[str, threads.Threaded] | None = None
    copies_per_batch: dict[str, int] = attrs.Factory(dict)
    pool: PoolStats | None = None
    """What our pool counted over the sections host, queued and prefill."""


# ---------------------------------------------------------------------- comparing


def compare(runner: Contender, machine: Machine) -> list[str]:
    """What this strategy gets wrong, over each of its batches twice; empty when every byte and flag is right."""
    found: list[str] = []
    before: tuple[Any, Any] | None = None
    for _ in range(2 * len(runner.batches)):
        batch = next(runner.turn)
        uploads = runner.pool.stats().uploads if runner.pool else 0
        tensors = runner.build(batch)
        if runner.pool and runner.pool.stats().uploads - uploads != runner.copies:
            found.append(f"the pool made {runner.pool.stats().uploads - uploads} copies, not {runner.copies}")
        machine.settle()
        wanted = runner.expected(batch)
        found += differences(tensors, wanted, machine.device)
        if before is not None and runner.owned:
            found += [f"after the next batch: {line}" for line in differences(*before, machine.device)]
        before = tensors, wanted
        flags, right = flags_of(batch), expected_flags(batch.requests)
        if flags != right:
            found.append(f"flags are {flags}, not {right}")
    return found


def _compare_observed(machine: Machine, settings: Settings) -> list[str]:
    with observing.contenders(machine.device, settings.few_rows[0], settings.seed) as runners:
        return [f"observing, {runner.name}: {line}" for runner in runners for line in compare(runner, machine)[:1]]


def compare_all(machine: Machine, pool: StagingPool, settings: Settings, step: Callable[[], None]) -> list[str]:
    """The first difference of each strategy at each number of rows, and of each kernel at each shape."""
    found: list[str] = []
    device = machine.device
    kinds: list[tuple[str, Callable[..., list[Contender]]]] = []
    if any(settings.has(section, device) for section in (HOST, QUEUED, COPIES)):
        kinds.append(("columns", strategies.contenders))
    if settings.has(PREFILL, device):
        kinds.append(("prefill", prefill.contenders))
    for rows in settings.rows:
        for kind, make in kinds:
            for runner in make(device, pool, rows, settings.seed):
                lines = compare(runner, machine)
                found += [f"{kind}, {rows} rows, {runner.name}: {line}" for line in lines[:1]]
        step()
    if settings.has(OBSERVING, device):
        found += _compare_observed(machine, settings)
    if settings.has(KERNEL, device):
        for shape in settings.shapes:
            found += [f"kernel, {shape.label}: {line}" for line in kernels.Case(shape, pool).differences()[:1]]
            step()
        found += [f"kernel, {line}" for line in kernels.exercise_variants(pool)]
    return found


# ---------------------------------------------------------------------- timing


def steps(settings: Settings, device: torch.device) -> int:
    """How often the progress bar moves."""
    rows = len(settings.rows)
    columns = rows * settings.repeats * 16
    shapes = len(settings.shapes)
    return (
        rows
        + (shapes + shapes if settings.has(KERNEL, device) else 0)
        + columns * settings.has(HOST, device)
        + columns * settings.has(QUEUED, device)
        + rows * 16 * settings.has(COPIES, device)
        + rows * settings.repeats * 10 * settings.has(PREFILL, device)
        + settings.repeats * settings.has(PACKING, device)
        + len(settings.few_rows) * settings.has(PARTS, device)
        + len(settings.few_rows) * settings.has(OBSERVING, device)
        + 3 * settings.has(THREADS, device)
    )


def time_all(machine: Machine, pool: StagingPool, settings: Settings, step: Callable[[], None]) -> Results:
    """Every section that was asked for and that the device can show."""
    device = machine.device
    results = Results()
    for section, make in ((HOST, strategies.contenders), (PREFILL, prefill.contenders)):
        if settings.has(section, device):
            found: ByRows = {}
            for rows in settings.rows:
                runners = make(device, pool, rows, settings.seed)
                results.copies_per_batch.update({runner.name: runner.copies for runner in runners})
                found[rows] = measure(
                    machine, runners, repeats=settings.repeats, batches=settings.batches, queued=False, step=step
                )
            setattr(results, section, found)
    if settings.has(QUEUED, device):
        results.queued = {
            rows: measure(
                machine,
                strategies.contenders(device, pool, rows, settings.seed),
                repeats=settings.repeats,
                batches=settings.queued_batches,
                queued=True,
                step=step,
            )
            for rows in settings.rows
        }
    results.pool = pool.stats()
    if settings.has(COPIES, device):
        results.copies = _time_copies(machine, settings, step)
    if settings.has(KERNEL, device):
        _time_kernels(machine, pool, settings, results, step)
    if settings.has(PACKING, device):
        results.packing = _time_packing(settings, step)
    if settings.has(PARTS, device):
        results.parts = {}
        for rows in settings.few_rows:
            results.parts[rows] = observing.parts(
                machine, pool, rows, settings.seed, settings.repeats, settings.batches
            )
            step()
    if settings.has(OBSERVING, device):
        results.observing = {}
        for rows in settings.few_rows:
            with observing.contenders(device, rows, settings.seed) as runners:
                results.observing[rows] = measure(
                    machine,
                    runners,
                    repeats=settings.repeats,
                    batches=settings.batches,
                    queued=False,
                    step=lambda: None,
                )
            step()
    if settings.has(THREADS, device):
        results.threads = {}
        with threads.threads_pool(device, settings.threads) as deep:
            for name, build in threads.ways(device, deep).items():
                results.threads[name] = threads.run(
                    device, build, settings.threads, settings.thread_batches, settings.seed
                )
                step()
    return results


def _time_copies(
    machine: Machine, settings: Settings, step: Callable[[], None]
) -> dict[int, dict[str, list[float] | None]]:
    """GPU microseconds of what one batch queues: its copies and the events behind them."""
    numbers: dict[int, dict[str, list[float] | None]] = {}
    # As many slots as batches are queued behind the hold: the ring would rightly make the host wait otherwise.
    slots = _QUEUED_COPIES + 2
    with NoCollection(), StagingPool(machine.device, slots=slots, name="bench copies") as pool:
        for rows in settings.rows:
            numbers[rows] = {}
            for runner in strategies.contenders(machine.device, pool, rows, settings.seed):
                build, turn = runner.build, runner.turn

                def action(build: strategies.Build = build, turn: Iterator[Any] = turn) -> object:
                    return build(next(turn))

                numbers[rows][runner.name] = gpu_time(machine, action, _QUEUED_COPIES, settings.repeats)
                step()
    return numbers


def _time_kernels(
    machine: Machine, pool: StagingPool, settings: Settings, results: Results, step: Callable[[], None]
) -> None:
    results.kernel = {}
    for shape in settings.shapes:
        with NoCollection():
            results.kernel[shape.label] = kernels.time_shape(machine, kernels.Case(shape, pool), settings.repeats)
        step()
    results.kernel_variants = kernels.variants()


def _time_packing(settings: Settings, step: Callable[[], None]) -> dict[str, list[float]]:
    """Host microseconds for one request, by what is done: a median over rounds for each repeat."""
    params = [request.params for request in make_requests(_PACKED, settings.seed)]
    dice = random.Random(settings.seed)
    pointers = [dice.randrange(1 << 47) for _ in params]
    values: list[dict[str, Any]] = [
        {
            "temperature": one.temperature,
            "top_p": one.top_p,
            "top_k": one.top_k,
            "min_p": one.min_p,
            "sampling_seed": one.sampling_seed,
        }
        for one in params
    ]
    fields = [
        {
            "temperatures": one.temperature,
            "top_ps": one.top_p,
            "top_ks": one.top_k,
            "min_ps": one.min_p,
            "sampling_seed": DEFAULT_SEED if one.sampling_seed is None else one.sampling_seed,
        }
        for one in params
    ]

    def checked_and_packed() -> object:
        return [SamplingParams(**keywords) for keywords in values]

    def packed() -> object:
        return [SAMPLING.pack(**keywords) for keywords in fields]

    def with_pointer() -> object:
        return [one.record + pointer.to_bytes(8, "little") for one, pointer in zip(params, pointers, strict=True)]

    work = {"SamplingParams(...)": checked_and_packed, "SAMPLING.pack": packed, "pointer": with_pointer}
    numbers: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(settings.repeats):
        for name, action in work.items():
            rounds = []
            for _ in range(max(3, settings.batches // 20)):
                start = time.perf_counter_ns()
                action()
                rounds.append(time.perf_counter_ns() - start)
            numbers[name].append(statistics.median(rounds) / 1e3 / _PACKED)
        step()
    return numbers


@contextmanager
def bench_pool(device: str | torch.device) -> Iterator[StagingPool]:
    """The pool that is measured: as deep as a pool is by default, one slot large enough for the largest batch."""
    with StagingPool(device, name="bench", slot_bytes=1 << 20) as pool:
        pool.warm()
        yield pool


def medians(numbers: Sequence[float]) -> tuple[float, float, float]:
    """Median, lowest, highest."""
    return statistics.median(numbers), min(numbers), max(numbers)

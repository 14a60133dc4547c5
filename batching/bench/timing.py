"""The clocks: host time of one build, and GPU time of what it queued."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from batching.bench.batches import flags_of
from batching.bench.strategies import Contender

BUSY_SECONDS = 0.010
"""How much GPU work is queued before each batch of the section "queued"."""
SETTLE_EVERY = 4
"""Batches between two synchronisations where the queue is to stay shallow; as many as a ring has slots."""
_WARM_UP = 10
_LONGEST_HOLD = 0.5


@attrs.define
class Samples:
    """Nanoseconds of every batch, by repeat, and what is printed of them."""

    repeats: list[list[int]] = attrs.Factory(list)
    rounds: list[list[float]] = attrs.Factory(list)
    """The means of each round of them, where batches are timed in rounds: what only one batch of a round pays, as the
    question whether copies are done, is a part of it. Of these the medians are."""
    quiet: list[list[int]] = attrs.Factory(list)
    """Of the section "queued": as many builds, each right after that work was over. The host waited for it as long, so
    that its caches and clock are as they are behind queued work."""
    still_busy: int = 0
    """Batches at whose end the work queued before them was still running."""

    @property
    def medians(self) -> list[float]:
        """One for each repeat, in microseconds."""
        return [statistics.median(one) / 1e3 for one in self.rounds or self.repeats]

    @property
    def median(self) -> float:
        return statistics.median(self.medians)

    @property
    def p99(self) -> float:
        return float(np.percentile(np.concatenate([np.array(one) for one in self.repeats]), 99)) / 1e3

    @property
    def count(self) -> int:
        return sum(map(len, self.repeats))

    @property
    def of_quiet(self) -> float:
        """How much longer behind queued work: the median of each repeat's ratio."""
        quiet = [statistics.median(one) / 1e3 for one in self.quiet]
        return statistics.median(a / b for a, b in zip(self.medians, quiet, strict=True))

    def over(self, other: Samples) -> float:
        """The median of the ratios of each repeat's medians: what both suffered in one repeat cancels."""
        return statistics.median(a / b for a, b in zip(self.medians, other.medians, strict=True))

    def as_dict(self) -> dict[str, Any]:
        """For JSON, in microseconds."""
        found: dict[str, Any] = {
            "median_us": self.median,
            "p99_us": self.p99,
            "lowest_median_us": min(self.medians),
            "highest_median_us": max(self.medians),
            "medians_us": self.medians,
            "samples": self.count,
        }
        if self.quiet:
            found["quiet_us"] = statistics.median(statistics.median(one) / 1e3 for one in self.quiet)
            found["of_quiet"] = self.of_quiet
        return found


def rounds(times: Sequence[int]) -> list[float]:
    """The means of `SETTLE_EVERY` batches each."""
    return [statistics.mean(times[at : at + SETTLE_EVERY]) for at in range(0, len(times), SETTLE_EVERY)]


class Machine:
    """The device under the clock: how to wait for it, and how to keep it busy for a known time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._cycles_per_second = 0.0
        if self.is_cuda:
            self._calibrate()

    def settle(self) -> None:
        """Wait until nothing is queued."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def hold(self, seconds: float) -> Any:
        """Queue work for that long on the current stream; returns an event behind it."""
        spin: Any = torch.cuda._sleep
        spin(int(seconds * self._cycles_per_second))
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _calibrate(self) -> None:
        # Cycles of the SM clock, measured: the rate is not what data sheets say, and the first rounds raise the clock.
        spin: Any = torch.cuda._sleep
        trial = 20_000_000
        for _ in range(5):
            begin = self.mark()
            spin(trial)
            end = self.mark()
            end.synchronize()
            self._cycles_per_second = trial / (begin.elapsed_time(end) * 1e-3)

    def mark(self) -> Any:
        """An event with a time, recorded now."""
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event


def measure(
    machine: Machine,
    runners: Sequence[Contender],
    *,
    repeats: int,
    batches: int,
    queued: bool,
    step: Callable[[], None],
) -> dict[str, Samples]:
    """Host time of `batches` builds of each strategy in each of `repeats`, interleaved so that drift hits all alike.

    Flags are part of a build. Freeing the tensors of the batch before is not; waiting for the device neither.
    """
    samples = {runner.name: Samples() for runner in runners}
    loop = _queued_loop if queued else _idle_loop
    with NoCollection():
        for repeat in range(repeats):
            first = repeat % len(runners)  # nobody is always behind the same neighbour
            for runner in [*runners[first:], *runners[:first]]:
                loop(machine, runner, batches, samples[runner.name])
                step()
    return samples


def _idle_loop(machine: Machine, runner: Contender, count: int, samples: Samples) -> None:
    """Nothing queued but the last few uploads."""
    build, turn, with_flags, clock = runner.build, runner.turn, runner.with_flags, time.perf_counter_ns
    for _ in range(_WARM_UP):
        build(next(turn))
    machine.settle()
    times: list[int] = []
    for number in range(count):
        batch = next(turn)
        start = clock()
        result = build(batch)
        if with_flags:
            flags_of(batch)
        times.append(clock() - start)
        del result
        if number % SETTLE_EVERY == SETTLE_EVERY - 1:
            machine.settle()
    machine.settle()
    samples.repeats.append(times)
    samples.rounds.append(rounds(times))


def _queued_loop(machine: Machine, runner: Contender, count: int, samples: Samples) -> None:
    """Each batch behind `BUSY_SECONDS` of work that was queued just before; in turn, after as much was waited for."""
    build, turn, with_flags, clock = runner.build, runner.turn, runner.with_flags, time.perf_counter_ns
    build(next(turn))
    machine.settle()
    times: list[int] = []
    quiet: list[int] = []
    for number in range(2 * count):
        batch = next(turn)
        busy = machine.hold(BUSY_SECONDS)
        if number % 2:
            machine.settle()
        start = clock()
        result = build(batch)
        if with_flags:
            flags_of(batch)
        took = clock() - start
        if number % 2:
            quiet.append(took)
        else:
            times.append(took)
            samples.still_busy += not busy.query()
        machine.settle()
        del result
    samples.repeats.append(times)
    samples.quiet.append(quiet)


def gpu_time(machine: Machine, action: Callable[[], object], count: int, repeats: int) -> list[float] | None:
    """GPU microseconds of one `action`, one number for each repeat; None where the host has to wait inside `action`.

    `count` actions are queued behind a hold that outlasts queueing them, so the device runs them back to back and the
    host's time is not in the number.
    """
    action()
    machine.settle()
    start = time.perf_counter()
    for _ in range(count):
        action()
    machine.settle()
    hold = 2 * (time.perf_counter() - start) + 0.002
    numbers: list[float] = []
    while len(numbers) < repeats:
        busy = machine.hold(hold)
        begin = machine.mark()
        for _ in range(count):
            action()
        end = machine.mark()
        outlasted = not busy.query()
        machine.settle()
        if outlasted:
            numbers.append(begin.elapsed_time(end) * 1e3 / count)
        elif hold >= _LONGEST_HOLD:
            return None
        else:
            hold = min(4 * hold, _LONGEST_HOLD)
    return numbers


class NoCollection:
    """Collect garbage now and not inside the block, as `timeit` does."""

    def __enter__(self) -> None:
        self.was_on = gc.isenabled()
        gc.collect()
        gc.disable()

    def __exit__(self, *error: object) -> None:
        if self.was_on:
            gc.enable()

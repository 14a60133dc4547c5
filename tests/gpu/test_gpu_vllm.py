"""The model runner of the example with captured graphs: thousands of replays, a host that runs ahead, races planted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from staging import StagingPool

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from vllm_runner import BLOCK, PAD_SLOT_ID, ModelRunner, Scheduled, padded_inputs
from vllm_traffic import Traffic

STEPS = 3000
AHEAD = 6
"""Steps that are queued behind a held stream: some forty kernels each."""


class Run:
    """A runner with its traffic; what it sampled stays on the device until `wrong_steps` asks."""

    def __init__(self, pool: StagingPool, steps: int = 2 * AHEAD) -> None:
        self.traffic = Traffic(32, seed=7)
        self.sizes: list[int] = []
        """Of each step."""
        self.runner = ModelRunner(pool, blocks=self.traffic.blocks)
        # Made beforehand: memory that torch has to ask the driver for would wait for the device.
        self.found = torch.full((steps, 32), -1, dtype=torch.int64, device="cuda")
        self.expected = torch.full((steps, 32), -1, dtype=torch.int64)
        self.done = 0
        # A graph's first launch does more than the others.
        for replay in self.runner.replay.values():
            replay()
        torch.cuda.synchronize()

    def steps(self, steps: int, execute: Callable[[list[Scheduled]], object] | None = None, busy: int = 0) -> None:
        """Queue some steps; `busy` is for how many cycles the device is kept busy before each."""
        for _ in range(steps):
            batch, sampled = self.traffic.step()
            if busy:
                torch.cuda._sleep(busy)
            (execute or self.runner.execute)(batch)
            self.sizes.append(self.runner.size_of(batch))
            self.found[self.done, : len(batch)] = self.runner.sampled[: len(batch)]
            self.expected[self.done, : len(batch)] = torch.tensor(sampled)
            self.done += 1

    def wrong_steps(self) -> list[int]:
        return (self.found.cpu() != self.expected).any(1).nonzero().flatten().tolist()


def test_thousands_of_replays_sample_what_a_naive_computation_does():
    """Every size, full and padded, each replay behind an upload to the addresses it was captured with."""
    with StagingPool("cuda") as pool:
        run = Run(pool, STEPS)
        run.steps(STEPS)
        assert run.wrong_steps() == []
        assert pool.stats().uploads == STEPS + len(run.runner.sizes)
        assert pool.stats().allocations <= pool.max_slots


def test_a_busy_device_makes_the_host_wait_for_a_slot_and_changes_nothing():
    """The ring is always full: each step's inputs are written as soon as the copy of the step before last has run."""
    with StagingPool("cuda", slots=2, max_slots=2) as pool:
        run = Run(pool, STEPS)
        run.steps(STEPS, busy=1_000_000)
        assert run.wrong_steps() == []
        assert pool.stats().leases_waited > 0


def test_a_host_ahead_of_a_held_stream_changes_nothing(held_stream):
    """Six steps of several sizes are written and launched before the first of them runs; none of the calls waits."""
    with StagingPool("cuda", slots=AHEAD, max_slots=AHEAD) as pool:
        run = Run(pool)
        run.steps(AHEAD)
        torch.cuda.synchronize()
        with held_stream():
            run.steps(AHEAD)
            assert pool.stats().in_flight == AHEAD
        assert run.wrong_steps() == []
        assert len(set(run.sizes[AHEAD:])) > 2


@pytest.mark.usefixtures("unguarded")
def test_without_the_guard_the_same_run_computes_with_the_inputs_of_later_steps(held_stream):
    """The event guard taken out, and two slots: the model samples other tokens, and the comparison sees it."""
    with StagingPool("cuda", slots=2, max_slots=2) as pool:
        run = Run(pool)
        run.steps(AHEAD)
        torch.cuda.synchronize()
        with held_stream():
            run.steps(AHEAD)
        assert run.wrong_steps()


class Persistent:
    """The way before: a pinned array and a place on the device for each field, six copies, rewritten for every step."""

    def __init__(self, runner: ModelRunner, waits: bool) -> None:
        self.runner, self.waits = runner, waits
        self.host = {
            size: {name: torch.zeros(one.shape, dtype=one.dtype, pin_memory=True) for name, one in inputs.items()}
            for size, inputs in runner.inputs.items()
        }
        self.event = torch.cuda.Event(blocking=True)

    def execute(self, batch: list[Scheduled]) -> None:
        size = self.runner.size_of(batch)
        if self.waits:
            self.event.synchronize()
        for name, values in padded_inputs(batch, size).items():
            host = self.host[size][name]
            host[:] = torch.as_tensor(values)
            self.runner.inputs[size][name].copy_(host, non_blocking=True)
        self.event.record()
        self.runner.replay[size]()


def test_one_pinned_array_for_each_field_is_wrong_behind_a_held_stream(held_stream):
    """Positive control for the shape itself: rewritten without waiting, the graphs read later steps' inputs."""
    with StagingPool("cuda") as pool:
        run = Run(pool)
        before = Persistent(run.runner, waits=False)
        run.steps(AHEAD, before.execute)
        torch.cuda.synchronize()
        with held_stream():
            run.steps(AHEAD, before.execute)
        assert run.wrong_steps()


def test_one_pinned_array_for_each_field_is_right_when_the_host_waits_for_its_copies():
    """What vLLM does: its event, waited for before the arrays are written again."""
    with StagingPool("cuda") as pool:
        run = Run(pool, 500)
        run.steps(500, Persistent(run.runner, waits=True).execute, busy=200_000)
        assert run.wrong_steps() == []


@pytest.mark.parametrize("named", [True, False], ids=["after", "without after"])
def test_a_reader_on_another_stream_is_waited_for_if_it_is_named(named, held_stream):
    """It reads the inputs of its own step, however late: the next upload stands behind it. Else it reads the next's."""
    with StagingPool("cuda") as pool:
        runner = ModelRunner(pool, sizes=(4,))
        slots = runner.inputs[4]["slot_mapping"]
        read = torch.zeros_like(slots)
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        behind_reader, behind_step = torch.cuda.Event(), torch.cuda.Event()
        read.copy_(slots)
        runner.execute([Scheduled([5, 6, 7], 0, [3])])
        torch.cuda.synchronize()
        with torch.cuda.stream(side), held_stream():
            read.copy_(slots, non_blocking=True)
            behind_reader.record()
            with torch.cuda.stream(main):
                runner.execute([Scheduled([8, 9], 0, [9])], after=behind_reader if named else None)
                behind_step.record()
            if named:
                assert not behind_step.query()
            else:
                behind_step.synchronize()
        second = [9 * BLOCK, 9 * BLOCK + 1, PAD_SLOT_ID, PAD_SLOT_ID]
        assert slots.tolist() == second
        assert read.tolist() == ([3 * BLOCK, 3 * BLOCK + 1, 3 * BLOCK + 2, PAD_SLOT_ID] if named else second)

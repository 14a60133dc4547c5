"""The model runner of the example without a GPU: at once on the CPU, and on simulated streams that are late."""

from __future__ import annotations

import inspect
import random
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import vllm_runner
from late_streams import GuardTakenOut, LateStreams
from vllm_runner import (
    BLOCK,
    INPUTS,
    MAX_BLOCKS,
    PAD_SLOT_ID,
    ModelRunner,
    Scheduled,
    padded_inputs,
    prepare_inputs,
)
from vllm_traffic import Traffic

from staging import StagingPool
from staging.testing import SimulatedDevice

PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"
STEPS = 3000


def late_runner(device: LateStreams, pool: StagingPool, sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)) -> ModelRunner:
    """A runner whose steps stand in the stream, behind the copies of their inputs."""
    runner = ModelRunner(pool, sizes=sizes, blocks=Traffic(sizes[-1]).blocks)
    device.finish_all()
    runner.replay = {size: partial(device.launch, step) for size, step in runner.replay.items()}
    return runner


def run_late(
    device: LateStreams, runner: ModelRunner, steps: int, execute: Callable[[list[Scheduled]], object]
) -> tuple[list[list[int]], list[list[int]]]:
    """What was sampled and what should have been, with the host ahead by some steps, as far as it is let."""
    traffic, choice = Traffic(runner.sizes[-1]), random.Random(0)
    found: list[list[int]] = []
    expected: list[list[int]] = []
    for _ in range(steps):
        batch, sampled = traffic.step()
        expected.append(sampled)
        execute(batch)
        view = runner.sampled[: len(batch)]
        device.launch(lambda view=view: found.append(view.tolist()))  # type: ignore[misc]
        for _ in range(choice.randrange(7)):  # a step is three pieces of work
            device.advance()
    device.finish_all()
    return found, expected


# Thousands of steps.


@pytest.mark.parametrize("kind", ["cpu", "simulated"])
def test_every_step_of_thousands_samples_what_a_naive_computation_does(kind, device, make_pool):
    """Batches of all sizes, full and padded, prompts in chunks among decodes, blocks that go from hand to hand."""
    pool = make_pool("cpu" if kind == "cpu" else device)
    traffic, choice = Traffic(32), random.Random(1)
    runner = ModelRunner(pool, blocks=traffic.blocks)
    seen: Counter[tuple[int, bool]] = Counter()
    for _ in range(STEPS):
        batch, expected = traffic.step()
        assert runner.execute(batch).tolist() == expected
        size = runner.size_of(batch)
        seen[size, sum(len(one.tokens) for one in batch) == size] += 1
        while len(device.copies) > choice.randrange(6):
            device.finish()
    assert {size for size, full in seen if full} == set(runner.sizes)
    assert {size for size, full in seen if not full} == set(runner.sizes[2:])
    assert device.violations == []


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_host_that_runs_ahead_of_late_streams_changes_nothing(slots, make_pool):
    """The same when copies and steps run late, and the host waits for a slot now and then."""
    device = LateStreams(on_sleep=lambda late: late.advance())
    pool = make_pool(device, slots=slots, max_slots=slots)
    runner = late_runner(device, pool)
    found, expected = run_late(device, runner, STEPS, runner.execute)
    assert found == expected
    assert device.violations == []
    assert pool.stats().leases_waited > 0


def test_a_step_is_one_copy_one_event_and_no_allocation(make_pool):
    """Six fields each; and no destination, host or device, is made after the start."""
    device = LateStreams(on_sleep=lambda late: late.advance())
    pool = make_pool(device)
    runner = late_runner(device, pool)
    calls, before = device.calls.copy(), pool.stats()
    run_late(device, runner, 200, runner.execute)
    done, since = device.calls - calls, pool.stats() - before
    assert (done["copy"], done["record"], since.uploads, since.fields) == (200, 200, 200, 1200)
    assert done["empty"] == done["copy_on_device"] == 0
    assert done["host_buffer"] == since.leases_grown  # the ring may grow at first
    assert pool.stats().slots <= pool.max_slots


# Races, planted.


def test_without_the_event_guard_steps_compute_with_the_inputs_of_others(make_pool):
    """The guard taken out: the simulated device sees the writes, and the model samples other tokens."""
    device = GuardTakenOut()
    runner = late_runner(device, make_pool(device, slots=2, max_slots=2))
    found, expected = run_late(device, runner, 200, runner.execute)
    assert found != expected
    assert device.violations


class Persistent:
    """The way before: a host array and a place on the device for each field, six copies, rewritten for every step."""

    def __init__(self, device: LateStreams, runner: ModelRunner, waits: bool) -> None:
        self.device, self.runner, self.waits = device, runner, waits
        self.host = {
            size: {name: torch.zeros_like(tensor) for name, tensor in inputs.items()}
            for size, inputs in runner.inputs.items()
        }
        self.event = device.new_event()
        self.waited = 0

    def execute(self, batch: list[Scheduled]) -> None:
        size = self.runner.size_of(batch)
        while self.waits and not self.device.done(self.event):
            self.device.advance()
            self.waited += 1
        for name, values in padded_inputs(batch, size).items():
            host = self.host[size][name]
            host[:] = torch.as_tensor(values)
            landing = self.runner.inputs[size][name].flatten()
            self.device.copy(landing.view(torch.uint8), host.flatten().view(torch.uint8), stream=0)
        self.device.record(self.event, stream=0)
        self.runner.replay[size]()


@pytest.mark.parametrize("waits", [False, True], ids=["rewritten", "waited for"])
def test_one_host_array_for_each_field_is_right_only_if_the_host_waits_for_its_copies(waits, make_pool):
    """vLLM's way: without its event the race is seen, with it there is none, and the host stands still for it."""
    device = LateStreams()
    runner = late_runner(device, make_pool(device))
    before = Persistent(device, runner, waits)
    found, expected = run_late(device, runner, 300, before.execute)
    assert (found == expected) is waits
    assert (device.violations == []) is waits
    assert (before.waited > 0) is waits


@pytest.mark.parametrize("named", [True, False], ids=["after", "without after"])
def test_a_reader_on_another_stream_is_waited_for_if_it_is_named(named, make_pool):
    """It reads the inputs of its own step, however late: the next upload stands behind it. Else it reads the next's."""
    device = LateStreams()
    runner = late_runner(device, make_pool(device), sizes=(4,))
    first, second = [Scheduled([5, 6, 7], 0, [3])], [Scheduled([8, 9], 0, [9])]
    runner.execute(first)
    while device.advance():
        pass
    read: list[list[int]] = []
    device.launch(lambda: read.append(runner.inputs[4]["slot_mapping"].tolist()), stream=1)
    event = device.new_event()
    device.record(event, stream=1)
    runner.execute(second, after=event if named else None)
    while device.advance():
        pass
    device.advance(stream=1)
    while device.advance():
        pass
    slots = [9 * BLOCK, 9 * BLOCK + 1, PAD_SLOT_ID, PAD_SLOT_ID]
    assert runner.inputs[4]["slot_mapping"].tolist() == slots
    assert read == [[3 * BLOCK, 3 * BLOCK + 1, 3 * BLOCK + 2, PAD_SLOT_ID] if named else slots]


# Addresses and padding.


def addresses(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def test_each_size_has_addresses_of_its_own_that_stay(make_pool):
    """Whatever else was uploaded in between: those that the graph of that size was captured with."""
    runner = ModelRunner(make_pool("cpu"))
    captured = {size: addresses(inputs) for size, inputs in runner.inputs.items()}
    traffic = Traffic(32)
    for _ in range(300):
        batch, _ = traffic.step()
        for size in runner.sizes[runner.sizes.index(runner.size_of(batch)) :]:
            upload = prepare_inputs(runner.pool, batch, size, runner.out)
            assert addresses(upload) == captured[size]
    assert len({captured[size]["block_table"] for size in (4, 8, 16, 32)}) == 4


def test_lengths_that_are_not_padded_move_the_fields_behind_them(make_pool):
    """Rows leased as they are, three of eight: the graph would read lengths and block table where they do not lie."""
    runner = ModelRunner(make_pool("cpu"), sizes=(8,))
    with runner.pool.lease(INPUTS, tokens=8, bounds=4, rows=3) as lease:
        for field in INPUTS.fields:
            lease[field.name] = 0
        found = addresses(lease.upload(out=runner.out))
    captured = addresses(runner.inputs[8])
    assert {name for name in found if found[name] != captured[name]} == {"seq_lens", "block_table"}


@pytest.mark.parametrize("size", [4, 8, 32])
def test_padding_is_harmless_and_nothing_behind_the_padded_size_is_written(size, make_pool):
    """Each field of a small batch, value for value; and the bytes of larger sizes as they were."""
    runner = ModelRunner(make_pool("cpu"), sizes=(size, 64))
    runner.out.fill_(0xAB)
    batch = [Scheduled([11, 12], 3, [5, 9]), Scheduled([-1], 4, [7, 8])]
    found = prepare_inputs(runner.pool, batch, size, runner.out)
    more = size - 3
    assert found["input_ids"].tolist() == [11, 12, -1] + [0] * more
    assert found["positions"].tolist() == [3, 4, 4] + [0] * more
    assert found["slot_mapping"].tolist() == [5 * BLOCK + 3, 9 * BLOCK, 8 * BLOCK] + [PAD_SLOT_ID] * more
    assert found["query_start_loc"].tolist() == [0, 2, 3] + [3] * (size - 2)
    assert found["seq_lens"].tolist() == [5, 5] + [0] * (size - 2)
    rest = [0] * (MAX_BLOCKS - 2)
    assert found["block_table"].tolist() == [[5, 9, *rest], [7, 8, *rest]] + [[0] * MAX_BLOCKS] * (size - 2)
    assert set(runner.out[found.nbytes :].tolist()) == {0xAB}
    assert found.nbytes == INPUTS.nbytes(tokens=size, bounds=size + 1, rows=size) < runner.out.numel()


def test_padding_changes_neither_the_cache_nor_what_is_sampled(make_pool):
    """One batch by graphs of several sizes: the same tokens, and beside the null block only its own slots written."""
    batch = [Scheduled([11, 12], 0, [5]), Scheduled([13], 0, [7])]
    kept = []
    for size in (4, 8, 32):
        runner = ModelRunner(make_pool("cpu"), sizes=(size,))
        runner.kv.fill_(-1)
        tokens = runner.execute(batch).tolist()
        kept.append((tokens, runner.kv[BLOCK:].tolist()))
        assert (runner.kv[BLOCK:] >= 0).nonzero().flatten().tolist() == [4 * BLOCK, 4 * BLOCK + 1, 6 * BLOCK]
    assert kept[0] == kept[1] == kept[2]


def test_a_step_that_no_graph_takes_is_refused_before_anything_is_queued(make_pool):
    """With both numbers, and what to do."""
    device = SimulatedDevice()
    runner = ModelRunner(make_pool(device), sizes=(4,))
    queued = device.calls["copy"]
    with pytest.raises(ValueError, match="a step of 5 tokens: the largest graph takes 4; schedule fewer"):
        runner.execute([Scheduled([1, 2, 3, 4, 5], 0, [1, 2])])
    assert device.calls["copy"] == queued


# The page.


def test_the_page_shows_the_example_as_it_is():
    """Each block that is marked as the example's stands in the file; the diff ends in `prepare_inputs`."""
    source = inspect.getsource(vllm_runner)
    page = PAGE.read_text(encoding="utf-8")
    shown = re.findall(r"^<!-- example: tests/examples/vllm_runner.py -->\n```python\n(.*?)^```$", page, re.M | re.S)
    assert len(shown) >= 2
    for block in shown:
        assert block in source
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", page, re.M | re.S)
    after = "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("-"))
    assert inspect.getsource(prepare_inputs) in after

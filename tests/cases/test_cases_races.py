"""Cases about host memory that is rewritten under a copy, about events, and about what a copy reads from."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from case_builders import FIELDS, decode, fill, foreign, send, slow_device, stamps

import batching
import staging
from batching import SamplingBatchInfo, stage_rows, write_cache_indices
from batching.info import KEEP
from batching.stage import PREFILL
from staging import Field, Layout, LeaseError, PoolExhausted, StagingPool
from staging._slots import State
from staging.testing import SimulatedDevice

MakePool = Callable[..., StagingPool]

COLUMN = Layout([Field("column", torch.int64)])


def only_slot(pool: StagingPool) -> np.ndarray:
    return pool._ring.slots[0].buffer.array


def test_a_slot_is_handed_out_again_only_after_the_copy_that_reads_it(make_pool: MakePool) -> None:
    """B01: with the device a whole ring behind, every field of every step still arrives with that step's values."""
    device = slow_device()
    pool = make_pool(device, slots=4, max_slots=4)
    uploads = [send(pool, step) for step in range(8)]
    assert pool.stats().leases_waited == 4  # each of the second round waited for a copy to run
    device.finish_all()
    assert device.violations == []
    assert [stamps(upload) for upload in uploads] == [{step} for step in range(8)]


@pytest.mark.parametrize("field", [*FIELDS, "records"])
def test_no_field_of_a_slot_in_flight_can_be_written(device: SimulatedDevice, make_pool: MakePool, field: str) -> None:
    """B02: each way to write a column is refused once the copy is queued, and the slot's bytes are as they were."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    lease = fill(pool.lease(PREFILL, rows=3), 5)
    lease.upload()
    before = only_slot(pool).copy()
    records = [PREFILL.pack(**dict.fromkeys(FIELDS, 6))] * 3
    write = partial(lease.write_records, records) if field == "records" else partial(lease.__setitem__, field, 6)
    with pytest.raises(LeaseError, match="has ended"):
        write()
    assert np.array_equal(only_slot(pool), before)


@pytest.mark.parametrize(
    "build",
    [
        lambda info, pool: info.filter_batch([1], pool=pool),
        lambda info, pool: stage_rows(KEEP, {"keep_indices": [1]}, pool, torch.device("cpu")),
        lambda info, pool: SamplingBatchInfo.from_schedule_batch(decode([foreign("late")]), 9, pool),
        lambda info, pool: write_cache_indices(
            decode([foreign("late")]),
            torch.zeros((1, 1), dtype=torch.int32),
            torch.zeros(0, dtype=torch.int64),
            pool,
        ),
    ],
    ids=["filter", "rows", "sampling columns", "cache indices"],
)
def test_nothing_that_builds_a_batch_writes_a_slot_in_flight(
    device: SimulatedDevice, make_pool: MakePool, build: Callable[[Any, StagingPool], object]
) -> None:
    """B02: filter, plain rows and both entry points are refused while the only slot is in flight; merge needs none."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    info = SamplingBatchInfo.from_schedule_batch(decode([foreign("a"), foreign("b")]), 9, pool)
    before = only_slot(pool).copy()
    calls = dict(device.calls)
    info.merge_batch(info)
    assert dict(device.calls) == calls
    with pytest.raises(PoolExhausted):
        build(info, pool)
    assert np.array_equal(only_slot(pool), before)
    device.finish_all()
    assert device.violations == []


@pytest.mark.parametrize("slots", [1, 2])
def test_two_slots_or_one_are_enough_to_be_right(make_pool: MakePool, slots: int) -> None:
    """B05: more steps than slots are refused while nothing runs, and wait where they may; each has its values."""
    held = SimulatedDevice()
    pool = make_pool(held, slots=slots, max_slots=slots, timeout=0)
    uploads = [send(pool, step) for step in range(slots)]
    for step in range(slots, 5):
        with pytest.raises(PoolExhausted, match=f"{slots} in flight"):
            send(pool, step)
    held.finish_all()
    assert held.violations == []
    assert [stamps(upload) for upload in uploads] == [{step} for step in range(slots)]

    slow = slow_device()
    pool = make_pool(slow, slots=slots, max_slots=slots)
    uploads = [send(pool, step) for step in range(5)]
    slow.finish_all()
    assert slow.violations == []
    assert [stamps(upload) for upload in uploads] == [{step} for step in range(5)]
    assert pool.stats().leases_waited == 5 - slots


def test_work_between_hand_out_and_upload_delays_the_copy_and_nothing_else(make_pool: MakePool) -> None:
    """B07: another pool's copies stand in front of each upload on its stream; values are each step's, waits counted."""
    device = slow_device()
    pool = make_pool(device, slots=2, max_slots=2)
    others = make_pool(device, slots=2, max_slots=2, name="others")
    uploads = []
    for step in range(6):
        lease = pool.lease(PREFILL, rows=3)
        send(others, 1000 + step)
        uploads.append(fill(lease, step).upload())
    device.finish_all()
    assert device.violations == []
    assert [stamps(upload) for upload in uploads] == [{step} for step in range(6)]
    assert pool.stats().leases_waited > 0
    assert pool.stats().wait_ns > 0


def test_a_thousand_overlapped_steps_keep_their_sampling_values(make_pool: MakePool) -> None:
    """B10: the copy of each step runs after the host has gone on; each forward sees its rows; nothing is allocated."""
    device = slow_device()
    pool = make_pool(device, slots=2, max_slots=2)
    allocations = pool.stats().allocations
    queued: list[tuple[list[float], list[int], SamplingBatchInfo]] = []
    for step in range(1000):
        temperatures = [0.5 + step + row / 8 for row in range(4)]
        seeds = [step * 10 + row for row in range(4)]
        rows = [
            foreign(str(row), temperature=temperature, sampling_seed=seed)
            for row, (temperature, seed) in enumerate(zip(temperatures, seeds, strict=True))
        ]
        queued.append((temperatures, seeds, SamplingBatchInfo.from_schedule_batch(decode(rows), 9, pool)))
        while len(queued) > 2:  # its copy has run: a third lease had to wait for it
            expected_temperatures, expected_seeds, info = queued.pop(0)
            assert info.temperatures.reshape(-1).tolist() == expected_temperatures
            assert info.sampling_seed is not None
            assert info.sampling_seed.tolist() == expected_seeds
    assert device.violations == []
    assert pool.stats().allocations == allocations
    assert pool.stats().leases_waited == 998


class WithoutGuard(SimulatedDevice):
    """Every copy counts as done at once."""

    def done(self, event: Any) -> bool:
        return True


class DropsACopy(SimulatedDevice):
    """One copy in five is lost."""

    def copy(self, landing: torch.Tensor, source: torch.Tensor, stream: int) -> None:
        arrived = landing.clone()
        super().copy(landing, source, stream)
        if len(self.copies) and self.copies[-1].number % 5 == 3:
            landing[:] = arrived


def signed_distances(device: SimulatedDevice, *, fixed: bool) -> list[int]:
    """got - expected of each step on a ring of two slots, to one destination or to fresh ones."""
    out = torch.zeros(COLUMN.nbytes(rows=4), dtype=torch.uint8) if fixed else None
    results = []
    with StagingPool(device, slots=2, max_slots=2, slot_bytes=64) as pool:
        for step in range(1, 11):
            with pool.lease(COLUMN, rows=4) as lease:
                lease["column"] = step
                column = lease.upload(out=out)["column"]
            if fixed:
                device.finish_all()
                column = column.clone()
            results.append(column)
        device.finish_all()
    return [int((column - step).max()) for step, column in enumerate(results, 1)]


def test_the_harness_tells_future_values_from_stale_ones() -> None:
    """B11: positive distances without the guard, negative ones when a copy is lost, none when all is right."""
    future = signed_distances(WithoutGuard(), fixed=False)
    stale = signed_distances(DropsACopy(), fixed=True)
    assert max(future) > 0
    assert min(future) >= 0
    assert min(stale) < 0
    assert max(stale) <= 0
    assert signed_distances(slow_device(), fixed=False) == signed_distances(SimulatedDevice(), fixed=True) == [0] * 10


class WatchesEvents(SimulatedDevice):
    """Counts records of an event whose earlier record has not passed."""

    recorded_too_early = 0

    def record(self, event: Any, stream: int) -> None:
        self.recorded_too_early += not all(copy.finished for copy in event.behind)
        super().record(event, stream)


def test_slots_in_flight_never_share_an_event(make_pool: MakePool) -> None:
    """B14: over random steps, failures and healing, each busy slot has an event of its own, recorded once at a time."""
    dice = random.Random(14)
    device = WatchesEvents()
    pool = make_pool(device, slots=2, max_slots=5, timeout=0)
    for step in range(2000):
        if device.copies and dice.random() < 0.5:
            device.finish(dice.randrange(len(device.copies)))
        if dice.random() < 0.1:
            device.fail(dice.choice(["record", "copy"]), after=dice.random() < 0.5)
        try:
            send(pool, step)
        except (PoolExhausted, RuntimeError):
            pass
        events = [id(slot.event) for slot in pool._ring.slots if slot.state is State.IN_FLIGHT]
        assert len(set(events)) == len(events)
    assert device.recorded_too_early == 0
    assert device.violations == []
    assert pool.stats().heals > 0


def test_a_long_wait_asks_rarely(device: SimulatedDevice, make_pool: MakePool) -> None:
    """B17: half a second of waiting is at most a thousand looks, with the processor given away between them."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0.5)
    send(pool, 0)
    asked = device.calls["done"]
    with pytest.raises(PoolExhausted):
        send(pool, 1)
    assert device.calls["done"] - asked <= 1000
    assert device.calls["sleep"] <= 1000


READS_BACK = ("scheduler.py", "_read")
UPLOADS = {("_cuda.py", "copy"), ("stage.py", "upload_plainly"), ("check.py", "decode")}
"""Functions whose asynchronous copies go to the device, from host memory that is not rewritten."""


def test_what_comes_back_from_the_device_is_read_behind_an_event() -> None:
    """B23: every asynchronous copy in the packages is an upload, or has an event recorded behind it."""
    functions: list[tuple[str, str, str]] = []
    for package in (staging, batching):
        for path in Path(str(package.__file__)).parent.rglob("*.py"):
            if path.parent.name in ("bench", "soak"):
                continue  # they hold other ways of uploading beside ours
            text = path.read_text()
            assert ".cpu(" not in text, path
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef):
                    functions.append((path.name, node.name, ast.unparse(node)))
    copying = [function for function in functions if "non_blocking=True" in function[2]]
    assert {(file, name) for file, name, _ in copying} >= UPLOADS
    for file, name, text in copying:
        assert (file, name) in UPLOADS or ".record(" in text, f"{file}: {name}"
    assert "event.synchronize()" in next(text for file, name, text in functions if (file, name) == READS_BACK)


@pytest.mark.parametrize(
    "values",
    [[7, 8], np.array([7, 8]), torch.tensor([7, 8]), torch.tensor([7, 0, 8, 0])[::2]],
    ids=["list", "array", "tensor", "strided tensor"],
)
def test_the_source_of_a_copy_is_always_the_slot(device: SimulatedDevice, make_pool: MakePool, values: Any) -> None:
    """B32: whatever the values come in, they are copied into the slot, and the slot's memory is what is uploaded."""
    pool = make_pool(device, slots=1, max_slots=1)
    with pool.lease(COLUMN, rows=2) as lease:
        lease["column"] = values
        upload = lease.upload()
    assert device.copies[0].source.data_ptr() == pool._ring.slots[0].buffer.tensor.data_ptr()
    assert pool._ring.slots[0].buffer.pinned
    assert upload["column"].tolist() == [7, 8]


@pytest.mark.parametrize("rows", [1, 3, 51, 52])
@pytest.mark.parametrize("tokens", [0, 7])
def test_an_upload_is_one_contiguous_range(
    device: SimulatedDevice, make_pool: MakePool, rows: int, tokens: int
) -> None:
    """B34: from the slot's first byte, as many bytes as the layout says, for one row and for a full slot."""
    layout = PREFILL + Layout([Field("tokens", torch.int32, "tokens")])
    pool = make_pool(device, slots=1, max_slots=1, slot_bytes=4096, max_bytes=4096)
    with pool.lease(layout, rows=rows, tokens=tokens) as lease:
        for field in layout.fields:
            lease[field.name] = 1
        lease.upload()
    (copy,) = device.copies
    assert copy.source.is_contiguous()
    assert copy.source.storage_offset() == 0
    assert copy.source.numel() == layout.nbytes(rows=rows, tokens=tokens)

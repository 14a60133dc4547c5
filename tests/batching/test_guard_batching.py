"""That the guard is what keeps batches right: with it taken out, the same run goes wrong and is caught."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from batch_builders import Values, decode_batch, new_tokens, prefill_batch, record_of, rows_of

from batching import SamplingBatchInfo, stage_rows, write_cache_indices
from batching.info import KEEP
from staging import StagingPool
from staging.testing import SimulatedDevice


class WithoutGuard(SimulatedDevice):
    """Its events say "done" whatever their copies do, as an event that was never recorded would."""

    def done(self, event: Any) -> bool:
        super().done(event)
        return True


def stamped_run(device: SimulatedDevice, lag: int, *, slots: int, batches: int = 60) -> int:
    """Build batches that carry their number in every field, each copy running `lag` batches late; count wrong ones.

    Every batch has its own size, seed, row of the table and prefix, so that another batch's bytes are never right.
    """
    dice = random.Random(lag)
    built: list[tuple[SamplingBatchInfo, Any, list[bytes], list[int], list[int]]] = []
    with StagingPool(device, slots=slots, max_slots=slots, slot_bytes=4096) as pool:
        for number in range(batches):
            values = Values(1 + number, 1 / (1 + number), 1 + number, 1 / (2 + number), 1000 + number)
            rows = dice.randrange(1, 5)
            lengths = [(number % 3, 1 + number)] * rows
            batch = prefill_batch(lengths, values=[values] * rows, deterministic=True)
            pointers = [one.prefix_indices.data_ptr() if number % 3 else 0 for one in batch.reqs]
            table = torch.zeros(8, 128, dtype=torch.int32)
            staged = write_cache_indices(batch, table, new_tokens(batch), pool).tensors
            info = SamplingBatchInfo.from_schedule_batch(batch, 1000, pool)
            built.append((info, staged, [record_of(values)] * rows, [sum(pair) for pair in lengths], pointers))
            if len(device.copies) > lag:
                device.finish(dice.randrange(len(device.copies) - lag))
        device.finish_all()
    return sum(
        rows_of(info) != records
        or staged["seq_lens"].tolist() != lens
        or staged["prefix_pointers"].tolist() != pointers
        for info, staged, records, lens, pointers in built
    )


def finish_a_copy(device: SimulatedDevice) -> None:
    device.finish()


@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("lag", [0, 1, 3, 8])
def test_with_the_guard_late_copies_never_carry_another_batch(lag: int, slots: int) -> None:
    """However late copies run, every value on the device is its own batch's."""
    device = SimulatedDevice(on_sleep=finish_a_copy)
    assert stamped_run(device, lag, slots=slots) == 0
    assert device.violations == []


@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("lag", [4, 8])
def test_without_the_guard_the_same_run_is_wrong_and_is_caught(lag: int, slots: int) -> None:
    """A slot rewritten under a queued copy: wrong values on the device, and a violation for each."""
    device = WithoutGuard(on_sleep=finish_a_copy)
    wrong = stamped_run(device, lag, slots=slots)
    assert wrong > 0
    assert len(device.violations) >= wrong


def test_without_the_guard_copies_in_time_are_still_right() -> None:
    """The run itself is sound: what goes wrong above is the reuse, and nothing else."""
    device = WithoutGuard()
    assert stamped_run(device, 0, slots=2) == 0
    assert device.violations == []


def test_without_the_guard_a_filter_keeps_the_wrong_rows() -> None:
    """Keep-indices go through the ring too: overwritten ones select other requests."""

    def kept(device: SimulatedDevice) -> list[float]:
        with StagingPool(device, slots=1, max_slots=1, slot_bytes=4096) as pool:
            info = SamplingBatchInfo.from_schedule_batch(decode_batch(Values(1.0 + row) for row in range(4)), 1000)
            first = stage_rows(KEEP, {"keep_indices": [3, 1]}, pool, info.device)["keep_indices"]
            stage_rows(KEEP, {"keep_indices": [0, 2]}, pool, info.device)
            device.finish_all()
            info.filter_batch([3, 1], first)
            return info.temperatures[:, 0].tolist()

    assert kept(SimulatedDevice(on_sleep=finish_a_copy)) == [4.0, 2.0]
    assert kept(WithoutGuard()) == [1.0, 3.0]

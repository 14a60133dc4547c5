"""`SamplingBatchInfo`: columns and flags of a batch, through building, filtering and merging."""

from __future__ import annotations

import itertools
import math
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from batch_builders import (
    COLUMNS,
    EXAMPLES,
    FLAGS,
    KINDS,
    Values,
    any_values,
    check_rows,
    decode_batch,
    foreign_params,
    open_pool,
    prefill_batch,
    random_values,
    record_of,
    rows_of,
)
from hypothesis import given
from hypothesis import strategies as st

from batching import BatchError, Request, SamplingBatchInfo, SamplingParams, SamplingValueError, ScheduleBatch
from batching.params import SAMPLING
from staging import LeaseTooLarge, PoolExhausted, StagingPool
from staging.testing import SimulatedDevice

VOCABULARY = 32_000


def build(batch: ScheduleBatch, pool: StagingPool | None = None) -> SamplingBatchInfo:
    return SamplingBatchInfo.from_schedule_batch(batch, VOCABULARY, pool)


def tensors_of(info: SamplingBatchInfo) -> list[torch.Tensor]:
    return [column for column in (getattr(info, name) for name in COLUMNS) if column is not None]


def state_of(info: SamplingBatchInfo) -> tuple[Any, ...]:
    """All that a failed call must leave as it was."""
    return len(info), rows_of(info), list(map(id, tensors_of(info))), [getattr(info, name) for name in FLAGS]


# ---------------------------------------------------------------------- building


@pytest.mark.parametrize("kind", KINDS)
@EXAMPLES
@given(values=st.lists(any_values, max_size=12), deterministic=st.booleans(), data=st.data())
def test_columns_and_flags_are_the_oracle_s(
    kind: str, values: list[Values], deterministic: bool, data: st.DataObject
) -> None:
    """Shapes, dtypes, every bit of every value, and the flags, with own, foreign and mixed parameters."""
    foreign = data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    with open_pool(kind, slots=1, slot_bytes=256) as pool:
        info = build(decode_batch(values, deterministic=deterministic, foreign=foreign), pool)
        check_rows(info, values, deterministic=deterministic)
        assert (info.vocab_size, info.device) == (VOCABULARY, torch.device("cpu"))


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 31, 32, 33, 255, 256, 257, 2048])
def test_columns_of_any_number_of_rows_are_exact(any_pool: StagingPool | None, rows: int) -> None:
    """No row is lost, padded or doubled at any size; a slot that is too small is enlarged."""
    dice = random.Random(rows)
    values = [random_values(dice) for _ in range(rows)]
    check_rows(build(decode_batch(values, deterministic=True), any_pool), values, deterministic=True)


def test_prefill_batches_have_the_same_sampling_columns(any_pool: StagingPool | None) -> None:
    """What else is in the copy changes no column."""
    dice = random.Random(0)
    for rows in (1, 2, 7, 40):
        values = [random_values(dice) for _ in range(rows)]
        lengths = [(dice.randrange(4), dice.randrange(1, 5)) for _ in range(rows)]
        batch = prefill_batch(lengths, values=values, deterministic=True)
        check_rows(build(batch, any_pool), values, deterministic=True)


def test_an_empty_batch_gives_typed_tensors_and_takes_no_slot(any_pool: StagingPool | None) -> None:
    """Length 0, right dtypes, all greedy, nothing needed, in both modes."""
    for batch in (decode_batch([], deterministic=True), prefill_batch([], deterministic=True)):
        info = build(batch, any_pool)
        check_rows(info, [], deterministic=True)
        assert info.is_all_greedy
        assert not info.is_any_greedy
        if any_pool is not None:
            stats = any_pool.stats()
            assert (stats.uploads, stats.filling, stats.in_flight) == (0, 0, 0)
            assert stats.leases == stats.leases_empty


def test_empty_and_full_batches_alternate(pool: StagingPool, device: SimulatedDevice) -> None:
    """A rank without requests takes the same path, and costs no copy."""
    values = [Values(0.5, top_k=k + 1, sampling_seed=-k) for k in range(5)]
    for _ in range(200):
        check_rows(build(decode_batch([], deterministic=True), pool), [], deterministic=True)
        check_rows(build(decode_batch(values, deterministic=True), pool), values, deterministic=True)
        device.finish_all()
    assert device.calls["copy"] == pool.stats().uploads == pool.stats().leases_empty == 200
    assert device.violations == []


def test_seeds_are_there_only_under_deterministic_sampling(any_pool: StagingPool | None) -> None:
    """Off: None, whatever the requests say. On: theirs, and 42 for those without."""
    values = [Values(sampling_seed=seed) for seed in (0, None, -1, 42, 2**63 - 1, -(2**63))]
    assert build(decode_batch(values), any_pool).sampling_seed is None
    info = build(decode_batch(values, deterministic=True), any_pool)
    assert info.sampling_seed is not None
    assert info.sampling_seed.tolist() == [0, 42, -1, 42, 2**63 - 1, -(2**63)]


def test_every_subset_of_seeded_rows_keeps_its_own_seeds(any_pool: StagingPool | None) -> None:
    """A batch-mate without a seed takes none away, and inherits none."""
    for seeded in itertools.product([False, True], repeat=6):
        values = [Values(sampling_seed=1000 + row if has else None) for row, has in enumerate(seeded)]
        for foreign in (False, True):
            info = build(decode_batch(values, deterministic=True, foreign=foreign), any_pool)
            assert info.sampling_seed is not None
            assert info.sampling_seed.tolist() == [1000 + row if has else 42 for row, has in enumerate(seeded)]


def test_a_row_is_the_same_alone_and_in_any_company(any_pool: StagingPool | None) -> None:
    """Bit-identical at random positions of random batches: nothing batch-wide leaks into a row."""
    dice = random.Random(1)
    row = Values(0.7, 0.9, 40, 0.05, -7)
    alone = rows_of(build(decode_batch([row], deterministic=True), any_pool))
    assert alone == [record_of(row)]
    for _ in range(50):
        company = [random_values(dice) for _ in range(dice.randrange(1, 20))]
        position = dice.randrange(len(company) + 1)
        company.insert(position, row)
        info = build(decode_batch(company, deterministic=True, foreign=dice.random() < 0.3), any_pool)
        assert rows_of(info)[position] == alone[0]


def test_a_small_batch_after_a_large_one_shows_nothing_of_it(any_pool: StagingPool | None) -> None:
    """Every slot of the ring has held extreme values; a batch of one has one row all the same."""
    extreme = Values(3.4e38, 1.5e-45, 2**31 - 1, 1.0, 2**63 - 1)
    for _ in range(3):
        check_rows(
            build(decode_batch([extreme] * 60, deterministic=True), any_pool), [extreme] * 60, deterministic=True
        )
    for _ in range(3):
        check_rows(build(decode_batch([Values()], deterministic=True), any_pool), [Values()], deterministic=True)


@contextmanager
def application_settings(dtype: torch.dtype, device: str) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_default_dtype_and_device_of_the_application_change_nothing(any_pool: StagingPool | None, dtype: Any) -> None:
    """0.7 arrives as float32(0.7) on the batch's device, through building, filtering and merging."""
    values = [Values(0.7, 0.9, 40, 0.1, 3), Values(0.3), Values(0.0)]
    with application_settings(dtype, "meta"):
        info = build(decode_batch(values, deterministic=True), any_pool)
        other = build(decode_batch(values[:1], deterministic=True), any_pool)
        empty = build(decode_batch([], deterministic=True), any_pool)
        other.merge_batch(info)
        other.filter_batch([3, 0], pool=any_pool)
    check_rows(info, values, deterministic=True)
    check_rows(other, [values[2], values[0]], deterministic=True)
    check_rows(empty, [], deterministic=True)


def test_a_pool_made_under_the_application_s_settings_works_too() -> None:
    """Also the slots are plain host memory whatever the defaults were."""
    with application_settings(torch.bfloat16, "meta"):
        pool = StagingPool("cpu", slots=1, slot_bytes=256)
        info = build(decode_batch([Values(0.7)] * 40), pool)
    check_rows(info, [Values(0.7)] * 40)
    pool.close()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_batches_built_under_inference_mode_are_right(any_pool: StagingPool | None, mode: Any) -> None:
    """A ring used in and out of inference mode stays writable in both."""
    values = [Values(0.7, sampling_seed=row) for row in range(30)]
    for _ in range(3):
        with mode():
            info = build(decode_batch(values, deterministic=True), any_pool)
            info.filter_batch(range(10), pool=any_pool)
            check_rows(info, values[:10], deterministic=True)
        check_rows(build(decode_batch(values, deterministic=True), any_pool), values, deterministic=True)


def test_returned_tensors_never_alias_a_slot(any_pool: StagingPool | None) -> None:
    """Five times round the ring, all of it with other values: what was returned before is as it was."""
    dice = random.Random(2)
    kept = []
    for _ in range(5):
        values = [random_values(dice) for _ in range(20)]
        kept.append((build(decode_batch(values, deterministic=True), any_pool), values))
    for number in range(5 * 3 * 5):
        build(decode_batch([Values(top_k=number + 1, sampling_seed=number)] * 20, deterministic=True), any_pool)
    for info, values in kept:
        check_rows(info, values, deterministic=True)


def test_writing_into_returned_tensors_reaches_no_other_batch(any_pool: StagingPool | None) -> None:
    """A sampler that scribbles on its tensors harms nobody: neither the ring nor the requests' records."""
    values = [Values(0.5, 0.5, 5, 0.5, 5)] * 4
    batch = decode_batch(values, deterministic=True)
    for _ in range(6):
        info = build(batch, any_pool)
        check_rows(info, values, deterministic=True)
        for column in tensors_of(info):
            column.fill_(1)
            column.zero_()


def test_changing_foreign_params_after_the_build_changes_no_batch_built(device: SimulatedDevice) -> None:
    """The values are those at the time of the call, also while the copy has not run."""
    values = [Values(0.5, sampling_seed=3), Values(0.0)]
    batch = decode_batch(values, deterministic=True, foreign=True)
    with StagingPool(device, slots=1, slot_bytes=256) as pool:
        info = build(batch, pool)
        for request in batch.reqs:
            request.sampling_params.temperature = 9.0
            request.sampling_params.sampling_seed = 9
        batch.reqs.clear()
        device.finish_all()
        check_rows(info, values, deterministic=True)
        assert device.violations == []


def test_a_batch_larger_than_a_slot_enlarges_it_once() -> None:
    """Growth is counted, exact, and over after the first batch of that size."""
    device = SimulatedDevice()
    with StagingPool(device, slots=1, max_slots=1, slot_bytes=256) as pool:
        values = [Values(top_k=row + 1, sampling_seed=-row) for row in range(100)]
        for _ in range(3):
            check_rows(build(decode_batch(values, deterministic=True), pool), values, deterministic=True)
            device.finish_all()
        assert (pool.stats().enlarged, pool.stats().allocations) == (1, 2)
        assert pool.stats().bytes_peak == SAMPLING.nbytes(rows=100)


def test_a_batch_larger_than_max_bytes_is_refused_and_never_truncated() -> None:
    """One row too many: an error that names the sizes, nothing copied, and the pool goes on."""
    device = SimulatedDevice()
    most = SAMPLING.nbytes(rows=64)
    values = [Values(top_k=row + 1) for row in range(65)]
    with StagingPool(device, slots=2, slot_bytes=256, max_bytes=most) as pool:
        with pytest.raises(LeaseTooLarge, match=f"{SAMPLING.nbytes(rows=65)} bytes.*allows {most}"):
            build(decode_batch(values), pool)
        stats = pool.stats()
        assert (stats.leases_refused, stats.leases, stats.free, stats.enlarged) == (1, 1, 2, 0)
        assert device.calls["copy"] == 0
        check_rows(build(decode_batch(values[:64]), pool), values[:64])
        device.finish_all()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", ["empty", "copy", "record"])
def test_a_failing_device_call_leaves_pool_and_batch_ready_for_the_next_try(
    pool: StagingPool, device: SimulatedDevice, call: str, after: bool
) -> None:
    """The slot is free, or quarantined until it is healed; the same batch then goes through."""
    values = [Values(0.5, sampling_seed=1)] * 3
    batch = decode_batch(values, deterministic=True)
    after = after and call != "empty"
    for _ in range(2 * pool.max_slots):
        device.fail(call, after=after)
        with pytest.raises(RuntimeError, match="injected"):
            build(batch, pool)
        assert batch.staged is None
        stats = pool.stats()
        assert stats.slots == stats.free + stats.in_flight + stats.quarantined
        assert bool(stats.quarantined) == (call != "empty")
        device.finish_all()
        for _ in range(2):
            check_rows(build(batch, pool), values, deterministic=True)
            device.finish_all()
    assert device.violations == []


def test_a_bad_value_leaves_the_pool_untouched_and_the_others_can_go_on(any_pool: StagingPool | None) -> None:
    """One bad request refuses the batch before a lease; without it the same pool serves the rest."""
    good = [Values(0.5, top_k=row + 1, sampling_seed=row) for row in range(4)]
    for bad, field in [
        ({"top_k": 2**31}, "top_k"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0}, "top_p"),
    ]:
        batch = decode_batch(good, deterministic=True, foreign=True)
        setattr(batch.reqs[2].sampling_params, field, bad)
        before = any_pool and any_pool.stats()
        with pytest.raises(SamplingValueError, match=f"request 'r2': {field}"):
            build(batch, any_pool)
        assert (any_pool and any_pool.stats()) == before
        rest = [value for row, value in enumerate(good) if row != 2]
        del batch.reqs[2]
        check_rows(build(batch, any_pool), rest, deterministic=True)


@pytest.mark.parametrize("vocab_size", [0, -1, True, 1.0, "100", None])
def test_a_vocabulary_size_must_be_a_positive_integer(pool: StagingPool, vocab_size: Any) -> None:
    """It is kept for the sampler, so a wrong one is refused here, before a lease."""
    with pytest.raises(BatchError, match=r"vocab_size is .*positive integer"):
        SamplingBatchInfo.from_schedule_batch(decode_batch([Values()]), vocab_size, pool)
    assert pool.stats().leases == 0


def test_a_batch_for_another_device_than_the_pool_s_is_refused(pool: StagingPool) -> None:
    """The batch says where its tensors must be."""
    batch = decode_batch([Values()])
    batch.device = torch.device("meta")
    with pytest.raises(BatchError, match=r"the batch is for meta, .*'ring'.* uploads to cpu"):
        build(batch, pool)
    assert pool.stats().leases == 0


@pytest.mark.parametrize("mode", ["prefill", "", None])
def test_the_forward_mode_is_one_of_two(mode: Any) -> None:
    """A misspelt mode would silently drop the cache columns."""
    with pytest.raises(ValueError, match="forward_mode"):
        ScheduleBatch([], "cpu", forward_mode=mode)


def test_threads_that_share_a_pool_get_their_own_values() -> None:
    """Each thread's batches carry its stamps, whoever else is leasing."""
    wrong: list[str] = []
    with StagingPool("cpu", slots=2, max_slots=8, slot_bytes=256) as pool:

        def work(thread: int) -> None:
            for step in range(150):
                values = [Values(top_k=thread + 1, sampling_seed=step)] * (1 + step % 7)
                try:
                    check_rows(build(decode_batch(values, deterministic=True), pool), values, deterministic=True)
                except BaseException as error:
                    wrong.append(f"thread {thread}, step {step}: {error!r}")

        threads = [threading.Thread(target=work, args=[thread]) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


# ---------------------------------------------------------------------- filter and merge


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_random_filters_and_merges_keep_rows_and_flags_right(kind: str, deterministic: bool) -> None:
    """Against a plain list of parameters, from an empty batch on, over thousands of operations."""
    dice = random.Random(f"{kind} {deterministic}")
    with open_pool(kind) as pool:

        def new(rows: int) -> tuple[SamplingBatchInfo, list[Values]]:
            values = [random_values(dice, plain=dice.choice([0.3, 0.9, 1.0])) for _ in range(rows)]
            return build(decode_batch(values, deterministic=deterministic), pool), values

        info, model = new(0)
        for _ in range(1200):
            operation = dice.choice(["merge", "merge empty", "filter", "filter", "keep all", "drop all", "refused"])
            if operation.startswith("merge"):
                other, values = new(0 if operation == "merge empty" else dice.randrange(1, 6))
                info.merge_batch(other)
                check_rows(other, values, deterministic=deterministic)
                model = model + values
            elif operation == "refused":
                before = state_of(info)
                wrong = dice.choice([[-1], [len(model)], [True], [0, 0], [0, len(model)], [10**30], [0.0], [None]])
                with pytest.raises(BatchError, match="keep_indices"):
                    info.filter_batch(wrong, pool=pool)
                assert state_of(info) == before
            else:
                keep = list(range(len(model)))
                if operation == "filter":
                    keep = dice.sample(keep, dice.randrange(len(keep) + 1))
                elif operation == "drop all" and dice.random() < 0.3:
                    keep = []
                if len(keep) > 24:
                    keep = keep[:24]
                ready = torch.tensor(keep, dtype=torch.int64) if dice.random() < 0.2 else None
                info.filter_batch(keep, ready, pool=pool)
                model = [model[row] for row in keep]
            check_rows(info, model, deterministic=deterministic)


def test_a_filter_of_all_unseeded_rows_still_drops_them() -> None:
    """Rows without a seed are rows: dropping some leaves the others with their requests."""
    info = build(decode_batch([Values()] * 5, deterministic=True))
    info.filter_batch([4])
    late = build(decode_batch([Values(sampling_seed=8)], deterministic=True))
    info.merge_batch(late)
    check_rows(info, [Values(), Values(sampling_seed=8)], deterministic=True)


@pytest.mark.parametrize(
    "keep",
    [
        pytest.param(keep, id=repr(keep))
        for keep in (
            [-1],
            [3],
            [0, 3],
            [0, 0],
            [2, 1, 2],
            [True, False, True],
            [False],
            [1.0],
            ["1"],
            [None],
            [2**63],
            np.array([True, False, True]),
            np.array([-1]),
            np.array([1.0]),
            torch.tensor([True, False, True]),
        )
    ],
)
def test_a_wrong_index_is_refused_and_nothing_changes(pool: StagingPool, keep: Any) -> None:
    """Out of range, negative, twice, a mask, no integer: an error before any lease or any write."""
    values = [Values(0.0), Values(0.5, top_p=0.5), Values(min_p=0.5)]
    info = build(decode_batch(values), pool)
    before, stats = state_of(info), pool.stats()
    with pytest.raises(BatchError, match="keep_indices"):
        info.filter_batch(keep, pool=pool)
    assert state_of(info) == before
    assert pool.stats() == stats
    check_rows(info, values)


@pytest.mark.parametrize(
    "keep", [[2, 0], (2, 0), np.array([2, 0]), np.array([2, 0], dtype=np.uint8), range(2, -1, -2), {2: "", 0: ""}]
)
def test_keep_indices_may_be_any_collection_of_integers(any_pool: StagingPool | None, keep: Any) -> None:
    """The rows come in the order in which they are named."""
    values = [Values(0.0), Values(0.5), Values(min_p=0.5)]
    info = build(decode_batch(values), any_pool)
    info.filter_batch(keep, pool=any_pool)
    check_rows(info, [values[2], values[0]])


@pytest.mark.parametrize(
    "ready",
    [
        torch.tensor([0]),
        torch.tensor([0, 1, 2]),
        torch.tensor([[0, 1]]),
        torch.tensor(0),
        torch.tensor([0.0, 1.0]),
        torch.tensor([0, 7]),
    ],
)
def test_unsuitable_indices_on_the_device_change_nothing(ready: torch.Tensor) -> None:
    """Another length, shape or dtype than the host's indices, or out of range."""
    info = build(decode_batch([Values(0.0), Values(0.5), Values()]))
    before = state_of(info)
    with pytest.raises((BatchError, RuntimeError, IndexError)):
        info.filter_batch([0, 1], ready)
    assert state_of(info) == before


def test_indices_go_through_the_pool_in_one_copy(pool: StagingPool, device: SimulatedDevice) -> None:
    """An index list would be a hidden synchronous upload; indices already on the device need none."""
    info = build(decode_batch([Values(top_k=k + 1) for k in range(4)]), pool)
    calls = device.calls.copy()
    info.filter_batch([3, 1, 0], pool=pool)
    assert device.calls["copy"] - calls["copy"] == 1
    assert device.calls["record"] - calls["record"] == 1
    info.filter_batch([2, 1], torch.tensor([2, 1]), pool=pool)
    info.filter_batch([], pool=pool)
    assert device.calls["copy"] - calls["copy"] == 1
    check_rows(info, [])


def test_a_filter_that_gets_no_slot_changes_nothing(device: SimulatedDevice) -> None:
    """The upload comes before the first write."""
    values = [Values(0.0), Values(0.5)]
    with StagingPool(device, slots=1, max_slots=1, slot_bytes=256, timeout=0) as pool:
        info = build(decode_batch(values), pool)
        before = state_of(info)
        with pytest.raises(PoolExhausted):
            info.filter_batch([1], pool=pool)
        assert state_of(info) == before
        device.finish_all()
        info.filter_batch([1], pool=pool)
        check_rows(info, values[1:])
        device.finish_all()


def test_filter_and_merge_leave_the_tensors_of_a_forward_in_flight_alone() -> None:
    """They replace tensors and never write into them."""
    values = [Values(0.5, sampling_seed=1), Values(0.0, sampling_seed=2)]
    info = build(decode_batch(values, deterministic=True))
    held = tensors_of(info)
    before = [column.clone() for column in held]
    info.filter_batch([1])
    info.merge_batch(build(decode_batch(values, deterministic=True)))
    assert all(torch.equal(one, other) for one, other in zip(held, before, strict=True))
    check_rows(info, [values[1], *values], deterministic=True)


def test_a_batch_can_be_merged_into_itself() -> None:
    """Every row twice."""
    values = [Values(0.5, sampling_seed=1), Values(0.0)]
    info = build(decode_batch(values, deterministic=True))
    info.merge_batch(info)
    check_rows(info, values * 2, deterministic=True)


@pytest.mark.parametrize("rows", [(1, 1), (0, 1), (1, 0), (0, 0)])
@pytest.mark.parametrize("first", [False, True])
def test_deterministic_and_other_batches_do_not_merge(rows: tuple[int, int], first: bool) -> None:
    """Neither side could say whose seeds the others have; nothing is changed, and empty batches are no exception."""
    one = build(decode_batch([Values(0.5)] * rows[0], deterministic=first))
    other = build(decode_batch([Values(0.0)] * rows[1], deterministic=not first))
    before = state_of(one), state_of(other)
    with pytest.raises(BatchError, match="deterministic"):
        one.merge_batch(other)
    assert (state_of(one), state_of(other)) == before


def test_batches_for_different_vocabularies_do_not_merge() -> None:
    """They belong to different models."""
    one = build(decode_batch([Values(0.5)]))
    other = SamplingBatchInfo.from_schedule_batch(decode_batch([Values()]), VOCABULARY + 1)
    before = state_of(one)
    with pytest.raises(BatchError, match=f"vocabulary {VOCABULARY + 1} .*{VOCABULARY}"):
        one.merge_batch(other)
    assert state_of(one) == before


def test_batches_on_different_devices_do_not_merge() -> None:
    """The rows would have to be copied behind the caller's back."""
    one = build(decode_batch([Values(0.5)]))
    batch = decode_batch([Values()])
    batch.device = torch.device("meta")
    other = build(batch)
    before = state_of(one)
    with pytest.raises(BatchError, match="meta"):
        one.merge_batch(other)
    assert state_of(one) == before


def test_filtering_after_the_requests_changed_uses_the_rows_that_were_built() -> None:
    """Flags come from the values on the device, not from what the parameter objects say by now."""
    batch = decode_batch([Values(0.0), Values(0.5)], foreign=True)
    info = build(batch)
    batch.reqs[1].sampling_params = foreign_params(Values(0.0, 0.5, 5, 0.5))
    vars(batch.reqs[0].sampling_params).update(temperature=2.0)
    info.filter_batch([0])
    check_rows(info, [Values(0.0)])


def test_a_merge_that_runs_out_of_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All columns are made before the first one is put in place."""
    requests = [Request("a", SamplingParams(0.5, top_k=3)), Request("b", SamplingParams(0.25, top_k=4))]
    info = SamplingBatchInfo.from_schedule_batch(ScheduleBatch(requests, "cpu", "decode"), 100)
    join, calls = torch.cat, []

    def failing(parts: Any) -> torch.Tensor:
        calls.append(parts)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("injected")
        return join(parts)

    monkeypatch.setattr(torch, "cat", failing)
    with pytest.raises(torch.OutOfMemoryError):
        info.merge_batch(info)
    assert {len(info), len(info.temperatures), len(info.top_ps), len(info.top_ks), len(info.min_ps)} == {2}

"""One upload for two entry points: when it is shared, when it is made anew, and what it costs."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from batch_builders import (
    KINDS,
    Values,
    check_rows,
    decode_batch,
    expected_table,
    foreign_params,
    new_tokens,
    open_pool,
    own_params,
    prefill_batch,
    random_values,
    request,
)

from batching import (
    BatchError,
    CacheIndexError,
    Request,
    SamplingBatchInfo,
    SamplingParams,
    SamplingValueError,
    ScheduleBatch,
    stage_batch,
    stage_rows,
    write_cache_indices,
)
from batching.info import KEEP
from batching.stage import PREFILL
from staging import Field, FieldError, Layout, LeaseTooLarge, PoolExhausted, StagingPool
from staging.testing import SimulatedDevice

SAMPLING_FIRST, CACHE_FIRST = ("sampling", "cache"), ("cache", "sampling")
VALUES = [Values(0.5, 0.9, 40, 0.1, 7), Values(0.0), Values(sampling_seed=-1)]
LENGTHS = [(3, 2), (0, 4), (5, 1)]


def three_requests() -> ScheduleBatch:
    return prefill_batch(LENGTHS, values=VALUES, deterministic=True)


def check_sampling(batch: ScheduleBatch, pool: StagingPool | None, values: list[Values]) -> None:
    info = SamplingBatchInfo.from_schedule_batch(batch, 1000, pool)
    check_rows(info, values, deterministic=batch.deterministic)


def check_cache(batch: ScheduleBatch, pool: StagingPool | None) -> None:
    """Write into a fresh table, and compare the table and every staged column with their definitions."""
    table = torch.full((16, 64), -1, dtype=torch.int32)
    fresh = new_tokens(batch)
    wanted = expected_table(table, batch, fresh)
    staged = write_cache_indices(batch, table, fresh, pool)
    assert torch.equal(table, wanted)
    prefixes = [one.prefix_indices for one in batch.reqs]
    lengths = [0 if prefix is None else len(prefix) for prefix in prefixes]
    extends = [one.extend_input_len for one in batch.reqs]
    columns = {name: tensor.tolist() for name, tensor in staged.tensors.items() if name in CACHE_DTYPES}
    assert columns == {
        "prefix_pointers": [
            prefix.data_ptr() if length else 0 for prefix, length in zip(prefixes, lengths, strict=True)
        ],
        "req_pool_indices": [one.req_pool_idx for one in batch.reqs],
        "prefix_lens": lengths,
        "extend_lens": extends,
        "seq_lens": [length + extend for length, extend in zip(lengths, extends, strict=True)],
        "extend_starts": [sum(extends[:row]) for row in range(len(extends))],
    }
    for name, dtype in CACHE_DTYPES.items():
        assert staged.tensors[name].dtype == dtype
        assert staged.tensors[name].shape == (len(batch.reqs),)


CACHE_DTYPES = {
    "prefix_pointers": torch.uint64,
    "req_pool_indices": torch.int64,
    "prefix_lens": torch.int64,
    "extend_lens": torch.int64,
    "seq_lens": torch.int64,
    "extend_starts": torch.int64,
}


class Scheduler:
    """Calls the entry points by name and counts what they ask of the device."""

    def __init__(self, pool: StagingPool, device: SimulatedDevice) -> None:
        self.pool = pool
        self.device = device

    def call(self, part: str, batch: ScheduleBatch, values: list[Values] | None = None) -> dict[str, int]:
        before = self.device.calls.copy()
        if part == "cache":
            check_cache(batch, self.pool)
        else:
            check_sampling(batch, self.pool, VALUES if values is None else values)
        self.device.finish_all()
        assert self.device.violations == []
        return dict(self.device.calls - before)


@pytest.fixture
def scheduler(pool: StagingPool, device: SimulatedDevice) -> Scheduler:
    return Scheduler(pool, device)


NOTHING: dict[str, int] = {}


def copies(calls: dict[str, int]) -> int:
    return calls.get("copy", 0)


# ---------------------------------------------------------------------- one copy


@pytest.mark.parametrize("order", [SAMPLING_FIRST, CACHE_FIRST])
def test_a_prefill_batch_is_one_copy_whichever_entry_point_comes_first(
    scheduler: Scheduler, order: tuple[str, str]
) -> None:
    """The steady state: one copy, one record, one device allocation, no host buffer; the second call asks nothing."""
    for number in range(20):
        batch = three_requests()
        first = scheduler.call(order[0], batch)
        second = scheduler.call(order[1], batch)
        queries = {"done": first["done"]} if "done" in first else {}
        assert first == {"copy": 1, "record": 1, "empty": 1, **queries}
        assert second == NOTHING
        assert queries.get("done", 0) <= (number > 0) * 2
    stats = scheduler.pool.stats()
    assert (stats.uploads, stats.leases_ready, stats.fields) == (20, 20, 20 * 11)
    assert stats.bytes_peak == PREFILL.nbytes(rows=3)


@pytest.mark.parametrize("part", ["sampling", "cache"])
def test_each_entry_point_works_alone(scheduler: Scheduler, part: str) -> None:
    """And costs one copy."""
    for _ in range(5):
        assert copies(scheduler.call(part, three_requests())) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [SAMPLING_FIRST, CACHE_FIRST])
def test_both_entry_points_are_right_with_every_kind_of_pool(kind: str, order: tuple[str, str]) -> None:
    """Random batches of all sizes, the parts in either order."""
    dice = random.Random(3)
    with open_pool(kind) as pool:
        for _ in range(40):
            rows = dice.randrange(0, 12)
            values = [random_values(dice) for _ in range(rows)]
            lengths = [(dice.randrange(6), dice.randrange(6)) for _ in range(rows)]
            batch = prefill_batch(lengths, values=values, deterministic=dice.random() < 0.5)
            for part in order:
                if part == "cache":
                    check_cache(batch, pool)
                else:
                    check_sampling(batch, pool, values)


@pytest.mark.parametrize("part", ["sampling", "cache"])
def test_calling_an_entry_point_again_stages_anew(scheduler: Scheduler, part: str) -> None:
    """What was staged serves each of them once: the caller of the first may have kept and changed its tensors."""
    batch = three_requests()
    assert [copies(scheduler.call(part, batch)) for _ in range(3)] == [1, 1, 1]


def test_after_both_were_served_the_next_pair_is_a_new_upload(scheduler: Scheduler) -> None:
    """The same batch object, built again step after step."""
    batch = three_requests()
    calls = [copies(scheduler.call(part, batch)) for part in (*SAMPLING_FIRST, *CACHE_FIRST, *SAMPLING_FIRST)]
    assert calls == [1, 0, 1, 0, 1, 0]
    assert batch.staged is None


def test_an_entry_point_called_twice_still_shares_its_second_upload(scheduler: Scheduler) -> None:
    """The newest upload is the one that is kept."""
    batch = three_requests()
    assert [copies(scheduler.call(part, batch)) for part in ("sampling", "sampling", "cache")] == [1, 1, 0]


def test_decode_batches_stage_the_sampling_columns_only(scheduler: Scheduler) -> None:
    """No prefix is looked at, nothing stays on the batch, and the copy is that much smaller."""
    batch = decode_batch(VALUES, deterministic=True)
    batch.reqs[0].prefix_indices = "not even a tensor"
    assert scheduler.call("sampling", batch) == {"copy": 1, "record": 1, "empty": 1}
    assert batch.staged is None
    assert scheduler.pool.stats().fields == 5


def test_a_batch_that_turns_to_decode_is_served_or_staged_anew_but_right(scheduler: Scheduler) -> None:
    """The sampling columns do not depend on the mode."""
    batch = three_requests()
    scheduler.call("cache", batch)
    batch.forward_mode = "decode"
    scheduler.call("sampling", batch)
    scheduler.call("sampling", batch)


def test_the_second_entry_point_on_another_stream_waits_for_the_copy(
    scheduler: Scheduler, device: SimulatedDevice
) -> None:
    """The stream waits, not the host, and the allocation is marked as used there."""
    batch = three_requests()
    scheduler.call("sampling", batch)
    device.stream = 5
    assert scheduler.call("cache", batch) == {"wait": 1, "record_stream": 1}


def test_no_copy_no_lease_for_an_empty_prefill_batch(scheduler: Scheduler) -> None:
    """In either order, with nothing written."""
    for order in (SAMPLING_FIRST, CACHE_FIRST):
        batch = prefill_batch([], deterministic=True)
        for part in order:
            assert copies(scheduler.call(part, batch, [])) == 0
    assert scheduler.pool.stats().uploads == 0


# ---------------------------------------------------------------------- a changed batch is staged anew


def remove_one(batch: ScheduleBatch) -> list[Values]:
    del batch.reqs[1]
    return [VALUES[0], VALUES[2]]


def add_one(batch: ScheduleBatch) -> list[Values]:
    extra = Values(0.25, sampling_seed=99)
    batch.reqs.append(request("extra", extra, extend_input_len=1, req_pool_idx=9))
    return [*VALUES, extra]


def reorder(batch: ScheduleBatch) -> list[Values]:
    batch.reqs.reverse()
    return VALUES[::-1]


def put_a_twin_in_its_place(batch: ScheduleBatch) -> list[Values]:
    batch.reqs[0] = request("twin", Values(0.75), extend_input_len=2, req_pool_idx=0)
    return [Values(0.75), *VALUES[1:]]


def put_another_list(batch: ScheduleBatch) -> list[Values]:
    batch.reqs = [batch.reqs[2], batch.reqs[0]]
    return [VALUES[2], VALUES[0]]


def toggle_deterministic(batch: ScheduleBatch) -> list[Values]:
    batch.deterministic = not batch.deterministic
    return VALUES


def replace_params(batch: ScheduleBatch) -> list[Values]:
    batch.reqs[1].sampling_params = own_params(Values(0.125, sampling_seed=5))
    return [VALUES[0], Values(0.125, sampling_seed=5), VALUES[2]]


def replace_params_by_foreign_ones(batch: ScheduleBatch) -> list[Values]:
    batch.reqs[1].sampling_params = foreign_params(Values(0.125, sampling_seed=5))
    return [VALUES[0], Values(0.125, sampling_seed=5), VALUES[2]]


def replace_a_prefix(batch: ScheduleBatch) -> list[Values]:
    batch.reqs[0].prefix_indices = torch.tensor([90, 91, 92])
    return VALUES


def replace_a_prefix_by_none(batch: ScheduleBatch) -> list[Values]:
    batch.reqs[2].prefix_indices = None
    return VALUES


def fill_an_empty_prefix(batch: ScheduleBatch) -> list[Values]:
    batch.reqs[1].prefix_indices = torch.tensor([90])
    return VALUES


def extend_by_another_length(batch: ScheduleBatch) -> list[Values]:
    batch.reqs[1].extend_input_len = 7
    return VALUES


def move_to_another_row(batch: ScheduleBatch) -> list[Values]:
    batch.reqs[1].req_pool_idx = 11
    return VALUES


Change = Callable[[ScheduleBatch], list[Values]]
REQUEST_CHANGES: list[Change] = [
    remove_one,
    add_one,
    reorder,
    put_a_twin_in_its_place,
    put_another_list,
    toggle_deterministic,
]
PARAMS_CHANGES: list[Change] = [replace_params, replace_params_by_foreign_ones]
CACHE_CHANGES: list[Change] = [
    replace_a_prefix,
    replace_a_prefix_by_none,
    fill_an_empty_prefix,
    extend_by_another_length,
    move_to_another_row,
]


@pytest.mark.parametrize("change", REQUEST_CHANGES + CACHE_CHANGES)
def test_cache_rows_of_a_batch_changed_in_between_are_staged_anew(scheduler: Scheduler, change: Change) -> None:
    """Between the sampling columns and the cache rows the batch became another one."""
    batch = three_requests()
    assert copies(scheduler.call("sampling", batch)) == 1
    values = change(batch)
    assert copies(scheduler.call("cache", batch)) == 1
    assert copies(scheduler.call("sampling", batch, values)) == 0


@pytest.mark.parametrize("change", REQUEST_CHANGES + PARAMS_CHANGES)
def test_sampling_columns_of_a_batch_changed_in_between_are_staged_anew(scheduler: Scheduler, change: Change) -> None:
    """The other way round."""
    batch = three_requests()
    assert copies(scheduler.call("cache", batch)) == 1
    values = change(batch)
    assert copies(scheduler.call("sampling", batch, values)) == 1
    assert copies(scheduler.call("cache", batch)) == 0


@pytest.mark.parametrize("change", PARAMS_CHANGES + CACHE_CHANGES)
@pytest.mark.parametrize("order", [SAMPLING_FIRST, CACHE_FIRST])
def test_whatever_changes_in_between_both_parts_are_right(
    scheduler: Scheduler, change: Change, order: tuple[str, str]
) -> None:
    """Also where the change concerns only the part that was taken already."""
    batch = three_requests()
    scheduler.call(order[0], batch)
    values = change(batch)
    for part in (order[1], *order):
        scheduler.call(part, batch, values)


@pytest.mark.parametrize("mutated", [False, True])
def test_foreign_params_are_compared_by_value_in_between(scheduler: Scheduler, mutated: bool) -> None:
    """Unchanged they share the upload; mutated they are staged anew, and right."""
    batch = three_requests()
    for one, value in zip(batch.reqs, VALUES, strict=True):
        one.sampling_params = foreign_params(value)
    values = list(VALUES)
    scheduler.call("cache", batch)
    if mutated:
        batch.reqs[1].sampling_params.temperature = 2.5
        values[1] = Values(2.5)
    assert copies(scheduler.call("sampling", batch, values)) == mutated


def test_a_foreign_param_that_turned_bad_in_between_clears_what_was_staged(scheduler: Scheduler) -> None:
    """The error comes as for a new batch; mended, the batch is staged anew."""
    batch = three_requests()
    batch.reqs[0].sampling_params = foreign_params(VALUES[0])
    scheduler.call("cache", batch)
    batch.reqs[0].sampling_params.top_p = 7
    stats = scheduler.pool.stats()
    with pytest.raises(SamplingValueError, match="request 'r0': top_p: 7"):
        SamplingBatchInfo.from_schedule_batch(batch, 1000, scheduler.pool)
    assert batch.staged is None
    assert scheduler.pool.stats() == stats
    batch.reqs[0].sampling_params.top_p = VALUES[0].top_p
    assert copies(scheduler.call("sampling", batch)) == 1


@pytest.mark.parametrize("order", [SAMPLING_FIRST, CACHE_FIRST])
def test_another_pool_stages_anew(scheduler: Scheduler, order: tuple[str, str]) -> None:
    """Also no pool is another pool: an A/B switch must not take the other side's tensors."""
    with StagingPool("cpu", slots=1, slot_bytes=1024) as other:
        for second, uploads in [(other, 1), (None, 1), (other, 2)]:
            batch = three_requests()
            scheduler.call(order[0], batch)
            check_cache(batch, second) if order[1] == "cache" else check_sampling(batch, second, VALUES)
            assert other.stats().uploads == uploads
            assert copies(scheduler.call(order[0], batch)) == 1


def test_in_place_changes_of_a_prefix_are_seen_until_the_table_is_written(scheduler: Scheduler) -> None:
    """What is staged is the pointer; the indices behind it are read when the table is written."""
    batch = three_requests()
    scheduler.call("sampling", batch)
    batch.reqs[0].prefix_indices.add_(17)
    assert copies(scheduler.call("cache", batch)) == 0


# ---------------------------------------------------------------------- an exception in between


def wrong_table(batch: ScheduleBatch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    fresh = new_tokens(batch)
    good = torch.zeros(16, 64, dtype=torch.int32)
    yield good.to(torch.int64), fresh
    yield good[:1], fresh
    yield good[:, :3], fresh
    yield good, fresh[:-1]
    yield good, fresh.to(torch.int32)


def test_a_refused_table_clears_what_was_staged(scheduler: Scheduler) -> None:
    """The next try stages anew, once, and is right."""
    for case in range(len(list(wrong_table(three_requests())))):
        batch = three_requests()
        scheduler.call("sampling", batch)
        stats = scheduler.pool.stats()
        table, fresh = list(wrong_table(batch))[case]
        with pytest.raises(CacheIndexError):
            write_cache_indices(batch, table, fresh, scheduler.pool)
        assert batch.staged is None
        assert scheduler.pool.stats() == stats
        assert copies(scheduler.call("cache", batch)) == 1
        assert copies(scheduler.call("sampling", batch)) == 0


def test_a_write_that_fails_after_the_upload_clears_what_was_staged(scheduler: Scheduler) -> None:
    """A table that torch refuses to write: the batch is as new."""
    batch = three_requests()
    with torch.inference_mode():
        table = torch.zeros(16, 64, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"[Ii]nference"):
        write_cache_indices(batch, table, new_tokens(batch), scheduler.pool)
    assert batch.staged is None
    assert copies(scheduler.call("cache", batch)) == 1
    assert copies(scheduler.call("sampling", batch)) == 0


@pytest.mark.parametrize("call", ["empty", "copy", "record"])
@pytest.mark.parametrize("order", [SAMPLING_FIRST, CACHE_FIRST])
def test_a_failing_copy_clears_what_was_staged(
    scheduler: Scheduler, device: SimulatedDevice, call: str, order: tuple[str, str]
) -> None:
    """Nothing of a failed upload is ever served."""
    batch = three_requests()
    device.fail(call)
    with pytest.raises(RuntimeError, match="injected"):
        scheduler.call(order[0], batch)
    assert batch.staged is None
    assert [copies(scheduler.call(part, batch)) for part in order] == [1, 0]


def test_no_slot_in_time_leaves_the_batch_as_it_was(device: SimulatedDevice) -> None:
    """Both entry points raise the pool's error, and go through once a copy has run."""
    with StagingPool(device, slots=1, max_slots=1, slot_bytes=1024, timeout=0) as pool:
        batch, other = three_requests(), three_requests()
        check_sampling(other, pool, VALUES)
        table = torch.zeros(16, 64, dtype=torch.int32)
        for attempt in (
            lambda: SamplingBatchInfo.from_schedule_batch(batch, 1000, pool),
            lambda: write_cache_indices(batch, table, new_tokens(batch), pool),
        ):
            with pytest.raises(PoolExhausted):
                attempt()
            assert batch.staged is None
        assert not table.any()
        check_cache(other, pool)  # served from the upload that is in flight
        device.finish_all()
        check_cache(batch, pool)
        check_sampling(batch, pool, VALUES)
        device.finish_all()


def test_a_prefill_batch_beyond_max_bytes_is_refused_whole() -> None:
    """Enough room for the sampling columns alone is not enough; the table stays as it was."""
    batch = prefill_batch([(0, 1)] * 17)
    most = PREFILL.nbytes(rows=16)
    with StagingPool("cpu", slots=1, slot_bytes=256, max_bytes=most) as pool:
        table = torch.full((17, 4), -1, dtype=torch.int32)
        with pytest.raises(LeaseTooLarge, match=f"{PREFILL.nbytes(rows=17)} bytes"):
            write_cache_indices(batch, table, new_tokens(batch), pool)
        assert bool((table == -1).all())
        assert batch.staged is None
        check_cache(prefill_batch([(0, 1)] * 16), pool)


# ---------------------------------------------------------------------- prefix pointers


def test_prefix_tensors_are_held_until_the_table_is_written(scheduler: Scheduler) -> None:
    """Prefixes given as temporaries live as long as their pointers are needed, and no longer."""
    batch = three_requests()
    for number, one in enumerate(batch.reqs):
        one.prefix_indices = (torch.arange(20) * (number + 2))[number : number + 4]
    prefix = weakref.ref(batch.reqs[0].prefix_indices)
    scheduler.call("sampling", batch)
    gc.collect()
    scheduler.call("cache", batch)
    batch.reqs.clear()
    gc.collect()
    assert prefix() is None


def test_a_replaced_prefix_replaces_the_remembered_pointer(any_pool: StagingPool | None) -> None:
    """A pointer is good only for the very tensor it was read from; the old tensor is let go."""
    batch = three_requests()
    for step in range(5):
        old = weakref.ref(batch.reqs[0].prefix_indices)
        batch.reqs[0].prefix_indices = torch.arange(step + 1) + 100 * step
        check_cache(batch, any_pool)
        known = batch.reqs[0].known_prefix
        assert known is not None
        assert known[0]() is batch.reqs[0].prefix_indices
        gc.collect()
        assert old() is None


def test_a_replaced_prefix_is_let_go_before_the_next_batch(any_pool: StagingPool | None) -> None:
    """What is remembered of a prefix does not keep it: KV indices of a retracted request are free at once."""
    batch = three_requests()
    check_cache(batch, any_pool)
    batch.staged = None
    prefixes = [weakref.ref(one.prefix_indices) for one in batch.reqs]
    for one in batch.reqs:
        one.prefix_indices = None
    gc.collect()
    assert [prefix() for prefix in prefixes] == [None] * 3


def test_a_remembered_prefix_is_not_asked_again(any_pool: StagingPool | None) -> None:
    """A pool's worth of steps later the same tensor still gives the same pointer."""
    batch = three_requests()
    check_cache(batch, any_pool)
    known = [one.known_prefix for one in batch.reqs]
    for _ in range(10):
        check_cache(batch, any_pool)
    assert all(one.known_prefix is before for one, before in zip(batch.reqs, known, strict=True))


def test_views_of_one_tensor_have_their_own_pointers(any_pool: StagingPool | None) -> None:
    """Shared prefixes: overlapping slices, one tensor for two requests, an offset of one element."""
    batch = three_requests()
    shared = torch.arange(100) + 7
    for one, prefix in zip(batch.reqs, (shared[1:6], shared[3:9], shared[1:6]), strict=True):
        one.prefix_indices = prefix
    check_cache(batch, any_pool)
    for one in batch.reqs:
        one.prefix_indices = shared[:12]
    check_cache(batch, any_pool)


def test_foreign_requests_without_a_place_for_the_pointer_work(any_pool: StagingPool | None) -> None:
    """Only the five attribute names are needed."""
    requests = [
        SimpleNamespace(
            rid=str(row),
            sampling_params=foreign_params(VALUES[row]),
            prefix_indices=torch.arange(LENGTHS[row][0]) + row,
            extend_input_len=np.int32(LENGTHS[row][1]),
            req_pool_idx=torch.tensor(row),
        )
        for row in range(3)
    ]
    batch = ScheduleBatch(requests, "cpu")
    check_cache(batch, any_pool)
    check_sampling(batch, any_pool, VALUES)


@pytest.mark.parametrize("kind", KINDS)
def test_pointers_of_all_sizes_arrive_as_they_are(kind: str) -> None:
    """Addresses at and above 2**63 are addresses: uint64 all the way, from lists, tuples and numpy arrays."""
    pointers = [0, 1, 2**47, 2**63 - 1, 2**63, 2**64 - 16, 2**64 - 1]
    layout = Layout([Field("prefix_pointers", torch.uint64)])
    with open_pool(kind) as pool:
        for values in (pointers, tuple(pointers), np.array(pointers, dtype=np.uint64)):
            tensor = stage_rows(layout, {"prefix_pointers": values}, pool, torch.device("cpu"))["prefix_pointers"]
            assert tensor.dtype == torch.uint64
            assert tensor.tolist() == pointers
        batch = three_requests()
        stage_batch(batch, pool, "cache")
        for one, pointer in zip(batch.reqs, pointers[-3:], strict=True):
            prefix, _, *rest = one.known_prefix or (one.prefix_indices, 0, 0)
            one.known_prefix = (prefix, pointer, *rest)
        assert stage_batch(batch, pool, "cache").tensors["prefix_pointers"].tolist() == pointers[-3:]


@pytest.mark.parametrize("pointer", [-1, 2**64, 2**70, -(2**63)])
def test_what_is_no_pointer_is_refused(any_pool: StagingPool | None, pointer: int) -> None:
    """Nothing wraps into an address; the slot comes back."""
    layout = Layout([Field("prefix_pointers", torch.uint64)])
    with pytest.raises(FieldError, match=f"field 'prefix_pointers': {pointer} "):
        stage_rows(layout, {"prefix_pointers": [0, pointer]}, any_pool, torch.device("cpu"))
    if any_pool is not None:
        assert (any_pool.stats().uploads, any_pool.stats().filling, any_pool.stats().discards) == (0, 0, 1)


def test_lengths_that_sum_beyond_32_bits_are_summed_exactly(any_pool: StagingPool | None) -> None:
    """Starts are int64 whatever integers the lengths come as."""
    for kind in (int, np.int32, np.array, torch.tensor):
        batch = prefill_batch([(0, 0)] * 4)
        for row, one in enumerate(batch.reqs):
            one.extend_input_len = kind(2**30 + row)
        staged = stage_batch(batch, any_pool, "cache")
        assert staged.tensors["extend_starts"].tolist() == [0, 2**30, 2**31 + 1, 3 * 2**30 + 3]
        assert staged.tensors["seq_lens"].tolist() == [2**30, 2**30 + 1, 2**30 + 2, 2**30 + 3]


# ---------------------------------------------------------------------- rows of any layout, and devices


def test_stage_rows_uploads_columns_of_any_layout_in_one_copy(pool: StagingPool, device: SimulatedDevice) -> None:
    """A decode step's arrays: one copy for all of them."""
    layout = Layout([Field("input_ids", torch.int64), Field("positions", torch.int32), Field("live", torch.bool)])
    columns: dict[str, Any] = {"input_ids": [5, 6, 7], "positions": np.arange(3), "live": [True, False, True]}
    tensors = stage_rows(layout, columns, pool, torch.device("cpu"))
    plain = stage_rows(layout, columns, None, torch.device("cpu"))
    for name in columns:
        assert tensors[name].dtype == plain[name].dtype
        assert torch.equal(tensors[name], plain[name])
    assert device.calls["copy"] == 1


@pytest.mark.parametrize("keep", [[], [0], [4, 2, 0], list(range(300))])
def test_keep_indices_are_staged_as_int64(any_pool: StagingPool | None, keep: list[int]) -> None:
    """The layout that filtering uses."""
    tensor = stage_rows(KEEP, {"keep_indices": keep}, any_pool, torch.device("cpu"))["keep_indices"]
    assert (tensor.dtype, tensor.tolist()) == (torch.int64, keep)


def test_stage_rows_without_a_pool_does_not_alias_its_values() -> None:
    """On the CPU moving a tensor to "the device" would alias the caller's memory."""
    values = np.arange(4)
    tensor = stage_rows(KEEP, {"keep_indices": values}, None, torch.device("cpu"))["keep_indices"]
    values[:] = -1
    assert tensor.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("wrong", [[1.7], [True], ["3"], np.array([1.7]), np.array([2**40]), torch.tensor([2**40])])
def test_stage_rows_refuses_what_does_not_fit_with_and_without_a_pool(any_pool: StagingPool | None, wrong: Any) -> None:
    """The A/B switch must not change what a wrong value means: nothing wraps, nothing is cut off."""
    layout = Layout([Field("positions", torch.int32)])
    with pytest.raises(FieldError, match="field 'positions'"):
        stage_rows(layout, {"positions": wrong}, any_pool, torch.device("cpu"))
    assert any_pool is None or (any_pool.stats().uploads, any_pool.stats().filling) == (0, 0)


def test_stage_rows_refuses_columns_of_different_lengths(any_pool: StagingPool | None) -> None:
    """A row is a row in every column."""
    layout = Layout([Field("a", torch.int64), Field("b", torch.int64)])
    with pytest.raises((FieldError, BatchError), match=r"\bb\b.* 3 values"):
        stage_rows(layout, {"a": [1, 2], "b": [1, 2, 3]}, any_pool, torch.device("cpu"))
    assert any_pool is None or any_pool.stats().filling == 0


@pytest.mark.parametrize("kind", ["no pool", "cpu", "simulated"])
@pytest.mark.parametrize("values", [[[1, 2], [3, 4]], np.array([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 4]])])
def test_stage_rows_takes_entries_of_several_elements(kind: str, values: Any) -> None:
    """What the pool takes, the way without it takes as well."""
    layout = Layout([Field("spans", torch.int64, shape=(2,))])
    with open_pool(kind) as pool:
        tensor = stage_rows(layout, {"spans": values}, pool, torch.device("cpu"))["spans"]
        assert tensor.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("part", ["sampling", "cache"])
def test_a_pool_for_another_device_is_refused(scheduler: Scheduler, part: Any) -> None:
    """Before a lease, by either entry point, in the words of both devices."""
    batch = three_requests()
    batch.device = torch.device("cuda:1")
    with pytest.raises(BatchError, match=r"the batch is for cuda:1, .*'ring'.* uploads to cpu; use a pool per device"):
        stage_batch(batch, scheduler.pool, part)
    assert scheduler.pool.stats().leases == 0


def test_stage_rows_refuses_a_pool_for_another_device(pool: StagingPool) -> None:
    """Rows must not land on a device that the caller did not ask for."""
    with pytest.raises(BatchError):
        stage_rows(KEEP, {"keep_indices": [0]}, pool, torch.device("meta"))


def test_a_remembered_prefix_is_checked_against_the_batch_s_device() -> None:
    """A request that moves to a batch on another device brings a pointer of the old one."""
    batch = three_requests()
    stage_batch(batch, None, "cache")
    batch.device = torch.device("meta")
    with pytest.raises(CacheIndexError, match="request 'r0': prefix_indices is on cpu, the batch on meta"):
        stage_batch(batch, None, "cache")


def test_own_params_are_not_read_again_but_compared_by_identity(scheduler: Scheduler) -> None:
    """Equal parameters in another object are another object: staged anew, and the same values."""
    batch = three_requests()
    scheduler.call("cache", batch)
    batch.reqs[0].sampling_params = SamplingParams(**VALUES[0]._asdict())
    assert copies(scheduler.call("sampling", batch)) == 1


@pytest.mark.parametrize("order", [SAMPLING_FIRST, CACHE_FIRST])
def test_a_batch_is_known_by_its_requests_not_by_their_values(scheduler: Scheduler, order: tuple[str, str]) -> None:
    """Another request with the same parameters, prefix, length and row makes another batch."""
    batch = three_requests()
    scheduler.call(order[0], batch)
    one = batch.reqs[0]
    batch.reqs[0] = Request("twin", one.sampling_params, one.prefix_indices, one.extend_input_len, one.req_pool_idx)
    assert copies(scheduler.call(order[1], batch)) == 1

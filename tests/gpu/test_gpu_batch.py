"""Building a prefill batch on a real device: what it costs in calls, and that the kernel writes what it should."""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from batching import Request, SamplingBatchInfo, SamplingParams, ScheduleBatch, write_cache_indices
from staging import StagingPool


def prefill(rows: int, seed: int = 0, longest: int = 3000) -> tuple[ScheduleBatch, torch.Tensor, torch.Tensor]:
    """A prefill batch on the GPU, a table for it, and KV indices for its new tokens."""
    draw = random.Random(seed)
    requests = []
    for row in range(rows):
        prefix = torch.randint(1, 1 << 30, (draw.choice([0, 1, 1023, 1024, draw.randrange(longest)]),), device="cuda")
        params = SamplingParams(draw.random(), 0.9, draw.choice([-1, 20]), 0.01 * draw.randrange(2), row - 3)
        requests.append(Request(f"r{row}", params, prefix, draw.choice([0, 1, 16, draw.randrange(2000)]), row))
    new = sum(request.extend_input_len for request in requests)
    out_cache_loc = torch.randint(1, 1 << 30, (new + 1,), device="cuda")[1:]  # 8 bytes off: alignment must not matter
    table = torch.full((rows + 1, longest + 2000), -1, dtype=torch.int32, device="cuda")
    return ScheduleBatch(requests, "cuda", deterministic=True), table, out_cache_loc


def naive(batch: ScheduleBatch, table: torch.Tensor, out_cache_loc: torch.Tensor) -> torch.Tensor:
    start = 0
    for request in batch.reqs:
        prefix, new = request.prefix_indices, out_cache_loc[start : start + request.extend_input_len]
        start += request.extend_input_len
        table[request.req_pool_idx, : len(prefix)] = prefix.int()
        table[request.req_pool_idx, len(prefix) : len(prefix) + len(new)] = new.int()
    return table


def build(batch: ScheduleBatch, table: torch.Tensor, out_cache_loc: torch.Tensor, pool: StagingPool):
    write_cache_indices(batch, table, out_cache_loc, pool)
    return SamplingBatchInfo.from_schedule_batch(batch, 1000, pool)


@contextmanager
def synchronisation_is_an_error() -> Iterator[None]:
    """torch's own alarm for calls that make the host wait."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 257])
def test_the_kernel_equals_a_naive_loop(rows):
    """Rows, blocks and alignments of all kinds, and not an entry beside the rows."""
    with StagingPool("cuda") as pool:
        for seed in range(8):
            batch, table, out_cache_loc = prefill(rows, seed)
            expected = naive(batch, table.clone(), out_cache_loc)
            info = build(batch, table, out_cache_loc, pool)
            assert torch.equal(table, expected)
            plain = SamplingBatchInfo.from_schedule_batch(ScheduleBatch(batch.reqs, "cuda", deterministic=True), 1000)
            for name in ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed"):
                assert torch.equal(getattr(info, name), getattr(plain, name)), name


def test_one_compiled_variant_serves_all_batches():
    """Batch size, lengths, table widths and alignments change; nothing is compiled anew."""
    from batching.kernel import write_rows

    with StagingPool("cuda") as pool:
        for rows in [*range(1, 20), 64, 127, 128, 1000]:
            batch, _, out_cache_loc = prefill(rows, rows, longest=300)
            for width in (3201, 3200 + rows, 4096):
                wide = torch.zeros((rows, width), dtype=torch.int32, device="cuda")
                write_cache_indices(ScheduleBatch(batch.reqs, "cuda"), wide, out_cache_loc, pool)
        single = torch.zeros((4, 1), dtype=torch.int32, device="cuda")
        one = Request("one", SamplingParams(), None, 1, 2)
        write_cache_indices(ScheduleBatch([one], "cuda"), single, out_cache_loc[:1], pool)
    variants = write_rows.device_caches[torch.cuda.current_device()][0]
    assert len(variants) == 1


def test_rows_far_into_a_large_table_are_addressed_in_64_bits():
    """Row times stride passes 2**31 (and 2**32) elements."""
    table = torch.zeros((3000, 1_500_000), dtype=torch.int32, device="cuda")
    prefix = torch.arange(1, 2000, device="cuda")
    batch = ScheduleBatch([Request("far", SamplingParams(), prefix, 3, 2999)], "cuda")
    with StagingPool("cuda") as pool:
        write_cache_indices(batch, table, torch.arange(7, 10, device="cuda"), pool)
    assert table[2999, :2002].tolist() == [*range(1, 2000), 7, 8, 9]
    assert int(table[:2999].any()) == 0


def test_prefixes_may_be_dropped_once_the_kernel_is_queued(held_stream):
    """Temporaries given as prefixes: their memory is not reused before the kernel has read it."""
    with StagingPool("cuda") as pool:
        batch, table, out_cache_loc = prefill(32, 5)
        expected = naive(batch, table.clone(), out_cache_loc)
        write_cache_indices(*prefill(1, 6), pool)  # compiled
        with held_stream():
            write_cache_indices(batch, table, out_cache_loc, pool)
            batch.staged = None
            for request in batch.reqs:
                request.prefix_indices = request.known_prefix = None
            gc.collect()
            others = [torch.full((n,), -7, device="cuda") for n in (1, 1023, 1024, 2000, 2999) for _ in range(50)]
        assert torch.equal(table, expected)
        del others


def test_a_steady_prefill_batch_is_one_copy_one_record_and_no_synchronisation():
    """By the profiler: 1 copy, from pinned memory; 1 event record; 0 synchronisations; 0 device-side surprises."""
    with StagingPool("cuda") as pool:
        batches = [prefill(16, seed) for seed in range(12)]
        for batch, table, out_cache_loc in batches[:6]:
            build(batch, table, out_cache_loc, pool)
        torch.cuda.synchronize()
        batch, table, out_cache_loc = batches[6]
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True):
            build(*batches[5], pool)  # the profiler's own first use
        before = pool.stats()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiled:
            build(batch, table, out_cache_loc, pool)
        torch.cuda.synchronize()
        used = pool.stats()
    names = [event.name for event in profiled.events()]
    copies = [name for name in names if name.startswith("Memcpy")]
    assert copies == ["Memcpy HtoD (Pinned -> Device)"]
    assert sum(name.startswith("cudaMemcpyAsync") for name in names) == 1
    assert sum(name.startswith("cudaEventRecord") for name in names) == 1
    # The profiler synchronises the device when it stops; the batch itself may not, in any way.
    waits = [name for name in names if "Synchronize" in name and name != "cudaDeviceSynchronize"]
    assert waits == []
    # cudaMallocAsync as torch's allocator is a call for each device tensor; it allocates nothing on the host.
    of_torch = ("cudaMallocAsync", "cudaFreeAsync") if torch.cuda.get_allocator_backend() == "cudaMallocAsync" else ()
    allocations = [name for name in names if name.startswith(("cudaHostAlloc", "cudaMalloc", "cudaFree"))]
    assert set(allocations) <= set(of_torch)
    assert (used.uploads - before.uploads, used.allocations - before.allocations) == (1, 0)


def test_a_launcher_that_takes_other_arguments_is_left_for_tritons_own_launch(monkeypatch, caplog):
    """As another version of Triton may have it: one line in the log, and the table is right, now and afterwards."""
    import batching.kernel as kernel

    class Other:
        def __getitem__(self, grid):
            def launch(*arguments):
                raise TypeError("function takes exactly 8 arguments (9 given)")

            return launch

    monkeypatch.setattr(kernel, "_compiled", {torch.cuda.current_device(): Other()})
    monkeypatch.setattr(kernel, "_direct", True)
    with StagingPool("cuda") as pool:
        for seed in (1, 2):
            batch, table, out_cache_loc = prefill(16, seed)
            expected = naive(batch, table.clone(), out_cache_loc)
            write_cache_indices(batch, table, out_cache_loc, pool)
            assert torch.equal(table, expected)
    assert len([record for record in caplog.records if "own launch" in record.message]) == 1
    assert kernel._compiled == {}


def test_a_thousand_steady_batches_allocate_no_host_memory():
    """Not by torch's own count of pinned allocations, and not by the pool's."""
    with StagingPool("cuda") as pool:
        batches = [prefill(16, seed) for seed in range(4)]
        for batch, table, out_cache_loc in batches:
            build(batch, table, out_cache_loc, pool)
        torch.cuda.synchronize()
        before, own = torch.cuda.host_memory_stats(), pool.stats()
        for step in range(1000):
            batch, table, out_cache_loc = batches[step % 4]
            build(batch, table, out_cache_loc, pool)
            if step % 3 == 2:
                torch.cuda.synchronize()  # a scheduler reads tokens now and then; else the ring would have to grow
        after, used = torch.cuda.host_memory_stats(), pool.stats()
    for name in ("allocations.allocated", "num_host_alloc", "segments.allocated", "allocation.allocated"):
        assert after.get(name, 0) == before.get(name, 0), name
    assert any("alloc" in name for name in before), sorted(before)
    assert (used.allocations, used.uploads - own.uploads) == (own.allocations, 1000)


def test_building_a_batch_does_not_wait_for_queued_work(held_stream):
    """Both entry points return while the stream is held; torch's synchronisation alarm is on."""
    with StagingPool("cuda") as pool:
        # Every kernel once before: CUDA loads a module when it is first used, and waits for the device then.
        info = build(*prefill(16, 1), pool)
        info.filter_batch([3, 0, 7], pool=pool)
        info.merge_batch(info)
        batch, table, out_cache_loc = prefill(16, 2)
        expected = naive(batch, table.clone(), out_cache_loc)
        torch.cuda.synchronize()
        with held_stream():
            with synchronisation_is_an_error():
                info = build(batch, table, out_cache_loc, pool)
                info.filter_batch([3, 0, 7], pool=pool)
                info.merge_batch(info)
            queued = torch.cuda.Event()
            queued.record()
            assert not queued.query()
        assert torch.equal(table, expected)
        assert info.sampling_seed.tolist() == [0, -3, 4, 0, -3, 4]


def test_building_behind_200_ms_of_work_returns_at_once():
    """The same with 200 ms of queued work instead of a latch: the work has not ended when the call has."""
    with StagingPool("cuda") as pool:
        build(*prefill(16, 1), pool)
        batch, table, out_cache_loc = prefill(16, 2)
        torch.cuda.synchronize()
        torch.cuda._sleep(400_000_000)  # 200 ms at 2 GHz
        worked = torch.cuda.Event()
        worked.record()
        build(batch, table, out_cache_loc, pool)
        assert not worked.query()
        torch.cuda.synchronize()

"""The cases of docs/cases.md that only a real device can confirm; races are arranged with a held stream."""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from batching import (
    BatchError,
    CacheIndexError,
    Request,
    SamplingBatchInfo,
    SamplingParams,
    SamplingValueError,
    ScheduleBatch,
    write_cache_indices,
)
from batching.replay.scheduler import Scheduler, Settings
from batching.replay.trace import builtin_trace
from batching.stage import PREFILL
from staging import Field, Layout, LeaseError, LeaseTooLarge, PinningError, PoolExhausted, StagingPool, Upload
from staging._cuda import CudaDevice

Hold = Callable[..., AbstractContextManager[Callable[[], None]]]

ROOT = Path(__file__).parents[2]
FIELDS = [field.name for field in PREFILL.fields]
COLUMN = Layout([Field("column", torch.int64)])
ALLOCATOR = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "default"
default_allocator = pytest.mark.skipif(ALLOCATOR != "default", reason="a control that needs torch's own allocator")


@pytest.fixture(autouse=True, scope="module")
def kernels_are_loaded() -> None:
    """Runs once what the tests run behind a held stream: CUDA loads a kernel at its first use, and waits then."""
    if not torch.cuda.is_available():
        return
    for dtype in (torch.uint8, torch.int32, torch.int64, torch.float32):
        tensor = torch.full((64,), 3, dtype=dtype, device="cuda")
        tensor.clone().copy_(tensor)
        (tensor - 1, (tensor != 3).sum(), torch.zeros_like(tensor), tensor.index_select(0, tensor.long()))
    torch.arange(8, device="cuda")
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()


def fill(lease: Any, stamp: int) -> Any:
    for name in FIELDS:
        lease[name] = stamp
    return lease


def send(pool: StagingPool, stamp: int, rows: int = 64, **options: Any) -> Upload:
    """One upload in which every value of every field is the stamp."""
    with pool.lease(PREFILL, rows=rows) as lease:
        return fill(lease, stamp).upload(**options)


def stamps(upload: Upload) -> set[float]:
    """All values that arrived; waits for the device."""
    torch.cuda.synchronize()
    return {value for tensor in upload.values() for value in tensor.reshape(-1).tolist()}


def release_at_first_poll(pool: StagingPool, release: Callable[[], None]) -> None:
    """Lets the held stream go on from within the pool's own wait: a real wait that does not depend on timing."""
    sleep = pool._device.sleep

    def sleeping(seconds: float) -> None:
        release()
        sleep(seconds)

    pool._device.sleep = sleeping  # type: ignore[method-assign]


def still_running() -> bool:
    """Whether the current stream has not come to its end."""
    event = torch.cuda.Event()
    event.record()
    return not event.query()


def decode(rows: int, first_seed: int = 0) -> ScheduleBatch:
    requests = [
        SimpleNamespace(
            rid=str(row),
            sampling_params=SimpleNamespace(
                temperature=0.5 + first_seed + row / 8, top_p=0.5, top_k=5, min_p=0.0, sampling_seed=first_seed + row
            ),
        )
        for row in range(rows)
    ]
    return ScheduleBatch(requests, "cuda", forward_mode="decode", deterministic=True)


def one_request(prefix: torch.Tensor | None, new: int, row: int = 0) -> ScheduleBatch:
    return ScheduleBatch([Request("one", SamplingParams(), prefix, new, row)], "cuda")


# ---------------------------------------------------------------------- host memory rewritten under a copy


def test_every_field_of_every_step_is_that_step_s_own(held_stream: Hold) -> None:
    """B01: two rounds through the ring, the second waiting for the held first; all fields have their step's value."""
    with StagingPool("cuda", slots=4, max_slots=4) as pool:
        pool.warm()
        with held_stream() as release:
            release_at_first_poll(pool, release)
            uploads = [send(pool, step) for step in range(8)]
        assert [stamps(upload) for upload in uploads] == [{step} for step in range(8)]
        assert pool.stats().leases_waited >= 1


def test_no_way_to_write_reaches_a_slot_in_flight(held_stream: Hold) -> None:
    """B02: with the only slot in flight on a held stream, its fields, a filter and a new batch are all refused."""
    with StagingPool("cuda", slots=1, max_slots=1, timeout=0) as pool:
        info = SamplingBatchInfo.from_schedule_batch(decode(4), 9, pool)
        torch.cuda.synchronize()
        lease = fill(pool.lease(PREFILL, rows=64), 5)
        with held_stream():
            upload = lease.upload()
            for name in FIELDS:
                with pytest.raises(LeaseError):
                    lease[name] = 6
            with pytest.raises(PoolExhausted):
                info.filter_batch([1], pool=pool)
            with pytest.raises(PoolExhausted):
                SamplingBatchInfo.from_schedule_batch(decode(4), 9, pool)
        assert stamps(upload) == {5}


@pytest.mark.parametrize("slots", [1, 2])
def test_steps_beyond_the_ring_are_refused_while_the_stream_is_held(held_stream: Hold, slots: int) -> None:
    """B05: five steps on one slot and on two: refused while nothing moves, right when they may wait."""
    with StagingPool("cuda", slots=slots, max_slots=slots, timeout=0) as pool:
        pool.warm()
        torch.cuda.synchronize()
        with held_stream():
            uploads = [send(pool, step) for step in range(slots)]
            for step in range(slots, 5):
                with pytest.raises(PoolExhausted, match=f"{slots} in flight"):
                    send(pool, step)
        assert [stamps(upload) for upload in uploads] == [{step} for step in range(slots)]
        pool.timeout = 10
        uploads = [send(pool, step) for step in range(5)]
        assert [stamps(upload) for upload in uploads] == [{step} for step in range(5)]


def test_slow_work_between_hand_out_and_upload_is_waited_for(held_stream: Hold) -> None:
    """B07: a hold and a large device copy stand in front of each upload; own values each step, and waits counted."""
    source = torch.ones(16 << 20, dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    target.copy_(source)
    with StagingPool("cuda", slots=2, max_slots=2) as pool:
        pool.warm()
        torch.cuda.synchronize()
        uploads = []
        with held_stream() as release:
            release_at_first_poll(pool, release)
            for step in range(6):
                lease = pool.lease(PREFILL, rows=64)
                target.copy_(source)
                uploads.append(fill(lease, step).upload())
        assert [stamps(upload) for upload in uploads] == [{step} for step in range(6)]
        assert pool.stats().leases_waited >= 1


def test_overlapped_forwards_see_their_own_sampling_values() -> None:
    """B10: forwards slower than the host, each keeping the columns it saw: none differs, and nothing was allocated."""
    with StagingPool("cuda", slots=2, max_slots=2) as pool:
        pool.warm()
        torch.cuda._sleep(1000)
        torch.cuda.synchronize()
        before, pinned = pool.stats(), torch.cuda.host_memory_stats().get("num_host_alloc", 0)
        seen = []
        for step in range(300):
            info = SamplingBatchInfo.from_schedule_batch(decode(4, 10 * step), 9, pool)
            torch.cuda._sleep(2_000_000)  # about a millisecond
            seen.append((info.temperatures.clone(), info.sampling_seed.clone()))
        torch.cuda.synchronize()
        stats = pool.stats()
        assert torch.cuda.host_memory_stats().get("num_host_alloc", 0) == pinned
        assert stats.allocations == before.allocations
        assert stats.met_in_flight > before.met_in_flight
    for step, (temperatures, seeds) in enumerate(seen):
        assert temperatures.reshape(-1).tolist() == [0.5 + 10 * step + row / 8 for row in range(4)]
        assert seeds.tolist() == [10 * step + row for row in range(4)]


def signed_distances(pool: StagingPool, steps: int, out: torch.Tensor | None = None) -> list[torch.Tensor]:
    """got - expected for each step, still on the device."""
    results = []
    for step in range(1, steps + 1):
        with pool.lease(COLUMN, rows=1000) as lease:
            lease["column"] = step
            results.append(lease.upload(out=out)["column"] - step)
    return results


@pytest.mark.usefixtures("unguarded")
def test_the_harness_sees_the_future_where_the_guard_is_missing(held_stream: Hold) -> None:
    """B11: without the guard the signed distances are positive, and none is negative."""
    with StagingPool("cuda", slots=2, max_slots=2) as pool:
        signed_distances(pool, 1)
        torch.cuda.synchronize()
        with held_stream():
            distances = signed_distances(pool, 8)
        assert max(int(distance.max()) for distance in distances) > 0
        assert min(int(distance.min()) for distance in distances) >= 0


def test_the_harness_sees_the_past_where_a_copy_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """B11: with one upload in five dropped the signed distances are negative, and none is positive; else all are 0."""
    out = torch.zeros(COLUMN.nbytes(rows=1000), dtype=torch.uint8, device="cuda")
    with StagingPool("cuda", slots=2, max_slots=2) as pool:
        assert {int(distance.abs().max()) for distance in signed_distances(pool, 10, out)} == {0}
        copy, calls = CudaDevice.copy, []

        def loses_some(*arguments: Any) -> None:
            calls.append(1)
            if len(calls) % 5:
                copy(*arguments)

        monkeypatch.setattr(CudaDevice, "copy", loses_some)
        distances = [int(distance.min()) for distance in signed_distances(pool, 10, out)]
        assert min(distances) < 0
        assert max(distances) == 0


# ---------------------------------------------------------------------- events, streams and the host's time


def test_a_slot_whose_event_could_not_be_recorded_waits_for_its_copy(held_stream: Hold) -> None:
    """B16: an event never recorded says done; the slot is not handed out on its word while the copy is queued."""
    out = torch.zeros(PREFILL.nbytes(rows=64), dtype=torch.uint8, device="cuda")
    with StagingPool("cuda", slots=1, max_slots=1, timeout=0) as pool:
        first = send(pool, 1, out=out)
        assert stamps(first) == {1}
        record = pool._device.record

        def fails_once(event: Any, stream: Any) -> None:
            pool._device.record = record  # type: ignore[method-assign]
            raise RuntimeError("injected: no event")

        lease = fill(pool.lease(PREFILL, rows=64), 2)
        with held_stream():
            pool._device.record = fails_once  # type: ignore[method-assign]
            with pytest.raises(RuntimeError, match="injected: no event"):
                lease.upload(out=out)
            assert pool.stats().quarantined == 1
            for _ in range(3):
                with pytest.raises(PoolExhausted):
                    send(pool, 3)
        assert stamps(first) == {2}  # the failed upload's copy had been queued, and carried its own bytes
        for step in range(4, 8):
            assert stamps(send(pool, step)) == {step}
        stats = pool.stats()
        assert (stats.slots, stats.quarantined, stats.heals) == (1, 0, 1)


def test_waiting_takes_little_of_the_processor() -> None:
    """B17: of some hundred milliseconds of waiting the thread spends most asleep; events are the device module's."""
    with StagingPool("cuda", slots=1, max_slots=1) as pool:
        pool.warm()
        torch.cuda._sleep(1000)
        torch.cuda.synchronize()
        torch.cuda._sleep(600_000_000)  # 300 ms at 2 GHz
        send(pool, 1)
        begin = time.thread_time_ns()
        send(pool, 2)
        used = time.thread_time_ns() - begin
        stats = pool.stats()
        assert stats.leases_waited == 1
        assert used < stats.wait_ns / 2
        assert {type(slot.event) for slot in pool._ring.slots} == {torch.cuda.Event}


def test_streams_may_go_and_their_handles_come_again() -> None:
    """B19: uploads on streams that are dropped at once, more than torch has handles for: all values are right."""
    with StagingPool("cuda", slots=2, max_slots=2) as pool:
        uploads = []
        for step in range(100):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                uploads.append(send(pool, step))
            del stream
            if step % 25 == 0:
                gc.collect()
        assert [stamps(upload) for upload in uploads] == [{step} for step in range(100)]
        assert pool.stats().slots == 2


def test_the_default_stream_is_a_stream_like_any_other(held_stream: Hold) -> None:
    """B19: its handle is 0; a slot uploaded on it is in use, and a reader elsewhere waits for it."""
    reader = torch.cuda.Stream()
    with StagingPool("cuda", slots=1, max_slots=1, timeout=0) as pool:
        with torch.cuda.stream(torch.cuda.default_stream()):
            stamps(send(pool, 1))
            with held_stream():
                upload = send(pool, 2)
                with pytest.raises(PoolExhausted):
                    send(pool, 3)
                upload.wait(reader)
                with torch.cuda.stream(reader):
                    read = upload["top_ks"].clone()
        assert set(read.tolist()) == {2}


def test_other_threads_run_while_the_pool_waits_or_closes(held_stream: Hold) -> None:
    """B20: a pure Python counter keeps counting during a wait for a held stream, and during close()."""
    ticks, over = [0], threading.Event()

    def count() -> None:
        while not over.is_set():
            ticks[0] += 1

    pool = StagingPool("cuda", slots=1, max_slots=1)
    stamps(send(pool, 1))
    thread = threading.Thread(target=count)
    with held_stream():
        send(pool, 2)
        thread.start()
        try:
            begin = ticks[0]
            with pytest.raises(PoolExhausted):
                pool.lease(PREFILL, rows=1, timeout=0.2)
            waiting, begin = ticks[0] - begin, ticks[0]
            pool.close(timeout=0.2)
            closing = ticks[0] - begin
        finally:
            over.set()
            thread.join()
    assert min(waiting, closing) > 2000


def test_tokens_read_back_by_the_replay_are_never_what_lay_there_before() -> None:
    """B22: the buffers the replay reads tokens from hold a sentinel at first; it is never taken for one."""
    settings = Settings(ahead=2, forward_us=3000.0)
    with StagingPool("cuda") as pool:
        scheduler = Scheduler(builtin_trace(12), pool, settings)
        sentinels = [torch.full((settings.max_batch,), -7, dtype=torch.int64).pin_memory() for _ in range(8)]
        scheduler._landing.extend(sentinels)
        result = scheduler.run()  # refuses tokens outside the vocabulary
    assert result.requests == 12
    assert result.mismatches is not None
    assert sum(result.mismatches.values()) == 0


# ---------------------------------------------------------------------- other streams, and the memory of tensors


@pytest.mark.parametrize("marked", [True, pytest.param(False, marks=default_allocator)])
def test_tensors_dropped_at_once_are_safe_on_the_stream_that_waited(held_stream: Hold, marked: bool) -> None:
    """B25: a held reader gets its values although the upload's stream has long had the memory back; the control not."""
    uploading, reading = torch.cuda.Stream(), torch.cuda.Stream()
    with StagingPool("cuda") as pool:
        if not marked:
            pool._device.record_stream = lambda tensor, stream: None  # type: ignore[method-assign]
        nbytes = PREFILL.nbytes(rows=64)
        with torch.cuda.stream(uploading):
            stamps(send(pool, 1))
            torch.full((nbytes,), 249, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(reading), held_stream():
            with torch.cuda.stream(uploading):
                upload = send(pool, 5)
            upload.wait(reading)
            read = upload["top_ks"].clone()
            del upload
            with torch.cuda.stream(uploading):
                others = [torch.full((nbytes,), 249, dtype=torch.uint8, device="cuda") for _ in range(100)]
            uploading.synchronize()
        assert (set(read.tolist()) == {5}) == marked
        del others


def test_a_slice_kept_from_an_old_step_stays_as_it_was() -> None:
    """B26: an alias that outlives its step by N + 2 steps, with its memory's neighbours freed and taken again."""
    with StagingPool("cuda", slots=2, max_slots=2) as pool:
        kept = send(pool, 1)["top_ks"][3:]
        for step in range(2, 50):
            send(pool, step)
            torch.full((PREFILL.nbytes(rows=64),), 249, dtype=torch.uint8, device="cuda")
        assert set(kept.tolist()) == {1}


ALLOCATOR_TESTS = (
    "test_every_field_of_every_step_is_that_step_s_own",
    "test_the_allocator_is_the_one_that_was_asked_for",
    "test_tensors_dropped_at_once_are_safe_on_the_stream_that_waited",
    "test_a_slice_kept_from_an_old_step_stays_as_it_was",
    "test_a_reader_on_another_stream_waits_for_a_slow_upload",
    "test_temporaries_of_another_stream_are_safe_where_it_is_named",
    "test_rows_are_rewritten_when_the_caller_s_event_has_passed",
)


@default_allocator
@pytest.mark.parametrize("allocator", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_other_allocators_of_torch_change_nothing(allocator: str) -> None:
    """B26: what depends on the lifetime of device memory, again in a process of its own under each allocator."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default"]
        + [f"{__file__}::{name}" for name in ALLOCATOR_TESTS],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "PYTORCH_ALLOC_CONF": allocator, "PYTORCH_CUDA_ALLOC_CONF": allocator},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "passed" in done.stdout


def test_the_allocator_is_the_one_that_was_asked_for() -> None:
    """B26: the run above is under the allocator it names."""
    torch.zeros(1, device="cuda")
    assert torch.cuda.get_allocator_backend() == ("cudaMallocAsync" if "cudaMallocAsync" in ALLOCATOR else "native")


def test_a_reader_on_another_stream_waits_for_a_slow_upload() -> None:
    """B28: two hundred uploads, each behind 64 MiB, read elsewhere after `wait`: right every time."""
    uploading, reading = torch.cuda.Stream(), torch.cuda.Stream()
    heavy = torch.zeros(64 << 20, dtype=torch.uint8).pin_memory()
    target = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    with StagingPool("cuda") as pool:
        for step in range(200):
            with torch.cuda.stream(uploading):
                target.copy_(heavy, non_blocking=True)
                upload = send(pool, step)
            with torch.cuda.stream(reading):
                upload.wait()
                wrong += (upload["sampling_seed"] != step).sum()
        torch.cuda.synchronize()
    assert int(wrong) == 0


@pytest.mark.parametrize("ordered", [True, False])
def test_rows_are_rewritten_when_the_caller_s_event_has_passed(held_stream: Hold, ordered: bool) -> None:
    """B29: the writing stream waits for the reader's event, and the reader sees the old row; the control does not."""
    reading, writing = torch.cuda.Stream(), torch.cuda.Stream()
    table = torch.full((4, 512), 3, dtype=torch.int32, device="cuda")
    new = torch.full((500,), 8, dtype=torch.int64, device="cuda")
    with StagingPool("cuda") as pool:
        write_cache_indices(one_request(None, 500, 1), table, new, pool)  # compiled and loaded
        torch.cuda.synchronize()
        with torch.cuda.stream(reading), held_stream():
            read = table[2].clone()
            done = torch.cuda.Event()
            done.record()
            with torch.cuda.stream(writing):
                if ordered:
                    writing.wait_event(done)
                write_cache_indices(one_request(None, 500, 2), table, new, pool)
            if not ordered:
                writing.synchronize()
        assert (set(read.tolist()) == {3}) == ordered
        assert table[2].tolist() == [8] * 500 + [3] * 12
        assert table[3].tolist() == [3] * 512


@pytest.mark.parametrize("nbytes", [64 << 10, 300 << 10, 1 << 20])
def test_pageable_slots_are_right_on_streams_that_do_not_wait_for_the_default_one(nbytes: int) -> None:
    """B31: small and large pageable copies, read behind the upload on its own stream and on another after `wait`."""
    uploading, reading = torch.cuda.Stream(), torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    also_wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    with StagingPool("cuda", memory="pageable", slot_bytes=1 << 20) as pool:
        assert pool.memory == "pageable"
        for step in range(150):
            with torch.cuda.stream(uploading), pool.lease(COLUMN, rows=nbytes // 8) as lease:
                lease["column"] = step
                column = lease.upload()
                wrong += (column["column"] != step).sum()
            with torch.cuda.stream(reading):
                column.wait()
                also_wrong += (column["column"] != step).sum()
        torch.cuda.synchronize()
    assert (int(wrong), int(also_wrong)) == (0, 0)


# ---------------------------------------------------------------------- copies that turn synchronous


@pytest.mark.parametrize("form", ["list", "array", "pageable tensor", "pinned tensor", "strided tensor"])
def test_the_source_of_every_copy_is_pinned_whatever_the_values_were(
    monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """B32: asked at the copy itself: pinned, contiguous, and the slot's own memory."""
    copy, sources = CudaDevice.copy, []

    def spy(self: CudaDevice, landing: Any, source: Any, stream: Any) -> None:
        sources.append(source)
        copy(self, landing, source, stream)

    monkeypatch.setattr(CudaDevice, "copy", spy)
    values: Any = {
        "list": [7, 8],
        "array": np.array([7, 8]),
        "pageable tensor": torch.tensor([7, 8]),
        "pinned tensor": torch.tensor([7, 8]).pin_memory(),
        "strided tensor": torch.tensor([7, 0, 8, 0])[::2],
    }[form]
    with StagingPool("cuda", slots=1) as pool:
        with pool.lease(COLUMN, rows=2) as lease:
            lease["column"] = values
            upload = lease.upload()
        (source,) = sources
        assert source.start.value == source.tensor.data_ptr() == pool._ring.slots[0].buffer.tensor.data_ptr()
        assert source.size.value == source.tensor.nbytes == lease.nbytes
        assert source.tensor.is_pinned()
        assert source.tensor.is_contiguous()
    assert upload["column"].tolist() == [7, 8]


@pytest.mark.parametrize("rows", [1, 3, 51, 52])
@pytest.mark.parametrize("tokens", [0, 7])
def test_uploads_of_every_size_return_while_the_stream_is_held(held_stream: Hold, rows: int, tokens: int) -> None:
    """B34: one row, a full slot, with and without a further field: the call does not wait for the queued work."""
    layout = PREFILL + Layout([Field("tokens", torch.int32, "tokens")])
    with StagingPool("cuda", slots=2, max_slots=2, slot_bytes=4096, max_bytes=4096) as pool:

        def build() -> Upload:
            with pool.lease(layout, rows=rows, tokens=tokens) as lease:
                for field in layout.fields:
                    lease[field.name] = 1
                return lease.upload()

        build()
        torch.cuda.synchronize()
        with held_stream():
            upload = build()
            assert still_running()
        assert stamps(upload) == {1}


def test_decode_steps_and_filters_are_one_pinned_copy_and_no_wait() -> None:
    """B35: by the profiler, for the paths beside prefill: 1 copy each, from pinned memory, and nothing synchronises."""
    with StagingPool("cuda") as pool:

        def step() -> None:
            info = SamplingBatchInfo.from_schedule_batch(decode(16), 9, pool)
            info.filter_batch([3, 0, 7], pool=pool)

        for _ in range(10):
            step()
        torch.cuda.synchronize()
        for _ in range(2):  # the first is the profiler's own
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiled:
                step()
            torch.cuda.synchronize()
    names = [event.name for event in profiled.events()]
    assert [name for name in names if name.startswith("Memcpy")] == ["Memcpy HtoD (Pinned -> Device)"] * 2
    assert [name for name in names if "Synchronize" in name and name != "cudaDeviceSynchronize"] == []


@pytest.mark.parametrize("shared", [True, False])
def test_two_dozen_threads_pin_nothing_while_they_work(shared: bool) -> None:
    """B37: with a pool each and with one for all: right values, and no pinned allocation after the start."""
    threads = 24
    pools = [StagingPool("cuda", slots=threads if shared else 2, max_slots=threads if shared else 2)]
    if not shared:
        pools += [StagingPool("cuda", slots=2, max_slots=2) for _ in range(threads - 1)]
    for pool in pools:
        pool.warm()
    torch.cuda.synchronize()
    pinned = torch.cuda.host_memory_stats().get("num_host_alloc", 0)
    allocations = sum(pool.stats().allocations for pool in pools)
    results: list[list[torch.Tensor]] = [[] for _ in range(threads)]
    errors: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            for step in range(40):
                upload = send(pools[worker % len(pools)], 1000 * worker + step, rows=32)
                results[worker].append(upload["sampling_seed"])
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(worker,)) for worker in range(threads)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
    torch.cuda.synchronize()
    assert errors == []
    for worker, tensors in enumerate(results):
        assert torch.stack(tensors)[:, 31].tolist() == [1000 * worker + step for step in range(40)]
        assert torch.stack(tensors)[:, 0].tolist() == [1000 * worker + step for step in range(40)]
    assert torch.cuda.host_memory_stats().get("num_host_alloc", 0) == pinned
    assert sum(pool.stats().allocations for pool in pools) == allocations
    for pool in pools:
        pool.close()


# ---------------------------------------------------------------------- host memory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_default_device_of_cuda_does_not_reach_the_slots(dtype: torch.dtype) -> None:
    """B43, B101: slots are on the host, columns have the documented types, 0.7 arrives as the float32 of it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            pool = StagingPool("cuda", slots=2)
            assert pool.memory == "pinned"
            assert {slot.buffer.tensor.device.type for slot in pool._ring.slots} == {"cpu"}
            params = SamplingParams(0.7, 0.7, 7, 0.7, 7)
            batch = ScheduleBatch([Request("r", params, None, 0, 0)], "cuda", deterministic=True)
            info = SamplingBatchInfo.from_schedule_batch(batch, 9, pool)
            pointers = send(pool, 1)["prefix_pointers"]
            pool.close()
    finally:
        torch.set_default_dtype(before)
    columns = (info.temperatures, info.top_ps, info.top_ks, info.min_ps, info.sampling_seed, pointers)
    types = [torch.float32, torch.float32, torch.int32, torch.float32, torch.int64, torch.uint64]
    assert [column.dtype for column in columns] == types
    assert info.temperatures.item() == info.top_ps.item() == info.min_ps.item() == float(np.float32(0.7))


def test_a_failed_allocation_leaves_nothing_for_the_next_call() -> None:
    """B49: a petabyte is refused, again and again; kernels, Triton's and synchronising work at once afterwards."""
    table = torch.zeros((1, 8), dtype=torch.int32, device="cuda")
    new = torch.full((5,), 8, dtype=torch.int64, device="cuda")
    with StagingPool("cuda") as pool:
        for _ in range(20):
            with pytest.raises(PinningError, match=str(1 << 50)):
                StagingPool("cuda", slots=1, slot_bytes=1 << 50, max_bytes=1 << 50, memory="pinned")
            assert torch.zeros(4, device="cuda").add_(1).tolist() == [1] * 4
            write_cache_indices(one_request(None, 5), table, new, pool)
            torch.cuda.synchronize()
    assert table.tolist() == [[8] * 5 + [0] * 3]


def test_sixty_four_slots_are_at_most_sixty_four_pinned_blocks() -> None:
    """B52: by torch's own count, and none more for any number of fields, rows and steps."""
    before = torch.cuda.host_memory_stats().get("num_host_alloc", 0)
    with StagingPool("cuda", slots=64, max_slots=64) as pool:
        for step in range(200):
            send(pool, step, rows=1 + step)
        assert torch.cuda.host_memory_stats().get("num_host_alloc", 0) - before <= 64
        assert pool.stats().allocations == 64


@pytest.mark.parametrize(("nbytes", "locked"), [(1, 1), (4097, 8192), ((1 << 20) + 1, 1 << 21)])
def test_pinned_bytes_are_what_torch_really_took(nbytes: int, locked: int) -> None:
    """B55: as torch counts the blocks in use."""
    key = "active_bytes.current"
    gc.collect()
    for _ in range(2):  # torch notices blocks that are free again when it is next asked for one
        torch.cuda.synchronize()
        torch.empty(1, dtype=torch.uint8, pin_memory=True)
    before = torch.cuda.host_memory_stats()
    if key not in before:
        pytest.skip(f"this torch does not count {key}")
    with StagingPool("cuda", slots=3, slot_bytes=nbytes, max_bytes=nbytes) as pool:
        after = torch.cuda.host_memory_stats()
        assert pool.stats().pinned_bytes == after[key] - before[key] == 3 * locked


def test_larger_batches_get_larger_slots_while_small_ones_are_in_flight(held_stream: Hold) -> None:
    """B56: what is asked for is what the slot holds, and the copies in flight keep their source."""
    with StagingPool("cuda", slots=2, max_slots=4, slot_bytes=4096, timeout=0) as pool:
        pool.warm()
        torch.cuda.synchronize()
        with held_stream():
            small = [send(pool, step, rows=40) for step in range(2)]
            large = [send(pool, 10 + step, rows=400) for step in range(2)]
            with pytest.raises(PoolExhausted):
                send(pool, 20, rows=800)
        assert [stamps(upload) for upload in small + large] == [{0}, {1}, {10}, {11}]
        assert stamps(send(pool, 20, rows=800)) == {20}


def test_serving_frees_no_pinned_memory(held_stream: Hold) -> None:
    """B58: enlarging, dropping leases and uploads, and closing another pool, all while the stream is held: no wait."""
    other = StagingPool("cuda", slots=2)
    with StagingPool("cuda", slots=2, max_slots=2, slot_bytes=4096) as pool:
        stamps(send(other, 1))
        stamps(send(pool, 1))
        send(pool, 2, rows=100)
        torch.cuda.synchronize()
        freed = torch.cuda.host_memory_stats().get("num_host_free", 0)
        with held_stream():
            upload = send(pool, 3, rows=800)
            other.close()
            pool.lease(COLUMN, rows=1)  # dropped
            gc.collect()
            pool.lease(COLUMN, rows=1).discard()
            assert still_running()
        assert torch.cuda.host_memory_stats().get("num_host_free", 0) == freed
        assert pool.stats().enlarged >= 1
        assert stamps(upload) == {3}


def test_engines_in_a_row_use_the_same_memory_again() -> None:
    """B61: fifty pools of 32 MiB, one after another, lock no more than the first few did."""
    locked = []
    for step in range(50):
        pool = StagingPool("cuda", slots=2, slot_bytes=16 << 20)
        assert stamps(send(pool, step)) == {step}
        pool.close()
        del pool
        torch.cuda.synchronize()
        locked.append(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
    assert locked[-1] <= locked[2]


# ---------------------------------------------------------------------- graphs being captured


def test_another_stream_of_the_capturing_thread_may_upload_under_relaxed_mode() -> None:
    """B62: slots in flight are asked for while a graph is captured; values are right, and the graph is good."""
    side = torch.cuda.Stream()
    source, target = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda")
    with StagingPool("cuda", slots=1, max_slots=1) as pool:
        with torch.cuda.stream(side):
            stamps(send(pool, 1))
        target.copy_(source)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            target.copy_(source)
            with torch.cuda.stream(side):
                uploads = [send(pool, 2), send(pool, 3)]
        source.fill_(5)
        graph.replay()
        assert target.tolist() == [5.0] * 8
        assert [stamps(upload) for upload in uploads] == [{2}, {3}]


GLOBAL_CAPTURE = """
import contextlib, threading, torch
from staging import Field, Layout, StagingError, StagingPool

COLUMN = Layout([Field("column", torch.int64)])

def send(stamp):
    with pool.lease(COLUMN, rows=1000) as lease:
        lease["column"] = stamp
        return lease.upload()["column"]

def capture():
    # A query of the other thread may invalidate the capture: that is the driver's rule, and not what is looked at.
    with contextlib.suppress(RuntimeError), torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="global")
        try:
            tensor.add_(1)
            capturing.set()
            over.wait(30)
        finally:
            graph.capture_end()

tensor = torch.zeros(8, device="cuda")
graph = torch.cuda.CUDAGraph()
pool = StagingPool("cuda", slots=1, max_slots=1, timeout=0)
first = send(1).clone()
torch.cuda.synchronize()
capturing, over = threading.Event(), threading.Event()
thread = threading.Thread(target=capture)
thread.start()
assert capturing.wait(30)
try:
    assert pool._device.broken() is None
    with contextlib.suppress(StagingError, RuntimeError):
        pool.lease(COLUMN, rows=1).discard()
finally:
    over.set()
    thread.join(30)
assert pool._ring.refusal is None, pool
with contextlib.suppress(StagingError):
    send(2)  # where the capture went wrong, the first call afterwards may still be told so
with contextlib.suppress(RuntimeError):
    torch.cuda.synchronize()  # the ring is one slot
assert set(send(3).tolist()) == {3}
assert set(first.tolist()) == {1}
"""


def test_a_capture_in_global_mode_breaks_no_pool() -> None:
    """B62, B64: the driver refuses event queries meanwhile; the pool is not taken for broken, and goes on after."""
    done = subprocess.run(
        [sys.executable, "-c", GLOBAL_CAPTURE],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_another_thread_may_upload_during_captures_in_thread_local_mode() -> None:
    """B62, B64: twenty captures, one after another, while a second thread runs steps: all good, on both sides."""
    source, target = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda")
    target.copy_(source)
    over, errors, sent = threading.Event(), [], []

    def work(pool: StagingPool) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not over.is_set():
                    sent.append(send(pool, len(sent) % 1000)["sampling_seed"])
        except BaseException as error:
            errors.append(error)

    with StagingPool("cuda", slots=2, max_slots=2) as pool:
        stamps(send(pool, 1))
        worker = threading.Thread(target=work, args=(pool,))
        worker.start()
        graphs = []
        try:
            for _ in range(20):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    so_far = len(sent)
                    target.copy_(source)
                    deadline = time.monotonic() + 5
                    while len(sent) < so_far + 3 and not errors and time.monotonic() < deadline:
                        time.sleep(0)  # lets the other thread have the interpreter
                graphs.append(graph)
        finally:
            over.set()
            worker.join()
        torch.cuda.synchronize()
    assert errors == []
    for value, graph in enumerate(graphs):
        source.fill_(value)
        graph.replay()
        assert target.tolist() == [float(value)] * 8
    assert torch.stack(sent)[:, 5].tolist() == [step % 1000 for step in range(len(sent))]


# ---------------------------------------------------------------------- processes

FORKS = """
import gc, os, sys, warnings
warnings.simplefilter("ignore")
import torch
import batching
from staging import Field, Layout, PoolForked, StagingPool

LAYOUT = Layout([Field("column", torch.int64)])

def steps(pool, number):
    sent = []
    for step in range(number):
        with pool.lease(LAYOUT, rows=100) as lease:
            lease["column"] = step
            sent.append(lease.upload()["column"])
    return all(set(column.tolist()) == {step} for step, column in enumerate(sent))

def child(run):
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = 0 if run() else 2
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

assert not torch.cuda.is_initialized(), "importing touched CUDA"
print("opened in a child:", child(lambda: steps(StagingPool("cuda"), 100)))

pools = [StagingPool("cuda")]
assert steps(pools[0], 10)

def inherited():
    pool = pools[0]
    repr(pool), pool.stats()
    try:
        pool.lease(LAYOUT, rows=1)
    except PoolForked as error:
        refused = f"pid {os.getpid()}" in str(error)
    pools.clear()
    del pool
    gc.collect()
    return refused

print("inherited by a child:", child(inherited))
print("parent afterwards:", steps(pools[0], 10))
pools.pop().close()
"""


def test_a_pool_lives_in_the_process_that_made_it() -> None:
    """B73, B74: a child forked before CUDA starts may open a pool; one that inherits one is refused."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.splitlines() == [
        "opened in a child: 0",
        "inherited by a child: 0",
        "parent afterwards: True",
    ], done.stderr[-2000:]
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_process_with_a_pool_on_the_device_ends_quietly() -> None:
    """B76: eight ways to end, each with copies under way: the expected exit code, and no error from the driver."""
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "cases" / "ways_to_end.py", "cuda"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    codes = {way: code for way, (code, _) in found.items()}
    assert codes == {
        "module level": 0,
        "cycle": 0,
        "daemon thread": 0,
        "exit in a step": 3,
        "at once": 4,
        "signal": -15,
        "exception": 1,
        "closed": 0,
    }, found
    for way, (_, text) in found.items():
        assert "Exception ignored" not in text, way
        assert "CUDA" not in text, way
    assert found["exception"][1].rstrip().endswith("LookupError: own mistake")


# ---------------------------------------------------------------------- values, shapes, and the kernel


@pytest.mark.parametrize("moment", ["before the upload", "after the upload"])
def test_an_aborted_step_s_slot_waits_for_its_copy(held_stream: Hold, moment: str) -> None:
    """B85: aborted before the upload the slot is free at once, nothing sent; afterwards when the copy has run."""
    with StagingPool("cuda", slots=1, max_slots=1, timeout=0) as pool:
        stamps(send(pool, 1))
        with held_stream():
            lease = fill(pool.lease(PREFILL, rows=64), 2)
            upload = lease.upload() if moment == "after the upload" else None
            lease.discard()
            if upload is None:
                assert pool.stats().free == 1
                assert pool.stats().uploads == 1
            else:
                with pytest.raises(PoolExhausted):
                    pool.lease(PREFILL, rows=64)
        assert upload is None or stamps(upload) == {2}
        assert stamps(send(pool, 3)) == {3}


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "min_p", "sampling_seed"])
def test_a_number_on_the_device_is_refused_without_waiting_for_it(field: str) -> None:
    """B100: a 0-d tensor on the device would have to be read back; refusing it makes no synchronising call."""
    value = torch.tensor(1, device="cuda")
    batch = decode(2)
    setattr(batch.reqs[1].sampling_params, field, value)
    with StagingPool("cuda") as pool:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        try:
            with pytest.raises(SamplingValueError, match=f"'1': {field}: .*on a device"):
                SamplingBatchInfo.from_schedule_batch(batch, 9, pool)
            with pytest.raises(SamplingValueError, match="on a device"):
                SamplingParams(**{field: value})
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_nothing_beside_the_destination_is_written() -> None:
    """B110: random sizes into the middle of a larger tensor: the bytes before and behind stay, and shapes are exact."""
    dice = random.Random(110)
    arena = torch.full((1 << 16,), 0xA5, dtype=torch.uint8, device="cuda")
    with StagingPool("cuda", slots=2) as pool:
        for _ in range(200):
            rows = dice.randrange(1, 300)
            nbytes = PREFILL.nbytes(rows=rows)
            upload = send(pool, 7, rows=rows, out=arena[64 : 64 + nbytes])
            assert {tuple(tensor.shape) for tensor in upload.values()} == {(rows,), (rows, 1)}
            arena[64 : 64 + nbytes].fill_(0xA5)
    assert int((arena != 0xA5).sum()) == 0


def test_empty_batches_launch_nothing_and_alternate_with_full_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """B113: no rows, or rows of no length: typed tensors on the device, no launch; no copy and no slot without rows."""
    import batching.cache as cache

    launch, launches = cache.kernel_launch(), []
    assert launch is not None

    def spy(*arguments: Any) -> None:
        launches.append(arguments)
        launch(*arguments)

    monkeypatch.setattr(cache, "kernel_launch", lambda: spy)
    table = torch.zeros((5, 8), dtype=torch.int32, device="cuda")
    with StagingPool("cuda") as pool:
        for _ in range(50):
            launches.clear()
            before = pool.stats().uploads
            batch = ScheduleBatch([], "cuda", deterministic=True)
            write_cache_indices(batch, table, torch.zeros(0, dtype=torch.int64, device="cuda"), pool)
            info = SamplingBatchInfo.from_schedule_batch(batch, 9, pool)
            assert (info.temperatures.shape, info.temperatures.device.type) == ((0, 1), "cuda")
            assert info.sampling_seed.dtype == torch.int64
            assert (pool.stats().uploads, launches) == (before, [])
            idle = ScheduleBatch([Request(str(row), SamplingParams(), None, 0, row) for row in range(5)], "cuda")
            write_cache_indices(idle, table, torch.zeros(0, dtype=torch.int64, device="cuda"), pool)
            assert (pool.stats().uploads, launches) == (before + 1, [])
            full = ScheduleBatch([Request(str(row), SamplingParams(), None, 1, row) for row in range(5)], "cuda")
            write_cache_indices(full, table, torch.arange(1, 6, device="cuda"), pool)
            assert len(launches) == 1
    assert table[:, 0].tolist() == [1, 2, 3, 4, 5]
    assert int(table[:, 1:].sum()) == 0


@pytest.mark.parametrize("named", [True, pytest.param(False, marks=default_allocator)])
def test_temporaries_of_another_stream_are_safe_where_it_is_named(held_stream: Hold, named: bool) -> None:
    """B118: prefixes made on one stream and dropped, written on a held other: right if named; the control is not."""
    making, writing = torch.cuda.Stream(), torch.cuda.Stream()
    table = torch.zeros((8, 1200), dtype=torch.int32, device="cuda")
    new = torch.full((8,), 9, dtype=torch.int64, device="cuda")
    with StagingPool("cuda") as pool:
        write_cache_indices(one_request(None, 8), table, new, pool)  # compiled and loaded
        with torch.cuda.stream(making):
            base = torch.arange(1001, device="cuda")
            torch.full((1000,), -7, device="cuda")
            requests = [
                Request(str(row), SamplingParams(), base[1:] + row, 1, row)  # temporaries
                for row in range(8)
            ]
        torch.cuda.synchronize()
        batch = ScheduleBatch(requests, "cuda")
        with torch.cuda.stream(writing), held_stream():
            write_cache_indices(batch, table, new, pool, streams=[writing] if named else [])
            batch.staged = None
            for request in requests:
                request.prefix_indices = request.known_prefix = None
            gc.collect()
            with torch.cuda.stream(making):
                others = [torch.full((1000,), -7, device="cuda") for _ in range(100)]
            making.synchronize()
        expected = (torch.arange(1, 1001) + torch.arange(8)[:, None]).tolist()
        assert (table[:, :1000].tolist() == expected) == named
        assert table[:, 1000].tolist() == [9] * 8
        del others


def test_empty_prefixes_of_every_origin_leave_their_neighbours_alone() -> None:
    """B119: lengths 0, 3, 0, 1, 0, 0: no row is touched beyond its length, and no empty prefix is read."""
    some = torch.arange(10, 20, device="cuda")
    prefixes = [torch.empty(0, dtype=torch.int64, device="cuda"), some[:3], some[:0], some[:1], some[5:5], None]
    requests = [Request(str(row), SamplingParams(), prefix, 1, row) for row, prefix in enumerate(prefixes)]
    table = torch.full((6, 6), -1, dtype=torch.int32, device="cuda")
    with StagingPool("cuda") as pool:
        write_cache_indices(ScheduleBatch(requests, "cuda"), table, torch.arange(6, device="cuda"), pool)
    assert table.tolist() == [
        [0, -1, -1, -1, -1, -1],
        [10, 11, 12, 1, -1, -1],
        [2, -1, -1, -1, -1, -1],
        [10, 3, -1, -1, -1, -1],
        [4, -1, -1, -1, -1, -1],
        [5, -1, -1, -1, -1, -1],
    ]


INVALID: dict[str, tuple[Callable[[], ScheduleBatch], type[Exception]]] = {
    "prefix on the host": (lambda: one_request(torch.arange(3), 5), CacheIndexError),
    "prefix of int32": (lambda: one_request(torch.arange(3, device="cuda").int(), 5), CacheIndexError),
    "strided prefix": (lambda: one_request(torch.arange(6, device="cuda")[::2], 5), CacheIndexError),
    "prefix too long": (lambda: one_request(torch.arange(60, device="cuda"), 5), CacheIndexError),
    "row out of range": (lambda: one_request(None, 5, row=99), CacheIndexError),
    "batch for the host": (
        lambda: ScheduleBatch([Request("one", SamplingParams(), None, 5, 0)], "cpu"),
        BatchError,
    ),
    "too many rows": (
        lambda: ScheduleBatch(
            [Request(str(row), SamplingParams(), None, 5 * (row == 0), row) for row in range(64)], "cuda"
        ),
        LeaseTooLarge,
    ),
    "no slot": (lambda: one_request(None, 5), PoolExhausted),
}


@pytest.mark.parametrize("name", INVALID)
def test_nothing_is_copied_or_launched_for_a_step_that_is_refused(
    monkeypatch: pytest.MonkeyPatch, held_stream: Hold, name: str
) -> None:
    """B116, B124: at the time of the error there was no copy and no launch, and the table is as it was."""
    import batching.cache as cache

    calls: list[str] = []
    table = torch.full((64, 32), -1, dtype=torch.int32, device="cuda")
    new = torch.arange(5, device="cuda")
    make, error = INVALID[name]
    with StagingPool("cuda", slots=1, max_slots=1, slot_bytes=2048, max_bytes=2048, timeout=0) as pool:
        pool.warm()
        torch.cuda.synchronize()
        batch = make()
        torch.cuda.synchronize()
        with held_stream():
            if name == "no slot":
                send(pool, 1, rows=1)
            copy = CudaDevice.copy
            monkeypatch.setattr(cache, "kernel_launch", lambda: lambda *arguments: calls.append("launch"))
            monkeypatch.setattr(CudaDevice, "copy", lambda *arguments: calls.append("copy"))
            with pytest.raises(error):
                write_cache_indices(batch, table, new, pool)
            monkeypatch.setattr(CudaDevice, "copy", copy)
        assert calls == []
        assert int((table != -1).sum()) == 0
        assert stamps(send(pool, 4, rows=1)) == {4}

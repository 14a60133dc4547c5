"""The ring on a real device: races arranged with a held stream, then shown not to happen."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import pytest
import torch

from staging import CaptureError, Destination, Field, Layout, PoolExhausted, StagingPool, _ring
from staging._cuda import Source

STAMPED = Layout(
    [Field("stamp", torch.int64), Field("half", torch.float32), Field("tokens", torch.int32, "tokens")], "stamped"
)


def send(pool: StagingPool, stamp: int, rows: int = 500) -> torch.Tensor:
    with pool.lease(STAMPED, rows=rows, tokens=2 * rows) as lease:
        lease["stamp"] = stamp
        lease["half"] = stamp / 2
        lease["tokens"] = stamp
        upload = lease.upload()
    return torch.cat([upload["stamp"], (upload["half"] * 2).long(), upload["tokens"].long()])


def distances(results: list[torch.Tensor]) -> list[int]:
    """got - expected for each step: positive is future data, negative stale data."""
    offs = [result - stamp for stamp, result in enumerate(results)]
    return [int(off.max()) if int(off.max()) > 0 else int(off.min()) for off in offs]


def test_this_machine_can_show_the_race(held_stream):
    """Positive control without the library: a pinned source rewritten behind a held stream arrives rewritten."""
    source = torch.zeros(1 << 20, dtype=torch.int32, pin_memory=True)
    target = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
    with held_stream():
        target.copy_(source, non_blocking=True)
        source.numpy()[:] = 7
    assert int(target.min()) == 7


@pytest.mark.parametrize("rows", [500, 20_000], ids=["one allocation", "two allocations"])
def test_every_upload_carries_its_own_bytes_behind_a_held_stream(held_stream, rows):
    """A ring that may grow hands out new slots while the stream is held; every value is its own batch's."""
    with StagingPool("cuda", slots=2, max_slots=16, slot_bytes=1 << 20) as pool:
        send(pool, 0, rows)  # every kernel once before: CUDA loads one when it is first used, and waits for the device
        torch.cuda.synchronize()
        with held_stream():
            results = [send(pool, stamp, rows) for stamp in range(16)]
            assert pool.stats().in_flight == 16
        assert distances(results) == [0] * 16


def test_a_slot_in_flight_is_not_handed_out(held_stream):
    """With the stream held and the ring at its limit a lease that may not wait is refused."""
    with StagingPool("cuda", slots=2, max_slots=2, timeout=0) as pool:
        with held_stream():
            results = [send(pool, 0), send(pool, 1)]
            with pytest.raises(PoolExhausted, match="2 in flight"):
                send(pool, 2)
        results.append(send(pool, 2))
        assert distances(results) == [0, 0, 0]


def test_one_question_frees_what_is_over_on_its_stream():
    """Four copies have run: the event of the last answers for all of them."""
    with StagingPool("cuda", slots=4, max_slots=4, timeout=0) as pool:
        results = [send(pool, stamp) for stamp in range(4)]
        torch.cuda.synchronize()
        asked = counting_questions(pool)
        pool._ring._reach = 4
        results += [send(pool, stamp) for stamp in range(4, 8)]
        assert len(asked) == 1
        assert distances(results) == [0] * 8


def one_held_of_three(pool: StagingPool, held_stream) -> list[torch.Tensor]:
    """Three slots, the second behind a latch, the others on a stream whose copies are over; then three more leases."""
    other = torch.cuda.Stream()
    send(pool, 0)  # every kernel once before
    torch.cuda.synchronize()
    with held_stream():
        with torch.cuda.stream(other):
            results = [send(pool, 0)]
        results.append(send(pool, 1))
        with torch.cuda.stream(other):
            results.append(send(pool, 2))
            other.synchronize()
            pool._ring._reach = 3
            results += [send(pool, 3), send(pool, 4)]
            other.synchronize()
            results.append(send(pool, 5))
    return results


def test_the_events_of_one_stream_say_nothing_of_another(held_stream):
    """The slot behind the latch is not handed out, however far the questions about the other stream reach."""
    with StagingPool("cuda", slots=3, max_slots=3, timeout=0) as pool:
        assert distances(one_held_of_three(pool, held_stream)) == [0] * 6
        assert pool.stats().met_in_flight > 0


def test_if_they_did_the_same_run_would_get_future_data(held_stream, monkeypatch):
    """The look at the streams taken out: the slot behind the latch is rewritten."""
    monkeypatch.setattr(_ring, "_proves", lambda later, slot: True)
    with StagingPool("cuda", slots=3, max_slots=3, timeout=0) as pool:
        assert distances(one_held_of_three(pool, held_stream))[1] > 0


def test_a_later_copy_that_waits_says_nothing_and_the_oldest_is_free(held_stream):
    """The first copy has run, the one behind the latch has not: the lease gets the first slot."""
    with StagingPool("cuda", slots=2, max_slots=2, timeout=0) as pool:
        results = [send(pool, 0)]
        torch.cuda.synchronize()
        with held_stream():
            results.append(send(pool, 1))
            pool._ring._reach = 2
            asked = counting_questions(pool)
            results.append(send(pool, 2))
            assert len(asked) == 2
            with pytest.raises(PoolExhausted, match="2 in flight"):
                send(pool, 3)
        assert distances(results) == [0, 0, 0]


def test_only_streams_of_torchs_own_are_known_to_last():
    """Another stream may get the handle of one that somebody destroyed."""
    with StagingPool("cuda") as pool:
        device, own = pool._device, torch.cuda.Stream()
        foreign = torch.cuda.ExternalStream(made_by_the_runtime(pool))
        assert device.lasting(torch.cuda.default_stream().cuda_stream)
        assert not device.lasting(own.cuda_stream)  # never seen as the current one
        for stream, lasts in ((own, True), (foreign, False)):
            with torch.cuda.stream(stream):
                assert device.lasting(device.current_stream()) is lasts
        assert device.lasting(own.cuda_stream)


def counting_questions(pool: StagingPool) -> list[object]:
    """Everything that is asked from now on."""
    asked: list[object] = []
    done = pool._device.done

    def count(event: object) -> bool:
        asked.append(event)
        return done(event)

    pool._device.done = count
    return asked


def made_by_the_runtime(pool: StagingPool) -> int:
    """The handle of a stream that torch did not make."""
    handle = ctypes.c_void_p()
    assert pool._device._runtime.cudaStreamCreate(ctypes.byref(handle)) == 0
    return handle.value


@pytest.mark.usefixtures("unguarded")
def test_without_the_guard_the_same_run_gets_future_data(held_stream):
    """The guard taken out: slots are rewritten under queued copies, and the harness sees it."""
    with StagingPool("cuda", slots=2, max_slots=2) as pool:
        with held_stream():
            results = [send(pool, stamp) for stamp in range(16)]
        assert max(distances(results)) > 0


def test_a_wait_ends_when_the_stream_moves_on(held_stream):
    """A lease that waits is served after the copy before it has run, and the wait is counted."""
    with StagingPool("cuda", slots=1, max_slots=1) as pool:
        with held_stream() as release:
            results = [send(pool, 0)]
            # The flag opens while the lease below polls: a real wait, whose end does not depend on timing.
            timer = _after_first_poll(pool, release)
            results.append(send(pool, 1))
            assert timer.called
        assert distances(results) == [0, 0]
        assert pool.stats().leases_waited == 1


class _after_first_poll:  # noqa: N801
    """Opens the latch from within the pool's own sleep."""

    def __init__(self, pool: StagingPool, release) -> None:
        self.called = False
        sleep = pool._device.sleep

        def sleeping(seconds: float) -> None:
            self.called = True
            release()
            sleep(seconds)

        pool._device.sleep = sleeping


def test_memory_of_a_collected_pool_is_not_reused_under_its_copies(held_stream):
    """Everything dropped while the copies wait: pinned memory taken afterwards does not overwrite what they read."""
    pool = StagingPool("cuda", slots=4, slot_bytes=1 << 16)
    with held_stream():
        results = [send(pool, stamp) for stamp in range(4)]
        del pool
        gc.collect()
        others = [torch.full((1 << 16,), 255, dtype=torch.uint8).pin_memory() for _ in range(200)]
    assert distances(results) == [0] * 4
    del others


def test_an_upload_is_refused_on_a_capturing_stream_and_the_capture_survives():
    """The error comes before any CUDA call, so the graph is still good."""
    with StagingPool("cuda") as pool:
        source = torch.zeros(8, device="cuda")
        target = torch.zeros(8, device="cuda")
        open_lease = pool.lease(STAMPED, rows=1, tokens=2)
        for name in ("stamp", "half", "tokens"):
            open_lease[name] = 3
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            target.copy_(source)
            with pytest.raises(CaptureError):
                pool.lease(STAMPED, rows=1, tokens=2)
            with pytest.raises(CaptureError):
                open_lease.upload()
        source.fill_(5)
        graph.replay()
        assert int(open_lease.upload()["stamp"]) == 3
        assert target.tolist() == [5.0] * 8


def wrong_in_replays(
    pool: StagingPool,
    out: Destination | torch.Tensor,
    fixed: Mapping[str, torch.Tensor],
    steps: int,
    same: Callable[[torch.Tensor], bool],
) -> int:
    """Elements that a graph captured from `fixed` reads wrongly, replayed behind each of so many uploads to `out`."""
    seen = torch.zeros(8, dtype=torch.int64, device=pool.device)
    torch.add(fixed["stamp"], fixed["tokens"][:8], out=seen)  # its kernel is loaded now
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.add(fixed["stamp"], fixed["tokens"][:8], out=seen)
    wrong = torch.zeros((), dtype=torch.int64, device=pool.device)
    for stamp in range(steps):
        with pool.lease(STAMPED, rows=8, tokens=16) as lease:
            lease["stamp"], lease["half"], lease["tokens"] = stamp, 0, 2 * stamp
            assert same(lease.upload(out=out)["stamp"])
        graph.replay()
        wrong += (seen != 3 * stamp).sum()
    return int(wrong)


def test_a_graph_reads_what_was_uploaded_to_its_fixed_destination():
    """Thousands of replays, each behind an upload to the same address, each with that upload's values."""
    with StagingPool("cuda") as pool:
        destination = torch.zeros(STAMPED.nbytes(rows=8, tokens=16), dtype=torch.uint8, device="cuda")
        with pool.lease(STAMPED, rows=8, tokens=16) as lease:
            for name in ("stamp", "half", "tokens"):
                lease[name] = 0
            fixed = lease.upload(out=destination)
        address = fixed["stamp"].data_ptr()
        assert wrong_in_replays(pool, destination, fixed, 3000, lambda stamp: stamp.data_ptr() == address) == 0


def test_a_graph_may_be_captured_before_the_first_upload():
    """By the tensors that the pool's destination gives beforehand; behind each upload it reads that one's values."""
    with StagingPool("cuda") as pool:
        destination = pool.destination(STAMPED, rows=8, tokens=16)
        fixed = destination.tensors(STAMPED, rows=8, tokens=16)
        assert wrong_in_replays(pool, destination, fixed, 1000, lambda stamp: stamp is fixed["stamp"]) == 0


def test_an_error_of_a_copy_is_raised_once_and_not_by_torch_afterwards():
    """The runtime keeps the last error for whoever asks next; that is torch, behind its next kernel."""
    with StagingPool("cuda") as pool:
        device = pool._device
        assert device._runtime is not None, "the runtime that torch has loaded was not found"
        nowhere = SimpleNamespace(data_ptr=lambda: 64)
        with pytest.raises(RuntimeError, match=r"CUDA error: invalid argument \(cudaMemcpyAsync\)"):
            device.copy(nowhere, Source(torch.zeros(64, dtype=torch.uint8, pin_memory=True)), device.current_stream())
        assert int(torch.arange(5, device="cuda").sum()) == 10
        assert distances([send(pool, stamp) for stamp in range(8)]) == [0] * 8


def test_tensors_are_used_on_another_stream_after_wait(held_stream):
    """`wait(stream)` orders everything the upload queued before the reader, and keeps memory while it reads."""
    assert int(torch.zeros(1, dtype=torch.int64, device="cuda") + 1) == 1  # the reader's kernel is loaded now
    side = torch.cuda.Stream()
    reader = torch.cuda.Stream()
    with StagingPool("cuda") as pool:
        kept = []
        with torch.cuda.stream(side), held_stream():
            with pool.lease(STAMPED, rows=5000, tokens=10) as lease:
                for name in ("stamp", "half", "tokens"):
                    lease[name] = 9
                upload = lease.upload()
            upload.wait(reader)
            with torch.cuda.stream(reader):
                kept.append(upload["stamp"] + 1)
            del upload
            others = [torch.full((5000,), -7, dtype=torch.int64, device="cuda") for _ in range(50)]
        torch.cuda.synchronize()
        assert int(kept[0].min()) == int(kept[0].max()) == 10
        del others


def test_the_pool_is_pinned_and_says_so():
    """memory="auto" pins on a CUDA machine, the index is resolved, stats report what is locked."""
    with StagingPool("cuda", slots=3, slot_bytes=5000) as pool:
        assert (pool.memory, pool.device) == ("pinned", torch.device("cuda", torch.cuda.current_device()))
        assert pool.stats().pinned_bytes == 3 * 8192

"""Cases about the protocol of slots and leases: exhaustion, aborts, capacity, padding, and the books."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from case_builders import FIELDS, decode, fill, foreign, send, stamps

from batching import Request, SamplingBatchInfo, SamplingParams
from batching.stage import PREFILL
from staging import Field, FieldError, Layout, LeaseError, LeaseTooLarge, PoolExhausted, StagingPool
from staging._device import HostBuffer
from staging.testing import SimulatedDevice

MakePool = Callable[..., StagingPool]

COLUMN = Layout([Field("column", torch.int64)])
MIXED = Layout(
    [
        Field("rows32", torch.int32),
        Field("tokens", torch.int64, "tokens"),
        Field("wide", torch.float32, shape=(1,)),
        Field("byte", torch.uint8),
    ]
)


@pytest.mark.parametrize("later", [4, 5, 20])
def test_the_handle_of_an_old_step_reaches_nothing(device: SimulatedDevice, make_pool: MakePool, later: int) -> None:
    """B82: N, N+1 and 5N steps later it cannot be written or uploaded, says both generations, and frees nothing."""
    pool = make_pool(device, slots=4, max_slots=4)
    old = fill(pool.lease(PREFILL, rows=3), 1)
    upload = old.upload()
    for step in range(later):
        device.finish_all()
        send(pool, 100 + step)
    device.finish_all()
    holders = [fill(pool.lease(PREFILL, rows=3), 7) for _ in range(4)]
    for use in (lambda: old.upload(), lambda: fill(old, 2)):
        with pytest.raises(LeaseError, match=r"generation \d+, ended.*at generation \d+ now"):
            use()
    old.discard()
    assert pool.stats().filling == 4
    assert [stamps(holder.upload()) for holder in holders] == [{7}] * 4
    assert stamps(upload) == {1}  # what it uploaded is still its own
    device.finish_all()
    assert device.violations == []


def test_exhaustion_names_who_holds_what_and_for_how_long(device: SimulatedDevice, make_pool: MakePool) -> None:
    """B83: after its deadline a lease fails with each slot's state and age, and the thread and place of open leases."""
    pool = make_pool(device, slots=2, max_slots=2, timeout=0.2, debug=True)
    send(pool, 1)
    device.time_ns += 5_000_000
    other = threading.Thread(target=lambda: held.append(pool.lease(COLUMN, rows=1)))
    held: list[Any] = []
    other.start()
    other.join()
    began = device.time_ns
    with pytest.raises(PoolExhausted) as caught:
        pool.lease(COLUMN, rows=1)
    assert 200_000_000 <= device.time_ns - began <= 500_000_000
    message = str(caught.value)
    assert "no slot came free within 0.2 s" in message
    assert "slot 0 in flight for 20" in message
    assert f"by thread {other.ident} at {__file__}:" in message
    with pytest.raises(PoolExhausted, match="within 0 s"):
        pool.lease(COLUMN, rows=1, timeout=0)


def test_waiting_for_oneself_is_refused_even_without_a_deadline(device: SimulatedDevice, make_pool: MakePool) -> None:
    """B83: the only thread that could release holds every slot: an error at once instead of waiting for ever."""
    pool = make_pool(device, slots=2, max_slots=2, timeout=None)
    leases = [pool.lease(COLUMN, rows=1), pool.lease(COLUMN, rows=1)]
    with pytest.raises(PoolExhausted, match="this thread holds every slot, so waiting would never end"):
        pool.lease(COLUMN, rows=1)
    assert device.time_ns == 0
    leases.clear()


class Abort(Exception):
    """A request was cancelled."""


def abort_a_step(pool: StagingPool, step: int, moment: str) -> None:
    with pool.lease(PREFILL, rows=3) as lease:
        if moment != "before the fill":
            fill(lease, step)
        if moment in ("in the copy", "after the upload"):
            lease.upload()
        raise Abort


@pytest.mark.parametrize("moment", ["before the fill", "before the upload", "in the copy", "after the upload"])
def test_an_aborted_step_gives_its_slot_back_when_it_is_safe(
    device: SimulatedDevice, make_pool: MakePool, moment: str
) -> None:
    """B85: before the upload at once and without a copy; from the copy on when its event has passed. Ten times over."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    for step in range(10):
        if moment == "in the copy":
            device.fail("copy", Abort(), after=True)
        with pytest.raises(Abort):
            abort_a_step(pool, step, moment)
        if moment.startswith("before"):
            assert not device.copies
            assert pool.stats().free == 1
        else:
            with pytest.raises(PoolExhausted):
                pool.lease(PREFILL, rows=3)
            device.finish_all()
        assert stamps(send(pool, 50 + step)) == {50 + step}
        device.finish_all()
    assert device.violations == []
    assert device.calls["copy"] == pool.stats().uploads + pool.stats().uploads_failed
    assert pool.stats().discards == (10 if moment.startswith("before") else 0)


def test_a_batch_of_one_row_too_many_is_refused_whole(device: SimulatedDevice, make_pool: MakePool) -> None:
    """B109: four rows fit, five are refused naming the rows and both sizes, before anything; then four fit again."""
    most = COLUMN.nbytes(rows=4)
    pool = make_pool(device, slots=1, max_slots=1, slot_bytes=most, max_bytes=most, timeout=0)
    for _ in range(2):
        with pool.lease(COLUMN, rows=4) as lease:
            lease["column"] = [1, 2, 3, 4]
            assert lease.upload()["column"].tolist() == [1, 2, 3, 4]
        device.finish_all()
        calls = dict(device.calls)
        with pytest.raises(LeaseTooLarge, match=f"5 rows needs {COLUMN.nbytes(rows=5)} bytes.* allows {most}"):
            pool.lease(COLUMN, rows=5)
        assert dict(device.calls) == calls
        with pytest.raises(FieldError, match="4 rows were leased, got 5"), pool.lease(COLUMN, rows=4) as lease:
            lease["column"] = [1, 2, 3, 4, 5]


class Fenced(SimulatedDevice):
    """Host memory with 64 bytes of 0xA5 on both sides."""

    def __init__(self) -> None:
        super().__init__(on_sleep=lambda device: device.finish())
        self.whole: list[tuple[np.ndarray, int]] = []

    def host_buffer(self, nbytes: int, *, pinned: bool) -> HostBuffer:
        buffer = super().host_buffer(nbytes + 128, pinned=pinned)
        buffer.array[:] = 0xA5
        self.whole.append((buffer.array, nbytes))
        return attrs.evolve(buffer, tensor=buffer.tensor[64:-64], array=buffer.array[64:-64])

    def fences_hold(self) -> bool:
        return all((array[:64] == 0xA5).all() and (array[64 + nbytes :] == 0xA5).all() for array, nbytes in self.whole)


def test_shapes_are_exact_and_nothing_beside_a_block_is_written(make_pool: MakePool) -> None:
    """B110: ten thousand random steps; each tensor has the length asked for, and guards around host and device stay."""
    dice = random.Random(110)
    device = Fenced()
    pool = make_pool(device, slots=2, max_slots=3, slot_bytes=64, max_bytes=2048)
    arena = torch.full((4096,), 0xA5, dtype=torch.uint8)
    for step in range(10_000):
        rows, tokens = dice.randrange(20), dice.randrange(60)
        nbytes = MIXED.nbytes(rows=rows, tokens=tokens)
        out = arena[64 : 64 + nbytes] if step % 4 == 0 and nbytes else None
        with pool.lease(MIXED, rows=rows, tokens=tokens) as lease:
            for field in MIXED.fields:
                lease[field.name] = step % 100
            upload = lease.upload(out=out)
        shapes = {name: tuple(tensor.shape) for name, tensor in upload.items()}
        assert shapes == {"rows32": (rows,), "tokens": (tokens,), "wide": (rows, 1), "byte": (rows,)}
        if out is not None:
            assert bool((arena[:64] == 0xA5).all())
            assert bool((arena[64 + nbytes :] == 0xA5).all())
            device.finish_all()
            arena.fill_(0xA5)
    device.finish_all()
    assert device.violations == []
    assert device.fences_hold()


def test_padding_rows_are_the_caller_s_neutral_requests_in_every_slot(
    device: SimulatedDevice, make_pool: MakePool
) -> None:
    """B112: after a full batch of extreme values, one padded with default parameters shows neutral rows only."""
    pool = make_pool(device, slots=3, max_slots=3)
    extreme = [
        foreign(str(row), temperature=99.0, top_p=1e-3, top_k=7, min_p=1.0, sampling_seed=-1) for row in range(8)
    ]
    padding = [Request(f"padding {row}", SamplingParams()) for row in range(7)]
    for _ in range(3):
        SamplingBatchInfo.from_schedule_batch(decode(extreme), 9, pool)
    device.finish_all()
    for _ in range(3):
        one = Request("one", SamplingParams(0.5, 0.5, 5, 0.5, 5))
        info = SamplingBatchInfo.from_schedule_batch(decode([one, *padding]), 9, pool)
        assert info.temperatures.reshape(-1).tolist() == [0.5] + [1.0] * 7
        assert info.top_ps.tolist() == [0.5] + [1.0] * 7
        assert info.top_ks.tolist() == [5] + [1 << 30] * 7
        assert info.min_ps.tolist() == [0.5] + [0.0] * 7
        assert info.sampling_seed is not None
        assert info.sampling_seed.tolist() == [5] + [42] * 7
    assert pool.stats().slots == 3


def test_a_smaller_batch_cannot_leave_rows_of_a_larger_one_behind(device: SimulatedDevice, make_pool: MakePool) -> None:
    """B112: rows that are leased and not written are refused, so no older batch's row can be active again."""
    pool = make_pool(device, slots=1, max_slots=1)
    send(pool, 7, rows=8)
    device.finish_all()
    with pool.lease(PREFILL, rows=8) as lease:
        for name in FIELDS[:-1]:
            lease[name] = 1
        with pytest.raises(LeaseError, match=f"'{FIELDS[-1]}' never written"):
            lease.upload()
        with pytest.raises(FieldError, match="8 rows were leased"):
            lease[FIELDS[-1]] = [1]


ENDINGS: dict[str, Callable[[StagingPool, SimulatedDevice | None], None]] = {}


def ending(run: Callable[[StagingPool, SimulatedDevice | None], None]) -> Callable[..., None]:
    ENDINGS[run.__name__.replace("_", " ")] = run
    return run


@ending
def by_event(pool: StagingPool, device: SimulatedDevice | None) -> None:
    send(pool, 1)


@ending
def by_discard(pool: StagingPool, device: SimulatedDevice | None) -> None:
    fill(pool.lease(PREFILL, rows=3), 1).discard()


@ending
def by_collection(pool: StagingPool, device: SimulatedDevice | None) -> None:
    fill(pool.lease(PREFILL, rows=3), 1)


@ending
def by_an_error_in_the_block(pool: StagingPool, device: SimulatedDevice | None) -> None:
    with pytest.raises(FieldError), pool.lease(PREFILL, rows=3) as lease:
        lease["top_ks"] = [1, 2, 2**31]


@ending
def by_a_failed_copy(pool: StagingPool, device: SimulatedDevice | None) -> None:
    if device is not None:
        device.fail("copy", after=True)
        with pytest.raises(RuntimeError, match="injected"):
            send(pool, 1)


@ending
def by_a_failed_record(pool: StagingPool, device: SimulatedDevice | None) -> None:
    if device is not None:
        lease = fill(pool.lease(PREFILL, rows=3), 1)
        device.fail("record")
        with pytest.raises(RuntimeError, match="injected"):
            lease.upload()


@pytest.mark.parametrize("kind", ["simulated", "cpu"])
@pytest.mark.parametrize("end", ENDINGS)
def test_the_books_are_the_same_after_every_way_to_end(make_pool: MakePool, kind: str, end: str) -> None:
    """B127: event, discard, collection, errors, with a device and without: all slots free, memory as at the start."""
    device = SimulatedDevice() if kind == "simulated" else None
    pool = make_pool(device or "cpu", slots=2, max_slots=2)
    start = pool.stats()
    for _ in range(5):
        ENDINGS[end](pool, device)
        if device is not None:
            device.finish_all()
    for _ in range(2):  # the next leases look at what has ended, one under pressure at what was in quarantine
        leases = [pool.lease(COLUMN, rows=1) for _ in range(2)]
        for lease in leases:
            lease.discard()
    gauges = ("slots", "free", "filling", "in_flight", "quarantined", "waiting", "pinned_bytes", "host_bytes")
    stats = pool.stats()
    assert {name: getattr(stats, name) for name in gauges} == {name: getattr(start, name) for name in gauges}
    pool.close()
    assert [getattr(pool.stats(), name) for name in gauges] == [0] * len(gauges)

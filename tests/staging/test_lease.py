"""Leases: write once, upload once, and never reach a slot that belongs to somebody else."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from staging import (
    CaptureError,
    Field,
    FieldError,
    Layout,
    Lease,
    LeaseError,
    PoolClosed,
    StagingError,
    StagingPool,
    Upload,
)
from staging.layout import KEPT_ALONG
from staging.testing import SimulatedDevice

COLUMN = Layout([Field("column", torch.int32)], "column")
MIXED = Layout([Field("ids", torch.int64, "tokens"), Field("column", torch.int32), Field("flags", torch.bool)], "mixed")
MANY = KEPT_ALONG // 8 + 1
"""Token ids that do not lie in one device allocation with the row fields."""

MakePool = Callable[..., StagingPool]


def batch(pool: StagingPool, value: int = 0, rows: int = 4) -> Upload:
    with pool.lease(COLUMN, rows=rows) as lease:
        lease["column"] = value
        return lease.upload()


WAYS_TO_WRITE: dict[str, Callable[[Lease], None]] = {
    "list": lambda lease: lease.__setitem__("column", [9] * 4),
    "array": lambda lease: lease.__setitem__("column", np.full(4, 9, np.int32)),
    "tensor": lambda lease: lease.__setitem__("column", torch.full((4,), 9)),
    "number": lambda lease: lease.__setitem__("column", 9),
    "records": lambda lease: lease.write_records([COLUMN.pack(column=9)] * 4),
    "joined records": lambda lease: lease.write_records(COLUMN.pack(column=9) * 4),
    "table of records": lambda lease: lease.write_records(COLUMN.join([COLUMN.pack(column=9)] * 4)),
    "other layout's records": lambda lease: lease.write_records([COLUMN.pack(column=9)] * 4, COLUMN),
    "upload": lambda lease: lease.upload() and None,
    "upload into": lambda lease: lease.upload(out=torch.empty(16, dtype=torch.uint8)) and None,
}

WAYS_TO_END: dict[str, Callable[[StagingPool, Lease], object]] = {
    "upload": lambda pool, lease: (lease.__setitem__("column", 1), lease.upload()),
    "discard": lambda pool, lease: lease.discard(),
    "end of block": lambda pool, lease: lease.__exit__(None, None, None),
    "pool closed": lambda pool, lease: pool.close(timeout=0),
}


# When a lease has ended.


@pytest.mark.parametrize("way", WAYS_TO_WRITE)
@pytest.mark.parametrize("end", WAYS_TO_END)
def test_nothing_can_be_done_with_an_ended_lease(
    device: SimulatedDevice, make_pool: MakePool, end: str, way: str
) -> None:
    """Every way to write or upload is refused after every way to end, and nothing reaches the device."""
    pool = make_pool(device, slots=1, timeout=0)
    lease = pool.lease(COLUMN, rows=4)
    assert lease.is_open
    WAYS_TO_END[end](pool, lease)
    assert not lease.is_open
    copies = device.calls["copy"]
    with pytest.raises(LeaseError, match=r"has ended.*take a new lease"):
        WAYS_TO_WRITE[way](lease)
    assert device.calls["copy"] == copies
    device.finish_all()
    assert device.violations == []


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("way", WAYS_TO_WRITE)
def test_a_stale_lease_never_reaches_the_slots_next_owner(
    device: SimulatedDevice, make_pool: MakePool, slots: int, way: str
) -> None:
    """A lease kept for N, N+1 or 5N further batches is still refused while its slot is being filled by another."""
    pool = make_pool(device, slots=slots, max_slots=slots, timeout=0)
    stale = pool.lease(COLUMN, rows=4)
    stale["column"] = 1
    stale.upload()
    device.finish_all()
    for step in range(1, 5 * slots + 2):
        with pool.lease(COLUMN, rows=4) as owner:
            owner["column"] = step
            if step in (slots, slots + 1, 5 * slots):
                with pytest.raises(LeaseError):
                    WAYS_TO_WRITE[way](stale)
                stale.discard()  # does nothing
                assert owner.is_open
                assert pool.stats().filling == 1
            upload = owner.upload()
        assert upload["column"].tolist() == [step] * 4
        device.finish_all()
    assert device.violations == []
    assert pool.stats().discards == 0


def test_a_lease_can_be_uploaded_only_once(device: SimulatedDevice, make_pool: MakePool) -> None:
    """The second upload is refused and queues nothing; the first is untouched."""
    pool = make_pool(device, slots=1, timeout=0)
    lease = pool.lease(COLUMN, rows=4)
    lease["column"] = [1, 2, 3, 4]
    upload = lease.upload()
    with pytest.raises(LeaseError, match="cannot upload"):
        lease.upload()
    assert device.calls["copy"] == pool.stats().uploads == 1
    assert upload["column"].tolist() == [1, 2, 3, 4]


def test_discarding_twice_or_after_an_upload_does_nothing(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Discard ends an open lease and is harmless afterwards."""
    pool = make_pool(device, slots=1, timeout=0)
    lease = pool.lease(COLUMN, rows=4)
    lease.discard()
    lease.discard()
    assert pool.stats().discards == 1
    with pool.lease(COLUMN, rows=4) as lease:
        lease["column"] = 1
        lease.upload()
    lease.discard()
    assert repr(pool) == "<StagingPool 'ring' cpu pinned: 1 slots (0 free, 0 filling, 1 in flight, 0 quarantined)>"
    assert pool.stats().discards == 1


def test_an_exception_in_the_block_discards_the_lease(device: SimulatedDevice, make_pool: MakePool) -> None:
    """The caller's error passes through, and the slot is free again without a copy."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    leases = []

    def fails_on_the_way() -> None:
        with pool.lease(COLUMN, rows=4) as lease:
            leases.append(lease)
            lease["column"] = 1
            raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs"):
        fails_on_the_way()
    assert not leases[0].is_open
    assert repr(pool) == "<StagingPool 'ring' cpu pinned: 1 slots (1 free, 0 filling, 0 in flight, 0 quarantined)>"
    assert device.calls["copy"] == 0
    batch(pool)


@pytest.mark.parametrize("rows", [4, 0])
def test_a_closed_pool_leases_nothing(device: SimulatedDevice, make_pool: MakePool, rows: int) -> None:
    """After close() every lease is refused, an empty one too."""
    pool = make_pool(device, slots=1, timeout=0)
    pool.close()
    with pytest.raises(PoolClosed, match="'ring' is closed"):
        pool.lease(COLUMN, rows=rows)
    with pytest.raises(PoolClosed):
        pool.warm(1)


def test_a_dropped_lease_comes_back_at_the_next_lease(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Forgetting a lease is repaired when the next one is asked for, and counted apart from discards."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    lease = pool.lease(COLUMN, rows=4)
    lease["column"] = 1
    del lease
    gc.collect()
    assert repr(pool) == "<StagingPool 'ring' cpu pinned: 1 slots (0 free, 1 filling, 0 in flight, 0 quarantined)>"
    assert batch(pool, 2)["column"].tolist() == [2] * 4
    stats = pool.stats()
    assert (stats.dropped, stats.discards, stats.uploads) == (1, 0, 1)


def test_collecting_an_ended_lease_is_not_a_drop(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Only a lease that was still open when it was collected counts as dropped."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    for _ in range(3):
        batch(pool)
        device.finish()
        pool.lease(COLUMN, rows=4).discard()
        gc.collect()
    assert pool.stats().dropped == 0


def test_a_dropped_lease_does_not_free_the_slot_of_its_successor(device: SimulatedDevice, make_pool: MakePool) -> None:
    """A lease that is collected long after it ended leaves the slot's present owner alone."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    old = [pool.lease(COLUMN, rows=4)]
    old[0].discard()
    with pool.lease(COLUMN, rows=4) as owner:
        old.clear()
        gc.collect()
        with pytest.raises(StagingError):
            pool.lease(COLUMN, rows=4)
        owner["column"] = 3
        assert owner.upload()["column"].tolist() == [3] * 4


# Write-only, not to be copied.


def test_a_lease_cannot_be_read(make_pool: MakePool) -> None:
    """There is no way to a view of the slot: no indexing, no buffer, no array."""
    with make_pool("cpu", slots=1).lease(COLUMN, rows=4) as lease:
        lease["column"] = 1
        with pytest.raises(TypeError):
            lease["column"]  # type: ignore[index]
        with pytest.raises(TypeError):
            memoryview(lease)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            iter(lease)  # type: ignore[call-overload]
        assert not hasattr(lease, "__array__")
        assert not hasattr(lease, "__array_interface__")
        assert not hasattr(lease, "__dlpack__")


@pytest.mark.parametrize("name", [slice(None), 0, ("column", 0), None, "other", ["column"]], ids=str)
def test_a_lease_is_written_a_whole_field_at_a_time(make_pool: MakePool, name: Any) -> None:
    """A slice, position or unknown name is refused, saying which fields there are."""
    with make_pool("cpu", slots=1).lease(COLUMN, rows=4) as lease, pytest.raises(FieldError, match=r"column"):
        lease[name] = 1


@pytest.mark.parametrize("rows", [4, 0])
@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, pickle.dumps, lambda lease: copy.deepcopy([lease])], ids=range(4)
)
def test_a_lease_cannot_be_copied_or_pickled(make_pool: MakePool, duplicate: Callable[[Any], Any], rows: int) -> None:
    """There is one right to a slot; after the refusal it is as good as before."""
    pool = make_pool("cpu", slots=1)
    with pool.lease(COLUMN, rows=rows) as lease:
        with pytest.raises(LeaseError, match="cannot be copied"):
            duplicate(lease)
        lease["column"] = [5] * rows
        assert lease.upload()["column"].tolist() == [5] * rows
        with pytest.raises(LeaseError, match="cannot be copied"):
            duplicate(lease)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=range(3))
def test_a_pool_cannot_be_copied_or_pickled(make_pool: MakePool, duplicate: Callable[[Any], Any]) -> None:
    """Pinned memory and events belong to one process and one pool."""
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        duplicate(make_pool("cpu", slots=1))


# What must be written.


def test_an_unwritten_field_is_refused_and_the_lease_stays_open(device: SimulatedDevice, make_pool: MakePool) -> None:
    """A slot still holds an older batch's bytes, so every field must be written; the error names those that are not."""
    pool = make_pool(device, slots=1, timeout=0)
    with pool.lease(MIXED, rows=2, tokens=3) as lease:
        lease["ids"] = [1, 2, 3]
        with pytest.raises(LeaseError, match="'column', 'flags' never written"):
            lease.upload()
        assert lease.is_open
        assert device.calls["copy"] == device.calls["empty"] == 0
        lease["column"] = [4, 5]
        with pytest.raises(LeaseError, match="'flags' never written"):
            lease.upload()
        lease["flags"] = [True, False]
        upload = lease.upload()
    assert upload["column"].tolist() == [4, 5]
    assert pool.stats().uploads_failed == 0


def test_fields_of_length_zero_need_no_write(make_pool: MakePool) -> None:
    """Of a batch without tokens only the per-row fields are asked for."""
    with make_pool("cpu", slots=1).lease(MIXED, rows=1, tokens=0) as lease:
        lease["column"], lease["flags"] = [3], [True]
        upload = lease.upload()
    assert upload["ids"].shape == (0,)
    assert upload["ids"].dtype == torch.int64
    assert upload["column"].tolist() == [3]


def test_a_new_lease_inherits_no_writes(device: SimulatedDevice, make_pool: MakePool) -> None:
    """What the slot's last lease wrote does not count for the next one."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    with pool.lease(COLUMN, rows=4) as lease:
        lease["column"] = 1
    with pool.lease(COLUMN, rows=4) as lease, pytest.raises(LeaseError, match="never written"):
        lease.upload()


def test_the_last_write_of_a_field_counts(make_pool: MakePool) -> None:
    """A field may be written again before the upload."""
    with make_pool("cpu", slots=1).lease(COLUMN, rows=2) as lease:
        lease["column"] = [1, 2]
        lease.write_records([COLUMN.pack(column=5)] * 2)
        lease["column"] = (3, 4)
        assert lease.upload()["column"].tolist() == [3, 4]


# Graph capture.


def test_capture_is_refused_at_the_lease(device: SimulatedDevice, make_pool: MakePool) -> None:
    """While a graph is captured on the current stream nothing is leased; the message shows the way out."""
    pool = make_pool(device, slots=1, timeout=0)
    device.capturing_now = True
    with pytest.raises(CaptureError, match=r"upload\(out=…\)"):
        pool.lease(COLUMN, rows=4)
    assert repr(pool) == "<StagingPool 'ring' cpu pinned: 1 slots (1 free, 0 filling, 0 in flight, 0 quarantined)>"
    device.capturing_now = False
    batch(pool)


def test_capture_is_refused_at_the_upload_and_the_lease_survives(device: SimulatedDevice, make_pool: MakePool) -> None:
    """A lease taken before a capture cannot be uploaded during it, and can after it."""
    pool = make_pool(device, slots=1, timeout=0)
    with pool.lease(COLUMN, rows=4) as lease:
        lease["column"] = [1, 2, 3, 4]
        device.capturing_now = True
        with pytest.raises(CaptureError):
            lease.upload()
        with pytest.raises(CaptureError):
            lease.upload(out=torch.empty(16, dtype=torch.uint8))
        assert device.calls["copy"] == device.calls["record"] == device.calls["empty"] == 0
        device.capturing_now = False
        assert lease.upload()["column"].tolist() == [1, 2, 3, 4]
    assert pool.stats().quarantines == pool.stats().uploads_failed == 0


# A destination of fixed address.


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("cpu", 0),
        ("simulated", 0),
        ("simulated", 16),
        ("cpu", 16),
        *[(kind, extra) for kind in ("cpu", "simulated") for extra in (1, 5, 33)],
    ],
)
def test_an_upload_goes_where_the_caller_says(
    device: SimulatedDevice, make_pool: MakePool, kind: str, extra: int
) -> None:
    """With `out` the tensors lie in it, at the same address each time; bytes behind the upload are not touched."""
    pool = make_pool(device if kind == "simulated" else "cpu", slots=2, timeout=0)
    need = MIXED.nbytes(rows=2, tokens=3)
    out = torch.full((need + extra,), 0xAB, dtype=torch.uint8)
    addresses = set()
    for value in range(3):
        with pool.lease(MIXED, rows=2, tokens=3) as lease:
            lease["ids"], lease["column"], lease["flags"] = value, [value, 7], [True, False]
            upload = lease.upload(out=out)
        device.finish_all()
        assert upload["ids"].tolist() == [value] * 3
        assert upload["column"].tolist() == [value, 7]
        assert upload["flags"].tolist() == [True, False]
        assert all(tensor.untyped_storage().data_ptr() == out.data_ptr() for tensor in upload.values())
        addresses.add(tuple(tensor.data_ptr() for tensor in upload.values()))
        assert out[need:].tolist() == [0xAB] * extra
    assert len(addresses) == 1
    assert device.calls["empty"] == 0
    assert device.violations == []
    assert pool.stats().quarantines == 0


def test_an_upload_may_go_to_an_aligned_part_of_a_tensor(make_pool: MakePool) -> None:
    """A slice that starts at a multiple of 16 bytes is a destination like any other."""
    out = torch.zeros(64, dtype=torch.uint8)
    with make_pool("cpu", slots=1).lease(COLUMN, rows=4) as lease:
        lease["column"] = [1, 2, 3, 4]
        upload = lease.upload(out=out[32:48])
    assert upload["column"].tolist() == [1, 2, 3, 4]
    assert out.view(torch.int32).tolist() == [0] * 8 + [1, 2, 3, 4] + [0] * 4


@pytest.mark.parametrize(
    ("out", "says"),
    [
        (torch.empty(15, dtype=torch.uint8), "has 15 bytes, the upload has 16"),
        (torch.empty(0, dtype=torch.uint8), "has 0 bytes"),
        (torch.empty(16, dtype=torch.int8), "uint8"),
        (torch.empty(4, dtype=torch.int32), "uint8"),
        (torch.empty(4, 4, dtype=torch.uint8), "one-dimensional"),
        (torch.empty(32, dtype=torch.uint8)[::2], "contiguous"),
        (torch.empty(32, dtype=torch.uint8)[8:], "multiple of 16"),
        (torch.empty(16, dtype=torch.uint8, device="meta"), "is on meta, the pool uploads to cpu"),
        (np.empty(16, np.uint8), "tensor"),
        (bytearray(16), "tensor"),
    ],
    ids=[
        *(
            "short",
            "empty",
            "int8",
            "int32",
            "two dimensions",
            "strided",
            "misaligned",
            "other device",
            "numpy",
            "bytes",
        ),
    ],
)
def test_an_unsuitable_destination_is_refused_and_the_lease_stays_open(
    device: SimulatedDevice, make_pool: MakePool, out: Any, says: str
) -> None:
    """A bad `out` is refused before anything is queued; the same lease can go elsewhere."""
    with make_pool(device, slots=1, timeout=0).lease(COLUMN, rows=4) as lease:
        lease["column"] = [1, 2, 3, 4]
        with pytest.raises(FieldError, match=says):
            lease.upload(out=out)
        assert device.calls["copy"] == 0
        assert lease.upload()["column"].tolist() == [1, 2, 3, 4]


def test_a_destination_made_in_inference_mode_is_no_reason_to_lose_the_slot(
    device: SimulatedDevice, make_pool: MakePool
) -> None:
    """torch forbids writing such a tensor elsewhere: that is refused like any unsuitable `out`, or it works."""
    pool = make_pool(device, slots=1, timeout=0)
    with torch.inference_mode():
        out = torch.empty(16, dtype=torch.uint8)
    with pool.lease(COLUMN, rows=4) as lease:
        lease["column"] = 1
        try:
            assert lease.upload(out=out)["column"].tolist() == [1] * 4
        except FieldError:
            assert lease.is_open
    assert pool.stats().quarantined == 0


def test_the_copy_waits_for_the_readers_of_its_destination(device: SimulatedDevice, make_pool: MakePool) -> None:
    """`after` names the event of whoever still reads `out`: the device waits for it before the copy, the host never."""
    order: list[str] = []

    class Ordered(SimulatedDevice):
        def wait(self, stream: int | None, event: Any) -> None:
            order.append(f"stream {stream} waits for {event}")
            super().wait(stream, event)

        def copy(self, *args: Any) -> None:
            order.append("copy")
            super().copy(*args)

    device = Ordered()
    device.stream = 3
    with make_pool(device, slots=1, timeout=0).lease(COLUMN, rows=4) as lease:
        lease["column"] = 1
        lease.upload(out=torch.empty(16, dtype=torch.uint8), after="the reader")
    assert order == ["stream 3 waits for the reader", "copy"]
    assert device.calls["sleep"] == 0


# Streams.


def test_on_the_stream_of_the_upload_there_is_nothing_to_wait_for(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Whether it is named or current: no wait, and no mark for the allocator, some of which take it for a mistake."""
    pool = make_pool(device, slots=1)
    device.stream = 3
    with pool.lease(COLUMN, rows=4) as lease:
        lease["column"] = 1
        upload = lease.upload()
    upload.wait()
    upload.wait(3)
    assert (device.calls["wait"], device.calls["record_stream"]) == (0, 0)
    upload.wait(5)
    assert (device.calls["wait"], device.calls["record_stream"]) == (1, 1)


def test_copy_and_event_are_on_the_stream_that_is_current_at_the_upload(
    device: SimulatedDevice, make_pool: MakePool
) -> None:
    """Not the stream of the lease or the pool counts: the copy and its event go where the upload is called."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    lease = pool.lease(COLUMN, rows=4)
    lease["column"] = 1
    device.stream = 5
    lease.upload()
    device.stream = 6
    assert [copy.stream for copy in device.copies] == [5]
    with pytest.raises(StagingError):
        pool.lease(COLUMN, rows=4)
    device.finish()
    batch(pool)
    assert [copy.stream for copy in device.copies] == [6]


class Journal(SimulatedDevice):
    """Remembers in which order work was queued."""

    def __init__(self) -> None:
        super().__init__()
        self.queued: list[str] = []

    def copy(self, *args: Any) -> None:
        self.queued.append("copy")
        super().copy(*args)

    def copy_on_device(self, *args: Any) -> None:
        self.queued.append("copy on device")
        super().copy_on_device(*args)

    def record(self, *args: Any) -> None:
        self.queued.append("record")
        super().record(*args)

    def wait(self, stream: Any, event: Any) -> None:
        self.queued.append(f"stream {stream} waits")
        super().wait(stream, event)


def test_waiting_for_an_upload_waits_for_all_of_its_tensors(make_pool: MakePool) -> None:
    """The event behind an upload is recorded after the last piece of device work that its tensors need."""
    device = Journal()
    with make_pool(device, slots=1, timeout=0).lease(MIXED, rows=2, tokens=MANY) as lease:
        lease["ids"], lease["column"], lease["flags"] = 1, 2, True
        lease.upload().wait(9)
    assert device.queued == ["copy", "copy on device", "record", "stream 9 waits"]


def test_waiting_marks_each_fresh_allocation_and_asks_for_no_event_twice(
    device: SimulatedDevice, make_pool: MakePool
) -> None:
    """`wait(stream)` costs one device wait; once the slot was handed out again the copy is done and none is needed."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    with pool.lease(MIXED, rows=2, tokens=MANY) as lease:
        lease["ids"], lease["column"], lease["flags"] = 1, 2, True
        mixed = lease.upload()
    mixed.wait(9)
    assert (device.calls["wait"], device.calls["record_stream"], device.calls["sleep"]) == (1, 2, 0)
    device.finish()
    batch(pool)
    mixed.wait(9)
    assert (device.calls["wait"], device.calls["record_stream"]) == (1, 4)
    device.finish()
    with pool.lease(COLUMN, rows=4) as lease:
        lease["column"] = 1
        placed = lease.upload(out=torch.empty(16, dtype=torch.uint8))
    device.stream = 3
    placed.wait()
    assert (device.calls["wait"], device.calls["record_stream"]) == (2, 4)


def test_a_list_that_was_cut_off_counts_as_unwritten(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first values are in the slot when the last one does not fit; an interrupt comes before all is checked."""
    with make_pool("cpu", slots=1).lease(COLUMN, rows=2) as lease:
        lease["column"] = [1, 2]
        monkeypatch.setattr(Lease, "_place", lambda self, name: iter(()).__next__())
        with pytest.raises(StopIteration):
            lease["column"] = [3, 1 << 40]
        monkeypatch.undo()
        with pytest.raises(LeaseError, match="'column' never written"):
            lease.upload()
        lease["column"] = [5, 6]
        assert lease.upload()["column"].tolist() == [5, 6]


# What an upload returns.


def test_an_upload_is_a_mapping_in_the_order_of_the_layout(make_pool: MakePool) -> None:
    """Names, order, length and bytes are the layout's; an unknown name is a KeyError."""
    with make_pool("cpu", slots=1).lease(MIXED, rows=2, tokens=3) as lease:
        lease["flags"], lease["column"], lease["ids"] = True, 2, 1
        upload = lease.upload()
    assert list(upload) == ["ids", "column", "flags"]
    assert len(upload) == 3
    assert upload.nbytes == MIXED.nbytes(rows=2, tokens=3) == 64
    assert repr(upload) == "<Upload of 3 fields, 64 bytes, to cpu>"
    with pytest.raises(KeyError):
        upload["other"]


@pytest.mark.parametrize("kind", ["cpu", "simulated"])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_an_uploads_tensors_are_the_callers_own(
    device: SimulatedDevice, make_pool: MakePool, kind: str, slots: int
) -> None:
    """Tensors of upload k are unchanged after 5N more uploads, and writing to them changes no later one."""
    pool = make_pool(device if kind == "simulated" else "cpu", slots=slots, max_slots=slots, timeout=0)
    kept: list[tuple[int, Upload]] = []
    for value in range(6 * slots):
        kept.append((value, batch(pool, value)))
        device.finish_all()
    assert all(upload["column"].tolist() == [value] * 4 for value, upload in kept)
    kept[-1][1]["column"].fill_(99)
    assert batch(pool, 5)["column"].tolist() == [5] * 4
    assert len({upload["column"].data_ptr() for _, upload in kept}) == len(kept)


def test_row_fields_do_not_keep_the_storage_of_token_fields(make_pool: MakePool) -> None:
    """A sampling column kept for thousands of steps does not keep the token ids of one."""
    layout = Layout([Field("first", torch.float32), Field("second", torch.int64), Field("ids", torch.int64, "tokens")])
    with make_pool("cpu", slots=1).lease(layout, rows=4, tokens=10_000) as lease:
        lease["first"], lease["second"], lease["ids"] = 0.5, 7, range(10_000)
        upload = lease.upload()
    rows = {upload[name].untyped_storage().data_ptr() for name in ("first", "second")}
    assert len(rows) == 1
    assert upload["ids"].untyped_storage().data_ptr() not in rows
    assert upload["first"].untyped_storage().nbytes() == 16 + 32
    assert upload["first"].tolist() == [0.5] * 4
    assert upload["second"].tolist() == [7] * 4
    assert upload["ids"].tolist() == list(range(10_000))


@pytest.mark.parametrize(("tokens", "allocations"), [(MANY - 1, 1), (MANY, 2)])
def test_token_fields_up_to_a_usual_chunk_share_the_allocation_of_the_row_fields(
    make_pool: MakePool, tokens: int, allocations: int
) -> None:
    """A second allocation costs more than 64 KiB that are kept along are worth; beyond that, nothing is kept."""
    layout = Layout([Field("column", torch.float32), Field("ids", torch.int64, "tokens")])
    with make_pool("cpu", slots=1).lease(layout, rows=4, tokens=tokens) as lease:
        lease["column"], lease["ids"] = [1, 2, 3, 4], range(tokens)
        upload = lease.upload()
    assert len({tensor.untyped_storage().data_ptr() for tensor in upload.values()}) == allocations
    assert upload["column"].tolist() == [1, 2, 3, 4]
    assert upload["ids"].tolist() == list(range(tokens))


@pytest.mark.parametrize("order", ["tokens first", "rows between"])
def test_row_fields_cost_little_wherever_the_layout_puts_them(make_pool: MakePool, order: str) -> None:
    """Also behind or between token fields, what a kept per-row column holds is not the size of the tokens."""
    ids, column, more = Field("ids", torch.int64, "tokens"), Field("column", torch.int32), Field("more", torch.int32)
    layout = Layout([ids, column, more] if order == "tokens first" else [column, ids, more])
    with make_pool("cpu", slots=1).lease(layout, rows=4, tokens=10_000) as lease:
        lease["ids"], lease["column"], lease["more"] = 1, 2, 3
        upload = lease.upload()
    assert upload["column"].untyped_storage().nbytes() < 1000
    assert upload["more"].untyped_storage().nbytes() < 1000


def test_fields_of_one_kind_share_one_allocation(make_pool: MakePool) -> None:
    """Where all fields are per row there is one device allocation for all of them."""
    layout = Layout([Field("a", torch.int32), Field("b", torch.float64)])
    with make_pool("cpu", slots=1).lease(layout, rows=4) as lease:
        lease["a"] = lease["b"] = 1
        upload = lease.upload()
    assert upload["a"].untyped_storage().data_ptr() == upload["b"].untyped_storage().data_ptr()


# Empty batches.


def test_an_empty_batch_takes_no_slot_and_makes_no_copy(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Zero rows give typed tensors of length 0, even from a ring that is all busy."""
    layout = Layout([Field("t", torch.float32, shape=(1,)), Field("ids", torch.uint64, "tokens")])
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    batch(pool)
    calls = dict(device.calls)
    with pool.lease(layout, rows=0, tokens=0) as lease:
        assert repr(pool) == "<StagingPool 'ring' cpu pinned: 1 slots (0 free, 0 filling, 1 in flight, 0 quarantined)>"
        assert repr(lease).endswith("no slot, open>")
        upload = lease.upload()
    assert not lease.is_open
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in upload.items()} == {
        "t": (torch.float32, (0, 1)),
        "ids": (torch.uint64, (0,)),
    }
    assert upload.nbytes == 0
    upload.wait()
    assert {name: device.calls[name] for name in ("copy", "record", "done", "host_buffer", "wait")} == {
        "copy": calls["copy"],
        "record": calls["record"],
        "done": 0,
        "host_buffer": calls["host_buffer"],
        "wait": 0,
    }
    stats = pool.stats()
    assert (stats.leases_empty, stats.uploads, stats.fields, stats.discards, stats.dropped) == (1, 1, 1, 0, 0)


def test_an_empty_lease_ends_like_any_other(make_pool: MakePool) -> None:
    """Uploaded twice, written after, discarded or dropped: the same rules, and no slot is involved."""
    pool = make_pool("cpu", slots=1)
    lease = pool.lease(COLUMN, rows=0)
    lease["column"] = []
    lease.write_records([])
    lease.upload(out=torch.empty(0, dtype=torch.uint8))
    for act in (lambda: lease.upload(), lambda: lease.write_records([]), lambda: lease.__setitem__("column", [])):
        with pytest.raises(LeaseError, match="has ended"):
            act()
    pool.lease(COLUMN, rows=0).discard()
    pool.lease(COLUMN, rows=0)
    gc.collect()
    batch(pool)
    stats = pool.stats()
    assert (stats.discards, stats.dropped, stats.leases_empty) == (0, 0, 3)
    assert stats.slots == stats.in_flight == 1


@pytest.mark.parametrize("kind", ["cpu", "simulated"])
def test_empty_and_full_batches_may_alternate(device: SimulatedDevice, make_pool: MakePool, kind: str) -> None:
    """0, 5, 0, 5, … rows: each batch is right and the ring does not grow."""
    pool = make_pool(device if kind == "simulated" else "cpu", slots=1, max_slots=1, timeout=0)
    for step in range(10):
        rows = 5 * (step % 2)
        assert batch(pool, step, rows=rows)["column"].tolist() == [step] * rows
        device.finish_all()
    assert device.violations == []
    stats = pool.stats()
    assert (stats.leases_empty, stats.uploads, stats.slots) == (5, 5, 1)


def test_a_lease_tells_what_it_is(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Layout, lengths, bytes and state can be read at any time; the lengths are a copy."""
    with make_pool(device, slots=1, timeout=0).lease(MIXED, rows=2, tokens=3) as lease:
        assert lease.layout is MIXED
        assert lease.nbytes == 64
        lease.lengths["rows"] = 99
        assert lease.lengths == {"tokens": 3, "rows": 2}
        assert repr(lease) == "<Lease of 'mixed': 3 tokens, 2 rows, slot 0, generation 1, open>"
    assert repr(lease) == "<Lease of 'mixed': 3 tokens, 2 rows, slot 0, generation 1, ended>"

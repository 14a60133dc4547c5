"""`pool.destination(…)`: device memory of fixed address, the same tensors for every upload of the same lengths."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from staging import CaptureError, Destination, Field, FieldError, Layout, PoolClosed, StagingPool, Upload
from staging._prepared import MOST
from staging.testing import SimulatedDevice

MakePool = Callable[..., StagingPool]

MIXED = Layout([Field("column", torch.float32, shape=(1,)), Field("ids", torch.int64, "tokens")], "mixed")
OTHER = Layout([Field("flags", torch.bool), Field("halves", torch.float16)], "other")


def send(pool: StagingPool, out: Destination, value: int, rows: int = 3, tokens: int = 5) -> Upload:
    with pool.lease(MIXED, rows=rows, tokens=tokens) as lease:
        lease["column"] = lease["ids"] = value
        return lease.upload(out)


def values(upload: Upload) -> set[float]:
    return {value for tensor in upload.values() for value in tensor.flatten().tolist()}


def test_uploads_of_the_same_lengths_have_the_same_tensors(make_pool: MakePool) -> None:
    """The very objects, those that `tensors` gave before the first upload; zeros until then, then the new values."""
    pool = make_pool("cpu")
    out = pool.destination(MIXED, rows=3, tokens=5)
    before = out.tensors(MIXED, rows=3, tokens=5)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in before.items()} == {
        "column": (torch.float32, (3, 1)),
        "ids": (torch.int64, (5,)),
    }
    assert not any(tensor.any() for tensor in before.values())
    for value in (1, 2):
        upload = send(pool, out, value)
        assert all(upload[name] is tensor for name, tensor in before.items())
        assert values(upload) == {value}


def test_smaller_uploads_and_those_of_other_layouts_begin_at_the_same_address(make_pool: MakePool) -> None:
    pool = make_pool("cpu")
    out = pool.destination(MIXED, rows=30, tokens=50)
    assert (out.nbytes, repr(out)) == (MIXED.nbytes(rows=30, tokens=50), "<Destination of 528 bytes on cpu>")
    first = send(pool, out, 1)["column"].data_ptr()
    assert send(pool, out, 2, rows=30, tokens=50)["column"].data_ptr() == first
    with pool.lease(OTHER, rows=7) as lease:
        lease["flags"], lease["halves"] = True, 0.5
        upload = lease.upload(out)
    assert upload["flags"].data_ptr() == first
    assert (upload["flags"].all(), upload["halves"].tolist()) == (True, [0.5] * 7)
    assert values(send(pool, out, 3)) == {3}


def test_an_upload_that_does_not_fit_is_refused_and_its_lease_goes_on(make_pool: MakePool) -> None:
    pool = make_pool("cpu", slots=1, max_slots=1)
    out = pool.destination(MIXED, rows=3, tokens=5)
    with pool.lease(MIXED, rows=3, tokens=7) as lease:
        lease["column"] = lease["ids"] = 1
        with pytest.raises(FieldError, match=r"64 bytes on cpu>\): the upload has 80 bytes; make the destination for"):
            lease.upload(out)
        with pytest.raises(FieldError, match="the upload has 80 bytes"):
            out.tensors(MIXED, rows=3, tokens=7)
        assert values(lease.upload()) == {1}
    assert values(send(pool, out, 2, tokens=4)) == {2}


def test_a_destination_is_for_the_pool_that_made_it(make_pool: MakePool) -> None:
    """Another pool's device may be another one; also where the two have uploaded these lengths before."""
    one, two = make_pool("cpu"), make_pool("cpu")
    out = one.destination(MIXED, rows=3, tokens=5)
    assert values(send(one, out, 1)) == {1}
    with pytest.raises(FieldError, match="another pool made it"):
        send(two, out, 2)
    assert values(send(one, out, 3)) == {3}


def test_lengths_of_a_destination_are_checked(make_pool: MakePool) -> None:
    pool = make_pool("cpu")
    with pytest.raises(FieldError, match="needs the length of 'tokens'"):
        pool.destination(MIXED, rows=3)
    empty = pool.destination(MIXED, rows=0, tokens=0)
    assert {name: len(tensor) for name, tensor in send(pool, empty, 1, 0, 0).items()} == {"column": 0, "ids": 0}


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("used", [False, True])
def test_inference_mode_makes_no_difference(make_pool: MakePool, made: bool, used: bool) -> None:
    """Neither where it is made nor where it is first uploaded to: it can be uploaded to, and changed, anywhere."""
    pool = make_pool("cpu")
    with torch.inference_mode(made):
        out = pool.destination(MIXED, rows=3, tokens=5)
    with torch.inference_mode(used):
        first = send(pool, out, 1)
    upload = send(pool, out, 2)
    assert all(upload[name] is tensor for name, tensor in first.items())
    upload["ids"].add_(1)
    assert (values(upload), upload["ids"].is_inference()) == ({2, 3}, False)


def test_the_copy_waits_for_who_still_reads_it(device: SimulatedDevice, make_pool: MakePool) -> None:
    pool = make_pool(device)
    out = pool.destination(MIXED, rows=1, tokens=0)
    allocated = device.calls["empty"]
    with pool.lease(MIXED, rows=1, tokens=0) as lease:
        lease["column"] = 1
        lease.upload(out, after=device.new_event())
    assert (device.calls["wait"], device.calls["empty"] - allocated) == (1, 0)


def test_its_memory_goes_with_the_last_tensor(make_pool: MakePool) -> None:
    """Neither the pool nor an upload that is over keeps it."""
    pool = make_pool("cpu")
    out = pool.destination(MIXED, rows=3, tokens=5)
    kept = send(pool, out, 7)["ids"]
    gone = weakref.ref(out._memory)
    del out
    gc.collect()
    assert gone() is None
    assert kept.tolist() == [7] * 5


def test_lengths_that_never_come_again_fill_no_memory(make_pool: MakePool) -> None:
    pool = make_pool("cpu", slots=1, max_slots=1)
    out = pool.destination(MIXED, rows=4, tokens=3 * MOST)
    for tokens in range(3 * MOST):
        assert values(send(pool, out, tokens, 4, tokens)) == {tokens}
        assert len(out._landings) <= MOST


def test_another_stream_comes_behind_the_zeros(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Or these, behind other work, would wipe its upload out; and the allocator knows that it uses the memory."""
    pool = make_pool(device)
    out = pool.destination(MIXED, rows=3, tokens=5)
    send(pool, out, 1)
    assert (device.calls["wait"], device.calls["record_stream"]) == (0, 0)
    for stream in (3, 3, 4, 0):
        device.stream = stream
        send(pool, out, 2)
    assert (device.calls["wait"], device.calls["record_stream"]) == (2, 2)
    device.stream, device.capturing_now = 5, True
    send(pool, out, 3, rows=0, tokens=0)  # allowed there, since it queues nothing
    assert (device.calls["wait"], device.calls["record_stream"]) == (2, 2)


def test_a_pool_of_no_use_makes_no_destination(make_pool: MakePool) -> None:
    pool = make_pool("cpu")
    pool.close()
    with pytest.raises(PoolClosed, match="make a new one"):
        pool.destination(MIXED, rows=3, tokens=5)


def test_none_is_made_while_a_graph_is_captured(device: SimulatedDevice, make_pool: MakePool) -> None:
    """The graph would write the zeros again, over every upload."""
    pool = make_pool(device)
    device.capturing_now = True
    with pytest.raises(
        CaptureError, match=r"cannot make a destination .* write the zeros again at each replay; upload"
    ):
        pool.destination(MIXED, rows=3, tokens=5)
    device.capturing_now = False
    assert pool.destination(MIXED, rows=3, tokens=5).nbytes == 64

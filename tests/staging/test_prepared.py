"""Views that are made once and looked up: of slots by lengths, of fixed destinations by tensor; never stale ones."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from staging import Field, FieldError, Layout, LeaseError, StagingPool, Upload
from staging._prepared import MOST
from staging.testing import SimulatedDevice

MIXED = Layout(
    [Field("temperature", torch.float32, shape=(1,)), Field("seed", torch.int64), Field("ids", torch.int32, "tokens")]
)

MakePool = Callable[..., StagingPool]


def send(pool: StagingPool, value: int, rows: int, tokens: int, out: torch.Tensor | None = None) -> Upload:
    with pool.lease(MIXED, rows=rows, tokens=tokens) as lease:
        lease.write_records([MIXED.pack(temperature=value, seed=value) for _ in range(rows)])
        lease["ids"] = [value] * tokens
        return lease.upload(out=out)


def values(upload: Upload) -> set[float]:
    return {value for tensor in upload.values() for value in tensor.reshape(-1).tolist()}


def test_lengths_that_come_again_after_the_slot_got_a_larger_buffer(make_pool: MakePool) -> None:
    """What was prepared for the old buffer is forgotten with it, and the buffer goes."""
    pool = make_pool("cpu", slots=1, max_slots=1, slot_bytes=64)
    old: list[weakref.ref[Any]] = []
    for value, rows in enumerate([1, 2, 1, 100, 1, 2, 300, 1, 2], 1):
        assert values(send(pool, value, rows, rows)) == {value}
        old.append(weakref.ref(pool._ring.slots[0].buffer.array))
    assert pool.stats().enlarged == 2
    assert len({id(ref()) for ref in old if ref() is not None}) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("form", [list, tuple])
def test_plain_floats_that_do_not_fit_are_named_and_infinity_is_none_of_them(
    make_pool: MakePool, dtype: torch.dtype, form: type
) -> None:
    """All floats, as most columns are: the short way, which may not make infinity of a large number."""
    layout = Layout([Field("column", dtype)])
    with make_pool("cpu", slots=1).lease(layout, rows=3) as lease:
        with pytest.raises(FieldError, match=r"row 1: field 'column': 1e\+39 \(float\) is too large"):
            lease["column"] = form([1.0, 1e39, 2.0])
        with pytest.raises(LeaseError, match="never written"):
            lease.upload()
        lease["column"] = form([1.0, float("inf"), -0.0])
        assert str(lease.upload()["column"].tolist()) == "[1.0, inf, -0.0]"


@pytest.mark.parametrize("end", ["upload", "discard"])
def test_an_ended_lease_keeps_no_buffer_that_was_replaced(make_pool: MakePool, end: str) -> None:
    """Whoever keeps an upload, or a lease that was discarded, keeps its slot and not the memory that it had."""
    pool = make_pool("cpu", slots=1, max_slots=1, slot_bytes=64)
    with pool.lease(MIXED, rows=1, tokens=1) as lease:
        lease.write_records([MIXED.pack(temperature=1, seed=1)])
        lease["ids"] = [1]
        kept = lease.upload() if end == "upload" else lease
    old = weakref.ref(pool._ring.slots[0].buffer.array)
    assert values(send(pool, 2, 300, 300)) == {2}
    assert old() is None
    assert kept is not None


def test_no_allocation_is_of_booleans() -> None:
    """torch may make 0 and 1 of other fields' bytes when it copies them as booleans."""
    layout = Layout(
        [Field("a", torch.bool), Field("b", torch.bool), Field("c", torch.uint8), Field("t", torch.bool, "t")]
    )
    plan = layout.plan({"rows": 3, "t": 5})
    assert {plan.cut.dtype, plan.other_cut.dtype, plan.row_cut.dtype} == {torch.uint8}


def test_records_of_two_layouts_in_turn_go_each_to_their_fields(make_pool: MakePool) -> None:
    """In one lease, and in the next one of the same slot, whatever was written last."""
    one, two = Layout([Field("a", torch.int64)], "one"), Layout([Field("b", torch.int64)], "two")
    pool = make_pool("cpu", slots=1, max_slots=1)
    for turn in range(2):
        for first, second in ((one, two), (two, one)):
            with pool.lease(one + two, rows=2) as lease:
                for layout in (first, second):
                    name = layout.fields[0].name
                    lease.write_records([layout.pack(**{name: turn + ord(name)})] * 2, layout)
                upload = lease.upload()
            assert upload["a"].tolist() == [turn + ord("a")] * 2
            assert upload["b"].tolist() == [turn + ord("b")] * 2


def test_joined_records_arrive_whatever_number_came_before(make_pool: MakePool) -> None:
    """Larger and smaller batches of one slot share the memory in which records lie before they are transposed."""
    layout = Layout([Field("a", torch.int64), Field("b", torch.int16), Field("c", torch.int64)])
    pool = make_pool("cpu", slots=1, max_slots=1)
    for turn, rows in enumerate((2, 3, 1000, 1, 3, 5000, 2)):
        values = [turn * 10_000 + row for row in range(rows)]
        records = [layout.pack(a=value, b=value % 77, c=-value) for value in values]
        with pool.lease(layout, rows=rows) as lease:
            lease.write_records(b"".join(records) if turn % 2 else layout.join(records))
            upload = lease.upload()
        assert upload["a"].tolist() == values
        assert upload["b"].tolist() == [value % 77 for value in values]
        assert upload["c"].tolist() == [-value for value in values]


def test_records_that_were_cut_off_count_as_unwritten(make_pool: MakePool) -> None:
    """By an interrupt, say: what the slot holds then is a mixture of two batches."""
    with make_pool("cpu", slots=1).lease(MIXED, rows=1, tokens=0) as lease:
        lease.write_records([MIXED.pack(temperature=1, seed=1)])
        assert lease._prepared is not None
        targets = lease._prepared.targets
        lease._prepared.targets = attrs.evolve(targets, joined=memoryview(bytearray(1)))
        with pytest.raises(ValueError, match="assignment"):
            lease.write_records([MIXED.pack(temperature=2, seed=2)])
        with pytest.raises(LeaseError, match="'temperature', 'seed' never written"):
            lease.upload()
        lease._prepared.targets = targets
        lease.write_records([MIXED.pack(temperature=3, seed=3)])
        assert lease.upload()["seed"].tolist() == [3]


def test_records_of_a_batch_without_rows_are_none(make_pool: MakePool) -> None:
    """Whether or not it has other fields, and so a slot."""
    for tokens in (0, 3):
        with make_pool("cpu", slots=1).lease(MIXED, rows=0, tokens=tokens) as lease:
            lease["ids"] = range(tokens)
            with pytest.raises(FieldError, match="0 rows were leased"):
                lease.write_records(MIXED.pack(temperature=1, seed=1))
            lease.write_records(b"")
            assert lease.upload()["seed"].tolist() == []


def test_lengths_that_never_come_again_fill_no_memory(make_pool: MakePool) -> None:
    """A slot, and a fixed destination, remember so many and start over."""
    pool = make_pool("cpu", slots=1, max_slots=1)
    out = torch.empty(MIXED.nbytes(rows=4, tokens=3 * MOST), dtype=torch.uint8)
    for tokens in range(3 * MOST):
        assert values(send(pool, tokens, 4, tokens, out)) == {tokens}
        assert len(pool._ring.slots[0].prepared) <= MOST
        (known,) = pool._destinations._known.values()
        assert max(map(len, known.views)) <= MOST


def test_a_fixed_destination_has_the_same_tensors_each_time(make_pool: MakePool) -> None:
    """For the same lengths the very objects, with the new values; for others their own."""
    pool = make_pool("cpu")
    out = torch.empty(4096, dtype=torch.uint8)
    first = dict(send(pool, 1, 3, 5, out))
    other = dict(send(pool, 2, 4, 5, out))
    again = send(pool, 3, 3, 5, out)
    assert all(again[name] is tensor for name, tensor in first.items())
    assert values(again) == {3}
    assert {name: tuple(tensor.shape) for name, tensor in other.items()} == {
        "temperature": (4, 1),
        "seed": (4,),
        "ids": (5,),
    }


def test_a_fixed_destination_that_is_dropped_gives_its_memory_back(make_pool: MakePool) -> None:
    """The pool keeps neither the tensor nor a view of it."""
    pool = make_pool("cpu")
    out = torch.empty(4096, dtype=torch.uint8)
    upload = send(pool, 1, 3, 5, out)
    kept = weakref.ref(upload["seed"])
    del upload, out
    gc.collect()
    assert kept() is None
    assert not pool._destinations._known


def test_a_closed_pool_keeps_no_destination(make_pool: MakePool) -> None:
    """Nor what it remembers of one that was given other memory, which would keep the old."""
    pool = make_pool("cpu")
    out = torch.empty(4096, dtype=torch.uint8)
    old = weakref.ref(send(pool, 1, 3, 5, out)["seed"])
    out.set_(torch.empty(4096, dtype=torch.uint8))
    pool.close()
    gc.collect()
    assert old() is None


@pytest.mark.parametrize("how", ["shorter", "moved", "both"])
def test_a_destination_that_was_changed_is_checked_again(make_pool: MakePool, how: str) -> None:
    """Resized or given other memory under the same name: the old views are not what the caller means."""
    pool = make_pool("cpu")
    out = torch.empty(4096, dtype=torch.uint8)
    before = send(pool, 1, 3, 5, out)
    if how == "shorter":
        out.resize_(16)
        with pytest.raises(FieldError, match="has 16 bytes"):
            send(pool, 2, 3, 5, out)
    else:
        with torch.no_grad():
            out.set_(torch.empty(4096 if how == "moved" else 8192, dtype=torch.uint8))
        after = send(pool, 2, 3, 5, out)
        assert values(after) == {2}
        assert after["seed"].untyped_storage().data_ptr() == out.data_ptr()
    assert values(before) == {1}


def test_a_destination_made_in_inference_mode_is_refused_outside_it_however_often(make_pool: MakePool) -> None:
    """What was found inside does not count outside."""
    pool = make_pool("cpu")
    with torch.inference_mode():
        out = torch.empty(4096, dtype=torch.uint8)
        assert values(send(pool, 1, 3, 5, out)) == {1}
    for _ in range(2):
        with pytest.raises(FieldError, match="inference mode"):
            send(pool, 2, 3, 5, out)
    with torch.inference_mode():
        assert values(send(pool, 3, 3, 5, out)) == {3}


@pytest.mark.parametrize("change", [lambda out: out.as_strided_((256,), (2,)), lambda out: out.unsqueeze_(0)])
def test_a_destination_of_another_shape_is_checked_again(
    make_pool: MakePool, change: Callable[[torch.Tensor], object]
) -> None:
    """Changed in place, at the same address and as long: no longer what can be written."""
    pool = make_pool("cpu")
    out = torch.empty(256, dtype=torch.uint8)
    storage = out.untyped_storage()
    storage.resize_(512)
    send(pool, 1, 3, 5, out)
    change(out)
    with pytest.raises(FieldError, match="contiguous one-dimensional"):
        send(pool, 2, 3, 5, out)


def test_a_destination_counts_its_versions(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Autograd notices that what it saved was overwritten, as with any other copy of torch's."""
    pool = make_pool(device)
    out = torch.empty(4096, dtype=torch.uint8)
    send(pool, 1, 3, 5, out)
    before = out._version
    send(pool, 2, 3, 5, out)
    assert out._version > before
    device.finish_all()


@pytest.mark.parametrize("fixed", [False, True])
def test_views_are_of_the_upload_s_inference_mode_wherever_they_are_looked_at(make_pool: MakePool, fixed: bool) -> None:
    """A look inside of inference mode does not make tensors that cannot be changed outside, nor the other way round."""
    pool = make_pool("cpu")
    out = torch.empty(4096, dtype=torch.uint8) if fixed else None
    upload = send(pool, 1, 3, 5, out)
    with torch.inference_mode():
        assert not upload["seed"].is_inference()
    again = send(pool, 2, 3, 5, out)
    assert not any(tensor.is_inference() for tensor in again.values())
    again["seed"].add_(1)
    with torch.inference_mode():
        inside = send(pool, 3, 3, 5)
    assert all(tensor.is_inference() for tensor in inside.values())


def test_an_upload_is_the_callers_also_as_a_dictionary(device: SimulatedDevice, make_pool: MakePool) -> None:
    """What the caller does to it is not seen in the next upload to the same destination."""
    pool = make_pool(device)
    out = torch.zeros(4096, dtype=torch.uint8)
    upload = send(pool, 1, 3, 5, out=out)
    assert list(upload) == ["temperature", "seed", "ids"]
    del upload["seed"]
    upload.clear()
    again = send(pool, 2, 3, 5, out=out)
    assert list(again) == ["temperature", "seed", "ids"]
    device.finish_all()


FIELDS = [
    Field("a", torch.int8),
    Field("b", torch.float32, shape=(1,)),
    Field("c", torch.bool),
    Field("d", torch.float16, shape=(2, 4)),
    Field("e", torch.uint8),
    Field("f", torch.float32),
    Field("g", torch.int32),
    Field("h", torch.int64),
    Field("i", torch.uint64),
]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("strided", [False, True])
def test_records_of_any_order_and_of_some_fields_arrive(make_pool: MakePool, seed: int, strided: bool) -> None:
    """The records' fields are those of the lease in another order, or some of them; the table may have gaps."""
    choice = random.Random(seed)
    leased = choice.sample(FIELDS, choice.randrange(2, len(FIELDS) + 1))
    leased.insert(choice.randrange(len(leased)), Field("t", torch.int16, "tokens"))
    layout = Layout(leased, "leased")
    per_row = [field for field in leased if field.counts == "rows"]
    records = Layout(choice.sample(per_row, choice.randrange(1, len(per_row) + 1)), "records")
    rows = choice.choice([0, 1, 2, 3, 16, 33])
    dice = np.random.default_rng(seed)
    table = np.zeros(2 * rows if strided else rows, records.record_dtype)
    for field in records.fields:
        column = table[field.name]
        column[...] = dice.integers(0, 2 if field.dtype == torch.bool else 100, column.shape)
    table = table[::2] if strided else table
    pool = make_pool("cpu", slots=1)
    for _ in range(2):  # the second time everything is prepared
        with pool.lease(layout, rows=rows, tokens=3) as lease:
            for field in layout.fields:
                lease[field.name] = True if field.dtype == torch.bool else 7
            lease.write_records(table, records)
            upload = lease.upload()
        for field in per_row:
            got = upload[field.name].numpy()
            if field in records.fields:
                assert got.tobytes() == np.ascontiguousarray(table[field.name]).tobytes(), field
            else:
                assert set(got.reshape(-1).tolist()) <= {True if field.dtype == torch.bool else 7}, field
        assert upload["t"].tolist() == [7, 7, 7]

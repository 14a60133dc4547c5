"""A field written from parts: the same bytes as in one array, the same refusals, and the part is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from staging import Field, FieldError, Layout, Lease, LeaseError, StagingPool
from staging.testing import SimulatedDevice

MakePool = Callable[..., StagingPool]

IDS = Layout([Field("ids", torch.int64, "tokens"), Field("rows", torch.int32)], "ids")
PAIRS = Layout([Field("ids", torch.int32, "tokens", shape=(2,))], "pairs")


def in_parts(pool: StagingPool, tokens: int, parts: Any) -> list[int]:
    with pool.lease(IDS, rows=1, tokens=tokens) as lease:
        lease["rows"] = 1
        lease.write_parts("ids", parts)
        return lease.upload()["ids"].tolist()


numbers = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5)
forms = st.sampled_from(["int64", "strided", "list", "tuple", "tensor", "swapped"])


@given(parts=st.lists(st.tuples(forms, numbers), max_size=6))
def test_parts_of_any_form_arrive_in_order(parts: list[tuple[str, list[int]]]) -> None:
    made: list[Any] = []
    for form, values in parts:
        array = np.array(values, np.int64)
        if form == "strided":
            wide = np.zeros(2 * len(values), np.int64)
            wide[::2] = array
            made.append(wide[::2])
        elif form == "swapped":
            made.append(array.astype(">i8"))
        else:
            made.append({"int64": array, "list": values, "tuple": tuple(values), "tensor": torch.tensor(array)}[form])
    expected = [value for _, values in parts for value in values]
    with StagingPool("cpu", slots=1) as pool:
        assert in_parts(pool, len(expected), made) == expected
        assert in_parts(pool, len(expected), iter(made)) == expected


def test_entries_of_several_elements_are_joined_along_the_first_axis(make_pool: MakePool) -> None:
    with make_pool("cpu").lease(PAIRS, tokens=3) as lease:
        lease.write_parts("ids", [np.array([[1, 2]], np.int32), np.array([[3, 4], [5, 6]], np.int32)])
        assert lease.upload()["ids"].tolist() == [[1, 2], [3, 4], [5, 6]]


def test_nothing_is_made_of_parts_that_are_the_fields_own(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied once, to their place in the slot."""
    pool = make_pool("cpu")
    parts = [np.arange(5), np.arange(7)]
    outs: list[Any] = []
    concatenate = np.concatenate

    def watched(arrays: Any, **options: Any) -> Any:
        outs.append(options["out"].ctypes.data)
        return concatenate(arrays, **options)

    with pool.lease(IDS, rows=1, tokens=12) as lease:
        with monkeypatch.context() as patch:
            patch.setattr(np, "concatenate", watched)
            lease.write_parts("ids", parts)
        assert outs == [lease._slot.buffer.array.ctypes.data]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([np.arange(3), [1, True]], r"part 1: row 1: field 'ids': True \(bool\) is not a number"),
        ([np.arange(3), np.array([1.5, 2])], "part 1: field 'ids' is torch.int64, got an array of float64"),
        ([[1], [2**63], [3, 4, 5]], r"part 1: row 0: field 'ids': 9223372036854775808 \(int\) does"),
        (7, r"field 'ids': 7 \(int\) is not a sequence of parts"),
        ([np.arange(3), 7], r"part 1: field 'ids': 7 \(int\) is not a list"),
        ([np.arange(3), np.arange(3)], "5 tokens were leased, got 6 values"),
        ([np.arange(4)], "5 tokens were leased, got 4 values"),
        ([], "5 tokens were leased, got 0 values"),
        ([np.arange(5, dtype=np.uint64) + 2**63], r"part 0: row 0: field 'ids': 9223372036854775808 "),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_and_the_field_is_unwritten(make_pool: MakePool, parts: Any, says: str) -> None:
    pool = make_pool("cpu", slots=1)
    with pool.lease(IDS, rows=1, tokens=5) as lease:
        lease["rows"], lease["ids"] = 1, 5
        with pytest.raises(FieldError, match=says):
            lease.write_parts("ids", parts)
        if parts != 7:
            with pytest.raises(LeaseError, match="'ids' never written"):
                lease.upload()
        lease.write_parts("ids", [np.arange(2), np.arange(3)])
        assert lease.upload()["ids"].tolist() == [0, 1, 0, 1, 2]


def test_parts_of_another_shape_are_refused(make_pool: MakePool) -> None:
    with make_pool("cpu").lease(IDS, rows=1, tokens=4) as lease:
        for parts in ([np.zeros((2, 2), np.int64)], [np.zeros(2, np.int64), np.zeros((), np.int64)]):
            with pytest.raises(FieldError, match=f"part {len(parts) - 1}: field 'ids'"):
                lease.write_parts("ids", parts)


def test_an_empty_field_has_no_parts_or_empty_ones(make_pool: MakePool) -> None:
    pool = make_pool("cpu")
    for parts in ([], [[]], [np.zeros(0, np.int64)] * 2):
        assert in_parts(pool, 0, parts) == []
    with pool.lease(IDS, rows=0, tokens=0) as lease:
        lease.write_parts("ids", [[], []])
        lease["rows"] = []
        assert lease.upload()["ids"].tolist() == []
        with pytest.raises(LeaseError, match="ended"):
            lease.write_parts("ids", [[]])


def test_an_ended_lease_takes_no_parts(device: SimulatedDevice, make_pool: MakePool) -> None:
    """Also where it ends while its parts are read."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    lease = pool.lease(IDS, rows=1, tokens=2)
    successor: list[Lease] = []

    def parts() -> Any:
        yield np.array([9, 9])
        lease.discard()
        successor.append(pool.lease(IDS, rows=1, tokens=2))
        successor[0]["ids"], successor[0]["rows"] = 8, 8

    told = None
    try:
        lease.write_parts("ids", parts())
    except LeaseError as error:
        told = str(error)
    assert successor[0].upload()["ids"].tolist() == [8, 8]
    assert told is not None
    assert "ended" in told
    with pytest.raises(FieldError, match="no field 'other'"):
        lease.write_parts("other", [[1]])

"""Long lists of integers are written in a way of their own: the same values, the same refusals."""

from __future__ import annotations

import enum
import marshal
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from staging import Field, FieldError, Layout, Lease, LeaseError, StagingPool
from staging._fill import small_integers
from staging._prepared import MANY
from staging.testing import SimulatedDevice

MakePool = Callable[..., StagingPool]

WIDE = Layout([Field("column", torch.int64)], "wide")
NARROW = Layout([Field("column", torch.int32, shape=(1,))], "narrow")


class Level(enum.IntEnum):
    """An integer that is not a plain one."""

    HIGH = 3


plain = st.integers(-(2**31), 2**31 - 1)
odd = st.one_of(
    st.booleans(),
    st.integers(2**31, 2**70),
    st.integers(-(2**70), -(2**31) - 1),
    st.floats(),
    st.none(),
    st.text(max_size=9),
    st.binary(max_size=9),
    st.just(Level.HIGH),
    st.integers(-5, 5).map(np.int64),
    st.integers(-5, 5).map(np.int32),
    st.lists(plain, max_size=3),
    st.complex_numbers(),
)


@given(values=st.lists(plain, min_size=1, max_size=300), as_tuple=st.booleans())
def test_plain_integers_of_32_bits_are_found_and_packed(values: list[int], as_tuple: bool) -> None:
    numbers = small_integers(tuple(values) if as_tuple else values)
    assert numbers is not None
    assert numbers.tolist() == values


@given(before=st.lists(plain, max_size=40), value=odd, behind=st.lists(plain | odd, max_size=40))
def test_anything_else_among_them_is_noticed(before: list[Any], value: Any, behind: list[Any]) -> None:
    """Booleans, wider integers, subclasses, numbers of numpy, and bytes that look like what is packed."""
    assert small_integers([*before, value, *behind]) is None


def test_a_list_whose_codes_look_right_but_for_its_end_is_noticed() -> None:
    """The last value is longer than an integer: its code stands where one would."""
    assert small_integers([1, 2, b"xyz"]) is None
    assert small_integers([1, 2, True]) is None


def test_the_list_that_is_packed_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of the caller's could empty its own list under marshal's hands, and the process would fall over."""
    given: list[Any] = []

    def watched(values: Any, version: int) -> bytes:
        given.append(values)
        return marshal.dumps(values, version)

    monkeypatch.setattr("staging._fill.marshal", SimpleNamespace(dumps=watched))
    values = [1, 2, 3]
    assert small_integers(values) is not None
    assert given == [values]
    assert given[0] is not values


def test_nothing_is_packed_that_does_not_begin_with_an_integer(monkeypatch: pytest.MonkeyPatch) -> None:
    """All would be written out before one is refused: a list of large arrays, say."""
    packed: list[Any] = []
    monkeypatch.setattr("staging._fill.marshal", SimpleNamespace(dumps=lambda values, version: packed.append(values)))
    assert small_integers([np.zeros(3), 1]) is None
    assert small_integers([]) is None
    assert packed == []


def test_an_audit_hook_that_forbids_it_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def dumps(values: Any, version: int) -> bytes:
        raise PermissionError("marshal.dumps")

    monkeypatch.setattr("staging._fill.marshal", SimpleNamespace(dumps=dumps))
    assert small_integers([1, 2]) is None


@given(data=st.binary(max_size=60))
def test_bytes_that_look_like_packed_integers_are_no_integers(data: bytes) -> None:
    """Whatever a value's own bytes are, its code is not that of an integer."""
    for value in (data, data.decode("latin1"), [data], b"i\0\0\0\0" * 9):
        assert small_integers([value]) is None
        assert small_integers([1, value, 2]) is None


@pytest.mark.parametrize("length", [MANY - 1, MANY, 5 * MANY])
@pytest.mark.parametrize("layout", [WIDE, NARROW], ids=["int64", "int32"])
def test_long_lists_arrive(make_pool: MakePool, layout: Layout, length: int) -> None:
    """In any order of small and wide values: what a list was once, the next one need not be."""
    pool = make_pool("cpu", slots=1)
    lists = [range(-5, length - 5), range(2**31 - length, 2**31), range(-(2**31), length - 2**31)]
    if layout is WIDE:
        lists += [range(2**40, 2**40 + length), range(length)]
    for values in lists:
        with pool.lease(layout, rows=length) as lease:
            lease["column"] = list(values)
            assert lease.upload()["column"].reshape(-1).tolist() == list(values)


def test_a_field_of_wide_integers_is_not_tried_each_time(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds and pointers would pay for it at every batch; lengths go on."""
    tried: list[int] = []

    def watched(values: list[int]) -> Any:
        tried.append(values[0])
        return small_integers(values)

    monkeypatch.setattr("staging.lease.small_integers", watched)
    pool = make_pool("cpu", slots=1)
    for first in (1, 2, 2**40, 3, 4):
        with pool.lease(WIDE, rows=MANY) as lease:
            lease["column"] = [first] * MANY
            assert lease.upload()["column"].tolist() == [first] * MANY
    assert tried == [1, 2, 2**40]


@pytest.mark.parametrize("bad", [True, 1.0, None, "7", 2**63, Level, [1]])
def test_what_does_not_fit_is_refused_by_name(make_pool: MakePool, bad: Any) -> None:
    """The row and the value are named, the field is unwritten, and the next list is written."""
    pool = make_pool("cpu", slots=1)
    with pool.lease(WIDE, rows=MANY) as lease:
        lease["column"] = [5] * MANY
        with pytest.raises(FieldError, match="row 77"):
            lease["column"] = [*range(77), bad, *range(MANY - 78)]
        with pytest.raises(LeaseError, match="never written"):
            lease.upload()
        lease["column"] = list(range(MANY))
        assert lease.upload()["column"].tolist() == list(range(MANY))


@pytest.mark.parametrize("length", [MANY - 1, MANY + 1, 0])
def test_a_list_of_another_length_is_refused(make_pool: MakePool, length: int) -> None:
    pool = make_pool("cpu", slots=1)
    with pool.lease(WIDE, rows=MANY) as lease, pytest.raises(FieldError, match=f"{MANY} rows were leased"):
        lease["column"] = [1] * length


def test_a_lease_that_ends_while_a_list_is_packed_writes_nothing(
    device: SimulatedDevice, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot belongs to somebody else by then."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    lease = pool.lease(WIDE, rows=MANY)
    successor: list[Lease] = []

    def ending(values: list[int]) -> Any:
        lease.discard()
        successor.append(pool.lease(WIDE, rows=MANY))
        successor[0]["column"] = 8
        return small_integers(values)

    monkeypatch.setattr("staging.lease.small_integers", ending)
    told = None
    try:
        lease["column"] = [9] * MANY
    except LeaseError as error:
        told = str(error)
    assert successor[0].upload()["column"].tolist() == [8] * MANY
    assert told is not None
    assert "ended" in told


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python code makes a buffer since 3.12")
def test_a_value_that_ends_the_lease_while_it_is_looked_at_writes_nothing(
    device: SimulatedDevice, make_pool: MakePool
) -> None:
    """It is a buffer written in Python, which discards the lease and leaves a list of plain integers."""
    pool = make_pool(device, slots=1, max_slots=1, timeout=0)
    lease = pool.lease(WIDE, rows=MANY)

    class Trap:
        def __buffer__(self, flags: int) -> memoryview:
            lease.discard()
            successor.append(pool.lease(WIDE, rows=MANY))
            successor[0]["column"] = 8
            values[:] = [9] * MANY
            return memoryview(b"")

    successor: list[Lease] = []
    values: list[Any] = [9, Trap(), *[9] * (MANY - 2)]
    with pytest.raises(LeaseError, match="ended"):
        lease["column"] = values
    assert successor[0].upload()["column"].tolist() == [8] * MANY

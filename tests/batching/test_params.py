"""Sampling values: what is accepted, what is refused, and the bytes that come of it."""

from __future__ import annotations

import copy
import enum
import pickle
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from batch_builders import (
    EXAMPLES,
    WHOLE_VOCABULARY,
    Values,
    any_values,
    check_rows,
    decode_batch,
    flags_of,
    foreign_params,
    own_params,
    record_of,
    request,
)
from batch_builders import (
    FLAGS as FLAG_NAMES,
)
from hypothesis import given
from hypothesis import strategies as st

from batching import BatchError, Request, SamplingBatchInfo, SamplingParams, SamplingValueError, ScheduleBatch
from batching.needs import FLAGS
from batching.params import FEW, SAMPLING, needs_of, table_of
from staging import StagingPool
from staging.testing import SimulatedDevice

NAN, INF = float("nan"), float("inf")


class Choice(enum.IntEnum):
    FORTY = 40


ACCEPTED: dict[str, list[tuple[Any, Values]]] = {
    "temperature": [
        (0, Values(0.0)),
        (0.0, Values(0.0)),
        (-0.0, Values(0.0)),
        (1e-46, Values(0.0)),
        (1e-40, Values(0.0)),
        (9.99e-7, Values(0.0)),
        (1e-6, Values(1e-6)),
        (0.7, Values(0.7)),
        (2, Values(2.0)),
        (1e30, Values(1e30)),
        (10**30, Values(1e30)),
        (3.4028234e38, Values(3.4028234e38)),
    ],
    "top_p": [
        (1, Values(top_p=1.0)),
        (0.1, Values(top_p=0.1)),
        (1 - 1e-9, Values(top_p=1.0)),
        (1 + 1e-8, Values(top_p=1.0)),
        (1e-40, Values(top_p=1e-40)),
        (1.5e-45, Values(top_p=1.5e-45)),
    ],
    "top_k": [
        (-1, Values(top_k=WHOLE_VOCABULARY)),
        (1, Values(top_k=1)),
        (40, Values(top_k=40)),
        (Choice.FORTY, Values(top_k=40)),
        (9_999_999, Values(top_k=9_999_999)),
        (WHOLE_VOCABULARY, Values(top_k=WHOLE_VOCABULARY)),
        (2**31 - 1, Values(top_k=2**31 - 1)),
    ],
    "min_p": [
        (0, Values(min_p=0.0)),
        (1e-46, Values(min_p=0.0)),
        (0.05, Values(min_p=0.05)),
        (1, Values(min_p=1.0)),
        (1 - 1e-9, Values(min_p=1.0)),
        (1 + 1e-8, Values(min_p=1.0)),
    ],
    "sampling_seed": [
        (None, Values(sampling_seed=42)),
        (0, Values(sampling_seed=0)),
        (-1, Values(sampling_seed=-1)),
        (42, Values(sampling_seed=42)),
        (2**63 - 1, Values(sampling_seed=2**63 - 1)),
        (-(2**63), Values(sampling_seed=-(2**63))),
    ],
}

NOT_NUMBERS: list[tuple[Any, str]] = [
    (True, "True"),
    (np.bool_(False), "False"),
    ("1", "'1'"),
    (b"1", "b'1'"),
    ([1], "[1]"),
    ((1,), "(1,)"),
    ({}, "{}"),
    (1j, "1j"),
    (Decimal("1"), "Decimal('1')"),
    (Fraction(1, 2), "Fraction(1, 2)"),
    (np.array([1]), "array([1])"),
    (np.str_("1"), "1"),
    (np.complex64(1), "1"),
    (np.array(None), "None"),
    (np.array(True), "True"),
    (torch.tensor([1]), "tensor([1])"),
    (torch.tensor(True), "True"),
    (torch.tensor(1j), "1j"),
    (torch.tensor(1, device="meta"), "is on a device, and reading it would wait"),
]

REFUSED: dict[str, list[tuple[Any, str]]] = {
    "temperature": [
        (NAN, "nan"),
        (INF, "inf"),
        (-INF, "-inf"),
        (-1, "-1"),
        (-1e-9, "-1e-09"),
        (1e39, "1e+39"),
        (3.5e38, "3.5e+38"),
        (np.float64(1e39), "1e+39"),
        (np.longdouble("1e400"), "temperature"),
        (np.float16(INF), "inf"),
        (torch.tensor(NAN), "nan"),
        (10**400, "too large"),
        (10**5000, "16610 bits"),
        (None, "None"),
    ],
    "top_p": [
        (NAN, "nan"),
        (INF, "inf"),
        (0, "0"),
        (0.0, "0.0"),
        (-0.0, "-0.0"),
        (1e-46, "1e-46"),
        (-0.1, "-0.1"),
        (1 + 1e-7, "1.0000001"),
        (2, "2"),
        (1e39, "1e+39"),
        (10**5000, "16610 bits"),
        (None, "None"),
    ],
    "top_k": [
        (0, "0"),
        (-2, "-2"),
        (-(2**31), "-2147483648"),
        (-(2**31) - 1, "-2147483649"),
        (2**31, "2147483648"),
        (2**63, "9223372036854775808"),
        (np.uint64(2**64 - 1), "18446744073709551615"),
        (np.uint32(2**32 - 1), "4294967295"),
        (10**30, str(10**30)),
        (10**5000, "16610 bits"),
        (40.0, "40.0"),
        (np.float32(40), "40.0"),
        (torch.tensor(40.0), "40.0"),
        (NAN, "nan"),
        (INF, "inf"),
        (None, "None"),
    ],
    "min_p": [
        (NAN, "nan"),
        (-INF, "-inf"),
        (-0.1, "-0.1"),
        (-1e-9, "-1e-09"),
        (1 + 1e-7, "1.0000001"),
        (1.1, "1.1"),
        (1e39, "1e+39"),
        (10**5000, "16610 bits"),
        (None, "None"),
    ],
    "sampling_seed": [
        (2**63, "9223372036854775808"),
        (-(2**63) - 1, "-9223372036854775809"),
        (10**20, str(10**20)),
        (10**5000, "16610 bits"),
        (np.uint64(2**64 - 1), "18446744073709551615"),
        (torch.tensor(2**64 - 1, dtype=torch.uint64), "18446744073709551615"),
        (1.5, "1.5"),
        (42.0, "42.0"),
        (NAN, "nan"),
    ],
}


def cases(table: dict[str, list[tuple[Any, Any]]]) -> list[Any]:
    return [
        pytest.param(field, value, wanted, id=f"{field}-{number}")
        for field, rows in table.items()
        for number, (value, wanted) in enumerate(rows)
    ]


def not_numbers() -> list[Any]:
    return cases(dict.fromkeys(Values._fields, NOT_NUMBERS))


def foreign_record(**values: Any) -> bytes:
    """The bytes of one request with a parameter object of our own making."""
    return table_of([request(foreign=True, values=Values(**values))]).tobytes()


@pytest.mark.parametrize(("field", "value", "wanted"), cases(ACCEPTED))
def test_a_value_in_range_is_stored_as_the_documented_mapping_says(field: str, value: Any, wanted: Values) -> None:
    """Ranges hold after rounding to float32; greedy, the whole vocabulary and the missing seed have their mapping."""
    assert SamplingParams(**{field: value}).record == record_of(wanted)
    assert foreign_record(**{field: value}) == record_of(wanted)


@pytest.mark.parametrize(("field", "value", "text"), cases(REFUSED) + not_numbers())
def test_a_value_out_of_range_is_refused_naming_field_and_value(field: str, value: Any, text: str) -> None:
    """Nothing wraps, nothing becomes infinite, and only numbers are numbers."""
    with pytest.raises(SamplingValueError) as caught:
        SamplingParams(**{field: value})
    assert f" {field}: " in str(caught.value)
    assert text in str(caught.value)


@pytest.mark.parametrize(("field", "value", "text"), cases(REFUSED) + not_numbers())
def test_the_error_names_the_request_when_params_are_made_for_one(field: str, value: Any, text: str) -> None:
    """`SamplingParams.of` says whose value it was."""
    with pytest.raises(SamplingValueError) as caught:
        SamplingParams.of("req-7", **{field: value})
    assert str(caught.value).startswith(f"request 'req-7': {field}: ")
    assert text in str(caught.value)


@pytest.mark.parametrize(("field", "value", "text"), cases(REFUSED) + not_numbers())
def test_a_foreign_value_out_of_range_names_its_request_and_costs_no_lease(field: str, value: Any, text: str) -> None:
    """The same rules at the time a batch is built: the batch is refused whole, before the pool is asked."""
    device = SimulatedDevice()
    good = Values(top_k=40, sampling_seed=5)
    with StagingPool(device, slots=1, slot_bytes=1024) as pool:
        before = pool.stats()
        batch = decode_batch([good, good._replace(**{field: value}), good], foreign=True, deterministic=True)
        with pytest.raises(SamplingValueError) as caught:
            SamplingBatchInfo.from_schedule_batch(batch, 1000, pool)
        assert str(caught.value).startswith(f"request 'r1': {field}: ")
        assert text in str(caught.value)
        assert pool.stats() == before
        assert pool.stats().leases == 0
        assert device.calls["copy"] == 0
        del batch.reqs[1]
        check_rows(SamplingBatchInfo.from_schedule_batch(batch, 1000, pool), [good, good], deterministic=True)
        device.finish_all()


@pytest.mark.parametrize("field", Values._fields[:4])
def test_a_foreign_object_without_an_attribute_is_refused_by_name(field: str) -> None:
    """A missing attribute reads as a missing attribute, not as a default."""
    params = foreign_params(Values())
    delattr(params, field)
    with pytest.raises(SamplingValueError, match=f"request 'r9': SimpleNamespace has no attribute '{field}'"):
        table_of([Request("r0", own_params(Values())), Request("r9", params)])


def test_a_request_without_parameters_is_refused_by_name() -> None:
    """None is no parameter object."""
    with pytest.raises(SamplingValueError, match="request 'r0': NoneType has no attribute 'temperature'"):
        table_of([Request("r0", None)])


def test_an_unknown_parameter_is_refused_naming_the_request() -> None:
    """A misspelt name says what the names are."""
    with pytest.raises(SamplingValueError, match=r"request 'r1': .*'topp'.*temperature, top_p, top_k, min_p"):
        SamplingParams.of("r1", topp=0.5)


def test_a_bad_value_is_a_value_error() -> None:
    """Callers that know nothing of this package can still catch it."""
    assert issubclass(SamplingValueError, BatchError)
    assert issubclass(BatchError, ValueError)


INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
FLOATS = [np.float16, np.float32, np.float64, np.longdouble]
TENSOR_INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint64]
TENSOR_FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def integer_makers() -> list[Any]:
    makers: list[Any] = [pytest.param(kind, id=kind.__name__) for kind in INTEGERS]
    makers += [pytest.param(lambda v, k=kind: np.array(v, dtype=k), id=f"0-d {kind.__name__}") for kind in INTEGERS]
    makers += [pytest.param(lambda v, k=kind: torch.tensor(v, dtype=k), id=str(kind)) for kind in TENSOR_INTEGERS]
    return [*makers, pytest.param(lambda v: np.array(v, dtype=object), id="0-d object")]


def float_makers() -> list[Any]:
    makers: list[Any] = [pytest.param(kind, id=kind.__name__) for kind in FLOATS]
    makers += [pytest.param(lambda v, k=kind: np.array(v, dtype=k), id=f"0-d {kind.__name__}") for kind in FLOATS]
    return makers + [pytest.param(lambda v, k=kind: torch.tensor(v, dtype=k), id=str(kind)) for kind in TENSOR_FLOATS]


@pytest.mark.parametrize("make", integer_makers())
def test_integers_of_every_width_and_wrapping_are_numbers(make: Callable[[int], Any]) -> None:
    """numpy scalars, 0-d arrays and 0-d tensors give the bytes of the plain integer, in every field."""
    plain = Values(2, 1, 40, 1, 77)
    wrapped = Values(*map(make, plain))
    assert own_params(wrapped).record == record_of(plain)
    assert foreign_record(**wrapped._asdict()) == record_of(plain)


@pytest.mark.parametrize("make", float_makers())
def test_floats_of_every_width_and_wrapping_are_numbers(make: Callable[[float], Any]) -> None:
    """The same for floats; the values here are exact in every one of these formats."""
    plain = Values(0.75, 0.5, 40, 0.25, 77)
    wrapped = plain._replace(temperature=make(0.75), top_p=make(0.5), min_p=make(0.25))
    assert own_params(wrapped).record == record_of(plain)
    assert foreign_record(**wrapped._asdict()) == record_of(plain)


def test_a_tensor_that_requires_a_gradient_is_a_number_too() -> None:
    """Reading a value never needs its history."""
    assert SamplingParams(temperature=torch.tensor(0.5, requires_grad=True)).record == record_of(Values(0.5))


@pytest.mark.parametrize("field", Values._fields)
def test_a_duration_is_refused_like_any_other_thing_that_is_no_number(field: str) -> None:
    """`numpy.timedelta64` derives from `numpy.signedinteger`, and is still no number."""
    with pytest.raises(SamplingValueError, match=field):
        SamplingParams(**{field: np.timedelta64(5, "s")})


@pytest.mark.parametrize("field", ["temperature", "min_p"])
def test_minus_zero_is_zero(field: str) -> None:
    """The sign of a zero means nothing: greedy for the temperature, off for min_p."""
    params = SamplingParams(**{field: -0.0})
    if field == "temperature":
        assert (params.temperature, params.top_k) == (1.0, 1)
    else:
        assert params.min_p == 0


@pytest.mark.parametrize("value", [-1e-46, -1e-60, np.float64(-1e-46)])
def test_a_negative_temperature_is_refused_however_small(value: float) -> None:
    """A negative number that rounds to zero was still not asked for as greedy; own and foreign params agree."""
    with pytest.raises(SamplingValueError, match="temperature"):
        SamplingParams(temperature=value)
    with pytest.raises(SamplingValueError, match="temperature"):
        foreign_record(temperature=value)


def test_greedy_is_decided_on_the_number_given_by_own_and_foreign_alike() -> None:
    """1e-6 itself is not below 1e-6; the float32 next to it, given as such, is."""
    for value, greedy in [(1e-6, False), (np.float32(1e-6), True), (float(np.nextafter(1e-6, 0)), True)]:
        wanted = record_of(Values(0.0 if greedy else 1e-6))
        assert SamplingParams(temperature=value).record == wanted
        assert foreign_record(temperature=value) == wanted


def test_greedy_overrides_the_top_k_that_came_with_it() -> None:
    """A temperature of 0 means top_k 1 and temperature 1.0, whatever top_k says."""
    params = SamplingParams(temperature=0, top_k=40, top_p=0.5, min_p=0.25, sampling_seed=9)
    assert attrs.astuple(params)[:5] == (1.0, 0.5, 1, 0.25, 9)
    assert params.record == record_of(Values(0, 0.5, 40, 0.25, 9))


def test_a_bad_top_k_is_refused_even_where_greedy_would_override_it() -> None:
    """The mapping does not hide a mistake."""
    with pytest.raises(SamplingValueError, match="top_k"):
        SamplingParams(temperature=0, top_k=0)


def test_defaults_change_nothing_and_have_no_seed() -> None:
    """No arguments: temperature 1, everything kept, seed 42 in the record and None in the object."""
    params = SamplingParams()
    assert attrs.astuple(params)[:5] == (1.0, 1.0, WHOLE_VOCABULARY, 0.0, None)
    assert params.record == record_of(Values())
    assert len(params.record) == SAMPLING.record_dtype.itemsize == 24


@pytest.mark.parametrize("name", [*Values._fields, "record", "anything"])
def test_params_are_frozen(name: str) -> None:
    """A record packed once stays right only while nothing can change under it."""
    params = SamplingParams(temperature=0.7)
    with pytest.raises(AttributeError):
        setattr(params, name, 1)
    with pytest.raises(AttributeError):
        delattr(params, name)
    assert params.record == record_of(Values(0.7))


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p)), attrs.evolve])
def test_params_can_be_copied_and_sent_to_another_process(again: Callable[[SamplingParams], SamplingParams]) -> None:
    """A copy has the same record; normalising what is normal changes nothing."""
    for values in (Values(), Values(0.0, 0.5, 40, 0.1, -3), Values(0.7, 1.0, -1, 0.0, None)):
        assert again(own_params(values)).record == record_of(values)


def test_an_evolved_copy_is_checked_and_packed_anew() -> None:
    """`attrs.evolve` cannot carry an old record along."""
    params = attrs.evolve(SamplingParams(top_k=40), temperature=0.5)
    assert params.record == record_of(Values(0.5, top_k=40))
    with pytest.raises(SamplingValueError):
        attrs.evolve(params, top_p=0)


@EXAMPLES
@given(st.lists(any_values, max_size=8), st.data())
def test_own_foreign_and_mixed_requests_give_the_oracle_s_bytes(values: list[Values], data: st.DataObject) -> None:
    """However a request brings its values, what is staged is what struct packs."""
    wanted = b"".join(map(record_of, values))
    own = [request(f"r{row}", value) for row, value in enumerate(values)]
    foreign = [request(f"r{row}", value, foreign=True) for row, value in enumerate(values)]
    mixed = [data.draw(st.sampled_from(pair)) for pair in zip(own, foreign, strict=True)]
    assert b"".join(one.sampling_params.record for one in own) == wanted
    for requests in (own, foreign, mixed):
        assert table_of(requests).tobytes() == wanted


EXACT_WRAPPERS: list[Callable[[Any], Any]] = [
    lambda v: v,
    lambda v: np.float64(v) if isinstance(v, float) else np.int64(v),
    lambda v: np.array(v, dtype=np.float64 if isinstance(v, float) else np.int64),
    lambda v: torch.tensor(v, dtype=torch.float64 if isinstance(v, float) else torch.int64),
]


@EXAMPLES
@given(st.lists(any_values, max_size=6), st.data())
def test_the_type_a_number_comes_in_does_not_change_its_bytes(values: list[Values], data: st.DataObject) -> None:
    """One unusual type in a batch takes another path through the code, to the same bytes."""

    def wrap(value: Any) -> Any:
        fits = value is not None and (isinstance(value, float) or -(2**63) <= value < 2**63)
        return data.draw(st.sampled_from(EXACT_WRAPPERS))(value) if fits else value

    wrapped = [Values(*map(wrap, value)) for value in values]
    wanted = b"".join(map(record_of, values))
    assert b"".join(own_params(value).record for value in wrapped) == wanted
    assert table_of([request(values=value, foreign=True) for value in wrapped]).tobytes() == wanted


any_number = st.one_of(
    st.floats(),
    st.integers(),
    st.sampled_from([2**31, 2**63, 2**64, 10**400, 1e39, 1 + 1e-7, -0.0, 0, 1]),
    st.booleans(),
    st.none(),
    st.text(max_size=2),
)


@EXAMPLES
@given(st.builds(Values, *[any_number] * 5))
def test_own_and_foreign_params_accept_and_refuse_the_same(values: Values) -> None:
    """Whatever the values, both paths give the same bytes or the same complaint, and never another exception."""

    def attempt(read: Callable[[], bytes]) -> bytes | str:
        try:
            return read()
        except SamplingValueError as error:
            return str(error).partition(": ")[2]

    own = attempt(lambda: own_params(values).record)
    assert own == attempt(lambda: foreign_record(**values._asdict()))
    if isinstance(own, bytes):
        _, top_p, top_k, min_p, _ = SAMPLING._struct.unpack(own)
        assert 0 < top_p <= 1
        assert 0 <= min_p <= 1
        assert top_k >= 1


def test_a_foreign_object_is_read_again_for_every_batch() -> None:
    """Nobody can know when it changes, so nothing of it is remembered, a bad value included."""
    batch = decode_batch([Values(0.5), Values(top_k=7)], foreign=True)
    params = batch.reqs[0].sampling_params
    assert table_of(batch.reqs).tobytes() == record_of(Values(0.5)) + record_of(Values(top_k=7))
    params.temperature, params.sampling_seed = 0.0, 11
    assert table_of(batch.reqs).tobytes()[:24] == record_of(Values(0.0, sampling_seed=11))
    params.min_p = 2
    with pytest.raises(SamplingValueError, match="request 'r0': min_p: 2"):
        table_of(batch.reqs)
    params.min_p = 0.5
    del params.sampling_seed
    assert table_of(batch.reqs).tobytes()[:24] == record_of(Values(0.0, min_p=0.5))


def test_a_subclass_of_params_is_trusted_only_as_far_as_its_attributes() -> None:
    """Only the exact class is known to be frozen; of a subclass the values are read."""

    class Mutable(SamplingParams):
        pass

    params = Mutable(temperature=0.5)
    object.__setattr__(params, "temperature", 0.25)
    assert table_of([Request("r0", params)]).tobytes() == record_of(Values(0.25))


def test_foreign_requests_need_no_more_than_the_attribute_names() -> None:
    """Plain objects all the way: a request without an id is named by its place in the batch."""
    requests = [SimpleNamespace(sampling_params=foreign_params(Values(0.5))) for _ in range(3)]
    batch = ScheduleBatch(requests, "cpu", forward_mode="decode")
    check_rows(SamplingBatchInfo.from_schedule_batch(batch, 10), [Values(0.5)] * 3)
    requests[2].sampling_params.top_p = -1
    with pytest.raises(SamplingValueError, match="request 2: top_p"):
        SamplingBatchInfo.from_schedule_batch(batch, 10)


def test_numpy_s_error_settings_of_the_application_change_nothing() -> None:
    """Rounding to float32 is meant, also where the application made numpy strict about it."""
    with np.errstate(all="raise"):
        for field, rows in ACCEPTED.items():
            for value, wanted in rows:
                assert SamplingParams(**{field: value}).record == record_of(wanted)
                assert foreign_record(**{field: value}) == record_of(wanted)
        with pytest.raises(SamplingValueError):
            SamplingParams(top_p=1e-46)


def test_top_k_is_not_clamped_to_the_vocabulary() -> None:
    """The sampler clamps; here the number arrives unchanged."""
    values = [Values(top_k=k) for k in (999, 1000, 1001, 9_999_999, 2**31 - 1)]
    info = SamplingBatchInfo.from_schedule_batch(decode_batch(values), 1000)
    assert info.top_ks.tolist() == [999, 1000, 1001, 9_999_999, 2**31 - 1]
    assert info.vocab_size == 1000


# ---------------------------------------------------------------------- needs


@given(values=st.lists(any_values, max_size=4))
def test_what_requests_need_is_the_same_asked_of_them_and_of_the_table(values: list[Values]) -> None:
    """Also where a value is another number in float32, and whether or not the parameters are ours."""
    own = [own_params(value) for value in values]
    mixed = [foreign_params(value) if row % 2 else own_params(value) for row, value in enumerate(values)]
    table = np.frombuffer(b"".join(one.record for one in own), SAMPLING.record_dtype)
    expected = flags_of(one.record for one in own)
    for needs in (needs_of(table), needs_of(table, own), needs_of(table, mixed), needs_of(table, own * FEW)):
        assert dict(zip(FLAG_NAMES, FLAGS[needs], strict=True)) == expected


def test_many_requests_are_not_asked_one_by_one() -> None:
    """Their table is looked through instead."""
    plain = [SamplingParams()] * (FEW + 1)
    greedy = np.frombuffer(SamplingParams(temperature=0).record * (FEW + 1), SAMPLING.record_dtype)
    assert FLAGS[needs_of(greedy, plain)][0]
    assert not FLAGS[needs_of(greedy[:FEW], plain[:FEW])][0]

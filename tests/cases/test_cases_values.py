"""Cases about sampling values: ranges, types and rounding; and about batches that are filtered and merged."""

from __future__ import annotations

import random
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from case_builders import FIELDS, decode, fill, foreign

from batching import BatchError, SamplingBatchInfo, SamplingParams, SamplingValueError
from batching.params import TOP_K_ALL
from batching.stage import PREFILL
from staging import FieldError, StagingPool
from staging.testing import SimulatedDevice

MakePool = Callable[..., StagingPool]

COLUMN_OF = {
    "temperature": "temperatures",
    "top_p": "top_ps",
    "top_k": "top_ks",
    "min_p": "min_ps",
    "sampling_seed": "sampling_seed",
}


def stored(field: str, value: Any) -> float:
    """What arrives for one value, from a frozen parameter object and from a foreign one alike."""
    own = decode([foreign("own")])
    own.reqs[0].sampling_params = SamplingParams(**{field: value})
    arrived = []
    with StagingPool("cpu", slots=1) as pool:
        for batch in (own, decode([foreign("foreign", **{field: value})])):
            info = SamplingBatchInfo.from_schedule_batch(batch, 1000, pool)
            arrived.append(getattr(info, COLUMN_OF[field]).reshape(-1)[0].item())
    assert arrived[0] == arrived[1]
    return arrived[0]


def check_refused(field: str, value: Any, shown: str = "") -> None:
    """Refused before a slot is taken, naming request and field; the other rows go on, and the pool is as it was."""
    with pytest.raises(SamplingValueError, match=field):
        SamplingParams(**{field: value})
    device = SimulatedDevice()
    with StagingPool(device, slots=1, slot_bytes=4096, timeout=0) as pool:
        requests = [foreign(f"r{row}", top_k=40 + row, sampling_seed=row) for row in range(4)]
        setattr(requests[2].sampling_params, field, value)
        before, calls = pool.stats(), dict(device.calls)
        with pytest.raises(SamplingValueError, match=f"request 'r2': {field}: .*{shown}"):
            SamplingBatchInfo.from_schedule_batch(decode(requests), 1000, pool)
        assert pool.stats() == before
        assert dict(device.calls) == calls
        del requests[2]
        info = SamplingBatchInfo.from_schedule_batch(decode(requests), 1000, pool)
        assert info.top_ks.tolist() == [40, 41, 43]
        assert info.sampling_seed is not None
        assert info.sampling_seed.tolist() == [0, 1, 3]
        device.finish_all()


@pytest.mark.parametrize("value", [2**31, 2**63, 10**30, 0, -2, -(2**31) - 1])
def test_a_top_k_that_fits_nothing_is_refused_and_harms_no_neighbour(value: int) -> None:
    """B88: nothing wraps and nothing is guessed; the batch's other requests go on."""
    check_refused("top_k", value, str(value))


def test_minus_one_and_the_largest_top_k_are_values() -> None:
    """B88: -1 is the whole vocabulary, and 2**31 - 1 is the number itself."""
    assert [stored("top_k", value) for value in (40, -1, 2**31 - 1)] == [40, TOP_K_ALL, 2**31 - 1]


@pytest.mark.parametrize("value", [999, 1000, 1001, 9_999_999])
def test_a_top_k_beyond_the_vocabulary_arrives_unchanged(value: int) -> None:
    """B89: the vocabulary has 1000 entries; whoever samples clamps, as the documentation of the column says."""
    assert stored("top_k", value) == value


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**20, "100", 1.5, b"1", [1], True, np.timedelta64(1)])
def test_a_seed_that_is_no_int64_is_refused_before_a_slot_is_taken(value: Any) -> None:
    """B91: out of range, text, fractions, lists; request and field are named."""
    check_refused("sampling_seed", value)


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63), 0, -1])
def test_the_ends_of_int64_are_seeds(value: int) -> None:
    """B91: stored exactly."""
    assert stored("sampling_seed", value) == value


@pytest.mark.parametrize("value", [2**63, 2**64 - 1, np.uint64(2**64 - 1), torch.tensor(2**63, dtype=torch.uint64)])
def test_unsigned_seeds_are_refused_rather_than_wrapped(value: Any) -> None:
    """B92: so two seeds that differ arrive different, and -1 is only ever what the user gave."""
    check_refused("sampling_seed", value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e39, -1e-9, np.float64("nan")])
def test_a_temperature_that_is_no_number_or_overflows_is_refused(value: float) -> None:
    """B94: two-sided: NaN, infinities, what float32 would make infinite, and what is negative by however little."""
    check_refused("temperature", value)


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_a_temperature_of_either_zero_is_greedy(value: float) -> None:
    """B94: minus zero is zero."""
    info = SamplingBatchInfo.from_schedule_batch(decode([foreign("zero", temperature=value)]), 9, None)
    assert (info.temperatures.item(), info.top_ks.item(), info.is_all_greedy) == (1.0, 1, True)


@pytest.mark.parametrize("value", [1e-46, 1e-40, 9.9e-7])
def test_a_tiny_temperature_is_greedy_and_never_a_zero_on_the_device(value: float) -> None:
    """B95: below 1e-6 it takes the documented floor, so no division by something that was rounded to zero."""
    assert stored("temperature", value) == 1.0
    info = SamplingBatchInfo.from_schedule_batch(decode([foreign("tiny", temperature=value)]), 9, None)
    assert info.top_ks.tolist() == [1]


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("temperature", 1e-6, np.float32(1e-6)),
        ("temperature", 1e-4, np.float32(1e-4)),
        ("top_p", 1e-4, np.float32(1e-4)),
        ("top_p", 1e-40, np.float32(1e-40)),
        ("top_p", 1 - 1e-9, 1.0),
        ("top_p", 0.1, np.float32(0.1)),
        ("min_p", 1e-46, 0.0),
        ("min_p", 1e-40, np.float32(1e-40)),
    ],
)
def test_small_values_arrive_as_float32_rounds_them(field: str, value: float, wanted: float) -> None:
    """B95: denormals included; what rounds to exactly 1 is 1."""
    assert stored(field, value) == float(wanted)


def test_a_top_p_that_rounds_to_zero_is_refused() -> None:
    """B95: nothing would be left after the cut."""
    check_refused("top_p", 1e-46)


@pytest.mark.parametrize("value", [1 + 1e-7, 1.1, -0.1, -1e-9])
def test_a_min_p_outside_its_range_is_refused(value: float) -> None:
    """B97: at both ends, after rounding to float32 as well as before."""
    check_refused("min_p", value)


@pytest.mark.parametrize("value", [1 + 1e-7, 1.1, -0.1, 0.0, 0])
def test_a_top_p_outside_its_range_is_refused(value: float) -> None:
    """B97: zero among them."""
    check_refused("top_p", value)


@pytest.mark.parametrize("field", ["min_p", "top_p"])
@pytest.mark.parametrize("value", [1.0, 1 + 1e-8, 1])
def test_what_rounds_to_one_is_one(field: str, value: float) -> None:
    """B97: the range is checked after rounding, so no stored value lies outside it."""
    assert stored(field, value) == 1.0


def test_zero_is_a_value_and_not_a_missing_one() -> None:
    """B98: for each field zero is stored, mapped as documented, or refused; never quietly the default."""
    assert stored("min_p", 0.0) == 0.0
    assert stored("sampling_seed", 0) == 0
    assert stored("temperature", 0.0) == 1.0
    info = SamplingBatchInfo.from_schedule_batch(decode([foreign("zero", temperature=0.0, top_k=40)]), 9, None)
    assert info.top_ks.tolist() == [1]
    for field in ("top_p", "top_k"):
        check_refused(field, 0)


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p"])
def test_random_floats_arrive_as_float32_of_themselves(field: str) -> None:
    """B98: nothing is changed by more than the rounding of the column's type."""
    dice = random.Random(field)
    values = [dice.random() ** dice.choice([1, 4]) + 1e-6 for _ in range(500)]
    values = [min(value, 1.0) for value in values]
    requests = [foreign(str(row), **{field: value}) for row, value in enumerate(values)]
    info = SamplingBatchInfo.from_schedule_batch(decode(requests), 9, None)
    column = getattr(info, COLUMN_OF[field]).reshape(-1)
    assert column.tolist() == [float(np.float32(value)) for value in values]


@pytest.mark.parametrize(
    "value", [np.int64(7), np.int32(7), np.uint64(7), np.uint8(7), np.array(7), torch.tensor(7)], ids=repr
)
def test_integers_of_every_kind_are_the_plain_number(value: Any) -> None:
    """B100: for whole-number fields and for floats."""
    assert stored("top_k", value) == stored("sampling_seed", value) == stored("temperature", value) == 7


@pytest.mark.parametrize(
    "value", [np.float64(0.5), np.float32(0.5), np.float16(0.5), np.array(0.5), torch.tensor(0.5)], ids=repr
)
def test_floats_of_every_kind_are_the_plain_number(value: Any) -> None:
    """B100: numpy's widths, 0-d arrays and 0-d tensors."""
    assert stored("temperature", value) == stored("top_p", value) == stored("min_p", value) == 0.5


@pytest.mark.parametrize(
    "value",
    [Decimal(1), Fraction(1), torch.tensor([1]), np.array([1]), torch.tensor(1, device="meta"), 1j, "1"],
    ids=repr,
)
@pytest.mark.parametrize("field", COLUMN_OF)
def test_what_is_only_like_a_number_is_refused(field: str, value: Any) -> None:
    """B100: decimals, fractions, one-element tensors, and tensors on a device, which would have to be waited for."""
    check_refused(field, value)


@pytest.mark.parametrize("field", COLUMN_OF)
def test_a_refused_number_on_a_device_is_not_printed(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    """B100: the message of the refusal does not read the tensor either, since that waits for the device."""

    def read(tensor: torch.Tensor, **options: Any) -> str:
        raise AssertionError("the tensor was printed")

    monkeypatch.setattr(torch.Tensor, "__repr__", read)
    with pytest.raises(SamplingValueError, match="on a device"):
        SamplingParams(**{field: torch.tensor(1, device="meta")})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_application_s_default_type_changes_no_column(dtype: torch.dtype) -> None:
    """B101: the types are the documented ones, and 0.7 arrives as the float32 of it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        requests = [foreign("r", temperature=0.7, top_p=0.7, min_p=0.7, sampling_seed=7)]
        with StagingPool("cpu", slots=1) as pool:
            info = SamplingBatchInfo.from_schedule_batch(decode(requests), 9, pool)
            with pool.lease(PREFILL, rows=1) as lease:
                pointers = fill(lease, 1).upload()["prefix_pointers"]
    finally:
        torch.set_default_dtype(before)
    assert info.sampling_seed is not None
    columns = (info.temperatures, info.top_ps, info.top_ks, info.min_ps, info.sampling_seed, pointers)
    assert [column.dtype for column in columns] == [
        torch.float32,
        torch.float32,
        torch.int32,
        torch.float32,
        torch.int64,
        torch.uint64,
    ]
    assert info.temperatures.item() == info.top_ps.item() == info.min_ps.item() == float(np.float32(0.7))


def test_ten_thousand_changes_of_a_batch_leave_each_row_with_its_request() -> None:
    """B106: adds, filters in any order, empty ones, merges; seeds mostly missing, at first all; duplicates refused."""
    dice = random.Random(106)
    with StagingPool("cpu", slots=2) as pool:

        def batch_of(rows: list[tuple[float, int | None]]) -> SamplingBatchInfo:
            requests = [foreign("r", temperature=number, sampling_seed=seed) for number, seed in rows]
            return SamplingBatchInfo.from_schedule_batch(decode(requests), 9, pool)

        model: list[tuple[float, int | None]] = [(float(row + 1), None) for row in range(3)]
        info = batch_of(model)
        for step in range(10_000):
            choice = dice.random()
            if choice < 0.5 and len(model) < 12:
                seed = step if step > 3000 and dice.random() < 0.1 else None
                new = [(float(step + 10), seed)] * dice.randrange(3)
                info.merge_batch(batch_of(new))
                model += new
            else:
                keep = dice.sample(range(len(model)), dice.randrange(len(model) + 1) if choice > 0.9 else len(model))
                if choice < 0.55 and keep:
                    with pytest.raises(BatchError, match="twice"):
                        info.filter_batch([*keep, keep[0]], pool=pool)
                info.filter_batch(keep[:10], pool=pool)
                model = [model[row] for row in keep[:10]]
            assert info.sampling_seed is not None
            assert len(info) == len(model)
            assert info.temperatures.reshape(-1).tolist() == [number for number, _ in model]
            assert info.sampling_seed.tolist() == [42 if seed is None else seed for _, seed in model]


@pytest.mark.parametrize(
    "rows", [[3, 1, 0], np.array([True, False, True, False]), slice(1, 3), -1, torch.tensor([1])], ids=repr
)
def test_rows_cannot_be_written_by_index(device: SimulatedDevice, make_pool: MakePool, rows: Any) -> None:
    """B107: by list, mask, slice or negative index: refused in so many words, and the slot's bytes are as they were."""
    pool = make_pool(device, slots=1, max_slots=1)
    with pool.lease(PREFILL, rows=4) as lease:
        fill(lease, 3)
        before = pool._ring.slots[0].buffer.array.copy()
        with pytest.raises(FieldError, match=r"a whole field at a time"):
            lease[rows] = 5
        with pytest.raises(TypeError):
            lease[FIELDS[0]][rows] = 5  # type: ignore[index]
        assert np.array_equal(pool._ring.slots[0].buffer.array, before)
        assert set(lease.upload()["top_ks"].tolist()) == {3}

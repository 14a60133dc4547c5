"""Layouts and values: what is written is what arrives, bit for bit, or it is refused by name."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from staging import Field, FieldError, Layout, StagingError, StagingPool, Upload
from staging.testing import SimulatedDevice

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
)
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (3,), (2, 2), (1, 1))
FORMS = ("list", "tuple", "numbers", "array", "strided array", "swapped array", "wide array", "objects", "tensor")


@pytest.fixture(autouse=True, scope="module", params=["few", "many"])
def both_ways_of_integers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lists of many integers are written in a way of their own; here those of a few are as well, or none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("staging._prepared.MANY", 1 if request.param == "many" else 1 << 30)
        yield


def one(dtype: torch.dtype, shape: tuple[int, ...] = ()) -> Layout:
    return Layout([Field("column", dtype, shape=shape)])


@st.composite
def layouts(draw: st.DrawFn, counts: Sequence[str] = ("rows", "tokens")) -> Layout:
    kinds = st.tuples(st.sampled_from(DTYPES), st.sampled_from(counts), st.sampled_from(SHAPES))
    drawn = draw(st.lists(kinds, min_size=1, max_size=6))
    return Layout(Field(f"f{k}", dtype, count, shape) for k, (dtype, count, shape) in enumerate(drawn))


def lengths_of(layout: Layout, rows: int, tokens: int) -> dict[str, int]:
    return {count: {"rows": rows, "tokens": tokens}[count] for count in layout.counts}


def random_values(field: Field, length: int, rng: np.random.Generator) -> npt.NDArray[Any]:
    """Any bit pattern, except NaNs: Python keeps no payload of theirs, so only equal arrays would be comparable."""
    dtype, shape = field.numpy_dtype, (length, *field.shape)
    count = math.prod(shape)
    if dtype.kind == "b":
        return rng.integers(0, 2, count).astype(bool).reshape(shape)
    values = np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).reshape(shape).copy()
    if dtype.kind == "f":
        values[np.isnan(values)] = 0.5
    return values


def in_form(form: str, values: npt.NDArray[Any]) -> Any:
    """The same values as the caller of a lease might hold them."""
    kind, flat = values.dtype.kind, values.size == len(values)
    if form == "list":
        return values.reshape(-1).tolist() if flat else values.tolist()
    if form == "tuple":
        return tuple(in_form("list", values))
    if form == "numbers":
        return list(values.reshape(-1)) if flat else list(values)
    if form == "strided array":
        return np.repeat(values, 2, axis=0)[::2]
    if form == "swapped array":
        return values.astype(values.dtype.newbyteorder())
    if form == "wide array":
        return values.astype({"b": "?", "i": "i8", "u": "u8", "f": "f8"}[kind])
    if form == "objects":
        return values.astype(object)
    if form == "tensor":
        return torch.from_numpy(values)
    return values


def same_bits(tensor: torch.Tensor, values: npt.NDArray[Any]) -> bool:
    return tensor.numpy().dtype == values.dtype and tensor.numpy().tobytes() == values.tobytes()


def upload_one(pool: StagingPool, layout: Layout, values: Any, rows: int) -> torch.Tensor:
    with pool.lease(layout, rows=rows) as lease:
        lease["column"] = values
        return lease.upload()["column"]


@pytest.fixture
def pool() -> Iterator[StagingPool]:
    with StagingPool("cpu", slots=1) as pool:
        yield pool


# What a layout fixes.


@given(layouts(), st.integers(0, 40), st.integers(0, 300))
def test_fields_lie_in_order_at_multiples_of_16_without_overlap(layout: Layout, rows: int, tokens: int) -> None:
    """Every field starts at a multiple of 16, behind the one before it, and the total is what nbytes() says."""
    lengths = lengths_of(layout, rows, tokens)
    out = torch.empty(layout.nbytes(**lengths), dtype=torch.uint8)
    with StagingPool("cpu", slots=1) as pool, pool.lease(layout, **lengths) as lease:
        assert lease.nbytes == out.numel()
        for field in layout.fields:
            lease[field.name] = False if field.dtype == torch.bool else 0
        upload = lease.upload(out=out)
    assert list(upload) == [field.name for field in layout.fields]
    end = 0
    for field in layout.fields:
        tensor = upload[field.name]
        assert tensor.dtype == field.dtype
        assert tuple(tensor.shape) == (lengths[field.counts], *field.shape)
        assert tensor.is_contiguous()
        if tensor.numel():
            offset = tensor.data_ptr() - out.data_ptr()
            assert offset == -(-end // 16) * 16
            end = offset + tensor.numel() * tensor.element_size()
    assert out.numel() == upload.nbytes == -(-end // 16) * 16


def test_layouts_are_equal_by_their_fields_and_join_with_plus() -> None:
    """Two layouts of the same fields are equal and hash alike whatever their names; `+` appends."""
    a, b = Field("a", torch.int32), Field("b", torch.float32, "tokens", (2,))
    assert Layout([a, b], "x") == Layout([a], "y") + Layout([b])
    assert hash(Layout([a, b], "x")) == hash(Layout([a, b]))
    assert Layout([a, b]) != Layout([b, a])
    assert (Layout([a]) + Layout([b])).counts == ("rows", "tokens")
    assert repr(Layout([a, b], "mine")) == "<Layout 'mine': a: int32 x rows, b: float32 x tokens>"


@pytest.mark.parametrize(
    ("name", "dtype", "counts", "shape", "says"),
    [
        ("", torch.int32, "rows", (), "non-empty string"),
        (7, torch.int32, "rows", (), "non-empty string"),
        ("a", torch.bfloat16, "rows", (), "bfloat16 cannot be staged"),
        ("a", torch.complex64, "rows", (), "complex64 cannot be staged"),
        ("a", np.int32, "rows", (), "cannot be staged"),
        ("a", torch.int32, "", (), "cannot name what it counts"),
        ("a", torch.int32, "two words", (), "cannot name what it counts"),
        ("a", torch.int32, "timeout", (), "cannot name what it counts"),
        ("a", torch.int32, "rows", (0,), "positive integers"),
        ("a", torch.int32, "rows", (-1,), "positive integers"),
        ("a", torch.int32, "rows", (True,), "positive integers"),
        ("a", torch.int32, "rows", (2.0,), "positive integers"),
    ],
)
def test_unusable_fields_are_refused(name: Any, dtype: Any, counts: str, shape: Any, says: str) -> None:
    """A field that could not be staged is refused when it is made."""
    with pytest.raises(FieldError, match=says):
        Field(name, dtype, counts, shape)


def test_unusable_layouts_are_refused() -> None:
    """No fields, two of one name, and things that are no fields make no layout."""
    field = Field("a", torch.int32)
    with pytest.raises(FieldError, match="no fields"):
        Layout([])
    with pytest.raises(FieldError, match="two fields named 'a'"):
        Layout([field, Field("a", torch.int64)])
    with pytest.raises(FieldError, match=r"not a staging\.Field"):
        Layout([field, "b"])  # type: ignore[list-item]
    with pytest.raises(FieldError, match="two fields named 'a'"):
        Layout([field]) + Layout([field])


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ({"rows": 1}, "needs the length of 'tokens'"),
        ({"rows": 1, "tokens": 1, "pages": 1}, "not 'pages'"),
        ({"rows": -1, "tokens": 1}, "rows=-1 is negative"),
        ({"rows": 1, "tokens": 1.5}, "tokens=1.5"),
        ({"rows": "1", "tokens": 1}, "rows='1'"),
        ({"rows": None, "tokens": 1}, "rows=None"),
        ({"rows": [1], "tokens": 1}, "not an integer"),
        ({"rows": True, "tokens": 2}, "rows=True is a boolean"),
        ({"rows": np.True_, "tokens": 2}, "is a boolean"),
    ],
)
def test_unusable_lengths_are_refused(pool: StagingPool, lengths: dict[str, Any], says: str) -> None:
    """Each length must be given once, as an integer that counts something; otherwise nothing is leased."""
    layout = Layout([Field("a", torch.int32), Field("b", torch.int32, "tokens")])
    with pytest.raises(FieldError, match=says):
        layout.nbytes(**lengths)
    with pytest.raises(FieldError, match=says):
        pool.lease(layout, **lengths)
    assert pool.stats().free == 1


@pytest.mark.parametrize("equal", [True, 1.0, np.True_, Decimal(1), Fraction(1)], ids=repr)
def test_a_length_is_judged_by_itself_not_by_what_was_planned_before(equal: Any) -> None:
    """A value that merely equals an integer planned before is refused like the first time."""
    layout = one(torch.int32)
    assert layout.nbytes(rows=1) == 16
    with pytest.raises(FieldError):
        layout.nbytes(rows=equal)


def test_integers_of_numpy_and_torch_are_lengths(pool: StagingPool) -> None:
    """Whatever Python takes as an index is a length, and means the same as the integer."""
    layout = one(torch.int32)
    for rows in (5, np.int32(5), torch.tensor(5)):
        with pool.lease(layout, rows=rows) as lease:  # type: ignore[arg-type]
            assert lease.lengths == {"rows": 5}
            assert lease.nbytes == 32


def test_plans_of_ever_new_lengths_stay_right() -> None:
    """A layout that sees more different lengths than it remembers still plans each of them exactly."""
    layout = Layout([Field("a", torch.uint8), Field("b", torch.int64, "tokens")])
    for rows in range(0, 10_000, 2):
        assert layout.nbytes(rows=rows, tokens=3) == -(-rows // 16) * 16 + 32


# What is written arrives.


@pytest.mark.parametrize("kind", ["cpu", "simulated"])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_random_values_in_any_form_arrive_bit_for_bit(kind: str, data: st.DataObject) -> None:
    """Lists, tuples, arrays of fitting dtypes and CPU tensors all put the same bits on the device."""
    layout = data.draw(layouts())
    lengths = lengths_of(layout, data.draw(st.integers(0, 9)), data.draw(st.integers(0, 70)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    device = SimulatedDevice() if kind == "simulated" else "cpu"
    values = {field.name: random_values(field, lengths[field.counts], rng) for field in layout.fields}
    with StagingPool(device, slots=1, slot_bytes=16, timeout=0) as pool:
        with pool.lease(layout, **lengths) as lease:
            for name in data.draw(st.permutations(list(values))):
                lease[name] = in_form(data.draw(st.sampled_from(FORMS)), values[name])
            upload = lease.upload()
        assert all(same_bits(upload[name], values[name]) for name in values)
        if isinstance(device, SimulatedDevice):
            device.finish_all()
            assert device.violations == []
            assert all(same_bits(upload[name], values[name]) for name in values)


@given(layouts(), st.integers(0, 12), st.integers(0, 20), st.integers(0, 2**32))
@settings(deadline=None)
def test_records_put_the_same_bytes_on_the_device_as_columns(layout: Layout, rows: int, tokens: int, seed: int) -> None:
    """Packed one by one, joined or not, records are another way to write the same columns."""
    lengths = lengths_of(layout, rows, tokens)
    rows = lengths.get("rows", 0)
    rng = np.random.default_rng(seed)
    values = {field.name: random_values(field, lengths[field.counts], rng) for field in layout.fields}
    per_row = [field.name for field in layout.fields if field.counts == "rows"]
    records = [
        layout.pack(**{name: in_form("list", values[name][row].reshape(-1)) if values[name][row].size > 1
                       else values[name][row].item() for name in per_row})
        for row in range(rows)
    ]  # fmt: skip

    def uploaded(pool: StagingPool, how: str) -> Upload:
        with pool.lease(layout, **lengths) as lease:
            for name in values:
                if how == "columns" or name not in per_row:
                    lease[name] = values[name]
            if how == "records":
                lease.write_records(records)
            if how == "joined":
                lease.write_records(layout.join(records))
            return lease.upload()

    with StagingPool("cpu", slots=1) as pool:
        for how in ("columns", "records", "joined"):
            upload = uploaded(pool, how)
            assert all(same_bits(upload[name], values[name]) for name in values), how


def test_records_of_a_smaller_layout_fill_their_part_of_a_larger_one(pool: StagingPool) -> None:
    """Records fill the fields they hold; the others are written as columns."""
    sampling = Layout([Field("temperatures", torch.float32, shape=(1,)), Field("top_ks", torch.int32)])
    batch = Layout([Field("lengths", torch.int64)]) + sampling + Layout([Field("ids", torch.int32, "tokens")])
    records = [sampling.pack(temperatures=row / 4, top_ks=row) for row in range(3)]
    with pool.lease(batch, rows=3, tokens=2) as lease:
        lease.write_records(records, sampling)
        lease["lengths"] = [7, 8, 9]
        lease["ids"] = [1, 2]
        upload = lease.upload()
    assert upload["temperatures"].tolist() == [[0.0], [0.25], [0.5]]
    assert upload["top_ks"].tolist() == [0, 1, 2]
    assert upload["lengths"].tolist() == [7, 8, 9]
    assert upload["ids"].tolist() == [1, 2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_number_fills_every_entry(pool: StagingPool, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """A scalar of Python or numpy stands for a column of it."""
    number = True if dtype == torch.bool else 1
    for scalar in (number, Field("x", dtype).numpy_dtype.type(number)):
        tensor = upload_one(pool, one(dtype, shape), scalar, rows=3)
        assert tuple(tensor.shape) == (3, *shape)
        assert set(tensor.reshape(-1).tolist()) == {number}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("scalar", [torch.tensor(7), np.array(7)], ids=["tensor", "array"])
def test_a_0d_tensor_or_array_is_one_number(pool: StagingPool, scalar: Any, rows: int) -> None:
    """0-d tensors and arrays are numbers, also when written as a whole column."""
    assert upload_one(pool, one(torch.int32), scalar, rows).tolist() == [7] * rows


@pytest.mark.parametrize("values", [range(3), np.arange(3), torch.arange(3), [torch.tensor(0), np.int8(1), 2]])
def test_sequences_of_integers_are_columns(pool: StagingPool, values: Any) -> None:
    """Ranges and lists of mixed integer types are columns as well."""
    assert upload_one(pool, one(torch.int32), values, rows=3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_nan_infinities_and_negative_zero_are_floats_like_any_other(pool: StagingPool, dtype: torch.dtype) -> None:
    """Only a finite value may not become infinite; what is no number from the start is carried."""
    values = [math.nan, math.inf, -math.inf, -0.0]
    expected = torch.tensor(values, dtype=dtype)
    for form in (values, tuple(values), np.array(values), expected):
        tensor = upload_one(pool, one(dtype), form, rows=4)
        assert torch.equal(tensor.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
        assert math.copysign(1, tensor[3]) == -1


@pytest.mark.parametrize("value", [0, 1, 2**63 - 1, 2**63, 2**64 - 16, 2**64 - 1])
@pytest.mark.parametrize(
    "form", ["list", "mixed list", "tuple", "scalar", "array", "tensor", "record", "numpy scalars"]
)
def test_addresses_of_all_64_bits_arrive_exactly(pool: StagingPool, value: int, form: str) -> None:
    """uint64 has no detour over int64 or float64, where large addresses would wrap or round."""
    layout = one(torch.uint64)
    array = np.array([value, value], dtype=np.uint64)
    expected = [value, value]
    with pool.lease(layout, rows=2) as lease:
        if form == "record":
            lease.write_records([layout.pack(column=value)] * 2)
        elif form == "mixed list":
            lease["column"], expected = [0, value], [0, value]
        else:
            lease["column"] = {
                "list": [value, value],
                "tuple": (value, value),
                "scalar": value,
                "array": array,
                "tensor": torch.from_numpy(array),
                "numpy scalars": list(array),
            }[form]
        assert lease.upload()["column"].numpy().tolist() == expected


def test_integers_are_rounded_alike_in_every_form(pool: StagingPool) -> None:
    """An integer that no float32 holds exactly becomes the same one from list, array, tensor and record."""
    layout, value = one(torch.float32), 2**54 + 2**30 + 1
    forms = [[value], np.array([value]), torch.tensor([value]), layout.join([layout.pack(column=value)])["column"]]
    assert len({upload_one(pool, layout, form, rows=1).item() for form in forms}) == 1


@pytest.mark.parametrize("kind", ["list", "array", "tensor"])
def test_values_are_read_when_they_are_written(pool: StagingPool, kind: str) -> None:
    """Changing a list, array or tensor after the write changes nothing on the device."""
    values: Any = {"list": [1, 2, 3], "array": np.array([1, 2, 3], np.int32), "tensor": torch.tensor([1, 2, 3])}[kind]
    with pool.lease(one(torch.int32), rows=3) as lease:
        lease["column"] = values
        values[0] = 99
        upload = lease.upload()
        values[1] = 99
    assert upload["column"].tolist() == [1, 2, 3]


def test_a_tensor_that_requires_grad_is_just_its_values(pool: StagingPool) -> None:
    """Autograd takes no part in an upload."""
    values = torch.tensor([0.5, 0.25], requires_grad=True)
    tensor = upload_one(pool, one(torch.float32), values, rows=2)
    assert tensor.tolist() == [0.5, 0.25]
    assert not tensor.requires_grad


# The application's own settings.


@pytest.fixture(params=["bfloat16", "float64", "meta", "inference mode", "no grad"])
def application(request: pytest.FixtureRequest) -> Iterator[None]:
    dtype = torch.get_default_dtype()
    try:
        if request.param == "meta":
            torch.set_default_device("meta")
            yield
        elif request.param == "inference mode":
            with torch.inference_mode():
                yield
        elif request.param == "no grad":
            with torch.no_grad():
                yield
        else:
            torch.set_default_dtype(getattr(torch, request.param))
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)


@pytest.mark.usefixtures("application")
@pytest.mark.parametrize("kind", ["cpu", "simulated"])
def test_defaults_of_the_application_change_nothing(kind: str) -> None:
    """A pool made and used under a default dtype, default device or inference mode works as without."""
    layout = Layout(
        [Field("floats", torch.float32, shape=(1,)), Field("ids", torch.int64, "tokens"), Field("flags", torch.bool)]
    )
    device = SimulatedDevice() if kind == "simulated" else "cpu"
    with StagingPool(device, slots=1, slot_bytes=16, timeout=0) as pool:
        for rows in (2, 0, 40):
            with pool.lease(layout, rows=rows, tokens=3) as lease:
                lease.write_records([layout.pack(floats=0.1, flags=True)] * rows)
                lease["ids"] = [2**40, -1, rows]
                upload = lease.upload()
            if isinstance(device, SimulatedDevice):
                device.finish_all()
                assert device.violations == []
            assert {name: tensor.dtype for name, tensor in upload.items()} == {
                "floats": torch.float32,
                "ids": torch.int64,
                "flags": torch.bool,
            }
            assert all(tensor.device.type == "cpu" for tensor in upload.values())
            assert upload["floats"].numpy().tobytes() == np.full(rows, 0.1, np.float32).tobytes()
            assert upload["ids"].numpy().tolist() == [2**40, -1, rows]
            assert upload["flags"].numpy().tolist() == [True] * rows


def test_a_pool_made_in_inference_mode_serves_outside_it_and_the_other_way_round() -> None:
    """Slot memory is ordinary memory wherever the pool was made."""
    with torch.inference_mode():
        pool = StagingPool("cpu", slots=1, slot_bytes=16)
    with pool:
        assert upload_one(pool, one(torch.int32), [1, 2], rows=2).tolist() == [1, 2]
        with torch.inference_mode():
            assert upload_one(pool, one(torch.int32), [3] * 100, rows=100).tolist() == [3] * 100
        assert upload_one(pool, one(torch.int32), [4] * 90, rows=90).tolist() == [4] * 90


# What does not fit is refused by name.

DOES_NOT_FIT: list[tuple[torch.dtype, Any]] = [
    (torch.uint8, 256),
    (torch.uint8, -1),
    (torch.int8, 128),
    (torch.int8, -129),
    (torch.uint16, 65536),
    (torch.int16, 40000),
    (torch.uint32, 2**32),
    (torch.int32, 2**31),
    (torch.int32, -(2**31) - 1),
    (torch.int64, 2**63),
    (torch.uint64, 2**64),
    (torch.uint64, -1),
    (torch.uint8, np.int64(300)),
    (torch.uint64, np.int8(-1)),
    (torch.int32, 1.0),
    (torch.int32, 1.5),
    (torch.int64, math.nan),
    (torch.int32, np.float32(1)),
    (torch.int32, True),
    (torch.uint64, False),
    (torch.int32, np.True_),
    (torch.float32, True),
    (torch.float64, np.False_),
    (torch.bool, 1),
    (torch.bool, 0.0),
    (torch.bool, np.int8(1)),
    (torch.bool, None),
    (torch.float16, 65520.0),
    (torch.float16, -70000),
    (torch.float32, 1e39),
    (torch.float32, -1e39),
    (torch.float32, 10**39),
    (torch.float32, np.float64(3.5e38)),
    (torch.float32, "0.7"),
    (torch.float32, b"0.7"),
    (torch.float32, None),
    (torch.float32, 1j),
    (torch.float32, Decimal("0.5")),
    (torch.float32, Fraction(1, 2)),
    (torch.int32, "7"),
    (torch.int32, b"7"),
    (torch.int32, None),
    (torch.int32, Decimal(7)),
]


def good(dtype: torch.dtype) -> Any:
    return True if dtype == torch.bool else 1


@pytest.mark.parametrize(("dtype", "value"), DOES_NOT_FIT, ids=lambda item: repr(item).removeprefix("torch."))
@pytest.mark.parametrize("form", ["list", "tuple", "objects"])
def test_a_bad_value_in_a_column_is_named_with_its_row(
    pool: StagingPool, dtype: torch.dtype, value: Any, form: str
) -> None:
    """Nothing wraps, rounds to an integer or becomes infinite: the error says field, row and value."""
    values: Any = [good(dtype), good(dtype), value, good(dtype)]
    if form == "objects":
        values = np.array(values, dtype=object)
    with pool.lease(one(dtype), rows=4) as lease, pytest.raises(FieldError) as refused:
        lease["column"] = tuple(values) if form == "tuple" else values
    message = str(refused.value)
    assert "'column'" in message
    assert "row 2" in message
    assert repr(value) in message


@pytest.mark.parametrize(("dtype", "value"), DOES_NOT_FIT, ids=lambda item: repr(item).removeprefix("torch."))
def test_a_bad_scalar_and_a_bad_record_are_named(pool: StagingPool, dtype: torch.dtype, value: Any) -> None:
    """The same values are refused as one number for all and as part of a record, naming field and value."""
    layout = one(dtype)
    with pool.lease(layout, rows=4) as lease, pytest.raises(FieldError) as written:
        lease["column"] = value
    with pytest.raises(FieldError) as packed:
        layout.pack(column=value)
    for message in (str(written.value), str(packed.value)):
        assert "'column'" in message
        assert repr(value) in message


@pytest.mark.parametrize("digits", [400, 5000])
def test_an_integer_too_large_for_any_float_is_refused(pool: StagingPool, digits: int) -> None:
    """Integers beyond float64, even beyond what Python prints, are refused in one readable line."""
    for dtype in (torch.float64, torch.float32, torch.int64):
        with pool.lease(one(dtype), rows=2) as lease, pytest.raises(FieldError, match=r"row 1.*'column'") as refused:
            lease["column"] = [1, 10**digits]
        assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("dtype", "array", "value"),
    [
        (torch.int32, np.array([0, 2**31]), "2147483648"),
        (torch.uint8, np.array([0, -1]), "-1"),
        (torch.uint64, np.array([0, -1]), "-1"),
        (torch.uint64, np.array([0, -1], np.int8), "-1"),
        (torch.int64, np.array([0, 2**63], np.uint64), "9223372036854775808"),
        (torch.int8, np.array([0, 200], np.uint8), "200"),
        (torch.float32, np.array([0, 1e39]), "1e+39"),
        (torch.float32, np.array([0, -1e39]), "-1e+39"),
        (torch.float16, np.array([0, 70000], np.float32), "70000"),
        (torch.float16, np.array([0, 70000]), "70000"),
    ],
    ids=lambda item: repr(item).removeprefix("torch."),
)
@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_a_bad_value_in_an_array_or_tensor_is_named_with_its_row(
    pool: StagingPool, dtype: torch.dtype, array: npt.NDArray[Any], value: str, kind: str
) -> None:
    """Arrays and tensors of other dtypes are checked value by value as lists are."""
    with pool.lease(one(dtype), rows=2) as lease, pytest.raises(FieldError) as refused:
        lease["column"] = torch.from_numpy(array) if kind == "tensor" else array
    message = str(refused.value)
    assert "'column'" in message
    assert "row 1" in message
    assert value in message


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (torch.int32, np.array([1.0, 2.0])),
        (torch.int32, np.array([True, False])),
        (torch.int32, np.array(["1", "2"])),
        (torch.int32, np.array([1, 2], dtype="m8[s]")),
        (torch.bool, np.array([1, 0], np.uint8)),
        (torch.float32, np.array([True, False])),
        (torch.float32, np.array([1j, 2j])),
        (torch.int32, torch.tensor([1.0, 2.0])),
        (torch.int32, torch.tensor([True, False])),
        (torch.float32, torch.tensor([1.0, 2.0], dtype=torch.bfloat16)),
        (torch.float32, torch.tensor([1.0, 2.0], dtype=torch.complex64)),
        (torch.float32, torch.tensor([1.0, 2.0]).to_sparse()),
        (torch.float32, torch.empty(2, device="meta")),
        (torch.int32, [1, torch.empty((), device="meta", dtype=torch.int32)]),
        (torch.int32, [torch.tensor([1]), torch.tensor([2])]),
        (torch.int32, [[1], [2]]),
        (torch.int32, {1: 1, 2: 2}),
        (torch.int32, {1, 2}),
        (torch.int32, iter([1, 2])),
        (torch.int32, object()),
        (torch.int32, "12"),
    ],
    ids=lambda item: (type(item).__name__ + " " + repr(item))[:40],
)
def test_values_of_the_wrong_kind_name_the_field(pool: StagingPool, dtype: torch.dtype, values: Any) -> None:
    """Wrong kinds are refused as a whole: floats for integers, booleans for numbers, device tensors, sets."""
    with pool.lease(one(dtype), rows=2) as lease, pytest.raises(FieldError, match="'column'"):
        lease["column"] = values


@pytest.mark.parametrize(
    "values",
    [
        [],
        [1],
        [1, 2, 3],
        (1, 2, 3),
        np.arange(3),
        np.arange(4).reshape(2, 2),
        np.arange(2).reshape(1, 2),
        torch.arange(1),
    ],
    ids=str,
)
def test_a_column_of_the_wrong_length_is_refused(pool: StagingPool, values: Any) -> None:
    """A column is as long as what was leased; a single row is not stretched over all."""
    with pool.lease(one(torch.int32), rows=2) as lease, pytest.raises(FieldError, match="2 rows were leased"):
        lease["column"] = values
    layout = Layout([Field("ids", torch.int32, "tokens")])
    with pool.lease(layout, tokens=5) as lease, pytest.raises(FieldError, match="'ids': 5 tokens were leased"):
        lease["ids"] = values


@pytest.mark.parametrize("kind", ["list", "objects"])
@pytest.mark.parametrize("element", [0, 1])
def test_a_bad_element_of_an_entry_is_named_with_the_row_of_its_entry(
    pool: StagingPool, kind: str, element: int
) -> None:
    """In a field whose entries have several elements, the row is still the row."""
    values: Any = [[1, 2] for _ in range(6)]
    values[5][element] = "x"
    with pool.lease(one(torch.int32, (2,)), rows=6) as lease, pytest.raises(FieldError) as refused:
        lease["column"] = np.array(values, dtype=object) if kind == "objects" else values
    assert "row 5" in str(refused.value)
    assert "'x'" in str(refused.value)


@pytest.mark.parametrize(
    "entry",
    [
        [1],
        [1, 2, 3],
        1,
        [],
        None,
        [[1], [2, 3]],
        torch.empty(2, device="meta"),
    ],
    ids=lambda entry: str(entry)[:20],
)
def test_an_entry_of_the_wrong_shape_is_named_with_its_row(pool: StagingPool, entry: Any) -> None:
    """Each entry has exactly the field's elements."""
    with pool.lease(one(torch.int32, (2,)), rows=2) as lease, pytest.raises(FieldError, match=r"row 1.*'column'"):
        lease["column"] = [[1, 2], entry]


def test_a_refused_column_counts_as_unwritten(pool: StagingPool) -> None:
    """After a refusal the lease stays open, but not even an earlier good write of that field is uploaded."""
    with pool.lease(one(torch.int32), rows=3) as lease:
        lease["column"] = [1, 2, 3]
        with pytest.raises(FieldError):
            lease["column"] = [4, 5, "six"]
        with pytest.raises(StagingError, match="'column' never written"):
            lease.upload()
        lease["column"] = [7, 8, 9]
        assert lease.upload()["column"].tolist() == [7, 8, 9]


def test_values_of_empty_columns_are_checked_too(pool: StagingPool) -> None:
    """A field of length 0 takes an empty column and refuses anything longer or of another kind."""
    with pool.lease(one(torch.int32), rows=0) as lease:
        for values in ([], (), np.zeros(0, np.int32), torch.zeros(0, dtype=torch.int64), 0):
            lease["column"] = values
        for bad in ([1], np.zeros(0), "", None):
            with pytest.raises(FieldError, match="'column'"):
                lease["column"] = bad


def test_the_last_field_may_be_empty_where_the_slot_is_full() -> None:
    """A field of length 0 that lies exactly at the end of a full slot is written and viewed like any other."""
    layout = Layout([Field("ids", torch.uint8, "tokens"), Field("column", torch.float64)])
    with (
        StagingPool("cpu", slots=1, slot_bytes=16, max_bytes=16) as pool,
        pool.lease(layout, tokens=16, rows=0) as lease,
    ):
        lease["ids"] = range(16)
        lease["column"] = []
        upload = lease.upload()
        assert upload["ids"].tolist() == list(range(16))
        assert upload["column"].shape == (0,)


# Records.


def test_records_that_do_not_fit_the_layout_are_refused(pool: StagingPool) -> None:
    """Too few or too many records, bytes of another size, arrays of another dtype: refused before the upload."""
    layout = Layout([Field("a", torch.int32), Field("b", torch.float32)])
    other = Layout([Field("a", torch.int32)])
    wider = Layout([Field("a", torch.int32), Field("c", torch.float32)])
    record = layout.pack(a=1, b=2)
    with pool.lease(layout, rows=2) as lease:
        for records in ([record], [record] * 3, [], [record, record[:-1]], [record, other.pack(a=1)]):
            with pytest.raises(FieldError):
                lease.write_records(records)
        with pytest.raises(FieldError, match="not an array of its records"):
            lease.write_records(np.zeros(2, np.int64))
        with pytest.raises(FieldError, match="has no field like"):
            lease.write_records([wider.pack(a=1, c=1)] * 2, wider)
        with pytest.raises(FieldError):
            lease.write_records(np.zeros((1, 2), layout.record_dtype))
        for joined in (b"", record, record * 3, record * 2 + b"?"):
            with pytest.raises(
                FieldError, match=rf"2 rows were leased, .* have 16 bytes \(8 each\), got {len(joined)}$"
            ):
                lease.write_records(joined)
        lease.write_records(bytearray(record * 2))
        lease.write_records(memoryview(record * 2))
        with pytest.raises(FieldError, match=r"got 24$"):
            lease.write_records(bytearray(record * 3))
        for joined in (record, record * 3):  # also where the layout is known from the records before
            with pytest.raises(FieldError, match=f"got {len(joined)}$"):
                lease.write_records(joined)
        lease.write_records([record] * 2)
        assert lease.upload()["b"].tolist() == [2.0, 2.0]


def test_refused_records_write_nothing(pool: StagingPool) -> None:
    """Records of which one field does not match leave the earlier values, or count their fields as unwritten."""
    layout = Layout([Field("a", torch.int32), Field("b", torch.int32)])
    other = Layout([Field("a", torch.int32), Field("c", torch.int32)])
    with pool.lease(layout, rows=1) as lease:
        lease["a"], lease["b"] = [1], [2]
        with pytest.raises(FieldError, match="no field like"):
            lease.write_records([other.pack(a=9, c=9)], other)
        try:
            assert lease.upload()["a"].tolist() == [1]
        except StagingError as error:
            assert "never written" in str(error)  # noqa: PT017 - either is right


def test_each_record_is_as_long_as_a_record() -> None:
    """Two records of wrong lengths do not make up for each other."""
    layout = one(torch.int32)
    record = layout.pack(column=1)
    with pytest.raises(FieldError):
        layout.join([record[:3], record + b"\0"])


def test_joined_records_are_read_only() -> None:
    """What was packed once cannot be changed in place."""
    joined = one(torch.int32).join([one(torch.int32).pack(column=1)])
    with pytest.raises(ValueError, match="read-only"):
        joined["column"][0] = 2


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"a": 1}, "needs a value for 'pair'"),
        ({"a": 1, "pair": [1, 2], "c": 3}, "no per-row field 'c'"),
        ({"a": 1, "pair": [1, 2], "ids": 3}, "no per-row field 'ids'"),
        ({"a": 1, "pair": [1]}, "'pair': an entry has 2 elements, got 1"),
        ({"a": 1, "pair": 1}, "'pair'"),
        ({"a": 1, "pair": None}, "'pair'"),
        ({"a": 1, "pair": "12"}, "'pair'"),
        ({"a": [1], "pair": [1, 2]}, "'a'"),
        ({"a": torch.empty((), device="meta"), "pair": [1, 2]}, "'a'"),
    ],
    ids=str,
)
def test_a_record_needs_each_per_row_value_once(values: dict[str, Any], says: str) -> None:
    """Missing, unknown and misshapen values of a record are refused by name."""
    layout = Layout(
        [Field("a", torch.int32), Field("pair", torch.int32, shape=(2,)), Field("ids", torch.int32, "tokens")]
    )
    with pytest.raises(FieldError, match=says):
        layout.pack(**values)


def test_records_and_columns_agree_about_what_fits() -> None:
    """The largest values of each dtype are taken both ways, the next larger ones neither way."""
    for dtype in DTYPES[1:9]:
        bounds = np.iinfo(Field("x", dtype).numpy_dtype)
        layout = one(dtype)
        for value, step in itertools.product((int(bounds.min), int(bounds.max)), (-1, 0, 1)):
            fits = bounds.min <= value + step <= bounds.max
            if fits:
                assert layout.join([layout.pack(column=value + step)])["column"][0] == value + step
            else:
                with pytest.raises(FieldError):
                    layout.pack(column=value + step)

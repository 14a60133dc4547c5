"""The strategies: each builds exactly what the oracle says, and ours costs one copy, one record and no allocation."""

from __future__ import annotations

from collections import Counter

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from batching.bench import prefill, strategies
from batching.bench.batches import (
    COLUMNS,
    FEW,
    Batch,
    BenchRequest,
    all_new,
    differences,
    expected_columns,
    expected_flags,
    flags_of,
    make_requests,
    one_new,
)
from batching.bench.sections import compare
from batching.bench.strategies import Contender
from batching.bench.timing import Machine
from batching.params import SamplingParams
from staging import StagingPool
from staging._prepared import MANY
from staging.testing import SimulatedDevice

CPU = torch.device("cpu")

params = st.builds(
    SamplingParams,
    temperature=st.one_of(st.sampled_from([0.0, 1e-7, 1.0]), st.floats(0, 100)),
    top_p=st.one_of(st.just(1.0), st.just(1 - 1e-9), st.floats(0.01, 1.0)),
    top_k=st.one_of(st.just(-1), st.integers(1, 2**31 - 1)),
    min_p=st.one_of(st.just(0.0), st.just(1e-46), st.floats(0.0, 1.0)),
    sampling_seed=st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
)


@st.composite
def requests(draw: st.DrawFn) -> BenchRequest:
    one = draw(params)
    pointer = draw(st.integers(0, 2**63 - 1))
    tokens = np.array(draw(st.lists(st.integers(0, 2**31), min_size=1, max_size=5)), dtype=np.int64)
    return BenchRequest(
        one,
        pointer,
        one.record + pointer.to_bytes(8, "little"),
        draw(st.integers(0, 9)),
        draw(st.integers(0, 99)),
        tokens,
    )


def packed_by_the_layout(request: BenchRequest) -> bytes:
    one = request.params
    return COLUMNS.pack(
        temperatures=one.temperature,
        top_ps=one.top_p,
        top_ks=one.top_k,
        min_ps=one.min_p,
        sampling_seed=42 if one.sampling_seed is None else one.sampling_seed,
        prefix_pointers=request.pointer,
    )


@given(request=requests())
def test_a_record_is_what_the_layout_packs(request):
    """Parameters' record and pointer side by side are a record of the joined layout."""
    assert request.record == packed_by_the_layout(request)


@given(batch=st.lists(requests(), min_size=1, max_size=20))
def test_the_flags_are_the_definitions(batch):
    """Also beyond the number of rows where numpy takes over."""
    assert flags_of(Batch.of(batch, ())) == expected_flags(batch)
    many = batch * FEW
    assert flags_of(Batch.of(many, ())) == expected_flags(many)


@settings(max_examples=15, deadline=None)
@given(batch=st.lists(requests(), min_size=1, max_size=20))
def test_every_strategy_builds_what_the_oracle_says(batch):
    """Any requests: names, dtypes, shapes and bytes of all strategies, one by one."""
    ours = Batch.of(batch, range(len(batch)))
    rows = len(batch)
    with StagingPool("cpu", slots=2) as pool:
        slab = strategies.Slab(CPU, COLUMNS)
        builds = [
            strategies.OnDevice(CPU).build,
            strategies.Pageable(CPU).build,
            strategies.FreshPinned(CPU).build,
            strategies.Rewritten(CPU, rows).build,
            strategies.AtAdmission(CPU, rows, ours).build,
            slab.by_columns,
            slab.by_records,
            strategies.Ours(pool).by_columns,
            strategies.Ours(pool).by_records,
            strategies.Ours(pool, rows).by_columns,
            strategies.Ours(pool, rows).by_records,
            strategies.Floor(CPU, [ours]).build,
        ]
        for build in builds:
            assert differences(build(ours), expected_columns(batch), CPU) == []
        whole = prefill.Slab(CPU)
        fresh, fixed = prefill.Ours(pool), prefill.Ours(pool, rows)
        for build in (
            prefill.OneByOne(CPU, seeds=True).build,
            whole.by_columns,
            whole.by_records,
            fresh.by_columns,
            fresh.by_records,
            fixed.by_columns,
            fixed.by_records,
        ):
            assert differences(build(ours), prefill.expected(batch), CPU) == []


@pytest.mark.parametrize("make", [strategies.contenders, prefill.contenders])
@pytest.mark.parametrize("rows", [1, 3, 16, 65])
def test_every_contender_of_the_command_is_right(make, rows):
    """The batches of the command in turn, results kept over the next batch, copies counted."""
    with StagingPool("cpu") as pool:
        for runner in make(CPU, pool, rows, 7):
            assert compare(runner, Machine(CPU)) == [], runner.name


@pytest.mark.parametrize("make", [strategies.contenders, prefill.contenders])
def test_ours_costs_one_copy_one_record_and_no_allocation(make):
    """In the steady state, on a device that counts: ours fresh and fixed, by columns and by records."""
    device = SimulatedDevice()
    with StagingPool(device) as pool:
        tried = 0
        for runner in make(pool.device, pool, 16, 3):
            if runner.pool is None:
                continue
            for _ in range(6):
                runner.build(next(runner.turn))
                device.finish_all()
            before = device.calls.copy()
            for _ in range(10):
                runner.build(next(runner.turn))
                device.finish_all()
            spent = device.calls - before
            assert (spent["copy"], spent["record"], spent["host_buffer"]) == (10, 10, 0), runner.name
            assert spent["done"] <= 40
            assert spent["wait"] == spent["sleep"] == 0
            tried += 1
        assert tried == 4
        assert device.violations == []


def test_an_admission_writes_only_the_new_row():
    """One request differs between the two batches: the other rows are not looked at again."""
    first, second = one_new(8, 5)
    assert [a is b for a, b in zip(first.requests, second.requests, strict=True)].count(False) == 1
    way = strategies.AtAdmission(CPU, 8, second)
    way.arrays[0][0] = 99.0  # row 0 is not the new one
    (new,) = first.new_rows
    assert new != 0
    tensors = way.build(first)
    assert tensors["temperatures"][0, 0] == 99.0
    assert tensors["temperatures"][new, 0] == np.float32(first.requests[new].params.temperature)


def wrong(change) -> Contender:
    """Fresh pinned per field, with its result changed by `change`."""
    honest = strategies.FreshPinned(CPU).build

    def build(batch: Batch):
        tensors = dict(honest(batch))
        change(tensors)
        return tensors

    return Contender("wrong", build, all_new(5, 1), 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["top_ks"][3].add_(1), "top_ks, row 3"),
        (lambda t: t.update(min_ps=t["min_ps"].double()), "min_ps is float64"),
        (lambda t: t.update(temperatures=t["temperatures"].view(-1)), "temperatures is float32 (5,)"),
        (lambda t: t.pop("prefix_pointers"), "fields "),
        (lambda t: t["temperatures"][4, 0].add_(0.5), "temperatures, row 4"),
        (lambda t: t.update(sampling_seed=t["sampling_seed"].roll(1)), "sampling_seed, row 0"),
        (lambda t: t.update(top_ps=t["top_ps"].to("meta")), "top_ps is on meta"),
    ],
)
def test_a_wrong_strategy_is_named_by_field_and_row(change, message):
    """One value, a dtype, a shape, a missing field, another device; bytes are compared, not just values."""
    found = compare(wrong(change), Machine(CPU))
    assert found
    assert found[0].startswith(message)


def test_a_result_that_the_next_batch_overwrites_is_found():
    """A strategy that claims its tensors are the caller's own, and reuses them."""
    with StagingPool("cpu") as pool:
        shared = Contender("shared", strategies.Ours(pool, 5).by_records, all_new(5, 1), 1)
        assert compare(shared, Machine(CPU))[0].startswith("after the next batch: ")
        assert compare(attrs.evolve(shared, owned=False), Machine(CPU)) == []


def test_a_second_copy_is_found():
    """The pool's own count decides."""
    with StagingPool("cpu") as pool:
        ours = strategies.Ours(pool)

        def twice(batch: Batch):
            ours.by_records(batch)
            return ours.by_records(batch)

        assert compare(Contender("twice", twice, all_new(5, 1), 1, pool=pool), Machine(CPU))[0] == (
            "the pool made 2 copies, not 1"
        )


def test_requests_are_the_same_for_the_same_seed():
    """A run can be repeated."""
    one, other = (b"".join(request.record for request in make_requests(9, 4)) for _ in range(2))
    assert one == other
    assert one != b"".join(request.record for request in make_requests(9, 5))


class Made(TorchDispatchMode):
    """Counts the tensors that torch hands out, by the operation that made them."""

    def __init__(self):
        super().__init__()
        self.tensors = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, (list, tuple)) else [result]
        if func is not torch.ops.aten.detach.default:  # of `.numpy()`, by which a CPU copies, and of this mode itself
            self.tensors[str(func)] += sum(isinstance(one, torch.Tensor) for one in results)
        return result


def test_a_batch_makes_as_many_tensors_at_any_number_of_rows():
    """One allocation and the views of it; none where the destination is fixed."""
    with StagingPool("cpu", slots=1, max_slots=1, slot_bytes=1 << 20) as pool:
        fresh, fixed = [], []
        for rows in (4, 16, 64, 1024):
            (batch, _), ours, at = all_new(rows, 1), strategies.Ours(pool), strategies.Ours(pool, rows)
            for way, found in ((ours, fresh), (at, fixed)):
                for build in (way.by_records, way.by_columns):
                    build(batch)
                    with Made() as made:
                        build(batch)
                    found.append(made.tensors)
    assert all(one == fresh[0] for one in fresh)
    assert sum(fresh[0].values()) <= 11  # one allocation, six pieces, three of another dtype, one of another shape
    assert [dict(one) for one in fixed] == [{}] * 8


@pytest.mark.parametrize("bad", [True, 1.5, None])
@pytest.mark.parametrize("rows", [3, MANY])
def test_the_checked_slab_refuses_what_a_lease_refuses(bad, rows):
    """Equal fill is equal care: numpy alone takes a boolean for a number, and cuts a fraction off."""
    column = strategies.Cut(COLUMNS, rows=rows).columns[2]
    data = np.zeros(COLUMNS.nbytes(rows=rows), np.uint8)
    strategies.write_checked(column, data, [7] * rows)
    assert np.ndarray(rows, np.int32, data, column.offset).tolist() == [7] * rows
    with pytest.raises(TypeError, match="plain numbers"):
        strategies.write_checked(column, data, [7] * (rows - 1) + [bad])

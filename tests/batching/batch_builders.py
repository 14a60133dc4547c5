"""Batches for tests, and an oracle of their uploaded bytes that shares no code with the library."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from hypothesis import settings
from hypothesis import strategies as st

from batching import Request, SamplingBatchInfo, SamplingParams, ScheduleBatch
from staging import StagingPool
from staging.testing import SimulatedDevice

KINDS = ("no pool", "cpu", "simulated")
WHOLE_VOCABULARY = 1 << 30
EXAMPLES = settings(deadline=None, database=None, max_examples=100)

COLUMNS = {
    "temperatures": torch.float32,
    "top_ps": torch.float32,
    "top_ks": torch.int32,
    "min_ps": torch.float32,
    "sampling_seed": torch.int64,
}
FLAGS = ("is_all_greedy", "is_any_greedy", "need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling")


class Values(NamedTuple):
    """What a user asks for, before any mapping."""

    temperature: Any = 1.0
    top_p: Any = 1.0
    top_k: Any = -1
    min_p: Any = 0.0
    sampling_seed: Any = None


def record_of(values: Values) -> bytes:
    """The definition of right: one request's bytes."""
    temperature, top_p, top_k, min_p, seed = values
    if temperature < 1e-6:
        temperature, top_k = 1.0, 1
    if top_k == -1:
        top_k = WHOLE_VOCABULARY
    return struct.pack("<ffifq", temperature, top_p, top_k, min_p, 42 if seed is None else seed)


def rows_of(info: SamplingBatchInfo) -> list[bytes]:
    """The device tensors, row by row, as the same bytes; the seed is missing where the batch has none."""
    columns = [getattr(info, name) for name in COLUMNS]
    columns = [column.reshape(-1).tolist() for column in columns if column is not None]
    code = "<ffifq" if len(columns) == 5 else "<ffif"
    return [struct.pack(code, *row) for row in zip(*columns, strict=True)]


def check_rows(info: SamplingBatchInfo, values: Sequence[Values], *, deterministic: bool = False) -> None:
    """Shapes, dtypes, every bit, and the flags by their naive definitions."""
    rows = len(values)
    for name, dtype in COLUMNS.items():
        column = getattr(info, name)
        if name == "sampling_seed" and not deterministic:
            assert column is None
            continue
        assert column.dtype == dtype, name
        assert column.shape == ((rows, 1) if name == "temperatures" else (rows,)), name
        assert column.is_contiguous(), name
        assert column.device.type == "cpu", name
    records = [record_of(value) for value in values]
    assert rows_of(info) == (records if deterministic else [record[:16] for record in records])
    assert len(info) == rows
    assert {name: getattr(info, name) for name in FLAGS} == flags_of(records)


def flags_of(records: Iterable[bytes]) -> dict[str, bool]:
    rows = [struct.unpack("<ffifq", record) for record in records]
    return {
        "is_all_greedy": all(top_k <= 1 for _, _, top_k, _, _ in rows),
        "is_any_greedy": any(top_k <= 1 for _, _, top_k, _, _ in rows),
        "need_top_p_sampling": any(top_p != 1 for _, top_p, _, _, _ in rows),
        "need_top_k_sampling": any(top_k != WHOLE_VOCABULARY for _, _, top_k, _, _ in rows),
        "need_min_p_sampling": any(min_p > 0 for _, _, _, min_p, _ in rows),
    }


def own_params(values: Values) -> SamplingParams:
    return SamplingParams(**values._asdict())


def foreign_params(values: Values) -> SimpleNamespace:
    """The same attribute names on an object the library knows nothing about; without a seed, no such attribute."""
    names = values._asdict()
    if values.sampling_seed is None:
        del names["sampling_seed"]
    return SimpleNamespace(**names)


def request(rid: str = "r0", values: Values | None = None, *, foreign: bool = False, **others: Any) -> Request:
    params = (foreign_params if foreign else own_params)(Values() if values is None else values)
    return Request(rid, params, **others)


def decode_batch(
    values: Iterable[Values], *, deterministic: bool = False, foreign: bool | Sequence[bool] = False
) -> ScheduleBatch:
    values = list(values)
    kinds = [foreign] * len(values) if isinstance(foreign, bool) else foreign
    requests = [
        request(f"r{row}", value, foreign=kind) for row, (value, kind) in enumerate(zip(values, kinds, strict=True))
    ]
    return ScheduleBatch(requests, "cpu", forward_mode="decode", deterministic=deterministic)


def prefill_batch(
    lengths: Iterable[tuple[int, int]], *, values: Sequence[Values] | None = None, deterministic: bool = False
) -> ScheduleBatch:
    """One request for each (prefix length, new tokens); request k has row k of the table."""
    requests = [
        request(
            f"r{row}",
            values[row] if values else Values(),
            prefix_indices=torch.arange(prefix) + 1000 * (row + 1),
            extend_input_len=new,
            req_pool_idx=row,
        )
        for row, (prefix, new) in enumerate(lengths)
    ]
    return ScheduleBatch(requests, "cpu", deterministic=deterministic)


def new_tokens(batch: ScheduleBatch) -> torch.Tensor:
    """An `out_cache_loc` for the batch."""
    return torch.arange(sum(request.extend_input_len for request in batch.reqs)) + 500_000


def expected_table(before: torch.Tensor, batch: ScheduleBatch, out_cache_loc: torch.Tensor) -> torch.Tensor:
    """The definition of right for `write_cache_indices`: one entry at a time."""
    table = before.clone()
    fresh = iter(out_cache_loc.tolist())
    for request in batch.reqs:
        prefix = [] if request.prefix_indices is None else request.prefix_indices.tolist()
        row = prefix + [next(fresh) for _ in range(request.extend_input_len)]
        for position, index in enumerate(row):
            table[request.req_pool_idx, position] = index
    return table


@contextmanager
def open_pool(kind: str, **options: Any) -> Iterator[StagingPool | None]:
    """A pool of this kind; on the simulated device a copy runs only when a lease has to wait for it."""
    if kind == "no pool":
        yield None
        return
    device = SimulatedDevice(on_sleep=lambda device: device.finish()) if kind == "simulated" else "cpu"
    pool = StagingPool(device, **{"name": kind, "slots": 2, "max_slots": 3, "slot_bytes": 4096, **options})
    yield pool
    if isinstance(device, SimulatedDevice):
        device.finish_all()
        assert device.violations == []
    pool.close()


def random_values(dice: random.Random, *, plain: float = 0.3) -> Values:
    """Values of which each is its default with probability `plain`."""

    def or_default(value: Any, default: Any) -> Any:
        return default if dice.random() < plain else value

    return Values(
        or_default(dice.choice([0.0, 1e-7, 0.3, 0.7, 1.5, 100.0]), 1.0),
        or_default(dice.choice([0.1, 0.9, 1e-5, 1 - 1e-9]), 1.0),
        or_default(dice.choice([1, 2, 40, 2**31 - 1]), -1),
        or_default(dice.choice([0.05, 1.0, 1e-46]), 0.0),
        or_default(dice.choice([0, -1, 7, 42, 2**63 - 1, -(2**63)]), None),
    )


any_values = st.builds(
    Values,
    temperature=st.one_of(
        st.just(0.0), st.just(-0.0), st.floats(0, 2e-6), st.floats(0, 3.4e38), st.integers(0, 10**30), st.floats(0, 2)
    ),
    top_p=st.one_of(st.just(1), st.just(1.0), st.floats(1.5e-45, 1.0), st.sampled_from([1 - 1e-9, 1 + 1e-8, 0.1])),
    top_k=st.one_of(st.just(-1), st.integers(1, 3), st.integers(1, 2**31 - 1), st.just(WHOLE_VOCABULARY)),
    min_p=st.one_of(st.just(0), st.just(0.0), st.floats(0.0, 1.0), st.sampled_from([1e-46, 1e-40, 1 + 1e-8])),
    sampling_seed=st.one_of(st.none(), st.sampled_from([0, -1, 2**63 - 1, -(2**63)]), st.integers(-(2**63), 2**63 - 1)),
)

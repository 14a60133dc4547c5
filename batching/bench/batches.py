"""What is uploaded: generated requests, the batches that are formed of them, and what must arrive on the device."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batching.needs import FLAGS, TOP_K_ALL, Flags
from batching.params import DEFAULT_SEED, FEW, SAMPLING, SamplingParams, Table, needs_of, union
from staging import Field, Layout

POINTERS = Layout([Field("prefix_pointers", torch.uint64)], name="pointers")
COLUMNS = Layout((SAMPLING + POINTERS).fields, name="columns")
"""The five sampling columns and the pointers to cached prefixes: what every strategy uploads."""
NAMES = tuple(field.name for field in COLUMNS.fields)


@attrs.frozen(eq=False)
class BenchRequest:
    """One request as a scheduler holds it when the batch is built: nothing here is paid for in the timed region."""

    params: SamplingParams
    pointer: int
    """Address of its cached prefix, as an engine would keep it beside the tensor."""
    record: bytes
    """Its parameters' record and the 8 bytes of the pointer: a record of `COLUMNS`."""
    row: int
    """Its slot in `req_to_token`."""
    prefix_len: int
    input_ids: npt.NDArray[np.int64]
    """The new tokens."""


@attrs.frozen(eq=False)
class Batch:
    """The requests of one batch, in order."""

    requests: list[BenchRequest]
    new_rows: tuple[int, ...]
    """Rows that hold another request than in the batch before; only an engine that writes at admission asks."""
    table: Table
    """The records as a table, made beforehand: what the flags of all strategies are computed from."""

    @classmethod
    def of(cls, requests: list[BenchRequest], new_rows: Sequence[int]) -> Batch:
        return cls(requests, tuple(new_rows), joined(requests))


def records(requests: list[BenchRequest]) -> bytes:
    """The records of all requests, joined: the fill of every strategy that goes by records."""
    return b"".join([request.record for request in requests])


def joined(requests: list[BenchRequest]) -> Table:
    """The same as a table."""
    return np.frombuffer(records(requests), COLUMNS.record_dtype)


Columns = tuple[list[float], list[float], list[int], list[float], list[int], list[int]]


def columns(requests: list[BenchRequest]) -> Columns:
    """One list for each field, in the order of `COLUMNS`: the fill of every strategy that goes by columns."""
    params = [request.params for request in requests]
    seeds = [one.sampling_seed for one in params]
    return (
        [one.temperature for one in params],
        [one.top_p for one in params],
        [one.top_k for one in params],
        [one.min_p for one in params],
        [DEFAULT_SEED if seed is None else seed for seed in seeds],
        [request.pointer for request in requests],
    )


def flags_of(batch: Batch) -> Flags:
    """The five flags of a batch: one function, on the same host data, for all strategies.

    What each request needs was found when it was made; the table is at hand before the clock starts. A strategy by
    records has made it anyway; one by columns would have to look at its lists, which costs more, so this is in the
    rivals' favour.
    """
    requests = batch.requests
    few = len(requests) <= FEW
    needs = union([request.params.needs for request in requests]) if few else needs_of(batch.table)
    return FLAGS[needs]


# ---------------------------------------------------------------------- generating


def make_request(dice: random.Random, row: int, tokens: int) -> BenchRequest:
    """A request with parameters as served traffic has them: some greedy, most with top-p, few with the rest."""
    greedy = dice.random() < 0.2
    params = SamplingParams(
        temperature=0.0 if greedy else dice.uniform(0.1, 1.5),
        top_p=dice.choice([1.0, 0.95, 0.9, 0.8]),
        top_k=dice.choice([-1, -1, 20, 40, 64]),
        min_p=dice.choice([0.0, 0.0, 0.05]),
        sampling_seed=dice.choice([None, dice.randrange(-(2**63), 2**63)]),
    )
    pointer = dice.randrange(1 << 40, 1 << 47) * 8 % (1 << 47)
    ids = np.array([dice.randrange(150_000) for _ in range(tokens)], dtype=np.int64)
    record = params.record + pointer.to_bytes(8, "little")
    return BenchRequest(params, pointer, record, row, dice.randrange(8192), ids)


def make_requests(rows: int, seed: int, tokens: int = 0) -> list[BenchRequest]:
    """`rows` requests with `tokens` new tokens each; their slots are shuffled."""
    dice = random.Random(seed)
    slots = dice.sample(range(4 * rows), rows)
    return [make_request(dice, slot, tokens) for slot in slots]


def all_new(rows: int, seed: int, tokens: int = 0) -> list[Batch]:
    """Two batches to be built in turn, with no request in common."""
    every = range(rows)
    return [Batch.of(make_requests(rows, seed + part, tokens), every) for part in (0, 1)]


def one_new(rows: int, seed: int) -> list[Batch]:
    """Two batches to be built in turn that differ in one request."""
    one = make_requests(rows, seed)
    place = rows // 2
    other = list(one)
    other[place] = make_request(random.Random(seed + 1), one[place].row, 0)
    return [Batch.of(one, (place,)), Batch.of(other, (place,))]


def unchanged(rows: int, seed: int) -> list[Batch]:
    """One batch, built again and again."""
    return [Batch.of(make_requests(rows, seed), ())]


# ---------------------------------------------------------------------- comparing

Expected = dict[str, "npt.NDArray[np.generic]"]


def expected_columns(requests: list[BenchRequest]) -> Expected:
    """What must be on the device, one number at a time and by no code that is measured."""
    params = [request.params for request in requests]
    seeds = [DEFAULT_SEED if one.sampling_seed is None else one.sampling_seed for one in params]
    return {
        "temperatures": np.array([[np.float32(one.temperature)] for one in params], np.float32).reshape(-1, 1),
        "top_ps": np.array([np.float32(one.top_p) for one in params], np.float32),
        "top_ks": np.array([one.top_k for one in params], np.int32),
        "min_ps": np.array([np.float32(one.min_p) for one in params], np.float32),
        "sampling_seed": np.array(seeds, np.int64),
        "prefix_pointers": np.array([request.pointer for request in requests], np.uint64),
    }


def expected_flags(requests: list[BenchRequest]) -> Flags:
    """The flags by their definitions."""
    params = [request.params for request in requests]
    return (
        all(one.top_k <= 1 for one in params),
        any(one.top_k <= 1 for one in params),
        any(np.float32(one.top_p) != 1 for one in params),
        any(one.top_k != TOP_K_ALL for one in params),
        any(np.float32(one.min_p) > 0 for one in params),
    )


def differences(got: Mapping[str, torch.Tensor], wanted: Expected, device: torch.device) -> list[str]:
    """What differs, a line for each field; empty when names, dtypes, shapes, device and every byte agree."""
    if got.keys() != wanted.keys():
        return [f"fields {', '.join(got)} instead of {', '.join(wanted)}"]
    found = []
    for name, want in wanted.items():
        tensor = got[name]
        if tensor.device != device:
            found.append(f"{name} is on {tensor.device}, not on {device}")
            continue
        have = tensor.cpu().numpy()
        if have.dtype != want.dtype or have.shape != want.shape:
            found.append(f"{name} is {have.dtype} {have.shape}, not {want.dtype} {want.shape}")
        elif have.tobytes() != want.tobytes():
            unlike = have.reshape(len(want), -1).view(np.uint8) != want.reshape(len(want), -1).view(np.uint8)
            row = int(np.argwhere(unlike.any(axis=1))[0][0])
            found.append(f"{name}, row {row}: {have[row]} instead of {want[row]}")
    return found

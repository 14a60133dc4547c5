"""The one staging function: all that a batch uploads, in one copy, whichever entry point comes first.

`SamplingBatchInfo.from_schedule_batch` and `write_cache_indices` both ask `staged_for`. The first of them uploads the
sampling columns, the prefix pointers and the lengths together; the other takes its views. What was staged serves each
of them once, and only while the batch still has the same requests with the same values.
"""

from __future__ import annotations

import operator
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import attrs
import numpy as np
import numpy.typing as npt
import torch

from batching.errors import BatchError, CacheIndexError
from batching.params import SAMPLING, SamplingParams, Table, table_of
from batching.request import KnownPrefix, ScheduleBatch
from staging import Field, FieldError, Layout, StagingPool, Upload

CACHE = Layout(
    [
        Field("prefix_pointers", torch.uint64),
        Field("req_pool_indices", torch.int64),
        Field("prefix_lens", torch.int64),
        Field("extend_lens", torch.int64),
        Field("seq_lens", torch.int64),
        Field("extend_starts", torch.int64),
    ],
    name="cache indices",
)
"""What the kernel of `write_cache_indices` reads, per request. `extend_starts` is where its part of `out_cache_loc`
begins; `seq_lens` is prefix and extend together."""

PREFILL = SAMPLING + CACHE
"""One prefill batch: everything in one copy."""

_INTEGER = Field("length", torch.int64)
_CODES = {"q": np.dtype(np.int64), "Q": np.dtype(np.uint64)}
_MOST_TOKENS = 1 << 48
"""No length or row comes near it, and sums over a batch stay far from the end of int64."""

Part = Literal["sampling", "cache"]


@attrs.frozen(eq=False)
class CacheRows:
    """The host side of the `CACHE` columns of one batch, checked."""

    prefixes: list[torch.Tensor | None] = attrs.field(repr=False)
    pointers: npt.NDArray[np.uint64]
    pool_indices: npt.NDArray[np.int64]
    prefix_lens: npt.NDArray[np.int64]
    extend_lens: npt.NDArray[np.int64]
    seq_lens: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    longest: int
    """The largest of `seq_lens`; 0 without requests."""

    def columns(self) -> dict[str, Any]:
        """The values by field of `CACHE`."""
        return {
            "prefix_pointers": self.pointers,
            "req_pool_indices": self.pool_indices,
            "prefix_lens": self.prefix_lens,
            "extend_lens": self.extend_lens,
            "seq_lens": self.seq_lens,
            "extend_starts": self.starts,
        }


@attrs.define(eq=False)
class Staged:
    """What one batch uploaded, and for what: its device tensors by field name, and the host side of them.

    Holds the prefix tensors, so their pointers stay good until the kernel that reads them is queued.
    """

    tensors: Mapping[str, torch.Tensor] = attrs.field(repr=False)  # printing a tensor waits for the device
    sampling: Table
    cache: CacheRows | None
    requests: list[Any]
    params: list[Any]
    deterministic: bool
    pool: StagingPool | None
    stream: int
    """The CUDA stream of the copies where there was no pool; an `Upload` knows its own."""
    taken: set[Part] = attrs.Factory(set)

    def serves(self, batch: ScheduleBatch, pool: StagingPool | None, part: Part) -> bool:
        """Whether the batch still is what was staged, as far as `part` is concerned."""
        if part in self.taken or self.pool is not pool or self.deterministic != batch.deterministic:
            return False
        if pool is None and self.stream != _current_stream(batch.device):
            return False  # nothing orders that stream behind the copies
        if len(self.requests) != len(batch.reqs) or not all(map(operator.is_, self.requests, batch.reqs)):
            return False
        if part == "cache":
            return self.cache is not None and _same_cache_rows(self.cache, batch.reqs)
        params = [request.sampling_params for request in batch.reqs]
        if set(map(type, params)) <= {SamplingParams}:
            return all(map(operator.is_, self.params, params))
        return self.sampling.tobytes() == table_of(batch.reqs, params).tobytes()  # foreign: compare what they say now


def staged_for(
    batch: ScheduleBatch,
    pool: StagingPool | None,
    part: Part,
    check: Callable[[CacheRows], None] | None = None,
) -> Staged:
    """What this batch uploads, uploading it unless the other entry point has.

    `check` may refuse the cache rows before anything is uploaded. On any error nothing stays on the batch.
    Raises the errors of the values (`SamplingValueError`, `CacheIndexError`) and of the pool.
    """
    staged, batch.staged = batch.staged, None  # an exception below leaves nothing behind
    if staged is not None and staged.serves(batch, pool, part):
        if check is not None and staged.cache is not None:
            check(staged.cache)
        if isinstance(staged.tensors, Upload):
            staged.tensors.wait()  # the other entry point may have run on another stream
        staged.taken.add(part)
        return staged
    staged = stage_batch(batch, pool, part, check)
    staged.taken.add(part)
    if staged.cache is not None:
        batch.staged = staged
    return staged


def stage_batch(
    batch: ScheduleBatch,
    pool: StagingPool | None,
    part: Part = "sampling",
    check: Callable[[CacheRows], None] | None = None,
) -> Staged:
    """Read and check all values of a batch, then upload them in one copy through `pool`, on the current stream.

    An extend batch, and any batch for the part "cache", has the fields of `PREFILL`; else those of `SAMPLING`. `check`
    may refuse the cache rows before a slot is taken. Without a pool every field goes its own way (see
    `upload_plainly`). The caller owns the result, and nothing is kept on the batch; `staged_for` does that.

    Raises `SamplingValueError` or `CacheIndexError`, naming the request, `BatchError` for a pool of another device, and
    the errors of the pool.
    """
    if pool is not None and not same_device(pool.device, batch.device):
        raise BatchError(f"the batch is for {batch.device}, {pool!r} uploads to {pool.device}; use a pool per device")
    params = [request.sampling_params for request in batch.reqs]
    sampling = table_of(batch.reqs, params)
    cache = None
    if part == "cache" or batch.forward_mode == "extend":
        cache = cache_rows(batch.reqs, batch.device if pool is None else pool.device)
        if check is not None:
            check(cache)
    if pool is None:
        columns: dict[str, Any] = {field.name: sampling[field.name] for field in SAMPLING.fields}
        layout = SAMPLING
        if cache is not None:
            columns.update(cache.columns())
            layout = PREFILL
        tensors: Mapping[str, torch.Tensor] = upload_plainly(layout, columns, batch.device)
    else:
        with pool.lease(SAMPLING if cache is None else PREFILL, rows=len(batch.reqs)) as lease:
            lease.write_records(sampling, SAMPLING)
            if cache is not None:
                for name, values in cache.columns().items():
                    lease[name] = values
            tensors = lease.upload()
    return Staged(
        tensors=tensors,
        sampling=sampling,
        cache=cache,
        requests=list(batch.reqs),
        params=params,
        deterministic=batch.deterministic,
        pool=pool,
        stream=_current_stream(batch.device) if pool is None else 0,
    )


def stage_rows(
    layout: Layout, columns: Mapping[str, Sequence[int]], pool: StagingPool | None, device: torch.device
) -> Mapping[str, torch.Tensor]:
    """Upload per-row columns of `layout` as one copy: keep-indices, a decode step's arrays, anything of that kind.

    An index list that torch uploads by itself makes the host wait. Without a pool each column goes its own way. The
    tensors, by field name, belong to the caller and can be used on the current stream.

    Raises `BatchError` when the columns are not the layout's or the pool is for another device, `FieldError` for a
    value or a length that does not fit, and the errors of the pool.
    """
    if columns.keys() != {field.name for field in layout.fields}:
        raise BatchError(f"{layout!r} got columns named {', '.join(map(repr, columns))}; give one for each field")
    rows = len(next(iter(columns.values())))
    if pool is None:
        return upload_plainly(layout, columns, device)
    if not same_device(pool.device, device):
        raise BatchError(f"{layout.name}: {pool!r} uploads to {pool.device}, not to {device}; use a pool per device")
    with pool.lease(layout, rows=rows) as lease:
        for name, values in columns.items():
            lease[name] = values
        return lease.upload()


def upload_plainly(layout: Layout, columns: Mapping[str, Any], device: torch.device) -> dict[str, torch.Tensor]:
    """The way without a pool: each field from a fresh host tensor, pinned on CUDA, in a copy of its own."""
    tensors: dict[str, torch.Tensor] = {}
    rows = len(next(iter(columns.values())))
    for field in layout.fields:
        host = torch.from_numpy(field.array(columns[field.name], rows))
        if device.type == "cuda":
            host = host.pin_memory()
        tensors[field.name] = host.to(device, non_blocking=True)
    return tensors


def cache_rows(requests: Sequence[Any], device: torch.device) -> CacheRows:
    """Read and check what the cache columns need. Raises `CacheIndexError`, naming the request."""
    prefixes: list[torch.Tensor | None] = [request.prefix_indices for request in requests]
    pointers: list[int] = []
    lengths: list[int] = []
    for request, prefix in zip(requests, prefixes, strict=True):
        if prefix is None:
            pointers.append(0)
            lengths.append(0)
            continue
        known = getattr(request, "known_prefix", None)
        if known is None or known[0]() is not prefix or (known[3] is not device and known[3] != device):
            known = _checked_prefix(request, prefix, device)
        pointers.append(known[1])
        lengths.append(known[2])
    extend_lens = _integers(requests, "extend_input_len")
    pool_indices = _integers(requests, "req_pool_idx")
    prefix_lens = _array("q", lengths)
    seq_lens = prefix_lens + extend_lens
    return CacheRows(
        prefixes=prefixes,
        pointers=_array("Q", pointers),
        pool_indices=pool_indices,
        prefix_lens=prefix_lens,
        extend_lens=extend_lens,
        seq_lens=seq_lens,
        starts=np.add.accumulate(extend_lens) - extend_lens,
        longest=int(np.maximum.reduce(seq_lens)) if lengths else 0,
    )


def _checked_prefix(request: Any, prefix: Any, device: torch.device) -> KnownPrefix:
    rid = getattr(request, "rid", "?")
    if not isinstance(prefix, torch.Tensor):
        raise CacheIndexError(f"request {rid!r}: prefix_indices is a {type(prefix).__name__}; give the int64 tensor")
    problem = ""
    if prefix.dtype != torch.int64:
        problem = f"is {prefix.dtype}, and the kernel reads int64; convert it with .to(torch.int64)"
    elif prefix.ndim != 1:
        problem = f"has shape {tuple(prefix.shape)}; it must be one-dimensional"
    elif not prefix.is_contiguous():
        problem = "is not contiguous, and the kernel reads it by one pointer; call .contiguous()"
    elif not same_device(prefix.device, device):
        problem = f"is on {prefix.device}, the batch on {device}; move it there"
    if problem:
        raise CacheIndexError(f"request {rid!r}: prefix_indices {problem}")
    length = prefix.numel()
    known = (weakref.ref(prefix), prefix.data_ptr() if length else 0, length, device)
    if hasattr(request, "known_prefix"):
        request.known_prefix = known
    return known


def _integers(requests: Sequence[Any], name: str) -> npt.NDArray[np.int64]:
    values = [getattr(request, name) for request in requests]
    if not set(map(type, values)) <= {int}:
        values = [_integer(request, name, value) for request, value in zip(requests, values, strict=True)]
    if values and not 0 <= min(values) <= max(values) < _MOST_TOKENS:
        row = next(row for row, value in enumerate(values) if not 0 <= value < _MOST_TOKENS)
        raise CacheIndexError(
            f"request {getattr(requests[row], 'rid', row)!r}: {name} is {values[row]}; it must be from 0 to "
            f"{_MOST_TOKENS - 1}"
        )
    return _array("q", values)


def _array(code: str, values: list[int]) -> npt.NDArray[Any]:
    """Python integers as an array of int64 ("q") or uint64 ("Q"): several times as fast as by numpy."""
    return np.frombuffer(array(code, values), _CODES[code]) if values else np.empty(0, _CODES[code])


def _integer(request: Any, name: str, value: object) -> int:
    try:
        return int(_INTEGER.number(value))
    except FieldError as error:
        reason = str(error).removeprefix(f"field {_INTEGER.name!r}: ")
        raise CacheIndexError(
            f"request {getattr(request, 'rid', '?')!r}: {name}: {reason}; set it before the batch is built"
        ) from None


def _same_cache_rows(cache: CacheRows, requests: Sequence[Any]) -> bool:
    return (
        all(a is request.prefix_indices for a, request in zip(cache.prefixes, requests, strict=True))
        and cache.extend_lens.tolist() == [request.extend_input_len for request in requests]
        and cache.pool_indices.tolist() == [request.req_pool_idx for request in requests]
    )


def _current_stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def same_device(one: torch.device, other: torch.device) -> bool:
    """Whether the two can be the same device; "cuda" without an index may be any."""
    return one.type == other.type and (one.index == other.index or None in (one.index, other.index))

"""`write_cache_indices`: each request's KV indices, cached prefix and new tokens, into its row of `req_to_token`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from batching.errors import CacheIndexError
from batching.params import SamplingParams
from batching.request import Request, ScheduleBatch
from batching.stage import CacheRows, Staged, same_device, staged_for
from staging import StagingPool

log = logging.getLogger("batching")


def write_cache_indices(
    batch: ScheduleBatch,
    req_to_token: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool: StagingPool | None = None,
    *,
    streams: Iterable[Any] = (),
) -> Staged:
    """Write row `req_pool_idx` of each request: its prefix indices, then its part of `out_cache_loc`.

        req_to_token: int32 (request slots, context length), on the batch's device; columns must be adjacent.
        out_cache_loc: int64 (sum of extend_input_len,), contiguous: new KV indices, in the order of the requests.
        pool: carries the pointers, lengths and offsets, with the sampling columns, in one copy; None pins and copies
            each by itself.
        streams: streams other than the one the prefix tensors were allocated on that read them, usually the current
            one; the tensors are marked as used there, so that their memory is not reused too early.

    All of it is queued on the current stream; on CUDA by one kernel, elsewhere (or without Triton) by torch. The prefix
    tensors are held until the kernel is queued; freed after that, their memory is safe on the stream they were
    allocated on. Returns what was staged: device tensors such as `seq_lens`, for the forward.

    Raises `CacheIndexError`, naming the request, or `SamplingValueError`, before anything is uploaded or launched:
    a prefix that is not int64, contiguous and on the device; a row out of range or used twice; a sequence longer than
    the table is wide; a wrong size of `out_cache_loc`. Otherwise the errors of the pool.
    """

    def check(rows: CacheRows) -> None:
        _check(batch, rows, req_to_token, out_cache_loc, batch.device if pool is None else pool.device)

    staged = staged_for(batch, pool, "cache", check)
    rows = staged.cache
    assert rows is not None, "staged for the cache"
    try:
        if rows.longest:
            launch = kernel_launch() if req_to_token.is_cuda else None
            if launch is not None:
                launch(req_to_token, staged.tensors, out_cache_loc, rows.longest)
            else:
                write_with_torch(req_to_token, staged, out_cache_loc)
            for stream in streams:
                for prefix in rows.prefixes:
                    if prefix is not None and prefix.is_cuda:
                        prefix.record_stream(stream)
    except BaseException:
        batch.staged = None
        raise
    return staged


def warm(pool: StagingPool) -> None:
    """Pay the first-use costs of building a batch: `StagingPool.warm`, and compiling the kernel for its device."""
    pool.warm()
    request = Request("warm-up", SamplingParams(), None, 1, 0)
    table = torch.zeros((1, 1), dtype=torch.int32, device=pool.device)
    out_cache_loc = torch.zeros(1, dtype=torch.int64, device=pool.device)
    write_cache_indices(ScheduleBatch([request], pool.device), table, out_cache_loc, pool)


@functools.cache
def kernel_launch() -> Callable[..., None] | None:
    """The kernel's launch, importing Triton when it is first needed; None, and one line in the log, without Triton."""
    try:
        from batching.kernel import launch
    except ImportError as error:
        log.warning("write_cache_indices goes on with torch operations, which are slower: no Triton (%s)", error)
        return None
    return launch


def write_with_torch(req_to_token: torch.Tensor, staged: Staged, out_cache_loc: torch.Tensor) -> None:
    """The same with torch operations, for devices without the kernel: all rows at once."""
    rows = staged.cache
    assert rows is not None, "staged for the cache"
    parts = torch.split(out_cache_loc, rows.extend_lens.tolist())
    values = torch.cat([part for pair in zip(rows.prefixes, parts, strict=True) for part in pair if part is not None])
    lens = staged.tensors["seq_lens"]
    total = int(rows.seq_lens.sum())
    row_starts = (torch.cumsum(lens, 0) - lens).repeat_interleave(lens, output_size=total)
    positions = torch.arange(total, device=values.device) - row_starts
    table_rows = staged.tensors["req_pool_indices"].repeat_interleave(lens, output_size=total)
    req_to_token[table_rows, positions] = values.to(req_to_token.dtype)


def _check(
    batch: ScheduleBatch,
    rows: CacheRows,
    req_to_token: torch.Tensor,
    out_cache_loc: torch.Tensor,
    device: torch.device,
) -> None:
    if req_to_token.dtype != torch.int32 or req_to_token.ndim != 2 or req_to_token.stride(1) != 1:
        raise CacheIndexError(
            f"req_to_token must be an int32 table with adjacent columns, got {req_to_token.dtype} of shape "
            f"{tuple(req_to_token.shape)}, strides {req_to_token.stride()}"
        )
    if out_cache_loc.dtype != torch.int64 or out_cache_loc.ndim != 1 or not out_cache_loc.is_contiguous():
        raise CacheIndexError(
            f"out_cache_loc must be contiguous one-dimensional int64, got {out_cache_loc.dtype} of shape "
            f"{tuple(out_cache_loc.shape)}"
        )
    if req_to_token.device != out_cache_loc.device or not same_device(req_to_token.device, device):
        raise CacheIndexError(
            f"the batch is on {device}, req_to_token on {req_to_token.device}, out_cache_loc on "
            f"{out_cache_loc.device}; all must be on one device"
        )
    new = int(np.add.reduce(rows.extend_lens))
    if out_cache_loc.numel() != new:
        raise CacheIndexError(
            f"out_cache_loc has {out_cache_loc.numel()} indices, the batch extends by {new} tokens; they must be equal"
        )
    if not len(rows.seq_lens):
        return
    slots, width = req_to_token.shape
    if rows.longest > width:
        row = int(rows.seq_lens.argmax())
        raise CacheIndexError(
            f"request {_rid(batch, row)}: {rows.seq_lens[row]} tokens (prefix {rows.prefix_lens[row]}) do not fit a "
            f"row of req_to_token, which is {width} wide"
        )
    if np.maximum.reduce(rows.pool_indices) >= slots:
        row = int(rows.pool_indices.argmax())
        raise CacheIndexError(
            f"request {_rid(batch, row)}: req_pool_idx is {rows.pool_indices[row]}, req_to_token has {slots} rows"
        )
    used = rows.pool_indices.tolist()
    if len(set(used)) != len(used):
        row = next(row for row, slot in enumerate(used) if slot in used[:row])
        raise CacheIndexError(
            f"request {_rid(batch, row)}: req_pool_idx {used[row]} is used twice in one batch; each request needs a row"
        )


def _rid(batch: ScheduleBatch, row: int) -> str:
    return repr(getattr(batch.reqs[row], "rid", row))

"""The rival of our kernel, as engines have it today: one program for each request, which loops over its row.

It goes through the prefix and then the new tokens block by block, and finds where its new tokens begin by adding up the
lengths of all requests before it. Also a kernel that does nothing: what a launch costs the GPU at least.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

BLOCK = 512


def launch_serial(req_to_token: torch.Tensor, tensors: Mapping[str, torch.Tensor], out_cache_loc: torch.Tensor) -> None:
    """Queue the serial kernel on the current stream. `tensors` has `extend_lens` and what our kernel reads."""
    with torch.cuda.device_of(req_to_token):  # type: ignore[no-untyped-call]
        write_rows_serially[(tensors["req_pool_indices"].shape[0],)](
            req_to_token,
            tensors["req_pool_indices"],
            tensors["prefix_pointers"],
            tensors["prefix_lens"],
            tensors["seq_lens"],
            tensors["extend_lens"],
            out_cache_loc,
            req_to_token.stride(0),
            BLOCK=BLOCK,
        )


def launch_nothing(req_to_token: torch.Tensor) -> None:
    """Queue a kernel that does nothing."""
    with torch.cuda.device_of(req_to_token):  # type: ignore[no-untyped-call]
        nothing[(1,)](req_to_token)


@triton.jit  # type: ignore[untyped-decorator]
def write_rows_serially(  # type: ignore[no-untyped-def]
    req_to_token,  # int32 (slots, STRIDE): the table
    req_pool_indices,  # int64 (rows,)
    prefix_pointers,  # uint64 (rows,): address of an int64 array
    prefix_lens,  # int64 (rows,)
    seq_lens,  # int64 (rows,)
    extend_lens,  # int64 (rows,)
    out_cache_loc,  # int64: KV indices of all new tokens
    STRIDE: tl.constexpr,  # the engine has one table, so its width can be compiled in
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(req_pool_indices + row)
    prefix_len = tl.load(prefix_lens + row)
    new_len = tl.load(seq_lens + row) - prefix_len
    prefix = tl.load(prefix_pointers + row).to(tl.pointer_type(tl.int64))
    line = req_to_token + slot * STRIDE
    lane = tl.arange(0, BLOCK)

    for block in range(tl.cdiv(prefix_len, BLOCK)):
        at = block * BLOCK + lane
        known = tl.load(prefix + at, mask=at < prefix_len)
        tl.store(line + at, known, mask=at < prefix_len)

    begin = tl.cast(0, tl.int64)
    for earlier in range(row):
        begin += tl.load(extend_lens + earlier)

    for block in range(tl.cdiv(new_len, BLOCK)):
        at = block * BLOCK + lane
        fresh = tl.load(out_cache_loc + begin + at, mask=at < new_len)
        tl.store(line + prefix_len + at, fresh, mask=at < new_len)


@triton.jit
def nothing(req_to_token):  # type: ignore[no-untyped-def]
    pass

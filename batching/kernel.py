"""The Triton kernel behind `write_cache_indices`: a grid over (request, block of its row)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Table entries that one program writes."""

_POINTERS = [
    "req_to_token",
    "req_pool_indices",
    "prefix_pointers",
    "prefix_lens",
    "seq_lens",
    "extend_starts",
    "out_cache_loc",
]


def launch(
    req_to_token: torch.Tensor, tensors: Mapping[str, torch.Tensor], out_cache_loc: torch.Tensor, longest: int
) -> None:
    """Queue the kernel on the current stream.

    `tensors` has the fields of `batching.stage.CACHE`; `longest` is the largest of `seq_lens`, known on the host.
    Arguments are taken as they are: `write_cache_indices` has checked them.
    """
    grid = (tensors["req_pool_indices"].shape[0], triton.cdiv(longest, BLOCK))
    with torch.cuda.device_of(req_to_token):  # type: ignore[no-untyped-call]
        write_rows[grid](
            req_to_token,
            tensors["req_pool_indices"],
            tensors["prefix_pointers"],
            tensors["prefix_lens"],
            tensors["seq_lens"],
            tensors["extend_starts"],
            out_cache_loc,
            req_to_token.stride(0),
            BLOCK=BLOCK,
        )


# Neither alignment nor a stride of 1 or a multiple of 16 may compile a variant: the first batch of each class would
# wait for the compiler.
@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=_POINTERS)  # type: ignore[untyped-decorator]
def write_rows(  # type: ignore[no-untyped-def]
    req_to_token,  # int32 (slots, stride): the table
    req_pool_indices,  # int64 (rows,): each request's row of the table
    prefix_pointers,  # uint64 (rows,): address of an int64 array of prefix_lens[row]; any value where that is 0
    prefix_lens,  # int64 (rows,)
    seq_lens,  # int64 (rows,): prefix and new tokens
    extend_starts,  # int64 (rows,): where the row's new tokens begin in out_cache_loc
    out_cache_loc,  # int64: KV indices of all new tokens
    stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    start = tl.program_id(1).to(tl.int64) * BLOCK
    seq_len = tl.load(seq_lens + row)
    if start < seq_len:
        prefix_len = tl.load(prefix_lens + row)
        positions = start + tl.arange(0, BLOCK)
        in_prefix = positions < prefix_len
        is_new = (positions >= prefix_len) & (positions < seq_len)
        prefix = tl.load(prefix_pointers + row).to(tl.pointer_type(tl.int64))
        old = tl.load(prefix + positions, mask=in_prefix, other=0)
        new_tokens = out_cache_loc + tl.load(extend_starts + row) - prefix_len
        new = tl.load(new_tokens + positions, mask=is_new, other=0)
        # In 64 bits: slot times stride passes 2**31 for tables of long contexts.
        line = req_to_token + tl.load(req_pool_indices + row) * tl.cast(stride, tl.int64)
        tl.store(line + positions, tl.where(in_prefix, old, new).to(tl.int32), mask=positions < seq_len)

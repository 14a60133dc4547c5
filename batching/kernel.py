"""The Triton kernel behind `write_cache_indices`: a grid over (request, share of its row)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

log = logging.getLogger("batching")

BLOCK = 512
"""Table entries that one program writes at a time."""

MOST_PROGRAMS = 16_384
"""Of a launch. One block each is best while there are few; a long row among thousands of short ones would make hundreds
of thousands that have nothing to do, so its programs then write several blocks, one after the other."""

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
    rows = tensors["req_pool_indices"].shape[0]
    grid = (rows, min(triton.cdiv(longest, BLOCK), max(1, MOST_PROGRAMS // rows)), 1)
    arguments = (
        req_to_token,
        tensors["req_pool_indices"],
        tensors["prefix_pointers"],
        tensors["prefix_lens"],
        tensors["seq_lens"],
        tensors["extend_starts"],
        out_cache_loc,
        req_to_token.stride(0),
    )
    device = req_to_token.get_device()
    if device < 0 or device == torch.cuda.current_device():  # below 0: on the host, under Triton's interpreter
        _launch(device, grid, arguments)
    else:
        with torch.cuda.device(device):
            _launch(device, grid, arguments)


_compiled: dict[int, Any] = {}
"""The compiled kernel by device. There is one variant, whatever the arguments, so from the second launch on Triton need
not look for it by their types and values, which takes as long as the launch itself."""
_direct = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)
"""Whether a compiled kernel is launched with all arguments of its function. Before 3.6 that was not tried."""


def _launch(device: int, grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
    global _direct
    compiled = _compiled.get(device)
    if compiled is not None:
        try:
            compiled[grid](*arguments, BLOCK)
            return
        except TypeError as error:  # the arguments are not what this Triton's launcher takes: nothing was launched
            log.warning("write_cache_indices goes on with Triton's own launch, which is slower: %s", error)
            _direct = False
            _compiled.clear()
    compiled = write_rows[grid](*arguments, BLOCK=BLOCK)
    if compiled is not None and _direct:  # Triton's interpreter compiles nothing
        _compiled[device] = compiled


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
    stride: tl.int64,
    BLOCK: tl.constexpr,
):
    # All that is known of the row at once: each load that waits for another one takes most of a microsecond.
    row = tl.program_id(0)
    seq_len = tl.load(seq_lens + row)
    prefix_len = tl.load(prefix_lens + row)
    prefix = tl.load(prefix_pointers + row).to(tl.pointer_type(tl.int64))
    new_tokens = out_cache_loc + tl.load(extend_starts + row) - prefix_len
    # In 64 bits: slot times stride passes 2**31 for tables of long contexts.
    line = req_to_token + tl.load(req_pool_indices + row) * tl.cast(stride, tl.int64)
    first = tl.program_id(1).to(tl.int64) * BLOCK
    for start in range(first, seq_len, tl.num_programs(1) * BLOCK):
        positions = start + tl.arange(0, BLOCK)
        in_prefix = positions < prefix_len
        is_new = (positions >= prefix_len) & (positions < seq_len)
        old = tl.load(prefix + positions, mask=in_prefix, other=0)
        new = tl.load(new_tokens + positions, mask=is_new, other=0)
        tl.store(line + positions, tl.where(in_prefix, old, new).to(tl.int32), mask=positions < seq_len)

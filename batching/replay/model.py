"""The stand-in for a model: pseudo-random logits from what the batch uploaded, and a sampler that uses all of it.

Every byte counts: logits depend on the last token, the length and entries of the request's row of `req_to_token`; the
sampler on all five sampling columns. A wrong value anywhere changes a token sooner or later.
"""

from __future__ import annotations

import torch

from batching.info import SamplingBatchInfo

VOCAB_SIZE = 64


def logits_of(
    last_tokens: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, req_to_token: torch.Tensor
) -> torch.Tensor:
    """Logits (rows, VOCAB_SIZE) float32, from int64 (rows,) tensors and the table. No host synchronisation."""
    first, middle, last = (req_to_token[req_pool_indices, at] for at in (seq_lens * 0, seq_lens // 2, seq_lens - 1))
    state = _mix((last_tokens + 1) * 0x2545F491 + seq_lens * 0x9E3779B1 + first * 31 + middle * 17 + last)
    vocabulary = torch.arange(VOCAB_SIZE, device=state.device)
    return _uniform(state[:, None] + vocabulary * 0x1E3779B9) * 8.0


def sample(logits: torch.Tensor, info: SamplingBatchInfo, seq_lens: torch.Tensor) -> torch.Tensor:
    """One token for each row, int64 (rows,): temperature, top-k, top-p, min-p, then a draw fixed by seed and length."""
    if info.is_all_greedy:
        return logits.argmax(dim=1)
    probs, tokens = torch.softmax(logits / info.temperatures, dim=1).sort(dim=1, descending=True, stable=True)
    ranks = torch.arange(probs.shape[1], device=probs.device)
    if info.need_top_k_sampling:
        probs = probs.masked_fill(ranks >= info.top_ks[:, None], 0.0)
    if info.need_top_p_sampling:
        probs = probs.masked_fill(probs.cumsum(dim=1) - probs > info.top_ps[:, None], 0.0)
    if info.need_min_p_sampling:
        probs = probs.masked_fill(probs < probs[:, :1] * info.min_ps[:, None], 0.0)
    seeds = seq_lens if info.sampling_seed is None else _mix(info.sampling_seed) + seq_lens
    gumbel = -torch.log(-torch.log(_uniform(_mix(seeds)[:, None] + ranks * 0x1E3779B9).clamp(1e-7, 1 - 1e-7)))
    choice = (torch.log(probs) + gumbel).argmax(dim=1, keepdim=True)
    return tokens.gather(1, choice).squeeze(1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A hash of int64 values; multiplication wraps."""
    x = (x ^ (x >> 31)) * 0x7FB5D329728EA185
    x = (x ^ (x >> 27)) * -0x7E25210B43D22BB3
    return x ^ (x >> 33)


def _uniform(x: torch.Tensor) -> torch.Tensor:
    """Hashed int64 values as float32 in [0, 1)."""
    return (_mix(x) & 0xFFFFFF).to(torch.float32) / float(1 << 24)

"""The check: every batch built a second time, the plain way and by a naive oracle, and compared bit for bit.

Differences are counted on the device, so checking never makes the host wait and does not hide a race.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from batching.info import SamplingBatchInfo
from batching.replay.model import VOCAB_SIZE, sample
from batching.request import Request, ScheduleBatch
from batching.stage import CACHE, Staged, stage_batch

KINDS = ("sampling columns", "cache columns", "req_to_token", "tokens")


class Checker:
    """A second table, and a counter on the device for each kind of difference."""

    def __init__(self, req_to_token: torch.Tensor) -> None:
        self._table = req_to_token
        self._oracle = req_to_token.clone()
        self._counts = torch.zeros(len(KINDS), dtype=torch.int64, device=req_to_token.device)

    def prefill(self, batch: ScheduleBatch, staged: Staged, out_cache_loc: torch.Tensor) -> None:
        """Compare what a prefill batch uploaded, and the rows that were written from it."""
        plain = stage_batch(_again(batch), None, "cache")
        for field in CACHE.fields:
            self._compare("cache columns", staged.tensors[field.name], plain.tensors[field.name])
        start = 0
        for request in batch.reqs:
            prefix = request.prefix_indices
            new = out_cache_loc[start : start + request.extend_input_len]
            start += request.extend_input_len
            row = self._oracle[request.req_pool_idx]
            row[: len(prefix)] = prefix
            row[len(prefix) : len(prefix) + len(new)] = new
            self.row(request, len(prefix) + len(new))

    def decode(self, requests: Sequence[Request], lengths: Sequence[int], out_cache_loc: torch.Tensor) -> None:
        """Write the oracle's entries of a decode step; `row` compares them at the end of each request."""
        device = self._oracle.device
        rows = torch.tensor([request.req_pool_idx for request in requests])
        columns = torch.tensor(lengths) - 1
        if device.type == "cuda":
            rows, columns = rows.pin_memory(), columns.pin_memory()
        where = (rows.to(device, non_blocking=True), columns.to(device, non_blocking=True))
        self._oracle[where] = out_cache_loc.to(torch.int32)

    def row(self, request: Request, length: int) -> None:
        """Compare the first `length` entries of a request's row."""
        slot = request.req_pool_idx
        self._compare("req_to_token", self._table[slot, :length], self._oracle[slot, :length])

    def sampled(
        self,
        batch: ScheduleBatch,
        info: SamplingBatchInfo,
        logits: torch.Tensor,
        seq_lens: torch.Tensor,
        tokens: torch.Tensor,
    ) -> None:
        """Compare the sampling columns, however they came about, and the tokens drawn with them."""
        plain = SamplingBatchInfo.from_schedule_batch(_again(batch, "decode"), VOCAB_SIZE, None)
        for name in ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed"):
            self._compare("sampling columns", getattr(info, name), getattr(plain, name))
        self._compare("tokens", tokens, sample(logits, plain, seq_lens))

    def mismatches(self) -> dict[str, int]:
        """Differing elements by kind, all so far. Waits for the device."""
        return dict(zip(KINDS, self._counts.tolist(), strict=True))

    def _compare(self, kind: str, ours: torch.Tensor, plain: torch.Tensor) -> None:
        if ours.dtype != plain.dtype or ours.shape != plain.shape:
            self._counts[KINDS.index(kind)] += max(1, ours.numel())
            return
        if ours.element_size() == 8:
            ours, plain = ours.view(torch.int64), plain.view(torch.int64)
        elif ours.is_floating_point():
            ours, plain = ours.view(torch.int32), plain.view(torch.int32)
        self._counts[KINDS.index(kind)] += (ours != plain).sum()


def _again(batch: ScheduleBatch, mode: str | None = None) -> ScheduleBatch:
    """The same requests as a batch of its own, which has nothing staged."""
    forward_mode = batch.forward_mode if mode is None else "decode"
    return ScheduleBatch(batch.reqs, batch.device, forward_mode, batch.deterministic)

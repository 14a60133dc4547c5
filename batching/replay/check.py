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
        self._counts = {kind: torch.zeros((), dtype=torch.int64, device=req_to_token.device) for kind in KINDS}

    def prefill(self, batch: ScheduleBatch, staged: Staged, out_cache_loc: torch.Tensor) -> None:
        """Compare what a prefill batch uploaded, and the rows that were written from it."""
        plain = stage_batch(_again(batch), None, "cache")
        names = [field.name for field in CACHE.fields]
        self._compare(
            "cache columns", [staged.tensors[name] for name in names], [plain.tensors[name] for name in names]
        )
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
        self._compare("req_to_token", [self._table[slot, :length]], [self._oracle[slot, :length]])

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
        self._compare("sampling columns", _columns(info), _columns(plain))
        self._compare("tokens", [tokens], [sample(logits, plain, seq_lens)])

    def mismatches(self) -> dict[str, int]:
        """Differing bytes by kind, all so far. Waits for the device."""
        return {kind: int(count) for kind, count in self._counts.items()}

    def _compare(self, kind: str, ours: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
        if [(one.dtype, one.shape) for one in ours] != [(one.dtype, one.shape) for one in plain]:
            self._counts[kind].add_(sum(one.nbytes for one in plain) or 1)
            return
        self._counts[kind].add_((_bytes(ours) != _bytes(plain)).sum())


def _columns(info: SamplingBatchInfo) -> list[torch.Tensor]:
    assert info.sampling_seed is not None, "the replay samples deterministically"
    return [info.temperatures, info.top_ps, info.top_ks, info.min_ps, info.sampling_seed]


def _bytes(tensors: list[torch.Tensor]) -> torch.Tensor:
    """All bytes in one tensor, so that many small ones are compared by one operation."""
    parts = [one.reshape(-1).view(torch.uint8) for one in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _again(batch: ScheduleBatch, mode: str | None = None) -> ScheduleBatch:
    """The same requests as a batch of its own, which has nothing staged."""
    forward_mode = batch.forward_mode if mode is None else "decode"
    return ScheduleBatch(batch.reqs, batch.device, forward_mode, batch.deterministic)

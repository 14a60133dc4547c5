"""A small real scheduler, overlapped: continuous batching over recorded requests, every upload through the pool.

One iteration: drop the finished, prefill what fits and merge it into the running batch, decode the running batch. The
tokens of an iteration are read only after `ahead` further ones were built and queued, so the host runs ahead of the
device as it does in a real engine, and slots are met in flight. A finished request is noticed when its token is read;
what was decoded for it in between is thrown away.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from batching.cache import warm, write_cache_indices
from batching.info import KEEP, SamplingBatchInfo
from batching.params import SamplingParams
from batching.replay.blocks import BlockCache, KVIndexPool, Prefix
from batching.replay.check import Checker
from batching.replay.model import VOCAB_SIZE, logits_of, sample
from batching.replay.trace import BLOCK_TOKENS, TraceRequest
from batching.request import Request, ScheduleBatch
from batching.stage import stage_rows
from staging import Field, Layout, StagingPool

DECODE = Layout([Field("req_pool_indices", torch.int64), Field("seq_lens", torch.int64)], name="decode step")
"""The arrays of one decode step, rebuilt each time."""

PUBLISHED_DEFAULTS = (
    # (temperature, top_p, top_k, min_p): generation defaults as models publish them; traces record none.
    (0.6, 0.9, -1, 0.0),  # Llama 3
    (0.6, 0.95, 20, 0.0),  # Qwen3, thinking
    (0.7, 0.8, 20, 0.0),  # Qwen3, plain
    (1.0, 0.95, 64, 0.0),  # Gemma 3
    (0.6, 0.95, -1, 0.0),  # DeepSeek-R1
    (1.0, 1.0, -1, 0.0),  # plain calls of the OpenAI style
    (0.0, 1.0, -1, 0.0),  # greedy
    (1.0, 1.0, -1, 0.05),  # min-p sampling
)


@attrs.frozen(kw_only=True)
class Settings:
    """What the scheduler may use."""

    max_batch: int = 256
    """Requests in the running batch, and rows of `req_to_token`."""
    prefill_tokens: int = 16384
    """Tokens of one prefill batch; one longer request may exceed it, alone."""
    kv_tokens: int | None = None
    """KV indices; None: room for ten of the trace's longest requests."""
    max_context: int = 262_144
    """Longest request accepted, prompt and output; longer ones are refused and counted."""
    ahead: int = 2
    """Iterations built before the tokens of one are read; 0 reads them at once."""
    forward_us: float = 5000.0
    """How long a forward keeps a CUDA device busy, in microseconds; elsewhere it takes what it takes."""


@attrs.define(eq=False)
class ReplayRequest(Request):
    """A request on its way through the scheduler."""

    trace: TraceRequest = attrs.field(kw_only=True)
    length: int = attrs.field(default=0, init=False)
    """Tokens that have a KV index."""
    read: int = attrs.field(default=0, init=False)
    """Output tokens read so far."""
    prefix: Prefix | None = attrs.field(default=None, init=False)
    inserted: tuple[int, ...] = attrs.field(default=(), init=False)
    """Blocks of the prompt that it brought into the cache."""

    @property
    def finished(self) -> bool:
        return self.read >= self.trace.output_length


@attrs.define
class Result:
    """What a replay did. Times are host time, in nanoseconds."""

    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    longest_prefix: int = 0
    output_tokens: int = 0
    overrun_tokens: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    filters: int = 0
    prefill_build_ns: int = 0
    decode_build_ns: int = 0
    filter_ns: int = 0
    evicted_blocks: int = 0
    wall_ns: int = 0
    mismatches: dict[str, int] | None = None


@attrs.define
class _Pending:
    """Tokens on their way to the host."""

    requests: list[ReplayRequest]
    tokens: torch.Tensor
    event: Any
    """A CUDA event behind the copy; None where the tokens are on the host already."""


class Scheduler:
    """Replays requests through `pool` on its device, see `run`."""

    def __init__(
        self, trace: Sequence[TraceRequest], pool: StagingPool, settings: Settings | None = None, *, check: bool = True
    ) -> None:
        settings = Settings() if settings is None else settings
        device = pool.device
        longest = max((row.input_length + row.output_length for row in trace), default=1)
        width = min(longest, settings.max_context) + settings.ahead + 1
        self.pool = pool
        self.settings = settings
        self.result = Result()
        self._device = device
        self._width = width
        self._table = torch.zeros((settings.max_batch, width), dtype=torch.int32, device=device)
        self._kv = KVIndexPool(settings.kv_tokens or 10 * width, device)
        self._cache = BlockCache(self._kv)
        self._check = Checker(self._table) if check else None
        self._free_rows = list(range(settings.max_batch))[::-1]
        self._reserved = 0
        """KV indices promised to running requests for tokens they have not decoded yet."""
        self._waiting = deque(self._admissible(trace))
        self._running: list[ReplayRequest] = []
        self._info: SamplingBatchInfo | None = None
        self._last_tokens = torch.empty(0, dtype=torch.int64, device=device)
        self._pending: deque[list[_Pending]] = deque()
        self._landing: list[torch.Tensor] = []
        self._busy = _busy_kernel(device, settings.forward_us)

    def run(self, on_finished: Callable[[int], None] | None = None) -> Result:
        """Replay all requests; `on_finished` is told how many finished, as they do. Returns what was done."""
        warm(self.pool)
        start = time.perf_counter_ns()
        while self._waiting or self._running or self._pending:
            self._drop_finished()
            queued = []
            batch = self._next_prefill()
            if batch:
                queued.append(self._prefill(batch))
            if self._running:
                queued.append(self._decode())
            assert queued or self._pending or not self._waiting, (
                "what waits fits when nothing runs: the others were refused"
            )
            if queued:
                self._pending.append(queued)
            if self._pending and (not queued or len(self._pending) > self.settings.ahead):
                finished = self._read(self._pending.popleft())
                if on_finished is not None and finished:
                    on_finished(finished)
        if self._check is not None:
            self.result.mismatches = self._check.mismatches()
        self.result.evicted_blocks = self._cache.evicted
        self.result.wall_ns = time.perf_counter_ns() - start
        return self.result

    # What waits.

    def _admissible(self, trace: Sequence[TraceRequest]) -> list[ReplayRequest]:
        """The trace's requests, without those that could never fit."""
        requests = []
        for number, row in enumerate(trace):
            tokens = row.input_length + row.output_length
            # One index more: of a prompt that is cached whole, the last token gets an index of its own all the same.
            if tokens > self.settings.max_context or tokens + self.settings.ahead + 1 > self._kv.capacity:
                self.result.refused += 1
                continue
            temperature, top_p, top_k, min_p = PUBLISHED_DEFAULTS[number % len(PUBLISHED_DEFAULTS)]
            params = SamplingParams(temperature, top_p, top_k, min_p, None if number % 5 == 0 else number * 7919 - 3)
            requests.append(ReplayRequest(f"{number}", params, trace=row))
        return requests

    def _next_prefill(self) -> list[ReplayRequest]:
        """Take from the queue what fits now: rows, the token budget, and KV indices to the end of each request."""
        batch: list[ReplayRequest] = []
        budget = self.settings.prefill_tokens
        while self._waiting and self._free_rows:
            request = self._waiting[0]
            row = request.trace
            prefix = self._cache.match(row.blocks, row.input_length)
            extend = row.input_length - len(prefix.indices)
            decode = row.output_length + self.settings.ahead
            room = self._kv.available + self._cache.evictable - self._reserved
            if extend + decode > room or (batch and extend > budget):
                self._cache.release(prefix)
                break
            self._waiting.popleft()
            budget -= extend
            self._reserved += extend + decode
            request.prefix, request.prefix_indices, request.extend_input_len = prefix, prefix.indices, extend
            request.req_pool_idx = self._free_rows.pop()
            request.length = row.input_length
            batch.append(request)
        return batch

    def _alloc(self, n: int) -> torch.Tensor:
        if n > self._kv.available:
            self._cache.evict(n - self._kv.available)
        indices = self._kv.alloc(n)
        assert indices is not None, "admission reserved these indices"
        self._reserved -= n
        return indices

    # What runs.

    def _prefill(self, requests: list[ReplayRequest]) -> _Pending:
        batch = ScheduleBatch(requests, self._device, "extend", deterministic=True)
        out_cache_loc = self._alloc(sum(request.extend_input_len for request in requests))
        start = time.perf_counter_ns()
        staged = write_cache_indices(batch, self._table, out_cache_loc, self.pool)
        info = SamplingBatchInfo.from_schedule_batch(batch, VOCAB_SIZE, self.pool)
        self.result.prefill_build_ns += time.perf_counter_ns() - start
        self.result.prefill_steps += 1
        if self._check is not None:
            self._check.prefill(batch, staged, out_cache_loc)
        for request in requests:
            row = request.trace
            cached = row.input_length - request.extend_input_len
            self.result.prompt_tokens += row.input_length
            self.result.cached_tokens += cached
            self.result.longest_prefix = max(self.result.longest_prefix, cached)
            if row.blocks:
                indices = self._table[request.req_pool_idx, : row.input_length]
                request.inserted = self._cache.insert(row.blocks, row.input_length, indices)
        last = torch.full_like(staged.tensors["seq_lens"], -1)
        tokens = self._forward(batch, info, last, staged.tensors["req_pool_indices"], staged.tensors["seq_lens"])
        if self._info is None:
            self._info = info
        else:
            self._info.merge_batch(info)
        self._running = self._running + requests
        self._last_tokens = torch.cat([self._last_tokens, tokens])
        return self._send_back(requests, tokens)

    def _decode(self) -> _Pending:
        assert self._info is not None, "the running batch has its sampling columns"
        requests = list(self._running)
        batch = ScheduleBatch(requests, self._device, "decode", deterministic=True)
        out_cache_loc = self._alloc(len(requests))
        for request in requests:
            request.length += 1
        lengths = [request.length for request in requests]
        start = time.perf_counter_ns()
        columns = {"req_pool_indices": [request.req_pool_idx or 0 for request in requests], "seq_lens": lengths}
        arrays = stage_rows(DECODE, columns, self.pool, self._device)
        rows, seq_lens = arrays["req_pool_indices"], arrays["seq_lens"]
        self._table[rows, seq_lens - 1] = out_cache_loc.to(torch.int32)
        self.result.decode_build_ns += time.perf_counter_ns() - start
        self.result.decode_steps += 1
        if self._check is not None:
            self._check.decode(requests, lengths, out_cache_loc)
        self._last_tokens = self._forward(batch, self._info, self._last_tokens, rows, seq_lens)
        return self._send_back(requests, self._last_tokens)

    def _forward(
        self,
        batch: ScheduleBatch,
        info: SamplingBatchInfo,
        last_tokens: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> torch.Tensor:
        logits, tokens = self._model(info, last_tokens, rows, seq_lens)
        if self._check is not None:
            self._check.sampled(batch, info, logits, seq_lens, tokens)
        return tokens

    def _model(
        self, info: SamplingBatchInfo, last_tokens: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The forward itself: logits, and a token for each row."""
        self._busy()
        logits = logits_of(last_tokens, rows, seq_lens, self._table)
        return logits, sample(logits, info, seq_lens)

    # What comes back.

    def _send_back(self, requests: list[ReplayRequest], tokens: torch.Tensor) -> _Pending:
        if tokens.device.type != "cuda":
            return _Pending(requests, tokens, None)
        landing = (
            self._landing.pop()
            if self._landing
            else torch.empty(self.settings.max_batch, dtype=torch.int64, device="cpu", pin_memory=True)
        )
        landing[: len(tokens)].copy_(tokens, non_blocking=True)
        event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(tokens.device))
        return _Pending(requests, landing, event)

    def _read(self, queued: list[_Pending]) -> int:
        """Read the tokens of one iteration; returns how many requests that finished."""
        finished = 0
        for pending in queued:
            if pending.event is not None:
                pending.event.synchronize()
            tokens = pending.tokens[: len(pending.requests)].tolist()
            if pending.event is not None:
                self._landing.append(pending.tokens)
            for request, token in zip(pending.requests, tokens, strict=True):
                assert 0 <= token < VOCAB_SIZE, "the sampler drew a token"
                if request.finished:
                    self.result.overrun_tokens += 1
                    continue
                request.read += 1
                finished += request.finished
                self.result.output_tokens += 1
        self.result.requests += finished
        return finished

    def _drop_finished(self) -> None:
        """Filter the finished out of the running batch, by one upload of the indices to keep, and free their memory."""
        leaving = [request for request in self._running if request.finished]
        if not leaving or self._info is None:
            return
        start = time.perf_counter_ns()
        keep = [row for row, request in enumerate(self._running) if not request.finished]
        on_device = stage_rows(KEEP, {"keep_indices": keep}, self.pool, self._device)["keep_indices"]
        self._info.filter_batch(keep, on_device)
        self._last_tokens = self._last_tokens.index_select(0, on_device)
        self._running = [self._running[row] for row in keep]
        self.result.filter_ns += time.perf_counter_ns() - start
        self.result.filters += 1
        for request in leaving:
            self._leave(request)

    def _leave(self, request: ReplayRequest) -> None:
        row, prefix = request.req_pool_idx, request.prefix
        assert row is not None, "it was running"
        assert prefix is not None, "it was running"
        if self._check is not None:
            self._check.row(request, request.length)
        # Its own are all but the prefix and the blocks that it brought into the cache; these need not be adjacent.
        own = [len(prefix.indices)]
        inserted = set(request.inserted)
        for position, block in enumerate(request.trace.blocks):
            if block in inserted:
                own += [position * BLOCK_TOKENS, (position + 1) * BLOCK_TOKENS]
        own.append(request.length)
        parts = [self._table[row, a:b] for a, b in zip(own[::2], own[1::2], strict=True) if a < b]
        if parts:
            self._kv.free(torch.cat(parts))
        self._cache.release(prefix)
        self._cache.release_blocks(request.inserted)
        decoded = request.length - request.trace.input_length
        self._reserved -= request.trace.output_length + self.settings.ahead - decoded
        self._free_rows.append(row)
        request.prefix = request.prefix_indices = request.known_prefix = None


def _busy_kernel(device: torch.device, microseconds: float) -> Callable[[], None]:
    """Keeps a CUDA device busy for about that long, as a forward would; does nothing elsewhere."""
    if device.type != "cuda" or microseconds <= 0:
        return lambda: None
    # Cycles of the SM clock, measured: the rate differs between devices and is not what their data sheets say.
    spin: Any = torch.cuda._sleep
    trial = 10_000_000
    spin(trial)  # the first one pays for loading the kernel
    begin: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record(torch.cuda.current_stream(device))
    spin(trial)
    end.record(torch.cuda.current_stream(device))
    end.synchronize()
    cycles = int(microseconds * 1e-3 * trial / begin.elapsed_time(end))
    return lambda: spin(cycles)

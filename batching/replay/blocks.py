"""The scheduler's memory: a bounded pool of KV indices, and the cache of prompt blocks that live in it.

One prompt, in order: `match` what is cached, `alloc` the rest (`evict` first when the pool is short),
`insert` after the prefill, and at the end of the request release both and `free` what the cache does not own.
All tensors stay on the device; every size is known on the host, so nothing here waits for the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import attrs
import torch
from torch import Tensor

from batching.replay.trace import BLOCK_TOKENS

PADDING_INDEX = 0
"""The KV index that padded rows write to; never handed out."""


class KVIndexPool:
    """The KV indices 1 to `capacity`, each either free or handed out.

    The indices are on the device, their number is counted on the host.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        if capacity < 1:
            raise ValueError(f"a pool needs a capacity of at least 1, got {capacity}")
        self.capacity = capacity
        self.device = device
        first = PADDING_INDEX + 1
        # The free indices are _head followed by all of _freed. They are joined only when _head runs short:
        # one copy of the list then, instead of one per free.
        self._head = torch.arange(first, first + capacity, dtype=torch.int64, device=device)
        self._freed: list[Tensor] = []
        self._available = capacity

    @property
    def available(self) -> int:
        """Free indices."""
        return self._available

    def alloc(self, n: int) -> Tensor | None:
        """Take `n` distinct free indices (int64, 1-D, contiguous), or None when fewer are free.

        The tensor is a slice of the free list as it was: clone it to keep it for long.
        """
        if n < 0:
            raise ValueError(f"cannot allocate {n} indices")
        if n > self._available:
            return None
        if n > self._head.shape[0]:
            self._head = torch.cat([self._head, *self._freed])
            self._freed.clear()
        taken, self._head = self._head[:n], self._head[n:]
        self._available -= n
        return taken

    def free(self, indices: Tensor) -> None:
        """Give back indices taken with `alloc`: 1-D, any integer dtype, on the pool's device.

        The caller may overwrite the tensor right after. Raises `ValueError` when the pool would hold more
        than its capacity; other indices freed twice are not noticed.
        """
        if indices.dim() != 1:
            raise ValueError(f"indices to free must be 1-D, got shape {tuple(indices.shape)}")
        n = indices.shape[0]
        if n > self.capacity - self._available:
            raise ValueError(
                f"{n} indices freed, but only {self.capacity - self._available} of {self.capacity} are "
                f"handed out: some were freed twice"
            )
        if n == 0:
            return
        # A copy even of few: callers free slices of a table row that the next request overwrites, and a slice
        # would keep the whole table alive.
        self._freed.append(indices.to(torch.int64, copy=True))
        self._available += n

    def __repr__(self) -> str:
        return f"<KVIndexPool available={self.available} capacity={self.capacity} device={self.device}>"


@attrs.frozen(eq=False)
class Prefix:
    """The cached start of a prompt; its blocks are pinned until it is released."""

    indices: Tensor = attrs.field(repr=False)
    """KV indices of the cached tokens (int64, 1-D, contiguous); they belong to the cache."""
    blocks: tuple[int, ...]
    """Ids of the blocks they come from."""


@attrs.define(eq=False)
class _CachedBlock:
    indices: Tensor
    pins: int


class BlockCache:
    """Full prompt blocks by id, each owning its KV indices; the least recently used is evicted first.

    A pinned block is one that a running request reads; it is not evicted.
    """

    def __init__(self, kv: KVIndexPool, block_tokens: int = BLOCK_TOKENS) -> None:
        self._kv = kv
        self._block_tokens = block_tokens
        # Least recently used first. Within one prompt the deepest block comes first, see _touch.
        self._cached: OrderedDict[int, _CachedBlock] = OrderedDict()
        self._pinned = 0
        self.hits = 0
        """Blocks found by `match`."""
        self.misses = 0
        """Full blocks that `match` did not find."""
        self.evicted = 0
        """Blocks evicted."""

    @property
    def owned(self) -> int:
        """KV indices that belong to the cache."""
        return len(self._cached) * self._block_tokens

    @property
    def evictable(self) -> int:
        """KV indices that `evict` could free now."""
        return (len(self._cached) - self._pinned) * self._block_tokens

    def match(self, blocks: tuple[int, ...], input_length: int) -> Prefix:
        """Find and pin the longest cached prefix of a prompt of `input_length` tokens.

        At least the last token is always left out, even when its block is cached: the prefill must compute
        something to have logits. Each call counts its hits and misses and wants one `release`.
        """
        full = self._full_blocks(blocks, input_length)
        found: list[_CachedBlock] = []
        for block in full:
            cached = self._cached.get(block)
            if cached is None:
                break
            self._pin(cached)
            found.append(cached)
        matched = full[: len(found)]
        self._touch(matched)
        self.hits += len(found)
        self.misses += len(full) - len(found)
        if found:
            indices = torch.cat([cached.indices for cached in found])[: input_length - 1]
        else:
            indices = torch.empty(0, dtype=torch.int64, device=self._kv.device)
        return Prefix(indices, matched)

    def insert(self, blocks: tuple[int, ...], input_length: int, row_indices: Tensor) -> tuple[int, ...]:
        """Cache the full blocks of a prompt that are not cached yet, and return their ids, in prompt order.

        `row_indices` are the KV indices of the whole prompt (1-D, any integer dtype); those of the returned
        blocks belong to the cache from now on. They are pinned: end with `release_blocks`. A block that is
        cached already stays as it is, and the caller keeps its own indices for it.

        Raises `ValueError` when there is not one index per token.
        """
        if row_indices.shape != (input_length,):
            raise ValueError(
                f"a prompt of {input_length} tokens needs as many KV indices, got shape {tuple(row_indices.shape)}"
            )
        full = self._full_blocks(blocks, input_length)
        inserted: list[int] = []
        for position, block in enumerate(full):
            if block in self._cached:
                continue
            start = position * self._block_tokens
            # A copy per block: the row is overwritten later, and blocks of one prompt are evicted one by one.
            indices = row_indices[start : start + self._block_tokens].to(torch.int64, copy=True)
            self._cached[block] = cached = _CachedBlock(indices, pins=0)
            self._pin(cached)
            inserted.append(block)
        self._touch(full)
        return tuple(inserted)

    def release(self, prefix: Prefix) -> None:
        """Unpin the blocks of a prefix, once."""
        self.release_blocks(prefix.blocks)

    def release_blocks(self, blocks: Iterable[int]) -> None:
        """Unpin blocks that `insert` returned, once. Raises `ValueError` for a block that is not pinned."""
        for block in blocks:
            cached = self._cached.get(block)
            if cached is None or cached.pins == 0:
                raise ValueError(f"block {block} is not pinned: it was released already")
            cached.pins -= 1
            if cached.pins == 0:
                self._pinned -= 1

    def evict(self, n: int) -> int:
        """Free at least `n` KV indices, least recently used blocks first, and return how many were freed.

        Fewer than `n` when all blocks left are pinned.
        """
        victims: list[int] = []
        for block, cached in self._cached.items():
            if len(victims) * self._block_tokens >= n:
                break
            if cached.pins == 0:
                victims.append(block)
        if victims:
            self._kv.free(torch.cat([self._cached.pop(block).indices for block in victims]))
        self.evicted += len(victims)
        return len(victims) * self._block_tokens

    def _full_blocks(self, blocks: tuple[int, ...], input_length: int) -> tuple[int, ...]:
        # A partial block is never cached: the next turn of the conversation goes on inside it.
        return blocks[: input_length // self._block_tokens]

    def _pin(self, cached: _CachedBlock) -> None:
        if cached.pins == 0:
            self._pinned += 1
        cached.pins += 1

    def _touch(self, blocks: tuple[int, ...]) -> None:
        # Deepest first: a block is then always older than the ones before it in the prompt, so eviction never
        # cuts a prompt in the middle and leaves a tail that no match can reach.
        for block in reversed(blocks):
            self._cached.move_to_end(block)

    def __repr__(self) -> str:
        return f"<BlockCache owned={self.owned} evictable={self.evictable} evicted={self.evicted}>"

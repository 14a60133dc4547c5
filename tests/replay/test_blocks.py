"""The scheduler's memory: no KV index has two owners, and cached prompts come back as they were computed."""

from __future__ import annotations

import attrs
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from batching.replay.blocks import BlockCache, KVIndexPool, Prefix

CPU = torch.device("cpu")
BLOCK = 4


@pytest.fixture
def kv() -> KVIndexPool:
    return KVIndexPool(24, CPU)


@pytest.fixture
def cache(kv: KVIndexPool) -> BlockCache:
    return BlockCache(kv, block_tokens=BLOCK)


@attrs.define
class Running:
    """What a scheduler keeps of a request."""

    blocks: tuple[int, ...]
    length: int
    prefix: Prefix
    row: Tensor
    inserted: tuple[int, ...]

    def own(self) -> Tensor:
        """The KV indices that belong to the request: neither the prefix's nor in a block it inserted."""
        pieces = [self.row[:0]]
        start = self.prefix.indices.shape[0]
        for position, block in enumerate(self.blocks[: self.length // BLOCK]):
            if block in self.inserted:
                pieces.append(self.row[start : position * BLOCK])
                start = (position + 1) * BLOCK
        pieces.append(self.row[start:])
        return torch.cat(pieces)


def prefill(kv: KVIndexPool, cache: BlockCache, blocks: tuple[int, ...], length: int) -> Running | None:
    prefix = cache.match(blocks, length)
    new = length - prefix.indices.shape[0]
    if new > kv.available:
        cache.evict(new - kv.available)
    taken = kv.alloc(new)
    if taken is None:
        cache.release(prefix)
        return None
    row = torch.cat([prefix.indices, taken])
    return Running(blocks, length, prefix, row, cache.insert(blocks, length, row))


def finish(kv: KVIndexPool, cache: BlockCache, request: Running) -> None:
    kv.free(request.own())
    cache.release(request.prefix)
    cache.release_blocks(request.inserted)


def free_indices(kv: KVIndexPool) -> list[int]:
    return torch.cat([kv._head, *kv._freed]).tolist()


# The pool


def test_pool_hands_out_every_index_once_and_never_the_padding_index(kv):
    """Indices run from 1 to the capacity."""
    taken = [kv.alloc(10), kv.alloc(0), kv.alloc(14)]
    assert [t.dtype for t in taken] == [torch.int64] * 3
    assert sorted(torch.cat(taken).tolist()) == list(range(1, 25))
    assert repr(kv) == "<KVIndexPool available=0 capacity=24 device=cpu>"


def test_pool_short_of_indices_says_none_and_keeps_what_it_has(kv):
    """A refused request changes nothing, and asking for none always works."""
    assert kv.alloc(25) is None
    assert kv.available == 24
    assert kv.alloc(24) is not None
    assert kv.alloc(1) is None
    assert kv.alloc(0).shape == (0,)


def test_freed_indices_are_joined_when_the_head_runs_short(kv):
    """Many small frees add up to one large allocation."""
    taken = kv.alloc(20)
    for index in range(0, 20, 2):
        kv.free(taken[index : index + 1])
    again = kv.alloc(14)
    assert again.is_contiguous()
    assert sorted(again.tolist()) == sorted([*taken[::2].tolist(), 21, 22, 23, 24])
    assert kv.available == 0


def test_freed_slice_may_be_overwritten_at_once(kv):
    """The pool copies what it is given, whatever its integer type."""
    table = torch.zeros(3, 24, dtype=torch.int32)
    table[1] = kv.alloc(24)
    kv.free(table[1, 5:9])
    table.fill_(7)
    assert sorted(kv.alloc(4).tolist()) == [6, 7, 8, 9]


def test_more_freed_than_handed_out_is_refused(kv):
    """The host-side count catches a double free once it passes the capacity."""
    taken = kv.alloc(3)
    kv.free(taken)
    with pytest.raises(ValueError, match="3 indices freed, but only 0 of 24 are handed out"):
        kv.free(taken)
    assert kv.available == 24


def test_impossible_arguments_are_refused(kv):
    """Capacities, counts and shapes are checked on the host."""
    with pytest.raises(ValueError, match="capacity of at least 1, got 0"):
        KVIndexPool(0, CPU)
    with pytest.raises(ValueError, match="cannot allocate -1"):
        kv.alloc(-1)
    with pytest.raises(ValueError, match=r"must be 1-D, got shape \(2, 2\)"):
        kv.free(torch.ones(2, 2, dtype=torch.int64))


# The cache


def test_prompt_seen_before_comes_back_with_its_indices(kv, cache):
    """Full blocks are cached, the partial one is not."""
    first = prefill(kv, cache, (1, 2, 3), 10)
    assert first.prefix.indices.shape == (0,)
    assert first.prefix.indices.dtype == torch.int64
    assert first.inserted == (1, 2)
    assert repr(cache) == "<BlockCache owned=8 evictable=0 evicted=0>"

    prefix = cache.match((1, 2, 4), 12)
    assert prefix.blocks == (1, 2)
    assert prefix.indices.tolist() == first.row[:8].tolist()
    assert prefix.indices.is_contiguous()
    assert (cache.hits, cache.misses) == (2, 3)


def test_fully_cached_prompt_leaves_its_last_token_to_compute(kv, cache):
    """A prompt of whole blocks matches all but one token, and that one gets an index of its own."""
    first = prefill(kv, cache, (1, 2), 8)
    again = prefill(kv, cache, (1, 2), 8)
    assert again.prefix.blocks == (1, 2)
    assert again.prefix.indices.tolist() == first.row[:7].tolist()
    assert again.inserted == ()
    assert again.own().tolist() == again.row[7:].tolist() != first.row[7:].tolist()

    for request in (first, again):
        finish(kv, cache, request)
    assert (kv.available, cache.owned, cache.evictable) == (16, 8, 8)


def test_single_token_prompt_never_matches(kv, cache):
    """Nothing is left of the prefix once the last token is taken out."""
    single = BlockCache(kv, block_tokens=1)
    finish(kv, single, prefill(kv, single, (1,), 1))
    prefix = single.match((1,), 1)
    assert (prefix.blocks, prefix.indices.shape) == ((1,), (0,))


def test_prompt_without_block_ids_is_not_cached(kv, cache):
    """A trace that records no blocks gives no hits and no misses."""
    request = prefill(kv, cache, (), 11)
    assert (request.prefix.blocks, request.inserted) == ((), ())
    finish(kv, cache, request)
    assert (kv.available, cache.hits, cache.misses) == (24, 0, 0)


def test_block_cached_meanwhile_stays_with_its_first_owner(kv, cache):
    """Two equal prompts prefilled side by side: the second keeps its own indices and gives them back."""
    one, other = cache.match((1, 2), 8), cache.match((1, 2, 3), 12)
    first = Running((1, 2), 8, one, kv.alloc(8), ())
    second = Running((1, 2, 3), 12, other, kv.alloc(12), ())
    first.inserted = cache.insert(first.blocks, first.length, first.row)
    second.inserted = cache.insert(second.blocks, second.length, second.row)
    assert (first.inserted, second.inserted) == ((1, 2), (3,))
    assert second.own().tolist() == second.row[:8].tolist()

    for request in (first, second):
        finish(kv, cache, request)
    assert kv.available + cache.owned == kv.capacity
    assert cache.match((1, 2, 3), 12).indices.tolist() == first.row.tolist() + second.row[8:11].tolist()


def test_pinned_blocks_are_not_evicted(kv, cache):
    """A block stays as long as one of its readers has not released it."""
    request = prefill(kv, cache, (1, 2), 8)
    reader = cache.match((1, 2), 8)
    finish(kv, cache, request)
    assert (cache.evict(8), cache.evictable) == (0, 0)
    cache.release(reader)
    assert (cache.evict(8), cache.evictable, kv.available) == (8, 0, 24)
    assert cache.evicted == 2


@pytest.mark.parametrize("prefix_first", [True, False])
def test_deepest_block_of_a_prompt_goes_first(kv, cache, prefix_first):
    """In whatever order a request releases, eviction shortens a prompt from its end."""
    finish(kv, cache, prefill(kv, cache, (1, 2), 8))
    request = prefill(kv, cache, (1, 2, 3, 4), 16)
    kv.free(request.own())
    first, second = (request.prefix.blocks, request.inserted)[:: 1 if prefix_first else -1]
    cache.release_blocks(first)
    cache.release_blocks(second)
    left = []
    while cache.evict(1):
        prefix = cache.match((1, 2, 3, 4), 16)
        cache.release(prefix)
        left.append(prefix.blocks)
    assert left == [(1, 2, 3), (1, 2), (1,), ()]


def test_least_recently_used_prompt_goes_first(kv, cache):
    """A match makes a prompt recent again, and whole blocks are freed."""
    for blocks in [(1,), (2,), (3,)]:
        finish(kv, cache, prefill(kv, cache, blocks, 4))
    cache.release(cache.match((1,), 4))
    assert cache.evict(5) == 8
    assert cache.match((1,), 4).blocks == (1,)
    assert cache.match((2,), 4).blocks == cache.match((3,), 4).blocks == ()


def test_evicting_nothing_frees_nothing(kv, cache):
    """Asking for zero or less leaves the cache alone."""
    finish(kv, cache, prefill(kv, cache, (1,), 4))
    assert cache.evict(0) == cache.evict(-3) == 0
    assert cache.owned == 4


def test_block_released_twice_is_refused(kv, cache):
    """A release without a pin would let a running request's block be evicted."""
    request = prefill(kv, cache, (1,), 4)
    cache.release_blocks(request.inserted)
    with pytest.raises(ValueError, match="block 1 is not pinned"):
        cache.release_blocks(request.inserted)


def test_row_of_another_length_is_refused(kv, cache):
    """One index per prompt token, before anything is cached."""
    with pytest.raises(ValueError, match=r"a prompt of 8 tokens needs as many KV indices, got shape \(7,\)"):
        cache.insert((1, 2), 8, kv.alloc(7))
    assert cache.owned == 0


def test_row_may_be_overwritten_after_insert(kv, cache):
    """The cache copies the indices it takes over, and keeps no large row alive."""
    table = torch.zeros(2, 24, dtype=torch.int32)
    table[0, :8] = kv.alloc(8)
    cache.insert((1, 2), 8, table[0, :8])
    table.zero_()
    assert cache.match((1, 2, 3), 9).indices.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    kept = [block.indices.untyped_storage().nbytes() for block in cache._cached.values()]
    assert kept == [BLOCK * 8] * 2


# Both together


def test_a_prompt_cached_whole_needs_an_index_for_its_last_token(cache, kv):
    """Its blocks are pinned while it runs, so a memory that they fill has no room for it; one index more is enough."""
    finish(kv, cache, prefill(kv, cache, (1, 2, 3, 4, 5, 6), 24))
    assert (kv.available, cache.evictable) == (0, 24)
    assert prefill(kv, cache, (1, 2, 3, 4, 5, 6), 24) is None
    cache.evict(1)
    kv.alloc(3)
    request = prefill(kv, cache, (1, 2, 3, 4, 5), 20)
    assert request is not None
    assert (len(request.prefix.indices), kv.available) == (19, 0)


class CallsOnly(TorchDispatchMode):
    """Notes every torch operation that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_no_operation_reads_the_device_or_uploads_a_list():
    """Tensors without data are enough, and only slices, joins and copies on the device occur."""
    kv = KVIndexPool(24, torch.device("meta"))
    cache = BlockCache(kv, block_tokens=BLOCK)
    with CallsOnly() as calls:
        for _ in range(3):
            for blocks, length in [((1, 2), 8), ((1, 2, 3), 9), ((4, 5, 6, 7, 8), 20)]:
                finish(kv, cache, prefill(kv, cache, blocks, length))
    assert cache.evicted > 0
    assert calls.names == {"slice", "cat", "_to_copy", "empty"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nothing_waits_for_a_gpu():
    """torch's own check for synchronising calls stays silent."""
    kv = KVIndexPool(24, torch.device("cuda"))
    cache = BlockCache(kv, block_tokens=BLOCK)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for blocks, length in [((1, 2), 8), ((1, 2, 3), 9), ((4, 5, 6, 7, 8), 20)]:
            finish(kv, cache, prefill(kv, cache, blocks, length))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cache.evicted > 0


class Traffic(RuleBasedStateMachine):
    """Random requests against a memory that remembers which token each KV index holds."""

    # A prompt is a path in a tree with two ways on at each block, so prompts share prefixes often.
    paths = st.text(alphabet="ab", min_size=1, max_size=4)

    @initialize(capacity=st.integers(12, 48))
    def build(self, capacity: int) -> None:
        self.kv = KVIndexPool(capacity, CPU)
        self.cache = BlockCache(self.kv, block_tokens=BLOCK)
        self.running: list[Running] = []
        self.content: dict[int, tuple[int, int]] = {}

    @rule(path=paths, missing=st.integers(0, BLOCK - 1))
    def start(self, path: str, missing: int) -> None:
        length = len(path) * BLOCK - missing
        # The path as binary digits behind a one: a different id for every path.
        digits = "1" + path.replace("a", "0").replace("b", "1")
        blocks = tuple(int(digits[: depth + 1], 2) for depth in range(1, len(path) + 1))
        reachable = self.kv.available + self.cache.evictable
        # Of a prompt that is cached whole, the last token gets an index of its own beside the cached one.
        whole = length == len(blocks) * BLOCK and all(block in self.cache._cached for block in blocks)
        request = prefill(self.kv, self.cache, blocks, length)
        if request is None:
            assert reachable < length + whole
            return
        tokens = [(blocks[i // BLOCK], i % BLOCK) for i in range(length)]
        cached = request.prefix.indices.tolist()
        assert len(cached) == min(len(request.prefix.blocks) * BLOCK, length - 1)
        assert [self.content[index] for index in cached] == tokens[: len(cached)]
        self.content.update(zip(request.row.tolist()[len(cached) :], tokens[len(cached) :], strict=True))
        self.running.append(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish_one(self, data: st.DataObject) -> None:
        request = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        row = [self.content[index] for index in request.row.tolist()]
        assert row == [(request.blocks[i // BLOCK], i % BLOCK) for i in range(request.length)]
        finish(self.kv, self.cache, request)

    @rule(n=st.integers(0, 20))
    def evict(self, n: int) -> None:
        evictable = self.cache.evictable
        freed = self.cache.evict(n)
        assert min(n, evictable) <= freed <= evictable
        assert self.cache.evictable == evictable - freed

    @invariant()
    def every_index_has_one_owner(self) -> None:
        cached = [index for block in self.cache._cached.values() for index in block.indices.tolist()]
        owned = [index for request in self.running for index in request.own().tolist()]
        assert sorted(free_indices(self.kv) + cached + owned) == list(range(1, self.kv.capacity + 1))
        assert self.kv.available + self.cache.owned + len(owned) == self.kv.capacity

    def teardown(self) -> None:
        if hasattr(self, "running"):
            for request in self.running:
                finish(self.kv, self.cache, request)
            self.cache.evict(self.kv.capacity)
            assert sorted(free_indices(self.kv)) == list(range(1, self.kv.capacity + 1))


Traffic.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTraffic = Traffic.TestCase

"""Random requests for the model runner, and what each step must sample by a computation that knows no batches."""

from __future__ import annotations

import random

import attrs
from vllm_runner import BLOCK, MAX_BLOCKS, VOCAB, Scheduled


@attrs.define(eq=False)
class Request:
    """One request. `total` is all that the model keeps of its tokens: the naive computation."""

    prompt: list[int]
    output: int
    """Tokens to sample."""
    blocks: list[int] = attrs.Factory(list)
    computed: int = 0
    total: int = 0
    row: int = -1
    """Where it was in the last step."""

    def compute(self, token: int) -> None:
        self.total += (token * 7 + self.computed) * (self.computed + 1)
        self.computed += 1

    @property
    def sampled(self) -> int:
        return self.total % VOCAB

    @property
    def length(self) -> int:
        return len(self.prompt) + self.output


class Traffic:
    """Requests that come and go. A step has all that decode, then prompts, in chunks, up to `most` tokens."""

    def __init__(self, most: int, seed: int = 0) -> None:
        self.choice = random.Random(seed)
        self.most = most
        self.running: list[Request] = []
        self.wished = self.wish()
        self.free = list(range(1, 1 + most * MAX_BLOCKS))  # block 0 is the null block

    @property
    def blocks(self) -> int:
        """Of a KV cache that holds all this."""
        return 1 + self.most * MAX_BLOCKS

    def step(self) -> tuple[list[Scheduled], list[int]]:
        """The next batch, and the token that each of its rows must sample."""
        if self.choice.random() < 0.1:
            self.wished = self.wish()
        while len(self.running) < self.wished:
            self.running.append(self.request())
        budget = self.most
        batch: list[Scheduled] = []
        expected: list[int] = []
        rows: list[Request] = []
        # Decodes first: what was sampled for a row is there for one step. The others in any order.
        order = sorted(self.running, key=lambda one: (one.computed < len(one.prompt), self.choice.random()))
        for one in order:
            tokens = self.tokens_of(one, budget)
            if not tokens:
                continue
            budget -= len(tokens)
            computed = one.computed
            for token in tokens:
                one.compute(token if token >= 0 else one.sampled)
            while len(one.blocks) * BLOCK < one.computed:
                one.blocks.append(self.free.pop())
            batch.append(Scheduled(tokens, computed, tuple(one.blocks)))
            expected.append(one.sampled)
            rows.append(one)
        for row, one in enumerate(rows):
            one.row = row
        for one in [one for one in self.running if one.computed == one.length]:
            self.running.remove(one)
            self.free += one.blocks  # taken again at once: their old values are other requests'
        return batch, expected

    def wish(self) -> int:
        """How many requests there should be: small numbers as often as large ones."""
        return round(self.most ** self.choice.random())

    def request(self) -> Request:
        prompt = [self.choice.randrange(VOCAB) for _ in range(self.choice.choice((1, 2, 3, 7, 20, 40)))]
        return Request(prompt, output=min(self.choice.choice((1, 2, 5, 12, 60)), MAX_BLOCKS * BLOCK - len(prompt)))

    def tokens_of(self, one: Request, budget: int) -> list[int]:
        if one.computed < len(one.prompt):
            return one.prompt[one.computed : one.computed + budget]
        if self.choice.random() < 0.3:
            return [self.choice.randrange(VOCAB)]  # one that the host knows, whatever was sampled
        return [-1 - one.row]

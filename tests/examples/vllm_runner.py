"""A model runner in vLLM's shape: six arrays for each step, one upload, captured graphs that read fixed addresses.

An example, not an API; docs/vllm.md explains it. The model is integer arithmetic, so that results are equal or wrong.

    runner = ModelRunner(StagingPool("cuda"))
    sampled = runner.execute([Scheduled(tokens=[11, 12, 13], computed=0, blocks=[1])])
    sampled = runner.execute([Scheduled(tokens=[-1], computed=3, blocks=[1])])  # what row 0 has just sampled
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import attrs
import numpy as np
import torch

from staging import Field, Layout, StagingPool, Upload

BLOCK = 4  # tokens in a block of the KV cache
MAX_BLOCKS = 16  # of one request
VOCAB = 1000
NULL_BLOCK = 0  # belongs to no request: padding reads and writes it
PAD_SLOT_ID = -1  # a token that is not kept

INPUTS = Layout(
    [
        Field("input_ids", torch.int32, "tokens"),
        Field("positions", torch.int64, "tokens"),
        Field("slot_mapping", torch.int64, "tokens"),
        Field("query_start_loc", torch.int32, "bounds"),  # one more than rows
        Field("seq_lens", torch.int32),
        Field("block_table", torch.int32, shape=(MAX_BLOCKS,)),
    ],
    name="inputs",
)


@attrs.frozen
class Scheduled:
    """One request's part of a step."""

    tokens: Sequence[int]
    """Ids to compute; -1 - row stands for what the last step sampled for that row, which the host need not know."""
    computed: int
    """Tokens that are in the KV cache already: the position of the first one."""
    blocks: Sequence[int]
    """Its blocks of the KV cache, in order."""


def padded_inputs(batch: Sequence[Scheduled], size: int) -> dict[str, Any]:
    """The values of all fields for `batch`, with tokens and rows padded to `size` by what does no harm."""
    ids = [token for one in batch for token in one.tokens]
    spans = [range(one.computed, one.computed + len(one.tokens)) for one in batch]
    slots = [
        one.blocks[position // BLOCK] * BLOCK + position % BLOCK
        for one, span in zip(batch, spans, strict=True)
        for position in span
    ]
    starts = list(accumulate((len(span) for span in spans), initial=0))
    block_table = np.full((size, MAX_BLOCKS), NULL_BLOCK, np.int32)
    for row, one in enumerate(batch):
        block_table[row, : len(one.blocks)] = one.blocks
    no_tokens, no_rows = size - len(ids), size - len(batch)
    return {
        "input_ids": ids + [0] * no_tokens,
        "positions": [position for span in spans for position in span] + [0] * no_tokens,
        "slot_mapping": slots + [PAD_SLOT_ID] * no_tokens,
        "query_start_loc": starts + [len(ids)] * no_rows,  # rows of no tokens: attention wants it not to decrease
        "seq_lens": [span.stop for span in spans] + [0] * no_rows,
        "block_table": block_table,
    }


def prepare_inputs(
    pool: StagingPool, batch: Sequence[Scheduled], size: int, out: torch.Tensor, after: Any = None
) -> Upload:
    """Queue the upload of `batch` to where the graph of `size` reads it, behind the event `after`."""
    values = padded_inputs(batch, size)
    with pool.lease(INPUTS, tokens=size, bounds=size + 1, rows=size) as lease:
        for name, column in values.items():
            lease[name] = column
        return lease.upload(out=out, after=after)


def forward(inputs: Mapping[str, torch.Tensor], kv: torch.Tensor, sampled: torch.Tensor) -> None:
    """One step of the model: keeps its tokens in `kv`, leaves each row's next token in `sampled`.

    Indices are brought into range, so that wrong inputs give wrong results, and not the end of the CUDA context.
    """
    ids, positions = inputs["input_ids"].long(), inputs["positions"]
    ends, lengths = inputs["query_start_loc"][1:], inputs["seq_lens"]
    size = len(ids)
    within = functools.partial(torch.arange, device=ids.device)
    ids = torch.where(ids < 0, sampled[(-1 - ids).clamp(0, len(sampled) - 1)], ids)
    # A real kernel leaves out a slot of -1; here such a token goes to slot 0, in the null block.
    kv[inputs["slot_mapping"].clamp(0, len(kv) - 1)] = ids * 7 + positions
    token, past = within(size), within(MAX_BLOCKS * BLOCK)
    row = (token[:, None] >= ends).sum(1).clamp(max=size - 1)  # of each token
    slots = (inputs["block_table"][:, :, None] * BLOCK + within(BLOCK)).flatten(1)  # of each row's past
    context = kv[slots.clamp(0, len(kv) - 1)][row]
    seen = past < (lengths[row] - (ends[row] - 1 - token))[:, None]  # the last token of a row sees all of it
    scores = (context * (past + 1) * seen).sum(1) % VOCAB
    sampled[:size] = scores[(ends.long() - 1).clamp(0, size - 1)]


class ModelRunner:
    """Runs each step by the graph of the smallest size that holds its tokens; without CUDA by the function itself.

    A field's offset follows from the lengths. So each size has addresses of its own, and an upload finds them when its
    lengths are the padded ones. All sizes lie in the one allocation `out`: steps run one after the other. Uploads and
    steps are queued on the stream that is current, always the same one. Whoever reads `inputs` on another stream
    records an event behind it, and passes it to the next `execute` as `after`.

    `sizes`: numbers of tokens to capture graphs for. `blocks`: of the KV cache.
    """

    def __init__(self, pool: StagingPool, sizes: Sequence[int] = (1, 2, 4, 8, 16, 32), blocks: int = 256) -> None:
        self.pool = pool
        self.sizes = sorted(sizes)
        largest = self.sizes[-1]
        nbytes = INPUTS.nbytes(tokens=largest, bounds=largest + 1, rows=largest)
        self.out = torch.zeros(nbytes, dtype=torch.uint8, device=pool.device)
        self.kv = torch.zeros(blocks * BLOCK, dtype=torch.int64, device=pool.device)
        self.sampled = torch.zeros(largest, dtype=torch.int64, device=pool.device)
        self.inputs: dict[int, dict[str, torch.Tensor]] = {}
        """By size, what its graph reads."""
        self.replay = {size: self._capture(size) for size in self.sizes}

    def execute(self, batch: Sequence[Scheduled], after: Any = None) -> torch.Tensor:
        """Queue one step; returns the token sampled for each request, a view that the next step overwrites."""
        size = self.size_of(batch)
        prepare_inputs(self.pool, batch, size, self.out, after)
        self.replay[size]()
        return self.sampled[: len(batch)]

    def size_of(self, batch: Sequence[Scheduled]) -> int:
        """The smallest size that holds the tokens of `batch`; `ValueError` when none does."""
        tokens = sum(len(one.tokens) for one in batch)
        for size in self.sizes:
            if size >= tokens:
                return size
        raise ValueError(f"a step of {tokens} tokens: the largest graph takes {self.sizes[-1]}; schedule fewer")

    def _capture(self, size: int) -> Callable[[], None]:
        # Before the capture, in which an upload is refused: a batch of nothing but padding.
        self.inputs[size] = dict(prepare_inputs(self.pool, [], size, self.out))
        step = functools.partial(forward, self.inputs[size], self.kv, self.sampled)
        step()  # loads the kernels: not in the capture
        if self.out.device.type != "cuda":
            return step
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

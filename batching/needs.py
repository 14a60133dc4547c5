"""What the requests of a batch need of the sampler, as bits, so that it may leave out what none of them needs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

TOP_K_ALL = 1 << 30
"""The top_k that stands for the whole vocabulary, as in SGLang."""

GREEDY, SAMPLED, TOP_P, TOP_K, MIN_P = 1, 2, 4, 8, 16
"""Bits: takes the most likely token (top_k at most 1), or does not; has a top_p, a top_k or a min_p that excludes some.
A batch has the bits of all its requests; two batches that are merged have those of both."""


Flags = tuple[bool, bool, bool, bool, bool]
"""All are greedy, some are; top-p, top-k, min-p sampling is needed. A batch without requests is all greedy."""

FLAGS: tuple[Flags, ...] = tuple(
    (not needs & SAMPLED, bool(needs & GREEDY), bool(needs & TOP_P), bool(needs & TOP_K), bool(needs & MIN_P))
    for needs in range(32)
)
"""By the bits of a batch."""


def needs_of_row(top_p: float, top_k: int, min_p: float) -> int:
    """The bits of one request, of its values as they are stored; none is out of range."""
    return (
        (GREEDY if top_k <= 1 else SAMPLED)
        | (TOP_P if np.float32(top_p) < 1 else 0)
        | (TOP_K if top_k != TOP_K_ALL else 0)
        | (MIN_P if np.float32(min_p) > 0 else 0)
    )


def needs_of_rows(
    top_ps: npt.NDArray[np.float32], top_ks: npt.NDArray[np.int32], min_ps: npt.NDArray[np.float32]
) -> int:
    """The bits of all rows together; none without rows."""
    if not len(top_ks):
        return 0
    # The reductions themselves: the methods `min` and `max` cost twice as much for a few rows.
    least, most = int(np.minimum.reduce(top_ks)), int(np.maximum.reduce(top_ks))
    return (
        (GREEDY if least <= 1 else 0)
        | (SAMPLED if most > 1 else 0)
        | (TOP_P if float(np.minimum.reduce(top_ps)) < 1 else 0)
        | (TOP_K if least != TOP_K_ALL or most != TOP_K_ALL else 0)
        | (MIN_P if float(np.maximum.reduce(min_ps)) > 0 else 0)
    )

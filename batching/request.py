"""Requests, and the batch that a scheduler forms of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import attrs
import torch

from batching.params import SamplingParams

if TYPE_CHECKING:
    from batching.stage import Staged

ForwardMode = Literal["extend", "decode"]

KnownPrefix = tuple[Callable[[], "torch.Tensor | None"], int, int, torch.device]
"""A weak reference to a prefix tensor that was checked, its pointer, its length, and the device it was checked for."""


@attrs.define(eq=False)
class Request:
    """One request, as far as building its batch is concerned. Attribute names are SGLang's.

    Any other object with these names works as well, with any parameter object that has `temperature`, `top_p`,
    `top_k`, `min_p` and (if wanted) `sampling_seed`; its values are then read and checked for every batch.
    """

    rid: str
    """The request's id, for messages."""
    sampling_params: SamplingParams
    prefix_indices: torch.Tensor | None = attrs.field(default=None, repr=False)
    """KV indices of the cached prefix: int64, one-dimensional, contiguous, on the batch's device. None is empty."""
    extend_input_len: int = 0
    """Tokens to compute in this batch, behind the prefix."""
    req_pool_idx: int | None = None
    """The request's row in `req_to_token`."""
    known_prefix: KnownPrefix | None = attrs.field(default=None, init=False, repr=False)
    """What was found when `prefix_indices` was last checked: good while the request has that very tensor, which must
    not be resized in place or given other memory."""


@attrs.define(eq=False)
class ScheduleBatch:
    """The requests that one forward runs.

    `forward_mode` "extend" (prefill) is staged with the prefix pointers and lengths that `write_cache_indices` needs;
    "decode" needs the sampling columns alone. `deterministic` turns per-request seeds on.
    """

    reqs: list[Any] = attrs.field(repr=lambda reqs: f"<{len(reqs)} requests>")
    """`Request` objects, or others with the same attribute names."""
    device: torch.device = attrs.field(converter=torch.device)
    forward_mode: ForwardMode = attrs.field(default="extend", validator=attrs.validators.in_(("extend", "decode")))
    deterministic: bool = False
    staged: Staged | None = attrs.field(default=None, init=False, repr=False)
    """What was uploaded for this batch and is still to be taken by the other entry point; see `batching.stage`."""

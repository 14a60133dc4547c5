"""Destinations of fixed address: what was checked and viewed of a caller's `out`, for as long as that tensor lives."""

from __future__ import annotations

import weakref

import torch

from staging._prepared import MOST
from staging.layout import Plan

Landing = tuple[torch.Tensor, "dict[str, torch.Tensor]"]
"""The part of a destination that the copy fills, and its fields."""


class Destination:
    """One tensor that was found suitable, and its views by plan."""

    __slots__ = ("address", "nbytes", "ref", "views")

    def __init__(self, out: torch.Tensor, ref: weakref.ref[torch.Tensor]) -> None:
        self.ref = ref
        self.address = out.data_ptr()
        self.nbytes = out.numel()
        self.views: tuple[dict[Plan, Landing], dict[Plan, Landing]] = ({}, {})
        """By plan; those in the second were made in inference mode, and may not be written outside it."""


_in_inference_mode = torch.is_inference_mode_enabled


class Destinations:
    """The destinations of one pool, by tensor. Forgotten when the tensor is collected: nothing keeps its memory."""

    def __init__(self) -> None:
        self._known: dict[int, Destination] = {}

    def clear(self) -> None:
        """Forget all of them: a tensor that was given other memory in place would keep the old."""
        self._known.clear()

    def find(self, out: torch.Tensor, plan: Plan) -> Landing | None:
        """What was remembered for this tensor and plan; None when it has to be checked, since it is another one, or
        its memory, size or shape was changed."""
        known = self._known.get(id(out))
        if (
            known is None
            or known.ref() is not out
            or known.address != out.data_ptr()
            or known.nbytes != out.numel()
            or out.ndim != 1
            or not out.is_contiguous()
        ):
            return None
        return known.views[_in_inference_mode()].get(plan)

    def remember(self, out: torch.Tensor, plan: Plan) -> Landing:
        """A tensor that was checked for this plan."""
        number = id(out)
        known = self._known.get(number)
        if known is None or known.ref() is not out or known.address != out.data_ptr() or known.nbytes != out.numel():
            # May run anywhere, like any callback of the garbage collector: so it does no more than this.
            ref = weakref.ref(out, lambda ref, pop=self._known.pop: pop(number, None))  # type: ignore[misc]
            known = self._known[number] = Destination(out, ref)
        views = known.views[_in_inference_mode()]
        if len(views) >= MOST:
            views.clear()
        # Not a slice of `out` itself: torch's views keep the tensor they are taken from, and it would stay.
        landing = out.detach()[: plan.total].view(plan.cut.dtype)
        found = views[plan] = (landing, plan.cut.tensors(landing))
        return found

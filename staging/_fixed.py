"""Destinations of fixed address: the pool's own, and what was checked and viewed of a caller's tensor."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from staging._device import Device
from staging._prepared import MOST
from staging.errors import FieldError
from staging.layout import Layout, Plan

Landing = tuple[torch.Tensor, "dict[str, torch.Tensor]"]
"""The part of a destination that the copy fills, and its fields."""


class Destination:
    """Device memory of fixed address for uploads, `lease.upload(out=destination)`; made by `pool.destination(…)`.

    Uploads of any layout and lengths that fit begin at its first byte. Those of the same layout and lengths have their
    tensors at the same addresses each time, where a captured graph reads them; they are the very objects, unless more
    than 256 others came in between. The memory is zeros before the first upload, and lives as long as this or one of
    the tensors. It is for the pool that made it.
    """

    __slots__ = ("_device", "_landings", "_memory", "_streams", "_zeroed")

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        stream = device.current_stream()
        self._memory = device.empty(nbytes, torch.uint8).zero_()
        self._zeroed = device.new_event()
        device.record(self._zeroed, stream)
        self._streams = {stream}
        """That may write the memory: those behind the zeros, which the allocator knows of."""
        self._landings: dict[Plan, Landing] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the largest upload that fits."""
        return self._memory.nbytes

    def __repr__(self) -> str:
        return f"<Destination of {self.nbytes} bytes on {self._device.torch_device}>"

    def tensors(self, layout: Layout, /, **lengths: int) -> dict[str, torch.Tensor]:
        """The tensors by field name that an upload with these lengths fills: to capture a graph before the first one.

        Do not change their shapes. Raises `FieldError` for unsuitable lengths, and where they do not fit.
        """
        plan = layout.plan(lengths)
        return dict((self._landings.get(plan) or self._cut(plan, self._device))[1])

    def _landing(self, plan: Plan, device: Device, stream: Any) -> Landing:
        """For the pool of this device: where its copy on this stream goes to. `FieldError` where it cannot."""
        found = self._landings.get(plan)
        if found is None or device is not self._device:
            found = self._cut(plan, device)
        if plan.total and stream not in self._streams:  # no bytes, no copy: also while a graph is captured
            device.wait(stream, self._zeroed)
            device.record_stream(self._memory, stream)
            self._streams.add(stream)
        return found

    def _cut(self, plan: Plan, device: Device) -> Landing:
        if device is not self._device:
            raise FieldError(f"upload(out={self!r}): another pool made it; use that pool's own, or a tensor as `out`")
        if plan.total > self.nbytes:
            raise FieldError(
                f"upload(out={self!r}): the upload has {plan.total} bytes; make the destination for the largest lengths"
            )
        if len(self._landings) >= MOST:
            self._landings.clear()
        with torch.inference_mode(False):  # or they could not be written outside of it
            landing = self._memory[: plan.total].view(plan.cut.dtype)
            return self._landings.setdefault(plan, (landing, plan.cut.tensors(landing)))


class Known:
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
    """The callers' tensors that a pool uploads to. Forgotten when the tensor is collected: nothing keeps its memory."""

    def __init__(self) -> None:
        self._known: dict[int, Known] = {}

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
            known = self._known[number] = Known(out, ref)
        views = known.views[_in_inference_mode()]
        if len(views) >= MOST:
            views.clear()
        # Not a slice of `out` itself: torch's views keep the tensor they are taken from, and it would stay.
        landing = out.detach()[: plan.total].view(plan.cut.dtype)
        found = views[plan] = (landing, plan.cut.tensors(landing))
        return found

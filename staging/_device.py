"""The seam: all that the pool needs of a machine, and the plainest machine of all, the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import attrs
import numpy as np
import numpy.typing as npt
import torch

from staging.errors import PinningError, StagingError

Memory = Literal["auto", "pinned", "pageable"]


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@attrs.frozen(eq=False)
class HostBuffer:
    """Host memory for one slot."""

    tensor: torch.Tensor
    """uint8, one-dimensional, contiguous: the source of the copy."""
    array: npt.NDArray[np.uint8]
    """The same bytes for numpy, which fills them."""
    pinned: bool
    locked_bytes: int
    """Bytes the system really locked for it (allocators round up); 0 when pageable."""
    source: Callable[[torch.Tensor], Any] = _itself
    """Makes of a part of the tensor what `Device.copy` takes for it; once for each part."""


@runtime_checkable
class Device(Protocol):
    """What a device must offer. Streams and events are the device's own objects; the pool only hands them around."""

    torch_device: torch.device
    """Where uploads land, index resolved."""
    can_pin: bool
    """Whether pinned host memory makes a difference to its copies."""

    def host_buffer(self, nbytes: int, *, pinned: bool) -> HostBuffer:
        """Make host memory; `PinningError` when it cannot be had."""

    def empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A fresh one-dimensional device allocation, belonging to the current stream."""

    def current_stream(self) -> Any:
        """The stream that is current now on this device, for this thread."""

    def same_stream(self, stream: Any, current: Any) -> bool:
        """Whether `stream`, a stream of the caller's, is `current`, something that `current_stream` returned."""

    def lasting(self, stream: Any) -> bool:
        """Whether the current `stream` is never destroyed, so that it means the same for ever; False where in doubt."""

    def capturing(self, stream: Any) -> bool:
        """Whether a graph is being captured on `stream`, which is the current one."""

    def copy(self, landing: torch.Tensor, source: Any, stream: Any) -> None:
        """Queue the copy of `source`, of a slot, to `landing`, of its dtype and size, on the current `stream`."""

    def copy_on_device(
        self, rows: torch.Tensor, landing: torch.Tensor, runs: Sequence[tuple[int, int, int]], stream: Any
    ) -> None:
        """Queue, behind the copy to `landing`, device copies to `rows`: (from, to, how many) each, in bytes."""

    def new_event(self) -> Any:
        """An event that was never recorded."""

    def record(self, event: Any, stream: Any) -> None:
        """Record `event` on `stream`, behind all that is queued there."""

    def done(self, event: Any) -> bool:
        """Whether all work before the record has finished. Never waits. True for an event never recorded."""

    def wait(self, stream: Any, event: Any) -> None:
        """Make `stream` (None: the current one) wait for `event`; the host does not."""

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Tell the allocator that `stream` (None: the current one) uses `tensor`."""

    def broken(self) -> Exception | None:
        """The error that every further call would report, or None while the device is usable."""

    def now(self) -> int:
        """A monotonic clock, in nanoseconds."""

    def sleep(self, seconds: float) -> None:
        """Give the processor away for that long."""


_METHODS = {name for name in vars(Device) | Device.__annotations__ if not name.startswith("_")}


def open_device(device: str | int | torch.device | Device) -> Device:
    """The seam for a torch device; one that already is a seam is returned as it is.

    Raises `StagingError` for a kind of device that this library has never been tried on.
    """
    if not isinstance(device, (str, int, torch.device)):
        if isinstance(device, Device):
            return device
        missing = [name for name in sorted(_METHODS) if not hasattr(device, name)]
        raise StagingError(
            f"{device!r} is neither a torch device nor a staging device, which would need {', '.join(missing)} as "
            f"well; use 'cuda', 'cuda:1' or 'cpu'"
        )
    resolved = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if resolved.type == "cpu":
        return CpuDevice()
    if resolved.type == "cuda":
        from staging._cuda import CudaDevice  # only a pool for CUDA may touch CUDA

        return CudaDevice(resolved)
    raise StagingError(
        f"staging has never been tried on devices of kind {resolved.type!r}; it knows 'cuda' and 'cpu', and "
        f"staging.testing.SimulatedDevice shows what a new kind must offer"
    )


def pageable_buffer(nbytes: int) -> HostBuffer:
    """Ordinary host memory, zeroed."""
    try:
        # A plain tensor whatever the caller's default device or dtype is, and writable outside inference mode.
        with torch.inference_mode(False):
            tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=False)
            tensor.numpy()[:] = 0  # not torch.zeros: its threads do not survive a fork, and a child would hang
    except RuntimeError as error:
        raise PinningError(f"{nbytes} bytes of host (system) memory could not be had: {error}") from error
    return HostBuffer(tensor, tensor.numpy(), pinned=False, locked_bytes=0)


def copy_runs(rows: torch.Tensor, landing: torch.Tensor, runs: Sequence[tuple[int, int, int]]) -> None:
    """Copy (from, to, how many) bytes each from `landing` to `rows`, of one dtype, on the device of both."""
    size = landing.itemsize
    for start, to, nbytes in runs:
        part = landing[start // size : (start + nbytes) // size]
        (rows if nbytes == rows.nbytes else rows[to // size : (to + nbytes) // size]).copy_(part)


class CpuDevice:
    """The host as its own device: the copy is a memcpy, done when the call returns. Never touches CUDA."""

    torch_device = torch.device("cpu")
    can_pin = False

    def host_buffer(self, nbytes: int, *, pinned: bool) -> HostBuffer:
        return pageable_buffer(nbytes)  # nothing reads it asynchronously, so there is nothing to pin

    def empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype, device="cpu")

    def current_stream(self) -> None:
        return None

    def same_stream(self, stream: Any, current: Any) -> bool:
        return bool(stream == current)

    def lasting(self, stream: Any) -> bool:
        return True

    def capturing(self, stream: Any) -> bool:
        return False

    def copy(self, landing: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        # A copy, where .to("cpu") would alias the slot. By numpy: torch would share a large one among its threads, and
        # wake them up for it.
        landing.numpy()[:] = source.numpy()

    def copy_on_device(
        self, rows: torch.Tensor, landing: torch.Tensor, runs: Sequence[tuple[int, int, int]], stream: Any
    ) -> None:
        copy_runs(rows, landing, runs)

    def new_event(self) -> None:
        return None

    def record(self, event: Any, stream: Any) -> None:
        pass

    def done(self, event: Any) -> bool:
        return True

    def wait(self, stream: Any, event: Any) -> None:
        pass

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        pass

    def broken(self) -> Exception | None:
        return None

    now = staticmethod(time.perf_counter_ns)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

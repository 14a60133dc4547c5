"""The seam with CUDA, through torch: the one place that knows raw stream handles and pinned memory."""

from __future__ import annotations

import ctypes
import os
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from staging._device import HostBuffer, copy_runs
from staging.errors import PinningError, StagingError

_LEGACY_DEFAULT = 0
"""The raw handle of the stream that every device begins with."""
_LAST_DEFAULT = 2
"""0, 1 and 2 are names of the current device's default streams: the usual one, the legacy and the per-thread one."""
_HOST_TO_DEVICE, _DEVICE_TO_DEVICE = ctypes.c_int(1), ctypes.c_int(3)
"""Kinds of copies, of the runtime's `cudaMemcpyKind`."""


class Source:
    """Part of a slot's tensor, its address and size as the runtime takes them: made anew they cost 0.5 us a copy."""

    __slots__ = ("nbytes", "size", "start", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.nbytes = tensor.nbytes
        self.start = ctypes.c_void_p(tensor.data_ptr())
        self.size = ctypes.c_size_t(tensor.nbytes)


class CudaDevice:
    """One CUDA device. Made for the device's own index: nothing here depends on which device is current."""

    can_pin = True

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise StagingError(
                f"a pool for {device} needs CUDA, and this torch ({torch.__version__}) sees no CUDA device; use 'cpu'"
            )
        if torch.version.hip is not None:
            warnings.warn(
                "staging has never been tried on ROCm; the replay (`python -m batching replay`) checks every byte",
                stacklevel=4,
            )
        index = torch.cuda.current_device() if device.index is None else device.index
        if not 0 <= index < torch.cuda.device_count():
            raise StagingError(f"there is no device cuda:{index}; this process sees {torch.cuda.device_count()}")
        self.torch_device = torch.device("cuda", index)
        self._index = index
        # torch's own fast calls, each a microsecond cheaper than the public one that stands in where it is gone.
        self._raw_stream: Callable[[int], int] = _fast("_cuda_getCurrentRawStream", _raw_stream)
        self._current_device: Callable[[], int] = _fast("_cuda_getDevice", torch.cuda.current_device)
        self._is_capturing: Callable[[], bool] = _fast(
            "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
        )
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._lasting = {_LEGACY_DEFAULT: True}
        self._templates: dict[torch.dtype, torch.Tensor] = {}
        self._runtime = _runtime()
        self._alone = self._runtime is not None and torch.cuda.device_count() == 1
        """Whether the runtime may always be asked."""
        self._memcpy: Callable[..., int] = _unknown
        self._record: Callable[[int, int], int] = _unknown
        if self._runtime is not None:
            self._memcpy, self._record = self._runtime.cudaMemcpyAsync, self._runtime.cudaEventRecord

    def host_buffer(self, nbytes: int, *, pinned: bool) -> HostBuffer:
        try:
            # Plain, writable host memory whatever default device, dtype or inference mode the caller has set; the
            # device is made current because pinning needs a context, and should not open one on device 0.
            with torch.cuda.device(self._index), torch.inference_mode(False):
                tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
                array = tensor.numpy()
                array[:] = 0  # every page is touched now, not while serving
                really_pinned = pinned and tensor.is_pinned()
        except (RuntimeError, TypeError) as error:
            kind = "pinned" if pinned else "pageable"
            raise PinningError(f"{nbytes} bytes of {kind} host (system) memory could not be had: {error}") from error
        if tensor.device.type != "cpu":
            raise PinningError(f"pinned host memory was asked for, and came as a tensor on {tensor.device}")
        if pinned and not really_pinned:
            raise PinningError(f"{nbytes} bytes of host (system) memory were asked for as pinned and came unpinned")
        # torch's pinned allocator rounds each block up to a power of two; that is what is locked.
        return HostBuffer(tensor, array, pinned, 1 << (nbytes - 1).bit_length() if pinned else 0, Source)

    def empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        template = self._templates.get(dtype)
        if template is None:
            template = self._templates[dtype] = torch.empty(0, dtype=dtype, device=self.torch_device)
        return template.new_empty(elements)  # a tenth cheaper than to name dtype and device

    def current_stream(self) -> int:
        return self._raw_stream(self._index)

    def same_stream(self, stream: torch.cuda.Stream | int, current: int) -> bool:
        if isinstance(stream, int):
            return stream == current
        # Every device has a default stream, and all of these have the same handle.
        return stream.cuda_stream == current and stream.device_index == self._index

    def lasting(self, stream: int) -> bool:
        known = self._lasting.get(stream)
        if known is None:
            now = torch.cuda.current_stream(self._index)
            if now.cuda_stream != stream:
                return False  # nobody can say
            # torch's own streams are never destroyed; one of somebody else's has its handle for a number. Its handle is
            # not trusted any more, though a stream of torch's may get it.
            known = self._lasting[stream] = now.stream_id != stream
        return known

    def capturing(self, stream: int) -> bool:
        if stream == _LEGACY_DEFAULT:
            return False  # CUDA does not capture it
        if self._current_device() == self._index:
            return self._is_capturing()
        with torch.cuda.device(self._index):  # the question is always asked of the current device's stream
            return self._is_capturing()

    def copy(self, landing: torch.Tensor, source: Source, stream: int) -> None:
        if not (self._alone or self._is_direct(stream)):
            # torch queues a host-to-device copy on the current stream of the destination's device: `stream`.
            landing.copy_(source.tensor, non_blocking=True)
            return
        error = self._memcpy(landing.data_ptr(), source.start, source.size, _HOST_TO_DEVICE, stream)
        if error:
            raise self._failed("cudaMemcpyAsync", error)

    def copy_on_device(
        self, rows: torch.Tensor, landing: torch.Tensor, runs: Sequence[tuple[int, int, int]], stream: int
    ) -> None:
        if not (self._alone or self._is_direct(stream)):
            copy_runs(rows, landing, runs)
            return
        start, to = landing.data_ptr(), rows.data_ptr()
        for at, there, nbytes in runs:
            error = self._memcpy(to + there, start + at, nbytes, _DEVICE_TO_DEVICE, stream)
            if error:
                raise self._failed("cudaMemcpyAsync", error)

    def new_event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=False)  # type: ignore[no-untyped-call]

    def record(self, event: torch.cuda.Event, stream: int) -> None:
        handle = event.cuda_event
        if not handle or not (self._alone or self._is_direct(stream)):  # torch makes an event when it first records it
            event.record(self._streams.get(stream) or self._stream(stream))
            return
        error = self._record(handle, stream)
        if error:
            raise self._failed("cudaEventRecord", error)

    def done(self, event: torch.cuda.Event) -> bool:
        return event.query()  # type: ignore[no-untyped-call, no-any-return]

    def wait(self, stream: torch.cuda.Stream | int | None, event: torch.cuda.Event) -> None:
        self._stream(stream).wait_event(event)

    def record_stream(self, tensor: torch.Tensor, stream: torch.cuda.Stream | int | None) -> None:
        tensor.record_stream(self._stream(stream))

    def broken(self) -> Exception | None:
        # A sticky error comes back from every call into the runtime; this one changes nothing and waits for nothing.
        try:
            torch.cuda.mem_get_info(self._index)
        except RuntimeError as error:
            return error
        return None

    now = staticmethod(time.perf_counter_ns)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def _is_direct(self, stream: int) -> bool:
        """Whether the runtime may be asked on this stream, where there are several devices.

        Ours has to be current, or the call might open a context on another one; and the handles of default streams are
        those of whichever device is current for the runtime, which torch sets late.
        """
        return self._runtime is not None and stream > _LAST_DEFAULT and self._current_device() == self._index

    def _failed(self, call: str, error: int) -> RuntimeError:
        assert self._runtime is not None, "it has just been called"
        self._runtime.cudaGetLastError()  # or torch would report the error again, of its next kernel
        return RuntimeError(f"CUDA error: {self._runtime.cudaGetErrorString(error).decode()} ({call})")

    def _stream(self, stream: torch.cuda.Stream | int | None) -> torch.cuda.Stream:
        """A torch stream for a raw handle, made once for each: making one costs more than recording an event."""
        if stream is None:
            stream = self._raw_stream(self._index)
        if not isinstance(stream, int):
            return stream
        known = self._streams.get(stream)
        if known is None:
            if stream == 0:
                known = torch.cuda.default_stream(self._index)
            else:
                known = torch.cuda.ExternalStream(stream, device=self.torch_device)  # type: ignore[no-untyped-call]
            self._streams[stream] = known
        return known


def _runtime() -> ctypes.CDLL | None:
    """The CUDA runtime that torch has loaded, to queue copies and record events with; None where it cannot be found.

    torch's own copy does the same call, and costs 1 us more on an H200's host: it is dispatched for any two tensors,
    and notes the stream with the allocator of pinned memory, which then knows when the block may be used again. A slot
    does not go back to that allocator before its event has passed.
    """
    version = str(torch.version.cuda)
    suffix = "11.0" if version.startswith("11.") else version.partition(".")[0]
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{suffix}", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        runtime.cudaMemcpyAsync.argtypes = [
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p,
        ]  # fmt: skip
        runtime.cudaEventRecord.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        runtime.cudaGetErrorString.restype = ctypes.c_char_p
        runtime.cudaGetLastError.argtypes = []
    except (OSError, AttributeError):  # no such file is loaded, or no such mode on this system
        return None
    return runtime


def _unknown(*arguments: object) -> int:
    raise AssertionError("only a runtime that was found is called")


def _fast(name: str, public: Callable[..., Any]) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(torch._C, name, public)
    return found


def _raw_stream(index: int) -> int:
    """The raw handle of the stream that is current on this device."""
    return torch.cuda.current_stream(index).cuda_stream

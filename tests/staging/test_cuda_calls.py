"""What the seam with CUDA asks of whom, on paper: torch, or the runtime directly, and what becomes of an error."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from staging._cuda import CudaDevice, Source, _runtime

HOST_TO_DEVICE, DEVICE_TO_DEVICE = 1, 3


class Runtime:
    """A CUDA runtime that does nothing but remember, and fails where it is told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.status = 0

    def cudaMemcpyAsync(self, *arguments: Any) -> int:  # noqa: N802
        self.calls.append(("copy", *(getattr(argument, "value", argument) for argument in arguments)))
        return self.status

    def cudaEventRecord(self, event: int, stream: int) -> int:  # noqa: N802
        self.calls.append(("record", event, stream))
        return self.status

    def cudaGetLastError(self) -> int:  # noqa: N802
        self.calls.append(("last error",))
        return self.status

    def cudaGetErrorString(self, error: int) -> bytes:  # noqa: N802
        return f"status {error}".encode()


class Event:
    """An event of torch's. It has a handle once torch has recorded it."""

    def __init__(self) -> None:
        self.cuda_event = 0
        self.recorded: list[Any] = []

    def record(self, stream: Any) -> None:
        self.recorded.append(stream)
        self.cuda_event = 77


def seam(runtime: Runtime | None, current: int = 0, *, alone: bool = False) -> CudaDevice:
    """The seam of device 0 without a device, in a process where device `current` is current."""
    device = CudaDevice.__new__(CudaDevice)
    device._index = 0
    device._alone = alone
    device._current_device = lambda: current
    device._streams = {5: "stream 5"}  # type: ignore[dict-item]
    device._lasting = {0: True}
    device._runtime = runtime  # type: ignore[assignment]
    if runtime is not None:
        device._memcpy, device._record = runtime.cudaMemcpyAsync, runtime.cudaEventRecord
    return device


def test_copies_go_to_the_runtime_on_the_stream_of_the_upload() -> None:
    runtime = Runtime()
    device, source, landing, rows = seam(runtime), torch.arange(6.0), torch.zeros(6), torch.zeros(4)
    device.copy(landing, Source(source), 5)
    device.copy_on_device(rows, landing, ((0, 8, 4), (16, 0, 8)), 5)
    at, to = landing.data_ptr(), rows.data_ptr()
    assert runtime.calls == [
        ("copy", at, source.data_ptr(), 24, HOST_TO_DEVICE, 5),
        ("copy", to + 8, at, 4, DEVICE_TO_DEVICE, 5),
        ("copy", to, at + 16, 8, DEVICE_TO_DEVICE, 5),
    ]
    assert not landing.any()


@pytest.mark.parametrize(("runtime", "current"), [(None, 0), (Runtime(), 1)], ids=["no runtime", "another device"])
def test_without_a_runtime_or_with_another_device_current_torch_does_it(runtime: Runtime | None, current: int) -> None:
    """The runtime takes the handle 0 for the default stream of the current device, whatever the pool's device is."""
    device, event = seam(runtime, current), Event()
    source, landing, rows = torch.arange(6.0), torch.zeros(6), torch.zeros(2)
    event.cuda_event = 77
    device.copy(landing, Source(source), 5)
    device.copy_on_device(rows, landing, ((16, 0, 8),), 5)
    device.record(event, 5)  # type: ignore[arg-type]
    assert (landing.tolist(), rows.tolist(), event.recorded) == ([0, 1, 2, 3, 4, 5], [4, 5], ["stream 5"])
    assert runtime is None or runtime.calls == []


@pytest.mark.parametrize(("alone", "stream", "direct"), [(True, 0, True), (False, 0, False), (False, 2, False)])
def test_default_streams_are_the_runtimes_only_where_there_is_one_device(
    alone: bool, stream: int, direct: bool
) -> None:
    """Their handles mean the device that is current for the runtime, which need not be the one torch speaks of."""
    runtime, source, landing = Runtime(), torch.arange(6.0), torch.zeros(6)
    seam(runtime, alone=alone).copy(landing, Source(source), stream)
    assert (len(runtime.calls) == 1, bool(landing.any())) == (direct, not direct)


def test_an_event_is_recorded_by_torch_first_which_makes_it_and_then_by_the_runtime() -> None:
    runtime, event = Runtime(), Event()
    device = seam(runtime)
    device.record(event, 5)  # type: ignore[arg-type]
    device.record(event, 5)  # type: ignore[arg-type]
    assert (event.recorded, runtime.calls) == (["stream 5"], [("record", 77, 5)])


@pytest.mark.parametrize("call", ["copy", "copy on device", "record"])
def test_an_error_of_the_runtime_is_raised_and_taken_from_torch(call: str) -> None:
    """Left where it is, torch would report it of its next kernel, in somebody else's code."""
    runtime, tensor = Runtime(), torch.zeros(4)
    runtime.status = 719
    device = seam(runtime)
    acts = {
        "copy": lambda: device.copy(tensor, Source(tensor), 5),
        "copy on device": lambda: device.copy_on_device(tensor, tensor, ((0, 0, 4),), 5),
        "record": lambda: device.record(SimpleNamespace(cuda_event=77), 5),  # type: ignore[arg-type]
    }
    with pytest.raises(RuntimeError, match=r"^CUDA error: status 719 \(cuda(MemcpyAsync|EventRecord)\)$"):
        acts[call]()
    assert runtime.calls[-1] == ("last error",)


@pytest.mark.parametrize("version", [None, "11.8", "12.6", "99.1"])
def test_a_runtime_that_torch_has_not_loaded_is_not_looked_for_elsewhere(
    monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    asked: list[tuple[str, int]] = []

    def load(name: str, mode: int) -> None:
        asked.append((name, mode))
        raise OSError(name)

    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr("staging._cuda.ctypes.CDLL", load)
    assert _runtime() is None
    names = {None: "None", "11.8": "11.0", "12.6": "12", "99.1": "99"}
    assert asked == [(f"libcudart.so.{names[version]}", os.RTLD_NOW | os.RTLD_NOLOAD)]


@pytest.mark.parametrize(
    ("stream", "current", "lasting"),
    [
        (0, (7, 7), True),  # the default stream, whatever is current
        (7, (7, 35), True),  # one of torch's pool: it has a number of torch's
        (7, (7, 7), False),  # somebody else's: torch takes its handle for the number
        (7, (8, 35), False),  # not the current one, so nobody can say
        (2, (2, 2), False),  # the name of as many streams as there are threads
    ],
)
def test_only_streams_of_torchs_own_last(
    monkeypatch: pytest.MonkeyPatch, stream: int, current: tuple[int, int], lasting: bool
) -> None:
    """A stream that somebody destroys may leave its handle to another one."""
    now = SimpleNamespace(cuda_stream=current[0], stream_id=current[1])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: now)
    device = seam(None)
    assert device.lasting(stream) is lasting
    now.cuda_stream, now.stream_id = 99, 99
    assert device.lasting(stream) is lasting  # what was found is remembered
    if not lasting and current[0] == stream:
        now.cuda_stream, now.stream_id = stream, 35
        assert not device.lasting(stream)  # also where a stream of torch's gets the handle

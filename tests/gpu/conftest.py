"""For the tests that need a CUDA device: all are skipped without one, and a latch that holds a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def held_stream() -> Iterator[Callable[..., object]]:
    """`with held_stream():` keeps the current stream from moving on until the block ends, however long that takes."""
    import triton
    import triton.language as tl

    limit = 10_000_000  # polls of host memory, many seconds: the end of a hold that something on the host waits for

    @triton.jit
    def wait_for_flag(flag, polls, limit):
        seen = tl.load(flag, volatile=True)
        count = 0
        while (seen == 0) & (count < limit):
            seen = tl.load(flag, volatile=True)
            count += 1
        tl.store(polls, count)

    polls = torch.zeros(1, dtype=torch.int32, device="cuda")
    wait_for_flag[(1,)](torch.ones(1, dtype=torch.int32, pin_memory=True), polls, limit)  # compiled and loaded now
    torch.cuda.synchronize()

    @contextmanager
    def hold() -> Iterator[Callable[[], None]]:
        flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        wait_for_flag[(1,)](flag, polls, limit)

        def release() -> None:
            flag.numpy()[0] = 1

        try:
            yield release
        finally:
            release()
            torch.cuda.synchronize()
        assert int(polls) < limit, "something in the block waited for the device"

    yield hold
    torch.cuda.synchronize()


@pytest.fixture
def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the event guard out: every copy counts as done at once."""
    from staging._cuda import CudaDevice

    monkeypatch.setattr(CudaDevice, "done", lambda self, event: True)

"""SGLang's own code for the tests of this folder: all are skipped, with the reason, where it cannot be had.

What is not installed of SGLang's dependencies is a stub: listed in `real_sglang.STUBS`, each with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from real_sglang import DEVICE, Engine, load, plugged, why_not


@pytest.fixture(scope="session")
def srt() -> SimpleNamespace:
    """SGLang's names; the Triton kernels run on the CPU under Triton's interpreter, where there is no GPU."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    names = load()
    names.allocation.support_triton = lambda backend: backend == "triton"  # also on a CPU
    return names


@pytest.fixture
def engine(srt: SimpleNamespace) -> Engine:
    return Engine(DEVICE, rows=16, context=64)


@pytest.fixture
def feeder(srt: SimpleNamespace) -> Iterator[Any]:
    """The plugin is in SGLang while the test runs; this is what its hooks share."""
    with plugged() as feeder:
        yield feeder

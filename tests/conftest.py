"""Settings that must be made before any test imports triton; a simulated device, and pools that get closed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from staging import StagingPool
from staging.testing import SimulatedDevice

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples on every run, so that a change is judged by what it changed. `--hypothesis-profile explore` draws
# new ones each time: run that to look for faults, and turn what it finds into a test of its own.
settings.register_profile("repeatable", derandomize=True, database=None)
settings.register_profile("explore", derandomize=False)
settings.load_profile("repeatable")


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice()


@pytest.fixture
def pool_options() -> dict[str, Any]:
    """What `make_pool` gives every pool unless told otherwise; a folder may have its own."""
    return {"name": "ring"}


@pytest.fixture
def make_pool(pool_options: dict[str, Any]) -> Iterator[Callable[..., StagingPool]]:
    """Makes pools; at the end of the test all copies run, and each pool is closed."""
    made: list[tuple[Any, StagingPool]] = []

    def make(device: Any, **options: Any) -> StagingPool:
        pool = StagingPool(device, **{**pool_options, **options})
        made.append((device, pool))
        return pool

    yield make
    for device, pool in made:
        if isinstance(device, SimulatedDevice):
            device.finish_all()
        pool.close(timeout=0)

"""The pools that the tests of this folder run with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from batch_builders import KINDS, open_pool

from staging import StagingPool
from staging.testing import SimulatedDevice


@pytest.fixture
def pool(device: SimulatedDevice) -> Iterator[StagingPool]:
    """A pool on `device`, which the test may watch and fail."""
    pool = StagingPool(device, name="ring", slots=2, slot_bytes=4096)
    yield pool
    device.finish_all()
    pool.close(timeout=0)


@pytest.fixture(params=KINDS)
def any_pool(request: pytest.FixtureRequest) -> Iterator[StagingPool | None]:
    """No pool, a pool for the CPU, and a pool on a simulated device, in turn."""
    with open_pool(request.param) as pool:
        yield pool

"""Pools of this folder are named 'case' and are small."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def pool_options() -> dict[str, Any]:
    return {"name": "case", "slot_bytes": 4096}

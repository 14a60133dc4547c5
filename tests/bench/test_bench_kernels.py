"""The two kernels under Triton's interpreter: the same table, bit for bit."""

from __future__ import annotations

import pytest
import torch

from batching.bench.kernels import SHAPES, Case, Shape, variants
from staging import StagingPool

pytest.importorskip("triton", reason="triton is for Linux only")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled for it and cannot take CPU tensors", allow_module_level=True)


@pytest.mark.parametrize(
    "shape", [Shape((0,), 3), Shape((1030,), 600), Shape((5, 0, 513), 4), Shape((3,) * 17, 1)], ids=lambda s: s.label
)
def test_both_kernels_write_the_expected_table(shape):
    """Empty prefixes, several blocks, many rows."""
    with StagingPool("cpu") as pool:
        case = Case(shape, pool)
        assert set(case.ways) == {"serial", "ours"}
        assert case.differences() == []


def test_a_kernel_that_writes_another_table_is_named():
    """One entry too many, in either."""
    with StagingPool("cpu") as pool:
        case = Case(Shape((5, 2), 3), pool, width=10)
        honest = case.ways["serial"]

        def wrong(table: torch.Tensor) -> None:
            honest(table)
            table[1, 9] = 4

        case.ways["serial"] = wrong
        (line,) = case.differences()
        assert line == "serial kernel: entry (1, 9) is 4, not -1"


def test_the_shapes_are_those_that_are_spoken_of():
    """Labels are what the claims look up."""
    labels = [shape.label for shape in SHAPES]
    assert labels[0] == "1 x 131072 + 64"
    assert len(set(labels)) == len(labels) == 8
    assert len(SHAPES[-1].prefixes) == 2048


def test_variants_that_cannot_be_counted_are_none():
    """Under the interpreter nothing is compiled."""
    assert variants() in (None, 0)

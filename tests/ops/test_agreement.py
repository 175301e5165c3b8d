"""The CPU backends agree with float64 on random calls, hidden NaN and infinity included."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.agreement import WAYS, random_case, worst_error
from reluformer.ops.backends.cpu.native import library

BOUNDS = {"float64": (1e-11, 1e-7), "float32": (1e-4, 2e-2), "bfloat16": (0.03, 0.05)}
"""Largest errors of output and gradients, relative to the largest exact number."""


@pytest.mark.parametrize("way", WAYS)
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 10**6))
def test_agreement(way: str, compiled: library.Kernels, seed: int) -> None:
    case = random_case(seed)
    output, gradients = worst_error(case, way)
    bounds = BOUNDS[case.dtype]
    assert output <= bounds[0] and gradients <= bounds[1], (case, output, gradients)

"""The backends agree with float64 on random calls, hidden NaN and infinity included."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.agreement import (
    CPU_WAYS,
    VARIANTS,
    Case,
    Errors,
    random_case,
    random_gpu_case,
    results_of,
    summary,
    table,
    worst_error,
)
from reluformer.ops.backends.cpu.native import library

BOUNDS = {
    "float64": (1e-11, 1e-7),
    "float32": (1e-4, 2e-2),
    "bfloat16": (0.02, 0.03),
    "float16": (3e-3, 1e-2),
}
"""Largest errors of output and gradients, relative to the largest exact number."""


def _check(case: Case, errors: Errors) -> None:
    bounds = BOUNDS[case.dtype]
    assert errors[0] <= bounds[0] and max(errors[1:]) <= bounds[1], (case, errors)


@pytest.mark.parametrize("way", CPU_WAYS)
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 10**6))
def test_agreement(way: str, compiled: library.Kernels, seed: int) -> None:
    case = random_case(seed)
    _check(case, worst_error(case, way))


# Row-normalised rows of few keys, and learned gammas and thresholds.
@pytest.mark.parametrize("seed", [3, 728, 1445, 1601, 2952, 4873])
def test_gradients_whose_terms_cancel(compiled: library.Kernels, seed: int) -> None:
    case = random_case(seed)
    assert case.dtype == "bfloat16"
    _check(case, worst_error(case, "native"))


# The interpreter multiplies no bfloat16. The last four cases hide NaN or infinity.
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off")
@pytest.mark.parametrize("seed", [0, 6, 48, 94, 167, 186])
def test_agreement_of_portable_kernels(seed: int) -> None:
    pytest.importorskip("triton")
    case = random_gpu_case(seed, longest=24)
    _check(case, worst_error(case, "portable"))


def test_a_variant_fixes_what_a_kernel_is_compiled_for() -> None:
    first, second = random_gpu_case(3), random_gpu_case(3 + VARIANTS)
    assert first.seed != second.seed and first.shape != second.shape
    assert (first.dtype, first.options, first.is_learned) == (
        second.dtype, second.options, second.is_learned,
    )  # fmt: skip
    # Query heads per key head, D and Dv.
    assert (first.shape[2], *first.shape[5:]) == (second.shape[2], *second.shape[5:])


def test_a_failure_is_listed_and_hides_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(case: Case, way: str, device: str) -> Errors:
        if way == "torch":
            raise ValueError("no such kernel")
        return 0.25, 0.5, 0.0

    monkeypatch.setattr("benchmarks.agreement.worst_error", failing)
    result = summary(results_of(("cpu", [0, 1])))
    assert {row["way"] for row in result["rows"]} == {"reference", "native"}
    assert len(result["failures"]) == 2 and "no such kernel" in result["failures"][0]
    text = table(result["rows"], CPU_WAYS)
    assert "2.5e-01 | 5.0e-01 | 0.0e+00" in text and "| - | - | - | - |" in text

"""The sanitizer benchmark covers the kernels and cases that it names."""

import pytest

pytest.importorskip("triton")

from benchmarks import sanitize


def test_kernels_of_all_passes_are_named() -> None:
    names = sanitize.kernel_names()
    assert len(set(names)) == len(names)
    assert {"canary_kernel", "forward_kernel", "decode_kernel", "append_kernel"} <= set(names)


def test_the_dense_calls_contain_all_selected_cases() -> None:
    assert {case.name for case in sanitize.DENSE} >= set(sanitize.SMALL)

"""The sanitizer benchmark names the kernels of the package."""

import ast
from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks import sanitize

KERNELS = Path(sanitize.ROOT) / "reluformer" / "ops" / "backends" / "triton"


def test_every_kernel_of_the_package_is_named() -> None:
    # A launched kernel has a name that ends in `_kernel`; device functions have other names.
    defined = {
        node.name.removesuffix("_kernel")
        for path in KERNELS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }
    assert {*defined, "canary"} == set(sanitize.KERNELS)


def test_the_dense_calls_contain_all_selected_cases() -> None:
    assert {case.name for case in sanitize.DENSE} >= set(sanitize.SMALL)

"""Every benchmark imports, and those that run in Triton's interpreter finish their quick run."""

import importlib
import json
import re
from pathlib import Path

import pytest
import torch

import benchmarks

pytest.importorskip("triton")

FOLDER = Path(__file__).parents[2] / "benchmarks"
# Parts of benchmarks, which are no benchmarks themselves.
MODULES = (
    "__init__",
    "ctranslate2_model",
    "end_to_end_model",
    "language_model_build",
    "language_model_speed",
    "whole_steps",
)
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in MODULES)


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_imports_and_has_a_main_function(name: str) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    assert callable(module.main)
    assert f"benchmarks.{name}" in module.__doc__ or f"benchmarks/{name}.py" in module.__doc__


def test_the_package_lists_every_benchmark() -> None:
    listed = set(re.findall(r"\w+", benchmarks.__doc__ or ""))
    assert {*NAMES, "training"} <= listed


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the quick runs are for the interpreter")
@pytest.mark.parametrize(
    "name",
    [
        "backward",
        pytest.param("decode", marks=pytest.mark.release),
        pytest.param("end_to_end", marks=pytest.mark.release),
        "feedforward",
        "kernel_choices",
    ],
)
def test_a_quick_run_measures_something(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    out = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", [name, "--quick", "--out", str(out)])
    module.main()
    report = json.loads(out.read_text(encoding="utf-8"))
    rows = report["rows"] if isinstance(report, dict) else report
    assert rows and not any("failed" in row or "refused" in row for row in rows)
    assert "failures" not in report

"""Importing the package is light: each name loads the modules it needs and no others."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import reluformer

ROOT = Path(reluformer.__file__).parents[1]
OPTIONAL = {"transformers", "matplotlib", "triton", "sacrebleu", "typer", "tokenizers", "yaml"}

SCRIPT = """
import json, sys
before = set(sys.modules)
{statement}
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def imported(statement: str) -> set[str]:
    """Modules that a statement imports in a fresh process."""
    command = [sys.executable, "-c", SCRIPT.format(statement=statement)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_the_package_alone_imports_neither_torch_nor_its_own_modules() -> None:
    modules = imported("import reluformer")
    assert {name for name in modules if name.startswith("reluformer")} == {"reluformer"}
    # Nothing can handle an interruption before the command line is imported.
    assert not modules & {"torch", "numpy", "typing", *OPTIONAL}


@pytest.mark.parametrize(
    ("name", "unneeded"),
    [
        ("relu_attention", {"model", "data", "config", "train", "translation", "bench"}),
        ("ReLUFormer", {"data", "train", "translation", "bench", "evaluation"}),
    ],
)
def test_a_name_imports_no_optional_package_and_no_higher_layer(
    name: str, unneeded: set[str]
) -> None:
    modules = imported(f"from reluformer import {name}")
    # Torch itself imports some of them if they are installed.
    from_torch = imported("import torch, torch.distributed")
    added = modules - from_torch
    assert "reluformer.ops.api" in added
    assert not {module.partition(".")[0] for module in added} & OPTIONAL
    assert not added & {f"reluformer.{package}" for package in unneeded}


def test_studies_are_listed_without_torch() -> None:
    modules = imported(
        "import contextlib, io\n"
        "from reluformer.cli import app\n"
        "with contextlib.redirect_stdout(io.StringIO()) as text:\n"
        "    app(['study', '--list'], standalone_mode=False)\n"
        "assert text.getvalue().startswith('theory ')"
    )
    assert "torch" not in modules


def test_training_imports_fsdp_only_where_it_is_used() -> None:
    assert "torch.distributed.fsdp" not in imported("import reluformer.train")

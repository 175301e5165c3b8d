"""Importing the package is light: torch, and nothing that only some users need."""

import json
import subprocess
import sys
from pathlib import Path

import reluformer

ROOT = Path(reluformer.__file__).parents[1]
HEAVY = {"transformers", "matplotlib", "triton", "sacrebleu", "typer", "tokenizers", "yaml"}

# Processor time, not the clock: a busy machine must not fail the test.
IMPORT = """
import json, sys, time
import torch
before, start = set(sys.modules), time.process_time()
import reluformer
seconds, new = time.process_time() - start, set(sys.modules) - before
print(json.dumps([seconds, sorted(name.partition(".")[0] for name in new)]))
"""


def _import() -> tuple[float, set[str]]:
    """Seconds that the package takes beyond torch in a fresh process, and what it brings along."""
    command = [sys.executable, "-c", IMPORT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    seconds, modules = json.loads(done.stdout)
    return seconds, set(modules)


def test_the_package_imports_quickly_and_nothing_heavy() -> None:
    seconds, modules = _import()
    assert "reluformer" in modules
    assert not modules & HEAVY
    for _ in range(4):
        if seconds < 0.3:
            break
        seconds = min(seconds, _import()[0])
    assert seconds < 0.3

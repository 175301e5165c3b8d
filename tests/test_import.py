"""Importing the package is light: torch, and nothing that only some users need."""

import subprocess
import sys
from pathlib import Path

import reluformer

ROOT = Path(reluformer.__file__).parents[1]
HEAVY = ("transformers", "matplotlib", "triton", "sacrebleu", "typer", "tokenizers", "yaml")

LIST = f"""
import sys
import torch
before = set(sys.modules)
import reluformer
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(*sorted(new & set({HEAVY!r})))
"""

CLOCK = """
import time
import torch
start = time.process_time()
import reluformer
print(time.process_time() - start)
"""


def _run(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_package_imports_nothing_heavy() -> None:
    assert _run(LIST) == ""


def test_the_package_imports_in_under_a_third_of_a_second_beyond_torch() -> None:
    # Processor time of the quickest of a few: a busy machine must not fail the test.
    limit, best = 0.3, float("inf")
    for _ in range(5):
        best = min(best, float(_run(CLOCK)))
        if best < limit:
            return
    raise AssertionError(f"import reluformer takes {best:.2f} s beyond import torch")

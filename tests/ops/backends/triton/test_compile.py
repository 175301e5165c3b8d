"""The real path without a GPU: compiled for Hopper (no spills, packed rectifier, TMA loads), and
launched on a driver that writes down what it gets."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Before the loop over the ragged end, in the loop with logarithms, which one program in eight runs,
# and around or in the loop over tiles that causality cuts; the loops over whole tiles keep all in
# registers.
SPILLS = {
    "forward_kernel width 128, causal False, power 4, divided": 8,
    "forward_kernel width 128, causal False, sampled entropies": 19,
    "specialised_kernel width 64, causal True, plain": 4,
    "specialised_kernel width 64, packed": 4,
    "specialised_keys_kernel width 128, causal False, power 8": 6,
    "specialised_keys_kernel width 128, causal True": 14,
    "specialised_keys_kernel width 128, causal True, scores": 7,
}


def _script(name: str) -> Any:
    """Last line of a script's output; a process of its own, for here Triton is an interpreter."""
    path = Path(__file__).with_name(name)
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_hopper_code() -> None:
    kernels = _script("compile_for_hopper.py")
    assert len(kernels) == 64
    for name, code in kernels.items():
        assert code["spills"] <= SPILLS.get(name, 0), name
        if name.startswith("decode"):
            assert code["products"] + code["narrow products"] > 0, name
            # The keys of later tiles are under way while a tile is multiplied.
            assert code["asynchronous loads"] > 0, name
            assert code["packed rectifiers"] > 0, name
            assert code["shared"] <= 227 * 1024, name
            continue
        assert code["products"] > 0, name
        assert code.get("unguarded", 0) == code.get("unmade", 0) == 0, name
        # Products in flight where the assembler cannot follow them would wait for each other.
        assert code["waits for products"] <= code["products"] / 3, name
        assert code["tensor memory loads"] > 0, name
        assert code["shared"] <= 227 * 1024, name
        if "queries" not in name and "power" not in name:
            # One instruction rectifies and packs; a separate maximum would show up per score.
            assert code["packed rectifiers"] > 0, name


@pytest.mark.slow
def test_prepared_launches_pass_what_triton_passes() -> None:
    found = _script("launch_twice.py")
    assert found == {"launches": 17, "different": []}

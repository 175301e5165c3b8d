"""The compiled path without a GPU: code for Hopper (no spills, packed rectifier, TMA loads), and
launches on a fake driver that records its arguments."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Spilled registers that are allowed: before the loop over the last, partial tile, in the loop with
# logarithms, which one program in eight runs, and around or in the loop over tiles at the causal
# edge. The loops over whole tiles do not spill.
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
    """Last line of the output of a script, run without Triton's interpreter."""
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
            # The keys of later tiles are loaded while a tile is multiplied.
            assert code["asynchronous loads"] > 0, name
            assert code["packed rectifiers"] > 0, name
            assert code["shared"] <= 227 * 1024, name
            continue
        assert code["products"] > 0, name
        assert code.get("unguarded", 0) == code.get("unmade", 0) == 0, name
        # The assembler serialises products that it cannot prove independent.
        assert code["waits for products"] <= code["products"] / 3, name
        assert code["tensor memory loads"] > 0, name
        assert code["shared"] <= 227 * 1024, name
        if "queries" not in name and "dq" not in name and "power" not in name:
            # One instruction rectifies and packs two scores.
            assert code["packed rectifiers"] > 0, name


@pytest.mark.slow
def test_direct_launches_pass_the_arguments_that_triton_passes() -> None:
    result = _script("launch_twice.py")
    assert result["launches"] > 10 and result["different"] == []
    first, _, third = result["encoded"]
    # Inputs keep their addresses, and so their tensor maps.
    assert third < first
    assert len(result["hooked"]) == 1, "a launch hook is called"

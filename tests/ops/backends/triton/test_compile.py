"""The compiled path without a GPU: code for Hopper (no spills, packed rectifier, TMA loads), and
launches on a fake driver that records its arguments."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reluformer.ops.backends.triton import versions

PORTABLE = {"forward_kernel", "dkv_kernel", "dq_kernel", "decode_kernel"}
KERNELS = PORTABLE | {
    "one_pass_kernel",
    "append_kernel",
    "hopper_forward_kernel",
    "hopper_dkv_kernel",
    "hopper_dq_kernel",
    "hopper_dq_product_kernel",
}
# Calls with a second loop over key or query tiles: masked tiles, or sums of w log w.
TWO_LOOPS = ("causal True", "packed", "power", "as in models", "sampled entropies")


# Measured with Triton 3.9: 33, 25, 93 and 36 stores, and in kernels that it runs on request only
# 167, 305, 45, 177, 107, 1 and 118.
_SPILLS_WITH_NEWER_TRITON = {
    "hopper_forward_kernel width 64": 36,
    "hopper_dkv_kernel width 64": 28,
    "hopper_dkv_kernel width 128": 96,
    "hopper_dq_kernel width 128": 40,
    "hopper_forward_kernel three consumers": 176,
    "hopper_forward_kernel late, width 128": 312,
    "hopper_dkv_kernel wide": 48,
    "hopper_dq_kernel wide": 184,
    "hopper_dq_kernel three": 112,
    "one_pass_kernel length 64": 4,
    "one_pass_kernel length 128": 124,
}


def _spill_limit(name: str) -> int:
    """Number of spill stores that a kernel may have.

    Decoding and kernels with a single loop do not spill. A second loop, which most tiles skip, may
    take a tenth of the 240 registers of a thread from the code around it. The widest kernel spills
    more: 48 stores at power 8 with Triton 3.6, and 64 where it stores score gradients. Triton 3.9
    calls its assembler with `--regAllocOptLevel=2`, which makes them up to 93. The forward kernel
    of width 64 holds the weights of two key tiles above power 1. Its code for three consumers is
    three copies that have 160 registers each: it stores scalars around the loops. At width 128,
    tiles of 128 keys leave no register to spare: the first tile of each row of tiles spills. So do
    the largest tiles of the kernel that computes all gradients, and wide tiles of the backward
    kernels of width 64 outside their unmasked loops.
    """
    if versions.installed() > (3, 6):
        for kernel, limit in _SPILLS_WITH_NEWER_TRITON.items():
            if name.startswith(kernel):
                return limit
    if name.startswith("one_pass"):
        return 64 if "length 128" in name else 0
    if "three consumers" in name:
        return 0 if "causal False" in name else 60
    if name.startswith("hopper_forward_kernel late"):
        return 64 if "width 128" in name else 0
    if name.startswith("hopper_forward_kernel width 64") and "as in models" in name:
        return 28
    if name.startswith("hopper_dq_kernel wide"):
        return 64 if "causal True" in name else 36
    if name.startswith("hopper_dkv_kernel width 128") and "causal True, power" in name:
        return 68 if "stored" in name else 52
    if name.startswith(("decode", "append")) or not any(word in name for word in TWO_LOOPS):
        return 0
    return 24


def _script(name: str, *arguments: str) -> Any:
    """Last line of the output of a script, run without Triton's interpreter."""
    path = Path(__file__).with_name(name)
    done = subprocess.run(
        [sys.executable, str(path), *arguments],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_hopper_code() -> None:
    kernels = _script("compile_for_hopper.py")
    assert {name.split()[0] for name in kernels} == KERNELS
    for name, code in kernels.items():
        assert code["spills"] <= _spill_limit(name), name
        if name.startswith("append"):
            # It copies rows: nothing to multiply.
            continue
        if name.startswith("decode"):
            assert code["products"] + code["narrow products"] > 0, name
            # The keys of later tiles are loaded while a tile is multiplied.
            assert code["asynchronous loads"] > 0, name
            assert code["packed rectifiers"] > 0, name
            assert code["shared"] <= 227 * 1024, name
            continue
        if name.startswith("one_pass"):
            assert code["products"] + code["narrow products"] > 0, name
            assert code["shared"] <= 160 * 1024, name
            continue
        assert code["products"] > 0, name
        assert code.get("unguarded", 0) == code.get("unmade", 0) == 0, name
        # The assembler serialises products that it cannot prove independent.
        assert code["waits for products"] <= code["products"] / 3, name
        assert code["tensor memory loads"] > 0, name
        assert code["shared"] <= 227 * 1024, name
        if "dq" not in name and "power" not in name:
            # One instruction rectifies and packs two scores.
            assert code["packed rectifiers"] > 0, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "widths", "dtype"),
    # An A100 and an RTX 4090, which has less shared memory.
    [
        pytest.param("80", "128", "bfloat16", marks=pytest.mark.release),
        ("89", "128", "bfloat16"),
        pytest.param("80", "16,64,256", "bfloat16", marks=pytest.mark.release),
        pytest.param("89", "16,64,256", "bfloat16", marks=pytest.mark.release),
        pytest.param("80", "16,64,128,256", "float32", marks=pytest.mark.release),
        pytest.param("89", "16,64,128,256", "float32", marks=pytest.mark.release),
    ],
)
def test_code_for_older_gpus(capability: str, widths: str, dtype: str) -> None:
    kernels = _script("compile_for_ampere.py", capability, widths, dtype)
    assert {name.split()[0] for name in kernels} == PORTABLE
    for name, code in kernels.items():
        assert code["shared"] <= code["available"], name
        # A multiprocessor has 65,536 registers.
        assert code["registers"] * code["threads"] <= 65536, name
        assert code["stack"] <= 512, name


@pytest.mark.slow
@pytest.mark.skipif(
    not versions.has_known_launcher(), reason="this Triton version has another launcher"
)
def test_direct_launches_pass_the_arguments_that_triton_passes() -> None:
    result = _script("launch_twice.py")
    assert result["launches"] > 10 and result["different"] == []
    first, _, third = result["encoded"]
    # Inputs keep their addresses, and so their tensor maps.
    assert third < first
    assert len(result["hooked"]) == 1, "a launch hook is called"

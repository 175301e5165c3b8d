"""What is run under compute-sanitizer, and how its findings are read; the tool needs a GPU."""

import re
from pathlib import Path

import torch

from benchmarks import sanitize
from reluformer.ops.backends.triton import op
from tests.ops.rectified import arguments


def test_every_kernel_is_watched_and_every_case_is_there() -> None:
    files = Path(op.__file__).parent.rglob("*.py")
    kernels = re.findall(r"^def (\w+)_kernel\(", "\n".join(f.read_text() for f in files), re.M)
    assert len(kernels) > 5 and {*kernels, "canary"} == set(sanitize.KERNELS)
    assert [str(case) for case in sanitize.DENSE[: len(sanitize.SMALL)]] == [*sanitize.SMALL]


def test_tensors_are_no_longer_than_they_look() -> None:
    loose = arguments(sanitize.DENSE[0], torch.float32, "cpu")
    strides = {name: leaf.stride() for name, leaf in loose.leaves.items()}
    tight = sanitize.exact(loose)
    for name, leaf in tight.leaves.items():
        assert leaf.untyped_storage().nbytes() == leaf.nbytes and leaf.stride() == strides[name]
    assert tight.options["gamma"] is tight.leaves["gamma"]


def test_findings_make_one_line() -> None:
    clean = sanitize.verdict("memcheck", 0, "77 outputs\n===== ERROR SUMMARY: 0 errors\n", 3.0)
    assert clean == "memcheck: clean in 3 s: ERROR SUMMARY: 0 errors"
    found = sanitize.verdict("racecheck", sanitize.FOUND_SOMETHING, "== RACECHECK SUMMARY: 1\n", 3)
    assert "FOUND SOMETHING" in found
    assert "FAILED (1)" in sanitize.verdict("memcheck", 1, "", 3.0)

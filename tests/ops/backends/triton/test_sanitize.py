"""The calls that run under compute-sanitizer, and the parsing of its reports."""

import torch

from benchmarks import sanitize
from tests.ops.rectified import arguments


def test_every_kernel_and_every_case_is_checked() -> None:
    names = sanitize.kernel_names()
    assert names[0] == "canary_kernel" and len(names) == len(set(names))
    assert {"forward_kernel", "dkv_kernel", "dq_kernel", "hopper_forward_kernel"} < set(names)
    assert [str(case) for case in sanitize.DENSE[: len(sanitize.SMALL)]] == [*sanitize.SMALL]


def test_tensors_have_no_slack_memory() -> None:
    loose = arguments(sanitize.DENSE[0], torch.float32, "cpu")
    strides = {name: leaf.stride() for name, leaf in loose.leaves.items()}
    tight = sanitize.exact(loose)
    for name, leaf in tight.leaves.items():
        assert leaf.untyped_storage().nbytes() == leaf.nbytes and leaf.stride() == strides[name]
    assert tight.options["gamma"] is tight.leaves["gamma"]


def test_a_report_is_one_line() -> None:
    clean = sanitize.verdict("memcheck", 0, "77 outputs\n===== ERROR SUMMARY: 0 errors\n", 3.0)
    assert clean == "memcheck: clean in 3 s: ERROR SUMMARY: 0 errors"
    found = sanitize.verdict("racecheck", sanitize.ERROR_STATUS, "== RACECHECK SUMMARY: 1\n", 3)
    assert "REPORTED ERRORS" in found
    assert "FAILED (1)" in sanitize.verdict("memcheck", 1, "", 3.0)

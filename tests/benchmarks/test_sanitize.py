"""The sanitizer benchmark: kernels and calls that it covers, and what it reads from reports."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import sanitize, sanitize_calls
from benchmarks.sanitize import ERROR_STATUS, TIME_UP, Done
from reluformer.ops.backends.triton import backward_launches, launch, run_forward
from reluformer.ops.backends.triton.hopper import launch_forward
from tests.ops.rectified import arguments

REPORT = """========= Invalid __global__ write of size 4 bytes
=========     at dq_kernel+0x120 in backward_dq.py:150
=========     by thread (3,0,0) in block (0,0,0)
========= ERROR SUMMARY: 1 error
"""


def test_kernels_of_all_passes_are_named() -> None:
    names = sanitize.kernel_names()
    assert len(set(names)) == len(names)
    hopper = {"hopper_forward_kernel", "hopper_dkv_kernel", "hopper_dq_kernel"}
    portable = {"forward_kernel", "dkv_kernel", "dq_kernel", "decode_kernel", "append_kernel"}
    assert hopper | portable < set(names)
    command = sanitize.prefix("tool", "memcheck")
    assert "kns=canary_kernel" in command and "kns=dq_kernel" in command
    assert "--kernel-name" not in sanitize.prefix("tool", "initcheck")


def test_the_calls_contain_all_selected_cases_and_all_powers() -> None:
    dense = [str(case) for case in sanitize_calls.DENSE]
    assert dense[: len(sanitize_calls.SMALL)] == [*sanitize_calls.SMALL]
    loops = {(case.power, case.width) for case in sanitize_calls.HOPPER}
    assert loops == {(power, width) for power in (1, 2, 4, 8) for width in (64, 128)}
    everything = sanitize_calls.jobs(True, "cpu", torch.float32)
    portable = sanitize_calls.jobs(False, "cpu", torch.float32)
    requested = len(sanitize_calls.HOPPER) + len(sanitize_calls.REQUESTED)
    # One kernel of a requested choice is portable.
    assert len(everything) - len(portable) == requested - 1
    shares = [everything[share :: sanitize_calls.SHARES] for share in range(sanitize_calls.SHARES)]
    assert all(shares) and sum(map(len, shares)) == len(everything)


def test_the_calls_launch_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: set[str] = set()

    def record(self: Any, *arguments: Any) -> None:
        launched.add(self.kernel.fn.__name__)

    for kind in (launch.Launch, launch.SizedLaunch):
        monkeypatch.setattr(kind, "__call__", record)
    for module in (launch_forward, backward_launches, run_forward):
        monkeypatch.setattr(module, "use_descriptors", lambda tensors: True)
    decoding = {"decode_kernel", "combine_kernel", "append_kernel"}
    for job in sanitize_calls.jobs(True, "cpu", torch.bfloat16):
        # Decoding fills a cache on the GPU.
        if job.func is not sanitize_calls._dropout_and_decoding:
            job()
    assert launched | decoding == set(sanitize.kernel_names())


def test_tensors_have_no_slack_memory() -> None:
    loose = arguments(sanitize_calls.DENSE[0], torch.float32, "cpu")
    strides = {name: leaf.stride() for name, leaf in loose.leaves.items()}
    tight = sanitize_calls.exact(loose)
    for name, leaf in tight.leaves.items():
        assert leaf.untyped_storage().nbytes() == leaf.nbytes and leaf.stride() == strides[name]
    assert tight.options["gamma"] is tight.leaves["gamma"]


@pytest.mark.parametrize(
    ("tool", "statuses", "output", "word"),
    [
        ("memcheck", [0, 0], "ERROR SUMMARY: 0 errors", "clean"),
        ("memcheck", [0, ERROR_STATUS], REPORT, "reported errors"),
        ("memcheck", [0, TIME_UP], "", "not finished: 1 of 2 processes"),
        ("memcheck", [TIME_UP, 1], "Error: no memory", "failed (1): Error: no memory"),
        ("memcheck", [0, ERROR_STATUS], "ERROR SUMMARY: 1", "failed (86): ERROR SUMMARY: 1"),
        ("initcheck", [0, ERROR_STATUS], "=== at elementwise_kernel+0x1", "clean"),
        ("initcheck", [0, ERROR_STATUS], REPORT, "reported errors"),
    ],
)
def test_a_tool_has_one_verdict(tool: str, statuses: list[int], output: str, word: str) -> None:
    result = sanitize.verdict(tool, [Done(status, output) for status in statuses])
    assert result["verdict"] == word
    assert result["reports"] == ({"dq_kernel": 2} if output is REPORT else {})


def test_every_kernel_has_a_verdict_of_every_tool() -> None:
    names = set(sanitize.kernel_names()) - {"append_kernel"}
    results = [
        {"tool": "memcheck", "verdict": "reported errors", "reports": {"dq_kernel": 2}},
        {"tool": "racecheck", "verdict": "not finished: 1", "reports": {}},
    ]
    rows = {row["kernel"]: row for row in sanitize.by_kernel(names, results)}
    assert rows["dq_kernel"]["memcheck"] == "2 reports"
    assert rows["dkv_kernel"]["memcheck"] == "clean"
    assert rows["dkv_kernel"]["racecheck"] == "not finished"
    assert rows["hopper_dq_kernel"]["racecheck"] == "not run"
    assert rows["append_kernel"]["memcheck"] == "not run" and not rows["append_kernel"]["launched"]


def test_a_process_that_takes_too_long_is_ended() -> None:
    code = "import time; print('begun', flush=True); time.sleep(60)"
    done = sanitize.run([sys.executable, "-c", code], 2.0)
    assert done.status == TIME_UP and done.output.startswith("begun")
    assert sanitize.run([sys.executable, "-c", "print(1)"], 60.0) == Done(0, "1\n")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A machine whose tool answers as the test says."""
    state: dict[str, Any] = {"canary": Done(ERROR_STATUS, REPORT), "work": Done(0, "")}
    state["out"] = tmp_path / "out.json"
    state["compile"] = Done(0, json.dumps(sanitize.kernel_names()))
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: "tool")
    monkeypatch.setattr(
        sanitize, "run", lambda command, seconds: state[next(w for w in command if w in state)]
    )
    monkeypatch.setattr("sys.argv", ["sanitize", "--out", str(state["out"])])
    return state


def test_a_clean_machine(machine: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitize.main() == 0
    report = json.loads(machine["out"].read_text())
    assert [tool["tool"] for tool in report["tools"]] == ["no tool", *sanitize.TOOLS]
    assert report["kernels"][0]["memcheck"] == "clean"
    assert "initcheck: clean" in capsys.readouterr().out
    machine["compile"] = Done(0, "[]")
    assert sanitize.main() == 1


def test_errors_are_reported_by_kernel(machine: dict[str, Any]) -> None:
    machine["work"] = Done(ERROR_STATUS, REPORT)
    assert sanitize.main() == 1
    rows = {row["kernel"]: row for row in json.loads(machine["out"].read_text())["kernels"]}
    assert rows["dq_kernel"]["memcheck"] == f"{sanitize_calls.SHARES} reports"


def test_one_line_where_the_sanitizer_does_not_work(
    machine: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine["canary"] = Done(1, "========= Error: Device not supported\n========= Target ended\n")
    assert sanitize.main() == 2
    line = "compute-sanitizer does not work on this machine: Error: Device not supported\n"
    assert capsys.readouterr().out == line
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: None)
    assert sanitize.main() == 2
    assert capsys.readouterr().out.startswith("compute-sanitizer is not in PATH")

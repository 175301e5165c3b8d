"""All gradients of short sequences from one kernel, in Triton's interpreter or on a GPU."""

from dataclasses import replace

import pytest
import torch

from reluformer.ops.backends.triton import backward_choice, op, run_backward, tuning
from reluformer.ops.backends.triton.backward_choice import Choice
from reluformer.ops.backends.triton.problem import NO_INPUTS, Problem, Settings
from tests.ops.backends.triton.problems import with_changes
from tests.ops.rectified import CASES, Case, arguments, check

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off")
UNMASKED = [case for case in CASES if case.mask is None and case.keys <= 64]


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> list[Choice]:
    """The choices of backward passes that run in the test."""
    made: list[Choice] = []

    def choose(*args: object) -> Choice:
        made.append(backward_choice.choose(*args))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(run_backward, "choose", choose)
    return made


@on_cpu
@pytest.mark.parametrize("at", range(len(UNMASKED)), ids=lambda at: UNMASKED[at].name)
def test_matches_the_formula(at: int, choices: list[Choice]) -> None:
    with tuning.override(one_pass=True):
        given = arguments(UNMASKED[at], torch.float32, "cpu", transposed=at % 2 > 0)
        check(op.attend, given, 2e-6, 5e-6)
    assert choices and all(choice.is_one_pass for choice in choices)


@on_cpu
@pytest.mark.parametrize("case", [case for case in CASES if case not in UNMASKED], ids=str)
def test_masks_and_long_keys_run_two_kernels(case: Case, choices: list[Choice]) -> None:
    with tuning.override(one_pass=True):
        check(op.attend, arguments(case, torch.float32, "cpu"), 2e-6, 5e-6)
    assert choices and not any(choice.is_one_pass for choice in choices)


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [13, 64, 128])
@pytest.mark.parametrize("case", UNMASKED, ids=str)
def test_on_a_gpu(case: Case, keys: int, choices: list[Choice]) -> None:
    lengths = case.key_lengths and tuple(min(length, keys) for length in case.key_lengths)
    case = replace(case, keys=keys, queries=min(case.queries, keys), key_lengths=lengths)
    with tuning.override(one_pass=True):
        check(op.attend, arguments(case, torch.bfloat16, "cuda"), 9e-3, 2e-2)
    assert choices[-1].is_one_pass


def test_tiles_that_fit_into_registers() -> None:
    def fits(length: int, width: int, dtype: torch.dtype, **changes: object) -> bool:
        q = torch.empty(2, 2, length, width, dtype=dtype)
        problem = Problem(q, q, q, NO_INPUTS, Settings(1.0, length, length))
        with tuning.override(one_pass=True):
            return backward_choice.choose(with_changes(problem, changes), 1, q).is_one_pass

    assert fits(128, 128, torch.bfloat16) and fits(64, 256, torch.bfloat16)
    assert fits(64, 64, torch.float32)
    assert not fits(129, 64, torch.bfloat16) and not fits(128, 256, torch.bfloat16)
    assert not fits(65, 64, torch.float32) and not fits(16, 16, torch.float16)
    assert not fits(64, 64, torch.bfloat16, dropout_p=0.1)
    assert not fits(64, 64, torch.bfloat16, mask=torch.ones(1, 1, 64, 64, dtype=torch.bool))

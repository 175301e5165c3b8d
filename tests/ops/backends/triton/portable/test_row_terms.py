"""The pass over output gradients that also writes row terms, against the pass of its own."""

import pytest
import torch

from reluformer.ops.backends.triton import backward_launches, run_backward
from reluformer.ops.backends.triton.backward_choice import Choice
from reluformer.ops.backends.triton.backward_launches import Gradients, Results
from reluformer.ops.backends.triton.problem import NO_INPUTS, Problem, Settings
from tests.ops.backends.triton.test_op import on_cpu

pytestmark = on_cpu
BATCH, HEADS, ROWS, KEYS, WIDTH = 2, 2, 70, 33, 64


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("has_grad_sum", [False, True])
@pytest.mark.parametrize("row_normalise", [0.0, 1e-2])
def test_joined_terms_equal_terms_of_own_pass(
    causal: bool, has_grad_sum: bool, row_normalise: float
) -> None:
    if not has_grad_sum and not row_normalise:
        pytest.skip("such a call has no row terms")
    torch.manual_seed(0)
    q, out, grad_out = (torch.randn(BATCH, HEADS, ROWS, WIDTH).bfloat16() for _ in range(3))
    k = torch.randn(BATCH, HEADS, KEYS, WIDTH).bfloat16()
    row_sum, grad_sum = torch.rand(BATCH, HEADS, ROWS), torch.randn(BATCH, HEADS, ROWS)
    optional = NO_INPUTS._replace(gamma=torch.tensor([0.5, 2.0]))
    settings = Settings(0.25, ROWS, KEYS, causal=causal, power=4, row_normalise=row_normalise)
    problem = Problem(q, k, k, optional, settings)
    grads = Gradients(
        grad_out, out, None, grad_sum if has_grad_sum else None, None,
        row_sum if row_normalise else None,
    )  # fmt: skip
    dots = torch.full_like(row_sum, float("nan"))
    results = Results(q, k, k, dots, None)
    launches = backward_launches.prepare(problem, grads, results, Choice(True, 0))
    assert launches.row_terms is None
    # The kernel itself needs a GPU.
    launches = launches._replace(dkv=lambda *tensors: None)  # type: ignore[arg-type]
    scratch = run_backward.new_scratch(launches, problem, grads, None)
    assert scratch.terms is not None
    run_backward.run_dkv(launches, problem, grads, results, scratch)
    own_terms = torch.full_like(scratch.terms, float("nan"))
    own_pass = backward_launches._row_terms_launch(problem, 1, is_scaled=launches.scales_grad)
    own_pass(grads.grad_sum, None, own_terms, None, grads.row_sum, dots, optional)
    own, joined = own_terms[:, 0, :128], scratch.terms[:, 0, :128]
    assert torch.equal(own[:, :ROWS], joined[:, :ROWS])
    assert joined[:, ROWS:].eq(0).all(), "rows past the end have no term"
    exact = (out.double() * grad_out.double()).sum(-1)
    assert (dots - exact).norm() <= 1e-5 * exact.norm()

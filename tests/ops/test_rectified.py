"""Tests of the measure of errors in `tests/ops/rectified.py`: it passes rounding, not mistakes."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.ops.rectified import Arguments, Case, arguments, error, expected, spread

CASE = Case(
    "gradients of row sums", batch=2, queries=70, keys=700, width=128, value_width=128, power=8,
    causal=True, key_lengths=(700, 70), threshold=(-8.0, -4.0), statistics=1, row_normalise=1e-4,
)  # fmt: skip
LIMIT = 18e-3


def _round(grad: Tensor) -> Tensor:
    """Each gradient of a row sum in bfloat16, as in kernels that multiply bfloat16 pairs."""
    return grad.bfloat16().float()


def _lose_row(grad: Tensor) -> Tensor:
    """The gradients without those of one row that is neither large nor small."""
    place = int(grad[0, 0].abs().argsort()[grad.shape[2] // 2])
    changed = grad.clone()
    changed[0, 0, place] = 0.0
    return changed


def _threshold_gradient(call: Arguments, sums: Tensor) -> Tensor:
    """The thresholds' gradient [H], in float64, for these gradients of the row sums [B, H, Tq]."""
    cotangents = [call.cotangents[0], sums]
    return expected(Arguments(call.leaves, call.options, cotangents))[1]["threshold"]


def _threshold_error(change: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """Errors of the thresholds' gradient, by `spread` and relative to the gradient itself."""
    torch.manual_seed(0)
    call = arguments(CASE, torch.bfloat16, "cpu")
    sums = call.cotangents[1]
    drawn, ones = (_threshold_gradient(call, each) for each in (sums, torch.ones_like(sums)))
    # The gradient is linear in those of the row sums: 5 % of it are left.
    sums -= 0.95 * (drawn / ones)[:, None]
    exact, actual = (_threshold_gradient(call, each) for each in (sums, change(sums)))
    return error(actual, exact, spread(call)["threshold"]), error(actual, exact)


def test_rounding_shared_by_rows_is_small_although_their_sum_cancels() -> None:
    by_spread, relative = _threshold_error(_round)
    assert by_spread <= 5e-3 < LIMIT < relative


def test_a_lost_row_is_found() -> None:
    by_spread, _ = _threshold_error(_lose_row)
    assert by_spread > LIMIT

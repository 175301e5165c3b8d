"""Norms and gates on the output."""

import pytest
import torch

from reluformer.ops.family import output_transforms
from tests.ops.inputs import assert_same


def _output() -> torch.Tensor:
    return torch.randn(2, 4, 3, 6, dtype=torch.float64)


def test_norms_give_a_root_mean_square_of_one() -> None:
    z = 50 * _output()
    whole = output_transforms.over_heads(z).square().mean(dim=(1, 3))
    torch.testing.assert_close(whole, torch.ones_like(whole))
    by_head = output_transforms.in_head(z).square().mean(dim=-1)
    torch.testing.assert_close(by_head, torch.ones_like(by_head))
    scaled = output_transforms.differential(z, lam_init=0.2).square().mean(dim=-1)
    torch.testing.assert_close(scaled, torch.full_like(scaled, 0.64))


def test_the_norm_of_rela_is_over_all_heads_of_a_token() -> None:
    z = _output()
    z[:, 0] *= 100
    quiet = output_transforms.over_heads(z)[:, 1:].abs().amax(dim=(1, 3))
    assert (quiet < 0.2).all()
    changed = z.clone()
    changed[:, :, 1] = 9.0
    kept = [0, 2]
    assert_same(
        output_transforms.over_heads(changed)[:, :, kept],
        output_transforms.over_heads(z)[:, :, kept],
    )


@pytest.mark.parametrize(
    "function",
    [output_transforms.over_heads, output_transforms.in_head, output_transforms.differential],
)
def test_gains_follow_the_heads_side_by_side(function) -> None:
    z, gain = _output(), torch.rand(24, dtype=torch.float64)
    expected = function(z).transpose(1, 2).reshape(2, 3, 24) * gain
    found = function(z, gain=gain).transpose(1, 2).reshape(2, 3, 24)
    torch.testing.assert_close(found, expected)


def test_the_gate_of_rela_reads_the_output_before_the_norm() -> None:
    z, gate = _output(), torch.randn(24, dtype=torch.float64)
    factor = torch.sigmoid(gate.view(4, 1, 6) * z)
    torch.testing.assert_close(
        output_transforms.over_heads(z, gate=gate), output_transforms.over_heads(z) * factor
    )


def test_a_token_gate_is_a_sigmoid_on_the_output() -> None:
    z = _output()
    assert output_transforms.gated(z) is z
    torch.testing.assert_close(output_transforms.gated(z, gate=torch.zeros(1).double()), z / 2)
    torch.testing.assert_close(output_transforms.gated(z, gate=torch.full((6,), 50.0).double()), z)


@pytest.mark.parametrize(
    "function",
    [output_transforms.over_heads, output_transforms.in_head, output_transforms.differential],
)
def test_a_row_of_zeros_stays_zero(function) -> None:
    z = torch.zeros(1, 2, 1, 3, requires_grad=True)
    output = function(z)
    (grad,) = torch.autograd.grad(output.sum(), z)
    assert not output.any() and grad.isfinite().all()

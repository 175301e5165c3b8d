"""AttentionRecord a memory: scores, what is hidden in them, weights, values."""

import torch
from torch import Tensor

from reluformer.ops.memory import Scores, hide, read
from tests.ops.inputs import assert_same

VISIBLE = torch.tensor([[True, True, False], [False, False, False]])


def _scores() -> Scores:
    values = torch.tensor([[1.0, -2.0, 0.0], [0.0, 0.0, 0.0]])
    return Scores(values, VISIBLE, 4)


def test_scores_know_their_rows() -> None:
    scores = _scores()
    assert scores.n.tolist() == [[2.0], [0.0]]
    assert scores.n.dtype is scores.values.dtype
    assert scores.peak().tolist() == [[1.0], [0.0]]
    assert scores.hidden_as(9.0).tolist() == [[1.0, -2.0, 9.0], [9.0, 9.0, 9.0]]
    doubled = scores.times(2.0)
    assert doubled.values[0].tolist() == [2.0, -4.0, 0.0]
    assert doubled.visible is VISIBLE and doubled.width == 4
    assert Scores(scores.values, None, 4).n.tolist() == [[3.0]]


def test_the_peak_of_negative_scores_is_negative_and_without_gradient() -> None:
    values = torch.tensor([[-3.0, -2.0, 0.0]], requires_grad=True)
    peak = Scores(values, torch.tensor([[True, True, False]]), 4).peak()
    assert peak.tolist() == [[-2.0]] and not peak.requires_grad


def test_hide_replaces_values_and_stops_gradients() -> None:
    tensor = torch.full((2, 3), float("inf"), requires_grad=True)
    hidden = hide(tensor, VISIBLE)
    assert hidden[~VISIBLE].tolist() == [0.0] * 4
    (grad,) = torch.autograd.grad(hidden.sum(), tensor)
    assert_same(grad, VISIBLE.float())
    assert hide(tensor, None) is tensor


def test_read_masks_the_weights_whatever_the_function_returns() -> None:
    def leaky(scores: Scores) -> Tensor:
        return torch.sigmoid(scores.values)

    output, weights = read(_scores(), torch.ones(3, 2), leaky)
    assert not weights[~VISIBLE].any()
    assert not output[1].any()
    assert_same(output[0], weights[0].sum().expand(2))


def test_a_memory_without_keys_is_not_weighed() -> None:
    def refuse(scores: Scores) -> Tensor:
        raise AssertionError("there is nothing to weigh")

    output, weights = read(Scores(torch.zeros(2, 3, 0), None, 4), torch.zeros(2, 0, 5), refuse)
    assert_same(output, torch.zeros(2, 3, 5))
    assert weights.shape == (2, 3, 0)


def test_weights_take_the_dtype_of_the_values() -> None:
    output, weights = read(_scores(), torch.ones(3, 2), lambda scores: scores.values.double())
    assert output.dtype is weights.dtype is torch.float32


def test_dropout_acts_on_the_output_alone() -> None:
    scores = Scores(torch.ones(1, 1000), None, 4)
    output, weights = read(scores, torch.eye(1000), lambda s: s.values, dropout_p=0.5)
    assert_same(weights, torch.ones(1, 1000))
    assert set(output.flatten().tolist()) == {0.0, 2.0}

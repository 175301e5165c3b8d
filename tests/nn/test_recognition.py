"""Which modules `replace_attention` recognises in code that people wrote, and what it reports."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.nn.parallel import DistributedDataParallel

import reluformer.nn
from reluformer.errors import UserError
from reluformer.nn import replace_attention
from tests.nn.test_replace import SelfAttention


class CausalMixer(nn.Module):
    """As in nanoGPT: other names, and softmax by hand where torch has no fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_embd, self.flash = 2, 12, True
        self.c_attn = nn.Linear(12, 36)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 6)).transpose(1, 2) for t in self.c_attn(x).chunk(3, -1))
        if self.flash:
            y = sdpa(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1) / 6**0.5).masked_fill(~self.past(x), -torch.inf)
            y = functional.softmax(scores, dim=-1) @ v
        return y.transpose(1, 2).flatten(2)

    def past(self, x: Tensor) -> Tensor:
        return torch.ones(x.shape[1], x.shape[1]).tril().bool()


class ByHand(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.weights(x) @ x

    def weights(self, x: Tensor) -> Tensor:
        return (x @ x.transpose(-2, -1)).softmax(dim=-1)


class AttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = SelfAttention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class OtherScale(SelfAttention):
    """The attribute `scale` is not the factor of the call."""

    def __init__(self) -> None:
        super().__init__()
        del self.head_dim
        self.scale = 1.0


class OwnCore(SelfAttention):
    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Linear(2, 2)


def test_other_names_of_sizes_and_of_the_function() -> None:
    module, x = CausalMixer().eval(), torch.randn(2, 5, 12)
    expected = module(x)
    report = replace_attention(nn.Sequential(module), "softmax")
    assert report.changed == {"0": "CausalMixer"}
    torch.testing.assert_close(module(x), expected)
    module.flash = False
    with pytest.raises(UserError, match="no softmax beside it .* got a call of softmax"):
        module(x)


def test_softmax_by_hand_is_reported_whatever_the_name() -> None:
    report = replace_attention(nn.ModuleList([ByHand(), nn.Softmax(-1), SelfAttention()]), "relu")
    assert report.unchanged == {"0": "ByHand computes softmax by itself"}


def test_containers_of_attentions_are_not_reported() -> None:
    report = replace_attention(AttentionBlock(), "relu")
    assert report.changed == {"inner": "SelfAttention"} and not report.unchanged


def test_the_scale_of_a_call_is_that_of_torch() -> None:
    module, x = OtherScale().eval(), torch.randn(2, 5, 12)
    expected = module(x)
    replace_attention(module, "softmax")
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("kind", [SelfAttention, lambda: nn.MultiheadAttention(12, 2)])
def test_a_replaced_forward_is_reported(kind: Any) -> None:
    module = kind()
    module.forward = module.forward
    with pytest.raises(UserError, match="has been replaced on the instance"):
        replace_attention(module, "relu")


def test_an_attribute_of_the_module_is_not_overwritten() -> None:
    module = OwnCore()
    with pytest.raises(UserError, match="it has an attribute core of its own"):
        replace_attention(module, "relu")
    assert isinstance(module.core, nn.Linear)


def test_models_of_data_parallelism_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DistributedDataParallel, "__init__", nn.Module.__init__)
    wrapped: Any = DistributedDataParallel()  # type: ignore[call-arg]
    wrapped.module = SelfAttention()
    with pytest.raises(UserError, match="must be replaced before a model becomes Distributed"):
        replace_attention(wrapped, "relu")
    assert type(wrapped.module) is SelfAttention


def test_layers_made_on_the_meta_device() -> None:
    weights = nn.MultiheadAttention(12, 2).state_dict()
    x = torch.randn(3, 2, 12)
    expected = reluformer.nn.MultiheadAttention(12, 2)
    expected.load_state_dict(weights)
    with torch.device("meta"):
        assigned, empty = (reluformer.nn.MultiheadAttention(12, 2) for _ in range(2))
    assigned.load_state_dict(weights, assign=True)
    empty.to_empty(device="cpu")
    for parameter in empty.core.parameters():
        nn.init.constant_(parameter, 1e6)
    empty._reset_parameters()
    empty.load_state_dict(weights)
    for module in (assigned, empty):
        torch.testing.assert_close(module(x, x, x)[0], expected(x, x, x)[0])

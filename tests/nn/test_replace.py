"""Replacing the attentions of existing models: torch's, timm's, and unknown ones."""

import copy
import inspect
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from reluformer.errors import UserError
from reluformer.nn import AttentionCore, Replacement, replace_attention
from tests.nn.timm_import import load_timm
from tests.ops.inputs import assert_same


class SelfAttention(nn.Module):
    """An attention as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 2, 6
        self.qkv, self.proj = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
        return self.proj(out.transpose(1, 2).flatten(2))


class WindowAttention(SelfAttention):
    """Each of four windows attends to itself."""

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        q, k, v = (
            self.qkv(x).unflatten(-1, (3, 2, 6)).unflatten(1, (4, -1)).permute(3, 0, 4, 1, 2, 5)
        )
        out = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
        return self.proj(out.permute(0, 2, 3, 1, 4).flatten(3).flatten(1, 2))


class OtherAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(dim=-1)


class MyMultihead(nn.MultiheadAttention):
    pass


def model() -> nn.ModuleDict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.ModuleDict(
            {
                "torch": nn.Transformer(12, 2, 1, 1, 16, 0.0, batch_first=True),
                "own": SelfAttention(),
                "other": OtherAttention(),
                "mine": MyMultihead(12, 2),
                "linear": nn.Linear(12, 12),
            }
        )


def test_the_report_names_changed_and_unchanged_modules() -> None:
    network = model()
    weights = {name: p.clone() for name, p in network.named_parameters()}
    report = replace_attention(network, "normalised_relu", power=8)
    assert isinstance(report, Replacement)
    assert report.changed == {
        "torch.encoder.layers.0.self_attn": "MultiheadAttention",
        "torch.decoder.layers.0.self_attn": "MultiheadAttention",
        "torch.decoder.layers.0.multihead_attn": "MultiheadAttention",
        "own": "SelfAttention",
    }
    assert report.unchanged == {
        "other": "OtherAttention is not known, and its forward calls "
        "scaled_dot_product_attention 0 times and not once",
        "mine": "MyMultihead is a subclass of MultiheadAttention",
    }
    text = str(report)
    assert text.startswith("4 attentions are normalised_relu now:\n  torch.encoder.layers.0.self")
    assert "2 modules keep their attention:\n  other: OtherAttention is not known" in text
    parameters = dict(network.named_parameters())
    for name, weight in weights.items():
        assert_same(parameters[name], weight)
    assert len(parameters) == len(weights) + 4 * 2


@pytest.mark.parametrize("grad", ["inference_mode", "no_grad", "enable_grad"])
def test_softmax_in_place_of_softmax_changes_nothing(grad: str) -> None:
    network = model()["torch"].eval()
    x, y = torch.randn(2, 5, 12), torch.randn(2, 4, 12)
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    with warnings.catch_warnings(), getattr(torch, grad)():
        warnings.simplefilter("ignore")
        expected = network(x, y, **masks).clone()
        replace_attention(network, "softmax")
        torch.testing.assert_close(network(x, y, **masks), expected)
        calls: list[Any] = []
        for module in network.modules():
            if isinstance(module, AttentionCore):
                module.register_forward_hook(lambda *arguments: calls.append(arguments))
        network(x, y, **masks)
    assert len(calls) == 3


class MyLayer(nn.TransformerEncoderLayer):
    pass


class MyEncoder(nn.TransformerEncoder):
    pass


@torch.inference_mode()
def test_subclasses_of_torch_layers_do_not_take_the_fast_path() -> None:
    network = MyEncoder(MyLayer(12, 2, 16, batch_first=True), 1).eval()
    x = torch.randn(2, 5, 12)
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    calls: list[Any] = []
    replace_attention(network, "softmax")
    expected = network(x, src_key_padding_mask=padding)
    replace_attention(network, "relu", gamma=0.01)
    output = network(x, src_key_padding_mask=padding)
    assert not torch.allclose(output, expected, atol=1e-2)
    network.layers[0].self_attn.core.register_forward_hook(lambda *a: calls.append(a))
    network(x, src_key_padding_mask=padding)
    assert calls and type(network) is MyEncoder


def test_own_modules_that_call_sdpa() -> None:
    module = SelfAttention()
    x = torch.randn(2, 5, 12)
    mask = torch.rand(2, 1, 5, 5) > 0.3
    mask[..., 0] = True
    bias = torch.randn(5, 5)
    calls: list[dict[str, Any]] = [{}, {"causal": True}, {"mask": mask}, {"mask": bias}]
    expected = [module(x, **call) for call in calls]
    replace_attention(module, "softmax")
    for call, output in zip(calls, expected, strict=True):
        torch.testing.assert_close(module(x, **call), output)
    replace_attention(module, "normalised_relu", row_loss=1.0)
    assert isinstance(module, SelfAttention)
    outputs = [module(x, **call) for call in calls]
    assert not any(map(torch.allclose, outputs, expected))
    outputs[1].sum().backward()
    assert module.core.threshold_offset.grad.abs().sum() > 0
    changed = torch.cat([x[:, :3], torch.randn(2, 2, 12)], dim=1)
    torch.testing.assert_close(module(changed, causal=True)[:, :3], outputs[1][:, :3])


def test_a_module_that_calls_sdpa_in_another_method() -> None:
    class Mixer(SelfAttention):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return self.mix(*self.qkv(x).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4))

        def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(q, k, v)

    class Twice(Mixer):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return self.mix(x, x, self.mix(x, x, x))

    both = nn.ModuleList([Mixer(), Twice()])
    x = torch.randn(2, 5, 12)
    expected = both[0](x)
    report = replace_attention(both, "softmax")
    assert report.changed == {"0": "Mixer"} and "2 times and not once" in report.unchanged["1"]
    torch.testing.assert_close(both[0](x), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_windows_join_the_batch(causal: bool) -> None:
    windows, whole = WindowAttention(), SelfAttention()
    whole.load_state_dict(windows.state_dict())
    x = torch.randn(2, 12, 12)
    expected = windows(x, causal=causal)
    replace_attention(windows, "softmax")
    torch.testing.assert_close(windows(x, causal=causal), expected)
    for module in (windows, whole):
        replace_attention(module, "normalised_relu")
        module.core.threshold_offset.data.copy_(torch.tensor([-1.0, 1.0]))
    by_window = whole(x.view(8, 3, 12), causal=causal).view(2, 12, 12)
    torch.testing.assert_close(windows(x, causal=causal), by_window)
    with pytest.raises(UserError, match=r"^WindowAttention\.forward must call .* got a mask$"):
        windows(x, mask=torch.ones(3, 3).bool())


@pytest.mark.parametrize("shape", [(4, 3, 6), (2, 4, 3, 6)])
def test_queries_without_the_heads_are_an_error(shape: tuple[int, ...]) -> None:
    class FoldedAttention(SelfAttention):
        def forward(self, x: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(x, x, x)

    module = FoldedAttention()
    replace_attention(module)
    message = r"^FoldedAttention\.forward must call .* queries \[batch, 2 heads, .* got shape"
    with pytest.raises(UserError, match=message):
        module(torch.randn(shape))


def test_converted_modules_are_copied_pickled_and_compiled() -> None:
    module = SelfAttention()
    replace_attention(module)
    module.core.threshold_offset.data.normal_()
    x = torch.randn(2, 5, 12)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    fresh = SelfAttention()
    replace_attention(fresh)
    fresh.load_state_dict(module.state_dict())
    saved = torch.load(buffer, weights_only=False)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), saved, fresh):
        assert_same(other(x), module(x))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))


def test_a_module_that_stops_calling_sdpa_is_an_error() -> None:
    class Sometimes(SelfAttention):
        def forward(self, x: Tensor, use: bool = True) -> Tensor:
            return functional.scaled_dot_product_attention(x, x, x) if use else x

    Sometimes.__name__ = "SometimesAttention"
    module = Sometimes()
    replace_attention(module, "relu")
    with pytest.raises(UserError, match="must call scaled_dot_product_attention once .* got 0"):
        module(torch.randn(1, 2, 3, 6), use=False)


@pytest.mark.parametrize(
    ("network", "arguments", "message"),
    [
        (nn.Linear(2, 2), {}, "model has no attention that can be replaced, got Linear$"),
        (None, {}, "model must be a torch.nn.Module, got NoneType"),
        (OtherAttention(), {}, r"got OtherAttention \(it: OtherAttention is not known, and its"),
        (SelfAttention(), {"attention": "reul"}, "unknown attention 'reul'; known: "),
        (SelfAttention(), {"power": 3}, "power must be 1, 2, 4 or 8, got 3"),
        (SelfAttention(), {"attention": "gated"}, "'gated' needs a gate, which SelfAttention does"),
    ],
)
def test_mistakes_are_one_sentence(network: Any, arguments: Any, message: str) -> None:
    kind = type(network)
    with pytest.raises(UserError, match=message):
        replace_attention(network, **arguments)
    assert type(network) is kind


def vit(**arguments: Any) -> nn.Module:
    timm = load_timm()
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
    result: nn.Module = timm.models.VisionTransformer(**sizes, num_classes=3, **arguments)
    return result


def test_timm_builds_models_with_the_layer() -> None:
    timm = load_timm()
    from reluformer.nn.timm import Attention, attn_layer

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, attn_layer=Attention, depth=1)
    assert isinstance(model.blocks[0].attn, timm.layers.Attention)
    assert model.blocks[0].attn.core.row.name == "normalised_relu"
    torch.manual_seed(0)
    theirs = vit(qk_norm=True).eval()
    torch.manual_seed(0)
    ours = vit(qk_norm=True, attn_layer=attn_layer("softmax")).eval()
    assert_same(ours.state_dict(), theirs.state_dict())
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(ours(x), theirs(x))
    relu = vit(qk_norm=True, attn_layer=attn_layer("relu", power=2))
    relu.load_state_dict(theirs.state_dict())
    output = relu(x)
    assert not torch.allclose(output, theirs(x))
    pickle.loads(pickle.dumps(relu))
    copy.deepcopy(relu)
    output.sum().backward()
    assert relu.blocks[0].attn.core.gamma_offset.grad is not None


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "eva02_tiny_patch14_224",
        "beitv2_base_patch16_224",
        "swin_tiny_patch4_window7_224",
        "vit_small_patch16_rope_224",
    ],
)
def test_models_of_timm_keep_their_numbers_with_softmax(name: str) -> None:
    timm = load_timm()
    small: dict[str, Any] = {"depth": 1} if "swin" not in name else {"depths": (2,)}
    if "swin" in name:
        small |= {"embed_dim": 24, "num_heads": (2,), "img_size": 56}
    else:
        small |= {"img_size": 32, "patch_size": 16}
    model = timm.create_model(name, num_classes=3, **small).eval()
    # Fresh models have scores near 0, where all these attentions are alike.
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    size = small["img_size"]
    x = torch.randn(1, 3, size, size)
    expected = model(x)
    report = replace_attention(model, "softmax")
    assert report.changed and not report.unchanged
    torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-3)
    replace_attention(model, "relu", gamma=0.01)
    assert not torch.allclose(model(x), expected, rtol=0.01, atol=0.01)


def test_attentions_of_timm_that_cannot_be_replaced_are_reported() -> None:
    timm = load_timm()
    layer = timm.layers.DiffAttention(24, num_heads=2, norm_layer=nn.LayerNorm)
    with pytest.raises(UserError, match="DiffAttention is not known, and its forward calls"):
        replace_attention(layer)
    assert "attn_layer" in inspect.signature(timm.models.VisionTransformer).parameters


def test_models_of_transformers_are_replaced_by_their_interface() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 20}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**sizes, **layers)
    network = nn.ModuleDict({"lm": transformers.LlamaForCausalLM(config), "own": SelfAttention()})
    ids = torch.randint(20, (2, 6))
    before = network["lm"](ids).logits
    report = replace_attention(network, "relu", power=2, gamma=0.01)
    assert report.changed == {
        "lm.model.layers.0.self_attn": "LlamaAttention",
        "lm.model.layers.1.self_attn": "LlamaAttention",
        "own": "SelfAttention",
    }
    assert not report.unchanged
    assert not torch.allclose(network["lm"](ids).logits, before, atol=1e-4)


def test_an_attention_of_torch_in_a_model_of_transformers_stays_and_is_reported(
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "image_size": 16, "patch_size": 8}
    config = transformers.SiglipVisionConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    network = transformers.SiglipVisionModel(config).eval()
    report = replace_attention(network, "relu")
    assert report.changed == {"encoder.layers.0.self_attn": "SiglipAttention"}
    assert report.unchanged == {
        "head.attention": "MultiheadAttention runs torch's attention in a model of transformers, "
        "and a saved folder would load it with softmax"
    }
    assert type(network.head.attention) is nn.MultiheadAttention
    network.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path).eval()
    pixels = torch.randn(1, 3, 16, 16)
    torch.testing.assert_close(loaded(pixels).pooler_output, network(pixels).pooler_output)


def test_attentions_of_torch_inside_replaced_modules_are_replaced() -> None:
    class PooledAttention(SelfAttention):
        def __init__(self) -> None:
            super().__init__()
            self.pool = nn.MultiheadAttention(12, 2)

    network = PooledAttention()
    report = replace_attention(network, "relu")
    assert set(report.changed) == {"", "pool"}
    assert network.pool.core.row.name == "relu"


def test_a_refused_replacement_leaves_the_model_as_it_was() -> None:
    layers = [nn.TransformerEncoderLayer(16, 4, 16), nn.MultiheadAttention(15, 5), SelfAttention()]
    for network, attention, message in (
        (nn.ModuleList(layers), "differential", "needs an even width D, got 3"),
        (nn.ModuleList(layers), "gated", "needs a gate, which SelfAttention does"),
        (nn.ModuleList([nn.TransformerEncoderLayer(16, 4), MyLayer(16, 4)]), "reul", "unknown"),
    ):
        before = [type(module) for module in network.modules()]
        with pytest.raises(UserError, match=message):
            replace_attention(network, attention)
        assert [type(module) for module in network.modules()] == before


@pytest.mark.parametrize("present", ["sdpa", "relu"])
def test_a_refused_replacement_leaves_models_of_transformers_as_they_were(present: str) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("reluformer.hf")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 20}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    llama = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=present)
    network = nn.ModuleDict({"lm": llama, "own": SelfAttention()})
    ids = torch.randint(20, (2, 6))
    before = llama(ids).logits
    with pytest.raises(UserError, match="relu attention has no option 'foo'"):
        replace_attention(network, "relu", foo=3)
    assert type(network["own"]) is SelfAttention
    assert llama.config._attn_implementation == present
    assert getattr(llama.config, "attention_options", None) is None
    assert_same(llama(ids).logits, before)

"""The attention core: the model's default under one name, and losses added as gradients."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from reluformer import ATTENTIONS, attention, relu_attention
from reluformer.errors import UserError
from reluformer.model.attention import MultiHeadAttention
from reluformer.model.config import AttentionConfig, ModelConfig
from reluformer.model.losses import attention_losses
from reluformer.model.records import AttentionRecord
from reluformer.nn import AttentionCore, set_row_loss_scale
from tests.ops.inputs import assert_same, make

LOSSES = {"row_loss": 0.3, "entropy_loss": 0.2}


def core(attention: str = "normalised_relu", **options: Any) -> AttentionCore:
    """A core of 4 heads of width 8 and values of width 6, with offsets other than 0."""
    module = AttentionCore(4, 8, attention, options, value_dim=6, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return module


def loss_of(sums: Any, valid: Tensor, row_loss: float, entropy_loss: float) -> Tensor:
    """The losses as the training loop computes them."""
    losses = attention_losses([AttentionRecord("encoder", 0, sums, valid, None)])
    return row_loss * losses.normalisation + entropy_loss * losses.entropy


def test_the_name_is_the_default_of_the_document_models() -> None:
    q, k, v = make()
    config = AttentionConfig(power=8)
    expected = relu_attention(q, k, v, gamma=2 * 8.0**8, threshold=-8.0, **config.fixed_options)
    assert_same(attention("normalised_relu", q, k, v), expected)
    output, weights = AttentionCore(4, 8).double().eval()(q, k, v)
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-7)
    assert weights is None


def test_rows_of_zero_scores_start_with_sum_one() -> None:
    q, k, v = make()
    for power in (1, 2, 4, 8):
        sums = attention("normalised_relu", 0 * q, k, v, power=power, return_sums="row_sum").sums
        torch.testing.assert_close(sums.row_sum, torch.ones_like(sums.row_sum))


def test_models_take_the_name_and_compute_the_same() -> None:
    config = ModelConfig(10, width=32, heads=4)
    layers = []
    for kind in ("relu", "normalised_relu"):
        torch.manual_seed(0)
        layers.append(MultiHeadAttention(config, AttentionConfig(kind=kind)))
    x = torch.randn(2, 5, 32)
    assert list(layers[0].state_dict()) == list(layers[1].state_dict())
    assert_same(layers[0](x).output, layers[1](x).output)


@pytest.mark.parametrize("kind", ["normalised_relu", "relu", "relu_n", "cosine_relu"])
@pytest.mark.parametrize("options", [{"row_loss": 0.3}, LOSSES], ids=["row sums", "entropies"])
def test_gradients_are_those_of_the_explicit_loss(kind: str, options: dict[str, float]) -> None:
    q, k, v = make(rows=4, requires_grad=True)
    mask = torch.rand(2, 4, 4, 5, generator=torch.Generator().manual_seed(1)) > 0.3
    mask[1, 2, 3] = False
    query_mask = torch.tensor([[True, True, True, False], [True, True, False, True]])
    module = core(kind, **options)
    inputs = [q, k, v, *module.parameters()]
    probe = torch.randn(2, 4, 4, 6, dtype=torch.float64)

    output, _ = module(q, k, v, mask=mask, query_mask=query_mask)
    injected = torch.autograd.grad((output * probe).sum(), inputs)

    result = attention(kind, q, k, v, mask=mask, return_sums="entropy", **module.options())
    assert_same(output, result.output)
    loss = loss_of(result.sums, query_mask[:, None], **{"entropy_loss": 0.0, **options})
    explicit = torch.autograd.grad((result.output * probe).sum() + loss, inputs)
    plain = torch.autograd.grad((attention(kind, q, k, v, mask=mask) * probe).sum(), [q])
    torch.testing.assert_close(injected, explicit)
    assert not torch.allclose(injected[0], plain[0])


def test_gradients_match_finite_differences_of_output_and_loss() -> None:
    q, k, v = make(batch=1, rows=2, keys=3, requires_grad=True)
    module = core(**LOSSES)
    names = [name for name, _ in module.named_parameters()]

    class Explicit(torch.autograd.Function):
        """Value of output and loss, gradient of the injected output alone."""

        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            q, k, v, *offsets = inputs
            with torch.enable_grad():
                leaves = [each.detach().requires_grad_() for each in inputs]
                values = dict(zip(names, leaves[3:], strict=True))
                output, _ = torch.func.functional_call(module, values, tuple(leaves[:3]))
                ctx.gradients = torch.autograd.grad(output.sum(), leaves)
                options = {
                    "threshold": offsets[names.index("threshold_offset")] - 8,
                    "gamma": 2 * 8**8 * offsets[names.index("gamma_offset")].exp().squeeze(0),
                }
                result = attention("normalised_relu", q, k, v, return_sums="entropy", **options)
            valid = torch.ones(1, 1, 1, dtype=torch.bool)
            return (result.output.sum() + loss_of(result.sums, valid, **LOSSES)).detach()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
            return tuple(grad * each for each in ctx.gradients)

    leaves = [q, k, v, *(each.detach().requires_grad_() for each in module.parameters())]
    assert torch.autograd.gradcheck(Explicit.apply, leaves)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("above", [1e-3, 1e-4, 2e-5])
def test_a_row_sum_that_underflows_leaves_gradients_finite(above: float, impl: str) -> None:
    # One visible key, its score just above the threshold -8: the weight is about above^8 / 8^8.
    q = torch.tensor([4.0, 4 * above]).repeat(8).view(1, 1, 1, 16) / 8
    k = torch.tensor([-8.0, 1.0]).repeat(8).view(1, 1, 1, 16)
    q.requires_grad_()
    core = AttentionCore(1, 16, options={"power": 8, "impl": impl})
    output, _ = core(q, k, torch.ones(1, 1, 1, 16))
    output.sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()
    offset = core.threshold_offset.grad
    assert offset.isfinite().all()
    # The gradient of the loss, 8 / above, is there as long as 1 / row_sum is finite.
    assert (offset.abs() > 1) == (above == 1e-3)


@pytest.mark.parametrize("how", ["eval", "no_grad", "zero"])
def test_no_loss_outside_training(how: str) -> None:
    q, k, v = make(requires_grad=True)
    module = core(**({"row_loss": 0.0} if how == "zero" else LOSSES))
    if how == "eval":
        module.eval()
    with torch.set_grad_enabled(how != "no_grad"):
        output, _ = module(q, k, v)
    plain = attention("normalised_relu", q, k, v, **module.options())
    assert_same(output, plain)
    if how == "no_grad":
        assert not output.requires_grad
    else:
        grads = (torch.autograd.grad(each.sum(), [q, k, v]) for each in (output, plain))
        torch.testing.assert_close(*grads)


def test_a_batch_twice_as_large_has_the_same_loss() -> None:
    q, k, v = make(batch=1)
    module, found = core(row_loss=1.0), []
    for repeats in (1, 2):
        module.zero_grad()
        tensors = [each.repeat(repeats, 1, 1, 1) for each in (q, k, v)]
        (0 * module(*tensors)[0]).sum().backward()
        found.append(module.threshold_offset.grad.clone())
    torch.testing.assert_close(*found)
    assert found[0].abs().max() > 1e-3


@pytest.mark.parametrize("scale", [0.25, torch.tensor(1024.0)])
def test_scale_of_the_losses(scale: float | Tensor) -> None:
    q, k, v = make()
    model, found = nn.ModuleDict({"core": core(**LOSSES)}), []
    for factor in (1.0, scale):
        model.zero_grad()
        set_row_loss_scale(model, factor)
        (0 * model["core"](q, k, v)[0]).sum().backward()
        found.append(model["core"].threshold_offset.grad.clone())
    torch.testing.assert_close(found[1], found[0] * scale)
    with pytest.raises(UserError, match="model must have attentions of reluformer.nn, got Linear"):
        set_row_loss_scale(nn.Linear(2, 2), 1.0)


def test_gradients_of_single_examples_by_vmap() -> None:
    module = core(**LOSSES)
    q, k, v = make(batch=3)
    parameters = dict(module.named_parameters())

    def loss(values: dict[str, Tensor], *inputs: Tensor) -> Tensor:
        batch = tuple(each[None] for each in inputs)
        total: Tensor = torch.func.functional_call(module, values, batch)[0].square().sum()
        return total

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0, 0))(parameters, q, k, v)
    for index in range(3):
        expected = torch.autograd.grad(
            loss(parameters, q[index], k[index], v[index]), list(parameters.values())
        )
        found = tuple(grads[name][index] for name in parameters)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_adds_the_loss_once(use_reentrant: bool) -> None:
    q, k, v = make(requires_grad=True)
    module = core(**LOSSES)
    expected = torch.autograd.grad(module(q, k, v)[0].sum(), [q, k])
    output = checkpoint(lambda *x: module(*x)[0], q, k, v, use_reentrant=use_reentrant)
    output.sum().backward()
    torch.testing.assert_close((q.grad, k.grad), expected)


@pytest.mark.parametrize("kind", sorted(ATTENTIONS))
def test_every_attention_starts_at_its_defaults(kind: str) -> None:
    q, k, v = make(value_width=8)
    module = AttentionCore(4, 8, kind).double().eval()
    gate = {"gate": torch.randn_like(q)} if module.needs_gate else {}
    output, weights = module(q, k, v, causal=True, need_weights=True, **gate)
    if kind == "rela":
        # Without a gate the public function multiplies by 1, with a gate of 0 by sigmoid(0).
        gate = {"gate": torch.zeros(32, dtype=q.dtype)}
    result = attention(kind, q, k, v, causal=True, return_weights=True, **gate)
    torch.testing.assert_close(output, result.output, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(weights, result.weights, rtol=1e-6, atol=1e-7)
    repr(module)


def test_options_that_are_given_are_fixed() -> None:
    module = AttentionCore(4, 8, options={"threshold": -2.0, "power": 8})
    assert [name for name, _ in module.named_parameters()] == ["gamma_offset"]
    options = module.options()
    assert options["threshold"] == -2.0 and options["gamma"].item() == 2 * 8**8
    assert not list(AttentionCore(4, 8, "softmax").parameters())
    paper = dict(AttentionCore(4, 8, "relu").named_parameters())
    assert list(paper) == ["gamma_offset"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("reul",), "unknown attention 'reul'; known: "),
        (("softmax", {"power": 2}), "softmax attention has no option 'power'; its options: none"),
        (("softmax", {"row_loss": 0.1}), "row_loss must be 0 for softmax attention, .* got 0.1"),
        (("relu", {"row_loss": -1}), "row_loss must be a number of at least 0, got -1"),
        (("relu", {"power": 3}), "power must be 1, 2, 4 or 8, got 3"),
        (("relu", {"impl": "cuda"}), "impl must be one of auto, .* got 'cuda'"),
        (("relu", {"gamma": torch.ones(4)}), "option gamma must be a number, got a tensor"),
        (("normalised_relu", {"row_normalise": None}), "row_normalise must be a .* got None"),
        (("normalised_relu", {"power": "4"}), "power must be 1, 2, 4 or 8, got '4'"),
        (("relu", "power"), "attention_options must be a mapping of names to .*, got 'power'"),
        (("differential",), "differential attention needs an even width D, got 7"),
    ],
)
def test_mistakes_are_one_sentence(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        AttentionCore(4, 7, *arguments)


def test_copies_pickles_and_state_dicts() -> None:
    q, k, v = make()
    module = core().eval()
    expected = module(q, k, v)[0]
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    loaded = AttentionCore(4, 8, value_dim=6).double().eval()
    loaded.load_state_dict(module.state_dict())
    saved = torch.load(buffer, weights_only=False)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), saved, loaded):
        assert_same(other(q, k, v)[0], expected)
    # Weights of a softmax model leave the offsets as they are.
    module.load_state_dict({})
    assert_same(module(q, k, v)[0], expected)
    with pytest.raises(RuntimeError, match="gamma_offset"):
        module.load_state_dict({"threshold_offset": torch.zeros(4)})


def test_half_precision_keeps_small_offsets() -> None:
    module = AttentionCore(4, 8).to(torch.bfloat16)
    module.threshold_offset.data.fill_(0.001)
    assert module.options()["threshold"].dtype == torch.float32
    assert (module.options()["threshold"][0] + 8).item() == pytest.approx(0.001, rel=0.01)


@pytest.mark.parametrize("kind", ["normalised_relu", "relu_n"])
def test_packed_sequences_are_those_of_separate_calls(kind: str) -> None:
    module = core(kind, row_loss=0.5)
    lengths = [3, 0, 5]
    ends = torch.tensor([0, 3, 3, 8])
    q, k = (torch.randn(9, 4, 8, dtype=torch.float64) for _ in range(2))
    v = torch.randn(9, 4, 6, dtype=torch.float64)
    inputs = [each.requires_grad_() for each in (q, k, v)]
    output = module.packed(q, k, v, ends, ends, 5, 5, causal=True)
    grads = torch.autograd.grad(output.square().sum(), inputs)
    # The same rows as a padded batch with lengths.
    padded = []
    for each in inputs:
        parts = [part.transpose(0, 1) for part in each[:8].split(lengths)]
        parts = [nn.functional.pad(part, (0, 0, 0, 5 - part.shape[1])) for part in parts]
        padded.append(torch.stack(parts))
    query_mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    dense, _ = module(
        *padded, causal=True, key_lengths=torch.tensor(lengths), query_mask=query_mask
    )
    rows = [dense[index, :, :length].transpose(0, 1) for index, length in enumerate(lengths)]
    rows = torch.cat([*rows, torch.zeros(1, 4, 6)])
    torch.testing.assert_close(output, rows)
    torch.testing.assert_close(grads, torch.autograd.grad(rows.square().sum(), inputs))


def test_packed_sequences_need_a_rectified_attention() -> None:
    ends = torch.tensor([0, 3])
    q = torch.randn(3, 4, 8)
    for kind in ("softmax", "rela", "leaky_relu"):
        with pytest.raises(UserError, match=f"'{kind}' takes no packed sequences; rectified ones"):
            AttentionCore(4, 8, kind).packed(q, q, q, ends, ends, 3, 3)


def test_compiles_without_graph_breaks() -> None:
    q, k, v = make(dtype=torch.float32, requires_grad=True)
    module = core(**LOSSES).float()
    inputs = [q, k, v, *module.parameters()]
    expected = torch.autograd.grad(module(q, k, v, causal=True)[0].square().sum(), inputs)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    output, _ = compiled(q, k, v, causal=True)
    found = torch.autograd.grad(output.square().sum(), inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

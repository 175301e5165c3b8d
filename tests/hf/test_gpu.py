"""Models of transformers on a GPU: every mask reaches the Triton kernels."""

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from tests.hf.families import DECODER, padding, tokens  # noqa: E402  # after the check

pytestmark = pytest.mark.gpu

# The kernels have a least head width of 16.
SIZES = {**DECODER, "hidden_size": 64, "num_key_value_heads": 2}


def build(
    impl: str, device: str, sliding: bool = False, attention: str = "normalised_relu"
) -> object:
    config = transformers.Qwen2Config(
        **SIZES,
        use_sliding_window=sliding,
        sliding_window=5,
        layer_types=["full_attention", "sliding_attention" if sliding else "full_attention"],
    )
    config.attention_options = {"impl": impl}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.to(device)


def arguments(form: str) -> dict[str, Tensor]:
    ids = tokens(2, 7)
    if form in ("left", "right"):
        mask = padding(form == "left")
        positions = (mask.cumsum(dim=-1) - 1).clamp_min(0)
        return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    if form == "packed":
        positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4, 5]])
        return {"input_ids": ids, "position_ids": positions}
    return {"input_ids": ids}


@pytest.mark.parametrize("attention", ["normalised_relu", "relu"])
@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("form", ["plain", "left", "right", "packed"])
def test_triton_agrees_with_the_reference(form: str, sliding: bool, attention: str) -> None:
    results = []
    for impl, device in (("triton", "cuda"), ("reference", "cpu")):
        model = build(impl, device, sliding, attention).train()  # type: ignore[attr-defined]
        batch = {key: value.to(device) for key, value in arguments(form).items()}
        logits = model(**batch, use_cache=False).logits
        valid = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        logits[valid].square().sum().backward()
        gradients = {key: p.grad.cpu() for key, p in model.named_parameters()}
        results.append((logits[valid].detach().cpu(), gradients))
    (found, found_gradients), (expected, gradients) = results
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
    for key, gradient in gradients.items():
        error = (found_gradients[key] - gradient).norm() / (gradient.norm() + 1e-3)
        assert error < 0.05, key


@pytest.mark.parametrize(
    ("cache", "beams", "compiles"),
    [(None, 1, False), (None, 3, False), ("static", 1, True), ("static", 3, False)],
)
def test_generation_agrees_with_the_reference(
    cache: str | None, beams: int, compiles: bool
) -> None:
    """transformers compiles the decoding steps of a static cache on a GPU by itself."""
    found = []
    for impl, device in (("triton", "cuda"), ("reference", "cpu")):
        model = build(impl, device).eval()  # type: ignore[attr-defined]
        batch = {key: value.to(device) for key, value in arguments("left").items()}
        del batch["position_ids"]
        options = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams}
        options["disable_compile"] = not compiles
        out = model.generate(**batch, **options, cache_implementation=cache, eos_token_id=None)
        found.append(out.cpu())
    assert (found[0] == found[1]).float().mean() > 0.9


def test_training_in_bfloat16_with_compiled_layers() -> None:
    losses = []
    for compiled in (False, True):
        model = build("auto", "cuda").train()  # type: ignore[attr-defined]
        if compiled:
            for layer in model.model.layers:
                layer.compile()
        ids = tokens(4, 64).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
        losses.append(float(loss.detach()))
    assert abs(losses[0] - losses[1]) < 0.02

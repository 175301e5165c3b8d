"""Mixed precision by autocast: rotary embeddings return float32 beside values in half precision."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from tests.hf.families import (  # noqa: E402  # after the check for the package
    DECODERS,
    FAMILIES,
    build,
    inputs,
    tokens,
    valid_logits,
)

BFLOAT16 = torch.bfloat16


def loss_of(name: str, model: Any) -> Tensor:
    logits = valid_logits(name, model(**inputs(name)).logits)
    return logits.float().square().mean()


@pytest.mark.parametrize("attention", ["normalised_relu", "softmax"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_training_step_of_every_family(name: str, attention: str) -> None:
    model = build(name, attention).train()
    with torch.autocast("cpu", BFLOAT16):
        loss = loss_of(name, model)
    loss.backward()
    mixed = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    plain = loss_of(name, model)
    plain.backward()
    torch.testing.assert_close(loss, plain, atol=0.1, rtol=0.1)
    expected = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert mixed.keys() == expected.keys()
    for key, gradient in mixed.items():
        assert gradient.dtype is torch.float32 and bool(gradient.isfinite().all()), key


@pytest.mark.parametrize("form", ["packed", "maps", "cached"])
@pytest.mark.parametrize("name", DECODERS)
def test_every_way_through_a_decoder(name: str, form: str) -> None:
    model, ids = build(name, "normalised_relu"), tokens(2, 7)
    arguments: dict[str, Any] = {"input_ids": ids, "use_cache": form == "cached"}
    if form == "packed":
        arguments["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * 2)
    if form == "maps":
        arguments["output_attentions"] = True
    with torch.no_grad():
        expected = model(**arguments).logits
        with torch.autocast("cpu", BFLOAT16):
            if form == "cached":
                first = model(input_ids=ids[:, :4], use_cache=True)
                rest = model(input_ids=ids[:, 4:], past_key_values=first.past_key_values)
                logits = torch.cat([first.logits, rest.logits], dim=1)
            else:
                logits = model(**arguments).logits
    error = (logits.float() - expected).norm() / expected.norm()
    assert error < 0.1


@pytest.mark.slow
def test_compiled_layers_of_llama() -> None:
    torch.compiler.reset()
    losses = []
    for is_compiled in (False, True):
        model = build("llama", "normalised_relu").train()
        if is_compiled:
            for layer in model.model.layers:
                layer.compile(fullgraph=True, backend="aot_eager")
        ids = tokens(2, 7)
        with torch.autocast("cpu", BFLOAT16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
        losses.append(float(loss.detach()))
    assert abs(losses[0] - losses[1]) < 0.02

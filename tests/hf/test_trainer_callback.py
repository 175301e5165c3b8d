"""The callback of `Trainer`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from reluformer import ModelConfig, ReLUFormerLM  # noqa: E402  # after the checks for the packages
from reluformer.errors import UserError  # noqa: E402
from reluformer.hf import (  # noqa: E402
    ReLUAttentionCallback,
    ReLUFormerForCausalLM,
    replace_attention_modules,
)
from reluformer.hf.layers import layer_attentions  # noqa: E402
from reluformer.hf.statistics import recording, summarise  # noqa: E402
from reluformer.model.config import AttentionConfig  # noqa: E402
from reluformer.model.records import AttentionRecord  # noqa: E402
from reluformer.nn import MultiheadAttention, TransformerEncoderLayer  # noqa: E402
from reluformer.ops.stats import summarise as weight_statistics  # noqa: E402
from tests.hf.families import VOCABULARY, build, tokens  # noqa: E402


class Scales(transformers.TrainerCallback):  # type: ignore[misc]  # no types there
    """Notes the scale of the losses in every step."""

    def __init__(self) -> None:
        self.seen: set[float] = set()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        parts = [part for part in model.modules() if hasattr(part, "row_loss_scale")]
        self.seen |= {part.row_loss_scale for part in parts}


def train(model: Any, callback: Any, folder: Path, **options: Any) -> list[dict[str, Any]]:
    data = [{"input_ids": ids, "labels": ids} for ids in tokens(16, 6)]
    defaults = {
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    arguments = transformers.TrainingArguments(
        str(folder),
        **{**defaults, **options},
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        learning_rate=1e-2,
    )
    scales = Scales()
    callbacks = [callback, scales]
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
    trainer.train()
    assert scales.seen == {1 / arguments.gradient_accumulation_steps}
    return [row for row in trainer.state.log_history if "loss" in row]


def test_statistics_are_logged(tmp_path: Path) -> None:
    model = build("llama", "normalised_relu")
    rows = train(model, ReLUAttentionCallback(), tmp_path)
    assert len(rows) == 2
    for row in rows:
        assert row["row_sum"] > 0 and row["entropy"] > 0
        assert 0 <= row["zeros"] < 1 and 0 <= row["dead_rows"] < 1
    assert not any(layer._forward_hooks for layer in layer_attentions(model))


class LanguageModel(nn.Module):
    """A model that is not of transformers, with a layer of `reluformer.nn`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.layer = TransformerEncoderLayer(16, 2, 16, batch_first=True)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.layer(self.embedding(input_ids)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def test_models_with_layers_of_this_package_are_served(tmp_path: Path) -> None:
    model = LanguageModel()
    callback = ReLUAttentionCallback(row_loss=0.1, entropy_loss=0.2)
    rows = train(model, callback, tmp_path, gradient_accumulation_steps=2)
    assert len(rows) == 2
    for row in rows:
        assert row["row_sum"] > 0 and row["entropy"] > 0 and 0 <= row["zeros"] < 1
    core = model.layer.self_attn.core
    assert (core.row_loss, core.entropy_loss, core.row_loss_scale) == (0.1, 0.2, 1.0)
    assert not core._forward_hooks


def test_statistics_contain_the_bias_of_a_float_mask() -> None:
    layer = MultiheadAttention(16, 2, batch_first=True, attention="softmax")
    x, bias = torch.randn(2, 6, 16), 20.0 * torch.eye(6)
    with recording([layer.core]) as records:
        layer(x, x, x, attn_mask=bias)
    summary = summarise(records)
    assert summary is not None and summary.entropy < 0.01


def own_model(kind: str = "relu") -> ReLUFormerForCausalLM:
    torch.manual_seed(0)
    attention = AttentionConfig(kind)
    config = ModelConfig(
        VOCABULARY, width=16, heads=2, decoder_layers=2, slots=16, attention=attention
    )
    return ReLUFormerForCausalLM.from_model(ReLUFormerLM(config))


def test_our_own_models_are_served_and_logging_changes_no_step(tmp_path: Path) -> None:
    trained = []
    for log in (True, False):
        model = own_model()
        callback = ReLUAttentionCallback(row_loss=0.1, entropy_loss=0.2, log=log)
        rows = train(model, callback, tmp_path, gradient_accumulation_steps=2)
        assert ("row_sum" in rows[0] and 0 <= rows[1]["zeros"] < 1) == log
        assert (model.row_loss, model.entropy_loss, model.row_loss_scale) == (0.1, 0.2, 1.0)
        trained.append(model.state_dict())
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])


def test_losses_of_our_own_models_that_cannot_act_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must be 0 for softmax attention"):
        train(own_model("softmax"), ReLUAttentionCallback(row_loss=0.1), tmp_path)


def test_rows_whose_sum_underflows_are_dead() -> None:
    weights = torch.tensor([[1e-44, 1e-39], [0.25, 0.5]]).view(1, 1, 2, 2)
    stats = weight_statistics(weights, None)
    read = AttentionRecord("layer", 0, stats, torch.ones(1, 1, 2).bool(), None)
    summary = summarise([read])
    assert summary is not None and summary.dead_rows == 0.5


def test_a_converted_and_fine_tuned_folder_loads_as_relu(tmp_path: Path) -> None:
    model = build("llama", "sdpa")
    replace_attention_modules(model, "normalised_relu", {"power": 2})
    train(model, ReLUAttentionCallback(), tmp_path, save_strategy="steps", save_steps=2)
    (folder,) = tmp_path.glob("checkpoint-2")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert loaded.config._attn_implementation == "normalised_relu"
    offsets = [layer.threshold_offset for layer in layer_attentions(loaded)]
    assert all(bool(offset.any()) for offset in offsets)
    ids = tokens(1, 6)
    torch.testing.assert_close(loaded(ids).logits, model.eval()(ids).logits)


def test_losses_pull_row_sums_towards_one(tmp_path: Path) -> None:
    found = []
    for weight in (0.0, 10.0):
        model = build("llama", "normalised_relu", gamma=100.0)
        rows = train(model, ReLUAttentionCallback(row_loss=weight), tmp_path, max_steps=15)
        assert layer_attentions(model)[0].row_loss == weight
        found.append(abs(torch.tensor(rows[-1]["row_sum"]).log()))
    assert found[1] < found[0]


def test_accumulated_gradients_scale_the_losses(tmp_path: Path) -> None:
    model = build("llama", "normalised_relu")
    train(
        model,
        ReLUAttentionCallback(entropy_loss=0.1),
        tmp_path,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
    )
    layers = layer_attentions(model)
    assert all(layer.row_loss_scale == 1.0 and layer.entropy_loss == 0.1 for layer in layers)


@pytest.mark.parametrize(
    ("attention", "options", "message"),
    [
        ("sdpa", {}, "has none"),
        ("softmax", {"row_loss": 0.1}, "must be 0 for softmax"),
    ],
)
def test_models_without_such_losses_are_refused(
    attention: str, options: dict[str, float], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        train(build("llama", attention), ReLUAttentionCallback(**options), tmp_path)
    with pytest.raises(UserError, match="entropy_loss must be"):
        ReLUAttentionCallback(entropy_loss=-1.0)


def test_padding_is_left_out_of_the_statistics() -> None:
    model = build("llama", "relu")
    ids = tokens(1, 6)
    layers = layer_attentions(model)
    with recording(layers) as alone:
        model(input_ids=ids)
    padded_ids = torch.cat([ids, ids[:, :2]], dim=1)
    mask = torch.tensor([[1] * 6 + [0] * 2])
    with recording(layers) as padded:
        model(input_ids=padded_ids, attention_mask=mask)
    expected, found = summarise(alone), summarise(padded)
    assert expected is not None and found is not None
    assert found == pytest.approx(expected, rel=1e-5)
    assert summarise([]) is None

"""A Llama-shaped language model with one line changed, trained by transformers' `Trainer`.

    python -m benchmarks.language_model train --data lm --attention normalised_relu --out relu.json
    python -m benchmarks.language_model train --data lm --attention sdpa --out softmax.json
    python -m benchmarks.language_model speed --out speed.json

The model has about 124 M parameters: 12 layers of width 768 with 12 heads of 64. `--data` is a
folder of `benchmarks.language_model_data`. `train` writes the loss curve, the loss on the dev text,
statistics of the attentions and tokens per second. `speed` writes tokens per second of training
steps and of prefill at several lengths, for transformers' sdpa on cuDNN, for our attention through
transformers, and for the same model with the kernel called directly. `--tiny` runs either on a CPU
in seconds, with autocast as on a GPU.
"""

import argparse
import datetime
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import reluformer.hf
from benchmarks.language_model_data import Ids, read_ids
from reluformer.console import guarded
from reluformer.errors import UserError
from reluformer.files import write_text
from reluformer.hf.layers import ATTRIBUTE, layer_attentions
from reluformer.hf.masks import attention_mask
from reluformer.hf.statistics import recording, summarise
from reluformer.info import commit, info

DIRECT = "kernel called directly"
"""Attention of the speed table that bypasses the integration."""
RECOMMENDED = "normalised_relu"


class Size(NamedTuple):
    """Shape of the model and of a training step."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    inner: int = 2560
    vocabulary: int = 16_000
    length: int = 1024
    batch: int = 64
    steps: int = 1526
    """100 M tokens of 64 sequences of 1024."""


TINY = Size(2, 64, 2, 128, 16_000, 64, 4, 12)


def build(
    size: Size, attention: str, length: int | None = None, options: dict[str, Any] | None = None
) -> nn.Module:
    """The model with random weights; the attention is the only difference between two models."""
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=max(size.length, length or 0),
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **({"attention_options": options} if options else {}),
    )
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Consecutive windows of token ids; `labels` are the same ids, which the model shifts."""

    def __init__(self, ids: Ids, length: int) -> None:
        self.ids, self.length = ids, length

    def __len__(self) -> int:
        return len(self.ids) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = index * self.length
        ids = torch.from_numpy(self.ids[start : start + self.length].astype("int64"))
        return {"input_ids": ids, "labels": ids}


class _DevLoss(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Evaluates the dev text and the attentions at some steps."""

    def __init__(self, dev: Windows, size: Size, device: str) -> None:
        self.dev, self.size, self.device = dev, size, device
        self.points: list[dict[str, float]] = []
        self.every = max(size.steps // 6, 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self.evaluate(kwargs["model"], state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop at a loss that is not finite; the weights are lost by then."""
        if not math.isfinite(float(kwargs["logs"].get("loss", 0.0))):
            raise UserError(f"the training diverged before step {state.global_step}")

    @torch.no_grad()
    def evaluate(self, model: nn.Module, step: int) -> None:
        """Append the mean negative log-likelihood of a token in nats, and the statistics."""
        model.eval()
        total = count = 0.0
        batches = torch.utils.data.DataLoader(self.dev, batch_size=8)
        autocast = torch.autocast(self.device, torch.bfloat16)
        layers = layer_attentions(model)
        with torch.compiler.set_stance("force_eager"), autocast, recording(layers) as records:
            for number, batch in enumerate(batches):
                ids = batch["input_ids"].to(self.device)
                logits = model(input_ids=ids).logits[:, :-1].float()
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
                total, count = total + float(loss) * len(ids), count + len(ids)
                if number == 0:
                    # One batch is enough for the statistics.
                    for layer in layers:
                        layer.records = None
        summary = summarise(records)
        point = {"step": step, "dev_loss": total / count}
        self.points.append(point if summary is None else {**point, **summary._asdict()})
        print(json.dumps(self.points[-1]), flush=True)
        model.train()


def train(size: Size, attention: str, data: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train one model and return its curve, dev losses and speed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = {} if options.power is None else {"power": options.power}
    model = build(size, attention, options=chosen)
    if options.compile:
        compile_layers(model)
    windows, dev = (
        Windows(read_ids(data / f"{name}.u16.xz"), size.length) for name in ("train", "dev")
    )
    evaluation = _DevLoss(dev, size, device)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=size.steps,
            per_device_train_batch_size=size.batch,
            learning_rate=options.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=max(size.steps // 20, 1),
            weight_decay=0.1,
            adam_beta2=0.95,
            max_grad_norm=1.0,
            bf16=True,
            optim="adamw_torch_fused",
            logging_steps=max(size.steps // 75, 1),
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_num_workers=4 if device == "cuda" else 0,
            dataloader_drop_last=True,
            seed=options.seed,
            use_cpu=device == "cpu",
        )
        trainer = Trainer(model, arguments, train_dataset=windows, callbacks=[evaluation])
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
    history = [
        {"step": row["step"], "loss": row["loss"]}
        for row in trainer.state.log_history
        if "loss" in row
    ]
    tokens = size.steps * size.batch * size.length
    return {
        "attention": attention,
        "options": chosen,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens": tokens,
        "text_tokens": len(windows) * size.length,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "curve": history,
        "dev": evaluation.points,
        "learning_rate": options.learning_rate,
        "seed": options.seed,
        "compiled": options.compile,
    }


def compile_layers(model: nn.Module) -> None:
    """Compile the decoder layers; the mask is made outside of them, so causality stays a flag."""
    # Layers of one class share a graph, unless a number in them differs.
    torch._dynamo.config.recompile_limit = 64
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.compile()  # type: ignore[union-attr,operator]


def attend_directly(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """The kernel of the recommended attention, with constant options and no row loss."""
    output = reluformer.relu_attention(
        query,
        key,
        value,
        causal=True,
        power=4,
        threshold=module.direct_threshold.float(),
        gamma=512.0,
        length_exponent=1.0,
        row_normalise=1e-4,
        scale=kwargs["scaling"],
    )
    return output.transpose(1, 2).contiguous(), None


def build_for_speed(size: Size, attention: str, length: int) -> nn.Module:
    """A model of the speed table."""
    if attention == DIRECT:
        AttentionInterface.register(DIRECT, attend_directly)
        AttentionMaskInterface.register(DIRECT, attention_mask)
    model = build(size, attention, length)
    if attention == DIRECT:
        for layer in model.model.layers:  # type: ignore[union-attr]
            module = layer.self_attn  # type: ignore[union-attr]
            threshold = nn.Parameter(torch.full((size.heads,), -4.0))
            module.direct_threshold = threshold  # type: ignore[union-attr]
            assert not hasattr(module, ATTRIBUTE)
    return model


@contextmanager
def forced_cudnn(attention: str) -> Iterator[None]:
    """Context in which SDPA runs on cuDNN or fails."""
    is_cudnn = attention == "sdpa" and torch.cuda.is_available()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if is_cudnn else nullcontext():
        yield


def speed_row(
    size: Size, attention: str, length: int, tokens: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Tokens per second of a training step and of prefill: medians over repetitions."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_for_speed(size, attention, length).to(device)
    if options.compile:
        compile_layers(model)
    batch = max(tokens // length, 1)
    ids = torch.randint(3, size.vocabulary, (batch, length), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    autocast = torch.autocast(device, torch.bfloat16)

    def step() -> None:
        with autocast:
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with forced_cudnn(attention):
        model.train()
        training = median_seconds(step, options.repetitions)
        # Weights in half precision, as in serving.
        model = model.eval().to(torch.bfloat16)

        @torch.inference_mode()
        def prefill() -> None:
            model(input_ids=ids, logits_to_keep=1)

        prefilling = median_seconds(prefill, options.repetitions)
    return {
        "attention": attention,
        "length": length,
        "batch": batch,
        "step_tokens_per_second": batch * length / training,
        "prefill_tokens_per_second": batch * length / prefilling,
        "compiled": options.compile,
    }


def median_seconds(function: Any, repetitions: int) -> float:
    """Median time of a call, after three calls that are not timed."""
    times = []
    for number in range(repetitions + 3):
        _synchronise()
        start = time.perf_counter()
        function()
        _synchronise()
        if number >= 3:
            times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure_speed(size: Size, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of the speed table; a combination that fails has its error in place of times."""
    lengths = (64, 128) if options.tiny else (2048, 8192)
    tokens = 256 if options.tiny else 32_768
    rows = []
    for length in lengths:
        for attention in ("sdpa", RECOMMENDED, DIRECT, "relu"):
            try:
                row = speed_row(size, attention, length, tokens, options)
            except RuntimeError as error:
                row = {"attention": attention, "length": length, "error": str(error)[:300]}
            print(json.dumps(row), flush=True)
            rows.append(row)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the two commands and write its JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["train", "speed"])
    parser.add_argument("--data", type=Path, help="folder of benchmarks.language_model_data")
    parser.add_argument("--power", type=int, help="power of the attention, if not its default")
    parser.add_argument("--attention", default=RECOMMENDED)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, help="training steps; 1526 are 100 M tokens")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    if options.compile is None:
        options.compile = not options.tiny
    if options.command == "train" and options.data is None:
        parser.error("train needs --data")
    if options.power is not None and options.attention not in reluformer.ATTENTIONS:
        parser.error(f"--power needs an attention of this package, got {options.attention}")
    torch.set_float32_matmul_precision("high")
    size = TINY if options.tiny else Size()
    if options.steps is not None:
        size = size._replace(steps=options.steps)
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": info(),
        "size": size._asdict(),
    }
    if options.command == "train":
        result |= train(size, options.attention, options.data, options)
        final = result["dev"][-1]["dev_loss"]
        print(
            f"{options.attention}: dev loss {final:.4f}, {result['tokens_per_second']:,.0f} tok/s"
        )
    else:
        result["rows"] = measure_speed(size, options)
    write_text(options.out, json.dumps(result, indent=1))


if __name__ == "__main__":
    guarded(main)()

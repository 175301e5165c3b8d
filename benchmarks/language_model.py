"""A Llama-shaped language model with one line changed, trained by transformers' `Trainer`.

    python -m benchmarks.language_model train --data lm --attention normalised_relu --out relu.json
    python -m benchmarks.language_model train --data lm --attention sdpa --out softmax.json
    python -m benchmarks.language_model speed --out speed.json
    python -m benchmarks.language_model speed --lengths 16384 --tokens 16384 --out speed-16k.json

The model has about 124 M parameters: 12 layers of width 768 with 12 heads of 64. `--data` is a
folder of `benchmarks.language_model_data`. `train` writes the loss curve, the loss on the dev text,
statistics of the attentions and tokens per second. `speed` writes tokens per second of training
steps and of prefill at several lengths, for transformers' sdpa on cuDNN, for our attention through
transformers, and for the same model with the kernel called directly; the attention's share of a
step, from its calls alone; and the speed-up that this share allows. `--tiny` runs either on a CPU
in seconds, with autocast as on a GPU.
"""

import argparse
import datetime
import json
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import reluformer.hf
from benchmarks.language_model_build import TINY, Size, build, compile_layers
from benchmarks.language_model_data import Ids, read_ids
from benchmarks.language_model_speed import ATTENTIONS, measure_speed
from reluformer.console import guarded
from reluformer.errors import UserError
from reluformer.files import write_text
from reluformer.hf.layers import layer_attentions
from reluformer.hf.statistics import recording, summarise
from reluformer.info import commit, info

RECOMMENDED = "normalised_relu"


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
        layers, records = layer_attentions(model), []
        with torch.compiler.set_stance("force_eager"), autocast:
            for number, batch in enumerate(batches):
                ids = batch["input_ids"].to(self.device)
                # One batch is enough for the statistics.
                with recording(layers if number == 0 else ()) as recorded:
                    logits = model(input_ids=ids).logits[:, :-1].float()
                records += recorded
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
                total, count = total + float(loss) * len(ids), count + len(ids)
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
    parser.add_argument("--lengths", type=int, nargs="+", help="default: 2048 8192")
    parser.add_argument("--tokens", type=int, help="tokens of a step; default: 32,768")
    parser.add_argument("--attentions", nargs="+", choices=ATTENTIONS, default=list(ATTENTIONS))
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    if options.compile is None:
        options.compile = not options.tiny
    options.lengths = options.lengths or ([64, 128] if options.tiny else [2048, 8192])
    options.tokens = options.tokens or (256 if options.tiny else 32_768)
    if options.command == "train" and options.data is None:
        parser.error("train needs --data")
    if options.command == "speed" and options.power is not None:
        parser.error("speed takes no --power; it measures powers 4 and 8")
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

"""Models of torch.nn and timm with one line changed, against their softmax twins.

    python -m benchmarks.drop_in_twins --out twins.json
    python -m benchmarks.drop_in_twins --tasks transformer --seeds 1 --steps 100 --out quick.json

Two tasks, each with a plain training loop, several seeds, and a learning rate that ends at zero:

- transformer: `torch.nn.Transformer` translates the English sentences of the sample task into
  German.
- vit: a `VisionTransformer` of timm names the shapes in the generated images of
  `examples/timm_vit.py`.

The softmax twin is the model of torch or timm itself. The other model is the same one with the same
weights after `replace_attention(model)`. Both see the same batches. The file holds losses on
held-out examples in nats during training, and the share of dead rows: rows that see a key and give
no key a weight.
"""

import argparse
import datetime
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from reluformer import relu_attention
from reluformer.console import guarded
from reluformer.data.synthetic.sample import sentences
from reluformer.data.tokenizer import Tokenizer
from reluformer.files import write_text
from reluformer.info import commit, info
from reluformer.nn import replace_attention
from reluformer.nn.core import RECOMMENDED, AttentionCore

ATTENTIONS = ("softmax", RECOMMENDED)
PAD, START, END = 0, 1, 2
VOCABULARY = 600
LENGTH = 64
"""Largest number of tokens of a sentence."""

Batch = tuple[Tensor, ...]


class Task(NamedTuple):
    """A model, its data and its training."""

    build: Callable[[], nn.Module]
    batches: Callable[[int, int], Iterator[Batch]]
    """Training batches from a seed and a number of batches."""
    validation: Callable[[], Sequence[Batch]]
    loss: Callable[[nn.Module, Batch], Tensor]
    """Mean loss of a batch in nats."""
    steps: int
    learning_rate: float


class TranslationModel(nn.Module):
    """Embeddings around `torch.nn.Transformer`."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.transformer = nn.Transformer(
            width, 4, 2, 2, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits [B, T, VOCABULARY] from ids of the source [B, S] and the target so far [B, T]."""
        padding = source == PAD
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1]).isinf()
        output: Tensor = self.transformer(
            self.embed(source),
            self.embed(target),
            tgt_mask=causal,
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return output @ self.tokens.weight.T / output.shape[-1] ** 0.5

    def embed(self, ids: Tensor) -> Tensor:
        """Sum of token and position embeddings, [B, T, width]."""
        embedded: Tensor = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        return embedded


@cache
def tokenizer() -> Tokenizer:
    """Subwords of the sample task."""
    lines = [line for pair in sentences(0, 4000, split="train") for line in pair]
    return Tokenizer.train(lines, VOCABULARY)


def encoded(texts: Sequence[str]) -> Tensor:
    """Ids [B, T] of sentences, each between start and end, padded to one length."""
    rows = [[START, *ids[: LENGTH - 2], END] for ids in tokenizer().encode_batch(texts)]
    longest = max(map(len, rows))
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


def translation_batches(seed: int, count: int, size: int = 48) -> Iterator[Batch]:
    """Batches of sentences of similar lengths, in random order."""
    pool = 16
    for first in range(0, count, pool):
        pairs = list(sentences(seed * 100_000 + first, pool * size, split="train"))
        pairs.sort(key=lambda pair: len(pair[1]))
        order = torch.randperm(pool, generator=torch.Generator().manual_seed(first))
        for index in order.tolist()[: count - first]:
            yield _encoded_pairs(pairs[index * size : (index + 1) * size])


def translation_validation() -> list[Batch]:
    """Sentences of the dev split."""
    pairs = sorted(sentences(0, 1024, split="dev"), key=lambda pair: len(pair[1]))
    return [_encoded_pairs(pairs[first : first + 128]) for first in range(0, len(pairs), 128)]


def _encoded_pairs(pairs: Sequence[tuple[str, str]]) -> Batch:
    source, target = zip(*pairs, strict=True)
    return encoded(source), encoded(target)


def translation_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean negative log-likelihood of a target token."""
    source, target = batch
    logits = model(source, target[:, :-1])
    return cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)


def build_vit() -> nn.Module:
    """A ViT of 2 layers of width 48 on patches of 4 x 4 pixels."""
    from timm.models import VisionTransformer

    model: nn.Module = VisionTransformer(
        img_size=16, patch_size=4, embed_dim=48, depth=2, num_heads=4, num_classes=4,
        class_token=False, global_pool="avg",
    )  # fmt: skip
    return model


def image_batches(seed: int, count: int, size: int = 64) -> Iterator[Batch]:
    """Batches of new images."""
    from examples.timm_vit import images

    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield images(size, generator)


def image_validation() -> list[Batch]:
    """The same 4,096 images for every model."""
    return list(image_batches(1000, 16, 256))


def image_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean negative log-likelihood of a label."""
    images, labels = batch
    return cross_entropy(model(images), labels)


TASKS = {
    "transformer": Task(
        TranslationModel, translation_batches, translation_validation, translation_loss, 1500, 2e-3
    ),
    "vit": Task(build_vit, image_batches, image_validation, image_loss, 3500, 2e-3),
}


def train(task: Task, attention: str, seed: int, steps: int) -> dict[str, Any]:
    """Train one model, and return its losses on held-out examples and its dead rows."""
    torch.manual_seed(seed)
    model = task.build()
    if attention != "softmax":
        replace_attention(model, attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, task.learning_rate, total_steps=steps, pct_start=0.1
    )
    validation, curve, start = task.validation(), [], time.perf_counter()
    for step, batch in enumerate(task.batches(seed, steps), start=1):
        loss = task.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % max(steps // 5, 1) == 0 or step == steps:
            curve.append({"step": step, "loss": validation_loss(task, model, validation)})
    with counting_dead_rows(model) as counts:
        final = validation_loss(task, model, validation)
    row = {"steps": steps, "seconds": time.perf_counter() - start, "loss": final, "curve": curve}
    return row if attention == "softmax" else {**row, "dead_rows": counts[0] / counts[1]}


@torch.no_grad()
def validation_loss(task: Task, model: nn.Module, batches: Sequence[Batch]) -> float:
    """Mean loss over batches in nats."""
    model.eval()
    losses = [task.loss(model, batch).item() for batch in batches]
    model.train()
    return sum(losses) / len(losses)


@contextmanager
def counting_dead_rows(model: nn.Module) -> Iterator[list[int]]:
    """Count dead rows and rows of all attentions while the context is open."""
    counts = [0, 0]

    def count(core: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(core, AttentionCore)
        rule = core.row.rectified(core.options())
        assert rule is not None
        visible = {
            name: kwargs[name] for name in ("mask", "causal", "key_lengths") if name in kwargs
        }
        sums = relu_attention(
            *args, **visible, gamma=rule.gamma, length_exponent=rule.length_exponent,
            power=rule.power, threshold=rule.threshold, return_sums="row_sum",
        ).sums  # fmt: skip
        assert sums is not None
        counts[0] += int(((sums.row_sum == 0) & (sums.visible > 0)).sum())
        counts[1] += sums.row_sum.numel()

    cores = [module for module in model.modules() if isinstance(module, AttentionCore)]
    hooks = [core.register_forward_pre_hook(count, with_kwargs=True) for core in cores]
    yield counts
    for hook in hooks:
        hook.remove()


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean losses of each task and attention, and the mean difference from softmax."""
    means = []
    for task in dict.fromkeys(row["task"] for row in rows):
        losses = {
            attention: [r["loss"] for r in rows if (r["task"], r["attention"]) == (task, attention)]
            for attention in ATTENTIONS
        }
        softmax, ours = (sum(losses[name]) / len(losses[name]) for name in ATTENTIONS)
        means.append(
            {"task": task, "softmax": softmax, RECOMMENDED: ours, "difference": ours - softmax}
        )
    return means


def main(arguments: Sequence[str] | None = None) -> None:
    """Train all pairs of twins and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS], default=[*TASKS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, help="training steps; by default those of the task")
    options = parser.parse_args(arguments)
    machine = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": info(),
    }
    rows: list[dict[str, Any]] = []
    for name in options.tasks:
        for seed in options.seeds:
            for attention in ATTENTIONS:
                task = TASKS[name]
                row = train(task, attention, seed, options.steps or task.steps)
                rows.append({"task": name, "attention": attention, "seed": seed, **row})
                print(json.dumps(rows[-1]), flush=True)
            # After every pair: a run of many minutes may be interrupted.
            result = {**machine, "rows": rows, "means": summary(rows)}
            write_text(options.out, json.dumps(result, indent=1))


if __name__ == "__main__":
    guarded(main)()

"""Six small tasks that separate attentions: vectors in, vectors out, minutes on a CPU.

Every task is a function of a generator: a batch of inputs [B, T, width], targets, and a mask of
the positions that count. Scores run from 0 (no better than a constant) to 1.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from reluformer.model.base import Model, final_norm, shared_gamma
from reluformer.model.blocks import DecoderLayer
from reluformer.model.config import AttentionConfig, ModelConfig
from reluformer.model.positions import sinusoids
from reluformer.model.records import ForwardOptions

SYMBOLS = 12
_DIMENSIONS = 6
_BATCH = 32
# Least vocabulary of a model; tasks do not use it.
_VOCABULARY = 4


class TaskBatch(NamedTuple):
    """Inputs [B, T, width], targets [B, T] (classes) or [B, T, width], mask [B, T]."""

    inputs: Tensor
    targets: Tensor
    mask: Tensor


Draw = Callable[[torch.Generator, int, int], TaskBatch]
"""From a generator, a batch size and a length to a batch."""


def _one_hot(symbols: Tensor, size: int) -> Tensor:
    return functional.one_hot(symbols, size).float()


def _sequence(generator: torch.Generator, batch: int, length: int, *, flip: bool) -> TaskBatch:
    symbols = torch.randint(SYMBOLS, (batch, length), generator=generator)
    answer = symbols.flip(1) if flip else symbols
    separator = torch.full((batch, 1), SYMBOLS)
    tokens = torch.cat([symbols, separator, answer[:, :-1]], dim=1)
    targets = torch.cat([torch.zeros(batch, length, dtype=torch.long), answer], dim=1)
    mask = torch.arange(2 * length).expand(batch, -1) >= length
    return TaskBatch(_one_hot(tokens, SYMBOLS + 1), targets, mask)


def copy(generator: torch.Generator, batch: int, length: int) -> TaskBatch:
    """Repeat a sequence of symbols after a separator."""
    return _sequence(generator, batch, length, flip=False)


def reverse(generator: torch.Generator, batch: int, length: int) -> TaskBatch:
    """Repeat a sequence of symbols backwards."""
    return _sequence(generator, batch, length, flip=True)


def associative_recall(generator: torch.Generator, batch: int, length: int) -> TaskBatch:
    """Pairs of a key and a value, then a key: name its value."""
    pairs = min(length, SYMBOLS)
    keys = torch.rand(batch, SYMBOLS, generator=generator).argsort(dim=1)[:, :pairs]
    values = torch.randint(SYMBOLS, (batch, pairs), generator=generator)
    chosen = torch.randint(pairs, (batch, 1), generator=generator)
    shown = torch.cat([_one_hot(keys, SYMBOLS), _one_hot(values, SYMBOLS)], dim=-1)
    asked = _one_hot(keys.gather(1, chosen), SYMBOLS)
    query = torch.cat([asked, torch.zeros_like(asked)], dim=-1)
    targets = torch.cat([torch.zeros_like(values), values.gather(1, chosen)], dim=1)
    return TaskBatch(torch.cat([shown, query], dim=1), targets, _last(batch, pairs + 1))


def sink_trigger(generator: torch.Generator, batch: int, length: int) -> TaskBatch:
    """Output the mean of all vectors so far at the trigger, and zero everywhere else."""
    vectors = torch.randn(batch, length, _DIMENSIONS, generator=generator)
    at = torch.randint(1, length, (batch,), generator=generator)
    trigger = _one_hot(at, length)
    means = vectors.cumsum(1) / torch.arange(1, length + 1).view(1, -1, 1)
    # Means shrink with the position; scaled, each trigger counts alike.
    means = means * torch.arange(1, length + 1).view(1, -1, 1).sqrt()
    inputs = torch.cat([vectors, trigger.unsqueeze(-1)], dim=-1)
    return TaskBatch(inputs, means * trigger.unsqueeze(-1), torch.ones(batch, length).bool())


def regression(generator: torch.Generator, batch: int, length: int) -> TaskBatch:
    """Examples of a linear function, then an input: predict its output."""
    dimensions = 3
    points = torch.randn(batch, length + 1, dimensions, generator=generator)
    weights = torch.randn(batch, dimensions, 1, generator=generator) / dimensions**0.5
    outputs = points @ weights  # [B, T, 1]
    shown = outputs.clone()
    shown[:, -1] = 0
    return TaskBatch(torch.cat([points, shown], dim=-1), outputs, _last(batch, length + 1))


def single_location(generator: torch.Generator, batch: int, length: int) -> TaskBatch:
    """Many vectors, one of them marked: output the marked one at the end."""
    vectors = torch.randn(batch, length + 1, _DIMENSIONS, generator=generator)
    at = torch.randint(length, (batch,), generator=generator)
    mark = _one_hot(at, length + 1).unsqueeze(-1)
    noise = 0.3 * torch.randn(batch, length + 1, 1, generator=generator)
    targets = torch.zeros_like(vectors)
    targets[:, -1] = vectors[torch.arange(batch), at]
    return TaskBatch(torch.cat([vectors, mark + noise], -1), targets, _last(batch, length + 1))


def _last(batch: int, length: int) -> Tensor:
    return torch.arange(length).expand(batch, -1) == length - 1


TASKS: dict[str, Draw] = {
    "copy": copy,
    "reverse": reverse,
    "associative recall": associative_recall,
    "sink trigger": sink_trigger,
    "in-context regression": regression,
    "single-location recall": single_location,
}


class TaskModel(Model):
    """Two causal layers between linear maps."""

    def __init__(self, config: ModelConfig, inputs: int, outputs: int) -> None:
        super().__init__(config)
        gamma = shared_gamma(config)
        self.enter = nn.Linear(inputs, config.width)
        self.decoder = nn.ModuleList(
            DecoderLayer(config, gamma, with_source=False) for _ in range(config.decoder_layers)
        )
        self.decoder_norm = final_norm(config)
        self.leave = nn.Linear(config.width, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs [B, T, outputs] of inputs [B, T, inputs]."""
        x = self.enter(inputs)
        x = x + sinusoids(x.shape[1], self.config.width, 0, x)
        for layer in self.decoder:
            x = layer(x, ForwardOptions())[0]
        outputs: Tensor = self.leave(self.decoder_norm(x))
        return outputs


def train_task(kind: str, task: str, *, steps: int, width: int, length: int, seed: int) -> float:
    """Train an attention on a task; return its score on fresh batches."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    draw = TASKS[task]
    example = draw(generator, _BATCH, length)
    classes = example.targets.dtype == torch.long
    outputs = SYMBOLS if classes else example.targets.shape[-1]
    config = ModelConfig(
        _VOCABULARY, width, 4, decoder_layers=2, slots=2 * width, dropout=0.0,
        attention=AttentionConfig(kind=kind),
    )  # fmt: skip
    model = TaskModel(config, example.inputs.shape[-1], outputs)
    model.calibrate([{"inputs": example.inputs}])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps, pct_start=0.1)
    for _ in range(steps):
        batch = draw(generator, _BATCH, length)
        loss = _loss(model(batch.inputs)[batch.mask], batch.targets[batch.mask], classes)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return _score(model, draw, length, seed, classes)


def _loss(outputs: Tensor, targets: Tensor, classes: bool) -> Tensor:
    if classes:
        return functional.cross_entropy(outputs, targets)
    return functional.mse_loss(outputs, targets)


@torch.no_grad()
def _score(model: TaskModel, draw: Draw, length: int, seed: int, classes: bool) -> float:
    """Accuracy, or 1 minus the error relative to the targets' power; at least 0."""
    model.eval()
    batch = draw(torch.Generator().manual_seed(10_000 + seed), 8 * _BATCH, length)
    outputs, targets = model(batch.inputs)[batch.mask], batch.targets[batch.mask]
    if classes:
        return float((outputs.argmax(dim=-1) == targets).double().mean())
    error = (outputs - targets).square().mean() / targets.square().mean()
    return max(0.0, 1.0 - float(error)) if torch.isfinite(error) else 0.0

"""Models of `benchmarks.end_to_end`: training steps without padding, and their attention alone."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from reluformer.config.recipe import Recipe, load_recipe
from reluformer.config.train import TrainConfig
from reluformer.data.batches import Batch
from reluformer.data.tokenizer import BOS, EOS
from reluformer.model import ReLUFormer
from reluformer.model.attention import MultiHeadAttention
from reluformer.model.heads import split_heads
from reluformer.model.losses import translation_loss
from reluformer.model.recording import record_arguments
from reluformer.ops.api import attend
from reluformer.ops.call import Call
from reluformer.ops.visibility import Visibility
from reluformer.processes import DeviceKind, Processes
from reluformer.train.cuda_graph import Graphs
from reluformer.train.initialise import autocast
from reluformer.train.objective import Objective, inputs
from reluformer.train.schedules import learning_rate, step_seed
from reluformer.train.trainer_state import TrainerState, should_compile, should_use_graphs

OURS, REFERENCE, YARDSTICK = "relu", "relu reference", "relu reference, float32"
CUDNN, FLASH, SDPA = "softmax, cuDNN", "softmax, flash", "softmax, SDPA"
KERNELS = {CUDNN: SDPBackend.CUDNN_ATTENTION, FLASH: SDPBackend.FLASH_ATTENTION}
"""Kernel that SDPA must take, by run."""
SETTINGS = {
    OURS: ("model.attention.impl=triton",),
    REFERENCE: ("model.attention.impl=reference",),
    YARDSTICK: ("model.attention.impl=reference", "train.precision=float32"),
}
"""Settings of the runs that are not softmax."""
SOFTMAX = ("model.attention.kind=softmax", "model.attention.impl=sdpa")
VOCABULARIES = {"document": 30_000, "sentence": 10_000}
BATCHES, CALIBRATION_TOKENS = 4, 4096
# The first step compiles, the second captures a CUDA graph, the third replays it.
UNTIMED, TIMED = 3, 2


class Plan(NamedTuple):
    """Size of a measurement."""

    device: DeviceKind
    lengths: tuple[int, ...]
    tokens: int
    vocabulary: int
    """Largest size of a vocabulary."""
    rounds: int
    settings: tuple[str, ...] = ()


class Case(NamedTuple):
    """The step that one row of the table measures."""

    recipe: str
    length: int
    is_compiled: bool = False

    def vocabulary(self, plan: Plan) -> int:
        """Number of subwords that the recipe is for."""
        return min(plan.vocabulary, VOCABULARIES[self.recipe])


def recipe_of(case: Case, run: str, plan: Plan) -> Recipe:
    """The recipe of a run."""
    # A short warm-up, so that some steps have the full learning rate.
    settings = [f"train.compile={str(case.is_compiled).lower()}", "train.warmup=10", *plan.settings]
    return load_recipe(case.recipe, [*settings, *SETTINGS.get(run, SOFTMAX)])


def batches(case: Case, plan: Plan) -> list[Batch]:
    """Full rows of tokens with Zipf frequencies; the target equals the source."""
    length, rows = case.length, plan.tokens // case.length
    frequencies = 1 / np.arange(3, case.vocabulary(plan))
    size, shares = (BATCHES, rows, length), frequencies / frequencies.sum()
    ids = np.random.default_rng(length).choice(len(shares), size, p=shares)
    source = torch.from_numpy(ids + 3)
    source[..., -1] = EOS
    shifted = source.roll(1, dims=-1)
    shifted[..., 0] = BOS
    full = torch.full((rows,), length)
    return [
        Batch(target, full, before, target, full, np.arange(rows), rows * length, position=(0, 0))
        for target, before in zip(source, shifted, strict=True)
    ]


def forced(run: str) -> AbstractContextManager[Any]:
    """Context in which SDPA takes the kernel of a run or fails."""
    return sdpa_kernel(KERNELS[run]) if run in KERNELS else nullcontext()


def sdpa_choice(model: ReLUFormer, plan: Plan, length: int) -> str:
    """Name of the kernel that SDPA takes by itself for the calls of a step."""
    q, k, v = _inputs(model, plan, length)
    return SDPBackend(torch._fused_sdp_choice(q, k, v)).name


def stepper(
    config: TrainConfig, model: ReLUFormer, group: Processes
) -> tuple[Objective, Callable[[Batch, int], Tensor]]:
    """The objective, and a function that takes one step like the training loop.

    The function returns the loss []. Models receive no lengths: for padding, softmax would need a
    mask, which excludes its fastest kernels.
    """
    learner, device = TrainerState(model, config, group), group.device
    no_lengths = {"source_lengths": None, "target_lengths": None}
    parallel = replace(
        learner.parallel, forward=lambda **arguments: model(**(arguments | no_lengths))
    )
    compiled = should_compile(config, device)
    loss = torch.compile(translation_loss, dynamic=True) if compiled else translation_loss
    objective = Objective(config, model.config, group, autocast(config, device), loss)
    if should_use_graphs(config, group):
        work = partial(objective.add_gradients, parallel)
        graphs = Graphs(work, list(learner.parameters.values()))
        objective = replace(objective, replay=graphs)

    def take(batch: Batch, step: int) -> Tensor:
        torch.manual_seed(step_seed(config.seed, step, group.rank))
        losses = objective.backward(parallel, [batch], step)
        learner.update(step, learning_rate(config, step))
        return losses[0]

    return objective, take


class Contestant:
    """A model that takes training steps.

    Args:
        case: Recipe, length and compilation.
        run: Name of the attention.
        plan: Size of the measurement.
        group: This process.
        start: Initial weights; None draws and calibrates them.
    """

    def __init__(
        self,
        case: Case,
        run: str,
        plan: Plan,
        group: Processes,
        start: dict[str, Tensor] | None = None,
    ) -> None:
        recipe = recipe_of(case, run, plan)
        self.case, self.run, self.plan, self.is_cuda = case, run, plan, group.device.type == "cuda"
        self.data = [batch.to(group.device) for batch in batches(case, plan)]
        self._memory = torch.cuda.memory_allocated() if self.is_cuda else 0
        torch.manual_seed(1)
        self.model = ReLUFormer(recipe.model_with(case.vocabulary(plan))).to(group.device)
        if start is None:
            few = slice(max(1, CALIBRATION_TOKENS // case.length))
            sample = self.data[0].with_tensors([tensor[few] for tensor in self.data[0].tensors()])
            self.model.calibrate([inputs(sample)])
        else:
            self.model.load_state_dict(start)
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        self.objective, self._take = stepper(recipe.train, self.model, group)
        self._steps, self.peak_gib = 0, 0.0

    def steps(self, count: int) -> list[Tensor]:
        """Take some steps and return their losses, [] each."""
        losses = []
        with forced(self.run):
            for _ in range(count):
                batch = self.data[self._steps % BATCHES]
                self._steps += 1
                # The next replay of a CUDA graph overwrites its losses.
                losses.append(self._take(batch, self._steps).clone())
        return losses

    def warm_up(self) -> None:
        """Take the steps that are not timed, and measure their memory."""
        self.steps(UNTIMED)[-1].item()
        if self.is_cuda:
            self.peak_gib = (torch.cuda.max_memory_allocated() - self._memory) / 2**30

    def milliseconds(self) -> float:
        """Wall time of a step."""
        start = time.perf_counter()
        # Reading a number synchronises the device.
        self.steps(TIMED)[-1].item()
        return (time.perf_counter() - start) * 1e3 / TIMED

    def attention_calls(self) -> dict[str, tuple[int, Callable[[], None]]]:
        """Attention calls of a step, forward and backward, each with its number in a step."""
        encoder = self.model.encoder[0].self_attention.attention
        decoder = self.model.decoder[0].self_attention.attention
        encoders, decoders = len(self.model.encoder), len(self.model.decoder)
        # Source and target have one length, so cross-attention is like that of the encoder.
        return {
            "full": (encoders + decoders, self._attention_call(encoder)),
            "causal": (decoders, self._attention_call(decoder)),
        }

    def _attention_call(self, layer: MultiHeadAttention) -> Callable[[], None]:
        q, k, v = _inputs(self.model, self.plan, self.case.length)
        options: dict[str, Any] = {}
        if self.run == OURS:
            options = {**layer.config.fixed_options, "threshold": layer.threshold}
            options["gamma"] = layer.gamma().detach().requires_grad_()
        leaves = [q, k, v, *(value for value in options.values() if isinstance(value, Tensor))]
        extras = record_arguments(self.objective.record, layer.row)
        visibility = Visibility(causal=layer.causal)
        call = Call(q, k, v, visibility, layer.row.default_scale(q.shape[-1]), **extras)
        output_grad, sum_grad = torch.randn_like(q), q.new_ones(q.shape[:3], dtype=torch.float32)

        def run() -> None:
            with forced(self.run):
                result = attend(layer.row, call, options, layer.config.impl)
            outputs, grads = [result.output], [output_grad]
            if result.sums is not None:
                outputs, grads = [*outputs, result.sums.row_sum], [*grads, sum_grad]
            torch.autograd.grad(outputs, leaves, grads)

        return run


def _inputs(model: ReLUFormer, plan: Plan, length: int) -> list[Tensor]:
    """Random q, k and v in the memory layout that the projections of a layer give them."""
    config, dtype = model.config, torch.bfloat16 if plan.device == "cuda" else torch.float32
    q, keys_and_values = (
        torch.randn(plan.tokens // length, length, size, device=plan.device, dtype=dtype)
        for size in (config.width, 2 * config.width)
    )
    parts = (q, *keys_and_values.chunk(2, dim=-1))
    return [split_heads(part, config.heads).requires_grad_() for part in parts]

"""The training loop."""

import dataclasses
import math
import time
from collections.abc import Generator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from reluformer import checkpoint
from reluformer.checkpoint import RunState
from reluformer.config.recipe import Recipe
from reluformer.data.batches import Batch, prefetch
from reluformer.model import ReLUFormer
from reluformer.model.losses import translation_loss
from reluformer.processes import Processes, own_rank, processes
from reluformer.train import run_dir
from reluformer.train.attention_stats import LEGEND, AttentionStats, IntervalLosses, Meter
from reluformer.train.cuda_graph import Graphs
from reluformer.train.data import TrainingData, load_data
from reluformer.train.divergence import Guard, check_finite
from reluformer.train.finalise import finish
from reluformer.train.initialise import (
    autocast,
    initialise,
    load_start_weights,
    newest_step,
)
from reluformer.train.metrics import Metrics
from reluformer.train.objective import Objective
from reluformer.train.progress import Plain, Reporter, reporter
from reluformer.train.requirements import check as check_memory
from reluformer.train.requirements import estimate
from reluformer.train.schedules import learning_rate, step_seed
from reluformer.train.torch_settings import torch_settings
from reluformer.train.trainer_state import compiler_errors, should_compile, should_use_graphs
from reluformer.train.validation import dev_bleu, dev_loss, measure_attention


class Trained(NamedTuple):
    """A finished run."""

    folder: Path
    model: Path
    """Folder of the finished model, for `reluformer.checkpoint.load_run`."""


def train(recipe: Recipe, out: Path | str, *, quiet: bool = False) -> Trained:
    """Train the model of a recipe, or resume a run that was interrupted.

    Returns at once if the run is finished. Under torchrun every rank calls this, with a folder that
    all ranks can read.

    Args:
        recipe: The recipe.
        out: Folder of the run.
        quiet: Print nothing.

    Raises:
        UserError: The folder holds a run of another recipe, or a setting cannot work.
        Diverged: Training failed; the checkpoints before are kept.
    """
    run = Path(out)
    run_dir.check_recipe(run, recipe)
    if not run_dir.is_finished(run):
        with (
            processes(recipe.train.device) as group,
            torch_settings(recipe.train, group.device),
            compiler_errors(),
        ):
            _train(recipe, run, group, quiet)
    elif not quiet and own_rank() == 0:
        Plain().show(f"{run} is finished already: {run / checkpoint.MODEL}")
    return Trained(run, run / checkpoint.MODEL)


def _train(recipe: Recipe, run: Path, group: Processes, quiet: bool) -> None:
    config = recipe.train
    data = load_data(recipe)
    run_dir.check_data(run, data)
    needs = estimate(recipe, data.tokenizer.vocab_size)
    check_memory(needs, group.device, group.world)
    torch.manual_seed(config.seed)
    # Raises UserError for settings that cannot work, before anything is written.
    model = ReLUFormer(recipe.model_with(data.tokenizer.vocab_size))
    if config.start_from is not None and newest_step(run, group) == 0:
        load_start_weights(model, recipe, data)
    with ExitStack() as stack:
        if group.main:
            stack.enter_context(run_dir.locked(run))
            checkpoint.clean(run)
        progress = stack.enter_context(reporter(config.steps, enabled=group.main and not quiet))
        progress.show(f"this run needs: {needs}")
        for split, examples in data.describe().items():
            progress.show(f"{split}: {examples}")
        loop = _Loop(recipe, run, group, data, model, progress)
        stack.callback(loop.close)
        state = loop.run_steps()
        if group.main:
            loop.write_model(state)
        group.wait()


class _Loop:
    """The training steps of one process."""

    def __init__(
        self,
        recipe: Recipe,
        run: Path,
        group: Processes,
        data: TrainingData,
        model: ReLUFormer,
        progress: Reporter,
    ) -> None:
        self.recipe, self.config, self.run, self.group = recipe, recipe.train, run, group
        self.data, self.progress = data, progress
        self.trainer, self.state, attention = initialise(recipe, run, group, data, model)
        compiled = should_compile(self.config, group.device)
        uses_graphs = should_use_graphs(self.config, group)
        fixed_shapes = compiled or uses_graphs
        self.batches = data.train.batches(recipe, fixed_shapes=fixed_shapes)
        self.autocast = autocast(self.config, group.device)
        self.objective = Objective(
            self.config,
            model.config,
            group,
            self.autocast,
            torch.compile(translation_loss, dynamic=True) if compiled else translation_loss,
        )
        if uses_graphs:
            parameters = list(self.trainer.parameters.values())
            replay = Graphs(self._add_gradients, parameters)
            self.objective = dataclasses.replace(self.objective, replay=replay)
        lowest = self.state.lowest
        self.guard = Guard(self.config.explosion, math.inf if lowest is None else lowest)
        self.meter = Meter(group)
        self.metrics: Metrics | None = None
        if group.main:
            run_dir.describe(run, recipe, data, group, self.state.step)
            # A new run writes step 0 again.
            after = self.state.step or -1
            tensorboard = self.config.tensorboard
            self.metrics = Metrics(run / run_dir.METRICS, after=after, tensorboard=tensorboard)
        self._report_start(attention)

    def _add_gradients(self, batch: Batch, numbers: Tensor) -> Tensor:
        return self.objective.add_gradients(self.trainer.parallel, batch, numbers)

    def run_steps(self) -> RunState:
        """Run the remaining steps; return the state after the last."""
        state, config, group = self.state, self.config, self.group
        endless = self.batches.endless(state.position, rank=group.rank, world=group.world)
        self.clock = time.perf_counter()
        # `prefetch` is a generator, and closing it ends its thread.
        prefetched = cast("Generator[Batch]", prefetch(endless, pin=group.device.type == "cuda"))
        with closing(prefetched) as stream:
            while state.step < config.steps and not state.stopped:
                step = state.step + 1
                batches = [next(stream).to(group.device) for _ in range(config.accumulate)]
                tokens = sum(batch.target_tokens for batch in batches)
                torch.manual_seed(step_seed(config.seed, step, group.rank))
                losses = self.objective.backward(self.trainer.parallel, batches, step)
                reported = self._is_reported(step)
                attention = self._measure_attention(batches[-1]) if reported else None
                norm = self.trainer.update(step, learning_rate(config, step))
                self.meter.add(losses, norm, tokens)
                state = dataclasses.replace(
                    state, step=step, position=batches[-1].position, tokens=state.tokens + tokens
                )
                if attention is not None:
                    state = self._end_interval(state, attention)
                self.progress.advance(step)
        return state

    def write_model(self, state: RunState) -> None:
        """Write the finished model; for rank 0."""
        rescaled = finish(self.run, self.recipe, state, self.data, self.group.device)
        if rescaled is not None:
            self._write({"step": state.step, "rescaled": rescaled._asdict()})
            self.progress.show(
                f"scores times {rescaled.factor:.2f}: dev nll {rescaled.after:.3f} "
                f"instead of {rescaled.before:.3f}"
            )
        self.progress.show(f"finished at step {state.step}: {self.run / checkpoint.MODEL}")

    def close(self) -> None:
        """Close the metrics file."""
        if self.metrics is not None:
            self.metrics.close()

    def _is_reported(self, step: int) -> bool:
        """Whether an interval of logging, validation or checkpoints ends with this step."""
        config = self.config
        intervals = (config.log_every, config.checkpoint_every, config.dev_every, config.bleu_every)
        return any(_due(every, step, config.steps) for every in intervals)

    def _measure_attention(self, batch: Batch) -> AttentionStats:
        # Without this context, FSDP would keep the gathered weights, which miss the next update.
        with self.trainer.parallel.whole_model():
            return measure_attention(self.trainer.model, [batch], self.group, self.autocast)

    def _end_interval(self, state: RunState, attention: AttentionStats) -> RunState:
        """Check, validate, report and save; a diverged state is never saved."""
        tokens = self.meter.tokens
        # Waits for the device, so that the time includes all queued work.
        interval = self.meter.flush()
        seconds = time.perf_counter() - self.clock
        self.guard.check(state.step, interval, attention)
        state = dataclasses.replace(state, lowest=self.guard.lowest)
        state, measured = self._validate(state, attention)
        self._report(state, interval, attention, tokens / seconds, measured)
        if self._is_saved(state):
            self._save(state)
        self.clock = time.perf_counter()
        return state

    def _validate(
        self, state: RunState, attention: AttentionStats
    ) -> tuple[RunState, dict[str, float]]:
        """Dev loss and BLEU if due, and the state with the best loss and early stopping."""
        config, measured = self.config, {}
        if _due(config.dev_every, state.step, config.steps):
            nll = self._dev_loss()
            check_finite(state.step, "dev nll", nll, attention)
            measured["nll"] = nll
            if state.best_nll is None or nll < state.best_nll:
                state = dataclasses.replace(state, best_nll=nll, best_step=state.step, stale=0)
            else:
                stale = state.stale + 1
                stopped = config.patience is not None and stale >= config.patience
                state = dataclasses.replace(state, stale=stale, stopped=stopped)
        if _due(config.bleu_every, state.step, config.steps):
            measured["bleu"] = self._dev_bleu()
        return state, measured

    def _dev_loss(self) -> float:
        assert self.data.dev is not None
        batches = self.data.dev.batches(self.recipe)
        return dev_loss(self.trainer.model, batches, self.group, self.autocast)

    def _dev_bleu(self) -> float:
        data = self.data
        assert data.dev is not None
        with self.trainer.parallel.whole_model():
            return dev_bleu(self.trainer.model, data.tokenizer, data.dev, self.config.bleu_examples)

    def _report(
        self,
        state: RunState,
        interval: IntervalLosses,
        attention: AttentionStats,
        speed: float,
        measured: dict[str, float],
    ) -> None:
        rate = learning_rate(self.config, state.step)
        record: dict[str, Any] = {"step": state.step, **interval._asdict(), "lr": rate}
        record |= {"tokens": state.tokens, "tokens_per_second": round(speed, 1)}
        record["attention"] = _plain(attention)
        if measured:
            record["dev"] = measured
        self._write(record)
        line = (
            f"step {state.step} loss {interval.loss:.3f} nll {interval.nll:.3f} "
            f"norm {interval.grad_norm:.2f} lr {rate:.2e} {speed:,.0f} tok/s | {_show(attention)}"
        )
        self.progress.show(line)
        if measured:
            best = " (best)" if state.best_step == state.step else ""
            values = " ".join(f"{name} {value:.3f}" for name, value in measured.items())
            self.progress.show(f"step {state.step} dev {values}{best}")
        for warning in self.guard.warnings(attention):
            self.progress.show(f"warning: {warning}")

    def _is_saved(self, state: RunState) -> bool:
        best = self.config.final == "best" and state.best_step == state.step
        due = _due(self.config.checkpoint_every, state.step, self.config.steps)
        return due or best or state.stopped

    def _save(self, state: RunState) -> None:
        tensors = self.trainer.tensors()
        if not self.group.main:
            return
        assert self.metrics is not None
        self.metrics.sync()
        checkpoint.save(self.run, state, tensors)
        best = [state.best_step] if self.config.final == "best" and state.best_step else []
        checkpoint.prune(self.run, self.config.keep, best)

    def _report_start(self, attention: AttentionStats) -> None:
        if self.state.step:
            self.progress.show(f"resuming after step {self.state.step}")
        else:
            if self.config.start_from is not None:
                self.progress.show(f"starting with the weights of {self.config.start_from}")
            self.progress.show(f"attention at the start | {_show(attention)}")
            self.progress.show(LEGEND)
            self._write({"step": 0, "attention": _plain(attention)})

    def _write(self, record: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.write(record)


def _due(every: int | None, step: int, last: int) -> bool:
    """Whether `step` is a multiple of `every`, or the last; False if `every` is None."""
    return every is not None and (step % every == 0 or step == last)


def _show(attention: AttentionStats) -> str:
    return " | ".join(f"{site} {statistics}" for site, statistics in attention.items())


def _plain(attention: AttentionStats) -> dict[str, Any]:
    return {site: statistics._asdict() for site, statistics in attention.items()}

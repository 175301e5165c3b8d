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
from reluformer.train.attention_stats import Attention, IntervalLosses, Meter
from reluformer.train.cuda_graph import Graphs
from reluformer.train.data import TrainingData, load_data
from reluformer.train.divergence import Guard
from reluformer.train.finalise import finish
from reluformer.train.initialise import autocast, begin, newest_step, take_weights, torch_settings
from reluformer.train.metrics import Metrics
from reluformer.train.objective import Objective
from reluformer.train.progress import Plain, Reporter, reporter
from reluformer.train.schedules import learning_rate, step_seed
from reluformer.train.trainer_state import compiles, replays
from reluformer.train.validation import dev_bleu, dev_loss, watch


class Trained(NamedTuple):
    """A finished run."""

    folder: Path
    model: Path
    """The finished model, for `reluformer.checkpoint.load_run`."""


def train(recipe: Recipe, out: Path | str, *, quiet: bool = False) -> Trained:
    """Train what the recipe describes in the folder `out`, or go on where a killed run stopped.

    Returns at once if the run is finished. Raises `UserError` for a folder of another recipe, and
    `Diverged` when training fails; the last good checkpoint stays. Under torchrun, every process
    calls this, with one folder that all can read.
    """
    run = Path(out)
    run_dir.check_recipe(run, recipe)
    if not run_dir.is_finished(run):
        with processes(recipe.train.device) as group, torch_settings(recipe.train, group.device):
            _train(recipe, run, group, quiet)
    elif not quiet and own_rank() == 0:
        Plain().say(f"{run} is finished already: {run / checkpoint.MODEL}")
    return Trained(run, run / checkpoint.MODEL)


def _train(recipe: Recipe, run: Path, group: Processes, quiet: bool) -> None:
    config = recipe.train
    data = load_data(recipe)
    run_dir.check_data(run, data)
    torch.manual_seed(config.seed)
    # Settings that cannot work are refused here, before anything is written.
    model = ReLUFormer(recipe.model_with(data.tokenizer.vocab_size))
    if config.start_from is not None and newest_step(run, group) == 0:
        take_weights(model, recipe, data)
    with ExitStack() as stack:
        if group.main:
            stack.enter_context(run_dir.locked(run))
            checkpoint.clean(run)
        listener = stack.enter_context(reporter(config.steps, speaks=group.main and not quiet))
        loop = _Loop(recipe, run, group, data, model, listener)
        stack.callback(loop.close)
        state = loop.learn()
        if group.main:
            loop.conclude(state)
        group.wait()


class _Loop:
    """One start of a run, up to its last step."""

    def __init__(
        self,
        recipe: Recipe,
        run: Path,
        group: Processes,
        data: TrainingData,
        model: ReLUFormer,
        listener: Reporter,
    ) -> None:
        self.recipe, self.config, self.run, self.group = recipe, recipe.train, run, group
        self.data, self.listener = data, listener
        self.learner, self.state, attention = begin(recipe, run, group, data, model)
        compiled = compiles(self.config, group.device)
        fixed_shapes = compiled or replays(self.config, group)
        self.batches = data.train.batches(recipe, fixed_shapes=fixed_shapes)
        self.autocast = autocast(self.config, group.device)
        self.objective = Objective(
            self.config,
            model.config,
            group,
            self.autocast,
            torch.compile(translation_loss, dynamic=True) if compiled else translation_loss,
        )
        if replays(self.config, group):
            self.objective = dataclasses.replace(self.objective, replay=Graphs(self._add_gradients))
        lowest = self.state.lowest
        self.guard = Guard(self.config.explosion, math.inf if lowest is None else lowest)
        self.meter = Meter(group)
        self.metrics: Metrics | None = None
        if group.main:
            run_dir.describe(run, recipe, data, group, self.state.step)
            # A fresh start writes step 0 anew.
            after = self.state.step or -1
            tensorboard = self.config.tensorboard
            self.metrics = Metrics(run / run_dir.METRICS, after=after, tensorboard=tensorboard)
        self._greet(attention)

    def _add_gradients(self, batch: Batch, numbers: Tensor) -> Tensor:
        return self.objective.add_gradients(self.learner.parallel, batch, numbers)

    def learn(self) -> RunState:
        """Take the steps that are left; return the state after the last."""
        state, config, group = self.state, self.config, self.group
        position = (state.position[0], state.position[1])
        endless = self.batches.endless(position, rank=group.rank, world=group.world)
        self.clock = time.perf_counter()
        # A generator: closing it ends its thread.
        prefetched = cast("Generator[Batch]", prefetch(endless, pin=group.device.type == "cuda"))
        with closing(prefetched) as stream:
            while state.step < config.steps and not state.stopped:
                step = state.step + 1
                batches = [next(stream).to(group.device) for _ in range(config.accumulate)]
                tokens = sum(batch.target_tokens for batch in batches)
                torch.manual_seed(step_seed(config.seed, step, group.rank))
                losses = self.objective.backward(self.learner.parallel, batches, step)
                attention = self._watch(batches[-1]) if self._looks(step) else None
                norm = self.learner.update(step, learning_rate(config, step))
                self.meter.add(losses, norm, tokens)
                state = dataclasses.replace(
                    state, step=step, position=batches[-1].position, tokens=state.tokens + tokens
                )
                if attention is not None:
                    state = self._look(state, attention)
                self.listener.advance(step)
        return state

    def conclude(self, state: RunState) -> None:
        """Write the finished model. For the main process."""
        rescaled = finish(self.run, self.recipe, state, self.data, self.group.device)
        if rescaled is not None:
            self._write({"step": state.step, "rescaled": rescaled._asdict()})
            self.listener.say(
                f"scores times {rescaled.factor:.2f}: dev nll {rescaled.after:.3f} "
                f"instead of {rescaled.before:.3f}"
            )
        self.listener.say(f"finished at step {state.step}: {self.run / checkpoint.MODEL}")

    def close(self) -> None:
        """Close the metrics."""
        if self.metrics is not None:
            self.metrics.close()

    def _looks(self, step: int) -> bool:
        """Whether numbers leave the device after this step."""
        config = self.config
        intervals = (config.log_every, config.checkpoint_every, config.dev_every, config.bleu_every)
        return any(_due(every, step, config.steps) for every in intervals)

    def _watch(self, batch: Batch) -> Attention:
        # Shards that a pass without a backward leaves gathered would miss the coming update.
        with self.learner.parallel.whole_model():
            return watch(self.learner.model, [batch], self.group, self.autocast)

    def _look(self, state: RunState, attention: Attention) -> RunState:
        """Check, measure, report and save after a step; nothing bad is ever saved."""
        tokens = self.meter.tokens
        # AttentionRecord waits for the device: before it, the clock would miss the work still queued.
        interval = self.meter.read()
        seconds = time.perf_counter() - self.clock
        self.guard.check(state.step, interval, attention)
        state = dataclasses.replace(state, lowest=self.guard.lowest)
        state, measured = self._measure(state)
        self._report(state, interval, attention, tokens / seconds, measured)
        if self._saves(state):
            self._save(state)
        self.clock = time.perf_counter()
        return state

    def _measure(self, state: RunState) -> tuple[RunState, dict[str, float]]:
        """Dev loss and BLEU where they are due, and what follows from the loss."""
        config, measured = self.config, {}
        if _due(config.dev_every, state.step, config.steps):
            nll = self._dev_loss()
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
        return dev_loss(self.learner.model, batches, self.group, self.autocast)

    def _dev_bleu(self) -> float:
        data = self.data
        assert data.dev is not None
        with self.learner.parallel.whole_model():
            return dev_bleu(self.learner.model, data.tokenizer, data.dev, self.config.bleu_examples)

    def _report(
        self,
        state: RunState,
        interval: IntervalLosses,
        attention: Attention,
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
        self.listener.say(line)
        if measured:
            best = " (best)" if state.best_step == state.step else ""
            shown = " ".join(f"{name} {value:.3f}" for name, value in measured.items())
            self.listener.say(f"step {state.step} dev {shown}{best}")
        for warning in self.guard.warnings(attention):
            self.listener.say(f"warning: {warning}")

    def _saves(self, state: RunState) -> bool:
        best = self.config.final == "best" and state.best_step == state.step
        due = _due(self.config.checkpoint_every, state.step, self.config.steps)
        return due or best or state.stopped

    def _save(self, state: RunState) -> None:
        tensors = self.learner.tensors()
        if not self.group.main:
            return
        assert self.metrics is not None
        self.metrics.sync()
        checkpoint.save(self.run, state, tensors)
        best = [state.best_step] if self.config.final == "best" and state.best_step else []
        checkpoint.prune(self.run, self.config.keep, best)

    def _greet(self, attention: Attention) -> None:
        if self.state.step:
            self.listener.say(f"resuming after step {self.state.step}")
        else:
            if self.config.start_from is not None:
                self.listener.say(f"beginning with the weights of {self.config.start_from}")
            self.listener.say(f"attention at the start | {_show(attention)}")
            self._write({"step": 0, "attention": _plain(attention)})

    def _write(self, record: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.write(record)


def _due(every: int | None, step: int, last: int) -> bool:
    """Whether `step` is one of every so many, or the last."""
    return every is not None and (step % every == 0 or step == last)


def _show(attention: Attention) -> str:
    return " | ".join(f"{site} {statistics}" for site, statistics in attention.items())


def _plain(attention: Attention) -> dict[str, Any]:
    return {site: statistics._asdict() for site, statistics in attention.items()}

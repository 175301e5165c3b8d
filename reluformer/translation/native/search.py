"""Searches that run in the native library."""

import ctypes
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from reluformer.config.search import SearchConfig
from reluformer.translation.cancellation import check_cancelled
from reluformer.translation.native import layout
from reluformer.translation.native.decoder import NativeDecoder
from reluformer.translation.native.model import NativeModel
from reluformer.translation.native.task import check_handle, check_status, describe_task
from reluformer.translation.search.greedy_and_sampling import sample_with
from reluformer.translation.search.task import Hypothesis, Task

# Steps between which Python handles signals, such as an interrupt from the keyboard.
_STEPS = 16


def search(
    model: NativeModel,
    sources: Sequence[Sequence[int]],
    config: SearchConfig | None = None,
    *,
    banned: tuple[int, ...] = (),
    keys: Sequence[int] | None = None,
) -> list[Hypothesis]:
    """Translate sentences as one batch; arguments as in `reluformer.translation.search.search`."""
    config = SearchConfig() if config is None else config
    if not sources:
        return []
    task = Task.of(sources, config, banned=banned, keys=keys)
    if config.method == "sample":
        return sample_with(NativeDecoder(model, task), task, config)
    return [hypotheses[0] for hypotheses in beam_search(model, task, config)]


def beam_search(
    model: NativeModel, task: Task, config: SearchConfig, best: int = 1
) -> list[list[Hypothesis]]:
    """Greedy or beam search, with the rules of `beam.beam_search`.

    Returns:
        For each sentence its `best` highest-scoring hypotheses, best first.
    """
    library = model.library
    described, _owners = describe_task(model, task, config, best)
    handle = library.search_new(model.handle, ctypes.byref(described))
    check_handle(handle)
    try:
        while True:
            check_cancelled()
            rows = library.search_run(handle, _STEPS)
            check_status(rows)
            if rows == 0:
                break
        _count(model, handle)
        return [_hypotheses(library, handle, index, best) for index in range(len(task.sources))]
    finally:
        library.search_free(handle)


def _hypotheses(library: Any, handle: int, sentence: int, best: int) -> list[Hypothesis]:
    """Ended hypotheses of a sentence, best first."""
    ended = []
    for number in range(library.search_ended(handle, sentence)):
        record = layout.HypothesisRecord()
        library.search_hypothesis(handle, sentence, number, ctypes.byref(record))
        ended.append(
            Hypothesis(
                record.tokens[: record.length],
                record.score,
                record.log_probability,
                complete=bool(record.is_complete),
            )
        )
    return sorted(ended, key=lambda hypothesis: -hypothesis.score)[:best]


def _count(model: NativeModel, handle: int) -> None:
    """Add the counts of a search to those of the model."""
    counts = layout.Counts()
    model.library.search_counts(handle, ctypes.byref(counts))
    with model.lock:
        for field in fields(model.skipped):
            total = getattr(model.skipped, field.name) + getattr(counts, field.name)
            setattr(model.skipped, field.name, total)

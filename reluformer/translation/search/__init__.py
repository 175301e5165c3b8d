"""Searching for translations: greedy, beam, sampling, all with the decoder's cache."""

from collections.abc import Sequence

from reluformer.model import ReLUFormer
from reluformer.translation.search.beam import beam_search
from reluformer.translation.search.config import SearchConfig
from reluformer.translation.search.single import greedy, sample
from reluformer.translation.search.task import Hypothesis, Task

__all__ = ["Hypothesis", "SearchConfig", "Task", "beam_search", "greedy", "sample", "search"]


def search(
    model: ReLUFormer,
    sources: Sequence[Sequence[int]],
    config: SearchConfig | None = None,
    *,
    banned: tuple[int, ...] = (),
    keys: Sequence[int] | None = None,
) -> list[Hypothesis]:
    """Translate `sources`, ids without start and end marks, as one batch.

    Neither the batch nor the order in it changes a translation (beyond rounding). `banned` tokens
    do not occur in it. Sampling draws for each sentence by its key, by default its place.
    """
    config = SearchConfig() if config is None else config
    if not sources:
        return []
    task = Task.of(sources, config, banned=banned, keys=keys)
    if config.method == "sample":
        return sample(model, task, config)
    if config.beam == 1:
        return greedy(model, task, config)
    return [found[0] for found in beam_search(model, task, config)]

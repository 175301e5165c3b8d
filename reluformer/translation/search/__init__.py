"""Search for translations with the KV cache: greedy search, beam search and sampling."""

from collections.abc import Sequence

from reluformer.config.search import SearchConfig
from reluformer.model import ReLUFormer
from reluformer.translation.search.beam import beam_search
from reluformer.translation.search.greedy_and_sampling import greedy, sample
from reluformer.translation.search.task import Hypothesis, Task, id_arrays

__all__ = ["Hypothesis", "SearchConfig", "Task", "beam_search", "greedy", "sample", "search"]


def search(
    model: ReLUFormer,
    sources: Sequence[Sequence[int]],
    config: SearchConfig | None = None,
    *,
    banned: tuple[int, ...] = (),
    keys: Sequence[int] | None = None,
) -> list[Hypothesis]:
    """Translate sentences as one batch.

    A translation does not depend on the other sentences of the batch, except for rounding.

    Args:
        model: The model, in evaluation mode.
        sources: Ids of each sentence, without start and end tokens.
        config: Settings of the search.
        banned: Ids that must not occur in translations.
        keys: Sampling draws from a random stream for each key; default: the index in `sources`.

    Returns:
        The best hypothesis of each sentence.
    """
    config = SearchConfig() if config is None else config
    arrays = id_arrays(sources, model.config.vocabulary)
    if not arrays:
        return []
    task = Task.of(arrays, config, banned=banned, keys=keys)
    if config.method == "sample":
        return sample(model, task, config)
    if config.beam == 1:
        return greedy(model, task, config)
    return [hypotheses[0] for hypotheses in beam_search(model, task, config)]

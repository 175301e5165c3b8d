"""A beam search whose hypotheses are ranked by any length penalty.

The penalty only ranks hypotheses that have ended, and stops a search early. Tuning it therefore
needs one search for all penalties.
"""

from array import array
from collections.abc import Sequence

from reluformer.config.search import SearchConfig
from reluformer.translation.engine import Ids, TorchEngine
from reluformer.translation.search import Hypothesis, Task, beam_search
from reluformer.translation.search.task import id_arrays


class RankedSearch(TorchEngine):
    """A model in torch that searches every text once and keeps all of its hypotheses."""

    def __init__(self, engine: TorchEngine) -> None:
        super().__init__(engine.model)
        self._found: dict[tuple[bytes, tuple[int, ...]], list[Hypothesis]] = {}

    def search(
        self, sources: Ids, config: SearchConfig, banned: tuple[int, ...], keys: Sequence[int]
    ) -> list[Hypothesis]:
        """The best hypothesis of each text under the length penalty of `config`.

        Calls may differ in the penalty, in no other setting of the search.
        """
        arrays = id_arrays(sources, self.config.vocabulary)
        names = [(ids.tobytes(), banned) for ids in arrays]
        new: dict[tuple[bytes, tuple[int, ...]], array[int]] = {
            name: ids for name, ids in zip(names, arrays, strict=True) if name not in self._found
        }
        if new:
            task = Task.of(list(new.values()), config, banned=banned)
            # All places of a beam are asked for, so that no search stops early.
            ended = beam_search(self.model, task, config, best=config.beam)
            self._found.update(zip(new, ended, strict=True))
        return [_best(self._found[name], config) for name in names]


def _best(hypotheses: Sequence[Hypothesis], config: SearchConfig) -> Hypothesis:
    scored = (
        found._replace(score=config.score(found.log_probability, len(found.tokens) + 1))
        for found in hypotheses
    )
    return max(scored, key=lambda found: found.score)

"""Beam search."""

import math

import torch
from torch import Tensor

from reluformer.config.search import SearchConfig
from reluformer.model import ReLUFormer
from reluformer.translation.search.task import Decoder, Hypothesis, Task

# Finished sentences are dropped once they are at least 1/16 of the batch.
_DROPPED_OF = 16


@torch.inference_mode()
def beam_search(
    model: ReLUFormer, task: Task, config: SearchConfig, best: int = 1
) -> list[list[Hypothesis]]:
    """Search with a beam for the `best` highest-scoring hypotheses of each sentence.

    Each step keeps the most likely continuations of all open hypotheses. A hypothesis that ends
    keeps its place in the beam. A sentence is finished when all places are taken, or earlier, when
    no open hypothesis can still reach the score of the `best`-th ended one.

    Returns:
        For each sentence its hypotheses, best first.
    """
    search = _Beams(model, task, config, best)
    while len(search.decoder):
        search.step()
    return [sorted(ended, key=lambda h: -h.score)[:best] for ended in search.ended]


class _Beams:
    """Open and ended hypotheses of all sentences.

    Attributes:
        sums: Log-probabilities of open hypotheses, -inf in an empty place, [B, beams].
        history: Tokens of open hypotheses, [B * beams, length].
        free: Places of each beam that no ended hypothesis has taken, [B].
        ended: Ended hypotheses of each sentence of the task.
        floors: Score of the `best`-th ended hypothesis of each sentence of the task.
        threshold: The floors of the unfinished sentences, [B].
    """

    def __init__(self, model: ReLUFormer, task: Task, config: SearchConfig, best: int) -> None:
        self.config, self.best, self.eos = config, best, model.config.eos_id
        self.decoder = Decoder(model, task, config.beam)
        self.ended: list[list[Hypothesis]] = [[] for _ in task.sources]
        self.floors = [-math.inf] * len(task.sources)
        device, sentences = self.decoder.last.device, len(task.sources)
        self.sums = torch.full((sentences, config.beam), -torch.inf, device=device)
        # At first all rows of a sentence are equal: only one is open.
        self.sums[:, 0] = 0.0
        self.free = torch.full((sentences,), config.beam, device=device)
        self.threshold = torch.full((sentences,), -torch.inf, device=device)
        self.history = torch.zeros(sentences * config.beam, 0, dtype=torch.long, device=device)
        self.rank = torch.arange(config.beam, device=device)

    def step(self) -> None:
        """Extend every open hypothesis by one token."""
        logits, total = self.decoder.step()
        tokens, parents = self._extend(logits, total)
        self.decoder.state.select_rows(parents)
        self.decoder.advance(tokens.flatten())
        self.history = torch.cat([self.history[parents], tokens.view(-1, 1)], dim=1)
        ends = (tokens == self.eos) & (self.sums > -torch.inf)
        if ends.any():
            self._end(ends)
        open_sums = self.sums.amax(dim=1)
        # The bound of an empty beam is -inf, which is never above the threshold.
        done = self._bound(open_sums) <= self.threshold
        # Dropping a sentence copies all others, so several are dropped at once.
        if int(done.sum()) * _DROPPED_OF >= len(done):
            self._keep((~done).nonzero().squeeze(-1))
        else:
            self.sums = self.sums.masked_fill(done.unsqueeze(-1), -torch.inf)

    def _extend(self, logits: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """Most likely continuations: tokens [B, beams] and the rows [B * beams] they extend."""
        sentences, beams = self.sums.shape
        # A beam cannot keep more continuations of one hypothesis than it has places.
        width = min(beams, logits.shape[1])
        likeliest = logits.topk(width, dim=1)
        candidates = (likeliest.values - total).view(sentences, beams, width)
        candidates = (self.sums.unsqueeze(-1) + candidates).flatten(1)
        chosen = candidates.topk(beams, dim=1)
        tokens = likeliest.indices.view(sentences, -1).gather(1, chosen.indices)
        self.sums = chosen.values.masked_fill(self.rank >= self.free.unsqueeze(-1), -torch.inf)
        first_rows = torch.arange(0, sentences * beams, beams, device=tokens.device)
        parents = chosen.indices.div(width, rounding_mode="floor") + first_rows.unsqueeze(-1)
        return tokens, parents.flatten()

    def _end(self, ends: Tensor) -> None:
        """Move the hypotheses with `ends` [B, beams] set to the ended ones."""
        length, (sentences, places) = self.decoder.length, ends.nonzero(as_tuple=True)
        # Each transfer waits for the device, so all hypotheses are transferred together.
        columns = (
            self.decoder.indices[sentences].tolist(),
            self.sums[sentences, places].tolist(),
            self.history[sentences * self.config.beam + places, :-1].tolist(),
            (length <= self.decoder.longest[sentences]).tolist(),
        )
        for index, log_probability, tokens, complete in zip(*columns, strict=True):
            score = self.config.score(log_probability, length)
            self.ended[index].append(Hypothesis(tokens, score, log_probability, complete=complete))
        self.sums = self.sums.masked_fill(ends, -torch.inf)
        self.free = self.free - ends.sum(dim=1)
        for index in set(columns[0]):
            scores = sorted((hypothesis.score for hypothesis in self.ended[index]), reverse=True)
            if len(scores) >= self.best:
                self.floors[index] = scores[self.best - 1]
        floors = [self.floors[index] for index in self.decoder.indices.tolist()]
        self.threshold = torch.tensor(floors, device=ends.device)

    def _bound(self, sums: Tensor) -> Tensor:
        """Highest score [B] that an open hypothesis with `sums` [B] can still reach.

        Log-probabilities only decrease. With a positive length penalty the latest end is best,
        with a negative one the next step.
        """
        penalty = self.config.length_penalty
        end = self.decoder.longest + 1 if penalty > 0 else self.decoder.length + 1
        return sums / end**penalty

    def _keep(self, sentences: Tensor) -> None:
        beams = self.config.beam
        self.decoder.keep(sentences)
        self.sums, self.free = self.sums[sentences], self.free[sentences]
        self.threshold = self.threshold[sentences]
        self.history = self.history.view(-1, beams, self.history.shape[1])[sentences].flatten(0, 1)

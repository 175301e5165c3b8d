"""Beam search."""

import math

import torch
from torch import Tensor

from reluformer.model import ReLUFormer
from reluformer.translation.search.config import SearchConfig
from reluformer.translation.search.task import Decoder, Hypothesis, Task

# Finished sentences are dropped when they are one of so many.
_DROPPED_OF = 16


@torch.inference_mode()
def beam_search(
    model: ReLUFormer, task: Task, config: SearchConfig, best: int = 1
) -> list[list[Hypothesis]]:
    """The `best` highest-scoring hypotheses of each sentence that a beam finds, best first.

    Of all continuations by one token, the likeliest stay. One that ends keeps its place in the beam
    for good, so a sentence is done when as many hypotheses have ended as the beam has places; or
    earlier, when none that still goes on can reach the score of the `best`-th that has ended.
    """
    search = _Beams(model, task, config, best)
    while len(search.decoder):
        search.step()
    return [sorted(ended, key=lambda h: -h.score)[:best] for ended in search.ended]


class _Beams:
    """The open hypotheses of all sentences and those that have ended.

    `sums` [B, beams] are log-probabilities, -inf in an empty place; `history` [B * beams, length]
    the tokens of each; `free` [B] the places of a beam that ended hypotheses have not taken;
    `threshold` [B] the score that an open hypothesis must be able to pass, out of the task's
    `floors`.
    """

    def __init__(self, model: ReLUFormer, task: Task, config: SearchConfig, best: int) -> None:
        self.config, self.best, self.eos = config, best, model.config.eos_id
        self.decoder = Decoder(model, task, config.beam)
        self.ended: list[list[Hypothesis]] = [[] for _ in task.sources]
        self.floors = [-math.inf] * len(task.sources)
        device, sentences = self.decoder.last.device, len(task.sources)
        self.sums = torch.full((sentences, config.beam), -torch.inf, device=device)
        # At first all rows of a sentence are alike: one of them is enough.
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
        # An empty beam is -inf, which no bound is below.
        done = self._bound(open_sums) <= self.threshold
        # To drop a sentence is to copy all others: that waits for a part of them.
        if int(done.sum()) * _DROPPED_OF >= len(done):
            self._keep((~done).nonzero().squeeze(-1))
        else:
            self.sums = self.sums.masked_fill(done.unsqueeze(-1), -torch.inf)

    def _extend(self, logits: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest continuations: tokens [B, beams], and the rows [B * beams] they extend."""
        sentences, beams = self.sums.shape
        # No sentence keeps more continuations of one hypothesis than it has places.
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
        """Move the hypotheses that `ends` [B, beams] marks to the ended ones."""
        length, (sentences, places) = self.decoder.length, ends.nonzero(as_tuple=True)
        # Each of these waits for the device: once for all, not once a hypothesis.
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
        """The highest score that a hypothesis with `sums` [B] may still reach, [B].

        Sums only fall; a positive penalty favours the latest end, a negative one the next.
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

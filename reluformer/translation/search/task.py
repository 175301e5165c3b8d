"""What the searches have in common: sentences to translate, hypotheses, the model step by step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from reluformer.data.batches import pad_sources
from reluformer.errors import UserError
from reluformer.model import ReLUFormer
from reluformer.model.kv_cache import DecoderState
from reluformer.model.records import KeyValues
from reluformer.translation.search.config import SearchConfig


class Hypothesis(NamedTuple):
    """A translation."""

    tokens: list[int]
    """Without start and end marks."""
    score: float
    """Log-probability divided by length, end mark included, to the length penalty."""
    log_probability: float
    """Sum over the tokens and the end mark."""
    complete: bool
    """False if it ended because it reached the most tokens allowed."""


@dataclass(frozen=True)
class Task:
    """Sentences to translate together, B of them.

    `sources` are ids without marks. Sentence b gets at least `shortest[b]` and at most `longest[b]`
    tokens, end mark not counted, none of them in `banned`. `keys` name the sentences: what is
    sampled for a sentence depends on its key, not on its place in the batch.
    """

    sources: Sequence[Sequence[int]]
    shortest: Sequence[int]
    longest: Sequence[int]
    keys: Sequence[int]
    banned: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        sources: Sequence[Sequence[int]],
        config: SearchConfig,
        *,
        banned: tuple[int, ...] = (),
        keys: Sequence[int] | None = None,
    ) -> "Task":
        """The task of translating `sources`, each to at least one token."""
        return cls(
            sources,
            [1] * len(sources),
            [config.longest(len(source)) for source in sources],
            range(len(sources)) if keys is None else keys,
            banned,
        )


class Decoder:
    """The sentences of a task that are still searched, and the model's view of them.

    Every sentence has `beams` rows. `indices` [B] are the sentences' places in the task, `shortest`
    and `longest` [B] their bounds.
    """

    def __init__(self, model: ReLUFormer, task: Task, beams: int) -> None:
        if model.training:
            raise UserError("the model is in training mode; a search needs model.eval()")
        self.model, self.beams, self.length = model, beams, 0
        device = model.target_embedding.weight.device
        source, lengths = (t.to(device) for t in pad_sources(task.sources))
        padded = bool((lengths < source.shape[1]).any())
        # Without padding there is nothing to hide, and hiding costs time in every step.
        self.state: DecoderState = model.start(model.encode(source, lengths if padded else None))
        # They are read in every step: strided, each read would first copy them.
        self.state.source = [
            KeyValues(keys.contiguous(), values.contiguous()) for keys, values in self.state.source
        ]
        self.indices = torch.arange(len(task.sources), device=device)
        self.shortest = torch.tensor(list(task.shortest), device=device)
        self.longest = torch.tensor(list(task.longest), device=device)
        self.banned = torch.tensor(
            [model.config.pad_id, model.config.bos_id, *task.banned], device=device
        )
        self.last = torch.full((len(task.sources) * beams, 1), model.config.bos_id, device=device)

    def __len__(self) -> int:
        """Sentences still searched."""
        return len(self.indices)

    def step(self) -> tuple[Tensor, Tensor]:
        """Logits [B * beams, vocabulary] of the next token, and the log of their exponents' sum.

        Tokens that must not come next have logit -inf but count in the sum [B * beams, 1]: logit
        minus sum is the model's log-probability.
        """
        eos = self.model.config.eos_id
        logits = self.model.decode(self.last, self.state)[:, -1].float()
        total = logits.logsumexp(dim=-1, keepdim=True)
        if not total.isfinite().all():
            raise UserError("the model's weights are damaged: its output is not a finite number")
        logits[:, self.banned] = -torch.inf
        early = self.length < self.shortest
        if early.any():
            logits[early.repeat_interleave(self.beams), eos] = -torch.inf
        due = self.length >= self.longest
        if due.any():
            rows = due.repeat_interleave(self.beams).nonzero().squeeze(-1)
            end = logits[rows, eos]
            logits[rows] = -torch.inf
            logits[rows, eos] = end
        return logits, total

    def advance(self, tokens: Tensor) -> None:
        """Put `tokens` [B * beams] after what the rows hold."""
        self.last, self.length = tokens.unsqueeze(-1), self.length + 1

    def keep(self, sentences: Tensor) -> None:
        """Go on with the given sentences alone."""
        rows = sentences.unsqueeze(-1) * self.beams
        rows = (rows + torch.arange(self.beams, device=rows.device)).flatten()
        self.state.select_sentences(sentences, self.beams)
        self.last = self.last[rows]
        self.indices = self.indices[sentences]
        self.shortest, self.longest = self.shortest[sentences], self.longest[sentences]

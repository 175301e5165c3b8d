"""Common parts of the searches: the task, hypotheses, and the model run step by step."""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from reluformer.config.search import SearchConfig
from reluformer.data.batches import pad_sources
from reluformer.errors import UserError, quote
from reluformer.model import ModelConfig, ReLUFormer
from reluformer.model.kv_cache import DecoderState
from reluformer.model.records import KeyValues
from reluformer.translation.cancellation import check_cancelled


class Hypothesis(NamedTuple):
    """A translation with its score."""

    tokens: list[int]
    """Ids without start and end tokens."""
    score: float
    """log_probability / length ** length_penalty, where the length includes the end token."""
    log_probability: float
    """Sum over the tokens and the end token."""
    complete: bool
    """False if the maximum length ended the hypothesis."""


@dataclass(frozen=True)
class Task:
    """A batch of B sentences to translate."""

    sources: Sequence[Sequence[int]]
    """Ids of each sentence, without start and end tokens."""
    shortest: Sequence[int]
    """Minimum length of each translation, end token not counted."""
    longest: Sequence[int]
    """Maximum length of each translation, end token not counted."""
    keys: Sequence[int]
    """Key of each sentence. Samples depend on the key, not on the position in the batch."""
    banned: tuple[int, ...] = ()
    """Ids that must not occur in translations."""

    @classmethod
    def of(
        cls,
        sources: Sequence[Sequence[int]],
        config: SearchConfig,
        *,
        banned: tuple[int, ...] = (),
        keys: Sequence[int] | None = None,
    ) -> "Task":
        """Task with the length limits of `config`; every translation has at least one token."""
        return cls(
            sources,
            [1] * len(sources),
            [config.longest(len(source)) for source in sources],
            range(len(sources)) if keys is None else keys,
            banned,
        )


def id_arrays(sources: Sequence[Sequence[int]], vocabulary: int) -> "list[array[int]]":
    """The ids of each text as an array.

    Raises:
        UserError: A text is not a sequence of ids below `vocabulary`.
    """
    try:
        arrays = [array("q", list(source)) for source in sources]
    except (TypeError, ValueError, OverflowError):
        raise UserError(
            f"sources must be one list of token ids for each text, got {quote(sources)}"
        ) from None
    for number, ids in enumerate(arrays):
        if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise UserError(
                f"sources must hold ids from 0 to {vocabulary - 1}, got {wrong} in text {number}"
            )
    return arrays


class StepDecoder(ABC):
    """A decoder that runs step by step on the unfinished sentences of a task.

    Attributes:
        beams: Rows of each sentence.
        length: Tokens decoded so far.
        indices: Index in the task of each unfinished sentence, [B].
        shortest: Minimum length of each translation, [B].
        longest: Maximum length of each translation, [B].
        last: Last token of each row, [B * beams, 1].
    """

    def __init__(self, config: ModelConfig, task: Task, beams: int, device: torch.device) -> None:
        self.config, self.beams, self.length = config, beams, 0
        self.indices = torch.arange(len(task.sources), device=device)
        self.shortest = torch.tensor(list(task.shortest), device=device)
        self.longest = torch.tensor(list(task.longest), device=device)
        self.banned = torch.tensor([config.pad_id, config.bos_id, *task.banned], device=device)
        self.last = torch.full((len(task.sources) * beams, 1), config.bos_id, device=device)

    def __len__(self) -> int:
        """Number of unfinished sentences."""
        return len(self.indices)

    @abstractmethod
    def next_logits(self) -> tuple[Tensor, Tensor]:
        """Logits [B * beams, vocabulary] after `last`, and their log-sum-exp [B * beams, 1]."""

    def step(self) -> tuple[Tensor, Tensor]:
        """Compute the logits of the next token.

        Returns:
            Logits [B * beams, vocabulary], -inf for tokens that are not allowed, and their
            log-sum-exp [B * beams, 1] over all tokens. Their difference is the log-probability.
        """
        check_cancelled()
        eos = self.config.eos_id
        logits, total = self.next_logits()
        if not total.isfinite().all():
            raise UserError("the model's output is not finite; its weights are damaged")
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
        """Append `tokens` [B * beams] to the rows."""
        self.last, self.length = tokens.unsqueeze(-1), self.length + 1

    def keep(self, sentences: Tensor) -> None:
        """Drop all sentences but those with the given indices into the unfinished ones."""
        rows = sentences.unsqueeze(-1) * self.beams
        rows = (rows + torch.arange(self.beams, device=rows.device)).flatten()
        self.last = self.last[rows]
        self.indices = self.indices[sentences]
        self.shortest, self.longest = self.shortest[sentences], self.longest[sentences]


class Decoder(StepDecoder):
    """The decoder of a model in torch.

    Attributes:
        state: KV caches of the decoder.
    """

    def __init__(self, model: ReLUFormer, task: Task, beams: int) -> None:
        if model.training:
            raise UserError("the model is in training mode, but a search needs model.eval()")
        device = model.target_embedding.weight.device
        super().__init__(model.config, task, beams, device)
        self.model = model
        source, lengths = (t.to(device) for t in pad_sources(task.sources))
        padded = bool((lengths < source.shape[1]).any())
        # Without padding no mask is needed, and a mask costs time in every step.
        self.state: DecoderState = model.start(model.encode(source, lengths if padded else None))
        # Cross-attention reads them in every step and would first copy strided tensors.
        self.state.source = [
            KeyValues(keys.contiguous(), values.contiguous()) for keys, values in self.state.source
        ]

    def next_logits(self) -> tuple[Tensor, Tensor]:
        """Logits after the last tokens, which the caches then hold."""
        logits = self.model.decode(self.last, self.state)[:, -1].float()
        return logits, logits.logsumexp(dim=-1, keepdim=True)

    def keep(self, sentences: Tensor) -> None:
        """Drop all sentences but those with the given indices, also from the caches."""
        super().keep(sentences)
        self.state.select_sentences(sentences)

"""Base class of both models: embeddings, output layer, calibration, saving and loading."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from reluformer.model.attention import MultiHeadAttention
from reluformer.model.blocks import LayerOutput
from reluformer.model.config import SITES, ModelConfig
from reluformer.model.gamma import Gamma
from reluformer.model.positions import Start, sinusoids
from reluformer.model.pretrained import load_pretrained, save_pretrained
from reluformer.model.records import AttentionRecord


class Reports:
    """Collects the reports of the layers during a forward pass."""

    def __init__(
        self,
        records: Sequence[AttentionRecord] = (),
        expert_choices: Sequence[Tensor] = (),
    ) -> None:
        self._records, self._expert_choices = [*records], [*expert_choices]

    def collect(self, site: str, layer: int, output: LayerOutput) -> Tensor:
        """Store the reports of layer number `layer`, and return its x."""
        attentions = ((site, output.self_attention), ("cross", output.cross_attention))
        for name, report in attentions:
            if report is not None and report.stats is not None and report.valid is not None:
                record = AttentionRecord(name, layer, report.stats, report.valid, report.weights)
                self._records.append(record)
        if output.expert_choices is not None:
            self._expert_choices.append(output.expert_choices)
        return output.x

    def tuples(self) -> tuple[tuple[AttentionRecord, ...], tuple[Tensor, ...]]:
        """Records and expert choices of all layers so far."""
        return tuple(self._records), tuple(self._expert_choices)


class Model(nn.Module):
    """A model of token sequences, without its stack of layers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.target_embedding = embedding_table(config)
        self.output = None if config.tie_embeddings else embedding_table(config)
        self.dropout = nn.Dropout(config.dropout)

    def embed(self, tokens: Tensor, embedding: nn.Embedding, start: Start = 0) -> Tensor:
        """Embed tokens [B, T] as [B, T, width], plus sinusoidal positions if configured."""
        x = embedding(tokens) * self.config.width**0.5
        if self.config.positions == "sinusoidal":
            x = x + sinusoids(tokens.shape[1], self.config.width, start, x)
        embedded: Tensor = self.dropout(x)
        return embedded

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocabulary] of the next token from hidden states [..., width]."""
        table = self.target_embedding if self.output is None else self.output
        return nn.functional.linear(hidden, table.weight)

    def calibrate(self, batches: Iterable[dict[str, Any]]) -> None:
        """Set the gamma of every attention with `row_sum_init` from sample batches.

        Each batch runs once. Every attention sets its gamma before it computes its output, so that
        later layers see calibrated ones. The result is the geometric mean over the batches.

        Args:
            batches: Keyword arguments of `forward`.
        """
        gammas = [module for module in self.modules() if isinstance(module, Gamma)]
        initial = [gamma.log_gamma.detach().clone() for gamma in gammas]
        calibrated: list[list[Tensor]] = []
        for batch in batches:
            for gamma, start in zip(gammas, initial, strict=True):
                gamma.log_gamma.data.copy_(start)
            with self._calibrating():
                self(**batch)
            for gamma in gammas:
                gamma.settle()
            calibrated.append([gamma.log_gamma.detach().clone() for gamma in gammas])
        for gamma, values in zip(gammas, zip(*calibrated, strict=True), strict=True):
            gamma.log_gamma.data.copy_(torch.stack(values).mean(0))

    @contextmanager
    def _calibrating(self) -> Iterator[None]:
        attentions = [m for m in self.modules() if isinstance(m, MultiHeadAttention)]
        training = self.training
        self.eval()
        for attention in attentions:
            attention.calibrating = True
        try:
            with torch.no_grad():
                yield
        finally:
            for attention in attentions:
                attention.calibrating = False
            self.train(training)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `model.safetensors` and `config.json` into `folder`."""
        save_pretrained(self, Path(folder))

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Load the model that `save_pretrained` wrote into `folder`, in evaluation mode."""
        return load_pretrained(cls, Path(folder))


def shared_gamma(config: ModelConfig) -> Gamma | None:
    """The gamma of all attentions with a gamma per model; None if there are none."""
    sites = (config.attention_at(site) for site in SITES)
    inits = [site.gamma_init for site in sites if site.gamma == "model"]
    return Gamma(inits[0], learned=True, shared=True) if inits else None


def final_norm(config: ModelConfig) -> nn.Module:
    """Norm after the last layer: a pre-norm stack needs one, a post-norm stack does not."""
    return nn.LayerNorm(config.width) if config.norm == "pre" else nn.Identity()


def embedding_table(config: ModelConfig) -> nn.Embedding:
    """A new embedding [vocabulary, width]; the padding row is zero and is not trained."""
    embedding = nn.Embedding(config.vocabulary, config.width, padding_idx=config.pad_id)
    nn.init.normal_(embedding.weight, std=config.width**-0.5)
    with torch.no_grad():
        embedding.weight[config.pad_id].zero_()
    return embedding

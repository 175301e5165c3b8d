"""What both models share: embeddings, output layer, calibration, saving and loading."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from reluformer.model.attention import Attended, MultiHeadAttention
from reluformer.model.config import ModelConfig
from reluformer.model.gamma import Gamma
from reluformer.model.positions import Start, sinusoids
from reluformer.model.pretrained import load_pretrained, save_pretrained
from reluformer.model.records import AttentionRecord


class Model(nn.Module):
    """A model over tokens: everything but the stack of layers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.target_embedding = embedding_table(config)
        self.output = None if config.tie_embeddings else embedding_table(config)
        self.dropout = nn.Dropout(config.dropout)

    def embed(self, tokens: Tensor, embedding: nn.Embedding, start: Start = 0) -> Tensor:
        """Tokens [B, T] as vectors [B, T, width], with positions where those are added."""
        x = embedding(tokens) * self.config.width**0.5
        if self.config.positions == "sinusoidal":
            x = x + sinusoids(tokens.shape[1], self.config.width, start, x)
        embedded: Tensor = self.dropout(x)
        return embedded

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [..., vocabulary] of the next token from hidden states [..., width]."""
        table = self.target_embedding if self.output is None else self.output
        return nn.functional.linear(hidden, table.weight)

    def calibrate(self, batches: Iterable[dict[str, Any]]) -> None:
        """Set every gamma that asks for it from sample batches, the keywords of `forward`.

        Each batch runs once, layer after layer, and every attention rescales itself before it
        passes on its output; gammas are the geometric means over the batches.
        """
        gammas = [module for module in self.modules() if isinstance(module, Gamma)]
        first = [gamma.log_gamma.detach().clone() for gamma in gammas]
        settled: list[list[Tensor]] = []
        for batch in batches:
            for gamma, start in zip(gammas, first, strict=True):
                gamma.log_gamma.data.copy_(start)
            with self._calibrating():
                self(**batch)
            for gamma in gammas:
                gamma.settle()
            settled.append([gamma.log_gamma.detach().clone() for gamma in gammas])
        for gamma, values in zip(gammas, zip(*settled, strict=True), strict=True):
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
        """The model that `save_pretrained` wrote into `folder`, in evaluation mode."""
        return load_pretrained(cls, Path(folder))


def shared_gamma(config: ModelConfig) -> Gamma | None:
    """The one gamma of all attentions that ask for a gamma per model; None if none does."""
    sites = (config.attention_at(site) for site in ("encoder", "decoder", "cross"))
    inits = [site.gamma_init for site in sites if site.gamma == "model"]
    return Gamma(inits[0], learned=True, shared=True) if inits else None


def final_norm(config: ModelConfig) -> nn.Module:
    """A pre-norm stack leaves its sum unnormalised: one more norm ends it."""
    return nn.LayerNorm(config.width) if config.norm == "pre" else nn.Identity()


def as_records(site: str, layer: int, report: Attended | None) -> Iterator[AttentionRecord]:
    """The report of one attention as a `AttentionRecord`, or nothing if it made none."""
    if report is not None and report.stats is not None and report.valid is not None:
        yield AttentionRecord(site, layer, report.stats, report.valid, report.weights)


def embedding_table(config: ModelConfig) -> nn.Embedding:
    """A fresh embedding [vocabulary, width]; the padding row is and stays zero."""
    embedding = nn.Embedding(config.vocabulary, config.width, padding_idx=config.pad_id)
    nn.init.normal_(embedding.weight, std=config.width**-0.5)
    with torch.no_grad():
        embedding.weight[config.pad_id].zero_()
    return embedding

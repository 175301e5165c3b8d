"""Generation with a language model: greedy or sampled, with a paged KV cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from reluformer.config.schema import check_fields
from reluformer.config.search import LEAST_TEMPERATURE
from reluformer.errors import UserError
from reluformer.model.attention import MultiHeadAttention
from reluformer.model.checks import check_lengths
from reluformer.model.kv_cache import PagedLayerCache
from reluformer.model.sampling import draw

if TYPE_CHECKING:
    from reluformer.model.language import ReLUFormerLM

PAGE_SIZE = 64


class Generated(NamedTuple):
    """Prompts with their continuations."""

    tokens: Tensor
    """Token ids [B, T]: prompt, continuation and, where reached, the end token; then padding."""
    lengths: Tensor
    """Number of tokens that are not padding, [B]."""


@dataclass(frozen=True)
class GenerationConfig:
    """Settings of a generation; see `ReLUFormerLM.generate`."""

    max_new_tokens: int
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    use_cache: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not self.temperature >= 0:
            raise UserError(f"temperature must be at least 0, got {self.temperature}")
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise UserError(
                f"temperature must be 0 or at least {LEAST_TEMPERATURE}, got {self.temperature}"
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k must be at least 1, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be in (0, 1], got {self.top_p}")


def generate(
    model: "ReLUFormerLM", tokens: Tensor, lengths: Tensor | None, config: GenerationConfig
) -> Generated:
    """Continue prompts [B, T] of `lengths` [B] until the end token or the maximum length."""
    batch, width = tokens.shape
    if not batch:
        raise UserError("tokens must hold at least one prompt, got none")
    if lengths is None:
        lengths = torch.full((batch,), width)
    check_lengths("lengths", lengths, tokens)
    if not bool(((lengths > 0) & (lengths <= width)).all()):
        raise UserError(f"lengths must be numbers from 1 to {width}, got {lengths.tolist()}")
    lengths = lengths.to(tokens.device, torch.int64, copy=True)
    pad_id, eos_id = model.config.pad_id, model.config.eos_id
    text = tokens.new_full((batch, width + config.max_new_tokens), pad_id)
    prompt = torch.arange(width, device=tokens.device) < lengths.unsqueeze(1)  # [B, T]
    text[:, :width] = tokens.where(prompt, pad_id)
    predict = _predictor(model, lengths.tolist(), config)
    choose = _chooser(config, tokens.device)
    active = torch.ones(batch, dtype=torch.bool, device=tokens.device)
    for _ in range(config.max_new_tokens):
        chosen = choose(predict(text, lengths, active)).where(active, pad_id)  # [B]
        text.scatter_(1, lengths.unsqueeze(1), chosen.unsqueeze(1).to(text.dtype))
        lengths += active
        active &= chosen != eos_id
        if not active.any():
            break
    return Generated(text[:, : int(lengths.max())], lengths)


Predictor = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From text [B, T], lengths [B] and active rows [B] to logits [B, vocabulary] of the next token."""


def _predictor(
    model: "ReLUFormerLM", prompt_lengths: Sequence[int], config: GenerationConfig
) -> Predictor:
    attentions = (module for module in model.modules() if isinstance(module, MultiHeadAttention))
    pageable = all(attention.can_use_pages for attention in attentions)
    if config.use_cache and not pageable:
        raise UserError(
            f"use_cache must be False or None with {model.config.attention_at('decoder').kind} "
            "attention: a paged cache needs a rectified one without persistent slots"
        )
    if config.use_cache is False or not pageable:
        return lambda text, lengths, _: _last(model(text[:, : int(lengths.max())]).logits, lengths)
    capacities = [length + config.max_new_tokens for length in prompt_lengths]
    caches = [PagedLayerCache(capacities, PAGE_SIZE) for _ in model.decoder]

    def predict(text: Tensor, lengths: Tensor, active: Tensor) -> Tensor:
        if caches[0].is_empty:
            prompts = text[:, : max(prompt_lengths)]
            return _last(model.decode_pages(prompts, caches, 0, prompt_lengths), lengths)
        start = lengths.unsqueeze(1) - 1  # [B, 1]
        counts = active.int().tolist()
        return model.decode_pages(text.gather(1, start), caches, start, counts)[:, -1]

    return predict


def _chooser(config: GenerationConfig, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Function from logits [B, vocabulary] to tokens [B]."""
    if config.temperature == 0:
        return lambda logits: logits.argmax(dim=-1)
    generator = torch.Generator().manual_seed(config.seed)

    def choose(logits: Tensor) -> Tensor:
        numbers = torch.rand(len(logits), generator=generator, dtype=torch.float64)
        return draw(logits, numbers.to(device), config)

    return choose


def _last(logits: Tensor, lengths: Tensor) -> Tensor:
    """Logits [B, vocabulary] at the last token of each row of [B, T, vocabulary]."""
    return logits[torch.arange(len(lengths), device=logits.device), lengths - 1]

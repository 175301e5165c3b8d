"""Searches with one hypothesis per sentence: greedy search and sampling."""

from collections.abc import Callable

import torch
from torch import Tensor

from reluformer.config.search import SearchConfig
from reluformer.model import ReLUFormer
from reluformer.model.sampling import draw
from reluformer.translation.search.task import Decoder, Hypothesis, StepDecoder, Task

Choose = Callable[[Tensor, StepDecoder], Tensor]
"""A function from logits [B, vocabulary], -inf for banned tokens, to tokens [B]."""


@torch.inference_mode()
def greedy(model: ReLUFormer, task: Task, config: SearchConfig) -> list[Hypothesis]:
    """Append the most likely token until it is the end token."""
    decoder = Decoder(model, task, beams=1)
    return _follow(decoder, config, lambda logits, _: logits.argmax(dim=-1))


@torch.inference_mode()
def sample(model: ReLUFormer, task: Task, config: SearchConfig) -> list[Hypothesis]:
    """Sample token by token, with a random stream for each seed and sentence key."""
    return sample_with(Decoder(model, task, beams=1), task, config)


@torch.inference_mode()
def sample_with(decoder: StepDecoder, task: Task, config: SearchConfig) -> list[Hypothesis]:
    """`sample` with a decoder that has done no step."""
    numbers = _uniform(task, config.seed)

    def choose(logits: Tensor, decoder: StepDecoder) -> Tensor:
        drawn = numbers[decoder.indices.cpu(), decoder.length].to(logits.device)
        return draw(logits, drawn, config)

    return _follow(decoder, config, choose)


def _follow(decoder: StepDecoder, config: SearchConfig, choose: Choose) -> list[Hypothesis]:
    results: list[Hypothesis | None] = [None] * len(decoder)
    sums = torch.zeros(len(decoder), device=decoder.last.device)
    history = torch.zeros(len(decoder), 0, dtype=torch.long, device=decoder.last.device)
    while len(decoder):
        logits, total = decoder.step()
        tokens = choose(logits, decoder)
        sums = sums + (logits.gather(1, tokens.unsqueeze(-1)) - total).squeeze(-1)
        decoder.advance(tokens)
        history = torch.cat([history, tokens.unsqueeze(-1)], dim=1)
        ends = tokens == decoder.config.eos_id
        if not ends.any():
            continue
        for row in ends.nonzero().flatten().tolist():
            log_probability = float(sums[row])
            results[int(decoder.indices[row])] = Hypothesis(
                history[row, :-1].tolist(),
                config.score(log_probability, decoder.length),
                log_probability,
                complete=decoder.length <= int(decoder.longest[row]),
            )
        rest = (~ends).nonzero().squeeze(-1)
        decoder.keep(rest)
        sums, history = sums[rest], history[rest]
    return [hypothesis for hypothesis in results if hypothesis is not None]


def _uniform(task: Task, seed: int) -> Tensor:
    """Random numbers in [0, 1), [B, steps], that depend only on the seed and the sentence keys."""
    steps = max(task.longest, default=0) + 1
    rows = []
    for key, longest in zip(task.keys, task.longest, strict=True):
        generator = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + key) % 2**63)
        row = torch.rand(longest + 1, generator=generator, dtype=torch.float64)
        rows.append(torch.nn.functional.pad(row, (0, steps - longest - 1)))
    return torch.stack(rows)

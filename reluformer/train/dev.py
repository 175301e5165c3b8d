"""Measuring on held-out examples while training."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from reluformer.data.batches import Batches
from reluformer.model import ReLUFormer
from reluformer.model.losses import translation_loss
from reluformer.train.distributed import Processes
from reluformer.train.step import inputs


@contextmanager
def evaluating(model: ReLUFormer) -> Iterator[None]:
    """No dropout, no gradients, and no new shapes for the compiler."""
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train()


def dev_loss(
    model: ReLUFormer,
    batches: Batches,
    group: Processes,
    autocast: Callable[[], AbstractContextManager[object]],
) -> float:
    """Negative log-likelihood per token over all examples."""
    total = torch.zeros((), dtype=torch.float64, device=group.device)
    tokens = 0
    with evaluating(model), autocast():
        for batch in batches.epoch(0, rank=group.rank, world=group.world):
            here = batch.to(group.device)
            logits = model(**inputs(here)).logits
            total += translation_loss(logits, here.target_out, pad_id=model.config.pad_id)[1]
            tokens += batch.target_tokens
    return float(group.add(total)) / tokens

"""Validation: statistics of the attentions, dev loss and dev BLEU."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from sacrebleu.metrics.bleu import BLEU

from reluformer.data.batches import Batch, Batches
from reluformer.data.corpus import Side
from reluformer.data.tokenizer import SEP, Tokenizer
from reluformer.model import ReLUFormer
from reluformer.model.losses import translation_loss
from reluformer.processes import Processes
from reluformer.train.attention_stats import AttentionStats, attention_statistics
from reluformer.train.data import Split
from reluformer.train.objective import inputs, real_rows
from reluformer.translation.search import SearchConfig, search

_SAMPLED_ROWS = 64
_GREEDY = SearchConfig(beam=1)
# A larger batch would only wait longer for its longest translation.
_BLEU_BATCH = 64


@contextmanager
def evaluating(model: ReLUFormer) -> Iterator[None]:
    """Context without dropout, gradients and compilation."""
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train()


def measure_attention(
    model: ReLUFormer,
    batches: Iterable[Batch],
    group: Processes,
    autocast: Callable[[], AbstractContextManager[object]],
) -> AttentionStats:
    """Statistics of the attentions on batches, from a random sample of query rows.

    A separate forward pass, because compiled and captured steps cannot compute them.
    """
    with evaluating(model), autocast():
        records = [
            record
            for batch in batches
            for record in real_rows(
                model(**inputs(batch), record="stats", sample_rows=_SAMPLED_ROWS).records, batch
            )
        ]
    return attention_statistics(records, group)


def dev_loss(
    model: ReLUFormer,
    batches: Batches,
    group: Processes,
    autocast: Callable[[], AbstractContextManager[object]],
) -> float:
    """Negative log-likelihood per token over all batches and ranks."""
    total = torch.zeros((), dtype=torch.float64, device=group.device)
    tokens = 0
    with evaluating(model), autocast():
        for batch in batches.epoch(0, rank=group.rank, world=group.world):
            here = batch.to(group.device)
            logits = model(**inputs(here)).logits
            total += translation_loss(logits, here.target_out, pad_id=model.config.pad_id)[1]
            tokens += batch.target_tokens
    return float(group.add(total)) / tokens


def dev_bleu(model: ReLUFormer, tokenizer: Tokenizer, split: Split, examples: int) -> float:
    """BLEU of greedy translations of `examples` examples, spread evenly over the split.

    Every rank computes all translations, because sharded models must decode in lockstep.
    """
    spans = split.packing.spans
    count = min(examples, len(spans))
    chosen = spans[np.linspace(0, len(spans) - 1, count).round().astype(int)]
    sources = [_ids(split.corpus.source, *span) for span in chosen.tolist()]
    references = [_ids(split.corpus.target, *span) for span in chosen.tolist()]
    # Examples of one sentence have translations of one sentence.
    banned = () if (np.diff(chosen) > 1).any() else (SEP,)
    translations: dict[int, list[int]] = {}
    order = sorted(range(count), key=lambda index: len(sources[index]))
    with evaluating(model):
        for start in range(0, count, _BLEU_BATCH):
            part = order[start : start + _BLEU_BATCH]
            hypotheses = search(model, [sources[i] for i in part], _GREEDY, banned=banned)
            tokens = (hypothesis.tokens for hypothesis in hypotheses)
            translations.update(zip(part, tokens, strict=True))
    texts = [
        [" ".join(tokenizer.decode_document(ids)) for ids in side]
        for side in ([translations[index] for index in range(count)], references)
    ]
    return float(BLEU().corpus_score(texts[0], [texts[1]]).score)


def _ids(side: Side, first: int, end: int) -> list[int]:
    """Token ids of a span of sentences, with separators between them."""
    ids: list[int] = side.tokens[side.offsets[first] : side.offsets[end] - 1].tolist()
    return ids

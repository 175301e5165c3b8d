"""Batches to inspect a model on: its own dev split, or any text."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from reluformer.checkpoint import LoadedRun
from reluformer.data.batches import pad_sources
from reluformer.data.text import DOCUMENT, lines
from reluformer.data.tokenizer import Tokenizer
from reluformer.errors import UserError
from reluformer.train.data import load_data
from reluformer.train.objective import inputs
from reluformer.translation.search import SearchConfig
from reluformer.translation.translator import Translator

Batch = dict[str, Tensor]

# Batches that examples of dev come from.
_BATCHES = 4
# Most elements of all attention maps of one batch: 1 GiB in float32.
_MAP_ELEMENTS = 2**28


def dev_batch(run: LoadedRun, examples: int) -> Batch:
    """Up to `examples` examples of the dev split that the run's recipe names.

    They come from several batches, which hold examples of different lengths.
    """
    data = load_data(run.recipe)
    if data.dev is None:
        raise UserError(f"data.source {run.recipe.data.source} has no dev split; give a text")
    batches = list(islice(data.dev.batches(run.recipe).epoch(0), _BATCHES))
    widths = [(batch.source.shape[1], batch.target_in.shape[1]) for batch in batches]
    most = _most_examples(run, *(max(sizes) for sizes in zip(*widths, strict=True)))
    share = -(-min(examples, most) // len(batches))
    parts = [inputs(batch) for batch in batches]
    return {
        name: torch.cat([_widen(part[name][:share], name, parts) for part in parts])[:examples]
        for name in parts[0]
    }


def _widen(rows: Tensor, name: str, parts: Sequence[Batch]) -> Tensor:
    """Pad rows of tokens to the width of the widest part; lengths [B] stay."""
    if rows.dim() == 1:
        return rows
    width = max(part[name].shape[1] for part in parts)
    padding = (0, width - rows.shape[1])
    return torch.nn.functional.pad(rows, padding, value=Tokenizer.pad)


def dev_pairs(run: LoadedRun, count: int) -> list[tuple[str, str]]:
    """The first examples of the dev split as (source, target) texts, one sentence a line."""
    batch = dev_batch(run, count)
    decode = run.tokenizer.decode_document
    sides = [
        ["\n".join(decode(ids[:length].tolist())) for ids, length in zip(*side, strict=True)]
        for side in (
            (batch["source"], batch["source_lengths"]),
            (batch["target"], batch["target_lengths"]),
        )
    ]
    return list(zip(*sides, strict=True))


def text_batch(run: LoadedRun, path: Path | str, examples: int) -> Batch:
    """Up to `examples` first lines of a text file, with greedy translations as targets."""
    sources = first_lines(path, examples)
    pairs = list(zip(sources, translations(run, sources), strict=True))
    batch = pair_batch(run.tokenizer, pairs)
    most = _most_examples(run, batch["source"].shape[1], batch["target"].shape[1])
    return {name: tensor[:most] for name, tensor in batch.items()}


def first_lines(path: Path | str, count: int) -> list[str]:
    """The first sentences of a text file."""
    sentences = (line for line in lines(path) if line.strip() not in ("", DOCUMENT))
    first = list(islice(sentences, count))
    if not first:
        raise UserError(f"{path} has no sentence")
    return first


def pair_batch(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> Batch:
    """A batch of (source, target) texts, targets behind the start mark."""
    targets = [[tokenizer.bos, *tokenizer.encode(target)] for _, target in pairs]
    source, source_lengths = pad_sources([tokenizer.encode(source) for source, _ in pairs])
    longest = max(map(len, targets))
    target = torch.full((len(targets), longest), tokenizer.pad)
    for row, ids in enumerate(targets):
        target[row, : len(ids)] = torch.tensor(ids)
    return {
        "source": source,
        "target": target,
        "source_lengths": source_lengths,
        "target_lengths": torch.tensor([len(ids) for ids in targets]),
    }


def translations(run: LoadedRun, sources: Sequence[str]) -> list[str]:
    """Greedy translations of some lines."""
    return translator(run).lines(list(sources))


def translator(run: LoadedRun) -> Translator:
    """A greedy translator that shares the run's model."""
    return Translator(
        run.model,
        run.tokenizer,
        trained_length=run.recipe.data.max_length,
        documents=run.recipe.data.unit == "document",
        config=SearchConfig(beam=1),
    )


def _most_examples(run: LoadedRun, source: int, target: int) -> int:
    """Number of examples whose attention maps fit into memory."""
    config = run.model.config
    encoder = config.encoder_layers * source * source
    decoder = config.decoder_layers * target * (target + source)
    return max(1, _MAP_ELEMENTS // (config.heads * (encoder + decoder)))

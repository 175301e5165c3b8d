"""Empty blocks of attention weights in a trained model on real text.

    python -m benchmarks.sparsity --model runs/document --documents \\
        --source test.en.xz --target test.de.xz --out sparsity.json

The model encodes the source and decodes the target with teacher forcing. Each measure is the share
of blocks whose weights are all exactly zero, among blocks with a visible key. A block is a number
of query rows, keys and neighbouring heads. The saving of a kernel depends on the block:

    weights          a value row in a decoding step, if heads do not share values
    values, 2 heads  that value row, if two heads share it; likewise for more heads
    queries          rows without weight; no saving, because their scores must be computed
    keys             value rows that no query of the sequence uses
    maps             heads without weight for a whole sequence
    tiles            the second matmul of a tile, after the first has shown that it is empty
    pages            the values of a page in a decoding step
    pages, bound     also its keys, if bounds on the key channels prove that the page is empty

Blocks begin at the first query and key; a partial block at the edge counts as a whole one.
Sequences shorter than a block are left out. Shares are pooled over the text for each head, in
float32. The table shows their mean and range over heads and layers.
"""

import argparse
import datetime
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from reluformer.checkpoint import LoadedRun, load_run
from reluformer.console import guarded
from reluformer.data.batches import Batch, Batches
from reluformer.data.corpus import Corpus
from reluformer.data.packing import pack_sentences, single_sentences
from reluformer.data.text import TextPair, read_documents
from reluformer.errors import UserError
from reluformer.files import write_text
from reluformer.info import commit, info
from reluformer.model import ReLUFormer
from reluformer.model import attention as model_attention
from reluformer.ops.api import attend
from reluformer.ops.call import Call
from reluformer.ops.definition import Attention
from reluformer.ops.rule import Rectified, per_head
from reluformer.train.objective import inputs

TILES = ((16, 16), (64, 64), (128, 64), (128, 128))
PAGES = (16, 64)
NEARLY_EMPTY, EMPTY = "heads above 99 % zeros", "heads without output"

Counts = dict[str, Tensor]
"""By measure, [2, heads or groups of heads]: empty blocks, and blocks with a visible key."""


class Block(NamedTuple):
    """Numbers of query rows, keys and heads of a block; 0 stands for all."""

    rows: int
    keys: int
    heads: int = 1


class RecordedCall(NamedTuple):
    """An attention call of the model."""

    row: Attention
    call: Call
    options: Mapping[str, Any]


def measures(heads: int) -> dict[str, Block]:
    """Blocks to count, by name, for a number of heads."""
    groups = [group for group in (2, 4) if heads % group == 0 and group < heads]
    blocks = {"weights": Block(1, 1)}
    blocks |= {f"values, {group} heads": Block(1, 1, group) for group in (*groups, heads)}
    blocks |= {"queries": Block(1, 0), "keys": Block(0, 1), "maps": Block(0, 0)}
    blocks |= {f"tiles {rows}x{keys}": Block(rows, keys) for rows, keys in TILES}
    return blocks


def empty_blocks(
    read: Tensor, visible: Tensor, block: Block, may_read: Tensor | None = None
) -> Tensor:
    """Count empty blocks.

    Args:
        read: Bool [B, H, Tq, Tk], True where the weight is not zero.
        visible: Bool [B, 1, Tq, Tk].
        block: Size of the blocks.
        may_read: Bool [B, H, Tq, pages]. If given, blocks are pages, and a page is empty where this
            is False.

    Returns:
        [2, H / heads]: empty blocks, and blocks with a visible key.
    """
    rows, keys = block.rows or read.shape[2], block.keys or read.shape[3]
    heads = block.heads or read.shape[1]
    used = _pool(read, rows, keys, heads) if may_read is None else _pool(may_read, 1, 1, heads)
    queries, length = (visible.any(dim).sum(-1).view(-1, 1, 1, 1) for dim in (-1, -2))
    counted = _pool(visible, rows, keys) & (queries >= block.rows) & (length >= block.keys)
    empty = (counted & ~used).sum((0, 2, 3))
    return torch.stack([empty, counted.sum().expand_as(empty)]).cpu()


def _pool(x: Tensor, rows: int, keys: int, heads: int = 1) -> Tensor:
    """Whether blocks of x [B, H, Tq, Tk] contain True: [B, H / heads, Tq / rows, Tk / keys]."""
    x = functional.pad(x, (0, -x.shape[3] % keys, 0, -x.shape[2] % rows))
    b, h, r, k = x.shape
    return x.view(b, h // heads, heads, r // rows, rows, k // keys, keys).any(6).any(4).any(2)


def page_bound(q: Tensor, k: Tensor, n: Tensor, size: int) -> Tensor:
    """Upper bounds on the products of queries with the keys of pages.

    A page is as full as when the query row was decoded.

    Args:
        q: [B, H, Tq, D].
        k: [B, Hkv, Tk, D].
        n: [B, 1, Tq], number of visible keys of each row.
        size: Keys per page.

    Returns:
        [B, H, Tq, pages].
    """
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    b, h, length, width = k.shape
    paged = functional.pad(k, (0, 0, 0, -length % size)).view(b, h, -1, size, width)
    # Bounds after each key of a page, for full pages and for the page of the newest key.
    low, high = paged.cummin(3).values, paged.cummax(3).values
    whole = _best_product(q, low[:, :, :, -1], high[:, :, :, -1])
    newest = (n - 1).clamp(min=0)
    at = newest[..., None].expand(*q.shape)
    begun = (each.flatten(2, 3).gather(2, at).unsqueeze(3) for each in (low, high))
    last = _best_product(q.unsqueeze(3), *begun).squeeze(3)
    here = torch.arange(whole.shape[3], device=q.device) == (newest // size)[..., None]
    return torch.where(here, last, whole)


def _best_product(q: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """[..., rows, pages] from q [..., rows, D] and bounds [..., pages, D]."""
    # Covers the rounding of the products and of the bound.
    slack = q.shape[-1] * 2.0**-21
    low, high, far = (each.mT for each in (low, high, torch.maximum(low.abs(), high.abs())))
    return q.clamp(min=0) @ high + q.clamp(max=0) @ low + slack * (q.abs() @ far)


def count(weights: Tensor, valid: Tensor, recorded: RecordedCall) -> Counts:
    """All measures of one attention and batch.

    Args:
        weights: [B, H, Tq, Tk].
        valid: Bool, broadcastable to [B, 1, Tq], False where the query is padding.
        recorded: The attention call.
    """
    row, call, options = recorded
    _, heads, rows, keys = weights.shape
    table = call.visibility.table(rows, keys, weights.device)
    visible = valid.unsqueeze(-1).expand(len(weights), 1, rows, keys)
    visible = visible if table is None else visible & table
    read = (weights != 0) & visible
    counts = {name: empty_blocks(read, visible, b) for name, b in measures(heads).items()}
    rule = None if row.cosine else row.weigh_with(options)
    for size in PAGES:
        may_read = None
        if isinstance(rule, Rectified) and rule.negative_slope == 0:
            top = page_bound(call.q, call.k, visible.sum(-1), size)
            may_read = top * row.default_scale(call.q.shape[-1]) > per_head(rule.threshold)
            assert (may_read | ~_pool(read, 1, size)).all(), "a bound excludes a page with weight"
        for name, group in ((f"pages of {size}", 1), (f"pages of {size}, all heads", 0)):
            block = Block(1, size, group)
            counts[name] = empty_blocks(read, visible, block)
            if may_read is not None:
                counts[f"{name}, bound"] = empty_blocks(read, visible, block, may_read)
    return counts


@torch.inference_mode()
def measure(model: ReLUFormer, batches: Iterable[Batch]) -> dict[str, list[Counts]]:
    """Counts of each layer over all batches, by site; only the maps of one batch are in memory."""
    total: dict[tuple[str, int], Counts] = {}
    for batch in batches:
        for place, counts in _count_batch(model, batch):
            before = total.get(place, {})
            total[place] = {name: both + before.get(name, 0) for name, both in counts.items()}
    return {site: [total[place] for place in total if place[0] == site] for site, _ in total}


def _count_batch(model: ReLUFormer, batch: Batch) -> list[tuple[tuple[str, int], Counts]]:
    """Site and layer, and counts, of each attention."""
    calls: list[RecordedCall] = []

    def recording(row: Attention, call: Call, options: Mapping[str, Any], impl: str) -> Any:
        calls.append(RecordedCall(row, call, options))
        return attend(row, call, options, impl)

    arguments = inputs(batch.to(model.target_embedding.weight.device))
    with patch.object(model_attention, "attend", recording):
        records = model(**arguments, record="weights").records
    return [
        ((record.site, record.layer), count(record.weights, record.valid, recorded))
        for record, recorded in zip(records, calls, strict=True)
    ]


def read_text(run: LoadedRun, arguments: argparse.Namespace) -> Batches:
    """Batches of the first sentences of two files, packed as for training."""
    files = TextPair(arguments.source, arguments.target, documents=arguments.documents)
    corpus = Corpus.in_memory(_first(read_documents(files), arguments.sentences), run.tokenizer)
    limit = run.recipe.data.max_length
    if arguments.documents:
        examples = pack_sentences(corpus, limit, cap=limit)
    else:
        examples = single_sentences(corpus, limit)
    return Batches(corpus, examples.spans, batch_tokens=arguments.batch_tokens, seed=0)


def _first(documents: Iterable[list[Any]], left: int) -> Iterator[list[Any]]:
    for document in documents:
        yield document[:left]
        left -= len(document)
        if left <= 0:
            return


def shares(both: Tensor) -> list[float | None]:
    """Share of empty blocks by head, from [2, heads]; None if no sequence was long enough."""
    return [round(empty / total, 4) if total else None for empty, total in both.T.tolist()]


def summary(layers: list[Counts]) -> dict[str, Any]:
    """Mean, minimum and maximum share over layers and heads, and [layer, head] of empty heads."""
    result: dict[str, Any] = {}
    for name in layers[0]:
        known = [share for layer in layers for share in shares(layer[name]) if share is not None]
        mean = round(sum(known) / max(len(known), 1), 4)
        result[name] = [mean, min(known), max(known)] if known else None
    # [layers, 2, heads]
    empty, total = torch.stack([layer["weights"] for layer in layers]).unbind(1)
    result[NEARLY_EMPTY] = (empty > 0.99 * total).nonzero().tolist()
    result[EMPTY] = (empty == total).nonzero().tolist()
    return result


def table(sites: dict[str, dict[str, Any]]) -> str:
    """A line for each measure, a column for each site."""

    def cell(name: str, value: Any) -> str:
        if name in (NEARLY_EMPTY, EMPTY):
            return str(len(value))
        return "{:.1f} ({:.1f} to {:.1f})".format(*(100 * v for v in value)) if value else "-"

    rows = {"empty, %: mean (range)": list(sites)}
    for name in dict.fromkeys(name for shares in sites.values() for name in shares):
        rows[name] = [cell(name, shares.get(name)) for shares in sites.values()]
    return "\n".join(f"{name:31}{''.join(f'{c:>22}' for c in row)}" for name, row in rows.items())


@guarded
def main() -> None:
    """Measure, write JSON and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a run's folder or checkpoint")
    parser.add_argument(
        "--source", type=Path, required=True, help="text with one sentence per line"
    )
    parser.add_argument("--target", type=Path, required=True, help="its translation")
    parser.add_argument("--documents", action="store_true", help="join sentences of a document")
    parser.add_argument(
        "--sentences", type=int, default=2000, help="number of sentences, from the start"
    )
    parser.add_argument(
        "--batch-tokens",
        type=int,
        default=4096,
        help="tokens per batch; weights grow with its square",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    if arguments.sentences < 1:
        raise UserError(f"--sentences must be at least 1, got {arguments.sentences}")
    best = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.device == "cuda" and best == "cpu":
        raise UserError("--device must be cpu on a machine without GPU, got cuda")
    run = load_run(arguments.model)
    model = run.model.to(best if arguments.device == "auto" else arguments.device)
    batches = read_text(run, arguments)
    total = measure(model, batches.epoch(0))
    trained = {"step": run.step, "unit": run.recipe.data.unit, "length": run.recipe.data.max_length}
    sides = (batches.source_lengths, batches.target_lengths)
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": info(),
        "model": {"name": arguments.model.resolve().name, **trained, **asdict(model.config)},
        "text": {
            "files": [arguments.source.name, arguments.target.name],
            "documents": arguments.documents,
            "examples": len(batches.spans),
            "tokens": [int(side.sum()) for side in sides],
            "longest": [int(side.max()) for side in sides],
        },
        "summary": {site: summary(layers) for site, layers in total.items()},
        "layers": {
            site: [{name: shares(c) for name, c in layer.items()} for layer in layers]
            for site, layers in total.items()
        },
    }
    # Lists of numbers take one line each.
    plain = json.dumps(report, indent=1)
    laid_out = re.sub(r"\[[^][{}]*\]", lambda match: " ".join(match[0].split()), plain)
    write_text(arguments.out, laid_out + "\n")
    print(table(report["summary"]))


if __name__ == "__main__":
    main()

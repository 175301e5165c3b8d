"""What zero weights allow to skip: blocks without any weight, in a trained model on real text.

    python benchmarks/sparsity.py --model runs/document --documents \\
        --source test.en.xz --target test.de.xz --out sparsity.json

The model reads the source and, teacher-forced, the target. Every measure is a share: of the blocks
(so many query rows, keys and neighbouring heads) in which something is visible, those whose weights
are all exactly zero. Which blocks a kernel can leave out decides what a zero is worth:

    weights          nothing in a matmul; in a decoding step a value row, if the head has its own
    values, 2 heads  that value row, if two heads share it; likewise more
    queries          dead rows; nothing is spared, as their scores are needed to know
    keys             value rows that no query of the sequence reads
    maps             heads that are silent for a whole sequence
    tiles            the second matmul of a tile; the first tells that it is empty
    pages            the values of a page in a decoding step
    pages, bound     its keys too: what the least and largest key channels prove beforehand

Blocks are cut from the first query and key on; one at the edge counts like a whole one. Sequences
shorter than a block are left out, as they would be a single one. Shares are pooled over the text
for each head, in float32; the table has their mean and range over heads and layers.
"""

import argparse
import datetime
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

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
from reluformer.ops.definition import Attention
from reluformer.ops.rule import Rectified, per_head
from reluformer.ops.visibility import Visibility
from reluformer.train.objective import inputs

TILES = ((16, 16), (64, 64), (128, 64), (128, 128))
PAGES = (16, 64)
NEARLY_SILENT, SILENT = "heads above 99 % zeros", "heads without output"

Counts = dict[str, Tensor]
"""By measure, [2, heads or groups of heads]: empty blocks, and blocks with anything visible."""


class Block(NamedTuple):
    """So many query rows, keys and heads that are left out together; 0 stands for all."""

    rows: int
    keys: int
    heads: int = 1


class Seen(NamedTuple):
    """A call of an attention: q [B, H, Tq, D], k [B, Hkv, Tk, D] and its other arguments."""

    row: Attention
    q: Tensor
    k: Tensor
    arguments: dict[str, Any]


def measures(heads: int) -> dict[str, Block]:
    """The blocks that are counted by their names, for a model with so many heads."""
    groups = [group for group in (2, 4) if heads % group == 0 and group < heads]
    blocks = {"weights": Block(1, 1)}
    blocks |= {f"values, {group} heads": Block(1, 1, group) for group in (*groups, heads)}
    blocks |= {"queries": Block(1, 0), "keys": Block(0, 1), "maps": Block(0, 0)}
    blocks |= {f"tiles {rows}x{keys}": Block(rows, keys) for rows, keys in TILES}
    return blocks


def empty_blocks(
    read: Tensor, visible: Tensor, block: Block, may_read: Tensor | None = None
) -> Tensor:
    """[2, H / heads]: empty blocks, and blocks in which something is visible.

    `read` [B, H, Tq, Tk] says where weights are not zero, `visible` [B, 1, Tq, Tk] where they could
    be. With `may_read` [B, H, Tq, pages], blocks are pages, and those are empty that it rules out.
    """
    rows, keys = block.rows or read.shape[2], block.keys or read.shape[3]
    heads = block.heads or read.shape[1]
    used = _pool(read, rows, keys, heads) if may_read is None else _pool(may_read, 1, 1, heads)
    queries, length = (visible.any(dim).sum(-1).view(-1, 1, 1, 1) for dim in (-1, -2))
    of = _pool(visible, rows, keys) & (queries >= block.rows) & (length >= block.keys)
    empty = (of & ~used).sum((0, 2, 3))
    return torch.stack([empty, of.sum().expand_as(empty)]).cpu()


def _pool(x: Tensor, rows: int, keys: int, heads: int = 1) -> Tensor:
    """Where blocks of x [B, H, Tq, Tk] hold a True: [B, H / heads, Tq / rows, Tk / keys]."""
    x = functional.pad(x, (0, -x.shape[3] % keys, 0, -x.shape[2] % rows))
    b, h, r, k = x.shape
    return x.view(b, h // heads, heads, r // rows, rows, k // keys, keys).any(6).any(4).any(2)


def page_bound(q: Tensor, k: Tensor, n: Tensor, size: int) -> Tensor:
    """[B, H, Tq, pages]: no key of a page has a larger product with the query.

    q [B, H, Tq, D], k [B, Hkv, Tk, D]; a row sees the first n keys, n [B, 1, Tq], and a page is as
    full as when that row was decoded.
    """
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    b, h, length, width = k.shape
    paged = functional.pad(k, (0, 0, 0, -length % size)).view(b, h, -1, size, width)
    # Bounds after each key of a page: those of whole pages, and of the page of the newest key.
    low, high = paged.cummin(3).values, paged.cummax(3).values
    whole = _best_product(q, low[:, :, :, -1], high[:, :, :, -1])
    newest = (n - 1).clamp(min=0)
    at = newest[..., None].expand(*q.shape)
    begun = (each.flatten(2, 3).gather(2, at).unsqueeze(3) for each in (low, high))
    last = _best_product(q.unsqueeze(3), *begun).squeeze(3)
    here = torch.arange(whole.shape[3], device=q.device) == (newest // size)[..., None]
    return torch.where(here, last, whole)


def _best_product(q: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """[..., rows, pages] of q [..., rows, D] and bounds [..., pages, D], as the kernel does it."""
    # Covers the rounding of the products and of the bound.
    slack = q.shape[-1] * 2.0**-21
    low, high, far = (each.mT for each in (low, high, torch.maximum(low.abs(), high.abs())))
    return q.clamp(min=0) @ high + q.clamp(max=0) @ low + slack * (q.abs() @ far)


def counted(weights: Tensor, valid: Tensor, call: Seen) -> Counts:
    """All measures of one attention and batch.

    weights [B, H, Tq, Tk]; valid, broadcastable to [B, 1, Tq], is False where the query is padding.
    """
    _, heads, rows, keys = weights.shape
    rules = Visibility(*(call.arguments[name] for name in ("mask", "causal", "key_lengths")))
    table = rules.table(rows, keys, weights.device)
    visible = valid.unsqueeze(-1).expand(len(weights), 1, rows, keys)
    visible = visible if table is None else visible & table
    read = (weights != 0) & visible
    counts = {name: empty_blocks(read, visible, b) for name, b in measures(heads).items()}
    rule = None if call.row.cosine else call.row.weigh_with(call.arguments)
    for size in PAGES:
        may_read = None
        if isinstance(rule, Rectified) and rule.negative_slope == 0:
            top = page_bound(call.q, call.k, visible.sum(-1), size)
            may_read = top * call.row.default_scale(call.q.shape[-1]) > per_head(rule.threshold)
            assert (may_read | ~_pool(read, 1, size)).all(), "a bound shuts a page with weight"
        for name, group in ((f"pages of {size}", 1), (f"pages of {size}, all heads", 0)):
            block = Block(1, size, group)
            counts[name] = empty_blocks(read, visible, block)
            if may_read is not None:
                counts[f"{name}, bound"] = empty_blocks(read, visible, block, may_read)
    return counts


@torch.inference_mode()
def measure(model: ReLUFormer, batches: Iterable[Batch]) -> dict[str, list[Counts]]:
    """Counts of every layer by site, over all batches; the maps of one batch exist at a time."""
    total: dict[tuple[str, int], Counts] = {}
    for batch in batches:
        for place, found in _of_batch(model, batch):
            before = total.get(place, {})
            total[place] = {name: both + before.get(name, 0) for name, both in found.items()}
    return {site: [total[place] for place in total if place[0] == site] for site, _ in total}


def _of_batch(model: ReLUFormer, batch: Batch) -> list[tuple[tuple[str, int], Counts]]:
    """Site and layer, and counts, of every attention."""
    attend, calls = Attention.attend, []

    def noted(row: Attention, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Any:
        calls.append(Seen(row, q, k, arguments))
        return attend(row, q, k, v, **arguments)

    here = inputs(batch.to(model.target_embedding.weight.device))
    with patch.object(Attention, "attend", noted):
        records = model(**here, record="weights").records
    return [
        ((record.site, record.layer), counted(record.weights, record.valid, call))
        for record, call in zip(records, calls, strict=True)
    ]


def text(run: LoadedRun, arguments: argparse.Namespace) -> Batches:
    """The first sentences of two files, cut into examples as for training."""
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
    """Empty blocks over blocks, [2, heads], by head; None where no sequence was long enough."""
    return [round(empty / of, 4) if of else None for empty, of in both.T.tolist()]


def summary(layers: list[Counts]) -> dict[str, Any]:
    """Mean, least and largest share over layers and heads; layer and head of those of no use."""
    found: dict[str, Any] = {}
    for name in layers[0]:
        known = [share for layer in layers for share in shares(layer[name]) if share is not None]
        mean = round(sum(known) / max(len(known), 1), 4)
        found[name] = [mean, min(known), max(known)] if known else None
    # [layers, 2, heads]
    empty, of = torch.stack([layer["weights"] for layer in layers]).unbind(1)
    found[NEARLY_SILENT] = (empty > 0.99 * of).nonzero().tolist()
    found[SILENT] = (empty == of).nonzero().tolist()
    return found


def table(sites: dict[str, dict[str, Any]]) -> str:
    """One line a measure, one column a site."""

    def cell(name: str, value: Any) -> str:
        if name in (NEARLY_SILENT, SILENT):
            return str(len(value))
        return "{:.1f} ({:.1f} to {:.1f})".format(*(100 * v for v in value)) if value else "-"

    rows = {"empty, %: mean (range)": list(sites)}
    for name in dict.fromkeys(name for found in sites.values() for name in found):
        rows[name] = [cell(name, found.get(name)) for found in sites.values()]
    return "\n".join(f"{name:31}{''.join(f'{c:>22}' for c in row)}" for name, row in rows.items())


@guarded
def main() -> None:
    """Measure, write JSON, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a run's folder or checkpoint")
    parser.add_argument("--source", type=Path, required=True, help="text, one sentence a line")
    parser.add_argument("--target", type=Path, required=True, help="its translation")
    parser.add_argument("--documents", action="store_true", help="join sentences of a document")
    parser.add_argument("--sentences", type=int, default=2000, help="so many from the start")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="maps grow with it")
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
    batches = text(run, arguments)
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
    laid_out = re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), plain)
    write_text(arguments.out, laid_out + "\n")
    print(table(report["summary"]))


if __name__ == "__main__":
    main()

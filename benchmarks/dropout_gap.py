"""Effect of dropout on attention: row sums, entropies and losses with and without it.

    python -m benchmarks.dropout_gap --model runs/sentence --out gap.json

Uses the data of the run's recipe. Each number is a mean over batches of the training data and over
dev, with dropout (as in training) and without (as in inference). The dev loss is also computed with
all attention scores multiplied by several factors, from which `train.rescale_scores` chooses.
"""

import argparse
import dataclasses
import datetime
import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reluformer.checkpoint import load_run
from reluformer.console import guarded
from reluformer.data.batches import Batch
from reluformer.files import write_text
from reluformer.info import commit, info
from reluformer.model import ReLUFormer
from reluformer.model.losses import translation_loss
from reluformer.processes import Processes
from reluformer.train.data import load_data
from reluformer.train.initialise import autocast
from reluformer.train.objective import inputs, real_rows
from reluformer.train.rescale_scores import score_multiplier
from reluformer.train.validation import dev_loss

FACTORS = (1.2, 1.1, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6)
Bits = Callable[[], AbstractContextManager[object]]


@torch.no_grad()
def means(model: ReLUFormer, batches: Iterable[Batch], dropout: bool, bits: Bits) -> dict[str, Any]:
    """Loss per token, and row sum and entropy of each site, averaged over rows and layers."""
    torch.manual_seed(0)
    model.train(dropout)
    sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(3, dtype=torch.float64))
    loss, tokens = 0.0, 0
    for batch in batches:
        with bits():
            output = model(**inputs(batch), record="stats")
        pad = model.config.pad_id
        loss += float(translation_loss(output.logits.float(), batch.target_out, pad_id=pad)[1])
        tokens += batch.target_tokens
        for record in real_rows(output.records, batch):
            valid = record.valid.expand_as(record.stats.row_sum)
            assert record.stats.entropy is not None
            numbers = (record.stats.row_sum, record.stats.entropy)
            parts = [torch.where(valid, each, 0.0).double().sum() for each in numbers]
            sums[record.site] += torch.stack([*parts, valid.double().sum()]).cpu()
    model.eval()
    averages = {site: (total[:2] / total[2]).tolist() for site, total in sums.items()}
    return {"nll": loss / tokens, "row sum and entropy": averages}


def by_factor(model: ReLUFormer, loss: Callable[[], float]) -> dict[float, float]:
    """Loss for each factor on all scores; the model is restored afterwards."""
    multiply, losses = score_multiplier(model), {}
    for factor in FACTORS:
        multiply(factor)
        losses[factor] = loss()
    multiply(1.0)
    return losses


def table(report: dict[str, Any]) -> str:
    """Values with and without dropout side by side, and the dev loss by factor."""
    on, off = report["dropout on"], report["dropout off"]
    lines = [f"{'':16}{'dropout on':>12}{'off':>8}{'ratio':>8}"]
    lines += [f"{'training nll':16}{on['nll']:12.3f}{off['nll']:8.3f}"]
    dev_on, dev_off = (report[f"dev, dropout {state}"]["nll"] for state in ("on", "off"))
    lines += [f"{'dev nll':16}{dev_on:12.3f}{dev_off:8.3f}"]
    for site in on["row sum and entropy"]:
        pairs = zip(on["row sum and entropy"][site], off["row sum and entropy"][site], strict=True)
        for name, (with_it, without) in zip(("row sum", "entropy"), pairs, strict=True):
            label = f"{site} {name}"
            lines.append(f"{label:16}{with_it:12.3f}{without:8.3f}{without / with_it:8.3f}")
    shown = "  ".join(f"{factor} {nll:.4f}" for factor, nll in report["dev nll by factor"].items())
    return "\n".join([*lines, f"dev nll by factor on scores: {shown}"])


@guarded
def main() -> None:
    """Measure, write JSON and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a run's folder")
    parser.add_argument("--batches", type=int, default=16, help="number of training batches")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = load_run(arguments.model)
    recipe, model, data = run.recipe, run.model.to(device), load_data(run.recipe)
    assert data.dev is not None
    bits, dev = autocast(recipe.train, device), data.dev.batches(recipe)
    some = islice(data.train.batches(recipe).epoch(0), arguments.batches)
    batches = [batch.to(device) for batch in some]
    dev_batches = [batch.to(device) for batch in dev.epoch(0)]
    alone = Processes(0, 1, device)
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": info(),
        "model": arguments.model.resolve().name,
        "dropout": model.config.dropout,
        "attention": dataclasses.asdict(model.config.attention),
        "dropout on": means(model, batches, True, bits),
        "dropout off": means(model, batches, False, bits),
        "dev, dropout on": means(model, dev_batches, True, bits),
        "dev, dropout off": means(model, dev_batches, False, bits),
        "dev nll by factor": by_factor(model, lambda: dev_loss(model, dev, alone, bits)),
    }
    write_text(arguments.out, json.dumps(report, indent=1) + "\n")
    print(table(report))


if __name__ == "__main__":
    main()

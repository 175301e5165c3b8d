"""Short training runs separate settings whose attention collapses from healthy ones.

The task is to copy random letters, so a model that does not align has the loss of a model that
ignores the source. Losses are summed over attentions: a weight of 0.3 with three attentions
corresponds to 0.05 with the eighteen of a deep model. With gamma = 1 a deep model collapses, but
this shallow one often does not; its row sums therefore start five times higher.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from reluformer.checkpoint import LoadedRun, load_run
from reluformer.config.recipe import recipe_from
from reluformer.config.schema import override, to_dict
from reluformer.data.synthetic.sample import copy_pairs
from reluformer.model import AttentionConfig
from reluformer.train import train

SYMBOLS, LENGTHS = 26, (24, 30)
IGNORANT = math.log(SYMBOLS)
"""Negative log-likelihood of a letter to a model that ignores the source."""

VALUES: dict[str, Any] = {
    "data": {
        "source": "copy",
        "max_length": 32,
        "generated": {
            "train": 4000,
            "dev": 1,
            "vocab_size": 300,
            "symbols": SYMBOLS,
            "lengths": list(LENGTHS),
        },
    },
    "model": {
        "width": 64,
        "heads": 4,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "slots": 64,
        "dropout": 0.0,
    },
    "train": {
        "steps": 400,
        "batch_tokens": 1024,
        "lr": 5e-3,
        "warmup": 100,
        "schedule": "cosine",
        "smoothing": 0.0,
        "log_every": 50,
        "dev_every": None,
        "device": "cpu",
        "compile": False,
        "threads": 1,
    },
}


class Outcome(NamedTuple):
    nll: float
    cross: dict[str, float]
    """Statistics of the attention to the source in the last step."""
    warned: bool
    accuracy: float
    aligned: float
    """Share of the targets for which some head reads the right source letter most."""


def learn(folder: Path, capfd: pytest.CaptureFixture[str], **fields: Any) -> Outcome:
    assigned = {name.replace("__", "."): value for name, value in fields.items()}
    train(recipe_from(override(VALUES, assigned)), folder)
    said = capfd.readouterr().err
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    accuracy, aligned = held_out(load_run(folder))
    warned = "cross-attention has collapsed" in said
    return Outcome(last["nll"], last["attention"]["cross"], warned, accuracy, aligned)


@torch.no_grad()
def held_out(run: LoadedRun) -> tuple[float, float]:
    """Share of right letters, and of aligned ones, in new sequences of one length."""
    lines = [
        source
        for source, _ in copy_pairs(
            seed=7, count=32, symbols=SYMBOLS, length_range=(LENGTHS[1], LENGTHS[1])
        )
    ]
    letters = torch.tensor([run.tokenizer.encode(line) for line in lines])
    begin = torch.full((len(lines), 1), run.model.config.bos_id)
    end = torch.full((len(lines), 1), run.model.config.eos_id)
    output = run.model(
        torch.cat([letters, end], dim=1), torch.cat([begin, letters], dim=1), record="weights"
    )
    right = output.logits[:, :-1].argmax(dim=-1) == letters
    (weights,) = (record.weights for record in output.records if record.site == "cross")
    assert weights is not None
    most, where = weights[:, :, :-1].max(dim=-1)
    aligned = ((where == torch.arange(letters.shape[1])) & (most > 0)).any(dim=1)
    return right.float().mean().item(), aligned.float().mean().item()


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(
            {"model__attention": {"kind": "softmax"}}, id="softmax", marks=pytest.mark.release
        ),
        pytest.param({}, id="default"),
        pytest.param(
            {
                "model__attention": {"power": 2, "row_normalise": None},
                "train__normalisation_weight": 0.05,
            },
            id="undivided",
            marks=pytest.mark.release,
        ),
    ],
)
def test_a_healthy_setting_aligns(
    setting: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome = learn(tmp_path, capfd, **setting)
    assert outcome.nll < IGNORANT / 4
    assert outcome.accuracy > 0.75 and outcome.aligned > 0.85
    assert outcome.cross["entropy"] > 0.3
    assert not outcome.warned


@pytest.mark.slow
def test_row_sums_above_one_and_strong_losses_collapse(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome = learn(
        tmp_path,
        capfd,
        model__attention=to_dict(AttentionConfig.paper(gamma="fixed", gamma_init=0.2)),
        train__steps=150,
        train__normalisation_weight=0.3,
        train__entropy_weight=0.3,
    )
    assert outcome.warned
    assert outcome.cross["entropy"] < 0.1 and outcome.cross["zeros"] > 0.95
    assert outcome.nll > 0.9 * IGNORANT
    assert outcome.accuracy < 0.15 and outcome.aligned < 0.3

"""Budgets: how large the trainings of a study are, and how many seeds they have.

`tiny` runs every study on two CPU cores in minutes, on generated text: it shows that the software
works and decides nothing. `short` fits a GPU of 8 GB. `full` has the sizes of the paper.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from reluformer.errors import UserError, shorten

# Numbers that torch accepts as seeds.
_SEEDS = 2**63


@dataclass(frozen=True)
class Training:
    """Recipe and settings shared by the trainings of one kind."""

    recipe: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class Decoding:
    """How finished models are tuned on dev and translate the test sets."""

    beam: int = 5
    penalties: tuple[float, ...] = (0.8, 1.0, 1.2, 1.4, 1.6)
    dev_lines: int = 600
    test_lines: int | None = None
    """Lines of each test set; None for all."""


@dataclass(frozen=True)
class Family:
    """Size of the synthetic tasks of the attention family."""

    kinds: tuple[str, ...] | None = None
    """Attentions; None for all of the family."""
    steps: int = 800
    width: int = 64
    length: int = 16
    """Symbols of a sequence before the part that is predicted."""


@dataclass(frozen=True)
class Budget:
    """Everything that differs between `tiny`, `short` and `full`."""

    name: str
    sentence: Training
    document: Training
    seeds: tuple[int, ...] = (1,)
    """Seeds of the cells that have several."""
    rates: tuple[float, ...] = (2e-3,)
    """Learning rates tried for softmax, the default and the paper's form."""
    slots: tuple[int, ...] = (32, 512, 4096)
    memory_slots: int = 1024
    slots_share: float = 1.0
    """Share of the sentence trainings' steps that the slot sweep takes."""
    lengths: tuple[int, ...] = (256, 512, 1024, 2048)
    seeded_lengths: tuple[int, ...] = (256, 1024)
    test_lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    context_length: int = 1024
    large_steps: tuple[int, int] = (10_800, 2000)
    """Steps on sentences and on documents of the study `large-data`."""
    decoding: Decoding = field(default_factory=Decoding)
    bootstrap: int = 1000
    """Samples of the paired bootstrap."""
    inspected: int = 32
    """Examples of dev on which finished models are inspected."""
    family: Family = field(default_factory=Family)
    theory_numbers: int = 2**22
    """Random scores drawn for each n."""

    def with_seeds(self, seeds: tuple[int, ...]) -> "Budget":
        """The budget with other seeds."""
        valid = all(0 <= seed < _SEEDS for seed in seeds)
        if not seeds or not valid or len(set(seeds)) < len(seeds):
            raise UserError(
                f"seeds must be different numbers from 0 to 2^63 - 1, got {shorten(list(seeds))}"
            )
        return replace(self, seeds=seeds)


_LOGGED = {"train.bleu_every": None, "train.keep": 1}
# Steps of 8,192 tokens in two parts, and no CUDA graphs, whose memory comes on top of that of the
# steps without them: about 5 GB, also with a vocabulary of 30,000 or 4,096 slots.
_SMALL_GPU = {"train.batch_tokens": 4096, "train.accumulate": 2, "train.graphs": False}

_TINY = {
    "data.generated": None, "model.width": 32, "model.heads": 2, "model.slots": 64,
    "model.encoder_layers": 1, "model.decoder_layers": 1, "train.batch_tokens": 1024,
    "train.lr": 4e-3, "train.warmup": 20,
    "train.steps": 60, "train.log_every": 20, "train.dev_every": 20, "train.checkpoint_every": 60,
    "train.rescale_scores": True, "train.threads": 1, "train.device": "cpu", **_LOGGED,
}  # fmt: skip

BUDGETS = {
    "tiny": Budget(
        "tiny",
        Training("tiny", {**_TINY, "data.unit": "sentence", "data.max_length": 64}),
        Training("tiny", {**_TINY, "data.unit": "document", "train.steps": 40,
                          "train.checkpoint_every": 40}),
        rates=(4e-3,),
        slots=(16, 64),
        memory_slots=64,
        lengths=(64, 128),
        seeded_lengths=(64, 128),
        test_lengths=(64, 128),
        context_length=128,
        large_steps=(40, 40),
        decoding=Decoding(beam=2, penalties=(1.0, 1.4), dev_lines=6, test_lines=16),
        bootstrap=50,
        inspected=8,
        family=Family(("softmax", "relu", "rela", "sparsemax", "sigmoid", "softmax1"), 30, 16, 8),
        theory_numbers=2**16,
    ),
    "short": Budget(
        "short",
        Training("sentence", {
            "train.steps": 2900, "train.warmup": 500,
            "train.log_every": 145, "train.dev_every": 725, "train.checkpoint_every": 725,
            **_SMALL_GPU, **_LOGGED,
        }),
        Training("document", {
            "train.steps": 2000, "train.warmup": 300, "train.lr": 1e-3,
            "train.schedule": "cosine", "train.log_every": 100, "train.dev_every": 500,
            "train.checkpoint_every": 500, "train.final": "last", "train.rescale_scores": True,
            **_SMALL_GPU, **_LOGGED,
        }),
        lengths=(256, 512, 1024),
        test_lengths=(512, 1024, 2048),
        large_steps=(8000, 2000),
        decoding=Decoding(penalties=(1.0, 1.4), dev_lines=200, test_lines=1000),
        family=Family(steps=500),
        theory_numbers=2**20,
    ),
    "full": Budget(
        "full",
        Training("sentence", {
            "train.log_every": 240, "train.dev_every": 720, "train.checkpoint_every": 720,
            **_LOGGED,
        }),
        Training("document", {
            "train.steps": 1000, "train.warmup": 200, "train.lr": 1e-3, "train.batch_tokens": 32768,
            "train.schedule": "cosine", "train.log_every": 100, "train.dev_every": 500,
            "train.checkpoint_every": 250, "train.final": "last", "train.rescale_scores": True,
            **_LOGGED,
        }),
        seeds=(1, 2, 3),
        rates=(1e-3, 2e-3, 4e-3),
        slots_share=0.4,
    ),
}  # fmt: skip


def lookup_budget(name: str) -> Budget:
    """The budget called `name`."""
    if name not in BUDGETS:
        raise UserError(f"budget must be one of {', '.join(BUDGETS)}, got {name!r}")
    return BUDGETS[name]

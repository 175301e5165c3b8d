"""Attention maps of a study's models on the same test sentences, for the report."""

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from reluformer.checkpoint import finished_model, load_run
from reluformer.data.text import DOCUMENT, lines
from reluformer.inspection.maps import model_maps
from reluformer.study.cells import Outcome
from reluformer.study.definition import Study

_TEXTS = 2
_MOST_TOKENS = 36
_MOST_WORDS = 24
_FEWEST_WORDS = 8


def study_maps(
    study: Study, outcomes: Sequence[Outcome], root: Path, corpora: Mapping[str, Path]
) -> list[dict[str, Any]]:
    """Maps of the cells that the study shows.

    Empty until all of them have finished, and where their models are not kept.
    """
    pairs = _sentences(next(iter(corpora.values())))
    maps = []
    for labels in study.mapped:
        cells = [
            o for o in outcomes
            if o.finished and all(o.labels.get(k) == v for k, v in labels.items())
        ]  # fmt: skip
        if not cells or finished_model(root / cells[0].name) is None:
            return []
        name = ", ".join(map(str, labels.values()))
        run = load_run(root / cells[0].name)
        sources, targets = ([pair[side] for pair in pairs] for side in (0, 1))
        maps.append(model_maps(name, run, sources, targets, most_tokens=_MOST_TOKENS))
    return maps


def _sentences(corpus: Path) -> list[tuple[str, str]]:
    """Test sentences of medium length with their references."""
    files = (lines(corpus / f"test.{side}.txt") for side in ("source", "target"))
    medium = (
        (source, target)
        for source, target in zip(*files, strict=True)
        if source != DOCUMENT and _FEWEST_WORDS <= len(source.split()) <= _MOST_WORDS
    )
    return list(islice(medium, _TEXTS))

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
    """Maps of the cells that the study shows and compares, on sentences of their own corpus.

    Empty until all of them have finished, and where their models or their corpus are not kept.
    """
    compared = outcomes if study.contrast is None else study.contrast.select(outcomes)
    shown = [
        [o for o in compared if o.finished and labels.items() <= o.labels.items()]
        for labels in study.mapped
    ]
    if not all(shown) or any(finished_model(root / cells[0].name) is None for cells in shown):
        return []
    corpus = corpora.get(shown[0][0].detail["corpus"])
    if corpus is None:
        return []
    pairs = _sentences(corpus)
    sources, targets = ([pair[side] for pair in pairs] for side in (0, 1))
    return [
        model_maps(
            ", ".join(map(str, labels.values())),
            load_run(root / cells[0].name),
            sources,
            targets,
            most_tokens=_MOST_TOKENS,
        )
        for labels, cells in zip(study.mapped, shown, strict=True)
    ]


def _sentences(corpus: Path) -> list[tuple[str, str]]:
    """Test sentences of medium length with their references."""
    files = (lines(corpus / f"test.{side}.txt") for side in ("source", "target"))
    medium = (
        (source, target)
        for source, target in zip(*files, strict=True)
        if source != DOCUMENT and _FEWEST_WORDS <= len(source.split()) <= _MOST_WORDS
    )
    return list(islice(medium, _TEXTS))

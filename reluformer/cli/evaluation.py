"""The command `evaluate`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from reluformer.cli.options import Json
from reluformer.console import print_table, progress
from reluformer.errors import UserError

if TYPE_CHECKING:
    from reluformer.evaluation.aligned_files import Documents
    from reluformer.evaluation.results import Evaluation


def evaluate(
    reference: Annotated[
        Path, typer.Option(help="Text file of reference translations, one sentence per line.")
    ],
    hypothesis: Annotated[
        list[Path],
        typer.Option(help="Text file of a system's translations; repeat it to compare systems."),
    ],
    documents: Annotated[
        bool, typer.Option("--documents", help="Also score whole documents (d-BLEU).")
    ] = False,
    metric: Annotated[
        list[str] | None,
        typer.Option(help="BLEU, chrF2 or TER; repeatable. Default: all. TER is slow."),
    ] = None,
    tokenize: Annotated[str, typer.Option(help="sacreBLEU tokenizer for BLEU.")] = "13a",
    tokenised_reference: Annotated[
        Path | None,
        typer.Option(help="The reference, tokenised by another program, for tokenised BLEU."),
    ] = None,
    tokenised_hypothesis: Annotated[
        list[Path] | None,
        typer.Option(help="Each hypothesis, tokenised likewise, in the order of --hypothesis."),
    ] = None,
    samples: Annotated[
        int, typer.Option(help="Number of resamples of the paired bootstrap.")
    ] = 1000,
    json_: Json = False,
) -> None:
    """Score translations with sacreBLEU and compare systems.

    Every score is printed with its sacreBLEU signature. Several systems are compared with the
    first by paired bootstrap resampling.
    """
    from reluformer.evaluation.aligned_files import read_aligned
    from reluformer.evaluation.cached_metric import METRICS, Metric
    from reluformer.evaluation.scores import evaluate as score

    names = _names(hypothesis)
    references, systems = read_aligned(reference, hypothesis, documents=documents)
    tokenised = _read_tokenised(tokenised_reference, tokenised_hypothesis or [], names)
    with progress("steps") as bar:
        result = score(
            references,
            dict(zip(names, systems, strict=True)),
            documents=documents,
            metrics=cast("list[Metric]", metric) or METRICS,
            tokenize=tokenize,
            tokenised=tokenised,
            samples=samples,
            progress=bar.update,
        )
    if json_:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        _show(result)


def _names(paths: list[Path]) -> list[str]:
    """Names of the systems: file names, or whole paths if two file names are equal."""
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    if len(set(names)) < len(names):
        raise UserError(f"hypothesis must name different files, got {', '.join(names)}")
    return names


def _read_tokenised(
    reference: Path | None, hypotheses: list[Path], names: list[str]
) -> "tuple[Documents, dict[str, Documents]] | None":
    from reluformer.evaluation.aligned_files import read_aligned

    if reference is None and not hypotheses:
        return None
    if reference is None or len(hypotheses) != len(names):
        raise UserError(
            "tokenised BLEU needs --tokenised-reference and one --tokenised-hypothesis for each "
            f"--hypothesis, got {len(hypotheses)} for {len(names)}"
        )
    references, systems = read_aligned(reference, hypotheses)
    return references, dict(zip(names, systems, strict=True))


def _show(result: "Evaluation") -> None:
    """Print a table with one column for each system, the comparisons, and the signatures."""
    count = f"{result.sentences:,} sentences"
    if result.documents is not None:
        count += f" in {result.documents:,} documents"
    columns = ["score", *(system.name for system in result.systems)]
    rows = [
        [scores[0].label, *(f"{score.value:.2f}" for score in scores)]
        for scores in zip(*(system.scores for system in result.systems), strict=True)
    ]
    for lengths in zip(*(system.by_length for system in result.systems), strict=True):
        label = f"d-BLEU, {lengths[0].documents} documents of {lengths[0].words} words"
        rows.append([label, *(f"{score.value:.2f}" for score in lengths)])
    print_table(count, columns, rows)
    baseline = result.systems[0].name
    for comparison in result.comparisons:
        low, high = comparison.interval
        print(
            f"{comparison.label}: {comparison.system} - {baseline} = "
            f"{comparison.value - comparison.baseline_value:+.2f} "
            f"(95 % interval {low:+.2f} to {high:+.2f}), p = {comparison.p_value:.4f}"
        )
    for score in result.systems[0].scores:
        print(f"{score.label}: {score.signature}")

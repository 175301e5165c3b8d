"""The command line: prepare, recipes, train, translate, evaluate, bench, info.

Each command is a thin layer over a function of the package, imported when it runs. Exit statuses:
0 success, 2 a user's mistake, 3 training diverged, 130 interrupted.
"""

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from reluformer import __version__
from reluformer.console import guarded, progress, show_evaluation
from reluformer.errors import UserError

if TYPE_CHECKING:
    from reluformer.data.text import TextPair
    from reluformer.translation.translator import Translator

app = typer.Typer(
    help="Attention without softmax: train and use ReLUFormers for document translation.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Pair = tuple[Path, Path]


def main() -> None:
    """Run the command line."""
    app(prog_name="reluformer")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"reluformer {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


@app.command()
@guarded
def prepare(
    folder: Annotated[Path | None, typer.Argument(help="Folder to write; or give --out.")] = None,
    train: Annotated[
        Pair | None,
        typer.Option(metavar="SOURCE TARGET", help="Aligned text, one sentence a line."),
    ] = None,
    dev: Annotated[
        Pair | None, typer.Option(metavar="SOURCE TARGET", help="To watch training by.")
    ] = None,
    test: Annotated[
        Pair | None, typer.Option(metavar="SOURCE TARGET", help="To score in the end.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write.")] = None,
    corpus: Annotated[
        str | None, typer.Option(help="A known corpus instead of files; needs --root.")
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Folder with the known corpora.")] = None,
    shards: Annotated[
        int | None, typer.Option(help="Only so many training files of the corpus.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Join training documents that belong together.")
    ] = False,
    vocab_size: Annotated[
        int | None, typer.Option(help="Subwords to learn from the training text; default 16,000.")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json to use instead.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what was prepared from other files.")
    ] = False,
    json_: Json = False,
) -> None:
    """Turn aligned text files into a folder to train from."""
    from reluformer.data import prepare as data

    if (folder is None) == (out is None):
        raise UserError("prepare needs one folder to write, as its argument or as --out")
    splits = _splits({"train": train, "dev": dev, "test": test}, corpus, root, shards, merge)
    target = folder or out
    assert target is not None
    with progress("sentences") as shown:
        prepared = data.prepare(
            target,
            splits,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            overwrite=overwrite,
            progress=shown.update,
        )
    manifest = prepared.manifest
    if json_:
        print(json.dumps(manifest, indent=2))
        return
    print(f"{target}: vocabulary of {manifest['vocab_size']:,}")
    for name in prepared.splits:
        part = prepared.corpus(name)
        print(f"  {name}: {len(part):,} sentences in {len(part.documents) - 1:,} documents")


@app.command()
@guarded
def train(
    recipe: Annotated[
        str,
        typer.Argument(help="Name of a shipped recipe (see `reluformer recipes`), or a YAML file."),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the run; repeating the command resumes it.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C", help="Override a field of the recipe."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Report nothing.")] = False,
) -> None:
    """Train what a recipe describes, or resume it."""
    from reluformer.config.recipe import load_recipe
    from reluformer.train import train as run

    run(load_recipe(recipe, set_ or ()), out, quiet=quiet)


@app.command(name="recipes")
@guarded
def list_recipes(json_: Json = False) -> None:
    """List the shipped recipes."""
    from reluformer import recipes

    summaries = {name: recipes.summary(name) for name in recipes.names()}
    if json_:
        print(json.dumps(summaries, indent=2))
        return
    width = max(map(len, summaries))
    for name, summary in summaries.items():
        print(f"{name:{width}}  {summary}")


@app.command()
@guarded
def translate(
    model: Annotated[Path, typer.Option(help="Folder of a run, a finished model or a checkpoint.")],
    document: Annotated[
        bool, typer.Option("--document", help="Translate sentences in view of their document.")
    ] = False,
    input_: Annotated[
        Path | None, typer.Option("--input", help="Text file (plain, .xz, .gz); default stdin.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Text file; default standard output.")] = None,
    beam: Annotated[
        int | None, typer.Option(help="Width of the beam, default as in the recipe; 1 is greedy.")
    ] = None,
    length_penalty: Annotated[float | None, typer.Option(help="Above 0 favours length.")] = None,
    sample: Annotated[bool, typer.Option("--sample", help="Sample instead of searching.")] = False,
    temperature: Annotated[float | None, typer.Option(help="Of sampling; default 1.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample among so many tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample among tokens of this joint share; default 1.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of sampling; default 0.")] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens translated in one go; default as trained.")
    ] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Source tokens of a batch.")] = None,
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="Default: a GPU if there is one.")
    ] = None,
    precision: Annotated[
        Literal["float32", "bfloat16"] | None, typer.Option(help="Default: bfloat16 on a GPU.")
    ] = None,
    maps: Annotated[
        Path | None, typer.Option(help="Also write attention maps to this JSON file.")
    ] = None,
) -> None:
    """Translate stdin to stdout, one line for each line."""
    from reluformer.files import write_json
    from reluformer.translation.line_reader import LineReader
    from reluformer.translation.stream import open_source, open_target, translate_stream
    from reluformer.translation.translator import Translator
    from reluformer.translation.workers import join_workers

    search: dict[str, Any] = {"beam": beam, "length_penalty": length_penalty}
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    if sample:
        search |= {"method": "sample", **sampling}
    for name, value in sampling.items():
        if value is not None and not sample:
            raise UserError(f"{name} is {value}, but without --sample nothing is sampled")
    with ExitStack() as stack:
        peers = stack.enter_context(join_workers(device))
        if maps is not None and peers.world > 1:
            raise UserError(f"maps is {maps}, but maps need a single process, not {peers.world}")
        translator = Translator.load(
            model,
            device=device,
            precision=precision,
            max_length=max_length,
            batch_tokens=batch_tokens,
            **{name: value for name, value in search.items() if value is not None},
        )
        recorded = stack.enter_context(translator.recording()) if maps is not None else []
        # Only the first process reads and writes.
        first = peers.rank == 0
        name = "standard input" if input_ is None else str(input_)
        reader = LineReader(stack.enter_context(open_source(input_ if first else None)), name)
        out = stack.enter_context(open_target(output if first else None))
        if first:
            stack.enter_context(_counting(translator))
        translate_stream(translator, reader, out, document=document, workers=peers)
    if maps is not None:
        write_json(maps, [each.to_dict() for each in recorded])


@app.command()
@guarded
def evaluate(
    reference: Annotated[Path, typer.Option(help="Right translations, one sentence a line.")],
    hypothesis: Annotated[
        list[Path], typer.Option(help="A system's translations; several are compared.")
    ],
    documents: Annotated[
        bool, typer.Option("--documents", help="Also score whole documents (d-BLEU).")
    ] = False,
    metric: Annotated[
        list[str] | None, typer.Option(help="BLEU, chrF2, TER; default all. TER is slow.")
    ] = None,
    tokenize: Annotated[str, typer.Option(help="sacreBLEU's tokenizer for BLEU.")] = "13a",
    tokenised_reference: Annotated[
        Path | None, typer.Option(help="The reference as tokenised elsewhere.")
    ] = None,
    tokenised_hypothesis: Annotated[
        list[Path] | None, typer.Option(help="The same for each hypothesis, in order.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Of the paired bootstrap.")] = 1000,
    json_: Json = False,
) -> None:
    """Score translations with sacreBLEU, and compare systems."""
    from reluformer.evaluation import scores as scoring
    from reluformer.evaluation.fast_metrics import METRICS, Metric

    names = _names(hypothesis)
    wanted, found = scoring.read_aligned(reference, hypothesis, documents=documents)
    tokenised = None
    if tokenised_reference is not None or tokenised_hypothesis:
        given = tokenised_hypothesis or []
        if tokenised_reference is None or len(given) != len(hypothesis):
            raise UserError(
                "tokenised BLEU needs --tokenised-reference and one --tokenised-hypothesis for "
                f"each --hypothesis, got {len(given)} for {len(hypothesis)}"
            )
        right, texts = scoring.read_aligned(tokenised_reference, given)
        tokenised = right, dict(zip(names, texts, strict=True))
    with progress("parts") as shown:
        result = scoring.evaluate(
            wanted,
            dict(zip(names, found, strict=True)),
            documents=documents,
            metrics=cast("list[Metric]", metric) or METRICS,
            tokenize=tokenize,
            tokenised=tokenised,
            samples=samples,
            progress=shown.update,
        )
    if json_:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        show_evaluation(result)


@app.command()
@guarded
def bench(
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny cases that take seconds, to see that it works.")
    ] = False,
    seconds: Annotated[float, typer.Option(help="Time for everything, roughly.")] = 480.0,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Cases whose name contains or matches this."),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="bfloat16, float16 or float32; default what suits the device."),
    ] = None,
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="Default: a GPU if there is one.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Of a CPU; default all.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write, as the run goes.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Picture to write: .svg, .png or .pdf.")] = None,
    from_: Annotated[
        Path | None, typer.Option("--from", help="Show this JSON file instead of measuring.")
    ] = None,
    json_: Json = False,
) -> None:
    """Time every implementation of attention against its peers, once it agrees with float64."""
    from reluformer.bench.measure import run
    from reluformer.bench.plot import check_plot
    from reluformer.bench.plot import plot as draw
    from reluformer.bench.report import Report, table
    from reluformer.files import write_json

    if plot is not None:
        check_plot(plot)
    if from_ is not None:
        if out or only or dtype or device or threads or quick:
            raise UserError(
                f"from is {from_}, so nothing is measured and only --plot fits beside it"
            )
        report = Report.load(from_)
    else:
        with progress("passes") as shown:
            report = run(
                device=device,
                dtypes=tuple(dtype or ()),
                only=only or (),
                quick=quick,
                threads=threads,
                seconds=seconds,
                command=shlex.join(["reluformer", *sys.argv[1:]]),
                progress=shown.update,
                save=lambda found: None if out is None else write_json(out, found.to_dict()),
            )
    print(json.dumps(report.to_dict(), indent=2) if json_ else table(report))
    if plot is not None:
        draw(report, plot)


@app.command()
@guarded
def info(json_: Json = False) -> None:
    """Print versions, devices and implementations."""
    from reluformer.info import info as gather

    found = gather()
    if json_:
        print(json.dumps(found, indent=2))
        return
    for topic, value in found.items():
        if isinstance(value, dict):
            print(f"{topic}:")
            for name, detail in value.items():
                print(f"  {name}: {_plain(detail)}")
        else:
            print(f"{topic}: {_plain(value)}")


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name} {detail}" for name, detail in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "not installed" if value is None else str(value)


def _names(paths: list[Path]) -> list[str]:
    """Names of files, in full where the last part is not enough to tell them apart."""
    short = [path.name for path in paths]
    names = short if len(set(short)) == len(short) else [str(path) for path in paths]
    if len(set(names)) < len(names):
        raise UserError(f"hypothesis must name different files, got {', '.join(names)}")
    return names


def _splits(
    given: dict[str, Pair | None],
    corpus: str | None,
    root: Path | None,
    shards: int | None,
    merge: bool,
) -> "dict[str, list[TextPair]]":
    from reluformer.data.corpora import CORPORA, corpus_files
    from reluformer.data.text import TextPair

    files = {name: [TextPair(*pair)] for name, pair in given.items() if pair is not None}
    if corpus is None:
        if "train" not in files:
            known = ", ".join(CORPORA)
            raise UserError(f"prepare needs --train SOURCE TARGET, or --corpus, one of {known}")
        return files
    if files:
        raise UserError(f"corpus is {corpus!r}, so there can be no --{next(iter(files))} beside it")
    if root is None:
        raise UserError(f"corpus is {corpus!r}, but --root, the folder that holds it, is missing")
    return corpus_files(corpus, root, shards=shards, merge=merge)


@contextmanager
def _counting(translator: "Translator") -> Iterator[None]:
    """Show how many texts are translated, unless the translations themselves can be watched."""
    if sys.stdout.isatty():
        yield
        return
    done = 0
    with progress("texts") as shown:

        def count(texts: int) -> None:
            nonlocal done
            done += texts
            shown.update(done, None, "translating")

        translator.on_batch = count
        yield

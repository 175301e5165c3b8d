"""The command `translate`."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from reluformer.cli.options import Device
from reluformer.console import progress
from reluformer.errors import UserError

if TYPE_CHECKING:
    from reluformer.translation.translator import Translator
    from reluformer.translation.workers import Workers


def translate(
    model: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a run, a finished model or a checkpoint; default: the shipped model."
        ),
    ] = None,
    document: Annotated[
        bool,
        typer.Option("--document", help="Translate the sentences of a document together."),
    ] = False,
    input_: Annotated[
        Path | None,
        typer.Option("--input", help="Text file (plain, .xz or .gz); default: standard input."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Text file to write; default: standard output.")
    ] = None,
    format_: Annotated[
        Literal["lines", "text", "markdown", "html", "srt"] | None,
        typer.Option(
            "--format",
            help="Format of the input. In `lines`, every line is a sentence. In the other formats "
            "sentences are found in running text, are translated together, and markup is kept. "
            "Default: by the ending of --input (.md, .html, .srt), otherwise lines.",
        ),
    ] = None,
    beam: Annotated[
        int | None, typer.Option(help="Beam size; 1 is greedy search. Default: as in the recipe.")
    ] = None,
    length_penalty: Annotated[
        float | None,
        typer.Option(
            help="Exponent of the length that log-probabilities are divided by; higher values "
            "favour longer translations. Default: as in the recipe."
        ),
    ] = None,
    sample: Annotated[
        bool,
        typer.Option("--sample", help="Sample translations instead of searching for the best."),
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(help="Temperature of sampling; default 1.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the K most likely tokens.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Sample from the smallest set of tokens whose probabilities sum to P; default 1."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed of sampling; default 0.")] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Longest source text in tokens; longer ones are split. "
            "Default: as in the recipe, otherwise as trained."
        ),
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Source tokens per batch, padding included.")
    ] = None,
    device: Device = None,
    precision: Annotated[
        Literal["float32", "bfloat16", "int8"] | None,
        typer.Option(
            help="Precision of the weights; default: bfloat16 on a GPU, as stored on a CPU."
        ),
    ] = None,
    decoder: Annotated[
        Literal["auto", "native", "torch"],
        typer.Option(help="Native (C++) or torch; auto is native on a CPU where it can be used."),
    ] = "auto",
    maps: Annotated[
        Path | None, typer.Option(help="JSON file to write all attention maps to.")
    ] = None,
) -> None:
    """Translate sentences, or a document with its structure.

    Every line of the input is a sentence and gives one line of output, unless the format is text,
    markdown, html or srt.

    Reads standard input and writes standard output unless --input and --output are given. With
    --document, `<d>` lines and blank lines separate documents.
    """
    from reluformer.files import check_outputs, write_json
    from reluformer.translation.translator import Translator
    from reluformer.translation.workers import join_workers

    check_outputs([output, maps], [input_])
    search: dict[str, Any] = {
        "beam": beam,
        "length_penalty": length_penalty,
        "max_length": max_length,
    }
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    if sample:
        search |= {"method": "sample", **sampling}
    for name, value in sampling.items():
        if value is not None and not sample:
            raise UserError(f"{name} is {value}, which needs --sample")
    form = _choose_format(input_, format_)
    with ExitStack() as stack:
        workers = stack.enter_context(join_workers(device))
        single = {"maps": maps, "format": None if form == "lines" else form}
        for option, setting in single.items():
            if setting is not None and workers.world > 1:
                raise UserError(
                    f"{option} is {setting}, which needs a single process, got {workers.world}"
                )
        translator = Translator.load(
            model,
            device=device,
            precision=precision,
            decoder=decoder,
            batch_tokens=batch_tokens,
            **{name: value for name, value in search.items() if value is not None},
        )
        recorded = stack.enter_context(translator.recording()) if maps is not None else []
        if workers.rank == 0:
            stack.enter_context(_progress(translator))
        if form == "lines":
            _translate_lines(translator, input_, output, document, workers)
        else:
            # The splitter of sentences is not installed everywhere.
            from reluformer.documents.files import translate_document_file

            translate_document_file(translator, input_, output, form)
    if maps is not None:
        write_json(maps, [text_maps.to_dict() for text_maps in recorded])


def _choose_format(source: Path | None, named: str | None) -> str:
    """The format of the input: the named one, otherwise that of the ending of the file's name."""
    from reluformer.documents.formats import check_uncompressed, format_by_name

    if named is None:
        by_ending = None if source is None else format_by_name(source)
        # Files of sentences are often called .txt, so that running text must be asked for.
        return "lines" if by_ending in (None, "text") else by_ending
    if source is not None and named != "lines":
        check_uncompressed(source)
    return named


def _translate_lines(
    translator: "Translator",
    source: Path | None,
    target: Path | None,
    document: bool,
    workers: "Workers",
) -> None:
    """Translate line by line; only rank 0 reads and writes."""
    from reluformer.translation.line_reader import LineReader
    from reluformer.translation.stream import open_source, open_target, translate_stream

    is_first = workers.rank == 0
    name = "standard input" if source is None else str(source)
    with (
        open_source(source if is_first else None) as file,
        open_target(target if is_first else None) as out,
    ):
        reader = LineReader(file, name)
        translate_stream(translator, reader, out, document=document, workers=workers)


@contextmanager
def _progress(translator: "Translator") -> Iterator[None]:
    """Show the number of translated texts, unless translations appear on the terminal."""
    if sys.stdout.isatty():
        yield
        return
    done = 0
    with progress("texts") as bar:

        def count(texts: int) -> None:
            nonlocal done
            done += texts
            bar.update(done, None, "translating")

        translator.on_batch = count
        yield

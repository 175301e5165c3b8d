"""Training tour (`make tour`): train a ReLUFormer and a softmax baseline, translate and score.

Both models are trained at the same time, on one core each, with `reluformer train`. Then they
translate held-out documents. A second call uses the finished runs.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn

from reluformer import KeyValueMemory, __version__, relu_attention
from reluformer.config.recipe import load_recipe
from reluformer.console import guarded, print_table
from reluformer.data.synthetic import sample
from reluformer.errors import UserError
from reluformer.evaluation.results import Evaluation
from reluformer.evaluation.scores import evaluate
from reluformer.train.run_dir import check_recipe, is_finished
from reluformer.translation.translator import Translator

RECIPE = "tiny"
MODELS = {"ReLU": "relu", "softmax": "softmax"}
"""Attention of each model, by its name in the output."""

_TEST_SEED, _TEST_DOCUMENTS = 2302, 50
_POLL = 0.5
_PLAIN_EVERY = 30.0

Documents = list[list[str]]


def tour(
    folder: Path, overrides: Sequence[str] = (), documents: int = _TEST_DOCUMENTS
) -> Evaluation:
    """Train both models, translate and score held-out documents.

    Args:
        folder: Folder of the two runs.
        overrides: Assignments such as `"train.steps=10"` to the recipe `tiny`.
        documents: Number of held-out documents.
    """
    print(f"reluformer {__version__}: attention without softmax\n")
    _show_memory()
    print("\n2. Two models, one with ReLU and one with softmax, learn to translate stories about")
    print("   dates, times and prices into German. This takes one to three minutes on two cores.")
    _train(folder, overrides)
    # Test documents are as long as training documents.
    generated = load_recipe(RECIPE, overrides).data.generated
    assert generated is not None
    most = generated.lengths[1]
    pairs = list(sample.documents(_TEST_SEED, documents, (min(3, most), most), split="test"))
    sources = [[english for english, _ in document] for document in pairs]
    reference = [[german for _, german in document] for document in pairs]
    # Models of this size are fastest on one core.
    torch.set_num_threads(1)
    translations = {name: _translate(folder / kind, sources) for name, kind in MODELS.items()}
    print("\n3. The ReLU model translates a held-out document.")
    _show_document(sources[0], translations["ReLU"][0], reference[0])
    result = evaluate(reference, translations, documents=True)
    print(f"\n4. Scores on {len(sources)} held-out documents.")
    _show_scores(result, translations, reference)
    return result


def _show_memory() -> None:
    """Print the common form of attention and feed-forward layers, and check it."""
    torch.manual_seed(0)
    tokens, width, slots = 5, 64, 256
    memory = KeyValueMemory(width, slots, "relu")
    x = torch.randn(tokens, width)
    with torch.no_grad():
        feed_forward = memory(x)
        q, k, v = (t.view(1, 1, -1, width) for t in (x, memory.keys, memory.values))
        attention = relu_attention(q, k, v, scale=1.0, length_exponent=0.0)[0, 0]
    assert isinstance(feed_forward, torch.Tensor)
    difference = float((attention - feed_forward).abs().max())
    print("1. One idea: a memory is weights(q K^T) V.")
    print("   attention      keys and values are other tokens     relu_attention(q, k, v)")
    print("   feed-forward   keys and values are learned slots    KeyValueMemory(width, slots)(x)")
    print(f"   Attention to the {slots} slots of a feed-forward layer equals that layer (largest")
    print(f"   difference {difference:.1g}). ReLUFormer has ReLU in both and softmax in neither.")


def _train(folder: Path, overrides: Sequence[str]) -> None:
    """Train the unfinished models, at the same time."""
    settings = {kind: [*overrides, f"model.attention.kind={kind}"] for kind in MODELS.values()}
    for kind in MODELS.values():
        check_recipe(folder / kind, load_recipe(RECIPE, settings[kind]))
    steps = load_recipe(RECIPE, overrides).train.steps
    running = {
        name: _start(folder / kind, settings[kind])
        for name, kind in MODELS.items()
        if not is_finished(folder / kind)
    }
    if not running:
        print(f"   Both are trained already; remove {folder} to train them again.")
        return
    start = time.monotonic()
    try:
        with _watching(list(running), steps) as show:
            status = _status(running.values())
            while None in status and not any(status):
                time.sleep(_POLL)
                status = _status(running.values())
                show({name: _progress(folder / MODELS[name]) for name in running})
    finally:
        for process in running.values():
            process.terminate()
            process.wait()
    for name, failed in zip(running, status, strict=True):
        if failed:
            log = (folder / f"{MODELS[name]}.log").read_text(encoding="utf-8").strip()
            raise UserError(f"training {name} failed: {log.splitlines()[-1] if log else '?'}")
    print(f"   Trained {steps} steps each in {time.monotonic() - start:.0f} s.")


def _status(running: "Iterable[subprocess.Popen[bytes]]") -> list[int | None]:
    """Exit status of each process; None while it runs."""
    return [process.poll() for process in running]


def _start(run: Path, settings: Sequence[str]) -> "subprocess.Popen[bytes]":
    options = [part for setting in (*settings, "train.threads=1") for part in ("--set", setting)]
    command = ["reluformer", "train", RECIPE, "--out", str(run), *options]
    run.parent.mkdir(parents=True, exist_ok=True)
    with (run.parent / f"{run.name}.log").open("wb") as log:
        return subprocess.Popen([sys.executable, "-m", *command], stdout=log, stderr=log)


def _progress(run: Path) -> tuple[int, float]:
    """Last logged step of a run, and its loss per token."""
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        record: dict[str, Any] = json.loads(lines[-1])
    except (OSError, ValueError, IndexError):
        return 0, float("nan")
    return int(record["step"]), float(record.get("nll", float("nan")))


@contextmanager
def _watching(names: list[str], steps: int) -> Iterator[Any]:
    """Yield a function that shows (step, loss) by name: bars on a terminal, lines elsewhere."""
    if not sys.stdout.isatty():
        last_line = time.monotonic()

        def write(states: dict[str, tuple[int, float]]) -> None:
            nonlocal last_line
            if time.monotonic() - last_line >= _PLAIN_EVERY:
                last_line = time.monotonic()
                texts = [f"{name} {_state(*state, steps)}" for name, state in states.items()]
                print(f"   {'; '.join(texts)}", flush=True)

        yield write
        return
    columns = (
        TextColumn("   {task.description:8}"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
    )
    with Progress(*columns, transient=True) as bars:
        tasks = {name: bars.add_task(name, total=steps, state="starts") for name in names}

        def draw(states: dict[str, tuple[int, float]]) -> None:
            for name, (step, nll) in states.items():
                bars.update(tasks[name], completed=step, state=_state(step, nll, steps))

        yield draw


def _state(step: int, nll: float, steps: int) -> str:
    return f"step {step} of {steps}, loss {nll:.2f}" if step else "starts"


def _translate(run: Path, sources: Documents) -> Documents:
    """Translate all documents in batches."""
    translator = Translator.load(run, device="cpu")
    lines = translator.document([line for document in sources for line in (*document, "")])
    rest = iter(lines)
    return [[next(rest) for _ in (*document, "")][:-1] for document in sources]


def _show_document(source: list[str], translation: list[str], reference: list[str]) -> None:
    for english, german, right in zip(source, translation, reference, strict=True):
        print(f"\n   English     {english}\n   ReLUFormer  {german}")
        print("   reference   the same" if german == right else f"   reference   {right}")


def _show_scores(
    result: Evaluation, translations: dict[str, Documents], reference: Documents
) -> None:
    rows = []
    signatures: dict[str, list[str]] = {}
    for scores in zip(*(system.scores for system in result.systems), strict=True):
        first = scores[0]
        if first.label in ("BLEU", "d-BLEU", "chrF2"):
            rows.append([first.label, *(f"{score.value:.1f}" for score in scores)])
            signatures.setdefault(first.signature, []).append(first.label)
    exact = [_exact(texts, reference) for texts in translations.values()]
    rows.append(["sentences exactly right", *(f"{share:.0%}" for share in exact)])
    print_table("", ["score", *translations], rows)
    for signature, labels in signatures.items():
        print(f"   {', '.join(labels)}: {signature}")


def _exact(translations: Documents, reference: Documents) -> float:
    """Share of the sentences that equal the reference."""
    texts, right = (list(chain.from_iterable(side)) for side in (translations, reference))
    return sum(a == b for a, b in zip(texts, right, strict=True)) / len(right)


@guarded
def main() -> None:
    """Run the tour."""
    parser = argparse.ArgumentParser(prog="python -m reluformer.tour", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/tour"), help="folder of the runs")
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=C", help="override a field"
    )
    arguments = parser.parse_args()
    tour(arguments.out, arguments.set)


if __name__ == "__main__":
    main()

"""Demonstration (`make demo`): translate a document with the shipped model, score and measure."""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from reluformer import __version__
from reluformer.console import guarded
from reluformer.documents.translation import Document, TranslatedSentence
from reluformer.evaluation.cached_metric import Metric
from reluformer.evaluation.scores import evaluate
from reluformer.reading import SETTINGS_LIMIT, read_text
from reluformer.shipped import DEMO_DOCUMENT, TEST_REFERENCE, TEST_SOURCE, shipped_model
from reluformer.translation.attention_maps import AttentionMaps, compute_maps
from reluformer.translation.engine import NativeEngine
from reluformer.translation.translator import Translator

_SHOWN: tuple[Metric, ...] = ("BLEU", "chrF2")


def demo(folder: Path) -> None:
    """Translate the demo document, score the test document, and print zeros and speed.

    Args:
        folder: Folder of the model with the documents of `reluformer.shipped`.
    """
    start = time.perf_counter()
    translator = Translator.load(folder, device="cpu")
    loaded = time.perf_counter() - start
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    print(f"reluformer {__version__}: attention without softmax\n")
    print("1. The shipped model translates an English document into German.")
    print(f"   It has {weights / 1e6:.1f} MB of weights and was loaded in {loaded:.2f} s.")
    document = Document(read_text(folder / DEMO_DOCUMENT, SETTINGS_LIMIT))
    start = time.perf_counter()
    sentences = list(document.translate(translator))
    seconds = time.perf_counter() - start
    for sentence in sentences:
        print(f"\n   English  {sentence.source}\n   German   {sentence.target}")
    # Before anything else is translated, because the engine counts skipped slots of all texts.
    print("\n2. Zeros and speed on the first document.")
    _show_zeros(translator, sentences)
    _show_speed(translator, sentences, seconds)
    print("\n3. Scores on a second document, which was translated by hand.")
    _show_scores(translator, folder)
    print("\n4. To translate your own text, and to see what each word reads:")
    print(f'   echo "We need a common answer." | {_program()} translate')
    print(f"   {_program()} serve      then open http://127.0.0.1:5000 in a browser")


def _program() -> str:
    """The command line, with its folder unless the environment is active."""
    program = Path(sys.executable).with_name("reluformer")
    if shutil.which("reluformer") or not program.exists():
        return "reluformer"
    return os.path.relpath(program)


def _show_scores(translator: Translator, folder: Path) -> None:
    source, reference = (
        read_text(folder / name, SETTINGS_LIMIT).splitlines()
        for name in (TEST_SOURCE, TEST_REFERENCE)
    )
    result = evaluate([reference], {"shipped": [translator.document(source)]}, metrics=_SHOWN)
    scores = [score for score in result.systems[0].scores if score.label in _SHOWN]
    for score in scores:
        print(f"   {score.label:6} {score.value:5.1f}   {score.signature}")


def _show_zeros(translator: Translator, sentences: Sequence[TranslatedSentence]) -> None:
    """Print the share of attention weights that are exactly zero, in the whole document."""
    encode, longest = translator.tokenizer.encode_document, translator.trained_length - 1
    source = encode([sentence.source for sentence in sentences])[:longest]
    target = encode([sentence.target for sentence in sentences])[:longest]
    with torch.inference_mode():
        maps = compute_maps(translator.model, translator.tokenizer, source, target)
    shares = {name: _zeros(maps, name) for name in ("encoder", "decoder", "cross")}
    parts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    print(f"   Attention weights that are exactly zero: {parts}; with softmax, none.")


def _zeros(maps: AttentionMaps, site: str) -> float:
    """Share of exact zeros among the weights of visible keys."""
    weights = getattr(maps, site)  # [layers, H, Tq, Tk]
    visible = torch.ones(weights.shape[-2:], dtype=torch.bool)
    visible = visible.tril() if site == "decoder" else visible
    pairs = int(visible.sum()) * weights.shape[0] * weights.shape[1]
    zeros = int(((weights == 0) & visible).sum())
    return float(zeros / pairs)


def _show_speed(
    translator: Translator, sentences: Sequence[TranslatedSentence], seconds: float
) -> None:
    tokens = sum(len(translator.tokenizer.encode(sentence.target)) for sentence in sentences)
    search = f"beam {translator.config.beam}, {torch.get_num_threads()} thread(s)"
    print(f"   {tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} per second ({search}).")
    if isinstance(translator.engine, NativeEngine):
        skipped = translator.engine.native.skipped
        slots, values = (
            1 - read / total
            for read, total in (
                (skipped.slots_read, skipped.slots),
                (skipped.values_read, skipped.values),
            )
        )
        print(
            f"   The decoder skipped {slots:.0%} of the feed-forward slots and {values:.0%} of the"
        )
        print("   attention's values, because their weight is zero.")


@guarded
def main() -> None:
    """Run the demonstration."""
    parser = argparse.ArgumentParser(prog="python -m reluformer.demo", description=__doc__)
    parser.add_argument("--model", type=Path, help="folder with a model and the documents")
    folder = parser.parse_args().model
    demo(shipped_model() if folder is None else folder)


if __name__ == "__main__":
    main()

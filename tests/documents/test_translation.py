"""Whole documents through a model: context, order, files, alignment."""

import gzip
import threading
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from reluformer import Translator, shipped
from reluformer.cli import app
from reluformer.documents.sentences import split_sentences
from reluformer.documents.translation import Document, Pace
from reluformer.errors import UserError
from reluformer.translation.alignment import align_words, find_words, proportional_alignment
from reluformer.translation.attention_maps import compute_cross_maps, compute_maps
from reluformer.translation.cancellation import Cancelled, cancellable
from tests.serve.tiny import EchoTranslator, tiny_model

TEXT = (
    "Dr. Smith paid 3.5 euros. *Is it* true? Yes!\n\nA second paragraph (e.g. this one). It ends."
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def test_sentences_concatenate_to_the_text() -> None:
    assert split_sentences("Dr. Smith left. He ran!") == ["Dr. Smith left. ", "He ran!"]
    assert split_sentences("1. First. 2. Second.") == ["1. First. ", "2. Second."]
    for text in ("", " ", "a.\u2028b", "M.\u00a0K. \u3000x", "I. Heading", "7."):
        assert "".join(split_sentences(text)) == text


def test_a_document_is_translated_in_order_with_its_structure(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "reluformer.documents.translation.align_words",
        lambda translator, pairs: [list(range(len(find_words(target)))) for _, target in pairs],
    )
    translator = EchoTranslator.load(folder)
    document = Document(TEXT, "markdown")
    done = list(document.translate(translator))
    assert [sentence.number for sentence in done] == [0, 1, 2, 3, 4]
    assert done[1].source == "Is it true?"
    assert document.result() == TEXT.upper()
    assert [len(group) for group in translator.groups] == [5]


def test_a_pace_gives_small_groups_first(folder: Path) -> None:
    translator = EchoTranslator.load(folder)
    document = Document("One is here. " * 12, "text")
    done = list(document.translate(translator, Pace(first=1, growth=4)))
    assert [sentence.number for sentence in done] == list(range(12))
    sizes = [len(group) for group in translator.groups]
    # Later groups have their context before them.
    assert sizes[0] == 1 and sizes[1] > 1 and max(sizes) < 12
    lengths = [len(translator.tokenizer.encode_document(group)) for group in translator.groups]
    assert max(lengths) <= translator.max_length
    assert document.result() == "ONE IS HERE. " * 12


def test_warnings_count_the_sentences_of_the_document(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    document = Document("One is here. " * 256 + "word " * 200)
    with caplog.at_level("WARNING"):
        list(document.translate(Translator.load(folder)))
    assert "in pieces; the first is sentence 257" in caplog.text


def test_several_documents_share_batches_and_no_context(folder: Path) -> None:
    translator = Translator.load(folder)
    texts = ["The cat sat. It left.", "", "The dog ate."]
    together, alone = ([Document(text) for text in texts] for _ in range(2))
    Document.translate_all(together, translator)
    for document in alone:
        list(document.translate(translator))
    assert [d.result() for d in together] == [d.result() for d in alone]


def test_a_result_needs_all_sentences(folder: Path) -> None:
    document = Document(TEXT, "markdown")
    with pytest.raises(ValueError, match="0 of 5"):
        document.result()


def test_alignment_follows_the_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    translator = Translator.load(folder)

    def maps(model, tokenizer, pairs):
        # Tokens read the source tokens in reverse order.
        for source, target in pairs:
            weights = torch.zeros(2, 2, len(target) + 1, len(source) + 1)
            for row in range(len(target)):
                weights[:, :, row, -2 - row * len(source) // len(target)] = 1
            yield weights

    monkeypatch.setattr("reluformer.translation.alignment.compute_cross_maps", maps)
    (aligned,) = align_words(translator, [("the red cat sat", "eine Katze, rot")])
    assert aligned[0] > aligned[-1] and aligned == sorted(aligned, reverse=True)


def test_alignment_of_a_real_model_and_of_odd_texts(folder: Path) -> None:
    translator = Translator.load(folder)
    pairs = [
        ("the cat", "die Katze"),
        ("x", ""),
        ("é 😀 ß", "😀😀 x"),
        ("a " * 90, "b " * 9),
        ("the dog and the cat", "der Hund"),
    ]
    together = align_words(translator, pairs)
    assert together == [align_words(translator, [pair])[0] for pair in pairs]
    for (source, target), alignment in zip(pairs, together, strict=True):
        assert len(alignment) == len(find_words(target))
        assert all(0 <= word < len(find_words(source)) for word in alignment)
    assert proportional_alignment("a b c d", "x y") == [1, 3]
    assert align_words(translator, []) == []


def test_cross_maps_of_a_batch_are_those_of_each_text(folder: Path) -> None:
    translator = Translator.load(folder)
    pairs = [([5, 6, 7, 8], [9]), ([5], [9, 8, 7]), ([5, 9], [])]
    batch = compute_cross_maps(translator.model, translator.tokenizer, pairs)
    for (source, target), found in zip(pairs, batch, strict=True):
        wanted = compute_maps(translator.model, translator.tokenizer, source, target).cross
        torch.testing.assert_close(found, wanted)


def test_a_cancelled_translation_stops(folder: Path) -> None:
    translator = Translator.load(folder)
    event = threading.Event()
    event.set()
    with cancellable(event), pytest.raises(Cancelled):
        translator("the cat")
    translator("the cat")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.md", "# Title\n\n`code`\n"),
        ("a.html", "<p>Hi <b>you</b></p>\n"),
        ("a.srt", "1\n0:0:1,0 --> 0:0:2,0\nHi\n"),
    ],
)
def test_files_are_translated_by_their_ending(
    folder: Path, tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    options = ["--model", folder, "--input", tmp_path / name, "--output", tmp_path / "out"]
    done = CliRunner().invoke(app, ["translate", *map(str, options)])
    assert done.exit_code == 0, done.output
    written = (tmp_path / "out").read_text(encoding="utf-8")
    assert written.startswith(text[:3].rstrip("T")) and written.endswith("\n") and written != text


@pytest.mark.parametrize("form", ["lines", "text", "srt"])
@pytest.mark.parametrize("name", ["a.vtt", "a.RTF", "a.md", "a.srt"])
def test_a_named_format_wins_over_the_ending(
    folder: Path, tmp_path: Path, form: str, name: str
) -> None:
    text = "1\n0:0:1,0 --> 0:0:2,0\nHi\n"
    written = []
    for file in (name, f"same.{form}"):
        (tmp_path / file).write_text(text, encoding="utf-8")
        options = ["--model", folder, "--format", form, "--input", tmp_path / file]
        done = CliRunner().invoke(app, ["translate", *map(str, options)])
        assert done.exit_code == 0, done.output
        written.append(done.stdout)
    assert written[0] == written[1]


def test_only_lines_may_be_compressed(folder: Path, tmp_path: Path) -> None:
    for name in ("a.srt.gz", "a.vtt.gz"):
        with gzip.open(tmp_path / name, "wt") as file:
            file.write("Hi\nyou\n")
        options = ["translate", "--model", folder, "--input", tmp_path / name, "--format"]
        done = CliRunner().invoke(app, [*map(str, options), "lines"])
        assert done.exit_code == 0 and done.stdout.count("\n") == 2, done.output
        done = CliRunner().invoke(app, [*map(str, options), "srt"])
        assert done.exit_code == 2 and "a document must not be compressed" in done.output


def test_running_text_must_be_asked_for(folder: Path) -> None:
    model = ["translate", "--model", str(folder)]
    done = CliRunner().invoke(app, [*model, "--format", "text"], input="One. Two.\n\nThree.")
    assert done.exit_code == 0 and done.stdout.count("\n") == 2
    done = CliRunner().invoke(app, [*model, "--format", "srt"], input=b"\xff\xfe")
    assert done.exit_code == 2 and "standard input is not UTF-8" in done.output


def test_without_a_shipped_model_one_sentence_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(shipped, "SHIPPED_FOLDER", tmp_path)
    with pytest.raises(UserError, match="no shipped model"):
        Translator.load()
    done = CliRunner().invoke(app, ["translate"], input="Hello")
    assert done.exit_code == 2 and "--model" in done.output
    monkeypatch.setattr(shipped, "SHIPPED_FOLDER", folder)
    assert Translator.load()("the cat")

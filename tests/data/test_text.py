"""Aligned text: any bytes give documents or a one-sentence error."""

import gzip
import io
import lzma
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reluformer.data import text
from reluformer.data.corpora import CORPORA, corpus_files
from reluformer.data.text import TextPair
from reluformer.errors import UserError

# Sentences hold anything but newline, NUL and surrogates, and are not blank, `<d>` or ended by \r.
SENTENCE = (
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\0"), min_size=1)
    .map(lambda line: line.strip("\r\ufeff"))
    .filter(lambda line: line.strip() not in ("", "<d>"))
)
FIXTURES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def pair(folder: Path, source: bytes, target: bytes, **options: object) -> TextPair:
    (folder / "a.en").write_bytes(source)
    (folder / "a.de").write_bytes(target)
    return TextPair(folder / "a.en", folder / "a.de", **options)  # type: ignore[arg-type]


@FIXTURES
@given(
    documents=st.lists(
        st.lists(st.tuples(SENTENCE, SENTENCE), min_size=1, max_size=3), min_size=1, max_size=4
    ),
    packer=st.sampled_from([("", bytes), (".xz", lzma.compress), (".gz", gzip.compress)]),
)
def test_documents_round_trip(tmp_path: Path, documents: list, packer: tuple) -> None:
    suffix, compress = packer
    plain = TextPair(tmp_path / "p.en", tmp_path / "p.de", documents=True)
    text.write_documents(plain.source, plain.target, documents, marked=True)
    packed = TextPair(*(Path(f"{path}{suffix}") for path in plain[:2]), documents=True)
    for before, after in zip(plain[:2], packed[:2], strict=True):
        after.write_bytes(compress(before.read_bytes()))
    assert list(text.read_documents(packed)) == documents


@FIXTURES
@given(source=st.binary(max_size=200), target=st.binary(max_size=200), same=st.booleans())
def test_random_bytes_give_pairs_or_a_user_error(
    tmp_path: Path, source: bytes, target: bytes, same: bool
) -> None:
    files = pair(tmp_path, source, source if same else target)
    try:
        sentences = list(text.read_sentences(files))
    except UserError as error:
        assert "a.en" in str(error) or "a.de" in str(error)
        assert "\n" not in str(error)
    else:
        lines = [line for line in source.decode().split("\n") if line.strip("\ufeff \r\n\t")]
        assert len(sentences) <= len(lines)


@FIXTURES
@given(data=st.binary(max_size=300), suffix=st.sampled_from([".xz", ".gz"]))
def test_broken_compression_is_a_user_error(tmp_path: Path, data: bytes, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(data)
    try:
        list(text.lines(path))
    except UserError as error:
        assert str(path) in str(error)
    whole = (lzma.compress if suffix == ".xz" else gzip.compress)(b"some text\n" * 50)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="cannot be decompressed"):
        list(text.lines(path))


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (b"a\nb\n", b"a\n", "a.de ends after line 1 but .*a.en goes on"),
        (b"a\n", b"a\nb", "a.en ends after line 1 but .*a.de goes on"),
        (b"a\n\nb\n", b"a\nx\nb\n", "line 2 is blank in .*a.en but a sentence in .*a.de"),
        (b"a\nx\nb\n", b"a\n  \nb\n", "line 2 is a sentence in .*a.en but blank in .*a.de"),
        (b"<d>\na\n", b"b\na\n", "line 1 is <d> in .*a.en but a sentence"),
        (b"\n", b"<d>\n", "line 1 is blank in .*a.en but <d> in .*a.de"),
        (b"a\nb\0c\n", b"a\nb\n", "a.en, line 2 has a NUL byte"),
        (b"a\nb\n", b"a\nab\xff\n", "a.de, line 2 is not UTF-8: byte 0xff at position 3"),
        ("a\n".encode("utf-16"), b"a\n", "a.en, line 1 has a NUL byte"),
    ],
)
def test_faults_are_named_by_file_and_line(
    tmp_path: Path, source: bytes, target: bytes, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        list(text.read_sentences(pair(tmp_path, source, target)))


def test_only_newlines_end_lines(tmp_path: Path) -> None:
    odd = "a\u2028b\x0bc\x0cd\x85e\x1cf\u2029g\rh"
    files = pair(tmp_path, f"{odd}\r\nx\r\n".encode(), f"{odd}\ny".encode())
    assert list(text.read_documents(files)) == [[(odd, odd)], [("x", "y")]]


def test_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    files = pair(tmp_path, "\ufeffa\n\ufeffb\n".encode(), b"a\nb\n")
    assert [sentence.source for sentence in text.read_sentences(files)] == ["a", "\ufeffb"]


def test_without_marks_every_line_is_a_document(tmp_path: Path) -> None:
    files = pair(tmp_path, b"a\nb\n", b"c\nd\n")
    assert list(text.read_documents(files)) == [[("a", "c")], [("b", "d")]]
    whole = files._replace(documents=True)
    assert list(text.read_documents(whole)) == [[("a", "c"), ("b", "d")]]


def test_marks_and_blank_lines_separate_documents(tmp_path: Path) -> None:
    content = b"<d>\na\nb\n\nc\n\n\n<d>\n<d>\nd\n"
    files = pair(tmp_path, content, content)
    expected = [["a", "b"], ["c"], ["d"]]
    assert [[s for s, _ in d] for d in text.read_documents(files)] == expected
    alone = files._replace(documents=False)
    assert [len(d) for d in text.read_documents(alone)] == [1, 1, 1, 1]


def test_equal_keys_join_consecutive_documents(tmp_path: Path) -> None:
    content = b"<d>\na\n<d>\nb\nc\n<d>\nd\n"
    keys = tmp_path / "keys.tsv"
    files = pair(tmp_path, content, content, documents=True, keys=keys)
    keys.write_text("debate1\tx\ndebate1\ty\ndebate2\tz\n")
    assert [[s for s, _ in d] for d in text.read_documents(files)] == [["a", "b", "c"], ["d"]]
    keys.write_text("debate1\ndebate1\n")
    with pytest.raises(UserError, match="keys.tsv has no line for the document .* line 6"):
        list(text.read_documents(files))
    keys.write_text("1\n2\n3\n4\n")
    with pytest.raises(UserError, match=r"keys.tsv has more lines than .*a.en has documents"):
        list(text.read_documents(files))
    late = pair(tmp_path, b"x\n<d>\ny\n", b"x\n<d>\ny\n", documents=True, keys=keys)
    with pytest.raises(UserError, match="line 1 comes before the first <d>"):
        list(text.read_documents(late))


def test_long_lines_are_read_and_endless_ones_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "x" * 100_000
    files = pair(tmp_path, line.encode(), line.encode())
    assert next(text.read_sentences(files)).source == line
    monkeypatch.setattr(text, "MAX_LINE_BYTES", 1000)
    with pytest.raises(UserError, match="standard input, line 2 is longer than 1000 bytes"):
        list(text.decode_lines(io.BytesIO(b"a\n" + line.encode()), "standard input"))


def test_reading_is_lazy(tmp_path: Path) -> None:
    files = pair(tmp_path, b"a\nb\0\n", b"a\nb\n", documents=False)
    sentences = text.read_sentences(files)
    assert next(sentences) == ("a", "a", 1)
    with pytest.raises(UserError, match="line 2"):
        next(sentences)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing.en cannot be read: No such file"):
        list(text.lines(tmp_path / "nothing.en"))
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        list(text.lines(tmp_path))


def test_known_corpora_resolve_below_any_folder(tmp_path: Path) -> None:
    for layout in CORPORA.values():
        for stem in (stem for stems in layout.splits.values() for stem in stems):
            for suffix in ("en.xz", "de.xz", "docs.tsv.xz"):
                path = tmp_path / f"{stem}.{suffix}"
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(lzma.compress(b"<d>\n"))
    files = corpus_files("europarl-doc", tmp_path, source="de", target="en", shards=2, merge=True)
    assert list(files) == ["train", "dev", "test", "dev.long", "test.long"]
    assert [p.source.name for p in files["train"]] == ["train.0.de.xz", "train.1.de.xz"]
    assert files["train"][0].keys is not None and files["dev"][0].keys is None
    assert corpus_files("europarl-sent", tmp_path)["dev"][0] == TextPair(
        tmp_path / "europarl-doc/dev.en.xz", tmp_path / "europarl-doc/dev.de.xz", documents=False
    )


def test_unknown_corpora_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="corpus must be one of europarl-doc, .*, got 'iwslt'"):
        corpus_files("iwslt", tmp_path)
    with pytest.raises(UserError, match="multi30k/train.en of corpus multi30k does not exist"):
        corpus_files("multi30k", tmp_path)
    with pytest.raises(UserError, match="shards must be from 1 to 4 for .*, got 5"):
        corpus_files("europarl-doc", tmp_path, shards=5)
    with pytest.raises(UserError, match="merge must be false for"):
        corpus_files("tatoeba", tmp_path, merge=True)

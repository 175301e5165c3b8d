"""Preparation: complete or absent, not repeated for equal inputs, never over foreign files."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reluformer.data import prepare as module
from reluformer.data import text
from reluformer.data.prepare import Prepared, prepare
from reluformer.data.synthetic import sample
from reluformer.data.text import TextPair
from reluformer.errors import UserError


def pairs(folder: Path, *splits: str) -> dict[str, list[TextPair]]:
    return {split: [TextPair(folder / f"{split}.en", folder / f"{split}.de")] for split in splits}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[TextPair]]:
    folder = sample.write(tmp_path_factory.mktemp("text"), train=200, dev=10, test=10, seed=0)
    return pairs(folder, "train", "dev", "test")


@pytest.fixture(scope="module")
def prepared(files: dict, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(tmp_path_factory.mktemp("prepared") / "p", files, vocab_size=600)


def test_a_prepared_folder_holds_the_text(files: dict, prepared: Prepared) -> None:
    opened = Prepared.open(prepared.folder)
    assert opened == prepared and opened.splits == ["train", "dev", "test"]
    tokenizer = opened.tokenizer()
    assert tokenizer.sha256 == opened.manifest["tokenizer"]
    for split in opened.splits:
        corpus = opened.corpus(split)
        documents = list(text.read_documents(files[split][0]))
        sizes = (corpus.documents[1:] - corpus.documents[:-1]).tolist()
        assert sizes == [len(document) for document in documents]
        sources = [source for document in documents for source, _ in document]
        assert [tokenizer.decode(corpus.source.sentence(i)) for i in range(len(corpus))] == sources
        described = opened.manifest["splits"][split]
        assert (described["sentences"], described["documents"]) == (len(corpus), len(documents))
        if split != "train":
            assert list(opened.documents(split)) == documents


def test_equal_inputs_are_not_prepared_again_and_others_are_refused(
    files: dict, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {p: p.stat().st_mtime_ns for p in prepared.folder.rglob("*")}
    with monkeypatch.context() as patch:
        patch.setattr(module, "_build", None)
        assert prepare(prepared.folder, files, vocab_size=600) == prepared
    with pytest.raises(UserError, match="was prepared from other files or options"):
        prepare(prepared.folder, files, vocab_size=601)
    with pytest.raises(UserError, match="was prepared from other files or options"):
        prepare(prepared.folder, {"train": files["train"]}, vocab_size=600)
    assert before == {p: p.stat().st_mtime_ns for p in prepared.folder.rglob("*")}


def test_overwriting_replaces_the_whole_folder(files: dict, tmp_path: Path) -> None:
    target = tmp_path / "p"
    first = prepare(target, files, vocab_size=300)
    second = prepare(target, {"train": files["dev"]}, vocab_size=400, overwrite=True)
    assert first.manifest["vocab_size"] == 300 and second == Prepared.open(target)
    assert second.splits == ["train"] and not (target / "dev").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_foreign_folders_are_not_changed(files: dict, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="exists and is not a prepared folder"):
            prepare(tmp_path, files, overwrite=overwrite)
    with pytest.raises(UserError, match="exists and is not a prepared folder"):
        prepare(tmp_path / "notes.txt", files, overwrite=True)
    other = tmp_path / "other"
    other.mkdir()
    (other / "manifest.json").write_text('{"format": "something else"}')
    with pytest.raises(UserError, match="is not a prepared folder"):
        prepare(other, files, overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert prepare(empty, files, vocab_size=300).splits == ["train", "dev", "test"]


def test_a_tokenizer_can_be_reused(files: dict, prepared: Prepared, tmp_path: Path) -> None:
    path = prepared.folder / "tokenizer.json"
    again = prepare(tmp_path / "p", {"train": files["dev"]}, tokenizer=path)
    assert again.manifest["tokenizer"] == prepared.manifest["tokenizer"]
    assert prepare(tmp_path / "p", {"train": files["dev"]}, tokenizer=path) == again
    with pytest.raises(UserError, match="vocab_size must not be given with tokenizer .*, got 300"):
        prepare(tmp_path / "q", files, tokenizer=path, vocab_size=300)


@pytest.mark.parametrize("moment", ["checking train", "learning the vocabulary", "encoding test"])
def test_interruption_leaves_nothing(
    files: dict, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK", 10)

    def stop(done: int, total: int | None, what: str) -> None:
        assert total is None or done <= total
        if what == moment:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "p", files, vocab_size=300, progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_failed_overwriting_keeps_the_old_folder(
    files: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = prepare(tmp_path / "p", files, vocab_size=300)
    monkeypatch.setattr(module, "write_json", lambda path, value: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(tmp_path / "p", files, vocab_size=301, overwrite=True)
    assert Prepared.open(tmp_path / "p") == old
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_killed_processes_leave_no_complete_folder(files: dict, tmp_path: Path) -> None:
    source, target = files["train"][0][:2]
    script = (
        "import os, sys, time\n"
        "from reluformer.data.prepare import prepare\n"
        "from reluformer.data.text import TextPair\n"
        "def wait(done, total, what):\n"
        "    if what.startswith('encoding'):\n"
        "        print('now', flush=True); time.sleep(60)\n"
        "prepare(sys.argv[1], {'train': [TextPair(*sys.argv[2:4])]}, vocab_size=300, progress=wait)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "p"), str(source), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"now\n"
        os.kill(process.pid, signal.SIGKILL)
    leftovers = sorted(tmp_path.iterdir())
    assert [path.suffix for path in leftovers] == [".lock", ".partial"]
    with pytest.raises(UserError, match="p does not exist; `reluformer prepare` creates it"):
        Prepared.open(tmp_path / "p")
    with pytest.raises(UserError, match="is not a complete reluformer prepared data"):
        Prepared.open(leftovers[1])
    prepare(tmp_path / "p", {"train": files["train"]}, vocab_size=300)
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_the_files_of_a_split_are_concatenated(files: dict, tmp_path: Path) -> None:
    both = {"train": [*files["train"], *files["dev"]], "dev": files["dev"]}
    joined = prepare(tmp_path / "p", both, vocab_size=300)
    documents = [d for part in both["train"] for d in text.read_documents(part)]
    corpus = joined.corpus("train")
    sizes = (corpus.documents[1:] - corpus.documents[:-1]).tolist()
    assert sizes == [len(document) for document in documents]


def test_the_vocabulary_is_learnt_from_a_sample(
    files: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SAMPLE_PAIRS", 20)
    hashes = {
        prepare(tmp_path / name, files, vocab_size=400).manifest["tokenizer"] for name in "ab"
    }
    assert len(hashes) == 1


@pytest.mark.parametrize(
    ("splits", "options", "message"),
    [
        ({}, {}, "splits must include train, got none"),
        ({"dev": []}, {}, "splits must include train, got dev"),
        ({"train": []}, {}, "split train has no files"),
        ({"train": [], "../x": []}, {}, "split train has no files"),
        ({"train": [TextPair(Path("no.en"), Path("no.de"))]}, {}, "no.en is not a file"),
        ({"train": [1], "../x": [1]}, {}, "split must consist of letters, .*, got '../x'"),
        ({"train": [1]}, {"vocab_size": 7}, "vocab_size must be from 260, .*, got 7"),
        ({"train": [1]}, {"tokenizer": "no.json"}, "no.json is not a file"),
    ],
)
def test_invalid_arguments_are_refused_before_any_file_is_written(
    tmp_path: Path, splits: dict, options: dict, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        prepare(tmp_path / "p", splits, **options)
    assert list(tmp_path.iterdir()) == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.one_of(
        st.binary(max_size=80),
        st.lists(
            st.sampled_from(
                ["<d>", "", "a b", "😀", "\u202eשלום", "\x07\x1b", "x" * 100_000, "\u2028"]
            ),
            max_size=8,
        ).map(lambda lines: "\n".join(lines).encode()),
    ),
    dev=st.booleans(),
)
def test_any_bytes_are_prepared_or_refused(tmp_path: Path, content: bytes, dev: bool) -> None:
    for name in ("train.en", "train.de"):
        (tmp_path / name).write_bytes(content)
    target = tmp_path / "p"
    splits = pairs(tmp_path, "train")
    if dev:
        splits["dev"] = splits["train"]
    start = time.perf_counter()
    try:
        made = prepare(target, splits, vocab_size=270, overwrite=True)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        documents = list(text.read_documents(splits["train"][0]))
        tokenizer, corpus = made.tokenizer(), made.corpus("train")
        decoded = [tokenizer.decode(corpus.target.sentence(i)) for i in range(len(corpus))]
        assert decoded == [target for document in documents for _, target in document]
        if dev:
            assert list(made.documents("dev")) == documents
        assert json.loads((target / "manifest.json").read_text())["format"] == module.FORMAT
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize("damage", ["manifest", "no splits", "tokenizer", "tokens", "text"])
def test_a_damaged_folder_is_named_and_prepared_again_on_request(
    files: dict, prepared: Prepared, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "p"
    shutil.copytree(prepared.folder, folder)
    if damage == "manifest":
        (folder / "manifest.json").write_text("{")
    elif damage == "no splits":
        (folder / "manifest.json").write_text('{"format": "reluformer prepared data 1"}')
    else:
        name = {"tokenizer": "tokenizer.json", "tokens": "dev/source.tokens"}
        (folder / name.get(damage, "dev.source.txt")).unlink()
    with pytest.raises(UserError, match="; overwrite the folder to prepare it again|was prepared"):
        prepare(folder, files, vocab_size=600)
    prepare(folder, files, vocab_size=600, overwrite=True).check()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p"]


def test_a_second_preparation_of_the_same_folder_is_refused(files: dict, tmp_path: Path) -> None:
    attempts: list[str] = []

    def prepare_again(done: int, total: int | None, doing: str) -> None:
        if not attempts:
            with pytest.raises(UserError) as caught:
                prepare(tmp_path / "p", files, vocab_size=300)
            attempts.append(str(caught.value))

    prepare(tmp_path / "p", files, vocab_size=300, progress=prepare_again).check()
    assert attempts == [f"{tmp_path / 'p'} is being prepared by another process"]


def test_a_link_to_an_empty_folder_stays_a_link(files: dict, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    prepare(tmp_path / "link", files, vocab_size=300)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "empty/manifest.json").is_file()


def test_a_loop_of_links_is_named(files: dict, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises((OSError, UserError), match="loop"):
        prepare(tmp_path / "loop", files, vocab_size=300)


def test_an_impossible_vocabulary_is_refused_at_once(files: dict, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="vocab_size must be from 260, .*, got 100000000000"):
        prepare(tmp_path / "p", files, vocab_size=100_000_000_000)

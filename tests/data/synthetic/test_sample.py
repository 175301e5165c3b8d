"""The generated task: deterministic, one reference per meaning, disjoint splits."""

from collections import defaultdict
from hashlib import sha256
from itertools import islice
from pathlib import Path

import pytest

from reluformer.data import text
from reluformer.data.synthetic import sample
from reluformer.data.synthetic.sentences import BUILDINGS, PEOPLE, PROFESSIONS, THINGS, VEHICLES
from reluformer.errors import UserError


def test_same_seed_same_text_and_prefix() -> None:
    assert list(sample.sentences(5, 300)) == list(sample.sentences(5, 300))
    assert list(sample.documents(5, 30)) == list(islice(sample.documents(5, 10**9), 30))
    assert list(sample.sentences(5, 300)) != list(sample.sentences(6, 300))


def test_the_text_equals_a_recorded_one() -> None:
    # Trained models and recorded scores depend on every word.
    lines = [line for pair in sample.sentences(1, 500) for line in pair]
    lines += [line for d in sample.documents(1, 100, split="test") for pair in d for line in pair]
    assert lines[:2] == [
        "Felix says that the tram arrives at 7:42 pm.",
        "Felix sagt, dass die Straßenbahn um 19:42 Uhr ankommt.",
    ]
    assert sha256("\n".join(lines).encode()).hexdigest()[:16] == "65f92f66de69778f"


def test_each_sentence_has_one_translation_in_either_direction() -> None:
    german, english = defaultdict(set), defaultdict(set)
    for source, target in sample.sentences(0, 30_000):
        german[source].add(target)
        english[target].add(source)
    assert all(len(targets) == 1 for targets in german.values())
    assert all(len(sources) == 1 for sources in english.values())
    assert len(german) > 20_000


def test_documents_resolve_what_single_sentences_leave_open() -> None:
    by_sentence, by_document = defaultdict(set), defaultdict(set)
    for document in sample.documents(0, 4_000):
        for source, target in document:
            by_sentence[source].add(target)
        sources, targets = zip(*document, strict=True)
        by_document[sources].add(targets)
    # "It costs ..." has up to three translations, the whole document only one.
    assert max(len(targets) for targets in by_sentence.values()) == 3
    assert all(len(targets) == 1 for targets in by_document.values())


def test_pronouns_have_the_gender_of_their_noun() -> None:
    nouns = {noun.english: noun for noun in [*THINGS, *VEHICLES, *BUILDINGS]}
    genders = {name: gender for gender, name in PEOPLE}
    checked = 0
    for document in sample.documents(3, 500):
        name = document[0][0].split()[0]
        profession = next(entry for entry in PROFESSIONS if f"a {entry[0]}," in document[0][0])
        person = profession[2 if genders[name] == "f" else 1]
        it = None
        for source, target in document[1:]:
            if f"the {profession[0]}" in source:
                assert person in target.split()
            words = source.rstrip(".").split()
            verb = next((verb for verb in ("buys", "takes", "visits") if verb in words), None)
            if verb:
                it = nouns[words[words.index(verb) + 2]]
            elif words[0] == "It":
                assert it is not None
                assert target.startswith({"m": "Er ", "f": "Sie ", "n": "Es "}[it.gender])
                checked += 1
    assert checked > 500


def test_document_lengths_stay_in_range() -> None:
    lengths = {len(document) for document in sample.documents(0, 200, sentences=(3, 5))}
    assert lengths == {3, 4, 5}


@pytest.mark.parametrize("documents", [True, False])
def test_written_splits_share_no_sentence(tmp_path: Path, documents: bool) -> None:
    sample.write(tmp_path, train=300, dev=40, test=40, seed=2, documents=documents)
    read = {}
    for split in ("train", "dev", "test"):
        files = text.TextPair(tmp_path / f"{split}.en", tmp_path / f"{split}.de")
        read[split] = list(text.read_documents(files))
    assert [len(read[split]) for split in read] == [300, 40, 40]
    assert (max(len(document) for document in read["train"]) > 1) is documents
    seen = {split: {pair[0] for d in read[split] for pair in d} for split in read}
    assert seen["train"].isdisjoint(seen["dev"] | seen["test"])
    assert seen["dev"].isdisjoint(seen["test"])


def test_copy_and_reverse_pairs() -> None:
    for source, target in sample.reverse_pairs(0, 100, symbols=4, length_range=(2, 6)):
        assert source.split()[::-1] == target.split()
        assert set(source) <= set("abcd ") and 2 <= len(source.split()) <= 6
    assert all(source == target for source, target in sample.copy_pairs(0, 20))


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="symbols must be from 1 to 26, got 27"):
        next(sample.reverse_pairs(0, 1, symbols=27))
    with pytest.raises(UserError, match="length_range"):
        next(sample.copy_pairs(0, 1, length_range=(3, 2)))
    with pytest.raises(UserError, match="sentences must be"):
        next(sample.documents(0, 1, sentences=(0, 2)))
    with pytest.raises(UserError, match="dev must be at least 1, got 0"):
        sample.write(tmp_path, train=1, dev=0, test=1, seed=0)

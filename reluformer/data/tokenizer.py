"""Joint byte-level BPE for both languages, lossless in both directions.

A regular expression splits text into words, and learnt merges combine the UTF-8 bytes of a word.
All 256 bytes are in the vocabulary and text is not normalised, so there are no unknown characters
and `decode(encode(text)) == text` for every text, including spaces, emoji and control characters.
Four ids are special; no text is encoded to them.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import tokenizers

from reluformer.errors import UserError, quote
from reluformer.files import write_text
from reluformer.reading import JSON_LIMIT, parse_json, read_text

PAD, BOS, EOS, SEP = range(4)
# Names of the special ids in the vocabulary file. The quotation marks are not in the byte-level
# alphabet, so no sequence of merges can produce such a name.
_SPECIALS = ("‹pad›", "‹bos›", "‹eos›", "‹sep›")
MIN_VOCAB, MAX_VOCAB = len(_SPECIALS) + 256, 2**18

# Words with the space before them, English clitics, runs of digits and of other characters. The
# bounds keep the time for a line without spaces proportional to its length, and split numbers into
# groups of at most three digits.
_WORDS = "|".join(
    (
        r"'(?:s|t|re|ve|m|ll|d)(?![\p{L}\p{M}])",
        r" ?[\p{L}\p{M}]{1,64}",
        r" ?\p{N}{1,3}",
        r" ?[^\s\p{L}\p{M}\p{N}]{1,16}",
        r"\s{1,16}(?!\S)",
        r"\s{1,16}",
    )
)
# A word has at most 64 letters of 4 bytes each after its space.
_TOKEN_BYTES = 1 + 64 * 4
# Size of the cache of word ids: number of words, and longest cached word.
_CACHED_WORDS = 250_000
_CACHED_CHARACTERS = 64
# Longer training lines are truncated: they add few words, but could fill the memory.
_TRAINING_CHARACTERS = 4000


class Tokenizer:
    """Byte-level BPE tokenizer. Ids 0 to 3 are pad, bos, eos and sep."""

    pad, bos, eos, sep = PAD, BOS, EOS, SEP

    def __init__(self, specification: str) -> None:
        """Create a tokenizer from the JSON text that `save` writes."""
        self._bpe: Any = tokenizers.Tokenizer.from_str(specification)
        self._first = _Words(self._bpe)
        self._inner = _Words(self._bpe, " ").__getitem__
        self.specification = specification
        self.vocab_size: int = self._bpe.get_vocab_size()
        self.sha256: str = hashlib.sha256(specification.encode()).hexdigest()

    @classmethod
    def train(cls, lines: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learn a vocabulary of at most `vocab_size` ids from `lines`, deterministically.

        The vocabulary is smaller if the lines have too few repeated pairs to merge.
        """
        check_vocab_size(vocab_size)
        bpe = _untrained()
        trainers: Any = tokenizers.trainers  # Its types are incomplete.
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=list(_SPECIALS),
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        bpe.train_from_iterator((line[:_TRAINING_CHARACTERS] for line in lines), trainer)
        specification = json.loads(bpe.to_str())
        # Without this list the library does not look for the special names in text.
        specification["added_tokens"] = []
        return cls(json.dumps(specification, ensure_ascii=False, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> "Tokenizer":
        """Load a tokenizer that `save` wrote.

        The file must have exactly the structure of such tokenizers. A foreign one could contain
        padding, a normaliser or a regular expression that takes unlimited time or memory.

        Raises:
            UserError: The file cannot be read, or is not the file of such a tokenizer.
        """
        text = read_text(Path(path), JSON_LIMIT)
        problem = _problem(parse_json(text, Path(path)))
        if problem is not None:
            raise UserError(f"{path} is not a tokenizer of this package: {problem}")
        try:
            return cls(text)
        # The library raises plain Exception for a broken specification.
        except Exception as error:
            raise UserError(f"{path} is not a tokenizer: {error}") from None

    def save(self, path: Path | str) -> None:
        """Write the vocabulary and its merges as one JSON file, atomically."""
        write_text(Path(path), self.specification)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, none of them special."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text. Text with single spaces is looked up word by word in a cache."""
        split = [text.split() for text in texts]
        # With single spaces and no other white space, no match of `_WORDS` spans two words.
        is_cacheable = [
            bool(words) and " ".join(words) == text
            for words, text in zip(split, texts, strict=True)
        ]
        others = [
            text for text, cacheable in zip(texts, is_cacheable, strict=True) if not cacheable
        ]
        try:
            computed = iter(self._bpe.encode_batch_fast(others, add_special_tokens=False))
            return [
                [*self._first[words[0]], *chain.from_iterable(map(self._inner, words[1:]))]
                if cacheable
                else next(computed).ids
                for words, cacheable in zip(split, is_cacheable, strict=True)
            ]
        except TypeError:
            # The library refuses text with lone surrogates.
            bad = next((text for text in texts if not _is_unicode(text)), None)
            if bad is None:
                raise
            raise UserError(
                f"text {bad[:40]!r} has a lone surrogate, which is not a character"
            ) from None

    def encode_with_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of `text`, and the first and last character (exclusive) that each stands for."""
        encoding = self._bpe.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids` without special ids; bytes that are not UTF-8 become U+FFFD."""
        text: str = self._bpe.decode([i for i in ids if i > SEP], skip_special_tokens=False)
        return text

    def encode_document(self, sentences: Sequence[str]) -> list[int]:
        """Ids of all sentences, with `sep` between them."""
        ids: list[int] = []
        for number, sentence in enumerate(self.encode_batch(sentences)):
            ids += [SEP, *sentence] if number else sentence
        return ids

    def decode_document(self, ids: Iterable[int]) -> list[str]:
        """Sentences between the `sep` ids; other special ids are dropped."""
        sentences: list[list[int]] = [[]]
        for i in ids:
            if i == SEP:
                sentences.append([])
            else:
                sentences[-1].append(i)
        return [self.decode(sentence) for sentence in sentences]


def check_vocab_size(vocab_size: int) -> None:
    """Raise UserError for vocabularies that cannot be learnt or loaded."""
    if not MIN_VOCAB <= vocab_size <= MAX_VOCAB:
        raise UserError(
            f"vocab_size must be from {MIN_VOCAB}, the bytes and special ids, to {MAX_VOCAB}, got "
            f"{vocab_size}"
        )


def _untrained() -> Any:
    """A tokenizer with an empty vocabulary."""
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(_WORDS), "isolated")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte_level])
    bpe.decoder = tokenizers.decoders.ByteLevel()
    return bpe


def _problem(specification: Any) -> str | None:
    """Difference of a specification from those that `Tokenizer.train` writes; None if none."""
    if not isinstance(specification, dict) or not isinstance(specification.get("model"), dict):
        return "it must be an object with a model"
    template = json.loads(_untrained().to_str())
    model = dict(specification["model"])
    vocabulary, merges = model.pop("vocab", None), model.pop("merges", None)
    for values, allowed in ((specification, template), (model, template["model"])):
        for name, value in values.items():
            # Fields of the model are compared one by one: versions of the library differ in them.
            if name != "model" and (name not in allowed or value != allowed[name]):
                return f"{quote(name)} has a value that it never writes"
    if any(specification.get(part) != template[part] for part in ("pre_tokenizer", "decoder")):
        return "pre_tokenizer or decoder is missing"
    if not isinstance(vocabulary, dict) or not MIN_VOCAB <= len(vocabulary) <= MAX_VOCAB:
        return f"vocab must have from {MIN_VOCAB} to {MAX_VOCAB} entries"
    ids = list(vocabulary.values())
    if not all(type(i) is int for i in ids) or sorted(ids) != list(range(len(ids))):
        return "the ids of vocab must be 0, 1, 2, ..."
    if [vocabulary.get(special) for special in _SPECIALS] != [PAD, BOS, EOS, SEP]:
        return f"the ids 0 to 3 must be {', '.join(_SPECIALS)}"
    if not set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) <= set(vocabulary):
        return "vocab must contain all bytes"
    if max(map(len, vocabulary)) > _TOKEN_BYTES:
        return f"vocab has a token of more than {_TOKEN_BYTES} bytes"
    if not isinstance(merges, list) or len(merges) > len(vocabulary):
        return "merges must be a list with at most as many entries as vocab"
    return None


class _Words(dict[str, list[int]]):
    """Cache of the ids of words, each encoded after the text `before`."""

    def __init__(self, bpe: Any, before: str = "") -> None:
        super().__init__()
        self._bpe = bpe
        self._before = before

    def __missing__(self, word: str) -> list[int]:
        ids: list[int] = self._bpe.encode(self._before + word, add_special_tokens=False).ids
        # Frequent words come early, so a full cache is not replaced.
        if len(self) < _CACHED_WORDS and len(word) <= _CACHED_CHARACTERS:
            self[word] = ids
        return ids


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True

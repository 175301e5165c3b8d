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

from reluformer.errors import UserError
from reluformer.files import write_text

PAD, BOS, EOS, SEP = range(4)
# Names of the special ids in the vocabulary file. The quotation marks are not in the byte-level
# alphabet, so no sequence of merges can produce such a name.
_SPECIALS = ("‹pad›", "‹bos›", "‹eos›", "‹sep›")
MIN_VOCAB = len(_SPECIALS) + 256

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
        self._specification = specification
        self.vocab_size: int = self._bpe.get_vocab_size()
        self.sha256: str = hashlib.sha256(specification.encode()).hexdigest()

    @classmethod
    def train(cls, lines: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learn a vocabulary of at most `vocab_size` ids from `lines`, deterministically.

        The vocabulary is smaller if the lines have too few repeated pairs to merge.
        """
        if vocab_size < MIN_VOCAB:
            raise UserError(
                f"vocab_size must be at least {MIN_VOCAB}, the bytes and special ids, got "
                f"{vocab_size}"
            )
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(_WORDS), "isolated")
        byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte_level])
        bpe.decoder = tokenizers.decoders.ByteLevel()
        trainers: Any = tokenizers.trainers  # Its types are incomplete.
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=list(_SPECIALS),
            initial_alphabet=byte_level.alphabet(),
            show_progress=False,
        )
        bpe.train_from_iterator((line[:_TRAINING_CHARACTERS] for line in lines), trainer)
        specification = json.loads(bpe.to_str())
        # Without this list the library does not look for the special names in text.
        specification["added_tokens"] = []
        return cls(json.dumps(specification, ensure_ascii=False, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> "Tokenizer":
        """Load a tokenizer that `save` wrote."""
        try:
            tokenizer = cls(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
        # The library raises plain Exception for a broken specification.
        except Exception as error:
            raise UserError(f"{path} is not a tokenizer: {error}") from None
        if [tokenizer._bpe.id_to_token(special) for special in range(4)] != list(_SPECIALS):
            raise UserError(f"{path} must have the ids 0 to 3 for {', '.join(_SPECIALS)}")
        return tokenizer

    def save(self, path: Path | str) -> None:
        """Write the vocabulary and its merges as one JSON file, atomically."""
        write_text(Path(path), self._specification)

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

"""Joint byte-pair encoding for both languages, exact in both directions.

Text is cut into words by a regular expression, words into their UTF-8 bytes, and bytes are merged
as learnt. All 256 bytes are in the vocabulary and nothing is normalised, so there is no unknown
character and `decode(encode(text)) == text` for every text, spaces, emoji and control characters
included. Four ids are special; text never encodes to them, whatever it spells.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from reluformer.errors import UserError
from reluformer.files import write_text

PAD, BOS, EOS, SEP = range(4)
# Names of the special ids in the vocabulary file. The quotation marks do not occur in the alphabet
# that stands for bytes, so no sequence of merges can spell one.
_SPECIALS = ("‹pad›", "‹bos›", "‹eos›", "‹sep›")
MIN_VOCAB = len(_SPECIALS) + 256

# Words with the space before them, English clitics, runs of digits and of other signs. The bounds
# keep the time for a line without any space proportional to its length. They also make numbers
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
# Ids of frequent words are kept rather than computed again, for so many words of such a length.
_KNOWN_WORDS = 250_000
_KNOWN_CHARACTERS = 64
# Longer lines teach no more words, but could fill the memory.
_TRAINING_CHARACTERS = 4000


class Tokenizer:
    """A learnt vocabulary: text to ids and back. Ids 0 to 3 are pad, bos, eos and sep."""

    pad, bos, eos, sep = PAD, BOS, EOS, SEP

    def __init__(self, specification: str) -> None:
        """Build from the JSON text that `save` writes."""
        self._bpe: Any = _library().Tokenizer.from_str(specification)
        self._first = _Words(self._bpe)
        self._inner = _Words(self._bpe, " ").__getitem__
        self._specification = specification
        self.vocab_size: int = self._bpe.get_vocab_size()
        self.sha256: str = hashlib.sha256(specification.encode()).hexdigest()

    @classmethod
    def train(cls, lines: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learn at most `vocab_size` ids from `lines`; the same lines give the same vocabulary.

        Fewer ids come out when the lines have no more repeated pairs to merge.
        """
        if vocab_size < MIN_VOCAB:
            raise UserError(
                f"vocab_size is {vocab_size}, but the bytes and special ids alone are {MIN_VOCAB}"
            )
        library = _library()
        cut = library.pre_tokenizers.Split(library.Regex(_WORDS), "isolated")
        byte_level = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        bpe = library.Tokenizer(library.models.BPE())
        bpe.pre_tokenizer = library.pre_tokenizers.Sequence([cut, byte_level])
        bpe.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
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
        """Read what `save` wrote."""
        try:
            tokenizer = cls(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
        # The library raises plain Exception for a broken specification.
        except Exception as error:
            raise UserError(f"{path} is not a tokenizer: {error}") from None
        if [tokenizer._bpe.id_to_token(special) for special in range(4)] != list(_SPECIALS):
            raise UserError(f"{path} is not one of our tokenizers: ids 0 to 3 must be {_SPECIALS}")
        return tokenizer

    def save(self, path: Path | str) -> None:
        """Write the vocabulary and its merges as one JSON file, atomically."""
        write_text(Path(path), self._specification)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, none of them special."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text. Ordinary text goes word by word through a table, the rest in full."""
        split = [text.split() for text in texts]
        # With single spaces and no other white space every match of `_WORDS` lies in one word.
        usual = [
            bool(words) and " ".join(words) == text
            for words, text in zip(split, texts, strict=True)
        ]
        unusual = [text for text, known in zip(texts, usual, strict=True) if not known]
        try:
            computed = iter(self._bpe.encode_batch_fast(unusual, add_special_tokens=False))
            return [
                [*self._first[words[0]], *chain.from_iterable(map(self._inner, words[1:]))]
                if known
                else next(computed).ids
                for words, known in zip(split, usual, strict=True)
            ]
        except TypeError:
            # The library cannot take text that is not Unicode.
            bad = next((text for text in texts if not _is_unicode(text)), None)
            if bad is None:
                raise
            raise UserError(f"text {bad[:40]!r} has a lone surrogate, no character") from None

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special ids left out; bytes that are not UTF-8 become U+FFFD."""
        text: str = self._bpe.decode([i for i in ids if i > SEP], skip_special_tokens=False)
        return text

    def encode_document(self, sentences: Sequence[str]) -> list[int]:
        """Ids of the sentences with `sep` between them."""
        ids: list[int] = []
        for number, sentence in enumerate(self.encode_batch(sentences)):
            ids += [SEP, *sentence] if number else sentence
        return ids

    def decode_document(self, ids: Iterable[int]) -> list[str]:
        """Sentences of `ids`: one more than there are `sep`; other special ids are left out."""
        sentences: list[list[int]] = [[]]
        for i in ids:
            if i == SEP:
                sentences.append([])
            else:
                sentences[-1].append(i)
        return [self.decode(sentence) for sentence in sentences]


def _library() -> Any:
    # Imported where needed, to keep the package light, and untyped, as its types are incomplete.
    import tokenizers

    return tokenizers


class _Words(dict[str, list[int]]):
    """Ids of words, each with the same text before it, computed at their first use."""

    def __init__(self, bpe: Any, before: str = "") -> None:
        super().__init__()
        self._bpe = bpe
        self._before = before

    def __missing__(self, word: str) -> list[int]:
        ids: list[int] = self._bpe.encode(self._before + word, add_special_tokens=False).ids
        # The frequent words come early: once the table is full it stays as it is.
        if len(self) < _KNOWN_WORDS and len(word) <= _KNOWN_CHARACTERS:
            self[word] = ids
        return ids


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True

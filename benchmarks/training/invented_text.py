"""Prepared text of invented words, for runs without a corpus."""

from pathlib import Path

import numpy as np

from reluformer.data.prepare import prepare
from reluformer.data.text import TextPair, write_documents


def invent(folder: Path, *, pairs: int, vocabulary: int, per_document: int) -> Path:
    """Prepare invented words with the sentence lengths and word frequencies of Europarl.

    Returns:
        The prepared folder, below `folder`.
    """
    random = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwygpbvkxqjz"))
    drawn = random.choice(letters, (2 * vocabulary, 9))
    sizes = random.integers(2, 10, len(drawn))
    lexicon = ["".join(row[:size]) for row, size in zip(drawn, sizes, strict=True)]
    frequencies = 1 / (np.arange(len(lexicon)) + 3)
    lengths = random.lognormal(3.05, 0.54, pairs).clip(1, 140)

    def side() -> list[str]:
        counts = (lengths * random.uniform(0.85, 1.15, pairs)).round().clip(1).astype(int)
        chosen = random.choice(len(lexicon), counts.sum(), p=frequencies / frequencies.sum())
        words = iter([lexicon[index] for index in chosen])
        return [" ".join(next(words) for _ in range(count)) for count in counts]

    lines = list(zip(side(), side(), strict=True))
    documents = [lines[i : i + per_document] for i in range(0, pairs, per_document)]
    text = TextPair(folder / "text.source", folder / "text.target", per_document > 1)
    folder.mkdir(parents=True)
    write_documents(text.source, text.target, documents, marked=per_document > 1)
    prepare(folder / "prepared", {"train": [text]}, vocab_size=vocabulary)
    return folder / "prepared"

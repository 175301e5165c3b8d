"""ReLU attention in `torch.nn.Transformer`: one line changes, the training loop does not.

Trains a small translation model on generated English-German sentences, once with softmax and once
with the recommended attention, and prints the validation loss of both.

    python examples/torch_transformer.py
"""

import argparse
from collections.abc import Iterator
from random import Random

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import reluformer.nn
from reluformer.data.synthetic.sample import sentences

PAD, START, END, UNKNOWN = range(4)


class Translator(nn.Module):
    """Embeddings around a transformer."""

    def __init__(self, words: int, attention: str, width: int = 64) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(64, width)
        # The one line that changes; before: self.transformer = nn.Transformer(
        self.transformer = reluformer.nn.Transformer(
            width, 4, 2, 2, 4 * width, dropout=0.0, batch_first=True, norm_first=True,
            attention=attention,
        )  # fmt: skip
        self.out = nn.Linear(width, words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits [B, T, words] from ids of the source [B, S] and of the target so far [B, T]."""
        padding = source == PAD
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1]).isinf()
        output = self.transformer(
            self.embed(source),
            self.embed(target),
            tgt_mask=causal,
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        logits: Tensor = self.out(output)
        return logits

    def embed(self, tokens: Tensor) -> Tensor:
        """Sum of word and position embeddings, [B, T, width]."""
        return self.words(tokens) + self.positions(torch.arange(tokens.shape[1]))


def encode(texts: list[str], ids: dict[str, int]) -> Tensor:
    """Word ids of texts, each with start and end, padded to one length."""
    rows = [[START, *(ids.get(word, UNKNOWN) for word in text.split()), END] for text in texts]
    longest = max(map(len, rows))
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


def batches(
    pairs: list[tuple[str, str]], ids: dict[str, int], size: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Random batches without end."""
    random = Random(seed)
    while True:
        english, german = zip(*random.sample(pairs, size), strict=True)
        yield encode(list(english), ids), encode(list(german), ids)


def loss_of(model: Translator, source: Tensor, target: Tensor) -> Tensor:
    """Mean negative log-likelihood of a target token, in nats."""
    logits = model(source, target[:, :-1])
    return cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)


def train(attention: str, steps: int) -> float:
    """Train a model and return its validation loss."""
    pairs, dev = (list(sentences(0, n, split=s)) for n, s in ((20_000, "train"), (500, "dev")))
    words = sorted({word for pair in pairs for text in pair for word in text.split()})
    ids = {word: index for index, word in enumerate(words, start=UNKNOWN + 1)}
    torch.manual_seed(0)
    model = Translator(len(ids) + UNKNOWN + 1, attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    data = batches(pairs, ids, size=64, seed=0)
    for _ in range(steps):
        loss = loss_of(model, *next(data))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    english, german = zip(*dev, strict=True)
    model.eval()
    with torch.no_grad():
        return loss_of(model, encode(list(english), ids), encode(list(german), ids)).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    steps = parser.parse_args().steps
    for attention in ("softmax", "normalised_relu"):
        print(f"{attention:16} validation loss {train(attention, steps):.3f} nats")


if __name__ == "__main__":
    main()

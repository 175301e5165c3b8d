"""ReLU attention in `torch.nn.Transformer`: one line changes, the training loop does not.

Trains a small model to reverse letters, once with softmax and once with the recommended attention,
and prints the validation loss of both.

    python examples/torch_transformer.py
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import reluformer.nn
from reluformer.data.synthetic.sample import reverse_pairs

PAD, START, END = range(3)
LETTERS = 26


class Reverser(nn.Module):
    """Embeddings around a transformer."""

    def __init__(self, attention: str, width: int = 64) -> None:
        super().__init__()
        self.letters, self.positions = nn.Embedding(LETTERS + 3, width), nn.Embedding(32, width)
        # The one line that changes; before: self.transformer = nn.Transformer(
        self.transformer = reluformer.nn.Transformer(
            width, 4, 2, 2, 4 * width, dropout=0.0, batch_first=True, norm_first=True,
            attention=attention,
        )  # fmt: skip
        self.out = nn.Linear(width, LETTERS + 3)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits [B, T, 29] from ids of the source [B, S] and of the target so far [B, T]."""
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
        """Sum of letter and position embeddings, [B, T, width]."""
        return self.letters(tokens) + self.positions(torch.arange(tokens.shape[1]))


def encode(texts: tuple[str, ...]) -> Tensor:
    """Ids of texts such as "c a b", each with start and end, padded to one length."""
    rows = [
        [START, *(ord(letter) - ord("a") + 3 for letter in text.split()), END] for text in texts
    ]
    longest = max(map(len, rows))
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


def batch(seed: int, size: int = 64) -> tuple[Tensor, Tensor]:
    """Sources and targets of a random batch."""
    pairs = reverse_pairs(seed, size, symbols=LETTERS, length_range=(4, 12))
    source, target = zip(*pairs, strict=True)
    return encode(source), encode(target)


def loss_of(model: Reverser, source: Tensor, target: Tensor) -> Tensor:
    """Mean negative log-likelihood of a target token, in nats."""
    logits = model(source, target[:, :-1])
    return cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)


def train(attention: str, steps: int) -> float:
    """Train a model and return its validation loss."""
    torch.manual_seed(0)
    model = Reverser(attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for step in range(steps):
        loss = loss_of(model, *batch(seed=step + 1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        return loss_of(model, *batch(seed=0, size=512)).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    steps = parser.parse_args().steps
    for attention in ("softmax", "normalised_relu"):
        print(f"{attention:16} validation loss {train(attention, steps):.3f} nats")


if __name__ == "__main__":
    main()

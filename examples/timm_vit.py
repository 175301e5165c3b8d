"""ReLU attention in a vision transformer of timm.

Trains a small ViT to name shapes in generated images, once with softmax and once with the
recommended attention, and prints the validation loss and accuracy of both.

    pip install torchvision   # from the index that torch came from
    pip install ".[timm]"     # in a clone of the repository
    python examples/timm_vit.py
"""

import argparse

import timm
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from reluformer.nn.timm import attn_layer

SIZE = 16


def images(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy images [N, 3, 16, 16] of a disc, square, cross or ring, and labels [N]."""
    label = torch.randint(4, (count,), generator=generator)
    centre = torch.randint(6, SIZE - 6, (2, count, 1, 1), generator=generator)
    radius = torch.randint(3, 6, (count, 1, 1), generator=generator)
    axis = torch.arange(SIZE)
    y, x = axis[:, None] - centre[0], axis - centre[1]  # [N, 16, 1], [N, 1, 16]
    distance = (x**2 + y**2).sqrt()
    largest = torch.maximum(x.abs(), y.abs())
    shapes = torch.stack(
        [
            distance <= radius,
            largest <= radius,
            (largest <= radius) & (torch.minimum(x.abs(), y.abs()) <= 1),
            (distance <= radius) & (distance >= radius - 1.5),
        ]
    )  # [4, N, 16, 16]
    shape = shapes[label, torch.arange(count)].float()
    colour = torch.rand(count, 3, 1, 1, generator=generator) + 0.5
    noise = torch.randn(count, 3, SIZE, SIZE, generator=generator)
    return shape[:, None] * colour + 0.2 * noise, label


def build(attention: str, seed: int) -> nn.Module:
    """A ViT of 2 layers of width 48 on patches of 4 x 4 pixels."""
    torch.manual_seed(seed)
    model: nn.Module = timm.models.VisionTransformer(
        img_size=SIZE,
        patch_size=4,
        embed_dim=48,
        depth=2,
        num_heads=4,
        num_classes=4,
        class_token=False,
        global_pool="avg",
        attn_layer=attn_layer(attention),  # the one line that is new
    )
    return model


def train(attention: str, steps: int, seed: int) -> tuple[float, float]:
    """Train a model, and return its validation loss in nats and its accuracy."""
    model, generator = build(attention, seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        pictures, labels = images(32, generator)
        loss = cross_entropy(model(pictures), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
    pictures, labels = images(500, torch.Generator().manual_seed(1000))
    with torch.no_grad():
        logits = model(pictures)
    accuracy = (logits.argmax(dim=-1) == labels).float().mean().item()
    return cross_entropy(logits, labels).item(), accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for attention in ("softmax", "normalised_relu"):
        loss, accuracy = train(attention, arguments.steps, arguments.seed)
        print(f"{attention:16} validation loss {loss:.3f} nats, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()

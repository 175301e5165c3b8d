"""The gallery of attentions: plots computed by the library, and text from docs/gallery.yaml."""

from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
import yaml

from reluformer import ATTENTIONS, UserError, attention
from reluformer.ops.definition import Attention

NOTES = Path(__file__).resolve().parents[1] / "gallery.yaml"
SPEED = {
    "cpu": "**fused** (our kernels for CUDA and CPU)",
    "sdpa": "**fused** (torch's `scaled_dot_product_attention`)",
    "reference": "**eager** (memory grows with n²)",
}
KEYS, WIDTH, POINTS = 16, 64, 121
_BOX = (30.0, 8.0, 220.0, 110.0)  # left, top, right, bottom of the plot, in SVG units


def notes() -> dict[str, Any]:
    """Groups of attentions, each with a paragraph and a sentence for every member.

    An attention without a sentence is listed in a last group, so that none is ever missing.
    """
    groups: dict[str, Any] = yaml.safe_load(NOTES.read_text(encoding="utf-8"))
    described = {name for group in groups.values() for name in group["members"]}
    if rest := {name: "" for name in ATTENTIONS if name not in described}:
        groups["Others"] = {"about": "Attentions that no group describes yet.", "members": rest}
    return groups


def markdown() -> str:
    """One section for each group, one entry for each attention."""
    parts = []
    for group, content in notes().items():
        parts += [f"## {group}", content["about"]]
        parts += [_entry(ATTENTIONS[name], when) for name, when in content["members"].items()]
    return "\n\n".join(parts)


def speed_class(name: str) -> str:
    """Key of `SPEED`: the fastest implementation that accepts a plain call."""
    q = torch.zeros(1, 2, 4, WIDTH)
    for impl in ("cpu", "sdpa"):
        try:
            attention(name, q, q, q, impl=impl)
        except UserError:
            continue
        return impl
    return "reference"


def plots() -> dict[str, str]:
    """An SVG for every attention: the weight of one key of 16 over that key's score."""
    default = {"power": 4, "threshold": -4.0, "row_normalise": 1e-4}
    return {name: _svg(name) for name in ATTENTIONS} | {"relu-default": _svg("relu", **default)}


def curve(name: str, **options: Any) -> tuple[list[float], list[float]]:
    """Scores of one key, and its weight beside 15 keys whose scores are normal quantiles.

    Attentions on cosines have scores from -1 to 1, all others from -4 to 4. An attention with two
    maps gets constant scores in the second one.
    """
    row = ATTENTIONS[name]
    limit = 1.0 if row.cosine else 4.0
    moving = torch.linspace(-limit, limit, POINTS)
    others = torch.tensor([NormalDist().inv_cdf((i + 0.5) / (KEYS - 1)) for i in range(KEYS - 1)])
    if row.cosine:
        others = others / 3  # within -1 to 1
    # Quantiles in a fixed order that is neither rising nor falling, for attentions with an order.
    others = others[torch.tensor([(7 * i) % (KEYS - 1) for i in range(KEYS - 1)])]
    scores = others.repeat(POINTS, 1)
    scores = torch.cat([scores[:, : KEYS // 2], moving[:, None], scores[:, KEYS // 2 :]], dim=1)
    keys = torch.zeros(POINTS, 1, KEYS, WIDTH)
    query = torch.zeros(POINTS, 1, 1, WIDTH)
    query[..., 0] = keys[..., 0] = 1.0
    keys[..., 0] = scores[:, None]
    if row.cosine:  # unit vectors whose first coordinate is the cosine
        keys[..., 1] = (1 - scores.square()).clamp_min(0).sqrt()[:, None]
    if row.halves:
        half = WIDTH // 2
        query[..., half] = 1.0
        keys[..., half + 1] = 1.0
    result = attention(name, query, keys, keys, scale=1.0, return_weights=True, **options)
    assert result.weights is not None
    return moving.tolist(), result.weights[:, 0, 0, KEYS // 2].tolist()


def _entry(row: Attention, when: str) -> str:
    formula = row.formula.replace("`", "")
    plot = f"![Weight of {row.name} over the score](gallery/{row.name}.svg)"
    facts = [
        f"*Speed:* {SPEED[speed_class(row.name)]}",
        f"*Paper:* {row.paper}",
    ]
    if row.options:
        facts.append("*Options:* " + ", ".join(f"`{name}`" for name in sorted(row.options)))
    text = [f"`{formula}`", when, "<br>\n".join(facts)]
    body = "\n\n".join([plot, "<div markdown>", *filter(None, text), "</div>"])
    return f'### {row.name}\n\n<div class="gallery-entry" markdown>\n\n{body}\n\n</div>'


def _svg(name: str, **options: Any) -> str:
    scores, weights = curve(name, **options)
    left, top, right, bottom = _BOX
    low, high = min(0.0, *weights), max(weights)

    def x(score: float) -> float:
        return left + (score - scores[0]) / (scores[-1] - scores[0]) * (right - left)

    def y(weight: float) -> float:
        return bottom - (weight - low) / (high - low) * (bottom - top)

    points = " ".join(f"{x(s):.1f},{y(w):.1f}" for s, w in zip(scores, weights, strict=True))
    labels = [
        _label(left - 4, y(high) + 8, f"{high:.2g}", "end"),
        _label(left - 4, y(0.0) + 3, "0", "end"),
        _label(left, bottom + 13, f"{scores[0]:g}", "middle"),
        _label(x(0.0), bottom + 13, "0", "middle"),
        _label(right, bottom + 13, f"{scores[-1]:g}", "middle"),
        _label(left + 4, top + 8, "weight", "start"),
        _label(
            (right + x(0.0)) / 2, bottom + 13, "cosine" if scores[-1] == 1 else "score", "middle"
        ),
    ]
    if low < 0:
        labels.append(_label(left - 4, y(low) + 3, f"{low:.2g}", "end"))
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 236 130" font-family="sans-serif" '
        'font-size="10" fill="#808080">'
        f'<path d="M{left} {top}V{bottom}M{left} {y(0.0):.1f}H{right}M{x(0.0):.1f} {top}V{bottom}"'
        ' stroke="#808080" stroke-opacity=".5" fill="none"/>'
        f'<polyline points="{points}" fill="none" stroke="#5c6bc0" stroke-width="2.5" '
        f'stroke-linejoin="round"/>{"".join(labels)}</svg>\n'
    )


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'

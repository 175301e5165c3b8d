"""Attention maps as a self-contained interactive view: hover a token, see what it reads.

The page needs no network and no build step: data, script and style are inlined. The same view is
embedded in the study report.
"""

import base64
import html
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reluformer.checkpoint import LoadedRun
from reluformer.inspection.texts import dev_pairs, first_lines, translations, translator
from reluformer.translation.attention_maps import AttentionMaps, compute_maps

# Texts of a page.
_TEXTS = 6
SITES = ("encoder", "decoder", "cross")

MOST_TOKENS = 160


def model_maps(
    name: str,
    run: LoadedRun,
    sources: Sequence[str],
    targets: Sequence[str] | None = None,
    *,
    most_tokens: int = MOST_TOKENS,
) -> dict[str, Any]:
    """Maps of one model on some texts, as plain values for `map_view`.

    Args:
        name: Heading of the model's panel.
        run: Model, tokenizer and recipe.
        sources: Texts to read, one sentence a line, each cut to `most_tokens` tokens.
        targets: Texts that the decoder reads; greedy translations by default.
        most_tokens: Bound on the tokens of a text; larger maps make pages of many megabytes.
    """
    translate, encode = translator(run), run.tokenizer.encode_document
    texts = []
    for number, source in enumerate(sources):
        target = translate.lines([source])[0] if targets is None else targets[number]
        ids = [encode(text.split("\n"))[:most_tokens] for text in (source, target)]
        texts.append(pack_maps(source, compute_maps(run.model, run.tokenizer, *ids)))
    return {"name": name, "texts": texts}


def compare_maps(models: Mapping[str, LoadedRun], path: Path | None) -> str:
    """A page with the maps of some models on the same texts and the same targets.

    Args:
        models: Models by the heading of their panels; the first one translates.
        path: Text file, of which the first lines are shown; None takes dev of the first model.
    """
    first = next(iter(models.values()))
    if path is None:
        pairs = dev_pairs(first, _TEXTS)
    else:
        sources = first_lines(path, _TEXTS)
        pairs = list(zip(sources, translations(first, sources), strict=True))
    shown = [[pair[side] for pair in pairs] for side in (0, 1)]
    return map_page([model_maps(name, run, *shown) for name, run in models.items()])


def map_view(models: Sequence[Mapping[str, Any]]) -> str:
    """The view's HTML element; a page needs `style()` and `script()` once besides."""
    # "</script" ends a script element early, and "<!--<script" hides its end.
    data = json.dumps({"models": list(models)}, ensure_ascii=False).replace("<", "\\u003c")
    return (
        f'<section class="amap" aria-label="attention maps">'
        f'<script type="application/json">{data}</script></section>'
    )


def map_page(models: Sequence[Mapping[str, Any]]) -> str:
    """A complete HTML page with the view."""
    names = html.escape(" and ".join(str(model["name"]) for model in models))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Attention maps of {names}</title>\n<style>\n"
        ":root { color-scheme: light dark; }\n"
        "body { max-width: 76rem; margin: 0 auto; padding: 1rem; }\n"
        "h1 { font: 600 1.4rem system-ui, sans-serif; }\n"
        f"{style()}</style></head>\n<body><main><h1>Attention maps</h1>\n{map_view(models)}\n"
        f"</main><script>\n{script()}</script></body></html>\n"
    )


def style() -> str:
    """The view's style sheet."""
    return _asset("map.css")


def script() -> str:
    """The view's script; it starts every view of the page and belongs at the page's end."""
    return _asset("map.js")


def _asset(name: str) -> str:
    return resources.files("reluformer.inspection").joinpath("assets", name).read_text("utf-8")


def pack_maps(name: str, maps: AttentionMaps) -> dict[str, Any]:
    """Maps of one text as plain values, for the list `texts` of a model.

    Args:
        name: Name of the text, which is shortened.
        maps: Its maps.
    """
    shown = name.replace("\n", " ")
    return {
        "name": shown if len(shown) <= 60 else f"{shown[:57]}...",
        "source": maps.source,
        "target": maps.target,
        "sites": {site: _site(getattr(maps, site)) for site in SITES},
    }


def _site(weights: Tensor) -> dict[str, Any]:
    """Weights [layers, H, Tq, Tk] as base64 of 16-bit integers; exact zeros stay zero."""
    weights = weights.float()
    scales = weights.abs().amax(dim=(-1, -2))  # [layers, H]
    unit = torch.where(scales > 0, scales, 1.0)[..., None, None] / 32767
    steps = (weights / unit).round()
    # A weight too small for a step is still not zero.
    steps = torch.where((steps == 0) & (weights != 0), weights.sign(), steps)
    packed = base64.b64encode(steps.to(torch.int16).numpy().astype("<i2").tobytes())
    return {
        "shape": list(weights.shape),
        "scales": [[float(f"{value:.5g}") for value in row] for row in scales.tolist()],
        "row_sums": [
            [[round(value, 4) for value in head] for head in layer]
            for layer in weights.abs().sum(dim=-1).tolist()
        ],
        "weights": packed.decode("ascii"),
    }

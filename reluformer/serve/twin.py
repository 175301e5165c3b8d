"""Attention maps of a softmax model on the demo document, stored beside a ReLU model.

    python -m reluformer.serve.twin FOLDER TWIN [NAME]

FOLDER is the model's, with the document in `demo.txt`; TWIN is the folder of the softmax model.

The file is compressed JSON with one character per weight: its square root relative to the largest
weight of the map, in 63 steps. The maps of a document then take a few hundred kilobytes.
"""

import base64
import json
import lzma
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reluformer.checkpoint import load_run
from reluformer.documents.translation import Document, Pace
from reluformer.errors import UserError
from reluformer.files import atomic_path
from reluformer.inspection.maps import MOST_TOKENS, pack_maps
from reluformer.reading import JSON_LIMIT, open_regular, parse_json, read_text
from reluformer.shipped import DEMO_DOCUMENT, TWIN_MAPS
from reluformer.translation.attention_maps import compute_maps
from reluformer.translation.translator import Translator

_LEVELS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
# Integers of the page's maps: largest weight, and the value of each level.
_LARGEST = 32767
_VALUES = np.round((np.arange(64) / 63) ** 2 * _LARGEST).astype("<i2")
# Memory of the decompressor; a small file may ask for gigabytes.
_MEMORY = 2**27


def write_twin_maps(folder: Path, twin: Path, name: str = "softmax twin") -> Path:
    """Write the twin's maps of every sentence of the demo document.

    Both models read the translations of the first, as the page shows them, so that rows and columns
    are comparable.

    Args:
        folder: Folder of the model, in which the maps are written.
        twin: Folder of the run of the softmax model.
        name: Heading of its maps.

    Returns:
        The file with the maps.
    """
    document = Document(read_text(folder / DEMO_DOCUMENT, 2**16))
    other = load_run(twin)
    texts = []
    for sentence in document.translate(Translator.load(folder), Pace()):
        pair = (sentence.source, sentence.target)
        ids = [other.tokenizer.encode(text)[:MOST_TOKENS] for text in pair]
        with torch.inference_mode():
            packed = pack_maps(sentence.source, compute_maps(other.model, other.tokenizer, *ids))
        packed["predicted"] = [*packed["target"][1:], "<eos>"]
        packed["sites"] = {site: _compact(data) for site, data in packed["sites"].items()}
        texts.append({"sentence": sentence.source, "maps": packed})
    content = json.dumps({"name": name, "texts": texts}, ensure_ascii=False, separators=(",", ":"))
    with atomic_path(folder / TWIN_MAPS) as path:
        path.write_bytes(lzma.compress(content.encode(), preset=9))
    return folder / TWIN_MAPS


def read_twin_maps(path: Path) -> dict[str, Any]:
    """Name of the twin, and its maps by sentence in the form of `pack_maps`.

    Raises:
        UserError: The file is damaged or is no such file.
    """
    try:
        twin = parse_json(_decompress(path), path)
        maps = {}
        for entry in twin["texts"]:
            text = dict(entry["maps"])
            text["sites"] = {site: _expand(data) for site, data in text["sites"].items()}
            maps[str(entry["sentence"])] = text
        return {"name": str(twin["name"]), "maps": maps}
    except (KeyError, TypeError, ValueError, AttributeError, lzma.LZMAError, EOFError):
        raise UserError(f"{path} must have a name, and maps by sentence") from None


def _decompress(path: Path) -> bytes:
    with open(open_regular(path), "rb") as file:
        compressed = file.read(JSON_LIMIT)
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MEMORY)
    content = decompressor.decompress(compressed, max_length=JSON_LIMIT)
    if not decompressor.eof:
        raise ValueError("cut off, or too large")
    return content


def _compact(site: dict[str, Any]) -> dict[str, Any]:
    """One site of `pack_maps` with one character per weight."""
    weights = np.frombuffer(base64.b64decode(site["weights"]), dtype="<i2")
    levels = np.round(np.sqrt(weights / _LARGEST) * 63)
    # A weight too small for a step is still not zero.
    levels = np.where((levels == 0) & (weights != 0), 1, levels).astype(np.uint8)
    text = np.frombuffer(_LEVELS, dtype=np.uint8)[levels].tobytes().decode("ascii")
    return {**site, "weights": text}


def _expand(site: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `_compact`, up to rounding."""
    lookup = np.full(256, -1, dtype=np.int64)
    lookup[np.frombuffer(_LEVELS, dtype=np.uint8)] = np.arange(64)
    levels = lookup[np.frombuffer(site["weights"].encode(), dtype=np.uint8)]
    sizes = [int(size) for size in site["shape"]]
    if len(sizes) != 4 or int(np.prod(sizes)) != len(levels) or (levels < 0).any():
        raise ValueError("weights must be one known character each")
    values = base64.b64encode(_VALUES[levels].tobytes()).decode("ascii")
    return {**site, "weights": values}


if __name__ == "__main__":
    try:
        print(write_twin_maps(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:4]))
    except (IndexError, UserError) as error:
        sys.exit(str(error) if isinstance(error, UserError) else __doc__)

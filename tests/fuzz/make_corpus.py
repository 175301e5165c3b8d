"""Write the stored corpus of hostile files: one for each sentence that refuses a damaged file.

    python -m tests.fuzz.make_corpus

Damages the files of a sound folder at random, and keeps the first file with a new refusal. A file
that once broke the package is added to the corpus by hand. `test_corpus.py` reads all of them.
"""

import gzip
import json
import lzma
import random
import re
import string
import struct
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from reluformer.errors import UserError
from tests.fuzz.conftest import build_sound_folder
from tests.fuzz.targets import STRUCTURED, containers

CORPUS = Path(__file__).parent / "corpus"
CASES, MOST_FILES, MOST_BYTES = 400, 24, 12_000
VALUES: list[Any] = [
    None, True, 0, -1, 2**31, 2**63, 10**30, 1e308, -0.5, 1e-320, float("nan"), float("inf"), "",
    "../../x", "\x1b[2J", "a" * 300, [], {}, [[]], {"a": {"b": [1]}}, "9" * 50,
]  # fmt: skip


def _damage(values: Any, rng: random.Random) -> None:
    """Replace, delete or add one entry of one list or object inside `values`."""
    chosen = rng.choice([c for c in containers(values) if c])
    key = rng.choice(list(chosen) if isinstance(chosen, dict) else range(len(chosen)))
    action = rng.choice(["replace", "replace", "delete", "add"])
    if action == "delete":
        del chosen[key]
    elif action == "add" and isinstance(chosen, dict):
        chosen["".join(rng.choices(string.ascii_letters, k=3))] = deepcopy(rng.choice(VALUES))
    else:
        chosen[key] = deepcopy(rng.choice(VALUES))


def _kind(message: str, folder: Path) -> str:
    """The message without the parts that name one case."""
    message = message.replace(str(folder), "")
    return re.sub(r"'[^']*'|\"[^\"]*\"|[-\d.e+]+|\b\w{3}\b|\(\w+\)", "_", message)[:60]


LAUGHS = "a0: &a0 [x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
RECIPES = {
    "laughs": LAUGHS,
    "cycle": "data: &x {source: *x}\n",
    "deep-list": "[" * 4000,
    "deep-map": "{a: " * 2000,
    "digits": "train: {steps: " + "9" * 5000 + "}",
    "python": "data: !!python/object/apply:os.system [id]\n",
    "date": "data: 2026-99-99\n",
    "merge": "a: &a {b: 1}\nc: {<<: [" + "*a, " * 1000 + "*a]}\n",
    "penalty": "decode: {length_penalty: 1e308}\n",
}
WEIGHTS = {
    "empty": b"",
    "huge-header": struct.pack("<Q", 2**63),
    "short": struct.pack("<Q", 100),
    "list": struct.pack("<Q", 2) + b"[]",
    "float-shape": struct.pack("<Q", 60)
    + b'{"a":{"dtype":"F32","shape":[1e9],"data_offsets":[0,4]}}    ',
    "pickle": b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94.",
    "deep": struct.pack("<Q", 4000) + b'{"a":' * 800,
}
OFFSETS = {
    "negative": struct.pack("<2q", -5, 2),
    "falls": struct.pack("<3q", 0, 9, 1),
    "huge": struct.pack("<2q", 0, 2**62),
    "odd": b"abc",
    "nothing": b"",
}
ZEROS = b"\0" * 2**22
TEXTS = {
    "nul.txt": b"a\0b\n",
    "latin.txt": b"caf\xe9\n",
    "surrogate.txt": b"\xed\xa0\x80\n",
    "mark.txt": b"\xef\xbb\xbfa\n<d>\n\nb\n",
    "borders.txt": b"<d>\n\n<d>\n",
    "returns.txt": b"a\r\nb\rc\n",
    "separators.txt": "a\u2028b\x85c\x1cd\n".encode(),
    "nothing.txt": b"",
    "escape.txt": b"\x1b[2J\x07\n",
    "bomb.xz": lzma.compress(ZEROS),
    "bomb.gz": gzip.compress(ZEROS, mtime=0),
    "half.xz": lzma.compress(b"a\n" * 999)[:40],
    "half.gz": gzip.compress(b"a\n" * 999, mtime=0)[:20],
    "plain.gz": b"a\nb\n",
    "bomb.txt": b"a " * 4000,
}


def write_damaged(folder: Path, rng: random.Random) -> None:
    """Store damaged copies of every structured file of a sound folder."""
    for name, load in STRUCTURED.items():
        path, out = folder / name, _stored(name)
        text = path.read_text(encoding="utf-8")
        is_yaml = name.endswith(".yaml")
        kinds: set[str] = set()
        for _ in range(CASES):
            values = yaml.safe_load(text) if is_yaml else json.loads(text)
            for _ in range(rng.randint(1, 2)):
                _damage(values, rng)
            damaged = yaml.safe_dump(values) if is_yaml else json.dumps(values)
            path.write_text(damaged, encoding="utf-8")
            try:
                load(path)
                kind = "loads"
            except UserError as error:
                kind = _kind(str(error), folder)
            if kind not in kinds and len(kinds) < MOST_FILES and len(damaged) < MOST_BYTES:
                stored = out / f"{len(kinds):02}{path.suffix}"
                stored.write_text(damaged + "\n", encoding="utf-8")
                kinds.add(kind)
        path.write_text(text, encoding="utf-8")


def _stored(name: str) -> Path:
    """The folder of the corpus for a file, without numbered files."""
    out = CORPUS / name.replace("/", "__")
    out.mkdir(parents=True, exist_ok=True)
    for path in out.glob("[0-9][0-9].*"):
        path.unlink()
    return out


def main() -> None:
    """Write the whole corpus."""
    with tempfile.TemporaryDirectory() as folder:
        write_damaged(build_sound_folder(Path(folder)), random.Random(0))
    for name, text in RECIPES.items():
        (CORPUS / "model__recipe.yaml" / f"{name}.yaml").write_text(text, encoding="utf-8")
    for target, stored in (
        ("model/model.safetensors", {f"{name}.safetensors": c for name, c in WEIGHTS.items()}),
        ("data/dev/source.offsets", {f"{name}.offsets": c for name, c in OFFSETS.items()}),
        ("text", TEXTS),
    ):
        out = _stored(target)
        for name, content in stored.items():
            (out / name).write_bytes(content)


if __name__ == "__main__":
    main()

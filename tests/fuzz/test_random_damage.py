"""Random damage to every file of a model, run or prepared folder: loaded or refused in a sentence.

360 cases in `make test`, 9,000 in `make test-all`.
"""

import gzip
import json
import lzma
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.conftest import refusal
from tests.fuzz.targets import BINARY, STRUCTURED, TEXT, containers

# The profile of `make test-all` has 100 examples for each test.
EXAMPLES = 30 if settings().max_examples < 100 else 750

NUMBERS = st.sampled_from([0, -1, 1, 2, 3, 2**31, 2**63, 10**9, 10**30, 1e308, -0.5, 1e-320])
SCALARS = st.none() | st.booleans() | NUMBERS | st.integers() | st.text(max_size=20) | st.floats()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
ANY_CASE = settings(
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def _change(values: Any, data: st.DataObject) -> None:
    """Replace, delete or add one entry of one list or object inside `values`."""
    chosen = data.draw(st.sampled_from([c for c in containers(values) if c]))
    keys = list(chosen)[:200] if isinstance(chosen, dict) else range(min(len(chosen), 200))
    key = data.draw(st.sampled_from(list(keys)))
    action = data.draw(st.sampled_from(["replace", "replace", "delete", "add"]))
    if action == "delete":
        del chosen[key]
    elif action == "add" and isinstance(chosen, dict):
        chosen[data.draw(st.text(max_size=8))] = data.draw(VALUES)
    else:
        chosen[key] = data.draw(VALUES)


@pytest.mark.parametrize("name", STRUCTURED)
@given(data=st.data())
@ANY_CASE
def test_changed_values(sound_folder: Path, folder: Path, name: str, data) -> None:
    text = (sound_folder / name).read_text(encoding="utf-8")
    values = yaml.safe_load(text) if name.endswith(".yaml") else json.loads(text)
    for _ in range(data.draw(st.integers(1, 3))):
        _change(values, data)
    dump = yaml.safe_dump if name.endswith(".yaml") else json.dumps
    (folder / name).write_text(dump(values), encoding="utf-8")
    refusal(lambda: STRUCTURED[name](folder / name))


@pytest.mark.parametrize("name", BINARY)
@given(data=st.data())
@ANY_CASE
def test_changed_bytes(sound_folder: Path, folder: Path, name: str, data) -> None:
    content = bytearray((sound_folder / name).read_bytes())
    # The first bytes hold lengths and names.
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, min(len(content), 2000) - 1))
        content[place] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    (folder / name).write_bytes(content)
    refusal(lambda: BINARY[name](folder / name))
    shutil.copy(sound_folder / name, folder / name)


LINES = st.one_of(
    st.binary(max_size=40),
    st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.sampled_from([b"", b"<d>", b"\r", b"\0", b"\xef\xbb\xbf", b"\xff", b"a" * 5000, b" "]),
    st.sampled_from([b"data:", b"  source: x", b"model: {width: 1e999}", b"- [", b"? a", b"&a *a"]),
)


@pytest.mark.parametrize("reader", TEXT)
@given(parts=st.lists(LINES, max_size=8), suffix=st.sampled_from(["", "", ".gz", ".xz"]))
@ANY_CASE
def test_any_text(tmp_path: Path, reader: str, parts: list[bytes], suffix: str) -> None:
    content = b"\n".join(parts)
    if suffix and len(parts) % 2:
        content = {".gz": gzip.compress, ".xz": lzma.compress}[suffix](content)[: len(parts) * 30]
    path = tmp_path / f"text{suffix}"
    path.write_bytes(content)
    refusal(lambda: TEXT[reader](path))

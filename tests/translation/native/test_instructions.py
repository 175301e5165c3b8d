"""The same integers from every set of instructions: VNNI, AVX-512, AVX2, SSE."""

from pathlib import Path

import pytest

from reluformer.errors import UserError
from reluformer.ops.backends.cpu.native import library
from reluformer.translation import search as torch_search
from reluformer.translation.native.model import NativeModel
from reluformer.translation.native.search import search
from reluformer.translation.search import SearchConfig
from tests.translation.native.models import random_model, random_sources

CONFIG = SearchConfig(beam=3, max_ratio=1, max_extra=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "instructions"),
    [
        pytest.param("-mno-avx512vnni -mno-avxvnni", "AVX-512", marks=pytest.mark.release),
        ("-mno-avx512f -mno-avxvnni", "AVX2"),
        pytest.param(
            "-mno-avx512f -mno-avx2 -mno-avx -mno-avxvnni", "plain", marks=pytest.mark.release
        ),
    ],
)
def test_older_processors(
    native: library.Kernels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: str,
    instructions: str,
) -> None:
    monkeypatch.setenv("CXX", f"g++ {options}")
    try:
        older = library.Kernels(library.build(tmp_path))
    except UserError as problem:
        pytest.skip(f"the compiler is for another processor: {problem}")
    model, sources = random_model(vocabulary=200, width=96, slots=200), random_sources(6)
    wanted = search(NativeModel.of(model, "int8"), sources, CONFIG)
    monkeypatch.setattr(library, "load", lambda: older)
    loaded = NativeModel.of(model, "int8")
    if loaded.library.int8_instructions().decode() != instructions:
        pytest.skip(f"this processor has no {instructions}")
    # Norms and softmax round differently with vectors of another width.
    for one, other in zip(search(loaded, sources, CONFIG), wanted, strict=True):
        assert one.tokens == other.tokens
        assert one.score == pytest.approx(other.score, abs=2e-2)
    exact = search(NativeModel.of(model), sources, CONFIG)
    for one, other in zip(exact, torch_search.search(model, sources, CONFIG), strict=True):
        assert one.tokens == other.tokens
        assert one.score == pytest.approx(other.score, abs=1e-4)

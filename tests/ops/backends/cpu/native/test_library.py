"""Building the kernels: whole or not at all, by anyone at once, refused in one sentence."""

import logging
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from reluformer.errors import UserError
from reluformer.info import info
from reluformer.ops.api import relu_attention
from reluformer.ops.backends.cpu import op
from reluformer.ops.backends.cpu.native import __main__ as command
from reluformer.ops.backends.cpu.native import available, build, library
from tests.ops.rectified import Case, arguments, check

HEADER = library._SOURCES / "problem.h"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and no memory of another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    library.load.cache_clear()
    yield tmp_path
    library.load.cache_clear()


def compiler(folder: Path, script: str) -> str:
    """A program that stands in for a compiler; $OUT is where the library should go."""
    made = folder / "compiler"
    made.write_text(f"#!/bin/sh\nfor OUT; do :; done\n{script}\n", encoding="utf-8")
    made.chmod(0o755)
    return str(made)


def test_nothing_is_built_by_use(home: Path) -> None:
    q, k, v = (torch.randn(1, 2, 20, 8) for _ in "qkv")
    wanted = relu_attention(q, k, v, impl="reference")
    torch.testing.assert_close(relu_attention(q, k, v, impl="cpu"), wanted)
    assert not available() and not list(home.iterdir())
    assert "python -m reluformer.ops.backends.cpu.native" in info()["cpu kernels"]


def test_what_is_built_is_used(
    home: Path, kernels: library.Kernels, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main() == 0
    assert str(library.path()) in capsys.readouterr().out
    assert available() and info()["cpu kernels"].startswith("compiled")
    built = library.path().stat().st_mtime_ns
    assert build() == library.path() and library.path().stat().st_mtime_ns == built
    assert [each.suffix for each in (home / "reluformer").iterdir()] == [".so"]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'x.cpp:1: error: no such thing' >&2; exit 1", "x.cpp:1: error: no such thing"),
        ("echo half > $OUT; kill -9 $$", "it says nothing"),
        ("echo half > $OUT", "cannot be built"),
    ],
)
def test_a_failed_build_leaves_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    monkeypatch.setenv("CXX", compiler(home, script))
    with pytest.raises(UserError, match=reason) as refusal:
        build()
    assert "\n" not in str(refusal.value)
    assert not list((home / "reluformer").iterdir()) and not available()


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "text"])
def test_a_damaged_library_is_ignored_and_built_again(
    home: Path,
    kernels: library.Kernels,
    damage: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", compiler(home, f"cp {kernels.file} $OUT"))
    file = build()
    code = file.read_bytes()
    middle = len(code) // 2
    file.unlink()  # This process has loaded it.
    file.write_bytes({
        "cut": code[:middle],
        "changed": code[:middle] + bytes([code[middle] ^ 1]) + code[middle + 1 :],
        "empty": b"",
        "text": b"no library",
    }[damage])  # fmt: skip
    with caplog.at_level(logging.WARNING, "reluformer"):
        assert not available()
    assert [record.getMessage().count("\n") for record in caplog.records] == [0]
    assert "is damaged" in caplog.text
    assert build() == file and library._is_intact(file)
    assert available()


@pytest.mark.parametrize("named", [None, "no-such-compiler"])
def test_without_a_compiler_one_line_says_so(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], named: str
) -> None:
    monkeypatch.setenv("PATH", str(home))
    if named:
        monkeypatch.setenv("CXX", named)
    assert command.main() == 2
    told = capsys.readouterr().err
    assert "CXX must name a C++ compiler" in told and told.count("\n") == 1


def test_many_may_build_at_once(
    home: Path, kernels: library.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler(home, f"sleep 0.5; cp {kernels.file} $OUT"))
    module = "reluformer.ops.backends.cpu.native"
    code = f"from {module} import available, build; build(); print(available())"
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(2)
    ]
    assert [each.communicate()[0].strip() for each in started] == [b"True"] * 2
    assert list((home / "reluformer").iterdir()) == [library.path()]


def test_a_library_that_does_not_load_is_told_of(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library.path().parent.mkdir()
    library.path().write_bytes(b"no library")
    with caplog.at_level(logging.WARNING, "reluformer"):
        assert not available()
    assert "not used" in caplog.text


def test_other_sources_are_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = library.path(tmp_path)
    monkeypatch.setattr(library, "_processor", lambda: "another")
    assert library.path(tmp_path) != before
    monkeypatch.undo()
    for source in library._SOURCES.rglob("*.[hc]*"):
        copy = tmp_path / source.relative_to(library._SOURCES)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(source.read_bytes())
    monkeypatch.setattr(library, "_SOURCES", tmp_path)
    assert library.path(tmp_path) == before
    (tmp_path / HEADER.name).write_text("// Other.", encoding="utf-8")
    assert library.path(tmp_path) != before


# Cases that run through every loop of the kernels: causal, ragged, windowed, row-normalised.
CASES = (
    Case("", queries=171, keys=203, width=40, value_width=72, causal=True, power=4),
    Case("", queries=37, keys=70, width=33, value_width=7, window=20, statistics=1),
    Case("", batch=2, queries=50, keys=99, key_lengths=(70, 0), row_normalise=0.1),
    Case("", queries=50, keys=139, gamma=True, threshold=(-0.4, 0.3), row_normalise=0.1),
    Case("", queries=3, keys=139, width=33, value_width=7, causal=True, gamma=True),
    Case("", batch=2, queries=50, keys=99, mask=(2, 1, 50, 99), row_normalise=0.1),
)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="options of x86 compilers")
@pytest.mark.parametrize(
    ("options", "products"),
    [
        ("-mno-avx512bf16 -mno-amx-bf16", "float32 vectors"),
        ("-mno-avx512f -mno-amx-bf16", "float32 vectors"),
        (f"-mamx-tile -mamx-bf16 -include {Path(__file__).parent / 'amx_emulator.h'}", "AMX"),
    ],
    ids=["no pairs", "no AVX-512", "AMX in software"],
)
def test_other_processors(
    home: Path, monkeypatch: pytest.MonkeyPatch, options: str, products: str
) -> None:
    monkeypatch.setenv("CXX", f"g++ {options}")
    monkeypatch.setattr(library, "_UNITS", library._UNITS[:1])
    kernels = library.Kernels(build())
    if products == "AMX" and kernels.bf16_products != "AMX":
        pytest.skip("this processor has no AVX-512 BF16")
    assert kernels.bf16_products == products
    with monkeypatch.context() as patch:
        patch.setattr(library, "load", lambda: kernels)
        for case in CASES:
            # Only the results are rounded.
            check(op.attend, arguments(case, torch.bfloat16, "cpu"), 3e-3, 6e-3)
            check(op.attend, arguments(case, torch.float32, "cpu"), 3e-6, 9e-6)

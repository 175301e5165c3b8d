"""Triton's interpreter, which other tests switch on, would turn quick runs into long ones."""

import pytest


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

"""Fixtures for tests that train."""

from typing import Any

import pytest

from reluformer.train import loop


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes training stop with an error in the given step, once."""

    def at(step: int) -> None:
        original = loop.learning_rate

        def rate(config: Any, now: int) -> float:
            if now == step:
                monkeypatch.setattr(loop, "learning_rate", original)
                raise KeyboardInterrupt
            return original(config, now)

        monkeypatch.setattr(loop, "learning_rate", rate)

    return at

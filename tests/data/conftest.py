"""One small tokenizer for all data tests."""

import pytest

from reluformer.data.synthetic import sample
from reluformer.data.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Learnt from the generated sample."""
    return Tokenizer.train((line for pair in sample.sentences(0, 3000) for line in pair), 1000)

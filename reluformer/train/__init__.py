"""Training: one resumable loop, for one process and for many."""

from reluformer.errors import Diverged
from reluformer.train.loop import Trained, train

__all__ = ["Diverged", "Trained", "train"]

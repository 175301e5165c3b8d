"""Training: one loop, resumable, the same on one process and on many."""

from reluformer.errors import Diverged
from reluformer.train.loop import Trained, train

__all__ = ["Diverged", "Trained", "train"]

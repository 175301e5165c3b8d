"""Values that depend on the step: learning rate, warm-up of the regularisers, seed."""

import hashlib
import math

from reluformer.config.train import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Learning rate of step 1, 2, ...: linear to its peak over `warmup` steps, then `schedule`.

    `inverse_sqrt` decays with the square root of the step; `cosine` reaches 0 after the last step.
    """
    if step <= config.warmup:
        return config.lr * step / config.warmup
    if config.schedule == "inverse_sqrt":
        return config.lr * math.sqrt(max(config.warmup, 1) / step)
    progress = (step - config.warmup) / (config.steps - config.warmup + 1)
    return config.lr * 0.5 * (1 + math.cos(math.pi * progress))


def regulariser_share(config: TrainConfig, step: int) -> float:
    """Factor of the regularisers' weights in step 1, 2, ...: rises linearly to 1."""
    return min(1.0, step / max(config.regulariser_warmup, 1))


def step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of all random numbers of one step on one rank.

    Random numbers are a function of the step, so a resumed run needs no stored generator state and
    may have another number of ranks.
    """
    digest = hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()
    return int.from_bytes(digest[:7])

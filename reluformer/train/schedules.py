"""What changes with the step: the learning rate, the weight of the regularisers, the seed."""

import hashlib
import math

from reluformer.config.train import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Rate of step 1, 2, ...: linear to its peak over `warmup` steps, then as `schedule` says.

    `inverse_sqrt` falls with the square root of the step; `cosine` reaches 0 after the last step.
    """
    if step <= config.warmup:
        return config.lr * step / config.warmup
    if config.schedule == "inverse_sqrt":
        return config.lr * math.sqrt(max(config.warmup, 1) / step)
    progress = (step - config.warmup) / (config.steps - config.warmup + 1)
    return config.lr * 0.5 * (1 + math.cos(math.pi * progress))


def regulariser_share(config: TrainConfig, step: int) -> float:
    """Share of the regularisers' weights that counts in step 1, 2, ...: rises linearly to 1."""
    return min(1.0, step / max(config.regulariser_warmup, 1))


def step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of everything random in one step of one process.

    Seeding anew in every step makes randomness a function of the step: a resumed run needs no
    stored generator, and may have another number of processes.
    """
    digest = hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()
    return int.from_bytes(digest[:7])

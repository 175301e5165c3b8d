"""Range checks that several configuration classes share. None, an unset field, always passes."""

import math

from reluformer.errors import UserError


def check_at_least(least: int, settings: object, *names: str) -> None:
    """Refuse fields below `least`, and infinite or NaN ones."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not least <= value < math.inf:
            raise UserError(f"{name} must be at least {least}, got {value}")


def check_above_zero(settings: object, *names: str) -> None:
    """Refuse fields that are not greater than 0."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{name} must be greater than 0, got {value}")


def check_fraction(settings: object, *names: str) -> None:
    """Refuse fields outside [0, 1)."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not 0 <= value < 1:
            raise UserError(f"{name} must be in [0, 1), got {value}")

"""Limits of the server."""

from dataclasses import dataclass

from reluformer.errors import UserError

# A body has twelve times as many bytes as characters; a worker is a thread with its own caches.
_MOST = {"characters": 10**7, "workers": 256}


@dataclass(frozen=True)
class Limits:
    """Most that one request, and all requests together, may take."""

    characters: int = 20_000
    """Characters of a document, or of all texts of a request together."""
    texts: int = 200
    """Texts of a request."""
    seconds: float = 300.0
    """Time of a translation, waiting included."""
    workers: int = 1
    """Translations that are computed at the same time."""
    queue: int = 32
    """Translations that wait."""
    body_seconds: float = 20.0
    """Time to send a request."""
    connections: int = 512
    """Open connections."""
    map_tokens: int = 256
    """Tokens of a sentence whose attention maps are shown."""

    def __post_init__(self) -> None:
        """Check the values."""
        least = {"seconds": 0.001, "body_seconds": 0.001, "queue": 0}
        for name, value in vars(self).items():
            low, high = least.get(name, 1), _MOST.get(name, 10**6)
            if not low <= value <= high:
                raise UserError(f"{name} must be from {low} to {high}, got {value}")

    @property
    def body_bytes(self) -> int:
        """Bytes of a request: any character may be escaped as 12 bytes of JSON."""
        return 12 * self.characters + 2**16

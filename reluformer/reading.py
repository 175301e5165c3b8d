"""Safe reading of small files that may come from a stranger, such as those of a model's folder.

A reader accepts regular files only, because opening a FIFO or a device may block for ever or never
end. It reads at most a limit that depends on the kind of file, and turns every failure into a
UserError of one sentence.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

from reluformer.errors import UserError

# Limits in bytes. Parsed JSON takes up to 25 times its size in memory.
SETTINGS_LIMIT = 2**20
"""Files of settings and state that a run writes once."""
JSON_LIMIT = 2**25
"""Vocabularies, manifests and descriptions."""
LOG_LIMIT = 2**28
"""Metrics, one line for each logging interval."""


def open_regular(path: Path) -> int:
    """Open a regular file, or a link to one, for reading; return the descriptor.

    Raises:
        UserError: The file cannot be opened, or is a folder, FIFO, socket or device.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise UserError(f"{str(path)!r} is not the name of a file") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        reason = "Is a directory" if stat.S_ISDIR(mode) else "it is not a regular file"
        raise UserError(f"{path} cannot be read: {reason}")
    return descriptor


def read_text(path: Path, limit: int, *, allow_pipe: bool = False) -> str:
    """Content of a regular UTF-8 file of at most `limit` bytes.

    Args:
        path: The file.
        limit: Largest number of bytes.
        allow_pipe: Also read a FIFO or a device, for files that a user names on the command line.
    """
    try:
        with open(path if allow_pipe else open_regular(path), "rb") as file:
            content = file.read(limit + 1)
        if len(content) > limit:
            raise UserError(f"{path} must have at most {limit:,} bytes")
        return content.decode("utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text") from None


def read_json(path: Path, limit: int = SETTINGS_LIMIT) -> Any:
    """Value of a regular JSON file of at most `limit` bytes."""
    return parse_json(read_text(path, limit), path)


def read_json_object(path: Path, limit: int = SETTINGS_LIMIT) -> dict[str, Any]:
    """Fields of a regular JSON file of at most `limit` bytes that holds one object."""
    value = read_json(path, limit)
    if not isinstance(value, dict):
        raise UserError(f"{path} must contain a JSON object, got {type(value).__name__}")
    return value


def parse_json(text: str | bytes, path: Path) -> Any:
    """Parse JSON; an object with a repeated key is refused, because parsers read it differently.

    Args:
        text: The text.
        path: Origin of the text, for error messages.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            raise UserError(f"{path} has an object with a repeated key")
        return values

    try:
        return json.loads(text, object_pairs_hook=unique)
    except UserError:
        raise
    except RecursionError:
        raise UserError(f"{path} is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None

"""Reading and checking of requests."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from starlette.requests import ClientDisconnect, Request

from reluformer.documents.formats import FORMATS
from reluformer.serve.jobs import Refused
from reluformer.serve.limits import Limits

# Bytes of a body that is too large that are read and dropped, so that its sender reads the answer.
_MOST_DROPPED = 2**25
_MOST_FIELDS = 1000


class Translation(NamedTuple):
    """A request for translations, checked."""

    texts: list[str]
    is_list: bool
    """Whether the client sent a list, and gets one."""
    format_name: str
    source: str
    """As the client sent it: it may be `auto`."""
    alternatives: int


async def read_fields(request: Request, limits: Limits) -> dict[str, Any]:
    """Fields of a JSON object or of a form.

    Raises:
        Refused: The body is too large, too slow, or invalid.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("application/json", "application/x-www-form-urlencoded"):
        raise Refused(415, "the content type must be application/json or a urlencoded form")
    try:
        async with asyncio.timeout(limits.body_seconds):
            body = await _read_body(request, limits.body_bytes)
    except TimeoutError:
        raise Refused(
            408, f"the request took longer than {limits.body_seconds:g} seconds"
        ) from None
    try:
        fields = json.loads(body) if kind == "application/json" else _read_form(body)
    # RecursionError: nested too deeply. ValueError: not JSON, not UTF-8, or too many fields.
    except (ValueError, RecursionError):
        raise Refused(400, f"the body is not valid as {kind}") from None
    if not isinstance(fields, dict):
        raise Refused(400, "the body must be a JSON object")
    return fields


def read_translation(
    fields: Mapping[str, Any], limits: Limits, source: str, target: str
) -> Translation:
    """Check the fields of a translation.

    Args:
        fields: Fields of the request.
        limits: Limits of the server.
        source: Code of the language that the model translates from.
        target: Code of the language that it translates into.
    """
    q = fields.get("q")
    texts = [check_text("q", text) for text in (q if isinstance(q, list) else [q])]
    if len(texts) > limits.texts:
        raise Refused(413, f"q has {len(texts)} texts; at most {limits.texts} are allowed")
    check_size(sum(map(len, texts)), limits)
    format_name = fields.get("format", "text")
    if not isinstance(format_name, str) or format_name not in FORMATS:
        raise Refused(400, f"format must be one of {', '.join(FORMATS)}")
    chosen = fields.get("source", source)
    if chosen not in (source, "auto"):
        raise Refused(400, f"source must be {source} or auto")
    if fields.get("target", target) != target:
        raise Refused(400, f"target must be {target}")
    return Translation(texts, isinstance(q, list), format_name, chosen, _alternatives(fields))


def check_text(name: str, text: Any) -> str:
    """Return a text of Unicode characters.

    Raises:
        Refused: It is missing, no string, or has lone surrogates.
    """
    if not isinstance(text, str):
        raise Refused(400, f"{name} must be a text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refused(400, f"{name} has a lone surrogate, which is not a character") from None
    return text


def check_size(characters: int, limits: Limits) -> None:
    """Raise Refused for too many characters."""
    if characters > limits.characters:
        raise Refused(
            413,
            f"the text has {characters:,} characters; at most {limits.characters:,} are allowed",
        )


def _alternatives(fields: Mapping[str, Any]) -> int:
    value = fields.get("alternatives", 0)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 4:
        value = int(value)
    # In JSON, 1.0 is a whole number, too.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 100:
        raise Refused(400, "alternatives must be a whole number from 0 to 100")
    return value


async def _read_body(request: Request, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size <= limit:
                chunks.append(chunk)
            elif size > _MOST_DROPPED:
                break
    except ClientDisconnect:
        raise Refused(400, "the client closed the connection") from None
    if size > limit:
        raise Refused(413, f"the request has more than {limit:,} bytes")
    return b"".join(chunks)


def _read_form(body: bytes) -> dict[str, Any]:
    """Fields of a form; a field that occurs several times is a list."""
    fields = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=_MOST_FIELDS)
    return {name: values if len(values) > 1 else values[0] for name, values in fields.items()}

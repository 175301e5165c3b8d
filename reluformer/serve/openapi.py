"""The OpenAPI document of the server."""

from typing import Any

from reluformer import __version__
from reluformer.documents.formats import FORMATS
from reluformer.serve.limits import Limits

_Schema = dict[str, Any]

_TEXT: _Schema = {"type": "string"}
_DETECTED: _Schema = {
    "type": "object",
    "required": ["confidence", "language"],
    "properties": {"confidence": {"type": "number"}, "language": _TEXT},
}


def openapi(limits: Limits, source: str, target: str) -> dict[str, Any]:
    """Description of all paths.

    Args:
        limits: Limits of the server, for the sizes of fields.
        source: Code of the source language.
        target: Code of the target language.
    """
    text = {"type": "string", "maxLength": limits.characters}
    translation = {
        "source": {"type": "string", "enum": [source, "auto"], "default": source},
        "target": {"type": "string", "enum": [target], "default": target},
        "format": {"type": "string", "enum": list(FORMATS), "default": "text"},
    }
    list_of_texts = {"type": "array", "items": text, "maxItems": limits.texts}
    request = {
        "q": {"oneOf": [text, list_of_texts]},
        "alternatives": {"type": "integer", "minimum": 0, "maximum": 100, "default": 0},
        # Ignored, whatever it is.
        "api_key": {},
        **translation,
    }
    events = {"schema": _TEXT}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "reluformer",
            "version": __version__,
            "description": "Translation with a ReLUFormer. /translate, /detect, /languages, "
            "/frontend/settings and /health are compatible with LibreTranslate, and take forms "
            "(urlencoded) besides JSON. Sizes are limited: "
            f"{limits.characters} characters and {limits.texts} texts a request.",
        },
        "paths": {
            "/translate": _post("Translate texts", request, ["q"], _translated()),
            "/detect": _post(
                "Name the language of a text",
                {"q": text, "api_key": {}},
                ["q"],
                {"type": "array", "items": _DETECTED},
            ),
            "/stream": _post(
                "Translate a document sentence by sentence: one JSON object a line",
                {"q": text, **translation},
                ["q"],
                {},
                {"application/x-ndjson": events},
            ),
            "/maps": _post(
                "Attention maps of a sentence and its translation",
                {"source": text, "target": text},
                ["source", "target"],
                {"type": "object", "required": ["models", "rows"]},
            ),
            "/languages": _get("Languages of the model", {"type": "array"}),
            "/frontend/settings": _get("Settings of the server", {"type": "object"}),
            "/health": _get("Whether requests are accepted", {"type": "object"}, 503),
            "/demo": _get("The demo document of the model", {"type": "object"}, 404),
            "/metrics": {
                "get": {
                    "summary": "Counters for Prometheus",
                    "responses": {
                        "200": {"description": "OK", "content": {"text/plain": {"schema": _TEXT}}}
                    },
                }
            },
        },
    }


def _translated() -> _Schema:
    texts = {"type": "array", "items": _TEXT}
    return {
        "type": "object",
        "required": ["translatedText"],
        "properties": {
            "translatedText": {"oneOf": [_TEXT, texts]},
            "detectedLanguage": {"oneOf": [_DETECTED, {"type": "array", "items": _DETECTED}]},
            "alternatives": {"type": "array"},
        },
    }


def _post(
    summary: str,
    fields: _Schema,
    required: list[str],
    answer: _Schema,
    content: dict[str, Any] | None = None,
) -> dict[str, Any]:
    body = {"type": "object", "required": required, "properties": fields}
    responses = {"200": {"description": "OK", "content": content or _json(answer)}}
    responses |= _errors(400, 408, 413, 415, 429, 503)
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": _json(body)},
            "responses": responses,
        }
    }


def _get(summary: str, answer: _Schema, *errors: int) -> dict[str, Any]:
    responses = {"200": {"description": "OK", "content": _json(answer)}, **_errors(*errors)}
    return {"get": {"summary": summary, "responses": responses}}


def _json(schema: _Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _errors(*statuses: int) -> dict[str, Any]:
    reasons = {
        400: "The request is invalid.",
        404: "There is none.",
        408: "The request was sent too slowly.",
        413: "The text is too long.",
        415: "The content type is not supported.",
        429: "Too many translations are waiting.",
        503: "The translation took too long, or the server is stopping.",
    }
    error = {"type": "object", "required": ["error"], "properties": {"error": _TEXT}}
    return {
        str(status): {"description": reasons[status], "content": _json(error)}
        for status in statuses
    }

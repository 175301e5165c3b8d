"""The web application: LibreTranslate's API, a stream of sentences, attention maps, the page."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from reluformer.errors import UserError
from reluformer.serve.guard import Guard
from reluformer.serve.jobs import Emit, Job, Jobs, Refused
from reluformer.serve.limits import Limits
from reluformer.serve.openapi import openapi
from reluformer.serve.page import ASSETS, asset
from reluformer.serve.requests import check_size, check_text, read_fields, read_translation
from reluformer.serve.service import Service

# Seconds between two looks for a client that has gone.
_POLL = 0.1

Endpoint = Callable[[Request], Awaitable[Response]]


class Application:
    """Endpoints of the server."""

    def __init__(self, service: Service, limits: Limits) -> None:
        self.service, self.limits = service, limits
        self.jobs = Jobs(limits, service.metrics)

    def routes(self) -> list[Route]:
        """All paths."""
        post: dict[str, Endpoint] = {
            "/translate": self.translate,
            "/detect": self.detect,
            "/stream": self.stream,
            "/maps": self.maps,
        }
        get: dict[str, Endpoint] = {
            "/languages": self.languages,
            "/frontend/settings": self.settings,
            "/health": self.health,
            "/metrics": self.metrics,
            "/openapi.json": self.specification,
            "/demo": self.demo,
            **dict.fromkeys(ASSETS, self.asset),
        }
        return [
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in post.items()),
            *(Route(path, endpoint, methods=["GET"]) for path, endpoint in get.items()),
        ]

    async def translate(self, request: Request) -> Response:
        """Translate a text or a list of texts."""
        fields = await read_fields(request, self.limits)
        service = self.service
        wanted = read_translation(fields, self.limits, service.source, service.target)
        texts = await self._result(request, service.translate(wanted.texts, wanted.format_name))
        answer: dict[str, Any] = {"translatedText": texts if wanted.is_list else texts[0]}
        if wanted.source == "auto":
            detected = self._detected()
            answer["detectedLanguage"] = [detected] * len(texts) if wanted.is_list else detected
        if wanted.alternatives:
            answer["alternatives"] = [[] for _ in texts] if wanted.is_list else []
        return JSONResponse(answer)

    async def detect(self, request: Request) -> Response:
        """Name the source language, the only one that this server reads."""
        fields = await read_fields(request, self.limits)
        text = check_text("q", fields.get("q"))
        check_size(len(text), self.limits)
        return JSONResponse([self._detected()])

    async def stream(self, request: Request) -> Response:
        """Translate a document; each line of the answer is one event as JSON."""
        fields = await read_fields(request, self.limits)
        service = self.service
        wanted = read_translation(fields, self.limits, service.source, service.target)
        if wanted.is_list:
            raise Refused(400, "q must be a text")
        events = self._events(request, service.stream(wanted.texts[0], wanted.format_name))
        # A full queue is answered before the stream begins.
        first = await anext(events)
        return StreamingResponse(_lines(first, events), media_type="application/x-ndjson")

    async def maps(self, request: Request) -> Response:
        """Attention maps of a sentence and its translation."""
        fields = await read_fields(request, self.limits)
        source, target = (check_text(name, fields.get(name)) for name in ("source", "target"))
        check_size(len(source) + len(target), self.limits)
        return JSONResponse(await self._result(request, self.service.maps(source, target)))

    async def languages(self, request: Request) -> Response:
        """Languages of the model."""
        return JSONResponse(self.service.languages())

    async def settings(self, request: Request) -> Response:
        """Settings that clients of LibreTranslate, and the page, ask for."""
        source, target = self.service.languages()
        return JSONResponse(
            {
                "apiKeys": False,
                "keyRequired": False,
                "charLimit": self.limits.characters,
                "filesTranslation": False,
                "frontendTimeout": 500,
                "language": {"source": source, "target": target},
                "suggestions": False,
                "supportedFilesFormat": [],
                "model": self.service.name,
                "hasDemo": self.service.demo is not None,
            }
        )

    async def health(self, request: Request) -> Response:
        """Whether requests are accepted."""
        if self.jobs.is_closing:
            raise Refused(503, "the server is stopping")
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Counters for Prometheus."""
        media_type = "text/plain; version=0.0.4"
        return PlainTextResponse(self.service.metrics.text(), media_type=media_type)

    async def specification(self, request: Request) -> Response:
        """The OpenAPI document."""
        return JSONResponse(openapi(self.limits, self.service.source, self.service.target))

    async def demo(self, request: Request) -> Response:
        """The demo document of the model."""
        if self.service.demo is None:
            raise Refused(404, "this model has no demo document")
        return JSONResponse({"text": self.service.demo.text})

    async def asset(self, request: Request) -> Response:
        """The page, its scripts and its styles."""
        content, media_type = asset(request.url.path)
        return Response(content, media_type=media_type)

    def _detected(self) -> dict[str, Any]:
        return {"confidence": 100.0, "language": self.service.source}

    async def _result(self, request: Request, work: Callable[[Emit], None]) -> Any:
        """The only result of a job."""
        async with aclosing(self._events(request, work)) as events:
            return await anext(events)

    async def _events(
        self, request: Request, work: Callable[[Emit], None]
    ) -> AsyncGenerator[Any, None]:
        """Results of a job, which is cancelled when the client closes the connection."""
        async with self.jobs.start(work) as job:
            watch = asyncio.create_task(_cancel_without_client(request, job))
            try:
                async for result in job:
                    yield result
            finally:
                watch.cancel()


async def _cancel_without_client(request: Request, job: Job) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(_POLL)
    job.cancelled.set()
    job.emit(Refused(499, "the client closed the connection"))


async def _lines(first: Any, events: AsyncGenerator[Any, None]) -> AsyncIterator[bytes]:
    """Events as lines of JSON; an error ends the stream with an event of its own."""
    yield _line(first)
    try:
        async with aclosing(events):
            async for event in events:
                yield _line(event)
    except Refused as refusal:
        yield _line({"event": "error", "status": refusal.status, "error": str(refusal)})
    except UserError as error:
        yield _line({"event": "error", "status": 400, "error": str(error)})
    except Exception:
        yield _line({"event": "error", "status": 500, "error": "an error of the server"})
        raise


def _line(event: Any) -> bytes:
    return json.dumps(event, ensure_ascii=False).encode() + b"\n"


async def _refuse(request: Request, error: Exception) -> Response:
    """Answer a request that cannot be served with {"error": REASON}."""
    headers = {}
    if isinstance(error, HTTPException):
        status, reason, headers = error.status_code, error.detail, dict(error.headers or {})
    elif isinstance(error, Refused):
        status, reason = error.status, str(error)
        headers = {"retry-after": "1"} if status in (429, 503) else {}
    else:
        status, reason = 400, str(error)
    # Unread parts of a request make the connection unusable.
    if status in (408, 413):
        headers["connection"] = "close"
    return JSONResponse({"error": reason}, status, headers)


def build_app(service: Service, limits: Limits, hosts: list[str] | None = None) -> Guard:
    """The ASGI application.

    Args:
        service: Translator and languages.
        limits: Limits of requests.
        hosts: Names of the server besides localhost; None allows any Host header.
    """
    application = Application(service, limits)
    routes = application.routes()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        # Threads end within a decoding step.
        await asyncio.to_thread(application.jobs.close)

    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers=dict.fromkeys((HTTPException, Refused, UserError), _refuse),
    )
    paths = [route.path for route in routes]
    return Guard(app, service.metrics, paths, hosts, application.jobs.cancel)

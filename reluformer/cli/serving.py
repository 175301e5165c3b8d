"""The command `serve`."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from reluformer.cli.options import Device
from reluformer.errors import UserError


def serve(
    model: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a run, a finished model or a checkpoint; default: the shipped model."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is reachable from other machines.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 5000,
    source: Annotated[str, typer.Option(help="Code of the language that is read.")] = "en",
    target: Annotated[str, typer.Option(help="Code of the language that is written.")] = "de",
    beam: Annotated[
        int | None, typer.Option(help="Beam size; 1 is greedy search. Default: as in the recipe.")
    ] = None,
    max_characters: Annotated[int, typer.Option(help="Longest document.")] = 20_000,
    max_seconds: Annotated[
        float, typer.Option(help="Longest time of a translation, waiting included.")
    ] = 300.0,
    workers: Annotated[int, typer.Option(help="Translations computed at the same time.")] = 1,
    queue: Annotated[int, typer.Option(help="Translations that may wait.")] = 32,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Another name of this server, for a proxy in front of it."),
    ] = None,
    device: Device = None,
) -> None:
    """Serve a web page and LibreTranslate's API for translation.

    Only programs on this machine reach the server, unless --host opens it to others.
    Nothing that is sent is logged or kept. Ctrl+C stops the server; translations that are being
    computed have ten seconds to finish.
    """
    try:
        import starlette
        import uvicorn
    except ImportError:
        raise UserError(
            "serve needs packages that are not installed: pip install 'reluformer[serve]'"
        ) from None
    del starlette, uvicorn
    from reluformer.files import real_path
    from reluformer.serve.app import build_app
    from reluformer.serve.limits import Limits
    from reluformer.serve.metrics import Metrics
    from reluformer.serve.run import LOOPBACK
    from reluformer.serve.run import serve as run_server
    from reluformer.serve.service import Demo, Service
    from reluformer.shipped import shipped_model
    from reluformer.translation.translator import Translator

    folder = shipped_model() if model is None else model
    limits = Limits(characters=max_characters, seconds=max_seconds, workers=workers, queue=queue)
    search: dict[str, Any] = {} if beam is None else {"beam": beam}
    translator = Translator.load(folder, device=device, **search)
    service = Service(
        translator,
        name="ReLU model" if model is None else real_path(folder).name,
        metrics=Metrics(),
        source=source,
        target=target,
        map_tokens=limits.map_tokens,
        demo=Demo.load(folder),
    )
    hosts = (allow_host or []) if host in LOOPBACK or allow_host else None
    app = build_app(service, limits, hosts)
    run_server(app, host, port, limits, lambda url: print(f"Open {url} in a browser.", flush=True))
    sys.stdout.flush()

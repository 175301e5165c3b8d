"""Load and malformed requests against `reluformer serve`: answers, latencies, memory.

    python -m benchmarks.serve_load --model runs/tour/relu --out results/serve-load.json

Many clients translate texts whose results are known, as JSON, as forms and as streams, while
others send random bytes, bodies of 10 MB, requests that are cancelled, and requests at a byte a
second. Then schemathesis, if it is installed, tests the OpenAPI document. The run fails if the
server crashes, gives a wrong answer, or grows.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx

from reluformer import Translator
from reluformer.data.synthetic import sample
from reluformer.documents.translation import Document, Pace
from reluformer.files import write_json
from reluformer.info import info

TEXTS = 24
# Megabytes that the server may grow after its warm-up: buffers of the allocator.
GROWTH = 32
SCHEMATHESIS = """
[checks]
negative_data_rejection.expected-statuses = ["400", "405", "413", "415"]
positive_data_acceptance.expected-statuses = ["2xx", "413", "429", "503"]
"""


@dataclass
class Results:
    """Counts and times of all clients."""

    seconds: list[float] = field(default_factory=list)
    first_sentence: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def expected(model: Path) -> list[dict[str, str]]:
    """Texts with their translations as a whole and as a stream."""
    translator = Translator.load(model, device="cpu")
    cases = []
    for pairs in sample.documents(7, TEXTS, (1, 4)):
        text = " ".join(english for english, _ in pairs)
        case = {"q": text}
        for name, pace in (("whole", None), ("stream", Pace())):
            document = Document(text)
            list(document.translate(translator, pace))
            case[name] = document.result()
        cases.append(case)
    return cases


async def client(
    url: str, cases: list[dict[str, str]], end: float, seed: int, out: Results
) -> None:
    """Translate until `end`, one request after the other."""
    rng = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        while time.monotonic() < end:
            case, kind = rng.choice(cases), rng.choice(("json", "form", "stream"))
            start = time.monotonic()
            if kind == "stream":
                answer, status = await stream(http, case["q"], start, out)
                wanted = case["stream"]
            else:
                body = {"data" if kind == "form" else "json": {"q": case["q"], "target": "de"}}
                response = await http.post("/translate", **body)
                status = response.status_code
                answer = response.json().get("translatedText")
                wanted = case["whole"]
            out.statuses[str(status)] += 1
            if status == 200:
                out.seconds.append(time.monotonic() - start)
                if answer != wanted:
                    out.wrong.append(f"{kind}: {case['q']!r} gave {answer!r}")


async def stream(http: Any, text: str, start: float, out: Results) -> tuple[str, int]:
    """Result and status of a streamed translation."""
    answer, has_first = "", False
    async with http.stream("POST", "/stream", json={"q": text}) as response:
        async for line in response.aiter_lines():
            event = json.loads(line)
            if event.get("event") == "sentence" and not has_first:
                out.first_sentence.append(time.monotonic() - start)
                has_first = True
            answer = event.get("text", answer)
    return answer, response.status_code


async def disturb(host: str, port: int, end: float, seed: int, out: Results) -> None:
    """Send malformed requests of all kinds until `end`."""
    rng = random.Random(seed)
    head = b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    while time.monotonic() < end:
        kind = rng.choice(("random", "large", "slow", "cancelled", "truncated"))
        out.statuses[f"sent {kind}"] += 1
        try:
            reader, writer = await asyncio.open_connection(host, port)
            if kind == "random":
                writer.write(rng.randbytes(rng.randrange(1, 5000)))
            elif kind == "large":
                writer.write(head + b"Content-Length: 10000000\r\n\r\n")
                writer.write(b"x" * 10_000_000)
                await writer.drain()
                line = await asyncio.wait_for(reader.readline(), 60)
                if b" 413 " not in line:
                    out.wrong.append(f"10 MB gave {line!r}")
            elif kind == "slow":
                for byte in (head + b"Content-Length: 9\r\n\r\n")[: rng.randrange(3, 9)]:
                    writer.write(bytes([byte]))
                    await asyncio.sleep(1)
            elif kind == "cancelled":
                body = json.dumps({"q": "It leaves at noon. " * 50}).encode()
                writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                await writer.drain()
                await asyncio.sleep(rng.random() / 2)
            else:
                writer.write(head + b'Content-Length: 99\r\n\r\n{"q": ')
            await writer.drain()
            writer.close()
        except (OSError, TimeoutError) as error:
            out.statuses[f"{kind}: {type(error).__name__}"] += 1
        await asyncio.sleep(0.05)


def resident_megabytes(pid: int) -> float:
    """Memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def load(url: str, pid: int, cases: list[dict[str, str]], options: Any) -> dict[str, Any]:
    """Run all clients; return latencies, counts and memory over time."""
    results, memory = Results(), []
    end = time.monotonic() + options.seconds
    port = int(url.rpartition(":")[2])

    async def watch() -> None:
        while time.monotonic() < end:
            memory.append(round(resident_megabytes(pid), 1))
            await asyncio.sleep(max(options.seconds / 30, 0.5))

    await asyncio.gather(
        watch(),
        *(client(url, cases, end, seed, results) for seed in range(options.clients)),
        *(disturb("127.0.0.1", port, end, seed, results) for seed in range(4)),
    )
    # Work of clients that have gone ends within a decoding step.
    await asyncio.sleep(1)
    memory.append(round(resident_megabytes(pid), 1))
    times = sorted(results.seconds)
    # The first third is the warm-up.
    settled = memory[len(memory) // 3 :]
    return {
        "clients": options.clients,
        "seconds": options.seconds,
        "translations": len(times),
        "translations_per_second": round(len(times) / options.seconds, 2),
        "p50_seconds": round(statistics.median(times), 3),
        "p95_seconds": round(times[int(0.95 * len(times))], 3),
        "most_seconds": round(times[-1], 3),
        "p50_first_sentence_seconds": round(statistics.median(results.first_sentence), 3),
        "statuses": dict(sorted(results.statuses.items())),
        "wrong_answers": results.wrong[:10],
        "memory_megabytes": memory,
        "growth_megabytes": round(settled[-1] - min(settled[: max(1, len(settled) // 4)]), 1),
    }


def schemathesis(url: str, seconds: int) -> dict[str, Any]:
    """Result of schemathesis on the OpenAPI document."""
    program = shutil.which(
        "schemathesis", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    )
    if program is None:
        return {"skipped": "schemathesis is not installed"}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "schemathesis.toml"
        config.write_text(SCHEMATHESIS)
        command = [program, "--config-file", str(config), "run", f"{url}/openapi.json"]
        command += ["--max-time", str(seconds), "--no-color", "--generation-database", "none"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    lines = [line.strip() for line in done.stdout.splitlines()]
    return {
        "exit_status": done.returncode,
        "cases": next((line for line in lines if " generated" in line), ""),
        "failures": [line[:200] for line in lines if line.startswith("- ST")],
    }


def main() -> None:
    """Start the server, run everything and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--schema-seconds", type=int, default=60)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cases = expected(options.model)
    command = [sys.executable, "-m", "reluformer", "serve", "--model", str(options.model)]
    command += ["--port", "0", "--queue", str(4 * options.clients), "--device", "cpu"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = next(word for word in server.stdout.readline().split() if word.startswith("http"))
        report = {
            "environment": info(),
            "load": asyncio.run(load(url, server.pid, cases, options)),
        }
        report["schemathesis"] = schemathesis(url, options.schema_seconds)
        case = cases[0]
        answer = httpx.post(f"{url}/translate", json={"q": case["q"]}, timeout=60).json()
        report["is_well_afterwards"] = answer == {"translatedText": case["whole"]}
        has_crashed = server.poll() is not None
    finally:
        server.terminate()
        server.wait(20)
    print(json.dumps(report["load"] | {"memory_megabytes": "..."}, indent=2))
    print(json.dumps(report["schemathesis"], indent=2))
    if options.out is not None:
        write_json(options.out, report)
    is_bad = has_crashed or report["load"]["wrong_answers"] or not report["is_well_afterwards"]
    is_large = report["load"]["growth_megabytes"] > GROWTH
    sys.exit(1 if is_bad or is_large or report["schemathesis"].get("exit_status") else 0)


if __name__ == "__main__":
    main()

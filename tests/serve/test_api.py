"""The API in the process: answers, limits, errors, nothing kept."""

import asyncio
import base64
import json
import logging
import lzma
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx2 as httpx
import pytest
from starlette.testclient import TestClient

from reluformer.errors import UserError
from reluformer.serve import run
from reluformer.serve.limits import Limits
from reluformer.serve.metrics import Metrics
from reluformer.serve.service import Demo, Service
from reluformer.serve.twin import write_twin_maps
from tests.serve.tiny import EchoTranslator, tiny_model


@pytest.fixture(scope="module")
def client(make_app) -> TestClient:
    with TestClient(make_app(), base_url="http://localhost") as client:
        yield client


def events(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_text_and_a_list_of_texts(client: TestClient) -> None:
    answer = client.post("/translate", json={"q": "One. Two!", "source": "en", "target": "de"})
    assert answer.status_code == 200 and answer.json() == {"translatedText": "ONE. TWO!"}
    answer = client.post("/translate", json={"q": ["a b", "", "c\n\nd"], "source": "auto"}).json()
    assert answer["translatedText"] == ["A B", "", "C\n\nD"]
    assert [each["language"] for each in answer["detectedLanguage"]] == ["en"] * 3
    answer = client.post("/translate", json={"q": [], "alternatives": 2}).json()
    assert answer == {"translatedText": [], "alternatives": []}


def test_forms_as_libretranslate_clients_send_them(client: TestClient) -> None:
    form = {"q": "grüße & more", "source": "en", "target": "de", "alternatives": "1"}
    assert client.post("/translate", data=form).json() == {
        "translatedText": "GRÜSSE & MORE",
        "alternatives": [],
    }
    assert client.post("/detect", data={"q": "hello"}).json() == [
        {"confidence": 100.0, "language": "en"}
    ]


def test_formats_keep_structure(client: TestClient) -> None:
    for name, text in (("html", "<p>one</p>"), ("markdown", "# one `b`"), ("srt", "1\n")):
        answer = client.post("/translate", json={"q": text, "format": name}).json()
        assert answer["translatedText"] == text.replace("one", "ONE")


def test_languages_settings_health_and_specification(client: TestClient) -> None:
    source, target = client.get("/languages").json()
    assert source == {"code": "en", "name": "English", "targets": ["de"]}
    assert target["code"] == "de"
    settings = client.get("/frontend/settings").json()
    assert settings["charLimit"] == 500 and settings["language"]["target"]["code"] == "de"
    assert client.get("/health").json() == {"status": "ok"}
    described = client.get("/openapi.json").json()["paths"]
    assert {"/translate", "/detect", "/languages", "/stream", "/maps", "/metrics"} <= set(described)
    assert client.get("/demo").status_code == 404


@pytest.mark.parametrize(
    ("fields", "status", "reason"),
    [
        ({}, 400, "q must be a text"),
        ({"q": 3}, 400, "q must be a text"),
        ({"q": ["a", None]}, 400, "q must be a text"),
        ({"q": "a", "target": "fr"}, 400, "target must be de"),
        ({"q": "a", "source": ["en"]}, 400, "source must be en or auto"),
        ({"q": "a", "format": "pdf"}, 400, "format must be one of text, markdown, html, srt"),
        ({"q": "a", "alternatives": -1}, 400, "alternatives"),
        ({"q": "a", "alternatives": True}, 400, "alternatives"),
        ({"q": "a\ud800"}, 400, "surrogate"),
        ({"q": "a" * 501}, 413, "501 characters; at most 500"),
        ({"q": ["a" * 300] * 2}, 413, "600 characters"),
        ({"q": [""] * 201}, 413, "201 texts"),
        ({"q": "a" * 200_000}, 413, "bytes"),
    ],
)
def test_invalid_translations_are_refused_in_one_sentence(
    client: TestClient, fields: dict, status: int, reason: str
) -> None:
    for path in ("/translate", "/stream"):
        answer = client.post(
            path, content=json.dumps(fields), headers={"content-type": "application/json"}
        )
        assert answer.status_code == status
        assert list(answer.json()) == ["error"] and reason in answer.json()["error"]


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"[1]", "application/json", 400),
        (b"[" * 60_000, "application/json", 400),
        (b'{"q": ' + b"9" * 6000 + b"}", "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b"\xff\xfe=1", "application/x-www-form-urlencoded", 400),
        (b"a=1&" * 3000, "application/x-www-form-urlencoded", 400),
        (b"q=a", "text/plain", 415),
        (b"q=a", "", 415),
        (b"x" * 3_000_000, "application/json", 413),
    ],
)
def test_invalid_bodies_are_refused(
    client: TestClient, content: bytes, kind: str, status: int
) -> None:
    answer = client.post("/translate", content=content, headers={"content-type": kind})
    assert answer.status_code == status and "error" in answer.json()


def test_unknown_paths_methods_and_hosts(client: TestClient, make_app) -> None:
    assert client.get("/translate").status_code == 405
    assert client.get("/../../etc/passwd").status_code == 404
    assert client.get("/nothing").json() == {"error": "Not Found"}
    with TestClient(make_app(hosts=["mine.example"]), base_url="http://localhost:5000") as strict:
        assert strict.get("/health").status_code == 200
        for host, status in (("mine.example:80", 200), ("evil.example", 421), ("[::1]:5000", 200)):
            assert strict.get("/health", headers={"host": host}).status_code == status


def test_a_stream_has_all_sentences_in_order(client: TestClient) -> None:
    text = "One here. Two here.\n\nThree *here*."
    answer = client.post("/stream", json={"q": text, "format": "markdown"})
    assert answer.headers["content-type"] == "application/x-ndjson"
    start, *sentences, done = events(answer.text)
    assert start == {"event": "start", "passages": [0, 0, 1]}
    assert [each["number"] for each in sentences] == [0, 1, 2]
    assert sentences[1] == {
        "event": "sentence",
        "number": 1,
        "source": "Two here.",
        "target": "TWO HERE.",
    }
    assert done["text"].replace("*", "") == text.upper().replace("*", "")
    assert events(client.post("/stream", json={"q": " "}).text)[-1] == {
        "event": "done",
        "text": " ",
    }


def test_maps_have_a_row_for_every_word(client: TestClient) -> None:
    fields = {"source": "the cat sat", "target": "DIE KATZE saß."}
    answer = client.post("/maps", json=fields).json()
    (model,) = answer["models"]
    (text,) = model["texts"]
    assert model["name"] == "tiny"
    assert len(answer["rows"]) == 3 and answer["rows"] == sorted(set(answer["rows"]))
    assert answer["rows"][0] == 0
    layers, heads, rows, columns = text["sites"]["cross"]["shape"]
    assert (layers, heads) == (2, 2)
    assert rows == len(text["predicted"]) == len(text["target"]) and columns == len(text["source"])
    assert text["predicted"][-1] == "<eos>" and text["target"][0] == "<bos>"
    assert client.post("/maps", json={"source": "", "target": ""}).json()["rows"] == []
    assert client.post("/maps", json={"source": "a"}).status_code == 400
    long = client.post("/maps", json={"source": "é" * 200, "target": "a"})
    assert long.status_code == 413 and "tokens" in long.json()["error"]


def test_the_twin_is_beside_for_sentences_of_the_demo(make_app) -> None:
    twin = {"name": "softmax twin", "maps": {"One here.": {"name": "One here."}}}
    with TestClient(
        make_app(demo=Demo("One here. Two.", twin)), base_url="http://localhost"
    ) as client:
        assert client.get("/demo").json() == {"text": "One here. Two."}
        for source, names in (("One here.", ["tiny", "softmax twin"]), ("Two.", ["tiny"])):
            answer = client.post("/maps", json={"source": source, "target": "x"}).json()
            assert [model["name"] for model in answer["models"]] == names


def test_the_maps_of_a_twin_are_written_beside_a_model(tmp_path: Path) -> None:
    folder, twin = (tmp_path / name for name in ("relu", "softmax"))
    tiny_model(folder)
    tiny_model(twin, kind="softmax")
    (folder / "demo.txt").write_text("The cat sat. It left.", "utf-8")
    write_twin_maps(folder, twin)
    demo = Demo.load(folder)
    assert demo.twin["name"] == "softmax twin"
    assert list(demo.twin["maps"]) == ["The cat sat.", "It left."]
    (text,) = [demo.twin["maps"]["It left."]]
    sums = text["sites"]["cross"]["row_sums"]
    assert all(abs(value - 1) < 1e-3 for layer in sums for head in layer for value in head)


def test_the_demo_of_a_folder(tmp_path) -> None:
    assert Demo.load(tmp_path) is None
    (tmp_path / "demo.txt").write_text("Hello.", "utf-8")
    assert Demo.load(tmp_path) == Demo("Hello.", {})
    site = {"shape": [1, 1, 1, 3], "scales": [[0.5]], "row_sums": [[[0.5]]], "weights": "A/B"}
    maps = {
        "name": "softmax",
        "texts": [{"sentence": "Hello.", "maps": {"sites": {"cross": site}}}],
    }
    file = tmp_path / "softmax-maps.json.xz"
    file.write_bytes(lzma.compress(json.dumps(maps).encode()))
    weights = Demo.load(tmp_path).twin["maps"]["Hello."]["sites"]["cross"]["weights"]
    assert list(memoryview(base64.b64decode(weights)).cast("h")) == [0, 32767, 8]


def test_damaged_maps_of_a_twin_are_one_error(tmp_path) -> None:
    (tmp_path / "demo.txt").write_text("Hello.", "utf-8")
    file = tmp_path / "softmax-maps.json.xz"
    site = {"shape": [1, 1, 1, 3], "weights": "AAA"}
    texts = [
        {"sentence": "Hello.", "maps": {"sites": {"cross": {**site, **changed}}}}
        for changed in ({"shape": [3]}, {"shape": [1, 1, 1, 4]}, {"weights": "A?A"}, {"weights": 3})
    ]
    documents = [{}, [], {"name": "x", "texts": 3}, *({"name": "x", "texts": [t]} for t in texts)]
    contents = [lzma.compress(json.dumps(document).encode()) for document in documents]
    bomb = lzma.compress(b" " * 2**26)
    for content in (*contents, b"", b"x", contents[0][:-5], bomb):
        file.write_bytes(content)
        with pytest.raises(UserError, match="must have a name"):
            Demo.load(tmp_path)


def test_the_page_and_its_files_need_no_other_server(client: TestClient) -> None:
    page = client.get("/")
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    for path in ("/page.css", "/page.js", "/map.css", "/map.js"):
        assert path[1:] in page.text
        answer = client.get(path)
        assert answer.status_code == 200 and "http://" not in answer.text
        assert "https://" not in answer.text


def test_metrics_count_answers_and_nothing_that_was_sent(
    make_app, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    with TestClient(make_app(), base_url="http://localhost") as client:
        client.post("/translate", json={"q": "SECRETWORD one. two."})
        client.post("/translate", json={"q": "SECRETWORD", "target": "xx"})
        client.get("/SECRETWORD")
        text = client.get("/metrics").text
    assert 'reluformer_requests_total{path="/translate",status="200"} 1' in text
    assert 'reluformer_requests_total{path="/translate",status="400"} 1' in text
    assert 'reluformer_requests_total{path="other",status="404"} 1' in text
    assert "reluformer_sentences_total 2" in text
    assert 'reluformer_request_seconds_bucket{path="/translate",le="+Inf"} 2' in text
    out = capfd.readouterr()
    # Records of the test's own client are not the server's.
    logged = "".join(
        record.getMessage() for record in caplog.records if not record.name.startswith("http")
    )
    assert "SECRETWORD" not in text + logged + out.out + out.err


def test_an_error_of_the_server_is_logged_without_text(
    make_app, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments, **options):
        raise RuntimeError("SECRETWORD")

    monkeypatch.setattr("tests.serve.tiny.EchoTranslator.lines", fail)
    with TestClient(make_app(), base_url="http://localhost") as client:
        answer = client.post("/translate", json={"q": "SECRETWORD one."})
        assert answer.status_code == 500 and "SECRETWORD" not in answer.text
        last = events(client.post("/stream", json={"q": "SECRETWORD"}).text)[-1]
        assert last["event"] == "error" and last["status"] == 500
    assert "RuntimeError in" in caplog.text and "SECRETWORD" not in caplog.text


def test_a_translation_that_takes_too_long_is_refused_and_stopped(make_app) -> None:
    with TestClient(make_app(delay=30, seconds=0.1), base_url="http://localhost") as client:
        start = time.monotonic()
        answer = client.post("/translate", json={"q": "One."})
        assert answer.status_code == 503 and "0.1 seconds" in answer.json()["error"]
        last = events(client.post("/stream", json={"q": "One."}).text)[-1]
        assert last["status"] == 503
        wait_for(lambda: "reluformer_cancelled_total 2" in client.get("/metrics").text)
        assert time.monotonic() - start < 5


def test_a_full_queue_is_refused_at_once(make_app) -> None:
    async def fire() -> list[httpx.Response]:
        app = make_app(delay=0.15, workers=1, queue=2)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            requests = [client.post("/translate", json={"q": f"Text {n}."}) for n in range(6)]
            return await asyncio.gather(*requests)

    answers = asyncio.run(fire())
    assert sorted(answer.status_code for answer in answers) == [200] * 3 + [429] * 3
    for number, answer in enumerate(answers):
        if answer.status_code == 200:
            assert answer.json() == {"translatedText": f"TEXT {number}."}
        else:
            assert answer.headers["retry-after"] == "1"


def wait_for(condition: Callable[[], bool], seconds: float = 5) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_closing_stops_running_work(make_app) -> None:
    with TestClient(make_app(delay=60), base_url="http://localhost") as client:

        def ask() -> None:
            with suppress(Exception):
                client.post("/translate", json={"q": "One."})

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        wait_for(lambda: 'reluformer_jobs{state="running"} 1' in client.get("/metrics").text)
        start = time.monotonic()
    assert time.monotonic() - start < 5


def test_invalid_limits_are_refused() -> None:
    for name in ("characters", "workers", "seconds"):
        with pytest.raises(UserError, match=name):
            Limits(**{name: 0})
        for value in (float("nan"), float("inf"), 10**20):
            with pytest.raises(UserError, match=name):
                Limits(**{name: value})
    assert Limits(queue=0).queue == 0


@pytest.mark.parametrize("code", ["", "e", "\x1b[31m", "en\n", "<b>", "../x", "a" * 100])
def test_languages_are_codes(folder: Path, code: str) -> None:
    translator = EchoTranslator.load(folder)
    Service(translator, "tiny", Metrics(), source="pt-BR", target="zh_Hans")
    for languages in ({"source": code}, {"target": code}):
        with pytest.raises(UserError, match="must be a code such as en or pt-BR, got"):
            Service(translator, "tiny", Metrics(), **languages)


def test_an_interruption_before_the_first_request_stops_the_server(
    make_app, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run.uvicorn, "Config", interrupt)
    addresses: list[str] = []
    run.serve(make_app(), "127.0.0.1", 0, Limits(), addresses.append)
    assert len(addresses) == 1 and capsys.readouterr().err == "reluformer: stopped\n"

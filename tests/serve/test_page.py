"""The page in a real browser: Debian's Chromium, driven by Playwright.

The tests are skipped where Chromium is not installed (`apt-get install chromium`). With the
environment variable RELUFORMER_SCREENSHOTS set to a folder, screenshots are written there.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.serve.processes import Server, upper_case_server

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("serve"),
    pytest.mark.skipif(
        CHROMIUM is None,
        reason="the page is NOT tested: Chromium is not installed (apt-get install chromium)",
    ),
]

FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
TEXT = "The committee met on Tuesday. It has approved the report.\n\nThe next meeting is in May."


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser, server: Server) -> Iterator[Callable[..., Page]]:
    """Opens the page; at the end there must have been no error in it, and no request elsewhere."""
    contexts, problems = [], []

    def open_(url: str = server.url, **settings) -> Page:
        context = browser.new_context(permissions=["clipboard-read", "clipboard-write"], **settings)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "request", lambda r: r.url.startswith((url, "data:", "blob:")) or problems.append(r.url)
        )
        page.goto(url)
        expect(page.locator("#model")).to_have_text("tiny")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert not problems


def translate(page: Page, text: str) -> None:
    page.fill("#source", text)
    page.click("#translate")


def screenshot(page: Page, name: str) -> None:
    if folder := os.environ.get("RELUFORMER_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def test_a_document_is_translated_sentence_by_sentence(open_page) -> None:
    page = open_page()
    translate(page, TEXT)
    expect(page.locator("#status")).to_contain_text("3 sentences in")
    assert page.locator("#target p").all_inner_texts() == TEXT.upper().split("\n\n")
    page.click("#copy")
    expect(page.locator("#status")).to_have_text("Copied.")
    assert page.evaluate("navigator.clipboard.readText()") == TEXT.upper()
    with page.expect_download() as info:
        page.click("#download")
    assert info.value.suggested_filename == "translation.de.txt"
    assert Path(info.value.path()).read_text("utf-8") == TEXT.upper()


def test_a_dropped_file_keeps_its_structure(open_page) -> None:
    page = open_page()
    content = "# A title\\n\\n`code` stays\\n"
    page.evaluate(
        f"""() => {{
        const data = new DataTransfer();
        data.items.add(new File(["{content}"], "notes.md"));
        document.dispatchEvent(new DragEvent("drop", {{ dataTransfer: data, cancelable: true }}));
    }}"""
    )
    expect(page.locator("#format")).to_have_value("markdown")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#status")).to_contain_text("2 sentences in")
    with page.expect_download() as info:
        page.click("#download")
    assert info.value.suggested_filename == "notes.de.md"
    written = Path(info.value.path()).read_text("utf-8")
    assert written.startswith("# A TITLE\n\n") and "`code`" in written


def test_hovering_a_word_shows_what_it_reads(open_page) -> None:
    page = open_page(viewport={"width": 1200, "height": 900})
    translate(page, TEXT)
    expect(page.locator("#status")).to_contain_text("3 sentences in")
    page.locator(".word", has_text="COMMITTEE").hover()
    facts = page.locator("#map .facts")
    expect(facts).to_contain_text("row sum")
    expect(facts).to_contain_text("exact zeros")
    assert page.locator("#map .keys .zero").count() > 0
    assert page.locator("#map .queries .chosen").count() == 1
    first = facts.inner_text()
    # Another layer, head and attention; the choice stays for the next sentence.
    boxes = [
        page.locator(f"#map label:has-text('{n}') select") for n in ("layer", "head", "attention")
    ]
    layer, head, site = boxes
    layer.select_option(index=0)
    head.select_option(index=1)
    assert facts.inner_text() != first
    screenshot(page, "serve")
    page.locator(".word", has_text="APPROVED").hover()
    expect(page.locator(".sentence.chosen")).to_have_text("IT HAS APPROVED THE REPORT.")
    expect(layer).to_have_value("0")
    expect(head).to_have_value("1")
    site.select_option(index=0)
    expect(page.locator("#map .side").first).to_contain_text("source tokens")


def test_words_are_reached_with_the_keyboard(open_page) -> None:
    page = open_page()
    translate(page, TEXT)
    expect(page.locator("#status")).to_contain_text("3 sentences in")
    page.focus("#download")
    page.keyboard.press("Tab")
    expect(page.locator(".word:focus")).to_have_text("THE")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".word:focus")).to_have_text("COMMITTEE")
    expect(page.locator("#map .facts")).to_contain_text("row sum")
    page.keyboard.press("End")
    expect(page.locator(".word:focus")).to_have_text("MAY.")


def test_a_translation_can_be_cancelled(open_page, server: Server) -> None:
    page = open_page()
    translate(page, "One here. " * 190)
    expect(page.locator("#target .sentence").first).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_contain_text("Cancelled.")
    expect(page.locator("#translate")).to_be_enabled()
    expect(page.locator("#cancel")).to_be_hidden()
    translate(page, "Again.")
    expect(page.locator("#target")).to_have_text("AGAIN.")


def test_a_text_that_is_too_large_is_refused(open_page) -> None:
    page = open_page()
    translate(page, "x" * 2001)
    expect(page.locator("#status")).to_have_text(
        "The text has 2,001 characters; at most 2,000 are allowed."
    )
    expect(page.locator("#count")).to_have_class("over")
    # A page that is older than the server's limit gets the server's answer.
    page.route("**/stream", lambda route: route.fulfill(status=413, json={"error": "too long"}))
    translate(page, "Short.")
    expect(page.locator("#status")).to_have_text("Not translated: too long.")


def test_markup_in_a_text_is_shown_as_text(open_page) -> None:
    page = open_page()
    translate(page, "Look: <img src=x onerror=alert(1)> <script>alert(2)</script> here.")
    expect(page.locator("#status")).to_contain_text("1 sentences in")
    assert page.locator("#target img, #target script").count() == 0
    page.locator(".word").last.hover()
    expect(page.locator("#map .facts")).to_contain_text("row sum")


def test_a_server_that_is_restarted_in_the_middle(open_page, folder: Path) -> None:
    with upper_case_server(folder, delay=0.3) as first:
        page = open_page(first.url)
        translate(page, "One is here now. " * 60)
        expect(page.locator("#target .sentence").first).to_be_visible()
        first.stop()
        expect(page.locator("#status")).to_contain_text("The connection to the server was lost.")
        with upper_case_server(folder, port=first.port):
            page.click("#translate")
            expect(page.locator("#status")).to_contain_text("60 sentences in")


def colours(page: Page) -> tuple[str, str]:
    script = "getComputedStyle(document.body)"
    return page.evaluate(f"[{script}.backgroundColor, {script}.color]")


def test_dark_mode(open_page) -> None:
    light, dark = (open_page(color_scheme=scheme) for scheme in ("light", "dark"))
    assert colours(light) == ["rgb(244, 246, 248)", "rgb(27, 31, 36)"]
    assert colours(dark) == ["rgb(18, 22, 27)", "rgb(230, 233, 238)"]
    translate(dark, TEXT)
    dark.locator(".word", has_text="REPORT").hover()
    expect(dark.locator("#map .facts")).to_contain_text("row sum")
    screenshot(dark, "serve-dark")


def test_a_phone_has_no_horizontal_scroll(open_page) -> None:
    page = open_page(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    translate(page, TEXT + " " + "x" * 200)
    expect(page.locator("#status")).to_contain_text("sentences in")
    page.locator(".word", has_text="COMMITTEE").tap()
    expect(page.locator("#map .facts")).to_contain_text("row sum")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    boxes = [page.locator(name).bounding_box() for name in ("#source", "#target", "#map")]
    assert boxes[0]["y"] < boxes[1]["y"] < boxes[2]["y"]
    screenshot(page, "serve-phone")


def test_the_demo_of_the_shipped_model_has_its_twin_beside(browser: Browser) -> None:
    server = Server("-m", "reluformer", "serve", "--port", 0)
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.set_default_timeout(30_000)
    try:
        page.goto(server.url)
        page.click("#demo")
        expect(page.locator("#status")).to_contain_text("16 sentences in", timeout=60_000)
        page.locator(".word").nth(20).hover()
        expect(page.locator("#map h4")).to_have_text(["ReLU model", "softmax twin"])
        relu, twin = page.locator("#map .panel").all()
        # Both read the same translation.
        assert relu.locator(".queries").inner_text() == twin.locator(".queries").inner_text()
        expect(twin.locator(".facts")).to_contain_text("row sum 1.000, exact zeros 0 of")
        zeros = {"relu": 0, "twin": 0}
        for head in range(8):
            page.locator("#map label:has-text('head') select").select_option(index=head)
            for name, panel in (("relu", relu), ("twin", twin)):
                zeros[name] += panel.locator(".keys .zero").count()
        assert zeros["relu"] > 0 == zeros["twin"]
        screenshot(page, "serve-shipped")
    finally:
        page.close()
        server.stop()

"""Formats of documents: structure is kept, only text is translated, nothing is dropped."""

import html
import random
import re
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from reluformer.documents.formats import FORMATS, format_by_name, parse
from reluformer.documents.html import tokenize
from reluformer.documents.passage import Passage, join_parts
from reluformer.documents.projection import project
from reluformer.errors import UserError
from reluformer.translation.alignment import find_words

ROOT = Path(__file__).parents[2]
PAGE = """<!doctype html><html lang="en"><head><title>My title</title><style>p { a: b }</style>
</head><body><!-- a comment --><p>Hello <b>big <i>world</i></b>, see <a href='x>y'>here</a>.</p>
<pre>kept as it is</pre><p>A &lt; B &amp; C: <code>f(x)</code> is fine <img src=x> today.<br>Second.
<p translate="no">Also kept<p>Last <unclosed>one</body></html>
"""
SUBTITLES = (
    "1\n00:00:01,000 --> 00:00:02,000\n<i>Hello there,</i>\nmy friend.\n\n"
    "2\r\n00:00:03,000 --> 00:00:04,000\r\n{\\an8}- Yes.\r\n- No 7!\r\n"
)
NOTES = """---
title: kept
---
# A *short* title &amp; more

See [a **bold** page](http://x.y 'T'), [ref], [text][ref], ![an image](u.png), `` a`b `` and
<b>tags</b> or <http://a.b>\\
after a break \\* here.

| name | value |
|------|------:|
| one  | `two` |

> a quotation
> of two lines

1. first
   1. nested
- [ ] a task

```py
code = "kept"
```

[ref]: http://z.example
"""


def texts(document: str, name: str) -> list[str]:
    return [part.text for part in parse(document, name) if isinstance(part, Passage)]


def rewrite(document: str, name: str, change=lambda text: text) -> str:
    """Translate every passage by a function that keeps the number of words."""
    parts = parse(document, name)
    passages = [part for part in parts if isinstance(part, Passage)]
    finished = [project(p, change(p.text), range(len(find_words(p.text)))) for p in passages]
    return join_parts(parts, finished)


def test_html_text_is_found_and_everything_else_is_kept() -> None:
    assert texts(PAGE, "html") == [
        "My title",
        "Hello big world, see here.",
        "A < B & C: f(x) is fine today.",
        "Second.",
        "Also kept",
        "Last",
        "one",
    ]
    loud = rewrite(PAGE, "html", str.upper)
    assert "<p>HELLO <b>BIG <i>WORLD</i></b>, SEE <a href='x>y'>HERE</a>.</p>" in loud
    assert "A &lt; B &amp; C: <code>f(x)</code> IS FINE <img src=x> TODAY.<br>SECOND." in loud
    assert "<pre>kept as it is</pre>" in loud and "p { a: b }" in loud
    assert "<!-- a comment -->" in loud
    assert rewrite(PAGE, "html") == PAGE


def test_closed_elements_that_must_not_be_translated_are_kept() -> None:
    page = '<div class="x notranslate">a <b>b</b></div><p>c <span translate=no>d e</span> f</p>'
    assert texts(page, "html") == ["c d e f"]
    assert rewrite(page, "html", str.upper) == page.replace(">c ", ">C ").replace("> f", "> F")


def test_marks_inside_words_stay_inside_copied_words() -> None:
    page = "<p>Water is H<sub>2</sub>O, not <b>H</b><i>2</i>.</p>"
    assert rewrite(page, "html") == page
    (passage,) = (part for part in parse(page, "html") if isinstance(part, Passage))
    order = [4, 2, 0, 0, 0, 5, 6]
    written = project(passage, "nicht H2O Wasser ist das H2 .", order)
    assert written == "nicht H<sub>2</sub>O Wasser ist das <b>H</b><i>2</i> ."


def test_marks_that_come_together_stay_apart() -> None:
    (passage,) = (
        p for p in parse("See `a b` or `c d` *now*.", "markdown") if isinstance(p, Passage)
    )
    now = len(find_words(passage.text)) - 2
    written = project(passage, ". x y z", [now, now, now, 0])
    assert "*x y*" in written
    for target in ("", "z", "z z", ". x y z"):
        for word in range(now + 2):
            written = project(passage, target, [word] * len(find_words(target)))
            assert "`a b`" in written and "`c d`" in written and "``" not in written


def test_subtitles_keep_numbers_times_tags_and_lines() -> None:
    assert texts(SUBTITLES, "srt") == ["Hello there, my friend.", "Yes.", "No 7!"]
    loud = rewrite(SUBTITLES, "srt", str.upper)
    assert loud == (
        "1\n00:00:01,000 --> 00:00:02,000\n<i>HELLO THERE,</i>\nMY FRIEND.\n\n"
        "2\r\n00:00:03,000 --> 00:00:04,000\r\n{\\an8}- YES.\r\n- NO 7!\r\n"
    )


def test_markdown_keeps_code_addresses_and_structure() -> None:
    loud = rewrite(NOTES, "markdown", str.upper)
    for kept in ("title: kept", 'code = "kept"', "(http://x.y 'T')", "![an image](u.png)"):
        assert kept in loud
    for kept in ("`` a`b ``", "<http://a.b>", "[ref]: http://z.example", "|------|------:|"):
        assert kept in loud
    assert "# A *SHORT* TITLE & MORE" in loud
    assert "[A **BOLD** PAGE]" in loud and "[REF][REF]" in loud and "[TEXT][ref]" in loud
    assert "| ONE  | `two` |" in loud and "\n   1. NESTED\n- [ ] A TASK\n" in loud


def rendered(document: str) -> str:
    page = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(document)
    return re.sub(r"\s+", " ", page)


@pytest.mark.parametrize(
    "page", ["README.md", "docs/kernels.md", "docs/log.md", "docs/quick-start.md"]
)
def test_markdown_of_this_repository_renders_the_same(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    assert rendered(rewrite(text, "markdown")) == rendered(text)
    found = sum(map(len, texts(text, "markdown")))
    assert found > 0.3 * len(text)


@pytest.mark.parametrize("page", ["README.md", "docs/security.md", "docs/log.md"])
def test_markdown_keeps_its_structure_whatever_the_model_writes(page: str) -> None:
    text, rng = (ROOT / page).read_text("utf-8"), random.Random(page)
    words = ["Haus", "und", ".", "24.", "(ein)", "Straße,", "x_y", "2*3", "–", "#", "1."]
    parts = parse(text, "markdown")
    written = []
    for passage in (part for part in parts if isinstance(part, Passage)):
        target = " ".join(rng.choices(words, k=rng.randrange(1, 25)))
        count = len(find_words(passage.text))
        written.append(project(passage, target, [rng.randrange(count) for _ in find_words(target)]))

    def tags(document: str) -> Counter[str]:
        # Emphasis of punctuation alone is left out.
        return Counter(re.findall(r"<(?!em|strong)[a-z0-9]+", rendered(document)))

    assert tags(join_parts(parts, written)) == tags(text)


PIECES = st.lists(
    st.sampled_from(
        [
            "word",
            "Two words. ",
            "$$",
            ":::",
            "{#x}",
            "😀",
            "![i](j)",
            "*",
            "**",
            "_",
            "`",
            "``",
            "[",
            "]",
            "](x)",
            "][",
            "!",
            "<b>",
            "</b>",
        ]
        + [
            "<",
            ">",
            "\\",
            "\n",
            "\n\n",
            "  \n",
            "# ",
            "> ",
            "- ",
            "1. ",
            "    ",
            "|",
            "|-|-|",
            "&amp;",
        ]
        + [
            "[r]: x\n",
            "~~",
            "http://x.y",
            "\t",
            "---",
            "```",
            "<!--",
            "-->",
            "\r\n",
            "é",
            "<a href='",
        ]
        + ["<pre>", "</pre>", "<p>", "<code>", "</code>", "<i>", "</i>", "a ", "\u00a0", "\ufeff"]
    ),
    max_size=24,
).map("".join)


@given(PIECES)
@settings(max_examples=100)
def test_any_markdown_renders_the_same_after_an_identical_translation(text: str) -> None:
    # A blank may move to the other side of a tag.
    pages = (html.unescape(rendered(page)) for page in (rewrite(text, "markdown"), text))
    again, page = (re.sub(r"\s*(<[^<>]*>)\s*", r"\1", each) for each in pages)
    assert again == page


@given(PIECES)
@settings(max_examples=100)
def test_html_keeps_all_tags_and_words(text: str) -> None:
    assert "".join(token.literal for token in tokenize(text)) == text
    again = rewrite(text, "html")
    kept = [t.literal for t in tokenize(text) if t.kind != "text"]
    assert [t.literal for t in tokenize(again) if t.kind != "text"] == kept

    def words(page: str) -> list[str]:
        shown = (html.unescape(t.literal) for t in tokenize(page) if t.kind == "text")
        return "".join(shown).split()

    assert "".join(words(again)) == "".join(words(text))


@given(PIECES, st.sampled_from(["text", "srt"]))
@settings(max_examples=100)
def test_text_and_subtitles_keep_all_words(text: str, name: str) -> None:
    text = f"1\n00:00:01,000 --> 00:00:02,000\n{text}"
    assert "".join(rewrite(text, name).split()) == "".join(text.split())


@given(PIECES, st.sampled_from(sorted(FORMATS)), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_marks_survive_any_translation_and_any_alignment(
    text: str, name: str, rng: random.Random
) -> None:
    for part in parse(text, name):
        if isinstance(part, Passage):
            assert part.text == " ".join(part.text.split())
            target = " ".join(rng.choices(["Wort", "und", ".", "Haus"], k=rng.randrange(6)))
            source_words = len(find_words(part.text))
            alignment = [rng.randrange(source_words) for _ in find_words(target)]
            result = project(part, target, alignment)
            for mark in part.marks:
                # Emphasis of nothing is left out.
                if mark.opening == mark.closing:
                    continue
                for literal in (mark.opening, mark.closing):
                    assert "".join(literal.split()) in "".join(result.split())


def test_wrapped_paragraphs_are_wrapped_again() -> None:
    text = (
        "  A title\n\n  This paragraph was wrapped by an editor, so that\n"
        "  its lines are one passage. It ends in the third of\n  them.\n"
    )
    assert texts(text, "text")[1].startswith("This paragraph was wrapped by an editor, so that its")
    assert rewrite(text, "text") == text
    text = "Dear all,\nthe meeting is at noon today, and it takes an hour.\nBest\n"
    assert len(texts(text, "text")) == 3
    assert texts("* one\n2) two\n[x] three\n", "text") == ["one", "two", "three"]


@pytest.mark.parametrize("name", FORMATS)
def test_hostile_documents_take_linear_time(name: str) -> None:
    start = time.process_time()
    for piece in (
        "<a ",
        "<!--",
        "<code>",
        "</b>",
        "<b>",
        "[",
        "](",
        "*a ",
        "`",
        "> ",
        "- ",
        "|a",
        "a@",
        "😀 a ",
    ):
        document = "1\n00:00:01,000 --> 00:00:02,000\n" + piece * (8_000 // len(piece))
        rewrite(document, name)
    assert time.process_time() - start < 20


def test_elements_nested_too_deeply_are_kept() -> None:
    page = "<p>one</p><p>" + "<b>" * 3000 + "deep" + "</b>" * 3000 + "</p>"
    assert rewrite(page, "html", str.upper) == page.replace("one", "ONE")
    assert texts("<i>" * 60 + "deep" + "</i>" * 60, "html") == ["deep"]
    rewrite("*" * 3000 + "a" + "*" * 3000, "markdown")
    rewrite("> " * 3000 + "a", "markdown")


def test_formats_are_known_by_their_endings() -> None:
    assert format_by_name(Path("a/b.MD")) == "markdown"
    assert format_by_name(Path("talk.en")) is None
    with pytest.raises(
        UserError, match="format must be one of text, markdown, html, srt, got 'pdf'"
    ):
        parse("", "pdf")


def test_a_byte_order_mark_stays_and_hides_no_structure() -> None:
    document = "\ufeff# The costs\n\n- one\n"
    assert texts(document, "markdown") == ["The costs", "one"]
    assert rewrite(document, "markdown") == document
    for name in FORMATS:
        assert rewrite("\ufeffOne sentence.\n", name) == "\ufeffOne sentence.\n"


def test_brackets_in_a_translation_do_not_end_a_link() -> None:
    document = "See [the big page](http://x.y) now.\n"
    changed = rewrite(document, "markdown", lambda text: text.replace("big", "]"))
    assert rendered(changed).count("<a href") == 1 and ">the ] page</a>" in rendered(changed)


@pytest.mark.parametrize(
    "kept",
    ["[^1]", "[^a_b_c]", "[[the page]]", "{{ a field }}", "$x^2 + y$", "$$a = b$$"],
)
def test_what_is_no_text_in_markdown_is_kept(kept: str) -> None:
    document = f"It costs $5 or CA$7, as {kept} says.\n\n[^1]: A *note* that explains.\n"
    changed = rewrite(document, "markdown", str.upper)
    assert kept in changed and "[^1]: A *NOTE* THAT EXPLAINS." in changed
    assert "COSTS $5 OR CA$7, AS" in changed.replace("\\", "")


def test_markup_inside_of_what_is_no_text_leaves_the_block_as_it_is() -> None:
    document = "As $a *b* c$ says.\n"
    assert texts(document, "markdown") == []
    assert texts("As `$a` and $5 say.\n", "markdown") == ["As $a and $5 say."]


def test_the_kind_of_a_note_keeps_its_line() -> None:
    document = "> [!NOTE]\n> This is important.\n"
    assert rewrite(document, "markdown") == document
    assert texts(document, "markdown") == ["This is important."]


@pytest.mark.parametrize("name", ["a.vtt", "a.DOCX", "a.srt.gz", "a.md.xz"])
def test_files_that_would_lose_their_structure_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="not read; convert it|must not be compressed"):
        format_by_name(Path(name))
    assert format_by_name(Path("talk.en.gz")) is None


def test_kept_content_touches_no_word_that_it_does_not_touch_in_the_original() -> None:
    (passage,) = (
        p for p in parse("See http://x.y now, `a`s.", "markdown") if isinstance(p, Passage)
    )
    address, code = (len(find_words(passage.text[: mark.start])) for mark in passage.marks)
    # The model writes the address into the word before it, and nothing for the code.
    alignment = [0, address, address, address, code - 2, len(find_words(passage.text)) - 1]
    assert project(passage, "Siehe:b c nun.", alignment) == "Siehe http://x.y nun `a`."
    for document in (
        "See ![i](j). ![i](j)x go.",
        "(`a`)s, `b`-c",
        "*One ![i](j)* two.",
        "a <b></b> c",
    ):
        assert rewrite(document, "markdown") == document


def test_an_element_around_a_word_is_not_put_around_a_full_stop() -> None:
    (passage,) = (p for p in parse("is <b>water</b>.", "html") if p)
    assert isinstance(passage, Passage)
    assert project(passage, "ist Wasser.", [0, 2, 1]) == "ist <b>Wasser</b>."


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kept", ["😀", "👩‍👧", "1️⃣", "♪", "→", "https://x.y/?a=1&amp;b=2"])
def test_pictures_and_addresses_are_kept(name: str, kept: str) -> None:
    document = f"{kept} One & two {kept} three {kept}."
    if name == "srt":
        document = f"1\n00:00:01,000 --> 00:00:02,000\n{document}"
    assert rewrite(document, name).replace("&amp;", "&") == document.replace("&amp;", "&")
    found = " ".join(texts(document, name))
    assert "One" in found and (kept not in found or kept.startswith("http"))


def test_references_around_an_address_are_text() -> None:
    page = "<p>See &quot;https://x.y/a&quot;, &lt;b&gt;.</p>"
    assert texts(page, "html") == ['See "https://x.y/a", <b>.']


def test_white_space_at_the_start_of_markup_stays_there() -> None:
    for document in ("<b>      one</b> two\n", "<i></i>     one\n", "<b>\none</b>\n"):
        assert rendered(rewrite(document, "markdown")) == rendered(document)


@pytest.mark.parametrize(
    ("document", "found"),
    [
        ("We write\n$$\nx_1 = \\{y\\}\n$$\nhere.\n", ["We write", "here."]),
        ("> A sum $$\n> x\n> $$ in it.\n", ["A sum in it."]),
        (":::note\nOne line\nand more.\n:::\n", ["One line and more."]),
        ('!!! note "Kept"\n    A text.\n', ["A text."]),
        ("A term\n:   Its meaning.\n", ["A term", "Its meaning."]),
        ("# Title {#name}\n\nText.\n{: .wide}\n", ["Title", "Text."]),
        ("{% include x %}\n\nOn :smile: we go at 10:30:15.\n", ["On we go at 10:30:15."]),
        ("[^1]:\n    A note.\n", ["A note."]),
        ("+++\ntitle = 'x'\n+++\nText.\n", ["Text."]),
        ("See [one](x\r\n'title') here.\r\n", ["See one here."]),
    ],
)
def test_extensions_of_markdown_are_kept(document: str, found: list[str]) -> None:
    assert texts(document, "markdown") == found
    again = rewrite(document, "markdown")
    assert rendered(again) == rendered(document)
    own_lines = re.compile(r"(?m)^(?:\$\$|:::|!!! |:  |\{|\+\+\+|\[\^1\]:$).*$")
    assert own_lines.findall(again) == own_lines.findall(document)


def test_kept_content_has_the_line_ends_of_the_document() -> None:
    document = "> See [one](x\r\n> 'title') here.\r\n"
    assert "[one](x\r\n> 'title')" in rewrite(document, "markdown")


def test_a_number_before_kept_content_does_not_become_a_list() -> None:
    document = "This costs as much as the one of two, and that is as much as of\nseven 1. `code`\n"
    longer = rewrite(document, "markdown", lambda text: text.replace("seven", "s" * 61))
    assert rendered(longer).count("<li>") == 0


def test_unusual_subtitles() -> None:
    document = (
        "1\n00:01 --> 00:02,5\n<i>- Who is it?</i>\n- Me.\n"
        "2\n100:00:01.5 --> 100:00:02.5\n♪ A song\n\n"
    )
    assert texts(document, "srt") == ["Who is it?", "Me.", "A song"]
    assert rewrite(document, "srt") == document


def test_text_in_a_picture_is_not_read() -> None:
    assert texts("<p>A <svg><title>Icon</title></svg> word</p>", "html") == ["A word"]

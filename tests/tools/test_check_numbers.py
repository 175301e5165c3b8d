"""The checker of printed numbers accepts correct pages and rejects each kind of mistake."""

import json
from pathlib import Path

import pytest

from tools.check_numbers import check_page, evaluate, main, split_blocks

RESULTS = {
    "speed": 1.7706,
    "share": 0.3351,
    "gap": -0.4212,
    "tokens per second": 412033.2,
    "note": "learning rate 0.002",
    "parts": {"sentence relu": {"tflops": 148.442}, "v1.5": {"tflops": 9.0}},
    "rows": [
        {"n": 1024, "name": "relu", "causal": False, "ms": 0.5},
        {"n": 1024, "name": "cudnn, deterministic", "causal": False, "ms": 0.75},
        {"n": 4096, "name": "relu", "causal": True, "ms": 3.0},
    ],
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.json").write_text(json.dumps(RESULTS))
    (tmp_path / "results" / "b.json").write_text(json.dumps({"other": 6.25}))
    return tmp_path


def problems(text: str, root: Path) -> list[str]:
    return check_page(text, root)[1]


@pytest.mark.parametrize(
    "number",
    [
        "1.77",
        "1.8",
        "1.771",
        "33.5 %",
        "33.51%",
        "0.34",
        "412.0 k",
        "0.42",
        "-0.42",
        "\u22120.4",
        "0.002",
    ],
)
def test_a_number_of_the_cited_file_is_accepted(number, root):
    checked, messages = check_page(f"The result is {number} (results/a.json).", root)
    assert (checked, messages) == (1, [])


@pytest.mark.parametrize("number", ["1.78", "1.772", "33.5", "33.6 %", "412.0", "+0.42", "2.9e-3"])
def test_a_number_that_the_cited_file_lacks_is_reported_with_its_line(number, root):
    text = f"Raw: results/a.json.\nThe result is {number}."
    assert problems(text, root) == [f"2: {number.split()[0]} is not in results/a.json"]


@pytest.mark.parametrize(
    "text",
    [
        "no citation: 9.99",
        "[raw](../results/a.json), torch 2.11.0, cuDNN 9.19, `9.99`, [l](p-9.99.html), 17",
        "```\nresults/a.json 9.99\n```",
        "results/a.json\n\n# Next section\n\n| 9.99 |\n|---|",
        "results/a.json\n\nA paragraph after it: 9.99.",
        "results/a.json: 9.99 and 1.77 <!-- not in results: 9.99 -->",
    ],
)
def test_numbers_outside_a_citation_are_not_checked(text, root):
    assert problems(text, root) == []


def test_a_citation_covers_the_tables_up_to_the_next_citation(root):
    text = "results/a.json\n\n| 1.77 |\n\nText.\n\n| 6.25 |\n\nresults/b.json\n\n| 6.25 |\n| 1.77 |"
    assert problems(text, root) == [
        "7: 6.25 is not in results/a.json",
        "12: 1.77 is not in results/b.json",
    ]


def test_a_block_may_cite_several_files(root):
    assert problems("results/a.json, results/b.json: 6.25 and 1.77", root) == []


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("speed", 1.7706),
        ("parts.sentence relu.tflops", 148.442),
        ('parts."v1.5".tflops', 9.0),
        ("rows[0].ms", 0.5),
        ("rows[n=1024, name=relu].ms", 0.5),
        ("rows[name=cudnn, deterministic].ms", 0.75),
        ("rows[causal=true].ms", 3.0),
        ("rows[n=1024, name=cudnn, deterministic].ms / rows[n=1024, name=relu].ms", 1.5),
        ("share * 100", 33.51),
        ("rows[0].ms + rows[1].ms - 1", 0.25),
        ("max(rows[*].ms)", 3.0),
        ("min(rows[n=1024].ms)", 0.5),
        ("mean(rows[n=1024].ms)", 0.625),
        ("median(rows[*].ms)", 0.75),
    ],
)
def test_expressions(expression, value):
    assert evaluate(expression, RESULTS) == pytest.approx(value)


@pytest.mark.parametrize(
    "expression", ["absent", "rows[n=1024].ms", "rows[n=7].ms", "note", "rows"]
)
def test_a_path_must_select_one_number(expression):
    with pytest.raises(ValueError, match="selects"):
        evaluate(expression, RESULTS)


def test_a_comment_checks_a_derived_number_and_integers(root):
    comment = "<!-- results/a.json: rows[1].ms / rows[0].ms = 1.5;\n share * 100 = 34 -->"
    assert problems(f"1.5 times as fast, 34 %, results/a.json {comment}", root) == []
    assert problems(f"1.5 times as fast, 34 %.\n\n{comment}", root) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1.4 <!-- results/a.json: rows[1].ms / rows[0].ms = 1.4 -->", "1.4 is printed, but"),
        (
            "1.4 <!-- results/a.json: speed = 1.77 -->",
            "1.77 is checked by a comment but not printed",
        ),
        ("1.4 <!-- results/a.json: absent = 1.4 -->", "absent selects no number"),
        ("1.4 <!-- results/gone.json: speed = 1.4 -->", "No such file"),
        ("1.77 <!-- not in results: 3.1 -->", "3.1 is excused but not printed"),
        ("results/gone.json", "results/gone.json does not exist"),
    ],
)
def test_wrong_comments_are_reported(text, message, root):
    (reported,) = problems(text, root)
    assert message in reported


def test_a_comment_that_spans_blank_lines_stays_one_comment():
    (block,) = split_blocks("Text.\n\n<!-- results/a.json: a = 1;\n\n b = 2 -->")
    assert (block.text, len(block.comments)) == ("Text.", 1)


def test_the_command_fails_on_a_wrong_page(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("results/2026-11-16-h200-bench.json: 123456.75")
    assert main([str(page)]) == 1
    assert "1: 123456.75 is not in" in capsys.readouterr().out

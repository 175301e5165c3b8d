"""Check the numbers printed in README.md and docs/*.md against the results files that they cite.

    python tools/check_numbers.py [PAGE ...]

Convention for the pages:

1. A paragraph or table that links or names `results/FILE.json` cites that file. The citation also
   covers every table that follows, up to the next heading or the next citation.
2. Each decimal number (`1.77`, `2.9e-3`, `33.5 %`, `412.0 k`) in the covered text must be a number
   of a cited file, rounded to the printed digits. `33.5 %` also matches 0.335, and `412.0 k`
   matches 412033. Integers, code spans and versions (`2.11.0`, `cuDNN 9.19`) are not checked.
3. A comment names one value of a file exactly. It is required for a derived value:

       <!-- results/FILE.json: parts.sentence relu.tflops = 148.4 -->
       <!-- results/FILE.json: rows[n=1024, name=cudnn].ms / rows[n=1024, name=relu].ms = 1.31;
            max(rows[width=64].x_softmax) = 1.90 -->

   A path is a list of keys joined by dots, with `[3]`, `[*]` or `[key=value, ...]` to select
   elements of a list. A key with dots or brackets stands in double quotes. `min`, `max`, `mean`
   and `median` reduce several values. `+`, `-`, `*` and `/`, with spaces around them, combine
   values and constants from left to right.
   The printed number (also an integer) must stand in the comment's block: the block that contains
   the comment, or the block before a comment that stands alone.
4. Covered numbers that are settings or results of other work are listed in a comment:

       <!-- not in results: 58.5, 0.003 -->
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

_CITATION = re.compile(r"results/[\w./-]+\.json")
_COMMENT = re.compile(r"<!--(.*?)-->", re.DOTALL)
_EXACT = re.compile(r"\s*(results/[\w./-]+\.json)\s*:\s*(.*)", re.DOTALL)
_EXCEPTION = re.compile(r"\s*not in results\s*:\s*(.*)", re.DOTALL)
# Text whose digits are not measurements: code, link targets, paths, versions.
_IGNORED = re.compile(
    r"`[^`]*`|\]\([^)]*\)|https?://\S+|results/\S+"
    r"|\b(?:torch|Triton|Python|cuDNN|CUDA|transformers)\s+\d+(?:\.\d+)*"
)
_NUMBER = re.compile(
    r"(?<![\w.])(?P<sign>[-+\u2212](?=\d))?(?P<digits>\d[\d,]*(?:\.\d+)?)(?P<exponent>e[-+]?\d+)?"
    r"(?![\w]|\.\d)(?P<unit>\s?%|\sk\b|\sM\b)?"
)
_DECIMAL_IN_STRING = re.compile(r"(?<![\w.])\d+\.\d+(?:e[-+]?\d+)?(?![\w.])|(?<![\w.])\d+e[-+]?\d+")
_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "min": min,
    "max": max,
    "mean": statistics.fmean,
    "median": statistics.median,
}
_OPERATORS: dict[str, Callable[[float, float], float]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "/": lambda left, right: left / right,
}


@dataclass(frozen=True)
class Printed:
    """A number as it is printed on a page."""

    text: str
    line: int
    value: float
    tolerance: float
    is_signed: bool
    is_decimal: bool
    scales: tuple[float, ...]

    @classmethod
    def from_match(cls, match: re.Match[str], line: int) -> "Printed":
        digits = match["digits"].replace(",", "")
        exponent = int((match["exponent"] or "e0")[1:])
        sign = (match["sign"] or "").replace("\u2212", "-")
        decimals = len(digits.partition(".")[2])
        unit = (match["unit"] or "").strip()
        return cls(
            text=sign + match["digits"] + (match["exponent"] or ""),
            line=line + match.string.count("\n", 0, match.start()),
            value=float(f"{sign}{digits}e{exponent}"),
            tolerance=0.5 * 10.0 ** (exponent - decimals) * (1 + 1e-6),
            is_signed=bool(sign),
            is_decimal="." in digits or bool(match["exponent"]),
            scales={"%": (1.0, 100.0), "k": (1.0, 1e-3), "M": (1.0, 1e-6)}.get(unit, (1.0,)),
        )

    def equals(self, value: float) -> bool:
        """Whether `value` rounds to the printed digits; its sign counts only if one is printed."""
        if not self.is_signed:
            value = abs(value)
        return any(abs(value * scale - self.value) <= self.tolerance for scale in self.scales)


@dataclass
class Block:
    """A paragraph, list, table or heading, with the comments that belong to it."""

    line: int
    text: str
    comments: list[str] = field(default_factory=list)

    @property
    def is_table(self) -> bool:
        return self.text.lstrip().startswith("|")

    @property
    def is_heading(self) -> bool:
        return self.text.lstrip().startswith("#")

    @property
    def citations(self) -> set[str]:
        return set(_CITATION.findall(self.text))

    def numbers(self) -> list[Printed]:
        """All numbers outside code spans and link targets."""
        text = _IGNORED.sub(_newlines, self.text)
        return [Printed.from_match(match, self.line) for match in _NUMBER.finditer(text)]


def main(arguments: list[str] | None = None) -> int:
    """Print one line for each wrong number; return 1 if there is any."""
    parser = argparse.ArgumentParser(description="Check printed numbers against results/.")
    parser.add_argument(
        "pages", nargs="*", type=Path, help="default: README.md, docs/**/*.md and the model card"
    )
    pages = parser.parse_args(arguments).pages
    problems = 0
    checked = 0
    card = ROOT / "reluformer" / "shipped_models" / "en-de" / "README.md"
    for page in pages or [ROOT / "README.md", card, *sorted((ROOT / "docs").rglob("*.md"))]:
        count, messages = check_page(page.read_text(), ROOT)
        checked += count
        problems += len(messages)
        for message in messages:
            print(f"{page}:{message}")
    print(f"{checked} numbers checked against results/, {problems} problems")
    return 1 if problems else 0


def check_page(text: str, root: Path) -> tuple[int, list[str]]:
    """Check one Markdown page.

    Args:
        text: The page.
        root: The folder that contains `results/`.

    Returns:
        The number of checked numbers, and a message `LINE: problem` for each wrong one.
    """
    checked = 0
    messages: list[str] = []
    cited: set[str] = set()
    for block in split_blocks(text):
        if block.is_heading:
            cited = set()
        if block.citations:
            cited = block.citations
        exact, excused, errors = _read_comments(block, root)
        messages += [f"{block.line}: {error}" for error in errors]
        checked += len(exact)
        if not (block.citations or (block.is_table and cited)):
            continue
        missing = [name for name in sorted(cited) if not (root / name).is_file()]
        if missing:
            messages += [f"{block.line}: {name} does not exist" for name in missing]
            continue
        for number in block.numbers():
            if not number.is_decimal or number.text in excused or number.text in exact:
                continue
            checked += 1
            if not any(number.equals(value) for name in cited for value in _values(root / name)):
                messages.append(
                    f"{number.line}: {number.text} is not in {', '.join(sorted(cited))}"
                )
    return checked, messages


def split_blocks(text: str) -> list[Block]:
    """Split a page at blank lines and headings, without fenced code."""
    blocks: list[Block] = []
    lines: list[str] = []
    start = 1
    is_code = False

    def flush() -> None:
        raw = "\n".join(lines)
        lines.clear()
        if not raw.strip():
            return
        comments = _COMMENT.findall(raw)
        body = _COMMENT.sub(_newlines, raw)
        if body.strip():
            blocks.append(Block(start, body, comments))
        elif blocks:
            blocks[-1].comments += comments

    for index, line in enumerate(text.splitlines(), start=1):
        is_fence = line.lstrip().startswith("```")
        if is_fence or is_code:
            flush()
            is_code = is_code != is_fence
            continue
        pending = "\n".join(lines)
        is_comment = pending.count("<!--") > pending.count("-->")
        if not is_comment and (not line.strip() or line.startswith("#")):
            flush()
        if not lines:
            start = index
        lines.append(line)
        if line.startswith("#"):
            flush()
    flush()
    return blocks


def evaluate(expression: str, data: Any) -> float:
    """Evaluate an expression of rule 3 on a loaded results file.

    Raises:
        ValueError: If a path selects no value or several, or a term cannot be read.
    """
    terms = re.split(r' ([-+*/]) (?=(?:[^"]*"[^"]*")*[^"]*$)', expression.strip())
    result = _term(terms[0], data)
    for operator, term in zip(terms[1::2], terms[2::2], strict=True):
        result = _OPERATORS[operator](result, _term(term, data))
    return result


def _term(term: str, data: Any) -> float:
    term = term.strip()
    reduction = re.fullmatch(r"(min|max|mean|median)\((.*)\)", term)
    if reduction:
        return _REDUCTIONS[reduction[1]]([float(value) for value in _select(reduction[2], data)])
    if re.fullmatch(r"\d+(\.\d+)?", term):
        return float(term)
    values = _select(term, data)
    if len(values) != 1:
        raise ValueError(f"{term} selects {len(values)} values instead of one")
    return float(values[0])


def _select(path: str, data: Any) -> list[Any]:
    """All values at a path; raise ValueError if there is none."""
    values = [data]
    for match in re.finditer(r'\[([^\]]*)\]|"([^"]*)"|([^."\[\]]+)', path.strip()):
        selector, quoted, plain = match.groups()
        if selector is None:
            key = quoted if quoted is not None else plain
            values = [value[key] for value in values if isinstance(value, dict) and key in value]
        else:
            values = [element for value in values for element in _elements(value, selector)]
    if not values or any(
        isinstance(value, bool) or not isinstance(value, int | float) for value in values
    ):
        raise ValueError(f"{path} selects no number")
    return values


def _elements(rows: Any, selector: str) -> list[Any]:
    """Elements of a list that `*`, an index or `key=value, ...` selects."""
    if not isinstance(rows, list):
        return []
    if selector == "*":
        return rows
    if re.fullmatch(r"-?\d+", selector):
        return rows[int(selector) :][:1]
    wanted = dict(part.strip().split("=", 1) for part in re.split(r",(?=[^,=]*=)", selector))
    return [
        row
        for row in rows
        if all(str(row.get(key)).lower() == value.lower() for key, value in wanted.items())
    ]


def _newlines(match: re.Match[str]) -> str:
    """Blank a match but keep its line breaks, so that line numbers stay right."""
    return " " + "\n" * match[0].count("\n")


def _read_comments(block: Block, root: Path) -> tuple[set[str], set[str], list[str]]:
    """Numbers that comments of a block check exactly, numbers they excuse, and their mistakes."""
    exact: set[str] = set()
    excused: set[str] = set()
    errors: list[str] = []
    printed = {number.text: number for number in block.numbers()}
    for comment in block.comments:
        if match := _EXCEPTION.fullmatch(comment):
            excused |= {text.strip() for text in match[1].split(",")}
        elif match := _EXACT.fullmatch(comment):
            for statement in filter(None, (part.strip() for part in match[2].split(";"))):
                expression, _, text = (part.strip() for part in statement.rpartition(" = "))
                error = _check_statement(root / match[1], expression, text, printed)
                if error:
                    errors.append(error)
                exact.add(text)
    errors += [
        f"{text} is excused but not printed here" for text in sorted(excused - printed.keys())
    ]
    return exact, excused, errors


def _check_statement(
    file: Path, expression: str, text: str, printed: dict[str, Printed]
) -> str | None:
    """The mistake in `expression = text`, or None."""
    if text not in printed:
        return f"{text} is checked by a comment but not printed in its block"
    try:
        value = evaluate(expression, _load(file))
    except (OSError, ValueError, ZeroDivisionError) as error:
        return f"{expression}: {error}"
    return (
        None
        if printed[text].equals(value)
        else f"{text} is printed, but {expression} is {value:.6g}"
    )


@cache
def _load(file: Path) -> Any:
    return json.loads(file.read_text())


@cache
def _values(file: Path) -> tuple[float, ...]:
    return tuple(_numbers(_load(file)))


def _numbers(data: Any) -> Iterator[float]:
    """All numbers in a JSON value, with the decimal numbers in its keys and strings."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _numbers(key)
            yield from _numbers(value)
    elif isinstance(data, list):
        for value in data:
            yield from _numbers(value)
    elif isinstance(data, str):
        yield from (float(text) for text in _DECIMAL_IN_STRING.findall(data))
    elif isinstance(data, int | float) and not isinstance(data, bool):
        yield float(data)


if __name__ == "__main__":
    sys.exit(main())

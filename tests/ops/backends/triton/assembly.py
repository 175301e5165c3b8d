"""Mistakes that can be found in compiled code, whatever it was compiled from."""

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

Known = TypeVar("Known")


def unguarded(ptx: str) -> int:
    """Buffers given back on some path with no barrier between the warps' last read and the one
    arrival, or after loads with no fence before it: a barrier does not wait for what they read."""
    lines = ptx.splitlines()
    labels = {
        found[1]: at for at, line in enumerate(lines) if (found := re.match(r"(\$\w+):", line))
    }

    def step(at: int, known: frozenset[str]) -> tuple[frozenset[str], list[int]]:
        """Of what is known: that loads are `over`, and that all warps `wait` for each other."""
        line = lines[at]
        if "ldmatrix" in line:
            known = frozenset()
        elif "wgmma.wait_group" in line:
            known -= {"wait"}
        elif "fence.proxy.async" in line:
            known |= {"over"}
        elif "bar.sync" in line and "over" in known:
            known |= {"wait"}
        elif "barrier.sync" in line:
            # All warps, before and after their parts of a program.
            known = frozenset({"over", "wait"})
        jump = re.search(r"\bbra(\.uni)?\s+(\$\w+)", line)
        ends = re.search(r"^\s*(ret|exit);", line) or (jump and not line.lstrip().startswith("@"))
        following = [labels[jump[2]]] if jump else []
        return known, following if ends or at + 1 == len(lines) else [*following, at + 1]

    known = _flow(frozenset({"over", "wait"}), step, lambda one, other: one & other)
    arrivals = (at for at, line in enumerate(lines) if "mbarrier.arrive.shared" in line)
    return sum("wait" not in known.get(at, {"wait"}) for at in arrivals)


def unmade(code: str) -> int:
    """Products one of whose addresses some path reaches without having made it.

    The assembler reuses addresses from before a loop that a path goes around.
    """
    body: list[tuple[bool, str, str]] = []
    labels: dict[str, int] = {}
    for line in code.splitlines():
        if found := re.match(r"(\.L_x_\w+):", line):
            labels[found[1]] = len(body)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?(\S+)\s*(.*?)\s*;", line):
            body.append((bool(found[1]), found[2], found[3]))

    def step(at: int, made: set[int]) -> tuple[set[int], list[int]]:
        conditional, name, rest = body[at]
        jumps = name.startswith(("BRA", "BRX"))
        following = [labels[each] for each in re.findall(r"\.L_x_\w+", rest)] if jumps else []
        if conditional or not name.startswith(("BRA", "BRX", "EXIT", "RET")):
            following.append(at + 1)
        return made | _uniform_results(name, rest), [each for each in following if each < len(body)]

    made = _flow(set(), step, lambda one, other: one & other)
    return sum(not _uniform_operands(*body[at][1:]) <= known for at, known in made.items())


def _flow(
    first: Known,
    step: Callable[[int, Known], tuple[Known, Iterable[int]]],
    meet: Callable[[Known, Known], Known],
) -> dict[int, Known]:
    """What is known before every instruction that can be reached, on whatever path.

    `step` gives what is known after one, and which may follow it.
    """
    known, waiting = {0: first}, [0]
    while waiting:
        at = waiting.pop()
        after, following = step(at, known[at])
        for each in following:
            both = meet(known[each], after) if each in known else after
            if each not in known or both != known[each]:
                known[each] = both
                waiting.append(each)
    return known


def _uniform_results(name: str, rest: str) -> set[int]:
    """Uniform registers that an instruction writes."""
    found = re.match(r"UR(\d+)", rest)
    if not found or name.startswith(("SYNCS", "UTMA", "UBLKCP")):
        return set()
    width = 2 if ".64" in name or "WIDE" in name else 1
    return set(range(int(found[1]), int(found[1]) + width))


def _uniform_operands(name: str, rest: str) -> set[int]:
    """Uniform registers with the addresses of a product's operands: of both, or of the second."""
    found = re.search(r"gdesc\[UR(\d+)\]", rest)
    if not found or not name.startswith("HGMMA"):
        return set()
    first = int(found[1])
    return set(range(first if re.match(r"R\d+, gdesc", rest) else first + 2, first + 4))

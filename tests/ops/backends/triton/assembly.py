"""Mistakes in barriers and addresses that can be found in compiled code."""

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

State = TypeVar("State")


def unguarded(ptx: str) -> int:
    """Number of buffers that some path releases too early.

    Between the last read of a buffer by the warps and the arrival on its barrier there must be a
    barrier of the warps and, after loads into registers, a fence before it: a barrier does not wait
    for loads.
    """
    lines = ptx.splitlines()
    labels = {
        found[1]: at for at, line in enumerate(lines) if (found := re.match(r"(\$\w+):", line))
    }

    def step(at: int, known: frozenset[str]) -> tuple[frozenset[str], list[int]]:
        """Facts after a line (loads are "over", all warps "wait" for each other), next lines."""
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
            # All warps of the CTA meet before and after the partitions run.
            known = frozenset({"over", "wait"})
        jump = re.search(r"\bbra(\.uni)?\s+(\$\w+)", line)
        ends = re.search(r"^\s*(ret|exit);", line) or (jump and not line.lstrip().startswith("@"))
        following = [labels[jump[2]]] if jump else []
        return known, following if ends or at + 1 == len(lines) else [*following, at + 1]

    known = _flow(frozenset({"over", "wait"}), step, lambda one, other: one & other)
    arrivals = (at for at, line in enumerate(lines) if "mbarrier.arrive.shared" in line)
    return sum("wait" not in known.get(at, {"wait"}) for at in arrivals)


def unmade(code: str) -> int:
    """Number of products that some path reaches before it has computed one of their addresses.

    ptxas reuses addresses that were computed in an earlier loop, which a path may skip.
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
    first: State,
    step: Callable[[int, State], tuple[State, Iterable[int]]],
    meet: Callable[[State, State], State],
) -> dict[int, State]:
    """Facts that hold before each reachable instruction, whatever path leads to it.

    Args:
        first: facts at the start.
        step: gives the facts after an instruction and the instructions that can follow it.
        meet: facts that hold on two paths.
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
    """Uniform registers with the addresses of a product: of both operands, or of the second."""
    found = re.search(r"gdesc\[UR(\d+)\]", rest)
    if not found or not name.startswith("HGMMA"):
        return set()
    first = int(found[1])
    return set(range(first if re.match(r"R\d+, gdesc", rest) else first + 2, first + 4))

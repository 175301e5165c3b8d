"""Wall times of whole steps, and how much of a gain the attention can bring."""

from collections.abc import Callable, Mapping

from reluformer.bench.timing import Times


def interleaved(clocks: Mapping[str, Callable[[], float]], rounds: int) -> Times:
    """Milliseconds of each round, by name; the order of a round rotates by one.

    Args:
        clocks: Functions that take a step and return its milliseconds.
        rounds: Number of rounds.
    """
    names = list(clocks)
    times: Times = {name: [] for name in names}
    for number in range(rounds):
        turn = number % max(len(names), 1)
        for name in names[turn:] + names[:turn]:
            times[name].append(clocks[name]())
    return times


def ceilings(step: float, attention: float, other: float) -> tuple[float, float]:
    """Gains of a step if only its attention changed.

    Args:
        step: Milliseconds of the step.
        attention: Milliseconds of its attention calls alone.
        other: Milliseconds of the attention calls that replace them.

    Returns:
        The gain if the calls change as much as alone, and if they take no time.
    """
    rest = step - attention
    return step / (rest + other), step / rest

"""Tiles of the portable kernels: a table instead of a search at run time.

The bfloat16 entries for widths 64 and 128 were the fastest on an H200 (`benchmarks/tiles.py`). The
others were chosen so that no register spills and shared memory suffices.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Kernel = Literal["forward", "dkv", "dq", "decode"]


@dataclass(frozen=True)
class Tile:
    """Size of a tile, number of warps and pipeline stages, and options of the kernel."""

    queries: int
    """Query rows, BLOCK_M; for decoding, the smallest number of rows."""
    keys: int
    """Keys, BLOCK_N."""
    warps: int
    stages: int
    one_loop: bool = False
    """Mask all tiles in one loop, instead of separate loops for whole and masked tiles."""
    prescale: bool = False
    """For dK and dV: multiply the output gradient by its row factors in a separate pass."""
    programs: int = 4
    """For decoding: split the keys until every multiprocessor has this many programs."""
    skip: bool = True
    """For decoding: do not load value rows whose weights are all zero."""


# By (kernel, padded width): tiles for sentences, each with the longest key length it is used for.
# One tile often holds all keys, so that one loop suffices.
_SHORT: dict[tuple[Kernel, int], list[tuple[int, Tile]]] = {
    ("forward", 64): [
        (32, Tile(32, 32, 4, 2, one_loop=True)),
        (64, Tile(64, 64, 4, 2, one_loop=True)),
        (256, Tile(128, 32, 4, 3, one_loop=True)),
        (512, Tile(64, 64, 4, 2)),
    ],
    ("forward", 128): [
        (32, Tile(32, 32, 4, 2, one_loop=True)),
        (128, Tile(64, 32, 4, 2, one_loop=True)),
        (256, Tile(64, 32, 4, 2)),
    ],
    ("dkv", 64): [
        (32, Tile(32, 32, 4, 2, one_loop=True)),
        (64, Tile(32, 64, 4, 2, one_loop=True)),
        (128, Tile(64, 64, 4, 3, one_loop=True)),
        (256, Tile(64, 64, 4, 3)),
    ],
    ("dkv", 128): [
        (32, Tile(32, 32, 4, 2, one_loop=True)),
        (128, Tile(64, 64, 4, 2, one_loop=True)),
        (256, Tile(64, 64, 4, 2)),
    ],
    ("dq", 64): [
        (32, Tile(32, 32, 4, 2, one_loop=True)),
        (64, Tile(64, 64, 4, 2, one_loop=True)),
        (128, Tile(64, 32, 4, 3, one_loop=True)),
        (512, Tile(64, 32, 4, 3)),
    ],
    ("dq", 128): [
        (32, Tile(32, 32, 2, 1, one_loop=True)),
        (128, Tile(64, 64, 4, 2, one_loop=True)),
        (256, Tile(64, 64, 4, 2)),
    ],
}
# By (kernel, padded width, edged): tiles, each with the longest key length it is used for.
_LONG = 1 << 62
_HALF: dict[tuple[Kernel, int, bool], list[tuple[int, Tile]]] = {
    ("forward", 64, False): [(_LONG, Tile(128, 64, 8, 3))],
    ("forward", 64, True): [(2048, Tile(128, 64, 4, 3)), (_LONG, Tile(128, 64, 8, 3))],
    ("forward", 128, False): [(_LONG, Tile(256, 64, 8, 3))],
    ("forward", 128, True): [(2048, Tile(64, 64, 4, 3)), (_LONG, Tile(128, 128, 8, 3))],
    ("forward", 256, False): [(_LONG, Tile(128, 64, 8, 2))],
    ("dkv", 64, False): [(_LONG, Tile(64, 64, 4, 3))],
    ("dkv", 64, True): [
        (512, Tile(32, 64, 4, 3, prescale=True)),
        (2048, Tile(128, 64, 4, 3, prescale=True)),
        (_LONG, Tile(64, 64, 4, 3, prescale=True)),
    ],
    ("dkv", 128, False): [(_LONG, Tile(64, 128, 8, 3))],
    ("dkv", 128, True): [
        (2048, Tile(64, 64, 4, 2, prescale=True)),
        (_LONG, Tile(64, 128, 8, 3, prescale=True)),
    ],
    ("dkv", 256, False): [(_LONG, Tile(64, 64, 8, 2))],
    ("dq", 64, False): [(2048, Tile(64, 64, 4, 3)), (_LONG, Tile(128, 64, 8, 3))],
    ("dq", 64, True): [(2048, Tile(64, 64, 4, 3)), (_LONG, Tile(64, 64, 4, 2))],
    ("dq", 128, False): [(_LONG, Tile(128, 64, 8, 3))],
    ("dq", 256, False): [(_LONG, Tile(64, 64, 8, 2))],
    # Here the limit is the number of rows that share a key head, and True means keys in pages.
    # Skipping values costs little at width 128, but up to a quarter of the speed at width 64 where
    # all values have weight.
    ("decode", 64, False): [
        (4, Tile(16, 128, 4, 2, programs=8)),
        (_LONG, Tile(16, 64, 2, 4, programs=2, skip=False)),
    ],
    ("decode", 64, True): [(_LONG, Tile(16, 128, 4, 3))],
    ("decode", 128, False): [
        (16, Tile(16, 64, 4, 2)),
        (_LONG, Tile(16, 32, 4, 4, programs=2, skip=False)),
    ],
    ("decode", 128, True): [(_LONG, Tile(16, 64, 4, 3))],
    ("decode", 256, False): [(_LONG, Tile(16, 64, 8, 2, programs=2))],
}
_SINGLE: dict[tuple[Kernel, int, bool], list[tuple[int, Tile]]] = {
    ("forward", 64, False): [(_LONG, Tile(64, 64, 4, 2))],
    ("forward", 128, False): [(_LONG, Tile(64, 32, 4, 2))],
    ("forward", 256, False): [(_LONG, Tile(64, 32, 8, 1))],
    ("dkv", 64, False): [(_LONG, Tile(32, 64, 4, 2))],
    ("dkv", 128, False): [(_LONG, Tile(32, 64, 8, 1))],
    ("dkv", 256, False): [(_LONG, Tile(32, 32, 4, 1))],
    ("dq", 64, False): [(_LONG, Tile(64, 32, 4, 2))],
    ("dq", 128, False): [(_LONG, Tile(64, 32, 8, 1))],
    ("dq", 256, False): [(_LONG, Tile(32, 32, 4, 1))],
    ("decode", 64, False): [(_LONG, Tile(16, 64, 4, 2))],
    ("decode", 128, False): [(_LONG, Tile(16, 32, 4, 2))],
    ("decode", 256, False): [(_LONG, Tile(16, 32, 8, 2, programs=2))],
}


# The same for kernels that store or load signs of weights (`benchmarks/backward.py`).
_SIGNED: dict[tuple[Kernel, int, bool], list[tuple[int, Tile]]] = {
    ("dkv", 64, True): [(2048, Tile(64, 64, 4, 3, prescale=True))],
    ("dq", 64, False): [(2048, Tile(128, 64, 8, 3)), (_LONG, Tile(64, 64, 4, 3))],
    ("dq", 64, True): [(2048, Tile(64, 64, 4, 3)), (_LONG, Tile(128, 64, 8, 3))],
    ("dq", 128, True): [(2048, Tile(64, 64, 4, 3))],
}


UNLIMITED = 1 << 62
# An A100 has 163 KB of shared memory, an RTX 4090 has 99 KB. Compiled for them, the larger float32
# tiles and that of dK and dV keep up to 13 KB per thread on the stack.
_HOPPER = 200_000
# By (kernel, padded width, bytes per element): the shared memory from which the tiles above are
# used, and the tile for GPUs with less.
_SMALL: dict[tuple[Kernel, int, int], tuple[int, Tile]] = {
    ("forward", 128, 2): (163_840, Tile(128, 64, 8, 2)),
    ("forward", 256, 2): (147_456, Tile(64, 32, 8, 2)),
    ("forward", 64, 4): (_HOPPER, Tile(64, 32, 4, 2)),
    ("forward", 128, 4): (_HOPPER, Tile(32, 32, 4, 2)),
    ("forward", 256, 4): (_HOPPER, Tile(16, 16, 4, 1)),
    ("dkv", 128, 2): (_HOPPER, Tile(64, 64, 4, 2)),
    ("dkv", 256, 2): (139_264, Tile(32, 32, 4, 2)),
    ("dkv", 64, 4): (_HOPPER, Tile(32, 32, 4, 2)),
    ("dkv", 128, 4): (_HOPPER, Tile(32, 32, 4, 1)),
    ("dkv", 256, 4): (_HOPPER, Tile(16, 16, 4, 1)),
    ("dq", 128, 2): (131_072, Tile(64, 64, 4, 2)),
    ("dq", 256, 2): (139_264, Tile(32, 32, 4, 2)),
    ("dq", 64, 4): (_HOPPER, Tile(32, 32, 4, 2)),
    ("dq", 128, 4): (_HOPPER, Tile(32, 32, 4, 1)),
    ("dq", 256, 4): (_HOPPER, Tile(16, 16, 4, 1)),
}


class Override(NamedTuple):
    """Choices that tests and benchmarks force; hashable, so that it can be part of a key."""

    tiles: tuple[tuple[Kernel, Tile], ...] = ()
    """Tiles to use instead of those of the table."""
    tma: bool | None = None
    """Whether tiles go through descriptors (True) or pointers (False); None for the default."""
    sign_bytes: int | None = None
    """Memory for signs of weights, which are stored wherever possible; 0 for nowhere."""
    gradient_bytes: int | None = None
    """Memory for score gradients, which the Hopper kernels then store wherever possible, instead of
    computing them twice; 0 for nowhere."""
    hopper: bool | None = None
    """Whether the Hopper kernels run wherever they can (True) or never (False)."""
    forward_tile: str | None = None
    """Name of the tile of the Hopper forward kernel (`hopper/launch_forward.py`), where the width
    and the statistics of a call allow it."""
    one_pass: bool | None = None
    """Whether one kernel computes all gradients of short sequences (`backward_one_pass.py`)."""
    compact_gradients: bool = False
    """Whether score gradients of causal calls take memory only for blocks that some row sees."""
    product_rows: int | None = None
    """Query rows of a consumer of the dQ kernel that reads score gradients: 64 or 128."""
    dkv_tile: str | None = None
    """Name of the tile of the Hopper kernel for dK and dV (`hopper/launch_backward.py`), where the
    width and the power of a call allow it."""
    dq_tile: str | None = None
    """The same for dQ."""


_override = Override()


def pick(
    kernel: Kernel,
    width: int,
    edged: bool,
    length: int,
    itemsize: int,
    signs: bool = False,
    shared: int = UNLIMITED,
) -> Tile:
    """The tile for a call, or the overriding one.

    Args:
        kernel: Name of the kernel.
        width: Padded head width, 16 to 256.
        edged: Whether tiles need registers for more than their products: causal, windowed, padded
            and masked calls, and dropout. For decoding: whether keys are in pages.
        length: Number of keys; for decoding, of rows that share a key head.
        itemsize: Bytes per element.
        signs: Whether the kernel stores or loads signs of weights.
        shared: Bytes of shared memory that one program may have.
    """
    for name, tile in _override.tiles:
        if name == kernel:
            return tile
    if (kernel, width, itemsize) in _SMALL:
        needed, small = _SMALL[kernel, width, itemsize]
        if shared < needed:
            return small
    rows = _rows(kernel, max(width, 64), edged, itemsize, signs)
    return next(tile for limit, tile in rows if length <= limit)


def every(kernel: Kernel, width: int, itemsize: int) -> list[Tile]:
    """All tiles that the table contains for a padded width, without repetition."""
    found = [
        tile
        for signs in (False, True)
        for edged in (False, True)
        for _, tile in _rows(kernel, max(width, 64), edged, itemsize, signs)
    ]
    return list(dict.fromkeys(found))


def _rows(
    kernel: Kernel, width: int, edged: bool, itemsize: int, signs: bool
) -> list[tuple[int, Tile]]:
    signed = _SIGNED.get((kernel, width, edged), []) if signs and itemsize == 2 else []
    short = _SHORT.get((kernel, width), []) if itemsize == 2 else []
    table = _HALF if itemsize == 2 else _SINGLE
    return signed + short + (table.get((kernel, width, edged)) or table[kernel, width, False])


def current() -> Override:
    """The choices that `override` forces."""
    return _override


@contextmanager
def override(tiles: dict[Kernel, Tile] | None = None, **choices: Any) -> Iterator[None]:
    """Force choices inside the block, for benchmarks and tests.

    Args:
        tiles: Tiles by kernel.
        **choices: Further fields of `Override`.
    """
    global _override
    before = _override
    _override = Override(tuple((tiles or {}).items()), **choices)
    try:
        yield
    finally:
        _override = before

"""Compiled kernels of rectified attention for the CPU, built on request and used where built.

`python -m reluformer.ops.backends.cpu.native` builds them, in seconds, with any C++17 compiler; without them
`impl="cpu"` runs the tiles of `reluformer.ops.backends.cpu.tiles`, with the same results.
"""

from reluformer.ops.backends.cpu.native.library import available, build

__all__ = ["available", "build"]

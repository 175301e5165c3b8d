"""Compiled kernels of rectified attention for the CPU, built on request and used where built.

`python -m reluformer.ops.native` builds them, in seconds, with any C++17 compiler; without them
`impl="cpu"` runs the tiles of `reluformer.ops.cpu_tiles`, with the same results.
"""

from reluformer.ops.native.library import available, build

__all__ = ["available", "build"]

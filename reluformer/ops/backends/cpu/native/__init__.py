"""Native (C++) kernels of rectified attention for the CPU, built on request.

`python -m reluformer.ops.backends.cpu.native` builds them in seconds with any C++17 compiler.
Without them, `impl="cpu"` runs plain torch operations with the same results.
"""

from reluformer.ops.backends.cpu.native.library import available, build

__all__ = ["available", "build"]

"""`python -m reluformer.ops.backends.cpu.native` builds the CPU kernels for this machine."""

import sys

from reluformer.errors import UserError
from reluformer.ops.backends.cpu.native.library import build


def main() -> int:
    """Build the kernels if they are missing; print their path, or the reason for a failure."""
    try:
        print(f"compiled CPU kernels: {build()}")
    except UserError as problem:
        print(f"no compiled CPU kernels, impl='cpu' runs without: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

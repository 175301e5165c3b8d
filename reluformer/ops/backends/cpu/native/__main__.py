"""`python -m reluformer.ops.backends.cpu.native` builds the CPU kernels for this machine."""

import sys

from reluformer.errors import UserError
from reluformer.ops.backends.cpu.native.library import build


def main() -> int:
    """Build, unless that is done already; say in one line where, or why not."""
    try:
        print(f"compiled CPU kernels: {build()}")
    except UserError as problem:
        print(f"no compiled CPU kernels, impl='cpu' runs without: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Entry point of the command `reluformer` and of `python -m reluformer`."""

import sys


def main() -> None:
    """Run the command line; an interruption during start-up also ends in one line."""
    try:
        from reluformer.cli import main as run

        run()
    except KeyboardInterrupt:
        print("reluformer: interrupted", file=sys.stderr, flush=True)
        sys.exit(130)


if __name__ == "__main__":
    main()

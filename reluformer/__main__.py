"""`python -m reluformer`: the command line without an installation."""

from reluformer.cli import main

if __name__ == "__main__":
    main()

"""`python -m bough.cli`: the `bough` command."""

from bough.cli.main import main

if __name__ == "__main__":
    main()

"""`python -m bame_cli` is `bame`."""

from bame_cli.cli import main

main()

"""`python -m everserve.cli`: the same as the `everserve` command."""

from everserve.cli import main

main()

"""Entry point of `python -m fedh2l`."""

from fedh2l.cli import main

main()

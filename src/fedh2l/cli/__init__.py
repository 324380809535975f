"""The command line interface."""

from fedh2l.cli.app import main

__all__ = ["main"]

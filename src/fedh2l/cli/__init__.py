"""The command line, one file per group of commands.

Commands parse options and print. The work is done by the other packages.
"""

from fedh2l.cli.app import main

__all__ = ["main"]

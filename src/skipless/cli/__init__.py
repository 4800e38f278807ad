"""The command line: `skipless COMMAND`. Each command has its own module and imports heavy libraries when run."""

from skipless.cli.app import main

__all__ = ["main"]

"""The command line: `skipless COMMAND`. Each command has its own module, which imports heavy libraries only when run."""

from skipless.cli.app import main

__all__ = ["main"]

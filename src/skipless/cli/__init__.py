"""The command line: `skipless COMMAND`. Each command has its own module and imports heavy libraries when run."""

import os
import sys

from skipless.console import handle_stops


def main() -> None:
    """Run the command line. A bad value or file ends with one line and exit code 2; Ctrl-C and SIGTERM with 130."""
    for name in ("stdin", "stdout", "stderr"):  # one that is closed: the next file would get its number
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if name == "stdin" else "w"))
    with handle_stops():
        from skipless.cli.app import run

        run()


__all__ = ["main"]

"""The command line: `skipless COMMAND`. Each command has its own module and imports heavy libraries when run."""

from skipless.console import handle_stops


def main() -> None:
    """Run the command line. A bad value or file ends with one line and exit code 2; Ctrl-C and SIGTERM with 130."""
    with handle_stops():
        from skipless.cli.app import run

        run()


__all__ = ["main"]

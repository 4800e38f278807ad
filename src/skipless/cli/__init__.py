"""The command line: `skipless COMMAND`. Each command has its own module and imports heavy libraries when run."""

from skipless.console import handle_sigint


def main() -> None:
    """Run the command line. A bad value or file ends with one line and exit code 2; Ctrl-C with one and 130."""
    with handle_sigint():
        from skipless.cli.app import run

        run()


__all__ = ["main"]

"""The application: commands, and one-line errors instead of tracebacks for what a user can put right."""

import sys
from typing import Annotated

import typer

from skipless import __version__
from skipless.cli import demo, evaluate, export, generate, inspect, kernels, prepare, report, reproduce, train
from skipless.console import told

app = typer.Typer(
    name="skipless",
    help="Deep transformers without shortcuts: certify, build, train and inspect them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_GOES_ON = "stopped; the same command goes on from there"
_COMMANDS = {
    "demo": told(demo.command, _GOES_ON),
    "kernels": told(kernels.command),
    "inspect": told(inspect.command),
    "eval": told(evaluate.command),
    "generate": told(generate.command),
    "prepare": told(prepare.command, _GOES_ON),
    "train": told(train.command, _GOES_ON),
    "export": told(export.command, "stopped; the same command begins again"),
    "report": told(report.command),
    "reproduce": told(reproduce.command, _GOES_ON),
}
for _name, _command in _COMMANDS.items():
    app.command(_name)(_command)


def _version(asked: bool) -> None:
    if asked:
        print(f"skipless {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = (
        False
    ),
) -> None:
    """Deep transformers without shortcuts."""


def run() -> None:
    """Run a command. A bad value or file ends with one line and exit code 2."""
    try:
        app()
    except (ValueError, OSError) as error:
        print(f"skipless: {error}", file=sys.stderr)
        sys.exit(2)

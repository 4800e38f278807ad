"""The application: commands, and one-line errors instead of tracebacks for what a user can put right."""

import sys

import typer

from skipless.cli import demo, evaluate, export, generate, inspect, kernels, prepare, report, train

app = typer.Typer(
    name="skipless",
    help="Deep transformers without shortcuts: certify, build, train and inspect them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.command)
app.command("kernels")(kernels.command)
app.command("inspect")(inspect.command)
app.command("eval")(evaluate.command)
app.command("generate")(generate.command)
app.command("prepare")(prepare.command)
app.command("train")(train.command)
app.command("export")(export.command)
app.command("report")(report.command)


@app.callback()
def _root() -> None:
    """Deep transformers without shortcuts."""


def main() -> None:
    """Run the command line. A bad value or file ends with one line and exit code 2; Ctrl-C with 130."""
    try:
        app()
    except (ValueError, OSError) as error:
        print(f"skipless: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("skipless: interrupted", file=sys.stderr)
        sys.exit(130)

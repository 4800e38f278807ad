"""The table of commands, and one-line errors instead of tracebacks for what a user can put right."""

import functools
import inspect
import re
import sys
from collections.abc import Callable, Collection
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from skipless import __version__
from skipless.console import report_interrupt, say, write_output
from skipless.lazy import import_code

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_OUT_OF_MEMORY = re.compile(r"can't allocate memory|out of memory", re.IGNORECASE)
_RESUMES = "stopped; the same command goes on from there"


class Command(NamedTuple):
    """A command's file in this folder, its line of help, and what is said when Ctrl-C stops it.

    Without `stopped`, the files that were written are named.
    """

    module: str
    help: str
    stopped: str | None = None
    imports: bool = True  # whether it takes --import: it opens networks, which may be of the user's own kind


COMMANDS = {
    "demo": Command(
        "demo",
        "Train 36 blocks without skips or norms on Python's standard library, beside Pre-LN and standard attention.",
        _RESUMES,
        imports=False,
    ),
    "kernels": Command(
        "kernels", "Follow a signal through a deep network at initialisation: where it survives, and where it dies."
    ),
    "inspect": Command(
        "inspect",
        "Run one batch through a network and back, and say which block loses the signal, why, and what to change.",
    ),
    "eval": Command("evaluate", "Evaluate a trained model on text and on zero-shot tasks."),
    "generate": Command("generate", "Continue a prompt, writing the text as it comes. Ctrl-C ends it."),
    "prepare": Command(
        "prepare",
        "Turn text into token shards: train a tokenizer, tokenise with all cores, write a manifest.",
        _RESUMES,
        imports=False,
    ),
    "train": Command("train", "Train a network. Kill it at any moment and repeat the command with --resume.", _RESUMES),
    "export": Command(
        "export",
        "Write config, weights (safetensors), tokenizer or image processor, and model card of a run for Hugging Face.",
        "stopped; the same command begins again",
    ),
    "report": Command(
        "report", "Put runs and networks on one page: verdicts, kernels by depth, training curves, tables."
    ),
    "reproduce": Command(
        "reproduce",
        "Reproduce tables and figures of the paper. Stop it at any time: the same command goes on.",
        _RESUMES,
        imports=False,
    ),
}


class LazyGroup(TyperGroup):
    """Lists the commands from the table, and imports a command's file when that command is chosen."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Put the real command in the place of the one that only holds its line of help."""
        name, listed, rest = super().resolve_command(ctx, args)
        return name, _load(name) if name in COMMANDS else listed, rest


def _load(name: str) -> Any:
    listed = COMMANDS[name]
    alone = typer.Typer(add_completion=False)
    function = report_interrupt(import_module(f"skipless.cli.{listed.module}").command, listed.stopped)
    alone.command(name)(_with_imports(function) if listed.imports else function)
    return typer.main.get_command(alone)


def first_given(context: typer.Context, among: Collection[str] | None = None, but: Collection[str] = ()) -> str | None:
    """The first option on the command line `among` these, or all, `but` for those, by the names of parameters."""
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        typed = source is not None and source.name == "COMMANDLINE"
        if typed and name not in but and (among is None or name in among):
            return parameter.opts[0]
    return None


def write_figure(path: Path, draw: "Callable[[], Figure | None]") -> list[Path]:
    """The path in a list, or an empty one where there is nothing to draw or nothing to draw with."""
    try:
        from skipless.figures.style import render

        figure = draw()
        if figure is None:
            return []
        write_output(path, render(figure, path.suffix.lower()))
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in ("matplotlib", "PIL"):
            raise
        say(f"no figure: {missing.name} is not installed; pip install 'skipless[plot]', then the same command again")
        return []
    return [path]


def _import_all(names: list[str] | None) -> None:
    for name in names or []:
        import_code(name)


def _with_imports(function: Callable[..., Any]) -> Callable[..., Any]:
    """The command with an option --import, read before all others, so that what it makes known serves them."""
    words = "Code of your own to import first: FILE.py or a module. It may register schemes and activations."
    option = typer.Option("--import", help=words, metavar="CODE", is_eager=True, callback=_import_all)

    @functools.wraps(function)
    def command(*args: Any, import_: Any = None, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    hint = Annotated[list[str] | None, option]
    parameter = inspect.Parameter("import_", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
    known = inspect.signature(function)
    command.__signature__ = known.replace(parameters=[*known.parameters.values(), parameter])  # ty: ignore
    command.__annotations__ = {**function.__annotations__, "import_": hint}
    return command


app = typer.Typer(
    name="skipless",
    cls=LazyGroup,
    help="Deep transformers without shortcuts: certify, build, train and inspect them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _name, _listed in COMMANDS.items():
    app.command(_name, help=_listed.help)(lambda: None)


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
    """Run a command. A bad value or file, and too little memory, end with one line and exit code 2."""
    try:
        app()
    except ValueError as error:
        words = str(error)
    except OSError as error:
        words = str(error)
        if error.errno is not None and words.startswith(f"[Errno {error.errno}]"):  # as the system has it
            words = f"{error.filename or 'the output'} could not be read or written ({error.strerror})"
    except (MemoryError, RuntimeError) as error:  # torch's allocators have no class of their own
        words = str(error).strip()
        if not isinstance(error, MemoryError) and not _OUT_OF_MEMORY.search(words):
            raise
        words = f"memory ran out ({words.splitlines()[0] if words else 'no more is known'}): ask for less at once"
    say(f"skipless: {' '.join(words.split())}")
    sys.exit(2)

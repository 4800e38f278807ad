"""`skipless demo`: three deep networks trained side by side on a CPU, as a table, a picture and a few lines of text."""

from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[Path, typer.Option(help="Where everything goes.")]
Steps = Annotated[int | None, typer.Option(help="Steps of each network; the default takes minutes on two cores.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the weights, the batches and the generated text.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU if there is one.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Delete what an earlier demo left in --out, and start over.")]


def command(
    out: Out = Path("skipless-demo"),
    steps: Steps = None,
    seed: Seed = 0,
    device: Device = None,
    fresh: Fresh = False,
) -> None:
    """Train 36 blocks without skips or norms on Python's standard library, beside Pre-LN and standard attention.

    Stop it at any time: the same command goes on from there, and when all is trained only draws and prints again.
    """
    from skipless.cli.demo_run import Request, run
    from skipless.recipes.demo import STEPS

    run(Request(out, STEPS if steps is None else steps, seed, device, fresh))

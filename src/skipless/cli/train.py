"""`skipless train RECIPE`: prepare the data if need be, train, and go on after any interruption."""

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from skipless.files import check_folder
from skipless.model.presets import names
from skipless.paper.recipes import by_images, by_law, check_data, decided, plan, with_data
from skipless.training.config import Experiment, split_assignments
from skipless.training.run import EXPERIMENT


def command(
    recipe: Annotated[
        str, typer.Argument(help="A recipe such as wikitext103/e-spa (see --list), or an experiment.json.")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="The run's folder. Default: runs/RECIPE.")] = None,
    data: Annotated[Path | None, typer.Option(help="A folder made by `skipless prepare`.")] = None,
    depth: Annotated[int | None, typer.Option(help="Blocks. Short for --set model.depth=…")] = None,
    width: Annotated[int | None, typer.Option(help="Width. Short for --set model.width=…")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any field: --set train.steps=500.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the run in the folder stopped.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU if there is one.")] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard event files.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the whole configuration and stop.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="Print all recipe names and stop.")] = False,
) -> None:
    """Train a network. Kill it at any moment and repeat the command with --resume."""
    if list_:
        print("\n".join(names()))
        return
    if not recipe:
        raise ValueError("name a recipe, such as wikitext103/e-spa; `skipless train --list` shows all")
    if data is not None:
        check_data(data)  # a wrong path is refused before anything is solved
    if out is not None:
        check_folder(out, EXPERIMENT)  # and before torch is imported
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    sizes = {"model.depth": depth, "model.width": width}
    values = {name: size for name, size in sizes.items() if size is not None} | split_assignments(set_ or [])
    experiment, given = plan(recipe, data)
    followed = {} if given else by_law(experiment, values) | by_images(experiment, values)
    experiment = experiment.with_fields(followed | values)
    if not show or experiment.data.folder is not None:
        experiment = with_data(experiment, given=given | decided(values))
    if show:
        print(experiment.to_json())
        return
    _run(experiment, out or experiment.folder, resume, device, tensorboard)


def _run(experiment: Experiment, out: Path, resume: bool, device: str | None, tensorboard: bool) -> None:
    from skipless.training.distributed import exit_process
    from skipless.training.divergence import Diverged
    from skipless.training.trainer import train

    try:
        result = train(experiment, out, resume=resume, device=device, tensorboard=tensorboard)
    except Diverged as error:
        raise ValueError(str(error)) from error
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"{str(stop) or 'stopped; repeat the command with --resume'} ({out})") from None
    print(f"trained {result.steps} steps: training loss {result.train_loss:.4f} (smoothed)")
    if result.valid is not None:
        print(result.valid.words())
    print(f"weights: {result.weights}")
    exit_process()

"""`skipless reproduce`: the paper's experiments, at three sizes; runs what is missing and writes the tables."""

from pathlib import Path
from typing import Annotated

import typer

Names = Annotated[
    list[str] | None, typer.Argument(metavar="ITEM...", help="Items such as baselines; `all`; see --list.")
]
ScaleName = Annotated[str, typer.Option("--scale", help="tiny (a CPU), small (a GPU) or paper (App. H).")]
Data = Annotated[str | None, typer.Option(help="A folder made by `skipless prepare`, or a corpus. tiny: stdlib.")]
Out = Annotated[Path, typer.Option(help="Where logs, tables and figures go.")]
Rates = Annotated[int | None, typer.Option(help="Learning rates each arm is tried at. Default: the scale's.")]
Seeds = Annotated[int | None, typer.Option(help="Seeds at the best rate. Default: the scale's.")]
Budget = Annotated[float | None, typer.Option(help="Seconds; no run is begun that would not end or be saved in time.")]
ArmNames = Annotated[
    str, typer.Option("--arms", help="Only these arms, by comma; `all` adds those not run by default.")
]
Jobs = Annotated[int, typer.Option(help="Runs side by side, each in its own process, on one device.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU if there is one.")]
Tasks = Annotated[
    Path | None, typer.Option("--tasks-folder", help="Folder of the tasks' .jsonl files, for downstream.")
]
TablesOnly = Annotated[bool, typer.Option("--tables-only", help="Run nothing: make tables from the logs again.")]
List = Annotated[bool, typer.Option("--list", help="Show items, runs, what they cost and what is done.")]


def command(
    items: Names = None,
    scale: ScaleName = "tiny",
    data: Data = None,
    out: Out = Path("results"),
    seeds: Seeds = None,
    rates: Rates = None,
    budget: Budget = None,
    arms: ArmNames = "",
    jobs: Jobs = 1,
    device: Device = None,
    tasks_folder: Tasks = None,
    tables_only: TablesOnly = False,
    list_: List = False,
) -> None:
    """Reproduce tables and figures of the paper. Stop it at any time: the same command goes on.

    \b
    skipless reproduce --list
    skipless reproduce baselines orthogonal --scale small --data data/wiki --jobs 4
    skipless reproduce all --scale small --tables-only
    """
    from skipless.cli.reproduce_run import Request, run

    if list_:
        from skipless.cli.reproduce_list import show

        show(out)
        return
    names = tuple(name.strip() for name in arms.split(",") if name.strip())
    request = Request(tuple(items or ()), scale, data, out, rates, seeds, names, tables_only)
    if not run(request, jobs=jobs, budget=budget, device=device, tasks=tasks_folder):
        raise typer.Exit(1)

"""`skipless kernels`: the certificate of a network, or a figure of the paper, as a table, a picture and data."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Norm(StrEnum):
    """Where RMSNorm stands."""

    NONE = "none"
    PRE = "pre"
    POST = "post"


class Calibration(StrEnum):
    """How SPA's constants take skips and MLPs into account."""

    PAPER = "paper"
    EXACT = "exact"
    MLP_AWARE = "mlp-aware"


class Input(StrEnum):
    """Which kernel enters."""

    SAMPLE = "sample"
    AVERAGE = "average"


def _option(text: str, panel: str, *names: str, **more):
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)


_NETWORK, _SIGNAL, _OUTPUT = "Network", "Input", "Output"
Name = Annotated[str, typer.Argument(metavar="NAME", help="A figure, a scheme or a preset; --list names them.")]
Depth = Annotated[int | None, _option("Blocks (100; presets and fig6: their own).", _NETWORK)]
Gamma = Annotated[float | None, _option("E-SPA's final decay rate γ_L (0.005).", _NETWORK)]
Rho = Annotated[float | None, _option("U-SPA's final correlation ρ_L (0.8).", _NETWORK)]
SkipText = Annotated[
    str | None, _option("Attention skip: α (then β² = 1−α²) or α,β; 1,1 is the usual one.", _NETWORK, metavar="α[,β]")
]
MlpSkip = Annotated[str | None, _option("MLP skip, written likewise.", _NETWORK, metavar="α[,β]")]
NormName = Annotated[Norm | None, _option("Where RMSNorm stands.", _NETWORK)]
Activation = Annotated[
    str | None, _option("MLPs with dks-gelu, tat-leaky_relu, gelu, …; none is attention-only.", _NETWORK)
]
Mirrored = Annotated[
    bool | None, _option("MLPs of mirrored pairs: at the start rotations, at any width.", _NETWORK, "--mirrored")
]
CalibrationName = Annotated[Calibration | None, _option("SPA's constants: the paper's, or ours.", _NETWORK)]
Length = Annotated[int | None, _option("Locations T (100).", _SIGNAL)]
Rate = Annotated[float | None, _option("P(two locations hold the same token).", _SIGNAL)]
InputName = Annotated[Input | None, _option("One sampled sequence (default), or the mean kernel.", _SIGNAL, "--input")]
Seed = Annotated[int | None, _option("Which sequence is sampled (0).", _SIGNAL)]
Blocks = Annotated[str | None, _option("Blocks to show, e.g. 0,1,10,100; 0 is the input.", _OUTPUT)]
FigureFile = Annotated[
    Path | None, _option("Where the figure goes: .png, .pdf or .svg (skipless-kernels/NAME.png).", _OUTPUT)
]
NoFigure = Annotated[bool, _option("Print only.", _OUTPUT, "--no-figure")]
JsonFile = Annotated[Path | None, _option("Everything as data; - is standard output.", _OUTPUT, "--json")]
Check = Annotated[bool, _option("Exit with 1 if a network loses the signal.", _OUTPUT, "--check")]
List = Annotated[bool, _option("Print all names and stop.", _OUTPUT, "--list")]


def command(
    name: Name = "fig7",
    depth: Depth = None,
    gamma_final: Gamma = None,
    rho_final: Rho = None,
    skip: SkipText = None,
    mlp_skip: MlpSkip = None,
    norm: NormName = None,
    activation: Activation = None,
    mirrored: Mirrored = None,
    calibration: CalibrationName = None,
    length: Length = None,
    repeat_rate: Rate = None,
    input_kind: InputName = None,
    seed: Seed = None,
    blocks: Blocks = None,
    figure: FigureFile = None,
    no_figure: NoFigure = False,
    json_file: JsonFile = None,
    check: Check = False,
    list_names: List = False,
) -> None:
    """Follow a signal through a deep network at initialisation: where it survives, and where it dies.

    \b
    skipless kernels                           seven networks, 100 blocks deep
    skipless kernels e-spa --depth 200         one scheme, attention-only
    skipless kernels wikitext103/e-spa         a model of the paper, with MLPs
    skipless kernels alibi --skip 1,1 --norm post --check
    """
    from skipless.cli.kernel_request import Flags, name_list
    from skipless.cli.kernel_run import Outputs, run

    if list_names:
        typer.echo(name_list())
        return
    asked = (depth, gamma_final, rho_final, skip, mlp_skip, norm, activation, mirrored, calibration)
    flags = Flags(*asked, length, repeat_rate, input_kind, seed, blocks)
    if run(name, flags, Outputs(figure, no_figure, json_file)) and check:
        raise typer.Exit(1)

"""`skipless kernels`: certificates of networks, as tables, JSON and figures."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from skipless import __version__
from skipless.cli.app import write_figure
from skipless.cli.networks import KernelsArguments, Selection, name_list, select
from skipless.console import (
    Progress,
    check_apart,
    check_figure,
    check_fits,
    check_seed,
    check_target,
    print_table,
    print_text,
    write_output,
)
from skipless.files import DATA_MARK, PICTURE_MARK
from skipless.inspection.inspection import finite
from skipless.inspection.studies import InputKind, InputSignal, Study, study
from skipless.theory import kernels
from skipless.theory.certificate import BlockReport
from skipless.theory.propagation import NormPlacement
from skipless.theory.schemes import Calibration

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path("skipless-kernels")  # of figures


def _option(text: str, panel: str, *names: str, **more):
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)


_NETWORK, _SIGNAL, _OUTPUT = "Network", "Input", "Output"


def command(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A figure, a scheme or a preset; --list names them.")
    ] = "fig7",
    depth: Annotated[int | None, _option("Blocks (100; presets and fig6: their own).", _NETWORK)] = None,
    gamma_final: Annotated[float | None, _option("E-SPA's final decay rate γ_L (0.005).", _NETWORK)] = None,
    rho_final: Annotated[float | None, _option("U-SPA's final correlation ρ_L (0.8).", _NETWORK)] = None,
    skip: Annotated[
        str | None,
        _option("Attention skip: α (then β² = 1−α²) or α,β; 1,1 is the usual one.", _NETWORK, metavar="α[,β]"),
    ] = None,
    mlp_skip: Annotated[str | None, _option("MLP skip, written likewise.", _NETWORK, metavar="α[,β]")] = None,
    norm: Annotated[NormPlacement | None, _option("Where RMSNorm stands.", _NETWORK)] = None,
    activation: Annotated[
        str | None, _option("MLPs with dks-gelu, tat-leaky_relu, gelu, …; none is attention-only.", _NETWORK)
    ] = None,
    mirrored: Annotated[
        bool | None, _option("MLPs of mirrored pairs: at the start rotations, at any width.", _NETWORK, "--mirrored")
    ] = None,
    calibration: Annotated[Calibration | None, _option("SPA's constants: the paper's, or ours.", _NETWORK)] = None,
    set_: Annotated[
        list[str] | None, _option("Any field of the scheme: --set gamma_final=0.2.", _NETWORK, "--set")
    ] = None,
    length: Annotated[int | None, _option("Locations T (100).", _SIGNAL)] = None,
    repeat_rate: Annotated[float | None, _option("P(two locations hold the same token).", _SIGNAL)] = None,
    input_kind: Annotated[
        InputKind | None,
        _option("One sampled sequence (default), or the mean kernel.", _SIGNAL, "--input"),
    ] = None,
    seed: Annotated[int | None, _option("Which sequence is sampled (0).", _SIGNAL)] = None,
    blocks: Annotated[str | None, _option("Blocks to show, e.g. 0,1,10,100; 0 is the input.", _OUTPUT)] = None,
    figure: Annotated[
        Path | None, _option("Where the figure goes: .png, .pdf or .svg (skipless-kernels/NAME.png).", _OUTPUT)
    ] = None,
    no_figure: Annotated[bool, _option("Print only.", _OUTPUT, "--no-figure")] = False,
    json_file: Annotated[Path | None, _option("Everything as data; - is standard output.", _OUTPUT, "--json")] = None,
    check: Annotated[bool, _option("Exit with 1 if a network loses the signal.", _OUTPUT, "--check")] = False,
    list_names: Annotated[bool, _option("Print all names and stop.", _OUTPUT, "--list")] = False,
) -> None:
    """Follow a signal through a deep network at initialisation: where it survives, and where it dies.

    \b
    skipless kernels                           seven networks, 100 blocks deep
    skipless kernels e-spa --depth 200         one scheme, attention-only
    skipless kernels wikitext103/e-spa         a model of the paper, with MLPs
    skipless kernels mine --import my_scheme.py
    skipless kernels alibi --skip 1,1 --norm post --check
    """
    if list_names:
        typer.echo(name_list())
        return
    asked = (depth, gamma_final, rho_final, skip, mlp_skip, norm, activation, mirrored, calibration)
    check_seed(seed)
    selection = select(
        name, KernelsArguments(*asked, length, repeat_rate, input_kind, seed, blocks, tuple(set_) if set_ else None)
    )
    kernels_kept = sum(network.config.depth + 1 for network in selection.networks) or len(selection.signals)
    size, smaller = selection.signals[0].length, "use fewer blocks (--depth) or locations (--length)"
    check_fits(8.0 * kernels_kept * size**2, f"keeping {kernels_kept:,} kernels of {size:,} locations", smaller)
    picture = _picture(name, figure, no_figure, json_file)
    studies = _follow(selection)
    _report(selection, studies, picture, json_file)
    if check and any(each.certificate.verdict.lost for each in studies):
        raise typer.Exit(1)


def _picture(name: str, figure: Path | None, no_figure: bool, json_file: Path | None) -> Path | None:
    """Where the figure goes, or None where none is wanted; what cannot be written is refused.

    A figure that was not asked for may be left out where nothing can draw it.
    """
    if no_figure and figure is not None:
        raise ValueError(f"--no-figure and --figure {figure} contradict each other: leave one out")
    path = None if no_figure else figure or FOLDER / f"{name.replace('/', '-')}.png"
    check_apart({"--json": json_file, "--figure": path})
    if figure is not None:
        check_figure(figure)
    check_target(path, PICTURE_MARK)
    check_target(json_file, DATA_MARK)
    return path


def _follow(selection: Selection) -> list[Study]:
    """Every network's kernels and certificate, with a bar where someone is watching."""
    studies = []
    with Progress(every=None) as progress:
        progress.start("", sum(2 * network.config.depth for network in selection.networks))
        for network in selection.networks:

            def block_done(label: str = network.label) -> None:
                progress.advance()
                progress.show(label)

            studies.append(study(network, selection.signals[0], block_done))
    return studies


def _report(selection: Selection, studies: Sequence[Study], figure: Path | None, json_file: Path | None) -> None:
    from rich.console import Console

    to_stdout = str(json_file) == "-"
    said, console = report(selection, studies), Console(stderr=to_stdout)
    # files first: a line may find its reader gone
    if json_file is not None and not to_stdout:
        write_output(json_file, as_json(selection, studies).encode())
    drawn = figure is not None and write_figure(figure, lambda: draw(selection, studies))
    print_table(console, said.head, said.rows, said.styles)
    if said.legend:
        print_text(console, said.legend)
    if to_stdout:
        sys.stdout.write(as_json(selection, studies))
    elif json_file is not None:
        print_text(console, f"data: {json_file}")
    if drawn:
        print_text(console, f"figure: {figure}")
    console.print()
    print_text(console, said.closing, style="bold", wrap=True)


_COLOURS = {"preserved": "green", "drift": "yellow"}


@dataclass(frozen=True)
class Report:
    """A table, what it shows, and the sentence that ends it. styles: a colour for the last cell of each row."""

    head: list[str]
    rows: list[list[str]]
    closing: str
    legend: str = ""
    styles: tuple[str, ...] = ()


def report(selection: Selection, studies: Sequence[Study]) -> Report:
    """The report that suits the selection: inputs, one network by block, or networks side by side."""
    if not studies:
        return _of_inputs(selection.signals)
    if len(studies) == 1:
        return _of_one(studies[0], selection.blocks)
    return _of_many(studies, selection.name)


def as_json(selection: Selection, studies: Sequence[Study]) -> str:
    """Inputs, configurations, certificates, diagonals of every Σ_l and the cosines shown, to six decimals."""
    data: dict[str, Any] = {"skipless": __version__, "name": selection.name}
    if not studies:
        data["inputs"] = [{**asdict(s), "kernel": s.kernel().tolist()} for s in selection.signals]
    else:
        data |= {"input": asdict(selection.signals[0]), "blocks": list(selection.blocks)}
        data["networks"] = [_network_data(study, selection.blocks) for study in studies]
    return json.dumps(finite(data), allow_nan=False, ensure_ascii=False) + "\n"


def _network_data(study: Study, blocks: Sequence[int]) -> dict[str, Any]:
    return {
        "label": study.network.label,
        "details": study.network.details(),
        "config": study.network.config.to_dict(),
        "certificate": study.certificate.as_dict(),
        "diagonals": study.diagonals().tolist(),
        "cosines": {str(block): np.round(study.normalised(block), 6).tolist() for block in blocks},
    }


def _of_one(study: Study, blocks: Sequence[int]) -> Report:
    certificate, verdict = study.certificate, study.certificate.verdict
    head = ["block", "norm² min", "mean", "max", "mean cosine", "effective rank", "gradient² mean", "max"]
    shown = sorted({*blocks, *([verdict.block] if verdict.block is not None else [])})
    rows = [_block_row(certificate.reports[block]) for block in shown]
    title = f"{study.network.label} ({', '.join(study.network.details())})"
    return Report(head, rows, f"{title}: {verdict.text}")


def _block_row(at: BlockReport) -> list[str]:
    norms = [at.diagonal_min, at.diagonal_mean, at.diagonal_max]
    gains = [at.backward_mean, at.backward_max]
    middle = [f"{at.mean_cosine:.4f}", f"{at.effective_rank:.1f}"]
    return [str(at.block), *map(_short, norms), *middle, *map(_short, gains)]


def _of_many(studies: Sequence[Study], name: str) -> Report:
    last = studies[0].certificate.reports[-1].block
    head = ["network", "cosine", "rank", "norm² range", "gradient²", "verdict"]
    rows = []
    for each in studies:
        at, verdict = each.certificate.reports[-1], each.certificate.verdict
        span = f"{_short(at.diagonal_min)} – {_short(at.diagonal_max)}"
        gain = _short(each.certificate.reports[0].backward_mean)
        numbers = [f"{at.mean_cosine:.4f}", f"{at.effective_rank:.1f}", span, gain]
        rows.append([each.network.label, *numbers, verdict.words])
    styles = tuple(_COLOURS.get(each.certificate.verdict.kind, "red") for each in studies)
    legend = f"Mean cosine, effective rank and squared norms after block {last}; squared gradient norm at the input."
    closing = _drift_sentence(studies) if name == "fig6" else _sentence(studies, last)
    return Report(head, rows, closing, legend, styles)


def _sentence(studies: Sequence[Study], last: int) -> str:
    kept = [s.network.label for s in studies if not s.certificate.verdict.lost]
    lost = [f"{s.network.label} ({s.certificate.verdict.words})" for s in studies if s.certificate.verdict.lost]
    parts = []
    if lost:
        parts.append(f"The signal dies in {len(lost)} of {len(studies)} networks: {'; '.join(lost)}.")
    if kept:
        parts.append(f"It survives {f'all {last} blocks' if last > 1 else 'the one block'} of {'; '.join(kept)}.")
    return " ".join(parts)


def _drift_sentence(studies: Sequence[Study]) -> str:
    plain, corrected = (study.diagonals()[-1] for study in studies)
    return (
        f"Without the correction for repeated tokens squared norms end at {plain.mean():.2f} ± {plain.std():.2f}; "
        f"with it at {corrected.mean():.2f} ± {corrected.std():.2f}."
    )


def _of_inputs(signals: Sequence[InputSignal]) -> Report:
    head = ["repeat rate r", "distinct tokens", "equal pairs", "effective rank"]
    rows = []
    for signal in signals:
        kernel = signal.kernel()
        distinct = np.linalg.matrix_rank(kernel)
        pairs, rank = kernels.mean_cosine(kernel), kernels.effective_rank(kernel)
        rows.append([f"{signal.repeat_rate:g}", str(distinct), f"{pairs:.4f}", f"{rank:.1f}"])
    top = rows[-1]
    closing = f"At r = {top[0]}, {signals[-1].length} locations hold {top[1]} distinct tokens: effective rank {top[3]}."
    return Report(head, rows, closing)


def _short(value: float) -> str:
    return f"{value:.3g}"


_CORPORA = {0.0: "every token once", 0.008: "32k SentencePiece", 0.02: "Fig. 1 and 7", 0.05: "characters"}


def draw(selection: Selection, studies: Sequence[Study]) -> "Figure":
    """Fig. 5, Fig. 6, a grid of networks, or one network's portrait."""
    from skipless.figures.kernels import (
        GridRow,
        Heading,
        diagonal_by_depth,
        input_kernels,
        kernel_grid,
        network_portrait,
    )

    signal = selection.signals[0]
    if not studies:
        captions = [(f"r = {s.repeat_rate:g}", _CORPORA.get(s.repeat_rate, "")) for s in selection.signals]
        subtitle = f"Input kernels of sequences of {signal.length} locations, by the probability r of a repeat"
        heading = Heading("Repeated tokens are similar from the start", subtitle)
        return input_kernels([s.kernel() for s in selection.signals], captions, heading)
    first = studies[0].network
    if selection.name == "fig6":
        setting = f"Attention-only E-SPA, {first.details()[0]}; {signal.describe()};"
        subtitle = f"{setting}\nmean ± standard deviation over locations"
        heading = Heading("Uncorrected, repeated tokens inflate norms", subtitle)
        return diagonal_by_depth({s.network.label: s.diagonals() for s in studies}, heading)
    rows = [
        GridRow(
            each.network.label,
            each.network.details(),
            {block: each.normalised(block) for block in selection.blocks},
            each.certificate.verdict,
        )
        for each in studies
    ]
    if len(studies) == 1:
        kind = "blocks" if first.config.hidden else "attention-only blocks"
        subtitle = f"{', '.join(first.details())}; {signal.describe()}"
        heading = Heading(f"{first.label}, {first.config.depth} {kind}", subtitle)
        return network_portrait(rows[0], studies[0].certificate, heading)
    size = f"{selection.depth} blocks, {first.config.heads} heads"
    subtitle = f"Attention-only transformers at initialisation, {size}; {signal.describe()}"
    return kernel_grid(rows, Heading("Where the signal survives, and where it dies", subtitle))

"""`skipless inspect MODEL`: where the signal of any transformer dies, as a table, a picture and data."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A preset (wikitext103/e-spa), a run's folder, a folder written by save_pretrained, or a family: "
            "hf:gpt2, hf:llama, hf:gpt-neox, hf:bert, hf:vit.",
        ),
    ],
    text: Annotated[Path | None, typer.Option(help="A text to read; random tokens otherwise.")] = None,
    length: Annotated[int, typer.Option(help="Tokens per row.")] = 128,
    batch: Annotated[int, typer.Option(help="Rows.")] = 2,
    depth: Annotated[int | None, typer.Option(help="Blocks, for presets and families.")] = None,
    width: Annotated[int | None, typer.Option(help="Width, for presets and families.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads, for presets and families.")] = None,
    blocks: Annotated[str | None, typer.Option(help="Name of the list of blocks, if it is not found.")] = None,
    seed: Annotated[int, typer.Option(help="Of random weights and tokens.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, …")] = "cpu",
    json_file: Annotated[Path | None, typer.Option("--json", help="Everything as data; - is standard output.")] = None,
    figure: Annotated[Path | None, typer.Option(help="A picture: .png, .pdf or .svg.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if the signal is lost.")] = False,
) -> None:
    """Run one batch through a network and back, and say which block loses the signal, why, and what to change.

    \b
    skipless inspect wikitext103/skipless --width 128
    skipless inspect hf:gpt2 --depth 24 --width 256 --figure gpt2.png
    skipless inspect runs/demo --text README.md --check
    """
    from skipless.cli.inspect_model import Request
    from skipless.cli.inspect_run import run

    request = Request(model, text, length, batch, {"depth": depth, "width": width, "heads": heads}, seed)
    lost = run(request, blocks=blocks, device=device, json_file=json_file, figure=figure)
    if check and lost:
        raise typer.Exit(1)

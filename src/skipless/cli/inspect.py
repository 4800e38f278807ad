"""`skipless inspect MODEL`: where the signal of any transformer dies, as a table, a picture and data."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Half(StrEnum):
    """What may be computed in beside the model's own precision."""

    BF16 = "bf16"
    FP16 = "fp16"


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A preset (wikitext103/e-spa), a run's folder, a folder written by save_pretrained, or a family: "
        "hf:gpt2, hf:llama, hf:gpt-neox, hf:bert, hf:vit.",
    ),
]
Text = Annotated[Path | None, typer.Option(help="A text file to read; random tokens otherwise.")]
Corpus = Annotated[str | None, typer.Option(help="stdlib, a file, folder, glob or prepared folder to read instead.")]
Tokenizer = Annotated[
    str | None, typer.Option(help="A .model file, prepared folder or 'bytes' (the model's own, else bytes).")
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Everything as data; - is standard output.")]
Rounding = Annotated[Half | None, typer.Option(help="Run it in this precision too: what does rounding add?")]
Blocks = Annotated[str | None, typer.Option(help="Name of the list of blocks, if it is not found.")]


def command(
    model: Model,
    text: Text = None,
    corpus: Corpus = None,
    tokenizer: Tokenizer = None,
    length: Annotated[int | None, typer.Option(help="Tokens per row (128).")] = None,
    batch: Annotated[int, typer.Option(help="Rows.")] = 2,
    depth: Annotated[int | None, typer.Option(help="Blocks, for presets and families.")] = None,
    width: Annotated[int | None, typer.Option(help="Width, for presets and families.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads, for presets and families.")] = None,
    blocks: Blocks = None,
    seed: Annotated[int, typer.Option(help="Of random weights and tokens.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, …")] = "cpu",
    rounding: Rounding = None,
    json_file: JsonFile = None,
    figure: Annotated[Path | None, typer.Option(help="A picture: .png, .pdf or .svg.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if the signal is lost.")] = False,
) -> None:
    """Run one batch through a network and back, and say which block loses the signal, why, and what to change.

    \b
    skipless inspect wikitext103/skipless --width 128
    skipless inspect hf:gpt2 --depth 24 --width 256 --figure gpt2.png
    skipless inspect runs/demo --corpus stdlib --check
    skipless inspect depth/e-spa-108 --width 128 --rounding bf16
    """
    from skipless.cli.inspect_model import Request
    from skipless.cli.inspect_run import run

    sizes = {"depth": depth, "width": width, "heads": heads}
    request = Request(model, text, corpus, tokenizer, length, batch, sizes, seed)
    lost = run(request, blocks=blocks, device=device, json_file=json_file, figure=figure, half=rounding)
    if check and lost:
        raise typer.Exit(1)

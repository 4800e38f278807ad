"""`skipless inspect`: where the signal of any transformer dies."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import typer

import skipless
from skipless.console import (
    check_apart,
    check_figure,
    check_fits,
    check_seed,
    check_target,
    near_names,
    print_table,
    print_text,
    write_output,
)
from skipless.data.image_store import ImageStore
from skipless.data.store import MANIFEST, TokenStore
from skipless.data.text import open_corpus
from skipless.files import DATA_MARK
from skipless.inspection.inspection import Inspection
from skipless.inspection.load import FAMILIES, build_family, open_pretrained, pretrained_tokenizer
from skipless.model import presets
from skipless.model.config import Images, ModelConfig
from skipless.training.load import find_tokenizer, load, load_model, reads_images
from skipless.training.run import EXPERIMENT

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text
    from torch import Tensor, nn

Encode = Callable[[str], Any]  # of a tokenizer
_LENGTH = 128
_SMALLER, _FEWER = "make it smaller, e.g. with --width 256", "take fewer or shorter rows, e.g. --batch 2 --length 128"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


Rounded = Literal["bf16", "fp16", "int8", "fp8"]  # what may be computed in beside the model's own precision


def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A preset (wikitext103/e-spa), a run's folder, a folder written by save_pretrained, or a family: "
            "hf:gpt2, hf:llama, hf:gpt-neox, hf:bert, hf:vit.",
        ),
    ],
    text: Annotated[Path | None, typer.Option(help="A text file to read; random tokens otherwise.")] = None,
    corpus: Annotated[
        str | None, typer.Option(help="stdlib, a file, folder, glob or prepared folder to read instead.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A .model file, prepared folder or 'bytes' (the model's own, else bytes).")
    ] = None,
    length: Annotated[
        int | None, typer.Option(help="Tokens per row (128, or all that attention is calibrated for).")
    ] = None,
    batch: Annotated[int, typer.Option(help="Rows.")] = 2,
    depth: Annotated[int | None, typer.Option(help="Blocks, for presets and families.")] = None,
    width: Annotated[int | None, typer.Option(help="Width, for presets and families.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads, for presets and families.")] = None,
    blocks: Annotated[str | None, typer.Option(help="Name of the list of blocks, if it is not found.")] = None,
    seed: Annotated[int, typer.Option(help="Of random weights and tokens.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, …")] = "cpu",
    rounding: Annotated[
        Rounded | None,
        typer.Option(help="Run it in so few bits too, matrices and their inputs: what does rounding add?"),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Everything as data; - is standard output.")] = None,
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
    given = {"depth": depth, "width": width, "heads": heads}
    sizes = {name: value for name, value in given.items() if value is not None}
    asked = InspectArguments(model, text, corpus, tokenizer, length, batch, sizes, seed)
    check_apart({"--json": json_file, "--figure": figure}, (text, corpus, tokenizer))
    if figure is not None:
        check_figure(figure)
    check_target(json_file, DATA_MARK)
    asked.check()
    found = _inspected(asked, blocks, device, rounding)
    _report(found, json_file, figure, rounding)
    if check and found.verdict.lost:
        raise typer.Exit(1)


@dataclass(frozen=True, eq=False)
class InspectArguments:
    """The model and the batch that were asked for. A text, length or size that was not given is None or left out."""

    model: str
    text: Path | None = None
    corpus: str | None = None
    tokenizer: str | None = None
    length: int | None = None
    rows: int = 2
    sizes: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0

    @property
    def reads(self) -> bool:
        """Whether tokens come from a text."""
        return self.text is not None or self.corpus is not None

    def check(self) -> None:
        """Refuse, before torch is imported, what is not there and what does not go together."""
        if self.length is not None and self.length < 2:
            raise ValueError(f"--length is {self.length}; cosines compare locations, so give at least 2")
        check_seed(self.seed)
        if self.rows < 1:
            raise ValueError(f"--batch is {self.rows}; give at least 1 row")
        check_fits(8.0 * self.rows * (self.length or _LENGTH), f"--batch {self.rows}", _FEWER)
        for name, value in self.sizes.items():
            if value < 1:
                raise ValueError(f"--{name} is {value}; give at least 1")
        if self.text is not None and self.corpus is not None:
            raise ValueError(
                f"--text {self.text} and --corpus {self.corpus} are both given; a batch is of one: drop one"
            )
        if self.tokenizer is not None and not self.reads:
            raise ValueError(f"--tokenizer is {self.tokenizer}, but no text is read; add --corpus or --text")
        if self.text is not None and not self.text.is_file():
            raise ValueError(
                f"--text is {self.text}, which is no file; give a text file, or --corpus for a folder or a name"
            )
        if self.corpus is not None and not (Path(self.corpus) / MANIFEST).is_file():
            open_corpus(self.corpus)
        if Path(self.model).is_dir() and self.sizes:
            first = next(iter(self.sizes))
            raise ValueError(f"--{first} is for presets and families; the weights in {self.model} have theirs")
        names = presets.known_names()
        if not (self.model in names or self.model.startswith("hf:") or Path(self.model).is_dir()):
            near = near_names(self.model, names)
            hint = f" (nearest: {', '.join(near)})" if near else ""
            families = ", ".join(f"hf:{name}" for name in FAMILIES)
            raise ValueError(f"{self.model} is no folder, no preset{hint} and no family ({families})")

    def open(self) -> "tuple[nn.Module, Encode | None]":
        """The model, and its tokenizer if it has one. A tokenizer is looked for only where a text is read."""
        import torch

        torch.manual_seed(self.seed)
        if self.model.startswith("hf:"):
            return _family(self.model[3:], self.sizes), None
        folder, wanted = Path(self.model), self.reads and self.tokenizer is None
        if not folder.is_dir():
            config = presets.preset(self.model, **self.sizes)
            check_fits(4 * config.matrix_parameters, self.model, _SMALLER)
            check_fits(8 * self.rows * (self.length or _LENGTH) * config.width, f"--batch {self.rows}", _FEWER)
            return skipless.Transformer(config).eval(), None
        if reads_images(folder):
            return load(folder), None
        if (folder / EXPERIMENT).is_file():
            loaded = load_model(folder, None if wanted else "bytes")
            return loaded.model, loaded.tokenizer.encode if wanted else None
        model = open_pretrained(folder)
        if not wanted:
            return model, None
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            raise ValueError(
                f"{folder} holds no tokenizer ({', '.join(_TOKENIZER_FILES)}); name one: --tokenizer FILE.model, a "
                "prepared folder, or bytes"
            )
        tokenizer = pretrained_tokenizer(folder)
        return model, lambda text: tokenizer.encode(text, add_special_tokens=False)

    def batch(self, model: "nn.Module", encode: Encode | None) -> "Tensor":
        """Tokens of a text or random ones, (rows, length); noise for models that read images, or prepared ones."""
        import torch

        config: Any = getattr(model, "config", None)
        generator = torch.Generator().manual_seed(self.seed)
        if isinstance(model, skipless.Transformer) and model.config.images is not None:
            return self._images(model.config.images, generator)
        if getattr(config, "image_size", None) is not None:
            if self.reads:
                raise ValueError("a text is given, but the model reads images; leave --text and --corpus out")
            if self.length is not None:
                raise ValueError(
                    f"--length is {self.length}, but {self.model} reads images, which have a fixed size; leave it out"
                )
            side = config.image_size
            return torch.randn(self.rows, config.num_channels, side, side, generator=generator)
        ours = next((module.config for module in model.modules() if isinstance(module, skipless.Transformer)), None)
        length = _usual_length(ours) if self.length is None else self.length
        limit = getattr(config, "max_position_embeddings", None) or 0  # XLNet's −1 is no limit
        if 1 <= limit < length and ours is None:  # ours take any length, or say themselves which
            raise ValueError(f"--length is {length}; the model has {limit} positions: use --length {limit}")
        vocabulary = getattr(config, "vocab_size", None)
        if vocabulary is None or getattr(model, "main_input_name", "input_ids") != "input_ids":
            known = ", ".join(f"hf:{name}" for name in FAMILIES)
            raise ValueError(
                f"{self.model} reads neither tokens nor images of a size that its config names; use {known}, or "
                "skipless.inspect(model, batch) with a batch of your own"
            )
        if not self.reads:
            return torch.randint(0, vocabulary, (self.rows, length), generator=generator)
        pieces = self._pieces(self._encoder(encode, vocabulary), self.rows * length, vocabulary)
        return torch.from_numpy(rows_of(pieces, (self.rows, length), vocabulary, str(self.text or self.corpus)))

    def _images(self, images: Images, generator: Any) -> "Tensor":
        """Those of a folder of prepared images, or noise with the mean and deviation of the network's own."""
        import torch

        from skipless.data.image_loader import ImageLoader

        if self.text is not None or self.length is not None:
            raise ValueError(f"{self.model} is a network of images, which have one size: leave --text and --length out")
        shape = (self.rows, images.channels, images.side, images.side)
        if self.corpus is None:
            mean, std = (torch.tensor(each)[:, None, None] for each in (images.mean, images.std))
            return mean + std * torch.randn(shape, generator=generator)
        store = ImageStore(self.corpus)
        if (len(store) < self.rows) or store.shape != shape[1:]:
            raise ValueError(
                f"{self.corpus} has {len(store):,} images of {store.shape}, and {self.model} takes {shape[1:]}; give "
                f"such images, and --batch {len(store)} at most"
            )
        return ImageLoader(store, self.rows, self.seed).batch(0).inputs

    def _encoder(self, own: Encode | None, vocabulary: int) -> Encode:
        """The tokenizer that was named, or the model's own; models without one read bytes."""
        if self.tokenizer is None and own is not None:
            return own
        tokenizer = find_tokenizer(self.tokenizer or "bytes")
        if tokenizer.vocab_size > vocabulary:
            why = "" if self.tokenizer else ", which models without a tokenizer read,"
            raise ValueError(
                f"{self.tokenizer or 'bytes'}{why} has {tokenizer.vocab_size:,} tokens and the model knows "
                f"{vocabulary:,}: name the tokenizer it was made for (--tokenizer)"
            )
        return tokenizer.encode

    def _pieces(self, encode: Encode, count: int, vocabulary: int) -> Iterator[Any]:
        """Sequences of tokens: a file as it is, or a corpus by document. A prepared folder has its tokens already."""
        if self.text is not None:
            try:
                text = self.text.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"--text is {self.text}, which is not UTF-8 text ({error})") from error
            return iter([encode(text)])
        corpus = str(self.corpus)
        if not (Path(corpus) / MANIFEST).is_file():
            return (encode(document) for document in open_corpus(corpus))
        store = TokenStore(corpus)
        if store.vocab_size > vocabulary:
            raise ValueError(
                f"{corpus} was prepared with {store.vocab_size:,} tokens and the model knows {vocabulary:,}: prepare "
                "the text with the model's own tokenizer, or name the text itself"
            )
        return store.pieces(count)


def _usual_length(config: ModelConfig | None) -> int:
    """Tokens per row where nobody says: as many as usual, or as attention was calibrated for."""
    most = None if config is None else config.max_length
    if config is None or most is None:
        return _LENGTH
    return min(most, _LENGTH) if config.causal else most


def rows_of(pieces: Iterator[Any], shape: tuple[int, int], vocabulary: int, source: str) -> np.ndarray:
    """(rows, length) of consecutive tokens; of `pieces`, sequences of tokens, no more are read than that takes."""
    rows, length = shape
    found, wanted = [], rows * length
    for piece in pieces:
        found.append(np.asarray(piece, dtype=np.int64)[: wanted - sum(map(len, found))])
        if sum(map(len, found)) == wanted:
            break
    tokens = np.concatenate([np.empty(0, np.int64), *found])
    if len(tokens) < wanted:
        raise ValueError(
            f"{source} holds {len(tokens)} tokens; {rows} rows of {length} need {wanted}: use a longer text"
            f"{_fitting(len(tokens), rows, length)}"
        )
    if tokens.max() >= vocabulary:
        raise ValueError(
            f"{source} has token {tokens.max()}, but the model knows {vocabulary}: read it with the model's own "
            "tokenizer (--tokenizer)"
        )
    return tokens.reshape(rows, length)


def _fitting(tokens: int, rows: int, length: int) -> str:
    """The shape nearest to what was asked for that so few tokens fill, if there is one."""
    if tokens >= length:
        return f", or --batch {tokens // length}"
    if tokens >= 2 * rows:
        return f", or --length {tokens // rows}"
    return f", or --batch 1 --length {tokens}" if tokens >= 2 else ""


_FIELDS = {"depth": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads"}


def _family(name: str, sizes: Mapping[str, int]) -> "nn.Module":
    """The family with the sizes given; what transformers refuses, and what memory cannot hold, ends in one line."""
    import torch

    asked = " ".join([f"hf:{name}", *(f"--{size} {value}" for size, value in sizes.items())])
    fields = {_FIELDS[size]: value for size, value in sizes.items()}
    try:
        with torch.device("meta"):
            outline = build_family(name, **fields)
    except Exception as error:  # each family checks its sizes in its own way
        why = (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
        why = why.removeprefix("ValueError: ").rstrip(".")
        raise ValueError(f"{asked} cannot be built: {why}{_nearest_width(name, sizes)}") from error
    check_fits(4 * sum(weight.numel() for weight in outline.parameters()), asked, _SMALLER)
    return build_family(name, **fields)


def _nearest_width(name: str, sizes: Mapping[str, int]) -> str:
    """Most families split their width into heads evenly, and rotary positions each head in two."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if (kind := FAMILIES.get(name, name)) not in CONFIG_MAPPING_NAMES:
        return ""
    usual = CONFIG_MAPPING[kind]()
    width, heads = (sizes.get(size) or getattr(usual, _FIELDS[size], None) for size in ("width", "heads"))
    if not width or not heads or width % (2 * heads) == 0:
        return ""
    return f"; use --width {2 * heads * max(round(width / (2 * heads)), 1)}"


def _inspected(asked: InspectArguments, blocks: str | None, device: str, half: Rounded | None) -> Inspection:
    from skipless.inspection.ablation import rounding, with_rounding
    from skipless.inspection.inspect import inspect
    from skipless.training.distributed import find_device

    place = find_device(device)
    model, encode = asked.open()
    batch = asked.batch(model, encode).to(place)
    found = inspect(model.to(place), batch, blocks=blocks)
    found = replace(found, model=found.model.replace(type(model).__name__, asked.model, 1))
    if half is None:
        return found
    return with_rounding(found, rounding(model, batch, half, blocks=[each.name for each in found.blocks[1:]]))


def _report(found: Inspection, json_file: Path | None, figure: Path | None, half: Rounded | None) -> None:
    from rich.console import Console

    to_stdout = str(json_file) == "-"
    console = Console(stderr=to_stdout)
    # files first: a line may find its reader gone
    if json_file is not None and not to_stdout:
        write_output(json_file, found.to_json().encode())
    if figure is not None:
        from skipless.figures.inspection import inspection_figure
        from skipless.figures.style import render

        write_output(figure, render(inspection_figure(found), figure.suffix.lower()))
    _show(console, found)
    if half is not None:
        share = found.blocks[-1].rounding
        print_text(console, f"In {half} rounding adds {share:.3g} of what tells locations apart by the last block.")
    if to_stdout:
        sys.stdout.write(found.to_json() + "\n")
    elif json_file is not None:
        print_text(console, f"data: {json_file}")
    if figure is not None:
        print_text(console, f"figure: {figure}")


def _show(console: "Console", found: Inspection) -> None:
    """The table, the strips by depth, the verdict and the advice."""
    head, rows = found.table()
    print_table(console, head, rows)
    console.print()
    for line in _strips(found):
        console.print(line, soft_wrap=True)
    console.print()
    sound = found.verdict.kind == "preserved" and not found.doubts
    colour = "red" if found.verdict.lost else "green" if sound else "yellow"
    print_text(console, f"{found.model}: {found.verdict.text}", style=f"bold {colour}", wrap=True)
    if found.advice:
        print_text(console, f"What to change: {found.advice}", wrap=True)
    for note in found.notes:
        print_text(console, f"Note: {note}", style="yellow" if note in found.doubts else "", wrap=True)


_BARS = "▁▂▃▄▅▆▇█"
_HEAT = ("#2c7bb6", "#00a6ca", "#00ccbc", "#90eb9d", "#f9d057", "#f29e2e", "#e76818", "#d7191c")


def _strips(found: Inspection) -> "list[Text]":
    """One line per quantity, a cell per block: taller and redder is nearer to trouble."""
    blocks = found.blocks
    cosine = [each.cosine_mean for each in blocks]
    norm = [_decades(each.norm_mean, blocks[0].norm_mean) for each in blocks]
    gradient = [_decades(each.gradient_mean, 1.0) for each in blocks]
    lines = [_strip("cosine", cosine, 1.0), _strip("norm", norm, 3.0), _strip("gradient", gradient, 6.0)]
    if blocks[-1].rounding is not None:
        lines.append(_strip("rounding", [each.rounding or 0.0 for each in blocks], 1.0))
    from rich.text import Text

    legend = Text(
        "from input to last block; full height: cosine 1, norm² 10³ from the input's, gradient² 10⁶ from the last"
    )
    legend.stylize("dim")
    return [*lines, legend]


def _decades(value: float | None, unit: float) -> float:
    """How many powers of ten from the unit; NaN where that means nothing."""
    if value is None or not math.isfinite(value) or value <= 0 or unit <= 0:
        return math.nan
    return abs(math.log10(value / unit))


def _strip(name: str, values: Sequence[float], worst: float) -> "Text":
    from rich.text import Text

    line = Text(f"{name:<9}")
    for value in values:
        if math.isnan(value):
            line.append("×", style="dim")
            continue
        level = min(int(max(value, 0.0) / worst * len(_BARS)), len(_BARS) - 1)
        line.append(_BARS[level], style=_HEAT[level])
    return line

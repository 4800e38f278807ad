"""`skipless export RUN`: a trained run as a Hugging Face folder that AutoModelForCausalLM loads, with a model card."""

import shutil
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from skipless.data.tokenizer import MODEL_FILE
from skipless.files import HASHES, is_part, part_of, read_hashes, size_and_hash, sync_folder, write_hashes, writing
from skipless.model.config import ModelConfig
from skipless.training.load import CONFIG, WEIGHTS, LoadedModel, load_model
from skipless.training.run import EXPERIMENT, EXPORT, METRICS, read_experiment, read_metrics

CARD = "README.md"
_AUTO = {
    "lm": ("AutoModelForCausalLM", "text-generation"),
    "pooled": ("AutoModelForSequenceClassification", "text-classification"),
    "token": ("AutoModelForTokenClassification", "token-classification"),
}


def command(
    run: Annotated[Path, typer.Argument(help="A run's folder; its newest weights are taken.")],
    out: Annotated[Path | None, typer.Option(help="Where to. Default: RUN/export.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A .model file, prepared folder or 'bytes'; by default the run's own.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files there that no export wrote.")] = False,
) -> None:
    """Write config, weights (safetensors), tokenizer and model card of a run for Hugging Face tools."""
    folder = out or run / EXPORT
    _check(folder, force)
    loaded = load_model(run, tokenizer)
    from skipless.hf.modeling import as_pretrained  # with transformers, which a wrong path need not wait for

    with _aside(folder) as place:
        for part in as_pretrained(loaded.model, loaded.tokenizer, packed=loaded.packed):
            part.save_pretrained(place)
        if loaded.tokenizer.model is not None:
            (place / MODEL_FILE).write_bytes(loaded.tokenizer.model)
        (place / CARD).write_text(model_card(loaded, run), encoding="utf-8")
        _publish(place, folder, force)
    print(f"{folder}: AutoModelForCausalLM.from_pretrained loads it after `import skipless`, or with trust_remote_code")


def model_card(loaded: LoadedModel, run: Path) -> str:
    """What a reader of the hub looks for: sizes, scheme, data, losses, how to load. Paths stay at home."""
    config = loaded.model.config
    auto, task = _AUTO[config.head]
    head = ["---", "library_name: transformers", f"pipeline_tag: {task}", "tags: [skipless]", "---", ""]
    shortcuts = "without skip connections" if config.skipless else "with weighted skip connections"
    norms = "without normalisation layers" if config.norm == "none" else f"with RMSNorm ({config.norm})"
    parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    lines = [
        f"# {run.resolve().name}",
        f"A transformer {shortcuts} and {norms}, written by skipless after He et al. 2023, [Deep Transformers without "
        "Shortcuts](https://arxiv.org/abs/2302.10322).",
        "",
        *_table({"parameters": f"{parameters:,}"} | _sizes(config) | {"tokenizer": loaded.tokenizer.kind}),
        "",
        *_training(run, loaded.origin),
        "## Use",
        "The code is the package skipless, which has to be installed: `trust_remote_code=True` imports it, and runs "
        "nothing else. Pad on the left, as the tokenizer does.",
        "",
        "```python",
        f"from transformers import {auto}, AutoTokenizer",
        "",
        'folder = "."  # or the name of this repository',
        "tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)",
        f"model = {auto}.from_pretrained(folder, trust_remote_code=True)",
        'inputs = tokenizer("The signal", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))"
        if config.head == "lm"
        else "print(model(**inputs).logits)",
        "```",
        "",
        "<!-- Before you publish: add the licence (`license:` above), the data's, and what the network is for. -->",
    ]
    return "\n".join([*head, *lines, ""])


def _sizes(config: ModelConfig) -> dict[str, str]:
    heads = f"{config.heads} heads ({config.kv_heads} for keys and values)"
    mlp = f"MLPs of {config.hidden} units, {config.shaped_activation.base}" if config.hidden else "no MLPs"
    return {
        "blocks": f"{config.depth} of width {config.width}, {heads}; {mlp}{', mirrored' if config.mlp_init else ''}",
        "attention": f"`{config.scheme!r}`",
        "skips": f"attention {config.attention_skip.shortcut:g}, MLP {config.mlp_skip.shortcut:g}",
        "vocabulary": f"{config.vocab_size:,}",
        "training length": f"{config.length}",
    }


def _training(run: Path, origin: str) -> list[str]:
    """What the run's folder says of data, steps and losses; nothing for weights that are no run's newest."""
    if not (run / EXPERIMENT).is_file():
        return []
    experiment = read_experiment(run)
    data, train = experiment.data, experiment.train
    rows = {
        "experiment": experiment.name,
        "data": Path(data.folder).name if data.folder else data.corpus,
        "steps": f"{train.steps:,} of {train.batch_size} × {train.length} tokens",
        "optimiser": f"{experiment.optimizer.name}, rate {experiment.optimizer.peak_rate:g}",
    }
    if not (run / WEIGHTS).is_file():  # the run is not at its end
        rows["weights"] = origin.removeprefix(f"{run}/")
    records = read_metrics(run) if (run / METRICS).is_file() else []
    for record in records:  # the last of each wins
        named = {name: value for name, value in record.items() if name == "ema" or name.startswith("valid_")}
        for name, value in named.items():
            words = (
                "training loss, smoothed" if name == "ema" else name.replace("valid_", "validation ").replace("_", " ")
            )
            rows[words] = f"{value:.4f} at step {record['step']:,}" if value is not None else "none"
    return ["## Training", *_table(rows), ""]


def _table(rows: dict[str, str]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]


def _check(folder: Path, force: bool) -> None:
    """Refuse, before any work is done, a place that an export cannot or must not go to."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; an export is a folder: give --out another name")
    if (folder / EXPERIMENT).is_file():
        raise ValueError(f"{folder} is a run, whose weights an export would replace: give --out {folder / EXPORT}")
    if not force:
        _check_own(folder, (CONFIG, WEIGHTS))


def _check_own(folder: Path, names: Iterable[str]) -> None:
    """Refuse to replace a file that is not as an export wrote it. One that was cut short has its hashes in its part."""
    noted = [read_hashes(place) or {} for place in (folder, *_parts(folder))]
    for name in names:
        path, written = folder / name, [files[name] for files in noted if name in files]
        if path.exists() and not (path.is_file() and size_and_hash(path) in written):
            raise ValueError(
                f"{path} is there, and not as an export wrote it: move it away, give another --out, or --force to "
                "replace it"
            )


def _parts(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if is_part(path) and path.is_dir()] if folder.is_dir() else []


@contextmanager
def _aside(folder: Path) -> Generator[Path]:
    """A place to write into, and OSError or ValueError in one line where it cannot hold the export."""
    from safetensors import SafetensorError

    place, again = part_of(folder / EXPORT), "export again"
    with writing(folder, again, room="make room there"):
        place.mkdir(parents=True)
        try:
            yield place
        except SafetensorError as error:
            raise ValueError(f"{folder} could not be written ({error}): make room there, and {again}") from error
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _publish(place: Path, folder: Path, force: bool) -> None:
    """Move what is in `place` to `folder`, where other files stay. It is the old export, the new one, or none.

    With config.json a folder is a model, so it goes first and comes last.
    """
    names = {file.relative_to(place).as_posix() for file in place.rglob("*") if file.is_file()}
    for name in names:  # safetensors would keep its file from everyone else
        shutil.copymode(place / CONFIG, place / name)
    write_hashes(place, names)
    stale = set() if force else set(read_hashes(folder) or {}) - names
    if not force:
        _check_own(folder, sorted(names | stale))
    for name in (CONFIG, *stale):
        (folder / name).unlink(missing_ok=True)
    sync_folder(folder)
    for name in (*sorted(names - {CONFIG}), HASHES, CONFIG):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).replace(folder / name)
    sync_folder(folder)
    for part in _parts(folder):
        shutil.rmtree(part, ignore_errors=True)

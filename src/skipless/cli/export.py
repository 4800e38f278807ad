"""`skipless export RUN`: a trained run as a Hugging Face folder that the Auto classes load, with a model card."""

import shutil
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from skipless.console import say
from skipless.data.image_store import read_images
from skipless.data.tokenizer import MODEL_FILE
from skipless.files import HASHES, is_part, part_of, read_hashes, size_and_hash, sync_folder, write_hashes, writing
from skipless.model.config import ModelConfig
from skipless.training.load import (
    CONFIG,
    WEIGHTS,
    LoadedImageModel,
    LoadedModel,
    load_image_model,
    load_model,
    reads_images,
)
from skipless.training.run import EXPERIMENT, EXPORT, METRICS, read_experiment, read_metrics

CARD = "README.md"
_AUTO = {
    "lm": ("AutoModelForCausalLM", "text-generation"),
    "pooled": ("AutoModelForSequenceClassification", "text-classification"),
    "token": ("AutoModelForTokenClassification", "token-classification"),
}
_OF_IMAGES = ("AutoModelForImageClassification", "image-classification")


def command(
    run: Annotated[Path, typer.Argument(help="A run's folder; its newest weights are taken.")],
    out: Annotated[Path | None, typer.Option(help="Where to. Default: RUN/export.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A .model file, prepared folder or 'bytes'; by default the run's own.")
    ] = None,
    classes: Annotated[
        Path | None, typer.Option(help="Prepared images that name an image network's classes; by default the run's.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files there that no export wrote.")] = False,
) -> None:
    """Write config, weights (safetensors), tokenizer or image processor, and model card of a run for Hugging Face."""
    folder = out or run / EXPORT
    _check(folder, force)
    images = reads_images(run)
    for name, given in (("--tokenizer", tokenizer if images else None), ("--classes", None if images else classes)):
        if given is not None:
            raise ValueError(f"{name} is not for a network of {'images' if images else 'text'}, which {run} holds")
    loaded = _with_names(load_image_model(run), classes) if images else load_model(run, tokenizer)
    # with transformers, which a wrong path need not wait for
    from transformers.utils.logging import disable_progress_bar

    from skipless.hf.modeling import as_pretrained, images_as_pretrained

    disable_progress_bar()  # of one file
    with _aside(folder) as place:
        if isinstance(loaded, LoadedImageModel):
            parts = images_as_pretrained(loaded.model, loaded.classes)
        else:
            parts = as_pretrained(loaded.model, loaded.tokenizer, packed=loaded.packed)
        for part in parts:
            part.save_pretrained(place)
        if isinstance(loaded, LoadedModel) and loaded.tokenizer.model is not None:
            (place / MODEL_FILE).write_bytes(loaded.tokenizer.model)
        (place / CARD).write_text(model_card(loaded, run), encoding="utf-8")
        _publish(place, folder, force)
    auto, _ = _auto(loaded.model.config)
    print(f"{folder}: {auto}.from_pretrained loads it after `import skipless`, or with trust_remote_code")


def _auto(config: ModelConfig) -> tuple[str, str]:
    """transformers' class and task for a network."""
    return _AUTO[config.head] if config.images is None else _OF_IMAGES


def _with_names(loaded: LoadedImageModel, folder: Path | None) -> LoadedImageModel:
    """The network with the names of its classes, from prepared images where a folder of them is given."""
    known, count = loaded.classes, loaded.model.config.classes
    given = known if folder is None else read_images(folder).classes
    if given is None:
        say(
            f"the classes are LABEL_0 … LABEL_{count - 1}: their names are in the prepared images, and "
            f"{loaded.validation or 'their folder'} is not there; --classes FOLDER names them"
        )
        return loaded
    if len(given) != count or (known is not None and known != given):
        raise ValueError(
            f"the {len(given)} classes of {folder or loaded.validation} are not the {count} of {loaded.origin}: give "
            "--classes the images that it was trained on"
        )
    return replace(loaded, classes=given)


def model_card(loaded: LoadedModel | LoadedImageModel, run: Path) -> str:
    """What a reader of the hub looks for: sizes, scheme, data, losses, how to load. Paths stay at home."""
    config = loaded.model.config
    _, task = _auto(config)
    head = ["---", "library_name: transformers", f"pipeline_tag: {task}", "tags: [skipless]", "---", ""]
    shortcuts = "without skip connections" if config.skipless else "with weighted skip connections"
    norms = "without normalisation layers" if config.norm == "none" else f"with RMSNorm ({config.norm})"
    parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    rows = {"parameters": f"{parameters:,}"} | _sizes(config)
    if isinstance(loaded, LoadedModel):
        rows["tokenizer"] = loaded.tokenizer.kind
    elif loaded.classes is not None:
        names = ", ".join(loaded.classes[:20]) + (", …" if len(loaded.classes) > 20 else "")
        rows["names of classes"] = names.replace("|", "\\|")
    lines = [
        f"# {run.resolve().name}",
        f"A transformer {shortcuts} and {norms}, written by skipless after He et al. 2023, [Deep Transformers without "
        "Shortcuts](https://arxiv.org/abs/2302.10322).",
        "",
        *_table(rows),
        "",
        *_training(run, loaded.origin),
        "## Use",
        "The code is the package skipless, which has to be installed: `trust_remote_code=True` imports it, and runs "
        f"nothing else. {_ADVICE[config.images is not None]}",
        "",
        "```python",
        *_use(config),
        "```",
        "",
        "<!-- Before you publish: add the licence (`license:` above), the data's, and what the network is for. -->",
    ]
    return "\n".join([*head, *lines, ""])


_ADVICE = {
    False: "Pad on the left, as the tokenizer does.",
    True: "The image processor makes pictures as large as those of training, and normalises them.",
}


def _use(config: ModelConfig) -> list[str]:
    """Code that runs the network."""
    auto, _ = _auto(config)
    place = ["", 'folder = "."  # or the name of this repository']
    model = f"model = {auto}.from_pretrained(folder, trust_remote_code=True)"
    if config.images is not None:
        kind = {1: "L", 3: "RGB"}.get(config.images.channels)
        picture = 'Image.open("picture.png")' + (f'.convert("{kind}")' if kind else "")
        return [
            "from PIL import Image",
            f"from transformers import AutoImageProcessor, {auto}",
            *place,
            "processor = AutoImageProcessor.from_pretrained(folder)",
            model,
            f'inputs = processor({picture}, return_tensors="pt")',
            "print(model.config.id2label[int(model(**inputs).logits.argmax())])",
        ]
    return [
        f"from transformers import {auto}, AutoTokenizer",
        *place,
        "tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)",
        model,
        'inputs = tokenizer("The signal", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))"
        if config.head == "lm"
        else "print(model(**inputs).logits)",
    ]


def _sizes(config: ModelConfig) -> dict[str, str]:
    images = config.images
    heads = f"{config.heads} heads ({config.kv_heads} for keys and values)"
    mlp = f"MLPs of {config.hidden} units, {config.shaped_activation.base}" if config.hidden else "no MLPs"
    of_data = {"vocabulary": f"{config.vocab_size:,}", "training length": f"{config.length}"}
    if images is not None:
        sides, patches = f"{images.side} × {images.side}", f"{images.patch} × {images.patch}"
        words = f"{sides} of {images.channels} channels, in {images.length} patches of {patches}"
        of_data = {"images": words, "classes": f"{config.classes:,}"}
    return {
        "blocks": f"{config.depth} of width {config.width}, {heads}; {mlp}{', mirrored' if config.mlp_init else ''}",
        "attention": f"`{config.scheme!r}`",
        "skips": f"attention {config.attention_skip.shortcut:g}, MLP {config.mlp_skip.shortcut:g}",
        **of_data,
    }


def _training(run: Path, origin: str) -> list[str]:
    """What the run's folder says of data, steps and losses; nothing for weights that are no run's newest."""
    if not (run / EXPERIMENT).is_file():
        return []
    experiment = read_experiment(run)
    data, train = experiment.data, experiment.train
    unit = f"× {train.length} tokens" if experiment.model.images is None else "images"
    rows = {
        "experiment": experiment.name,
        "data": Path(data.folder).name if data.folder else data.corpus,
        "steps": f"{train.steps:,} of {train.batch_size} {unit}",
        "optimiser": f"{experiment.optimizer.name}, rate {experiment.optimizer.peak_rate:g}",
    }
    if not (run / WEIGHTS).is_file():  # the run is not at its end
        rows["weights"] = origin.removeprefix(f"{run}/")
    records = read_metrics(run) if (run / METRICS).is_file() else []
    for record in records:  # the last of each wins
        named = {name: value for name, value in record.items() if name == "ema" or name.startswith("valid_")}
        named.pop("valid_images", None)  # how many
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

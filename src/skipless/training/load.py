"""Open a trained model: a run, one of its checkpoints, or an export; with its tokenizer."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipless.console import near_names
from skipless.data.image_store import read_images
from skipless.data.store import MANIFEST, folder_tokenizer, holds_images, read_manifest
from skipless.data.tokenizer import MODEL_FILE, ByteTokenizer, Tokenizer, load_tokenizer
from skipless.files import HASHES, check_hashes, mapping, read_json, reading
from skipless.inspection.load import open_pretrained, pretrained_tokenizer
from skipless.schema import check, shortened
from skipless.training.config import Experiment
from skipless.training.run import (
    CHECKPOINTS,
    EXPERIMENT,
    EXPORT,
    FINISHED,
    WEIGHTS,
    other_fields,
    read_classes,
    read_experiment,
)

if TYPE_CHECKING:
    import torch

    from skipless.model.transformer import Transformer

CONFIG = "config.json"
_EXPORT_AGAIN = "export it again"
_OURS = "skipless"  # the model_type of our networks


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model in evaluation mode, and what is known of it.

    origin says which weights these are. length and packed are how a run trained and validated; a saved model's length
    is that of its configuration. validation is the prepared folder that a run validates on. Generated text ends at a
    token of `stop`.
    """

    model: "Transformer"
    tokenizer: Tokenizer
    origin: str
    length: int
    packed: bool = False
    validation: Path | None = None
    stop: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class LoadedImageModel:
    """A network of images in evaluation mode, and what is known of it.

    classes are their names in the order of the logits, and validation the prepared folder that a run validates on; None
    where they are not known.
    """

    model: "Transformer"
    origin: str
    classes: tuple[str, ...] | None = None
    validation: Path | None = None


def load(path: str | Path, *, tokenizer: str | Path | None = None, device: str | None = "cpu") -> "Transformer":
    """A trained model in evaluation mode, its tokenizer attached: load("runs/e-spa").generate("The signal").

    path: a run's folder (its newest weights are taken), a checkpoint in it, or a folder that save_pretrained or
    `skipless export` wrote. tokenizer names the model's own where it does not lie beside it: a .model file, a prepared
    folder or "bytes". device None is a GPU where there is one. A network of images has no tokenizer.
    """
    if reads_images(Path(path)):
        return load_image_model(path, device).model
    return load_model(path, tokenizer, device).model


def load_image_model(path: str | Path, device: str | None = "cpu") -> LoadedImageModel:
    """A network of images, from where `load` opens one, with all that is known of it."""
    path = Path(path)
    _check_kind(path, images=True)
    place, experiment = _device(device), _experiment(path)
    loaded = _saved_images(path) if experiment is None else _run_of_images(path, experiment)
    loaded.model.to(place)
    return loaded


def load_model(path: str | Path, tokenizer: str | Path | None = None, device: str | None = "cpu") -> LoadedModel:
    """A network of text, from where `load` opens one, with all that is known of it."""
    path = Path(path)
    _check_kind(path, images=False)
    given = None if tokenizer is None else find_tokenizer(tokenizer)
    place, experiment = _device(device), _experiment(path)
    loaded = _saved(path, given) if experiment is None else _run(path, experiment, given)
    loaded.model.to(place)
    loaded.model.tokenizer = loaded.tokenizer
    return loaded


def _device(name: str | None) -> "torch.device":
    from skipless.training.distributed import find_device  # torch, which a wrong path need not wait for

    return find_device(name)


def _check_kind(path: Path, images: bool) -> None:
    """Refuse, before anything is loaded, a path that holds no model, or one of the other kind."""
    check_model(path)
    if reads_images(path) != images:
        there, here = ("text", "images") if images else ("images", "text")
        raise ValueError(
            f"{path} holds a network of {there}, and this is for {here}; skipless.load({str(path)!r}) opens it"
        )


def check_model(path: Path) -> None:
    """Refuse, before anything is loaded, a path that holds no model."""
    if not ((path / EXPERIMENT).is_file() or _is_checkpoint(path) or (path / CONFIG).is_file()):
        raise ValueError(_why_not(path))


def reads_images(path: Path) -> bool:
    """Whether a run, a checkpoint in it, or a saved model is a network of images."""
    if (experiment := _experiment(path)) is not None:
        return experiment.model.images is not None
    if not (path / CONFIG).is_file():
        return False
    config = _saved_config(path)
    return config.get("model_type") == _OURS and config.get("images") is not None


def _saved_config(path: Path) -> dict[str, Any]:
    check_hashes(path, CONFIG)
    return read_json(path / CONFIG, mapping, _EXPORT_AGAIN)


def _experiment(path: Path) -> Experiment | None:
    """The experiment of a run, or of a checkpoint's run; a saved model has none."""
    folder = _run_folder(path)
    return read_experiment(folder) if (folder / EXPERIMENT).is_file() else None


def _run_folder(path: Path) -> Path:
    """The run of a checkpoint; any other path itself."""
    return path.parents[1] if _is_checkpoint(path) else path


def _is_checkpoint(path: Path) -> bool:
    return path.parent.name == CHECKPOINTS and (path.parents[1] / EXPERIMENT).is_file() and path.is_dir()


def _why_not(path: Path) -> str:
    """What a path that holds no model is, and what to give instead."""
    wanted = "give a run's folder, a checkpoint in it, or a folder that `skipless export` or save_pretrained wrote"
    if not path.exists():
        siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        near = near_names(path.name, siblings)
        hint = f"did you mean {path.parent / near[0]}?" if near else f"{wanted} (working folder {Path.cwd()})"
        return f"{path} does not exist; {hint}"
    if path.is_file():
        holder = path.parent if path.parent.name != EXPORT or path.name != WEIGHTS else path.parents[1]
        near = holder if any((holder / name).is_file() for name in (EXPERIMENT, CONFIG)) else None
        return f"{path} is a file; " + (f"did you mean its folder, {near}?" if near else wanted)
    if (path / MANIFEST).is_file():
        return f"{path} holds prepared data and no model; {wanted}"
    if (path / HASHES).is_file():
        return f"{path} holds an export that was cut short (no {CONFIG}): export it again"
    runs = sorted(file.parent.name for file in path.glob(f"*/{EXPERIMENT}"))
    if runs:
        return f"{path} is a folder of runs; name one of them: {', '.join(str(path / name) for name in runs[:5])}"
    return f"{path} is neither a run (no {EXPERIMENT}) nor a saved model (no {CONFIG}); {wanted}"


def _check_tokenizer(loaded: LoadedModel, own: Tokenizer | None) -> None:
    """Refuse a tokenizer that is not the model's own, where that is known, or has tokens the model does not know."""
    given, known = loaded.tokenizer, loaded.model.config.vocab_size
    if given.vocab_size > known:
        wanted = f"a model of {known:,} tokens"
    elif own is not None and not _same(given, own):
        wanted = f"of {own.kind}, {own.vocab_size:,} tokens, {own.sha256[:12]}"
    else:
        return
    raise ValueError(
        f"the tokenizer ({given.kind}, {given.vocab_size:,} tokens, {given.sha256[:12]}) is not that of "
        f"{loaded.origin}, {wanted}: its tokens would stand for other text"
    )


def _same(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether both give the same tokens. Those of two kinds, as an export has them, are asked by a text."""
    if one.kind == other.kind:
        return one.sha256 == other.sha256
    texts = Path(__file__).read_text(encoding="utf-8"), "ἀρχή ▁ 0xFF\n"
    return one.vocab_size == other.vocab_size and all(
        one.encode(text).tolist() == other.encode(text).tolist() for text in texts
    )


def find_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer of a prepared folder, a run, a folder that save_pretrained wrote, or a .model file; or "bytes"."""
    folder = Path(name)
    if (folder / MANIFEST).is_file():
        return folder_tokenizer(folder, read_manifest(folder).tokenizer)
    if (folder / MODEL_FILE).is_file():
        check_hashes(folder, MODEL_FILE)
        return load_tokenizer(folder / MODEL_FILE)
    if (folder / "tokenizer.json").is_file():
        from skipless.hf.tokenizer import FastTokenizer

        return FastTokenizer(pretrained_tokenizer(folder))
    return load_tokenizer(name)


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (MANIFEST, MODEL_FILE, "tokenizer.json"))


def _run(path: Path, experiment: Experiment, tokenizer: Tokenizer | None) -> LoadedModel:
    """A run of text, or a checkpoint of one."""
    run = _run_folder(path)
    own = _run_tokenizer(run, experiment)
    if (tokenizer := tokenizer or own) is None:
        raise ValueError(
            f"the tokenizer of {run} is not found: its data folder is {experiment.data.folder!r} (working folder "
            f"{Path.cwd()}); name the prepared folder or the .model file with --tokenizer, or write --tokenizer bytes"
        )
    valid = Path(experiment.data.valid or experiment.data.folder or "")
    model, origin = _weights(path, experiment)
    loaded = LoadedModel(
        model,
        tokenizer,
        origin,
        experiment.train.length,
        experiment.data.packed,
        validation=valid if (valid / MANIFEST).is_file() else None,
        stop=(tokenizer.end,),
    )
    _check_tokenizer(loaded, own)
    return loaded


def _run_tokenizer(path: Path, experiment: Experiment) -> Tokenizer | None:
    """The one kept in the run, in its prepared data, or in its export; None where there is none."""
    data = Path(experiment.data.folder or path)
    for place in (path, data, path / EXPORT):
        if _has_tokenizer(place):
            return find_tokenizer(place)
    known = any((path / name).is_file() for name in (HASHES, FINISHED))  # then any other kind lies in the run
    return ByteTokenizer() if known and experiment.model.vocab_size in (256, 257) else None


def _run_of_images(path: Path, experiment: Experiment) -> LoadedImageModel:
    """A run of images, or a checkpoint of one. The names of classes are the run's, or those of its prepared images."""
    folder, valid = experiment.data.folder, experiment.data.valid or experiment.data.folder
    classes = read_classes(_run_folder(path), experiment.model.classes or 0)
    if classes is None and folder is not None and holds_images(folder):
        classes = read_images(Path(folder)).classes
    return LoadedImageModel(*_weights(path, experiment), classes, Path(valid) if valid else None)


def _weights(path: Path, experiment: Experiment) -> "tuple[Transformer, str]":
    """A checkpoint's; those of a finished run, or of its newest checkpoint. Never an export's, which may be older."""
    from skipless.model.transformer import Transformer
    from skipless.training.checkpoint import load_checkpoint, model_from_weights, restore, verified

    if _is_checkpoint(path):
        model, step = Transformer(experiment.model), verified(path).step
        restore(path, model, None, None)
        return model.eval(), f"{path.parent}, step {step}"
    if (path / WEIGHTS).is_file():
        model = model_from_weights(path / WEIGHTS)
        differing = other_fields(model.config, experiment.model)
        if differing := [each for each in differing if not each.startswith("length ")]:  # which no weight depends on
            raise ValueError(
                f"{path / WEIGHTS} and {path / EXPERIMENT} are not of one run: in the first {differing[0]}; put back "
                "the file that was changed"
            )
        return model, str(path / WEIGHTS)
    model = Transformer(experiment.model)
    found = load_checkpoint(path / CHECKPOINTS, model)
    if found is None:
        other = f", or name its export, {path / EXPORT}" if (path / EXPORT / CONFIG).is_file() else ""
        raise ValueError(f"{path} holds no weights, neither {WEIGHTS} nor a checkpoint: train it first{other}")
    return model.eval(), f"{path / CHECKPOINTS}, step {found[0]}"


def _saved(path: Path, tokenizer: Tokenizer | None) -> LoadedModel:
    if tokenizer is None and not _has_tokenizer(path):
        if (kind := _saved_config(path).get("model_type")) != _OURS:
            raise ValueError(
                f"{path / CONFIG} is of no skipless network (model_type is {shortened(kind)}): it is damaged, or "
                "another's, which `skipless inspect` reads"
            )
        raise ValueError(
            f"{path} holds no tokenizer.json or {MODEL_FILE}: save the tokenizer beside the model, or give --tokenizer "
            "(in Python tokenizer=…); AutoModelForCausalLM.from_pretrained opens the model without one"
        )
    from skipless.model.transformer import Transformer

    saved = open_pretrained(path)
    model = saved.model
    if not isinstance(model, Transformer):
        raise ValueError(f"{path} holds a {type(saved).__name__}, not a skipless network; `skipless inspect` reads it")
    own = find_tokenizer(path) if _has_tokenizer(path) else None
    tokenizer = tokenizer or own
    assert tokenizer is not None
    ends = saved.generation_config.eos_token_id if saved.generation_config is not None else None
    with reading(path / "generation_config.json", _EXPORT_AGAIN):
        several = ends if isinstance(ends, list) else [tokenizer.end if ends is None else ends]
        stop = check(several, tuple[int, ...], "eos_token_id")
        if not all(0 <= end < model.config.vocab_size for end in stop):
            raise ValueError(f"eos_token_id is {ends}, and the model knows 0 … {model.config.vocab_size - 1}")
    packed = bool(saved.config.packed)
    loaded = LoadedModel(model, tokenizer, str(path), model.config.length, packed, stop=stop)
    _check_tokenizer(loaded, own)
    return loaded


def _saved_images(path: Path) -> LoadedImageModel:
    saved = open_pretrained(path)
    names = tuple(saved.config.id2label[number] for number in range(saved.config.num_labels))
    known = any(name != f"LABEL_{number}" for number, name in enumerate(names))  # transformers' for no name
    return LoadedImageModel(saved.model, str(path), names if known else None)

"""Checkpoints, from save to load by any number of processes; and the weights alone, as one safetensors file.

    checkpoints/step-000200/                          a checkpoint; the newest `keep` are there
        shard-00001-model-00001-of-00001.safetensors  tensors of the first process that wrote it, by DCP
        state.json                                    step, optimiser settings, size and hash of each file
    checkpoints/.step-000300.skipless-1a2b3c4d/       one being written, or what a kill left of it

Nothing is unpickled: tensors are safetensors, where DCP's own storage would be pickles, and the rest (rates, betas, the
structure of the optimiser's state) is JSON. So a checkpoint from elsewhere can do no more than be wrong. Hashes find
accidents, not forgery.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from skipless.files import (
    digest,
    hash_of,
    mapping,
    part_of,
    read_json,
    reading,
    remove_parts,
    sync_folder,
    write_json,
    write_whole,
    writing,
)
from skipless.model.config import ModelConfig
from skipless.model.fold import FoldedTransformer
from skipless.model.transformer import Transformer
from skipless.schema import build
from skipless.training.distributed import on_main, world_size

STATE = "state.json"
FORMAT = 1
CONFIG, SHA256 = "model_config", "sha256"
_OLD_SHA256 = "tensors_sha256"  # of files of before the settings were hashed too
logger = logging.getLogger("skipless")
_NAME = re.compile(r"step-(\d+)(\.old)?")


class DamagedError(ValueError):
    """A checkpoint that is not what was written; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Manifest:
    """The table of contents of a checkpoint, written last.

    optimizer is the optimiser's state with its tensors taken out (see tensors_of); files maps a name to its size and
    hash; world_size says how many processes wrote it, and any number may read it.
    """

    step: int
    world_size: int
    extra: dict[str, Any]
    optimizer: Any
    files: dict[str, tuple[int, str]]
    format: int = FORMAT

    @classmethod
    def of(cls, folder: Path, **fields: Any) -> "Manifest":
        """The manifest of the tensor files in `folder`, which are flushed to the disk as they are hashed."""
        paths = sorted(folder.glob("*.safetensors"))
        with ThreadPoolExecutor(4) as pool:  # hashing lets go of the interpreter
            files = dict(zip((path.name for path in paths), pool.map(_flushed, paths), strict=True))
        return cls(files=files, **fields)

    def write(self, folder: Path) -> None:
        """Put state.json into `folder`, hashed too."""
        values = asdict(self)
        write_json(folder / STATE, {"sha256": digest(values), **values}, indent=1)


def save_checkpoint(
    folder: Path, step: int, model: nn.Module, optimizer: Optimizer | None, extra: dict[str, Any], *, keep: int
) -> Path:
    """Write the state after `step` updates into folder/step-00…; all processes must call it and share the folder.

    `extra` is JSON that load_checkpoint gives back. A kill at any moment leaves the older checkpoints, or these and the
    new one. Afterwards the newest `keep` stay; those of later steps, left by a run that was resumed further back, go.
    OSError, in one line, if the disk is full; older checkpoints are then as they were.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least 1 checkpoint must stay for the run to be resumed")
    _check_plain(extra)
    tensors, rest = tensors_of(model, optimizer)
    target, aside = folder / f"step-{step:06d}", on_main(lambda: _aside(folder, f"step-{step:06d}"))

    def finish() -> None:
        fields = {"step": step, "world_size": world_size(), "extra": extra, "optimizer": rest}
        Manifest.of(aside, **fields).write(aside)
        _publish(aside, target)
        _retire(folder, step, keep)

    with _storing(target, aside, tensors):
        write_tensors(aside, tensors)
        on_main(finish)
    return target


def load_checkpoint(
    folder: Path, model: nn.Module, optimizer: Optimizer | None = None
) -> tuple[int, dict[str, Any]] | None:
    """Load the newest checkpoint that is whole and return its (step, extra); None if there is none at all.

    One that is damaged is named in a warning, and the next older one is taken; ValueError if all are damaged or if
    the checkpoint is of another model. Any number of processes may read what any number wrote, sharded or not. Call
    it before the first backward pass.
    """
    found = on_main(lambda: _newest_good(folder))
    if found is None:
        return None
    path, manifest = found
    restore(path, model, optimizer, manifest.optimizer)
    return manifest.step, manifest.extra


def discard_from(folder: Path, step: int) -> None:
    """Delete the checkpoints of `step` and later ones, newest first; all processes must call it."""

    def discard() -> None:
        for path in reversed(_found(folder)):
            if _step(path) >= step:
                _discard(path)

    on_main(discard)


def _step(path: Path) -> int:
    """The step of a checkpoint, by its folder's name: step-00000100, or step-00000100.old while it is replaced."""
    return int(path.name.removeprefix("step-").removesuffix(".old"))


def checkpoints_until(folder: Path, step: int) -> list[Path]:
    """The checkpoints of `step` and earlier ones, oldest first."""
    return [path for path in _found(folder) if _step(path) <= step]


def _check_plain(extra: dict[str, Any]) -> None:
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as error:
        raise ValueError(f"extra={extra!r} is not JSON ({error}); use numbers and text, such as float(loss)") from error


def _found(folder: Path) -> list[Path]:
    """Checkpoints, oldest first. One that is about to be replaced counts as older than its successor."""
    named = [(match, path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for match, path in sorted(named, key=lambda pair: (int(pair[0][1]), pair[0][2] is None))]


def _newest_good(folder: Path) -> tuple[Path, Manifest] | None:
    problems = []
    for path in reversed(_found(folder)):
        try:
            manifest = verified(path)
        except DamagedError as error:
            logger.warning("%s; this checkpoint is not used, the next older one is tried", error)
            problems.append(str(error))
        else:
            return path, manifest
    if problems:
        raise ValueError(
            f"no checkpoint in {folder} can be used: {'; '.join(problems)}. Put a copy of one back, or delete the "
            "folder to train from the start"
        )
    return None


def _aside(folder: Path, name: str) -> Path:
    """A new folder to write into; what killed writes left behind is removed first."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_parts(folder)
    aside = part_of(folder / name)
    aside.mkdir()
    return aside


def _publish(aside: Path, target: Path) -> None:
    """Give the checkpoint its name. One of that name is moved out of the way, but stays until the new one is there."""
    if target.exists():
        _discard(target.with_name(target.name + ".old"))
        target.rename(target.with_name(target.name + ".old"))
    aside.rename(target)
    sync_folder(target.parent)


def _retire(folder: Path, step: int, keep: int) -> None:
    found = _found(folder)
    reached = [path for path in found if path.suffix != ".old" and _step(path) <= step]
    for path in found:
        if path not in reached[-keep:]:
            _discard(path)


def _discard(path: Path) -> None:
    """Delete a checkpoint so that a kill in between leaves no damaged one behind."""
    if path.exists():
        doomed = part_of(path)
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


@contextmanager
def _storing(target: Path, aside: Path, tensors: Mapping[str, Tensor]) -> Generator[None]:
    """Remove what was begun if it cannot be finished, and say what is left."""
    older = _found(target.parent)
    kept = f"go on with --resume from {older[-1].name}" if older else "train again; there is no older checkpoint"
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    with writing(target, kept, room="make room, or lower train.keep", needed=needed):
        try:
            yield
        except OSError:
            on_main(lambda: shutil.rmtree(aside, ignore_errors=True))
            raise


def verified(folder: Path) -> Manifest:
    """The manifest of a checkpoint every byte of which is as written; DamagedError otherwise."""
    manifest = _read(folder / STATE)
    found = {path.name for path in folder.glob("*.safetensors")}
    for name in sorted(found ^ manifest.files.keys()):
        problem = "is missing" if name in manifest.files else f"does not belong there ({STATE} does not list it)"
        raise DamagedError(f"{folder / name} {problem}")
    for name, (size, _) in manifest.files.items():
        if (there := (folder / name).stat().st_size) != size:
            raise DamagedError(f"{folder / name} has {there:,} bytes instead of {size:,}: it is cut short or changed")
    with ThreadPoolExecutor(4) as pool:
        hashes = list(pool.map(lambda name: _sha256(folder / name), manifest.files))
    for (name, (_, expected)), sha256 in zip(manifest.files.items(), hashes, strict=True):
        if sha256 != expected:
            raise DamagedError(f"{folder / name} is changed: its SHA-256 is not the one it was written with")
    return manifest


def _read(path: Path) -> Manifest:
    try:
        values = read_json(path, mapping, what="is cut short or changed")
        with reading(path, what="is cut short or changed"):
            sha256, version = values.pop("sha256"), values["format"]
            whole = sha256 == digest(values)
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise DamagedError(str(error)) from error
    if not whole:
        raise DamagedError(f"{path} is changed: its SHA-256 is not the one it was written with")
    if version != FORMAT:
        raise DamagedError(f"{path} has format {version}, and this version of skipless reads {FORMAT}")
    try:
        with reading(path):
            return build(Manifest, values, "the state of a checkpoint")
    except ValueError as error:
        raise DamagedError(str(error)) from error


def _flushed(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path.stat().st_size, _sha256(path)


def _sha256(path: Path) -> str:
    try:
        return hash_of(path)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})") from error


def model_tensors(model: nn.Module, options: StateDictOptions | None = None) -> dict[str, Tensor]:
    """Parameters and buffers by the names they have without wrappers such as DDP's and torch.compile's."""
    return cast(dict[str, Tensor], get_model_state_dict(model, options=options))


def tensors_of(model: nn.Module, optimizer: Optimizer | None) -> tuple[dict[str, Tensor], Any]:
    """All tensors by name, and the rest of the optimiser's state as JSON that says where each tensor belongs.

    Nothing is copied. An optimiser that has not stepped is saved as such: DCP would first step it at rate 0, which
    counts as a step.
    """
    tensors = {f"model.{name}": tensor for name, tensor in model_tensors(model).items()}
    if optimizer is None:
        return tensors, None
    if optimizer.state:
        state: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
    else:
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        state = {"state": {}, "param_groups": groups}
    return tensors, _take_out(state, "optimizer", tensors)


def write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Save into `folder`, each process its own part. OSError if a file could not be written."""
    writer = HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
    with _dcp():
        dcp.save({name: tensor.contiguous() for name, tensor in tensors.items()}, storage_writer=writer)


def restore(folder: Path, model: nn.Module, optimizer: Optimizer | None, rest: Any) -> None:
    """Load what write_tensors saved, whatever number of processes it was, into modules sharded or not.

    ValueError, before anything is changed, if the checkpoint is of another model.
    """
    saved: dict[str, Any] = dict(HuggingFaceStorageReader(path=str(folder)).read_metadata().state_dict_metadata)
    described = {name: _describe(entry.properties.dtype, entry.size) for name, entry in saved.items()}
    weights = model_tensors(model)
    wanted = {f"model.{name}": _describe(tensor.dtype, tensor.shape) for name, tensor in weights.items()}
    check_same_tensors(wanted, {name: text for name, text in described.items() if name.startswith("model.")}, folder)
    if optimizer is not None and rest is None:
        raise ValueError(f"{folder} holds no optimiser's state: it was saved without one; load it without one")
    tensors: dict[str, Tensor] = {}
    with reading(folder / STATE):
        state = _optimizer_targets(model, optimizer, rest, saved, tensors) if optimizer is not None else None
    tensors |= {f"model.{name}": tensor for name, tensor in weights.items()}
    with _dcp():
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(path=str(folder)))
    set_model_state_dict(model, cast(dict[str, Any], weights))
    if optimizer is not None and state is not None:
        set_optimizer_state_dict(model, optimizer, optim_state_dict=state)


def check_same_tensors(wanted: Mapping[str, str], found: Mapping[str, str], source: str | Path) -> None:
    """Refuse tensors that are not the model's, naming them. Values are shapes, or whatever else must agree."""
    changed = [
        f"{name} is {found[name]} there, {wanted[name]} here"
        for name in wanted
        if found.get(name, wanted[name]) != wanted[name]
    ]
    complaints = {
        "missing there": [name for name in wanted if name not in found],
        "unknown here": [name for name in found if name not in wanted],
        "different": changed,
    }
    parts = [f"{kind}: {_first(names)}" for kind, names in complaints.items() if names]
    if parts:
        raise ValueError(
            f"{source} is of another model; {'; '.join(parts)}. Build the model from the run's own settings"
        )


def _first(names: list[str], shown: int = 5) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def _describe(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"


def _optimizer_targets(
    model: nn.Module, optimizer: Optimizer, rest: Any, saved: Mapping[str, Any], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """The optimiser's state in the saved structure, its tensors, yet to be filled, also by name in `tensors`."""
    live: Any = get_optimizer_state_dict(model, optimizer)  # steps a new optimiser at rate 0, to learn how it shards
    empty = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in saved.items()
        if name.startswith("optimizer.")
    }
    state = _put_back(rest, live, empty, tensors)
    for group, own in zip(state["param_groups"], live["param_groups"], strict=True):
        group.setdefault("params", own["params"])
        for name in group["params"]:  # a parameter that has not been updated has no state
            state["state"].setdefault(name, {})
    return state


def _take_out(node: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The tree as JSON; tensors move to `tensors` under the path that stands for them."""
    if isinstance(node, Tensor):
        tensors[name] = node
        return {"tensor": name}
    if isinstance(node, dict):
        return {"dict": {key: _take_out(value, f"{name}.{key}", tensors) for key, value in node.items()}}
    if isinstance(node, list | tuple):
        values = [_take_out(value, f"{name}.{index}", tensors) for index, value in enumerate(node)]
        return {"tuple" if isinstance(node, tuple) else "list": values}
    if node is None or isinstance(node, bool | int | float | str):
        return node
    raise ValueError(
        f"{name} is a {type(node).__name__}, which a checkpoint does not hold; keep it as a tensor or number"
    )


def _put_back(node: Any, live: Any, empty: Mapping[str, Tensor], tensors: dict[str, Tensor]) -> Any:
    """The inverse of _take_out, with tensors yet to be filled: the live ones, where they fit, else empty ones."""
    if not isinstance(node, dict):
        return node
    ((kind, value),) = node.items()
    if kind == "tensor":
        fits = isinstance(live, Tensor) and (live.shape, live.dtype) == (empty[value].shape, empty[value].dtype)
        tensors[value] = live if fits else torch.empty_like(empty[value], device="cpu")
        return tensors[value]
    if kind == "dict":
        below = live if isinstance(live, dict) else {}
        return {key: _put_back(child, below.get(key), empty, tensors) for key, child in value.items()}
    below = list(live) if isinstance(live, list | tuple) else []
    below += [None] * (len(value) - len(below))
    children = [_put_back(child, part, empty, tensors) for child, part in zip(value, below, strict=False)]
    return tuple(children) if kind == "tuple" else children


@contextmanager
def _dcp() -> Generator[None]:
    """DCP without its word about running in one process, and with the error itself instead of its collection."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except CheckpointException as error:  # not an Exception, and its text is a page long
        cause = next(iter(error.failures.values()))[0]
        raise cause from None


def save_weights(model: nn.Module, path: str | Path) -> None:
    """Write the whole, unsharded weights of a Transformer, as it is or inside DDP or FSDP2. All processes must call it.

    The file is there with all of its bytes or not at all.
    """
    tensors = model_tensors(model, StateDictOptions(full_state_dict=True, cpu_offload=True))
    inner = next((module for module in model.modules() if isinstance(module, Transformer)), None)
    if inner is None:
        raise ValueError(f"save_weights writes a Transformer with its settings; this is a {type(model).__name__}")
    if isinstance(inner, FoldedTransformer):
        raise ValueError("this network is folded, and no longer the one of its settings: use its own save(path)")
    config, path = inner.config, Path(path)

    def write() -> None:
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        text = config.to_json()
        metadata = {"format": "pt", CONFIG: text, SHA256: _weights_digest(whole, text)}
        with writing(path, "export again"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, _ordered(save(whole, metadata)))

    on_main(write)


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Fill a model, sharded or not, from save_weights' file. ValueError names every tensor that does not fit."""
    _, tensors = _read_weights(path)
    wanted = {name: str(tuple(tensor.shape)) for name, tensor in model_tensors(model).items()}
    check_same_tensors(wanted, {name: str(tuple(tensor.shape)) for name, tensor in tensors.items()}, path)
    set_model_state_dict(model, cast(dict[str, Any], tensors), options=StateDictOptions(full_state_dict=True))


def model_from_weights(path: str | Path, *, impl: str = "auto") -> Transformer:
    """The Transformer of save_weights' file, from that file alone, on the CPU and in evaluation mode."""
    metadata, tensors = _read_weights(path)
    if CONFIG not in metadata:
        raise ValueError(f"{path} does not say which model it is of (no {CONFIG!r} in its metadata): use load_weights")
    with reading(path, "export it again", what="says it is of a model that cannot be"):
        config = ModelConfig.from_json(metadata[CONFIG])
    with torch.device("meta"):  # initial weights would be computed only to be replaced
        model = Transformer(config, impl=impl)
    wanted = {name: str(tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
    check_same_tensors(wanted, {name: str(tuple(tensor.shape)) for name, tensor in tensors.items()}, path)
    model.load_state_dict(tensors, assign=True)
    return model.eval()


def _read_weights(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} does not exist; weights are in a run's export folder")
    with reading(path):
        path.open("rb").close()  # safetensors takes one that may not be read for one that is not there
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged, cut short or no safetensors file ({error}): export it again") from error
    noted, config = metadata.get(SHA256) or metadata.get(_OLD_SHA256), metadata.get(CONFIG, "")
    if noted is not None and noted != _weights_digest(tensors, config if SHA256 in metadata else ""):
        raise ValueError(f"{path} is damaged (tensors and settings are not those that were written): export it again")
    return metadata, tensors


def _ordered(file: bytes) -> bytes:
    """The file with its metadata in order, which safetensors shuffles: equal weights then make equal files."""
    end = 8 + int.from_bytes(file[:8], "little")
    header = json.loads(file[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return b"".join((len(text).to_bytes(8, "little"), text, memoryview(file)[end:]))


def _weights_digest(tensors: Mapping[str, Tensor], config: str) -> str:
    sha256 = hashlib.sha256(config.encode())
    for name in sorted(tensors):
        sha256.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}\n".encode())
        sha256.update(tensors[name].reshape(-1).view(torch.uint8).numpy())
    return sha256.hexdigest()

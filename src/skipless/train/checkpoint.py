"""Checkpoints of a run: whole or not there, verified when read, and the newest good one is found.

    checkpoints/step-000200/                          a checkpoint; the newest `keep` are there
        shard-00001-model-00001-of-00001.safetensors  tensors of the first process that wrote it, by DCP
        state.json                                    step, optimiser settings, size and hash of each file
    checkpoints/.step-000300.tmp-1a2b3c4d/            one being written, or what a kill left of it

Nothing is unpickled: tensors are safetensors and the rest is JSON, so a checkpoint from elsewhere can do no more than
be wrong. Hashes find accidents, not forgery.
"""

import json
import logging
import re
import shutil
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from skipless.data.shards import sync_folder
from skipless.train import state
from skipless.train.collective import on_main, world_size
from skipless.train.disk import storing
from skipless.train.manifest import DamagedError, Manifest, verified
from skipless.train.weights import load_model, load_weights, save_weights

__all__ = ["discard_from", "load_checkpoint", "load_model", "load_weights", "save_checkpoint", "save_weights"]

logger = logging.getLogger("skipless")
_NAME = re.compile(r"step-(\d+)(\.old)?")


def save_checkpoint(
    folder: Path, step: int, model: nn.Module, optimizer: Optimizer | None, extra: dict[str, Any], *, keep: int
) -> Path:
    """Write the state after `step` updates into folder/step-00…; all processes must call it and share the folder.

    `extra` is JSON that load_checkpoint gives back. A kill at any moment leaves the older checkpoints or also the new
    one. Then the newest `keep` stay; later steps than this one, which a run resumed further back left behind, go.
    OSError, in one line, if the disk is full; older checkpoints are then as they were.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least 1 checkpoint must stay for the run to be resumed")
    _check_plain(extra)
    tensors, rest = state.capture(model, optimizer)
    target, aside = folder / f"step-{step:06d}", on_main(lambda: _aside(folder, f"step-{step:06d}"))

    def finish() -> None:
        fields = {"step": step, "world_size": world_size(), "extra": extra, "optimizer": rest}
        Manifest.of(aside, **fields).write(aside)
        _publish(aside, target)
        _retire(folder, step, keep)

    with _storing(target, aside, tensors):
        state.write(aside, tensors)
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
    state.restore(path, model, optimizer, manifest.optimizer)
    return manifest.step, manifest.extra


def discard_from(folder: Path, step: int) -> None:
    """Delete the checkpoints of `step` and later ones, newest first; all processes must call it."""

    def discard() -> None:
        for path in reversed(_found(folder)):
            if int(path.name.removeprefix("step-").removesuffix(".old")) >= step:
                _discard(path)

    on_main(discard)


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
    for leftover in folder.glob(".step-*.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    aside = folder / f".{name}.tmp-{uuid.uuid4().hex[:8]}"
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
    reached = [path for path in found if path.suffix != ".old" and int(path.name.removeprefix("step-")) <= step]
    for path in found:
        if path not in reached[-keep:]:
            _discard(path)


def _discard(path: Path) -> None:
    """Delete a checkpoint so that a kill in between leaves no damaged one behind."""
    if path.exists():
        doomed = path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex[:8]}")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


@contextmanager
def _storing(target: Path, aside: Path, tensors: Mapping[str, Tensor]) -> Generator[None]:
    """Remove what was begun if it cannot be finished, and say what is left."""
    older = _found(target.parent)
    kept = f"go on with --resume from {older[-1].name}" if older else "train again; there is no older checkpoint"
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    with storing(target, kept, needed):
        try:
            yield
        except OSError:
            on_main(lambda: shutil.rmtree(aside, ignore_errors=True))
            raise


def _check_plain(extra: dict[str, Any]) -> None:
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as error:
        raise ValueError(f"extra={extra!r} is not JSON ({error}); use numbers and text, such as float(loss)") from error

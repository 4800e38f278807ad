"""The folder of a run and what it shows: settings, environment, log, checkpoints; a line of progress.

experiment.json   the whole configuration; once something is trained another one refuses the folder
tokenizer.model   that of the data (not for bytes)
classes.json      of images: the names of their classes, in the order of the logits
hashes.json       of these, and at the end of the log; a file that differs is refused
data.json         fingerprints of the prepared folders; other tokens refuse to resume
env.json          versions, device and commit of the start and of every resumption
metrics.jsonl     one JSON object per line
checkpoints/      see skipless.training.checkpoint
export/           weights to use elsewhere
finished.json     written last
.lock             process and host of who is training
"""

import dataclasses
import json
import logging
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

import skipless
from skipless.console import Progress
from skipless.data.image_store import read_images
from skipless.data.store import fingerprint, folder_tokenizer, holds_images, read_manifest
from skipless.data.tokenizer import MODEL_FILE
from skipless.files import (
    FolderLock,
    Journal,
    check_folder,
    check_hashes,
    mapping,
    read_json,
    read_lines,
    reading,
    remove_parts,
    write_hashes,
    write_json,
    write_whole,
    writing,
)
from skipless.model.config import ModelConfig
from skipless.schema import changed_fields, check
from skipless.training.config import Experiment

EXPERIMENT, DATA, ENVIRONMENT = "experiment.json", "data.json", "env.json"
METRICS, FINISHED, CLASSES = "metrics.jsonl", "finished.json", "classes.json"
CHECKPOINTS, EXPORT, WEIGHTS = "checkpoints", "export", "model.safetensors"
FREE = ("train.keep",)  # settings that may change when a run goes on
_PACKAGES = ("numpy", "scipy", "safetensors", "transformers", "triton")
# Dense bfloat16 peaks in FLOP/s, by a part of the device's name; MFU is shown where the device is known.
_PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40": 181e12, "4090": 165e12}
logger = logging.getLogger("skipless")


class RunFinishedError(ValueError):
    """The run in the folder has reached its last step: there is nothing to train."""


class RunFolder:
    """The folder of one run, held by one training at a time; a context manager that lets go of it at the end.

    In a distributed run every process opens it; the main one writes, for the others `log` and the rest do nothing.
    """

    def __init__(self, path: Path, experiment: Experiment, lock: FolderLock | None):
        self.path, self.experiment = path, experiment
        self.metrics = path / METRICS
        self.checkpoints, self.export = path / CHECKPOINTS, path / EXPORT
        self._lock = lock
        self._log = Journal(self.metrics) if lock is not None else None

    @classmethod
    def open(cls, path: str | Path, experiment: Experiment, *, resume: bool) -> "RunFolder":
        """Make the folder that of `experiment`, or take up what is there with resume=True.

        ValueError if it holds a run with other settings (naming each) or tokens, one that needs --resume, files of
        something else, or if another process is training there; RunFinishedError if there is nothing left to do.
        resume=True where no run has begun starts one, so that a command can always be run again with --resume.
        """
        from skipless.training.distributed import is_main, on_main

        path = Path(path)
        locks: list[FolderLock] = []

        def claim() -> None:
            with _storing(path):
                check_folder(path, EXPERIMENT)
                path.mkdir(parents=True, exist_ok=True)
                locks.append(FolderLock(path, "training in", "wait for it, stop it, or use another folder"))
                try:
                    _claim(path, experiment, resume)
                except BaseException:
                    locks.pop().release()
                    raise

        on_main(claim)
        return cls(path, experiment, locks[0] if is_main() else None)

    def log(self, record: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl; a kill loses no line that was logged. The record has a "step"."""
        if self._log is not None:
            if "step" not in record:
                raise ValueError(f"record {record} has no 'step'; resuming could not tell whether to keep it")
            with _storing(self.metrics):
                self._log.add(record)

    def sync(self) -> None:
        """Flush metrics.jsonl to the disk; call it before a checkpoint, which must not survive the lines before it."""
        if self._log is not None:
            with _storing(self.metrics):
                self._log.sync()

    def rewind(self, step: int | None, due: Callable[[int], bool] | None = None) -> None:
        """Drop lines after the checkpoint's step, so that the log becomes that of a run without interruption.

        step None: there is no checkpoint, and all lines go. due: losses of other steps than these go too, since a run
        logs them only as it stops. Log the lines of step s before its checkpoint.
        """

        def stays(record: dict[str, Any]) -> bool:
            extra = due is not None and "loss" in record and not due(record["step"])
            return step is not None and record["step"] <= step and not extra

        if self._log is None:
            return
        if step and not self.metrics.is_file():
            logger.warning("%s is gone, and with it the log of the steps up to %d", self.metrics, step)
        elif self.metrics.is_file():
            records = read_metrics(self.metrics)
            if step and due is not None and due(step) and all(record["step"] != step for record in records):
                last = max((record["step"] for record in records), default=0)
                words = "%s ends at step %d, before the checkpoint of step %d: lines are lost"
                logger.warning(words, self.metrics, last, step)
            with _storing(self.metrics):
                self._log.replace(record for record in records if stays(record))

    def finish(self, **summary: Any) -> None:
        """Mark the run as finished, with what is worth knowing at a glance."""
        if self._log is not None:
            self.sync()
            with _storing(self.path / FINISHED):
                _note_hashes(self.path, METRICS)
                write_json(self.path / FINISHED, summary)

    def close(self) -> None:
        try:
            if self._log is not None:
                with _storing(self.metrics):
                    self._log.close()
        finally:
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _storing(path: Path) -> AbstractContextManager[None]:
    return writing(path, "go on with --resume", room="make room, or lower train.keep")


def _claim(path: Path, experiment: Experiment, resume: bool) -> None:
    file, text = path / EXPERIMENT, experiment.to_json().encode() + b"\n"
    begun = file.is_file() and _trained(path)
    if begun:
        _check_same(path, read_experiment(path), experiment)
        if (path / FINISHED).is_file():
            raise RunFinishedError(f"the run in {path} is finished; to train again, use another folder")
        if not resume:
            raise ValueError(f"{path} holds this run, unfinished: add --resume to go on, or use another folder")
        _check_tokens(path / DATA, experiment)
        check_hashes(path)
    elif file.is_file() and file.read_bytes() != text and not check_hashes(path, EXPERIMENT):
        raise ValueError(f"{file} is there, and no run has written it; give the run a folder of its own")
    elif resume:
        logger.info("%s holds no trained step yet: the run starts from the beginning, with these settings", path)
    remove_parts(path)
    if not begun:  # experiment.json first: with it the folder is a run's
        write_whole(file, text)
        _keep_names(path, experiment)
        write_json(path / DATA, _fingerprints(experiment))
    _note_hashes(path)
    for name in (CHECKPOINTS, EXPORT):
        (path / name).mkdir(exist_ok=True)
    _note_environment(path / ENVIRONMENT, begun)


def _keep_names(path: Path, experiment: Experiment) -> None:
    """Put the tokenizer of the data, or the names of its classes, into the run, which then needs its data no more."""
    folder = Path(experiment.data.folder or "")
    for name in (MODEL_FILE, CLASSES):  # of a start that came to nothing
        (path / name).unlink(missing_ok=True)
    if experiment.model.images is not None:
        if holds_images(folder):
            write_json(path / CLASSES, list(read_images(folder).classes))
    elif fingerprint(folder) is not None:
        model = folder_tokenizer(folder, read_manifest(folder).tokenizer).model
        if model is not None:
            write_whole(path / MODEL_FILE, model)


def _note_hashes(path: Path, *more: str) -> None:
    write_hashes(path, [name for name in (EXPERIMENT, MODEL_FILE, CLASSES, *more) if (path / name).is_file()])


def _trained(path: Path) -> bool:
    """Whether a run has come to anything; a start that was refused has not, and its folder is free."""
    metrics = path / METRICS
    logged = metrics.is_file() and metrics.stat().st_size > 0
    return logged or (path / FINISHED).is_file() or any((path / CHECKPOINTS).glob("step-*"))


def _check_same(path: Path, there: Experiment, here: Experiment) -> None:
    if differing := other_fields(there, _with_data_of(path, there, here), "there", "here"):
        raise ValueError(
            f"{path} holds a run with other settings: {'; '.join(differing)}. To go on with that run, repeat its "
            "settings and add --resume; for these settings, use another folder"
        )


def _with_data_of(path: Path, there: Experiment, here: Experiment) -> Experiment:
    """`here` with the run's names for folders that hold its very tokens by another name: moved, or spelt otherwise."""
    if not (path / DATA).is_file():
        return here
    noted = read_json(path / DATA, mapping, "delete it to go on without")
    same = {name: value for name, value in _fingerprints(here).items() if value and noted.get(name) == value}
    names = {name.removeprefix("data."): getattr(there.data, name.removeprefix("data.")) for name in same}
    return dataclasses.replace(here, data=dataclasses.replace(here.data, **names))


def other_fields(
    one: Experiment | ModelConfig, two: Experiment | ModelConfig, there: str = "", here: str = "in the second"
) -> list[str]:
    """The fields in which two configurations differ, in words; those that may change as a run goes on are left out."""
    changed = changed_fields(*(json.loads(each.to_json()) for each in (one, two)))
    return [
        f"{name} is {old!r}{there and f' {there}'}, {new!r} {here}" for name, old, new in changed if name not in FREE
    ]


def _check_tokens(file: Path, experiment: Experiment) -> None:
    """Refuse tokens that were prepared anew since the run began; a folder of before such notes has none to compare."""
    if not file.is_file():
        return
    there = read_json(file, mapping, "delete it to go on without")
    for name, here in _fingerprints(experiment).items():
        if here and (noted := there.get(name)) != here:
            raise ValueError(
                f"{name} holds other tokens ({here}) than when the run in {file.parent} began ({noted}); prepare "
                f"them again as they were, or use another folder for a new run. To go on regardless, delete {file}"
            )


def _fingerprints(experiment: Experiment) -> dict[str, str | None]:
    folders = {"data.folder": experiment.data.folder, "data.valid": experiment.data.valid}
    return {name: fingerprint(folder) for name, folder in folders.items() if folder is not None}


def _note_environment(file: Path, begun: bool) -> None:
    noted = environment()
    if begun and file.is_file():
        first = read_json(file, mapping, "delete it to go on without")
        with reading(file, "delete it to go on without"):
            noted = {**first, "resumed": [*first.get("resumed", []), noted]}
    write_json(file, noted)


def environment() -> dict[str, Any]:
    """Everything outside the experiment that a result may depend on. No environment variables: they hold secrets."""
    import torch

    from skipless.training.distributed import world_size

    cuda = torch.cuda.is_available()
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "skipless": skipless.__version__,
        "git": git_state(Path(skipless.__file__).parent),
        "torch": torch.__version__,
        "packages": {name: _version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda if cuda else None,
        "device": torch.cuda.get_device_name() if cuda else (platform.processor() or platform.machine()),
        "world_size": world_size(),
        "threads": torch.get_num_threads(),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the checkout that tracks the code in `folder`, and whether files there differ from it; else None."""
    try:
        _git(folder, "ls-files", "--error-unmatch", "__init__.py")  # an installed copy may lie inside another checkout
        return {"commit": _git(folder, "rev-parse", "HEAD"), "dirty": bool(_git(folder, "status", "--porcelain", "."))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30, env=quiet)
    return done.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def read_experiment(path: str | Path) -> Experiment:
    """The configuration of the run in a folder."""
    file = Path(path) / EXPERIMENT
    if not file.is_file():
        raise ValueError(f"{path} is not a run (no {EXPERIMENT}); `skipless train` makes one")
    check_hashes(file.parent, EXPERIMENT)
    return read_json(file, Experiment.from_dict, "use another folder")


def read_classes(path: Path, count: int) -> tuple[str, ...] | None:
    """The names of the `count` classes of a run's images; None where it has kept none, as runs of older versions."""
    file = path / CLASSES

    def checked(values: Any) -> tuple[str, ...]:
        names = check(values, tuple[str, ...], "classes")
        if len(names) != count or len(set(names)) < count:
            raise ValueError(f"it names {len(set(names))} classes, and the network has {count}")
        return names

    if not file.is_file():
        return None
    check_hashes(path, CLASSES)
    return read_json(file, checked, "delete it: the names are then those of the prepared images")


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All finished lines of a run's log; path: the file, or the run's folder.

    Numbers that are not finite are NaN and Infinity, as Python's json has them.
    """
    path = Path(path)
    path = path / METRICS if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"{path} is no file; a run writes it as it trains")
    if path.name == METRICS:
        check_hashes(path.parent, METRICS)
    with reading(path, "delete the line to read the rest", what="is damaged"):
        records = read_lines(path)
        for number, record in enumerate(records, 1):
            if "step" not in record:
                raise ValueError(f"line {number} has no step")
            for name, value in record.items():
                if value is not None or name == "step":
                    check(value, int if name == "step" else float, f"line {number}: {name}")
            if not 0 <= record["step"] < 1 << 53:
                raise ValueError(f"line {number}: step is {record['step']}; steps count from 0")
    return records


def read_probe(file: Path) -> tuple[int, np.ndarray]:
    """Step and kernels, (L+1, T, T), of a file in a run's probes/; ValueError names one that is something else."""
    with reading(file, "delete it to leave it out", what="is not a probe of a run, or damaged"):
        with np.load(file, allow_pickle=False) as saved:
            step, states = int(saved["step"]), saved["states"]
        if states.ndim != 3 or states.shape[1] != states.shape[2] or not states.shape[0] or states.shape[1] < 2:
            raise ValueError(f"kernels shaped {states.shape} instead of (blocks + 1, T, T) with T of 2 or more")
        return step, states.astype(np.float64, casting="same_kind")


def read_result(path: str | Path) -> dict[str, Any]:
    """What the finished run in a folder wrote of itself."""
    file = Path(path) / FINISHED
    if not file.is_file():
        raise ValueError(f"{path} is not a finished run (no {FINISHED}); go on with --resume")

    def checked(values: Any) -> dict[str, Any]:
        check(values.get("valid"), dict[str, float | None] | None, "valid")
        if values.get("weights") not in (None, WEIGHTS):
            raise ValueError(f"weights is {values['weights']!r}; a run's weights are {WEIGHTS}")
        return dict(values)

    return read_json(file, checked)


class Display:
    """Shows lines of a run of `steps` steps. flops_per_token is 6 per parameter plus attention's, for MFU.

    patches: of an image, whose number is then shown in place of tokens; 0 for text.
    """

    def __init__(
        self,
        name: str,
        steps: int,
        *,
        flops_per_token: float = 0.0,
        device: str = "",
        quiet: bool = False,
        patches: int = 0,
    ):
        self.name, self.flops_per_token, self.patches = name, flops_per_token, patches
        self.peak = next((peak for part, peak in _PEAKS.items() if part in device), None)
        self._progress = Progress(every=5.0, quiet=quiet)
        self._progress.start(name, steps)

    def show(self, line: Mapping[str, Any], pace: float) -> None:
        """The newest line of the log, at so many tokens a second: always on the bar, every few seconds as text."""
        speed = f"{pace / self.patches:,.0f} images/s" if self.patches else f"{pace:,.0f} tok/s"
        if self.peak:
            speed += f"  MFU {100 * pace * self.flops_per_token / self.peak:.0f}%"
        text = f"loss {line['loss']:.3f}  ema {line['ema']:.3f}  grad {line['gradient']:.2g}  {speed}"
        self._progress.show(text, done=line["step"])

    def say(self, text: str) -> None:
        """A line of its own: an evaluation, a warning, a checkpoint."""
        self._progress.say(f"{self.name} {text}")

    def stop(self) -> None:
        self._progress.stop()


def flops_per_token(experiment: Experiment) -> float:
    """6 per weight, and causal attention's 6·T·d per block: what training a token costs, forward and backward.

    Attention that sees all locations costs twice as much.
    """
    model = experiment.model
    attention = 6.0 if model.causal else 12.0
    return 6.0 * model.matrix_parameters + attention * model.depth * model.width * experiment.train.length


def least_bytes(experiment: Experiment, processes: int = 1, device: str = "cpu") -> float:
    """What training takes at the very least in each of so many processes: less than it will take.

    Weights, gradients and one moment in float32; the rows' tokens; what blocks keep for their backward pass, which with
    train.recompute is their inputs and the rest of one; what the loss of tokens keeps, the last one's output; and on a
    CPU the objects that blocks are made of.
    """
    model, train = experiment.model, experiment.train
    sharded = processes if train.strategy == "fsdp" else 1
    rows = train.batch_size / processes
    tokens, number = rows / train.accumulate * train.length, 4 if train.precision == "fp32" else 2
    blocks = 1 if train.recompute else model.depth
    streams = model.depth + (model.head != "pooled")
    kept = tokens * number * (streams * model.width + blocks * _kept_numbers(experiment, device))
    objects = _BLOCK_OBJECTS * model.depth if device == "cpu" else 0
    return 12.0 * model.matrix_parameters / sharded + 8.0 * rows * train.length + kept + objects


_BLOCK_OBJECTS = 20_000  # bytes; 29,000 were measured without MLPs, 44,000 with


def _kept_numbers(experiment: Experiment, device: str) -> float:
    """What a block keeps of a token besides its input: queries and keys, readers' values and outputs, hidden units.

    Attention's weights too, where its bias is trained and no fused kernel adds it: with relative positions, and on a
    CPU with gains.
    """
    model = experiment.model
    kv = model.width // model.heads * (model.kv_heads or model.heads)
    dense = model.position == "relative" or (model.bias_gain and device == "cpu")
    weights = (model.heads + model.readers) * experiment.train.length if dense else 0
    return model.width + kv + 4 * model.reader_width + (model.hidden or 0) + weights


class Board:
    """TensorBoard's event files, where the package is installed."""

    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                "TensorBoard is not installed: pip install 'skipless[log]', or leave out --tensorboard"
            ) from error
        self._writer = SummaryWriter(str(folder))

    def add(self, record: dict[str, Any]) -> None:
        """Every number of a log record, by its step."""
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()

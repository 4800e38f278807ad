"""Records of finished runs, the facts of the data they were trained on, and the log that holds them."""

import dataclasses
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from skipless.data.image_store import ImageStore
from skipless.data.store import TokenStore, fingerprint
from skipless.files import FolderLock, append_line, read_lines, reading, remove_parts
from skipless.model.config import Images, ModelConfig
from skipless.schema import build

if TYPE_CHECKING:
    from skipless.paper.runs import Run

CORPORA = {"train-00": "Wikipedia", "parts": "Wikipedia"}  # texts by the name of their file or folder, as logs have it


class _Known:
    """Facts, written to a log."""

    def to_json(self) -> dict[str, Any]:
        """All but the folder, which is another one on another machine."""
        return {name: value for name, value in dataclasses.asdict(cast(Any, self)).items() if name != "folder"}


@dataclass(frozen=True)
class Text(_Known):
    """The facts of prepared tokens: enough to rebuild every experiment on them, without the folder.

    repeat_rate is rounded to three decimals, as schemes take it. unigram is the entropy of its tokens in nats: what a
    network reaches that ignores its context. fingerprint names the very tokens.
    """

    name: str
    vocab_size: int
    repeat_rate: float
    unigram: float
    tokens: int
    fingerprint: str
    folder: str | None = None
    kind: ClassVar[str] = "Text"

    def sizes(self, _: ModelConfig) -> dict[str, Any]:
        """Changes to a network that make it one for these tokens."""
        return {"vocab_size": self.vocab_size}

    @classmethod
    def read(cls, folder: str | Path) -> "Text":
        """The facts of a folder made by `skipless prepare`."""
        folder = Path(folder).resolve()
        store = TokenStore(folder)
        if store.manifest.shards("valid"):
            TokenStore(folder, "valid")  # verified now and noted, so that runs side by side find it so
        counts = np.zeros(store.vocab_size)
        for piece in store.pieces():
            counts += np.bincount(piece, minlength=store.vocab_size)
        return cls(
            name=str(store.manifest.options["corpus"]["name"]),
            vocab_size=store.vocab_size,
            repeat_rate=round(store.repeat_rate or 0.0, 3),
            unigram=_entropy(counts),
            tokens=len(store),
            fingerprint=fingerprint(folder) or "",
            folder=str(folder),
        )

    @property
    def title(self) -> str:
        """Its name as a reader knows it, and its size: "Wikipedia (train-00), 28.9M tokens"; or bytes."""
        name = f"{CORPORA[self.name]} ({self.name})" if self.name in CORPORA else self.name
        return f"{name}, {self.tokens / 1e6:.1f}M {'bytes' if self.vocab_size == 256 else 'tokens'}"

    def describe(self) -> str:
        return f"{self.title} of {self.vocab_size:,} kinds (unigram {self.unigram:.2f})"


@dataclass(frozen=True)
class ImageSet(_Known):
    """The facts of prepared images.

    repeat_rate, to three decimals, is that of patches as large as the presets' (ImageStore.repeat_rate). unigram is the
    entropy of their classes in nats: what a network reaches that does not look. fingerprint names the very pixels.
    """

    name: str
    side: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: int
    repeat_rate: float
    unigram: float
    images: int
    fingerprint: str
    folder: str | None = None
    kind: ClassVar[str] = "Images"

    @classmethod
    def read(cls, folder: str | Path) -> "ImageSet":
        """The facts of a folder made by `skipless prepare --images`."""
        folder = Path(folder).resolve()
        store = ImageStore(folder)
        found = store.manifest
        if "valid" in found.splits:
            ImageStore(folder, "valid")  # verified now and noted, so that runs side by side find it so
        counts = np.bincount(store.labels, minlength=len(found.classes))
        patch = Images(found.side, Images.patch, found.channels, found.mean, found.std).patch
        return cls(
            name=str(found.options.get("images", {}).get("name", folder.name)),
            side=found.side,
            channels=found.channels,
            mean=found.mean,
            std=found.std,
            classes=len(found.classes),
            repeat_rate=round(store.repeat_rate(patch), 3),
            unigram=_entropy(counts),
            images=len(store),
            fingerprint=fingerprint(folder) or "",
            folder=str(folder),
        )

    def sizes(self, model: ModelConfig) -> dict[str, Any]:
        """Changes to a network of images that make it one for these."""
        patch = Images.patch if model.images is None else model.images.patch
        images = Images(self.side, patch, self.channels, self.mean, self.std)
        return {"images": images, "length": images.length, "classes": self.classes}

    @property
    def title(self) -> str:
        """Its name and its size: "cifar10, 50,000 images"."""
        return f"{self.name}, {self.images:,} images"

    def describe(self) -> str:
        return f"{self.title} of {self.side} × {self.side} in {self.classes} classes (entropy {self.unigram:.2f})"


Facts = Text | ImageSet


def facts_of(values: Mapping[str, Any]) -> Facts:
    """The facts that a record holds; ValueError where they are none."""
    kind = ImageSet if "classes" in values else Text
    return build(kind, dict(values), "text", "text.")


def _entropy(counts: np.ndarray) -> float:
    """The entropy of drawing by these counts, in nats to four decimals."""
    shares = counts[counts > 0] / counts.sum()
    return round(float(-(shares * np.log(shares)).sum()), 4)


CURVE_POINTS = 100
TAIL_STEPS, TAIL_SHARE = 200, 10  # the final loss is the mean of the last 200 steps, or of a tenth if that is less


@dataclass(frozen=True)
class Record:
    """A finished run: a line of a log, whose keys are these names; item is the table that asked for it first.

    Losses are infinite where it diverged. multiple: of the usual steps. step_seconds: the median over the run, which
    compares with others only where jobs, the number of runs side by side, is 1. curve: [step, smoothed loss], thinned.
    kernels: a few cosines, packed by skipless.paper.measures. by_block: measures of every block. embedding_rate: None
    is the scale's own.
    """

    key: str
    item: str
    arm: str
    scale: str
    rate: float
    seed: int
    multiple: float
    measure: str
    steps: int
    train_loss: float
    valid_loss: float
    diverged_at: int | None
    seconds: float
    step_seconds: float
    jobs: int
    device: str
    torch: str
    commit: str
    time: str
    text: dict[str, Any]
    measures: dict[str, float] = field(default_factory=dict)
    curve: list[list[float]] = field(default_factory=list)
    kernels: dict[str, Any] = field(default_factory=dict)
    by_block: dict[str, list[float]] = field(default_factory=dict)
    embedding_rate: float | None = None

    @property
    def diverged(self) -> bool:
        return self.diverged_at is not None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; null for what is infinite or missing."""
        return {name: _plain(value) for name, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Record":
        """The inverse; ValueError where fields are missing or of another type."""
        known = {f.name for f in dataclasses.fields(cls)}
        values = {name: value for name, value in data.items() if name in known}
        for name, missing in (("train_loss", math.inf), ("valid_loss", math.inf), ("step_seconds", math.nan)):
            values[name] = missing if values.get(name) is None else values[name]
        record = build(cls, values, "the record of a run")
        facts_of(record.text)
        if any(len(point) != 2 for point in record.curve):
            raise ValueError("curve must be a list of [step, loss]")
        return record

    def value(self, quantity: str) -> float | None:
        """A loss, the perplexity of validation, or a measure; None where it was not taken. Accuracy is in per cent."""
        if quantity == "valid_perplexity":
            return math.exp(self.valid_loss) if self.valid_loss < 700.0 else math.inf
        if quantity in ("train_loss", "valid_loss"):
            return getattr(self, quantity)
        return self.measures.get(quantity)


def losses_of(metrics: Sequence[Mapping[str, Any]], ema: float) -> list[tuple[int, float]]:
    """(last step, mean loss) of every logged interval, from the moving average, which has seen each step.

    Within an interval the weights differ by (1−ema)ⁿ; the first interval starts from the first loss, as the average.
    """
    points, before, last = [], None, 0
    for line in metrics:
        if "ema" not in line:
            continue
        keep = (1.0 - ema) ** (line["step"] - last)
        mean = line["ema"] if before is None or keep == 1.0 else (line["ema"] - keep * before) / (1.0 - keep)
        points.append((line["step"], mean))
        before, last = line["ema"], line["step"]
    return points


def final_loss(metrics: Sequence[Mapping[str, Any]], ema: float, steps: int) -> float:
    """The mean training loss at the end of a run that reached its last step; infinite for one that did not."""
    points = losses_of(metrics, ema)
    if not points or points[-1][0] < steps:
        return math.inf
    tail = min(TAIL_STEPS, max(steps // TAIL_SHARE, 1))
    spans = [(end - start, loss) for (start, _), (end, loss) in zip([(0, 0.0), *points], points, strict=False)]
    chosen, covered = [], 0
    for span, loss in reversed(spans):
        if covered >= tail:
            break
        chosen.append((span, loss))
        covered += span
    return sum(span * loss for span, loss in chosen) / covered


def thinned(metrics: Sequence[Mapping[str, Any]], most: int = CURVE_POINTS) -> list[list[float]]:
    """At most `most` of [step, smoothed loss], evenly, the last one among them."""
    points = [[line["step"], round(line["ema"], 4)] for line in metrics if "ema" in line]
    if len(points) <= most:
        return points
    picked = sorted({round((index + 1) * len(points) / most) - 1 for index in range(most)})
    return [points[index] for index in picked]


def record_of(run: "Run", metrics: Sequence[Mapping[str, Any]], outcome: Mapping[str, Any]) -> Record:
    """The record of a run from its log; outcome holds what the log does not: times, device, divergence, measures."""
    train, diverged = run.experiment.train, outcome.get("diverged_at")
    valid = [line["valid_loss"] for line in metrics if line.get("valid_loss") is not None]
    right = [line["valid_accuracy"] for line in metrics if line.get("valid_accuracy") is not None]
    accuracy = {"accuracy": 100.0 * right[-1]} if right and diverged is None else {}
    own = ("key", "arm", "scale", "rate", "seed", "multiple", "measure", "embedding_rate")
    return Record(
        **{name: getattr(run, name) for name in own},
        item=run.table,
        steps=train.steps,
        train_loss=math.inf if diverged is not None else final_loss(metrics, train.ema, train.steps),
        valid_loss=valid[-1] if valid and diverged is None else math.inf,
        diverged_at=diverged,
        text=run.text.to_json(),
        curve=thinned(metrics),
        **{name: outcome[name] for name in ("seconds", "step_seconds", "jobs", "device", "torch", "commit", "time")},
        measures={**outcome.get("measures", {}), **accuracy},
        kernels=dict(outcome.get("kernels", {})),
        by_block=dict(outcome.get("by_block", {})),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value


LOGS, RUNS = "logs", "runs"


class ResultsFolder:
    """A folder of results at one scale: logs of runs, run folders while they last, pages and figures."""

    def __init__(self, path: str | Path, scale: str):
        self.path, self.scale = Path(path), scale
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"--out is {self.path}, a file; name a folder")
        self.records = self._read()

    def log(self, table: str) -> Path:
        """The log of the runs that a table asked for."""
        return self.path / LOGS / f"{table}-{self.scale}.jsonl"

    def run_folder(self, key: str) -> Path:
        """Where a run trains; gone when its record is written, unless its weights are wanted."""
        return self.path / RUNS / f"{self.scale}-{key}"

    def add(self, record: Record) -> None:
        """Write a record, flushed to the disk; what is kept in memory is what a later call will read."""
        file = self.log(record.item)
        file.parent.mkdir(parents=True, exist_ok=True)
        line = record.to_json()
        append_line(file, line)
        self.records[record.key] = Record.from_json(line)

    def texts(self, images: bool = False) -> list[Facts]:
        """The texts that runs were trained on, the most frequent first; or the sets of images."""
        counts: dict[str, list] = {}
        for record in self.records.values():
            counts.setdefault(record.text["fingerprint"], []).append(record.text)
        known = [facts_of(found[0]) for found in sorted(counts.values(), key=len, reverse=True)]
        return [facts for facts in known if isinstance(facts, ImageSet) == images]

    @contextmanager
    def locked(self) -> Generator[None]:
        """Keep a second `skipless reproduce` out of the folder; the lock ends with the process."""
        self.path.mkdir(parents=True, exist_ok=True)
        with FolderLock(self.path, "reproducing in", "wait for it, or use another --out"):
            remove_parts(self.path)
            self.records = self._read()  # of what another one has added before it let go
            yield

    def _read(self) -> dict[str, Record]:
        files = sorted((self.path / LOGS).glob(f"*-{self.scale}.jsonl"))
        return {record.key: record for file in files for record in read_records(file)}


def read_records(file: Path) -> list[Record]:
    """The records of a log; ValueError names it, and the line that is none."""
    records = []
    with reading(file, "move it away to go on without"):
        for number, line in enumerate(read_lines(file), 1):
            with reading(f"line {number}", what="is not the record of a run"):
                records.append(Record.from_json(line))
    return records

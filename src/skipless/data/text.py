"""Text: a corpus by its name or path, read document by document, and which documents are held out for validation."""

import hashlib
import logging
import math
import re
import sysconfig
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from glob import glob, has_magic
from importlib import import_module
from itertools import islice
from pathlib import Path
from platform import python_version
from typing import Any

from skipless.data import formats
from skipless.data.formats import Reading, Seen, named_errors, wikitext_articles

# of the Hugging Face hub: name -> (repository, configuration, streaming)
DATASETS = {
    "wikitext-103": ("Salesforce/wikitext", "wikitext-103-raw-v1", False),
    "c4": ("allenai/c4", "en", True),
}
# in the name of a file that is not to be trained on
HELD_OUT = re.compile(r"(^|[._-])(valid|validation|val|dev|test)([._-]|\d|$)")
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
EDGE = 1 << 16  # bytes at either end of a file that its fingerprint reads


@dataclass(frozen=True)
class FilePart:
    """One local file. The name is its path below the folder it was found in, so that a corpus can be moved."""

    path: Path
    name: str
    reading: Reading = field(default_factory=Reading)

    def documents(self, skip: int = 0, seen: Seen | None = None) -> Iterator[str]:
        """Its documents after the first `skip`; `seen` hears how many stored bytes each read took."""
        return formats.documents(self.path, self.reading, skip, seen)

    def size(self) -> int:
        return self.path.stat().st_size

    def fingerprint(self) -> str:
        """Hash of the name, the size, and the first and last 64 KiB: quick at any size, blind to edits in between."""
        size = self.size()
        with named_errors(self.path), self.path.open("rb") as file:
            digest = hashlib.sha256(f"{self.name}\0{size}\0".encode() + file.read(EDGE))
            file.seek(max(size - EDGE, 0))
            digest.update(file.read(EDGE))
        return digest.hexdigest()


@dataclass(frozen=True)
class HubPart:
    """One split of a dataset on the hub. WikiText's lines are put together to articles; C4 is streamed."""

    dataset: str
    split: str

    @property
    def name(self) -> str:
        return f"{self.dataset} {self.split}"

    def documents(self, skip: int = 0, seen: Seen | None = None) -> Iterator[str]:
        """The split's documents after the first `skip`; the hub is reached here and not before."""
        with _hub_errors(self.dataset):
            rows = self._rows()
            if self.dataset == "wikitext-103":
                lines = (row["text"].encode() for row in rows)
                yield from (text.decode() for text in islice(wikitext_articles(lines), skip, None) if text)
            else:
                yield from (row["text"] for row in rows.skip(skip))

    def _rows(self) -> Any:
        repository, configuration, streaming = DATASETS[self.dataset]
        datasets = hub_datasets(self.dataset)
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its five retries; the error says all
        return datasets.load_dataset(repository, configuration, split=self.split, streaming=streaming)

    def size(self) -> None:
        """Not known beforehand."""

    def fingerprint(self) -> str:
        """A hash of the name: the hub's files are taken as published."""
        return hashlib.sha256(repr((DATASETS[self.dataset], self.split)).encode()).hexdigest()


Part = FilePart | HubPart  # a piece of a corpus that can be read by itself, from any of its documents on


@dataclass(frozen=True)
class Corpus:
    """Named text: iterate for its documents.

    `validation` is the text held out by whoever published it, if any; else valid_fraction is a sensible share of the
    documents to hold out.
    """

    name: str
    parts: tuple[Part, ...]
    validation: "Corpus | None" = None
    valid_fraction: float = 0.005

    def __iter__(self) -> Iterator[str]:
        for part in self.parts:
            yield from part.documents()

    def fingerprint(self) -> str:
        return hashlib.sha256("\n".join(part.fingerprint() for part in self.parts).encode()).hexdigest()


def hub_datasets(name: str) -> Any:
    """Hugging Face datasets, which an extra installs; name: what needs it."""
    try:
        return import_module("datasets")
    except ImportError as error:
        raise ValueError(f"{name} needs Hugging Face datasets: pip install 'skipless[data]'") from error


@contextmanager
def _hub_errors(name: str) -> Generator[None]:
    """One line for the many ways in which the hub cannot be reached."""
    try:
        yield
    except (ValueError, GeneratorExit):
        raise
    except Exception as error:
        first = (str(error).strip() or "no reason given").splitlines()[0]
        raise OSError(
            f"{name} could not be read from the Hugging Face hub ({type(error).__name__}: {first[:200]}): check the "
            "network, HF_HUB_OFFLINE and any proxy, then run the same command again; or give a path to a copy, as in "
            "skipless prepare 'wikitext/*.parquet'"
        ) from error


def open_corpus(spec: str | Path, reading: Reading | None = None, download: bool = False) -> Corpus:
    """The corpus called "stdlib", "wikitext-103" or "c4", or that of a file, a folder or a glob.

    "stdlib" is the source of the running Python's standard library, without its tests: 12 MB, on every machine. The
    hub's corpora need download=True. In a folder, files named valid, validation, val, dev or test (as in
    "wiki.valid.raw.xz") are not part of the text; valid, validation, val and dev make its `validation`.
    """
    reading = reading or Reading()
    if spec == "stdlib":
        return _standard_library()
    if spec in DATASETS:
        train, validation = _hub_parts(str(spec), download)
        return Corpus(str(spec), (train,), Corpus(f"{spec} validation", (validation,)))
    path = Path(spec).expanduser()
    if path.is_dir():
        return _folder(path, reading)
    if path.is_file():
        return Corpus(_stem(path), (_file(path, path.name, reading),))
    found = sorted(Path(name) for name in glob(str(path), recursive=True)) if has_magic(str(path)) else []
    found = [file for file in found if file.is_file()]
    if not found:
        raise ValueError(
            f"no corpus {str(spec)!r}: no file, folder or glob of that name is here (working folder {Path.cwd()}), and "
            f"the named corpora are stdlib, {', '.join(DATASETS)}"
        )
    return Corpus(_stem(found[0].parent), tuple(_file(file, file.name, reading) for file in found))


def _hub_parts(name: str, download: bool) -> tuple[HubPart, HubPart]:
    """The training and validation split of a named dataset, if going to the network is allowed."""
    if not download:
        raise ValueError(
            f"{name} comes from the Hugging Face hub, and no network is used unless asked for: add --download to "
            f"`skipless prepare {name}` or `skipless eval` (download=True), or give a path to text"
        )
    return HubPart(name, "train"), HubPart(name, "validation")


def _standard_library() -> Corpus:
    folder = Path(sysconfig.get_path("stdlib"))
    named = {path.relative_to(folder): path for path in sorted(folder.rglob("*.py"))}
    parts = tuple(
        FilePart(path, name.as_posix()) for name, path in named.items() if not NOT_LIBRARY.intersection(name.parts)
    )
    if not parts:
        raise ValueError(f"this Python keeps no source text in {folder}: give a path to text instead of 'stdlib'")
    return Corpus(f"stdlib-{python_version()}", parts, valid_fraction=0.05)


def _folder(folder: Path, reading: Reading) -> Corpus:
    inside = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    found = [
        FilePart(path, name.as_posix(), reading)
        for name, path in inside.items()
        if formats.kind_of(path) and not any(part.startswith(".") for part in name.parts)
    ]
    if not found:
        raise ValueError(
            f"{folder} holds no text ({len(inside)} files, none readable): the suffixes read are "
            f"{' '.join(formats.KINDS)}, plain or followed by .gz, .xz or .zst"
        )
    train = tuple(part for part in found if not HELD_OUT.search(part.path.name))
    valid = tuple(part for part in found if (match := HELD_OUT.search(part.path.name)) and match[2] != "test")
    name = folder.resolve().name
    if not train:
        raise ValueError(f"{folder} holds only validation and test files: name the files to train on, as a glob")
    return Corpus(name, train, Corpus(f"{name} validation", valid) if valid else None)


def _file(path: Path, name: str, reading: Reading) -> FilePart:
    if formats.kind_of(path) is None:
        known = " ".join(formats.KINDS)
        raise ValueError(f"{path}: the suffix must be one of {known}, and may be followed by .gz, .xz or .zst")
    return FilePart(path, name, reading)


def _stem(path: Path) -> str:
    return path.name.split(".")[0] or "corpus"


def held_out(text: bytes, fraction: float) -> bool:
    """Whether a document belongs to the validation split: by its own hash, wherever and whenever it is met."""
    return _hash(text) < fraction * 2.0**64


def share_held_out(documents: Iterable[str], fraction: float) -> float:
    """The share for `held_out`: `fraction`, or where that takes no document the least share that takes one.

    Of one document alone, or of equal ones, none is taken. Documents are read until one is found.
    """
    lowest: list[int] = []
    for text in documents if fraction > 0.0 else ():
        data = text.encode("utf-8")
        if held_out(data, fraction):
            return fraction
        lowest = sorted({*lowest, _hash(data)})[:2]
    return math.nextafter(lowest[0] / 2.0**64, 1.0) if len(lowest) == 2 else fraction


def _hash(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())

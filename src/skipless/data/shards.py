"""Token shards on disk: written aside, flushed to the disk, then renamed, so that a file with its name is whole."""

import errno
import hashlib
import json
import os
import uuid
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

ASIDE = ".part"
REMAKE = "delete it, and the same `skipless prepare` command makes it anew"


@dataclass(frozen=True)
class Shard:
    """One file of tokens, raw and little-endian: what it holds and its hash."""

    split: str
    file: str
    tokens: int
    documents: int
    text_bytes: int
    sha256: str


@dataclass(frozen=True)
class Section:
    """A run of documents, about shard_mb of text, and the shards it became: at most one for each split.

    `end` is where the next section starts: a part of the corpus and a document in it. It makes any section
    reproducible by itself.
    """

    index: int
    end: tuple[int, int]
    last: bool
    shards: tuple[Shard, ...]

    def to_json(self) -> dict:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict) -> "Section":
        """The inverse of to_json."""
        part, document = values["end"]
        shards = tuple(Shard(**shard) for shard in values["shards"])
        return cls(values["index"], (part, document), values["last"], shards)


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Say which file could not be written, and that nothing finished is lost."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "free some space" if full else "check the folder's permissions"
        raise OSError(
            f"{path} could not be written ({error.strerror}): {remedy} and run the same command again; what was "
            "finished is kept"
        ) from error


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of names to the disk, so that a rename outlives the machine; POSIX only."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_stream(path: Path) -> bool:
    """Whether it is a pipe, a device or the like, which takes data as they come and must not be replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


def linked(path: Path) -> Path:
    """The file that a symlink stands for, there or not; any other path itself."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that it is either there with all of `data` or not there; of several writers the last one wins.

    A symlink stays, and its target is written. A pipe or a device is written straight into.
    """
    with writing(path):
        if is_stream(path):
            path.write_bytes(data)
            return
        target = linked(path)
        aside = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}{ASIDE}")
        try:
            with aside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(target)
        except BaseException:  # Ctrl-C too
            aside.unlink(missing_ok=True)
            raise
        sync_folder(target.parent)


def append_line(path: Path, record: dict) -> None:
    """Add a line to a journal and flush it to the disk. A line cut by a crash is not there for `read_lines`."""
    with writing(path), path.open("ab") as file:
        file.write(json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path, mend: bool = True) -> list[dict]:
    """The whole lines of a journal; what a crash left of the last one is cut off the file.

    mend=False leaves the file as it is, for whoever does not hold its folder: another process may be writing that line.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if mend and whole != data:
        write_whole(path, whole)
    return [_object(line, number) for number, line in enumerate(whole.split(b"\n")[:-1], 1)]


def _object(line: bytes, number: int) -> dict:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"line {number} is not an object")
    return record


class ShardWriter:
    """Writes one shard: `add` token arrays, then `finish`; nothing of the shard's name exists before that.

    The file is opened by the first of these: whoever may have to abandon a writer holds it before there is one.
    """

    def __init__(self, folder: Path, split: str, index: int):
        self.split, self.path = split, folder / f"{split}-{index:05d}.bin"
        self._aside = self.path.with_name(self.path.name + ASIDE)
        self._hash = hashlib.sha256()
        self._tokens = self._documents = self._text_bytes = 0
        self._file: BinaryIO | None = None

    def add(self, tokens: np.ndarray, documents: int, text_bytes: int) -> None:
        """Append tokens; documents and text_bytes are counted for the manifest."""
        data = np.ascontiguousarray(tokens).data.cast("B")
        with writing(self.path):
            self._opened().write(data)
        self._hash.update(data)
        self._tokens += len(tokens)
        self._documents += documents
        self._text_bytes += text_bytes

    def finish(self) -> Shard:
        """Flush to the disk and give the file its name."""
        with writing(self.path):
            file = self._opened()
            file.flush()
            os.fsync(file.fileno())
            file.close()
            self._aside.replace(self.path)
            sync_folder(self.path.parent)
        sha256 = self._hash.hexdigest()
        return Shard(self.split, self.path.name, self._tokens, self._documents, self._text_bytes, sha256)

    def abandon(self) -> None:
        """Leave nothing behind."""
        if self._file is not None:
            with suppress(OSError):  # a full disk: the buffered rest cannot be written, and is not wanted
                self._file.close()
        self._aside.unlink(missing_ok=True)

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._file = self._aside.open("wb")
        return self._file


def check_sizes(folder: Path, shards: Iterable[Shard], itemsize: int) -> None:
    """Refuse a shard that is missing or not as long as it was when finished."""
    for shard in shards:
        path, expected = folder / shard.file, shard.tokens * itemsize
        if not path.is_file():
            raise ValueError(f"{path} is missing: the same `skipless prepare` command makes it anew")
        if (size := path.stat().st_size) != expected:
            raise ValueError(f"{path} has {size:,} bytes instead of {expected:,}: it is cut short or changed; {REMAKE}")


def check_hash(folder: Path, shard: Shard) -> None:
    """Refuse a shard whose content is not what was written."""
    path = folder / shard.file
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != shard.sha256:
        raise ValueError(f"{path} is damaged (its SHA-256 is not the manifest's): {REMAKE}")

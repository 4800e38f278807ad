"""Files: whole or not there, hashes, journals of JSON lines, one writer per folder, and errors that name the file."""

import errno
import hashlib
import json
import logging
import math
import os
import re
import shutil
import socket
import uuid
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar

LOCK = ".lock"
HASHES = "hashes.json"  # says what the files beside it were when they were written
RUN_AGAIN = "run the same command again; what was finished is kept"
MOST_JSON = 1 << 29  # bytes of one file: far more than ours have, and no more than memory takes
DEEPEST_JSON = 64  # levels: ours have ten or so, and functions that call themselves manage several hundred
_DAMAGED = "is damaged or of another version"
_PART = re.compile(r"\..+\.skipless-[0-9a-f]{8}")  # a name that nobody else gives
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
logger = logging.getLogger("skipless")
T = TypeVar("T")


@contextmanager
def writing(path: Path, then: str = RUN_AGAIN, *, room: str = "free some space", needed: int = 0) -> Generator[None]:
    """Turn an OSError into one line: which file could not be written, why, and what to do about it.

    then: what to do once the cause is gone. room: how to make room on a full disk. needed: bytes, where known.
    """
    try:
        yield
    except OSError as error:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error  # explained once already
        remedy = "check the folder and its permissions"
        if cause.errno in _DISK_FULL:
            takes = f"takes {_size(needed)}; {_size(_free_bytes(path))} free: " if needed else ""
            remedy = takes + room
        raise OSError(f"{path} could not be written ({cause.strerror or cause}): {remedy}, and {then}") from error


class UnknownNameError(ValueError):
    """A file may be sound, and names a scheme or an activation of one's own whose code has not been imported."""


@contextmanager
def reading(path: Path | str, advice: str = "", *, what: str = _DAMAGED) -> Generator[None]:
    """Turn whatever goes wrong with what a file holds into one line that names the file, once.

    Put only lines in it that make values of the file's content: any error counts as the content's. advice: what to do.
    """
    end = f"; {advice}" if advice else ""
    try:
        yield
    except OSError as error:
        if error.errno is None or str(path) not in str(error.filename or path):
            raise  # explained already, or about another file
        raise type(error)(f"{path} cannot be read ({error.strerror}): check the path and its permissions") from error
    except Exception as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        if isinstance(error, UnknownNameError):
            raise type(error)(f"{path}: {error}") from error
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error).strip() or type(error).__name__
        raise ValueError(f"{path} {what} ({why.partition(chr(10))[0].rstrip('.')}){end}") from error


def _free_bytes(path: Path) -> int:
    there = next((folder for folder in path.absolute().parents if folder.exists()), Path("/"))
    return shutil.disk_usage(there).free


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def is_stream(path: Path) -> bool:
    """Whether it is a pipe, a device or the like, which takes data as they come and must not be replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


def linked(path: Path) -> Path:
    """The file that a symlink stands for, there or not; any other path itself."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


# what is in every output of a kind, by which an earlier one is known
PAGE_MARK, DATA_MARK, PICTURE_MARK = b'content="skipless report"', b'"skipless": "', b"made by skipless"


def is_ours(path: Path, mark: bytes) -> bool:
    """Whether a file is an earlier output of ours, by the mark of its kind, or holds nothing."""
    with path.open("rb") as file:
        data = file.read(MOST_JSON)
    return mark in data or not data


def check_output(path: Path, mark: bytes) -> None:
    """Refuse to write where there is a file that is no earlier output of the same kind, such as one that is read."""
    if path.is_file() and not is_ours(path, mark):
        raise ValueError(f"{path} is there, and this command has not written it: name another file, or move it away")


def check_folder(path: Path, sign: str, *own: str) -> None:
    """Refuse a folder that holds anything but `own` and lacks the file `sign`, which the command writes first there.

    Without it nothing there is ours, whatever its name. sign may be a pattern.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file: name a folder")
    there = [file.name for file in path.iterdir() if not is_part(file)] if path.exists() else []
    foreign = sorted({*there} - {LOCK, *own})
    if foreign and not any(path.glob(sign)):
        names = ", ".join(foreign[:3]) + (" …" if len(foreign) > 3 else "")
        raise ValueError(f"{path} holds other files ({names}): name a folder of its own")


def part_of(path: Path) -> Path:
    """A new name, hidden and beside `path`, for a file or a folder until it is whole."""
    return path.with_name(f".{path.name}.skipless-{uuid.uuid4().hex[:8]}")


def is_part(path: Path) -> bool:
    """Whether the name is one of part_of's."""
    return _PART.fullmatch(path.name) is not None


def remove_parts(folder: Path) -> None:
    """Remove what a kill left in `folder` under names of part_of; nobody else may be writing there."""
    for part in filter(is_part, list(folder.iterdir())):
        if part.is_dir() and not part.is_symlink():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)


class WholeFile:
    """A file under another name until `finish` gives it its own: it is there with all of its data, or not there.

    Nothing is opened before the first `write`. Of several writers the last one to finish wins.
    """

    def __init__(self, path: Path):
        self.path = path
        self._part = part_of(path)
        self._file: BinaryIO | None = None

    def write(self, data: bytes | memoryview) -> None:
        if self._file is None:
            self._file = self._part.open("wb")
        self._file.write(data)

    def finish(self) -> None:
        """Flush to the disk and give the file its name."""
        self.write(b"")
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._part.replace(self.path)
        sync_folder(self.path.parent)

    def abandon(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # a full disk: the buffered rest cannot be written, and is not wanted
                self._file.close()
        self._part.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that it is there with all of `data`, or as it was before.

    A symlink stays, and its target is written. A pipe or a device is written straight into.
    """
    with writing(path):
        if is_stream(path):
            path.write_bytes(data)
            return
        file = WholeFile(linked(path))
        try:
            file.write(data)
            file.finish()
        except BaseException:  # Ctrl-C too
            file.abandon()
            raise


def write_json(path: Path, values: Any, indent: int = 2) -> None:
    """Write values as indented JSON, whole or not at all."""
    write_whole(path, json.dumps(values, indent=indent).encode() + b"\n")


def read_bounded(path: Path, most: int = MOST_JSON) -> bytes:
    """The bytes of a file, also of a pipe; ValueError names one that has more than `most`."""
    with reading(path), path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path} is larger than {_size(most)}, which no file of this kind is")
    return data


def read_json(path: Path, make: Callable[[Any], T], advice: str = "", *, what: str = _DAMAGED) -> T:
    """What `make` makes of the JSON in a file; where either is wrong the error names the file, once."""
    with reading(path, advice, what=what):
        return make(parse_json(read_bounded(path)))


def parse_json(text: bytes | str) -> Any:
    """JSON that nothing later on stumbles over: no deeper than DEEPEST_JSON, no key twice, no number beyond a float's.

    Whole numbers of more than 64 bits are floats. NaN and Infinity are numbers here, as Python's json has them.
    """
    try:
        value = json.loads(text, parse_int=_whole_number, object_pairs_hook=_mapping)
    except RecursionError:
        raise ValueError(f"it is nested more than {DEEPEST_JSON} levels deep") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"not JSON: {error}") from error
    level = [value]
    for _ in range(DEEPEST_JSON + 1):
        inner = [node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list)]
        if not inner:
            return value
        level = [child for children in inner for child in children]
    raise ValueError(f"it is nested more than {DEEPEST_JSON} levels deep")


def mapping(value: Any) -> dict[str, Any]:
    """A JSON object; ValueError for anything else."""
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__} where there should be an object")
    return value


def _whole_number(digits: str) -> int | float:
    if len(digits) < 19 or -(1 << 63) <= int(digits[:40]) < 1 << 63:
        return int(digits)
    if math.isinf(float(digits)):
        raise ValueError(f"{digits[:12]}… has {len(digits)} digits, and no number here has more than 308")
    return float(digits)  # as other readers of JSON have it


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of names to the disk, so that a rename outlives the machine; POSIX only."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class ChangedError(ValueError):
    """A file is not what was written, by the hashes.json beside it; the message names it."""


def write_hashes(folder: Path, names: Iterable[str]) -> None:
    """Flush these files to the disk and note size and SHA-256 of each in hashes.json, for check_hashes."""
    files = {}
    for name in sorted(names):
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
        files[name] = size_and_hash(folder / name)
    write_json(folder / HASHES, {"sha256": digest(files), "files": files}, indent=1)


def read_hashes(folder: Path) -> dict[str, list[int | str]] | None:
    """Size and SHA-256 by name, as hashes.json has them; None where there is none."""
    path = folder / HASHES
    if not path.is_file():
        return None
    try:
        return read_json(path, _hashes, _UNVERIFIED, what="is damaged")
    except ValueError as error:
        raise ChangedError(str(error)) from error


def _hashes(values: Any) -> dict[str, list[int | str]]:
    files = mapping(mapping(values)["files"])
    if values["sha256"] != digest(files):
        raise ValueError("its own SHA-256 differs")
    for name in files:
        if not leads_inside(name):
            raise ValueError(f"{name!r} leads out of the folder")
    return files


def check_hashes(folder: Path, pattern: str = "*") -> bool:
    """Whether hashes.json lists files of that pattern, all of them as written; ChangedError names one that is not.

    Hashes find accidents, not forgery: whoever can write the files can write hashes.json.
    """
    files = {name: value for name, value in (read_hashes(folder) or {}).items() if fnmatchcase(name, pattern)}
    for name, noted in files.items():
        path = folder / name
        if not path.is_file():
            raise ChangedError(f"{path} is missing, and {folder / HASHES} lists it: {_UNVERIFIED}")
        if size_and_hash(path) != noted:
            raise ChangedError(f"{path} is damaged or changed since it was written (see {HASHES}): {_UNVERIFIED}")
    return bool(files)


_UNVERIFIED = f"put a copy back or make it anew; if the change is yours, delete {HASHES}, and nothing is verified"


def leads_inside(name: str) -> bool:
    """Whether a relative path from elsewhere names something below the folder it is looked for in."""
    return bool(Path(name).parts) and not Path(name).is_absolute() and ".." not in Path(name).parts


def size_and_hash(path: Path) -> list[int | str]:
    """What hashes.json notes of a file."""
    return [path.stat().st_size, hash_of(path)]


def hash_of(path: Path) -> str:
    """The SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(values: Any) -> str:
    """The SHA-256 of what JSON holds, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


class Journal:
    """A file of JSON lines that grows line by line, by one writer. It is opened by the first line.

    A line outlives the process as soon as it is added, and the machine after `sync`. What a crash left of a line is
    cut off before the next one is added.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file: BinaryIO | None = None

    def add(self, record: dict[str, Any]) -> None:
        line = json.dumps(record).encode() + b"\n"
        if self._file is None:
            self._cut_unfinished_line()
            self._file = self.path.open("ab")
        try:
            self._check_there()
            self._file.write(line)
            self._file.flush()
        except OSError:
            with suppress(OSError):  # closing tries to write it again, and its second error would hide the first
                self.close()
            raise

    def sync(self) -> None:
        if self._file is not None:
            self._check_there()
            os.fsync(self._file.fileno())

    def replace(self, records: Iterable[dict[str, Any]]) -> None:
        """Make these the lines of the file; a file that holds just these is left alone."""
        self.close()
        lines = b"".join(json.dumps(record).encode() + b"\n" for record in records)
        if not self.path.is_file() or lines != self.path.read_bytes():
            write_whole(self.path, lines)

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _check_there(self) -> None:
        """OSError if the file has been deleted or replaced: lines would go where nobody finds them."""
        assert self._file is not None
        try:
            there = os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except FileNotFoundError:
            there = False
        if not there:
            raise OSError(errno.ENOENT, "it was deleted or replaced by another program while it was being written")

    def _cut_unfinished_line(self) -> None:
        if self.path.is_file():
            data = self.path.read_bytes()
            if not data.endswith(b"\n"):
                os.truncate(self.path, data.rfind(b"\n") + 1)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Add one line to a journal and flush it to the disk."""
    journal = Journal(path)
    with writing(path):
        try:
            journal.add(record)
            journal.sync()
        finally:
            journal.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The finished lines of a journal, none where there is no file; ValueError names a line that is no JSON object.

    A line that is being written, or that a crash cut short, is left out. NaN and Infinity are numbers here.
    """
    if not path.exists():
        return []
    return [_object(line, number) for number, line in enumerate(read_bounded(path).split(b"\n")[:-1], 1)]


def _object(line: bytes, number: int) -> dict[str, Any]:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"line {number} is not an object")
    return record


class FolderLock:
    """The sole right to write to a folder, until `release` or the end of the process, however that ends.

    ValueError says who else has it: "process 7 on host is `doing` FOLDER: `advice`". Where the file system has no
    locks, as some that are shared over a network, there is a warning, and the process that the lock file names counts.
    """

    def __init__(self, folder: Path, doing: str, advice: str = "wait for it, or use another folder"):
        self._file: IO[str] | None = (folder / LOCK).open("a+")
        self._file.seek(0)
        holder, host = self._file.read().strip(), f"on {socket.gethostname()}"
        if not _lock(self._file, folder, holder, host):
            self._file.close()
            raise ValueError(
                f"{holder or 'another process'} is {doing} {folder}: {advice}. If it no longer exists, delete "
                f"{folder / LOCK}"
            )
        if holder and not holder.endswith(host):
            logger.warning("%s was last written by %s; if that still runs, stop it", folder, holder)
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} {host}\n")
        self._file.flush()

    def release(self) -> None:
        """Let others write; a second call does nothing."""
        file, self._file = self._file, None
        if file is not None:
            file.truncate(0)
            file.close()

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _lock(file: IO[str], folder: Path, holder: str, host: str) -> bool:
    """Lock the file; False if another process has it, or where there are no locks seems to have it."""
    try:
        fcntl = import_module("fcntl")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except ImportError:
        return True  # Windows has no such locks
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning("%s cannot be locked (%s): see to it that no second command works there", folder, error.strerror)
    if not holder.endswith(host):
        return not holder
    try:
        os.kill(int(holder.split()[1]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # another user's
    return False

"""Files that are whole or not there, journals of JSON lines, locks, and a full disk in one line."""

import errno
import json
import logging
import os
import shutil
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

ASIDE = ".part"


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


LOCK = ".lock"
logger = logging.getLogger("skipless")


@contextmanager
def sole_worker(folder: Path, refusal: str) -> Generator[None]:
    """Hold the folder's lock, or raise ValueError(refusal); it ends with the process, however that ends.

    Where the file system knows no locks, as some that are shared over a network, a warning says so.
    """
    with (folder / LOCK).open("w") as file:
        try:
            fcntl = import_module("fcntl")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass  # no such locks on Windows
        except BlockingIOError as error:
            raise ValueError(refusal) from error
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s): see to it that no second command works there", folder, error.strerror
            )
        yield


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def storing(path: Path, then: str = "go on with --resume", needed: int = 0) -> Generator[None]:
    """Turn an OSError while writing `path` into one line that ends with what to do `then`. needed: bytes, if known."""
    try:
        yield
    except OSError as error:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error  # shards.write_whole explains too
        if cause.errno not in _FULL:
            remedy = "check the folder and its permissions"
        else:
            room = f"takes {_size(needed)}; " if needed else ""
            remedy = f"{room}{_free(path)} free: make room, or lower train.keep"
        raise OSError(f"{path} could not be written ({cause.strerror or cause}): {remedy}, and {then}") from error


def _free(path: Path) -> str:
    there = next((folder for folder in path.absolute().parents if folder.exists()), Path("/"))
    return _size(shutil.disk_usage(there).free)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"

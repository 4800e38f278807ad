"""A full disk, in one line: which file, how much room there is, and what to do."""

import errno
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

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

"""A folder that one process at a time works in."""

from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

LOCK = ".lock"


@contextmanager
def sole_worker(folder: Path, refusal: str) -> Generator[None]:
    """Hold the folder's lock, or raise ValueError(refusal); it ends with the process, however that ends."""
    with (folder / LOCK).open("w") as file:
        try:
            fcntl = import_module("fcntl")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass  # no such locks on Windows
        except OSError as error:
            raise ValueError(refusal) from error
        yield

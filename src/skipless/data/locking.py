"""A folder that one process at a time works in."""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

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

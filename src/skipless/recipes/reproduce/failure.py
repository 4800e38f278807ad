"""An error that ended a run: its traceback in a file beside the run's folder, and a form that crosses processes."""

import pickle
import traceback
from contextlib import suppress
from pathlib import Path

from skipless.data.shards import write_whole


def error_file(folder: Path) -> Path:
    """Where the traceback of a run that trains in this folder is kept, until it succeeds."""
    return folder.with_name(f"{folder.name}.error.txt")


def keep(error: Exception, folder: Path) -> Exception:
    """Write the traceback down. Returns the error, or where it cannot be pickled (torch.compile's) its words."""
    with suppress(OSError):  # a full disk may be the error
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_whole(error_file(folder), "".join(traceback.format_exception(error)).encode())
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error

"""state.json: what a checkpoint holds, with the size and SHA-256 of every file of it, and of itself."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skipless.data.shards import write_whole

STATE = "state.json"
FORMAT = 1


class DamagedError(ValueError):
    """A checkpoint that is not what was written; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Manifest:
    """The table of contents of a checkpoint, written last.

    optimizer is the optimiser's state with its tensors taken out (see `skipless.train.state`); files maps a name to
    its size and hash; world_size says how many processes wrote it, and any number may read it.
    """

    step: int
    world_size: int
    extra: dict[str, Any]
    optimizer: Any
    files: dict[str, tuple[int, str]]
    format: int = FORMAT

    @classmethod
    def of(cls, folder: Path, **fields: Any) -> "Manifest":
        """The manifest of the tensor files in `folder`, which are flushed to the disk as they are hashed."""
        paths = sorted(folder.glob("*.safetensors"))
        with ThreadPoolExecutor(4) as pool:  # hashing lets go of the interpreter
            files = dict(zip((path.name for path in paths), pool.map(_flushed, paths), strict=True))
        return cls(files=files, **fields)

    def write(self, folder: Path) -> None:
        """Put state.json into `folder`, hashed too."""
        values = asdict(self)
        write_whole(folder / STATE, json.dumps({"sha256": _digest(values), **values}, indent=1).encode() + b"\n")


def verified(folder: Path) -> Manifest:
    """The manifest of a checkpoint every byte of which is as written; DamagedError otherwise."""
    manifest = _read(folder / STATE)
    found = {path.name for path in folder.glob("*.safetensors")}
    for name in sorted(found ^ manifest.files.keys()):
        problem = "is missing" if name in manifest.files else f"does not belong there ({STATE} does not list it)"
        raise DamagedError(f"{folder / name} {problem}")
    for name, (size, _) in manifest.files.items():
        if (there := (folder / name).stat().st_size) != size:
            raise DamagedError(f"{folder / name} has {there:,} bytes instead of {size:,}: it is cut short or changed")
    with ThreadPoolExecutor(4) as pool:
        hashes = list(pool.map(lambda name: _sha256(folder / name), manifest.files))
    for (name, (_, expected)), sha256 in zip(manifest.files.items(), hashes, strict=True):
        if sha256 != expected:
            raise DamagedError(f"{folder / name} is changed: its SHA-256 is not the one it was written with")
    return manifest


def _read(path: Path) -> Manifest:
    try:
        values = json.loads(path.read_bytes())
        sha256, version = values.pop("sha256"), values["format"]
        whole = sha256 == _digest(values)
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is missing") from error
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DamagedError(f"{path} is cut short or changed ({error})") from error
    if not whole:
        raise DamagedError(f"{path} is changed: its SHA-256 is not the one it was written with")
    if version != FORMAT:
        raise DamagedError(f"{path} has format {version}, and this version of skipless reads {FORMAT}")
    return Manifest(**values)


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _flushed(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path.stat().st_size, _sha256(path)


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})") from error

"""Prepare images: from a folder or a tar of pictures in class folders to arrays. Needs Pillow.

A source holds train/CLASS/*.jpg and, for validation, valid/CLASS/*.jpg (or val/, or test/), as folders, as one tar, or
as a tar for each part, train.tar.xz and test.tar.xz. Links of a folder are followed, those of a tar are not. A
preparation that was killed starts from the beginning.
"""

import hashlib
import io
import tarfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from skipless.console import Progress
from skipless.data.image_store import (
    LABEL,
    MOST_CLASSES,
    ImageFile,
    ImageManifest,
    ImageSplit,
    check_class,
    read_images,
)
from skipless.data.prepare import Folder
from skipless.data.store import MANIFEST, check_size, verify_shards
from skipless.files import WholeFile, reading, write_whole, writing

SPLITS = {"train": "train", "valid": "valid", "val": "valid", "test": "valid"}
SUFFIXES = (".jpg", ".jpeg", ".png")
TARS = (".tar", ".tar.xz", ".tar.gz", ".tgz", ".tar.bz2")
CHANNELS = 3
MOST_SIDE = 1024  # pixels
MOST_BYTES = 1 << 25  # of one picture's file
_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK")
_WHERE = f"PART/CLASS/FILE with {', '.join(SUFFIXES)}"
_SHAPE = "give a folder or a tar with train/CLASS/*.jpg and test/CLASS/*.jpg"


@dataclass(frozen=True)
class Picture:
    """A picture's file on its way: the part of the source it lies in, its class, its name there, and its bytes."""

    part: str
    kind: str
    name: str
    data: bytes


def prepare_images(
    source: str | Path, out: str | Path, force: bool = False, progress: Progress | None = None
) -> ImageManifest:
    """Decode every picture of a source into `out`, and return its manifest. All must be squares of one size.

    Pictures become RGB of eight bits: grey ones get three equal channels, 16-bit colours keep their upper half, and
    transparency is dropped. Classes are the folders' names, in alphabetical order. On a finished folder it checks every
    file and writes nothing; force starts over.
    """
    source, folder, progress = Path(source), Folder(Path(out)), progress or Progress(quiet=True)
    options = {"images": {"name": source.name.split(".")[0], "fingerprint": _fingerprint(source)}}
    with folder.locked():
        folder.claim(options, force)
        if folder.complete():
            manifest = read_images(folder.path)
            if all((folder.path / each.file).is_file() for each in manifest.files):
                for each in manifest.files:
                    check_size(folder.path / each.file, each.bytes)
                verify_shards(folder.path, manifest.files, trust=False)
                progress.say(f"{folder.path} is complete: {len(manifest.files)} files checked, nothing to do")
                return manifest
            (folder.path / MANIFEST).unlink()
        try:
            return _prepare(source, folder.path, options, progress)
        finally:
            progress.stop()


def _prepare(source: Path, out: Path, options: dict[str, Any], progress: Progress) -> ImageManifest:
    writers: dict[str, _SplitWriter] = {}
    side: int | None = None
    others: Counter[str] = Counter()
    with ExitStack() as open_files:
        progress.start("decoding")
        for picture in _pictures(source, others):
            split = SPLITS[picture.part]
            if split not in writers:
                writers[split] = open_files.enter_context(_SplitWriter(out, split, picture.part))
            pixels = decode(picture, side)
            side = pixels.shape[1]
            writers[split].add(picture, pixels)
            progress.advance()
        if side is None or "train" not in writers:
            raise ValueError(f"{source} holds no pictures to train on: {_SHAPE}")
        classes = tuple(sorted(set(writers["train"].kinds)))
        splits = {split: writer.finish(classes, str(source)) for split, writer in sorted(writers.items())}
    if others:
        first = next(iter(others))
        progress.say(f"left out {others.total():,} files that are no pictures of a class ({_WHERE}), such as {first}")
    if "valid" not in splits:
        progress.say(
            f"no pictures for validation: runs are not judged by any; put some into {source}/test to have them"
        )
    mean, std = writers["train"].statistics()
    manifest = ImageManifest(options, side, CHANNELS, classes, mean, std, splits)
    verify_shards(out, manifest.files, trust=False)
    write_whole(out / MANIFEST, manifest.to_json().encode())
    for name, split in splits.items():
        progress.say(f"{name}: {split.images:,} images of {side} × {side} in {len(classes)} classes")
    return manifest


def _fingerprint(source: Path) -> str:
    """A hash of names and sizes of all files, which tells sources apart without reading them."""
    if not source.exists():
        raise ValueError(f"{source} does not exist; {_SHAPE} (working folder {Path.cwd()})")
    if source.is_file():
        files = [source]
    else:
        links = [path for path in source.rglob("*") if path.is_symlink() and path.is_dir()]
        within = [path for link in links for path in link.iterdir()]
        files = sorted(path for path in {*source.rglob("*"), *within} if path.is_file())
    lines = (f"{path.relative_to(source)} {path.stat().st_size}\n" for path in files)
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()[:16]


def _pictures(source: Path, others: Counter[str]) -> Iterator[Picture]:
    """Every picture of a source, in the order of names, of a tar in its own; files that are none are counted."""
    if source.is_file():
        yield from _of_tar(source, None, others)
        return
    parts = {path: part for path in sorted(source.iterdir()) if (part := _part(path)) is not None}
    if "train" not in parts.values():
        seen = ", ".join(sorted(path.name for path in source.iterdir())[:5]) or "nothing"
        raise ValueError(f"{source} holds {seen}, and no train folder or train.tar: {_SHAPE}")
    for part, times in Counter(parts.values()).items():
        if times > 1:
            twice = " and ".join(path.name for path in parts if parts[path] == part)
            raise ValueError(f"{source} holds {twice}, which are the same part: take one away")
    for path, part in parts.items():
        yield from _of_tar(path, part, others) if path.is_file() else _of_folder(path, part, others)


def _part(path: Path) -> str | None:
    """Which part of a source a folder or a tar in it is: train, valid, val, test or none."""
    stem = next((path.name.removesuffix(end) for end in TARS if path.name.endswith(end)), None)
    name = path.name if path.is_dir() else stem if path.is_file() else None
    return name if name in SPLITS else None


def _of_folder(folder: Path, part: str, others: Counter[str]) -> Iterator[Picture]:
    for kind in _entries(folder):
        if not kind.is_dir():
            others[str(kind)] += 1
        elif not kind.name.startswith("."):
            yield from _of_class(kind, part, others)


def _of_class(folder: Path, part: str, others: Counter[str]) -> Iterator[Picture]:
    """The pictures of one class. One of train without any is refused: the network would lack it without a word."""
    seen = False
    for path in _entries(folder):
        there = path.exists()  # a link that leads nowhere is a picture that is missing
        if not _is_picture(path.name) or (there and not path.is_file()):
            inside = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
            others.update(map(str, inside))
            continue
        seen = True
        with reading(path), path.open("rb") as file:
            yield Picture(part, folder.name, str(path), _bounded(file.read(MOST_BYTES + 1), str(path)))
    if not seen and SPLITS[part] == "train":
        raise ValueError(_without_pictures(str(folder)))


def _without_pictures(folder: str) -> str:
    return f"{folder} is a class without pictures ({', '.join(SUFFIXES)}): put some into it, or take the folder away"


def _entries(folder: Path) -> list[Path]:
    with reading(folder):
        return sorted(folder.iterdir())


def _is_picture(name: str) -> bool:
    """Whether a file is a picture, by its name. Hidden files, as macOS puts beside others, are none."""
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def _of_tar(path: Path, part: str | None, others: Counter[str]) -> Iterator[Picture]:
    """Members are PART/CLASS/FILE, below any folder; in a tar named after a part also CLASS/FILE. None is unpacked.

    A class of train that is a folder there and has no picture is refused, as one outside of a tar is.
    """
    kinds: dict[tuple[str, ...], str] = {}  # folders of train's classes
    full: set[tuple[str, ...]] = set()  # those that hold pictures, at any depth
    with reading(path, "pack it again", what="is no tar file, or damaged"), tarfile.open(path, "r|*") as tar:
        for member in tar:
            inside = [step for step in PurePosixPath(member.name).parts if step not in (".", "/")]
            own = inside[-3] if len(inside) >= 3 else part
            if member.isdir():
                above = inside[-2] if len(inside) >= 2 else part
                if inside and above == "train" and not inside[-1].startswith("."):
                    kinds[*inside] = f"{path}:{member.name}"
                continue
            if not member.isfile() or len(inside) < 2 or own not in SPLITS or not _is_picture(inside[-1]):
                others[f"{path}:{member.name}"] += 1
                continue
            file = tar.extractfile(member)
            assert file is not None
            name = f"{path}:{member.name}"
            full.update(tuple(inside[:depth]) for depth in range(len(inside)))
            yield Picture(own, inside[-2], name, _bounded(file.read(MOST_BYTES + 1), name))
    for kind, where in kinds.items():
        if kind not in full:
            raise ValueError(_without_pictures(where))


def _bounded(data: bytes, name: str) -> bytes:
    if len(data) > MOST_BYTES:
        raise ValueError(f"{name} has more than {MOST_BYTES // 1_000_000} MB; make the picture smaller")
    return data


def decode(picture: Picture, side: int | None = None) -> np.ndarray:
    """(channels, side, side) of bytes; ValueError names a picture that is damaged, or of another size."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ModuleNotFoundError as error:
        raise ValueError(
            "reading pictures needs Pillow, which is not installed: pip install 'skipless[vision]'"
        ) from error
    words = "is no picture that can be used"
    with reading(picture.name, "take it out, or put a good one in its place", what=words):
        try:
            with (
                warnings.catch_warnings(action="error"),
                Image.open(io.BytesIO(picture.data), formats=("JPEG", "PNG")) as image,
            ):
                _check(image.size, image.mode, side, getattr(image, "n_frames", 1))
                return np.asarray(image.convert("RGB")).transpose(2, 0, 1)
        except UnidentifiedImageError:
            raise ValueError("neither JPEG nor PNG") from None
        except OSError as error:  # of the bytes: they are in memory
            raise ValueError(str(error)) from error


def _check(size: tuple[int, int], mode: str, side: int | None, frames: int) -> None:
    """Refuse a picture by what its head says, before its pixels are decoded."""
    width, height = size
    cut = ", as ImageOps.fit of Pillow cuts them"
    if width != height or not 1 <= width <= MOST_SIDE:
        raise ValueError(f"it is {width} × {height}; pictures must be squares of at most {MOST_SIDE}{cut}")
    if side not in (None, width):
        raise ValueError(f"it is {width} × {height}, and those before it {side} × {side}; all must be of one size{cut}")
    if mode not in _MODES:
        raise ValueError(f"its pixels are of kind {mode}; use one of {', '.join(_MODES)}")
    if frames > 1:
        raise ValueError(f"it is an animation of {frames} pictures, and one is wanted")


@dataclass
class _SplitWriter:
    """Writes the pixels of one split as they come; its labels at the end, when all classes are known."""

    folder: Path
    split: str
    part: str
    kinds: list[str] = field(default_factory=list)
    sums: np.ndarray = field(default_factory=lambda: np.zeros((2, CHANNELS)))
    numbers: int = 0

    def __enter__(self) -> "_SplitWriter":
        self._path = self.folder / f"{self.split}-images.bin"
        self._file, self._hash = WholeFile(self._path), hashlib.sha256()
        return self

    def __exit__(self, *_: object) -> None:
        self._file.abandon()

    def add(self, picture: Picture, pixels: np.ndarray) -> None:
        if picture.part != self.part:
            raise ValueError(
                f"there are both {self.part} and {picture.part}, and one of them is for validation: take one away"
            )
        if not self.kinds or picture.kind != self.kinds[-1]:
            check_class(picture.kind, picture.name)
        data = np.ascontiguousarray(pixels).tobytes()
        with writing(self._path):
            self._file.write(data)
        self._hash.update(data)
        self.kinds.append(picture.kind)
        values = pixels.reshape(CHANNELS, -1).astype(np.float64)
        self.sums += np.stack([values.sum(axis=1), (values**2).sum(axis=1)])  # whole numbers: exact
        self.numbers += values.shape[1]

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel, to four digits after the point."""
        mean, square = self.sums / self.numbers
        std = np.sqrt(np.maximum(square - mean**2, 0.0))
        if not (std > 1e-3).all():
            raise ValueError(
                f"the pixels of a channel are all alike (deviations {std.round(4).tolist()}): nothing can be learned"
            )
        return tuple(mean.round(4).tolist()), tuple(std.round(4).tolist())

    def finish(self, classes: tuple[str, ...], source: str) -> ImageSplit:
        """Give the file its name, and write the labels."""
        unknown = sorted(set(self.kinds) - set(classes))
        if unknown or not 2 <= len(classes) <= MOST_CLASSES:
            seen = f"{self.part} has the class {unknown[0]!r}" if unknown else f"train has {len(classes)} classes"
            raise ValueError(f"{source}: {seen}; train must have every class, from 2 to {MOST_CLASSES:,} of them")
        number = {name: index for index, name in enumerate(classes)}
        labels = np.array([number[kind] for kind in self.kinds], LABEL).tobytes()
        with writing(self._path):
            self._file.finish()
        path = self.folder / f"{self.split}-labels.bin"
        write_whole(path, labels)
        pixels = ImageFile(self._path.name, self.numbers * CHANNELS, self._hash.hexdigest())
        named = ImageFile(path.name, len(labels), hashlib.sha256(labels).hexdigest())
        return ImageSplit(len(self.kinds), pixels, named)

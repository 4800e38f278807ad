"""The images of a prepared folder: its manifest, and each split as one array of bytes with its labels.

options.json        what was asked for
train-images.bin    pixels, (images, channels, side, side) of bytes; and valid-images.bin
train-labels.bin    the number of each image's class, two bytes each, little-endian; and valid-labels.bin
manifest.json       classes, counts, hashes, and the mean and deviation of pixels: the folder is complete
verified.json       when each file was last found good; may be deleted
"""

import json
import os
import threading
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from skipless.data.store import IMAGES, MANIFEST, REMAKE, check_size, holds_images, read_at, verify_shards
from skipless.files import mapping, read_json, reading
from skipless.schema import build

FORMAT = 1
LABEL = np.dtype("<u2")
MOST_CLASSES = 1 << 16
_MOST_MEASURED = 2000  # images that the repeat rate is measured on


@dataclass(frozen=True)
class ImageFile:
    """One file of a prepared folder: what it holds in bytes, and its hash."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ImageSplit:
    """The images of a split and their labels."""

    images: int
    pixels: ImageFile
    labels: ImageFile


@dataclass(frozen=True)
class ImageManifest:
    """The table of contents of a folder of prepared images, written last: a folder with a manifest is complete.

    mean and std are those of each channel's pixels, 0 … 255, over the training images.
    """

    options: dict
    side: int
    channels: int
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    splits: dict[str, ImageSplit]

    def __post_init__(self):
        if not 2 <= len(self.classes) <= MOST_CLASSES or len(set(self.classes)) < len(self.classes):
            raise ValueError(f"it has {len(self.classes)} classes; they are 2 to {MOST_CLASSES:,}, and differ")
        for name in self.classes:
            check_class(name, "an image")
        if self.side < 1 or not len(self.mean) == len(self.std) == self.channels >= 1:
            raise ValueError(f"side={self.side}, channels={self.channels}: both ≥ 1, with a mean and a std each")
        if not all(np.isfinite(self.mean)) or not all(0.0 < each < np.inf for each in self.std):
            raise ValueError(f"mean is {self.mean} and std {self.std}; both are finite, and std above 0")
        if "train" not in self.splits:
            raise ValueError("it has no images to train on")
        for name, split in self.splits.items():
            sizes = {split.pixels: split.images * self.image_bytes, split.labels: split.images * LABEL.itemsize}
            for file, size in sizes.items():
                if split.images < 1 or file.bytes != size or Path(file.file).name != file.file:
                    raise ValueError(f"splits.{name} has {split.images} images, and {file} does not fit them")

    @property
    def image_bytes(self) -> int:
        return self.channels * self.side**2

    @property
    def files(self) -> list[ImageFile]:
        return [file for split in self.splits.values() for file in (split.pixels, split.labels)]

    def to_json(self) -> str:
        """Sorted and without dates: equal content, equal bytes."""
        return json.dumps({"format": FORMAT, "kind": IMAGES, **asdict(self)}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, values: Any) -> "ImageManifest":
        kind, version = mapping(values).get("kind"), values.get("format")
        if (kind, version) != (IMAGES, FORMAT):
            raise ValueError(f"format {version!r} of {kind or 'text'}, and this version reads {FORMAT} of images")
        return build(cls, {name: each for name, each in values.items() if name not in ("format", "kind")}, "a manifest")


def check_class(name: str, where: str) -> None:
    """Refuse a name that could not be shown: not UTF-8, empty, or with line breaks or codes that steer a terminal."""
    if not name or not name.isprintable():  # what is not UTF-8 becomes surrogates, which are not printable
        raise ValueError(f"the class {name!r} of {where!r} has a name that cannot be printed: rename its folder")


def read_images(folder: str | Path) -> ImageManifest:
    """The manifest of a folder of prepared images; an error that says what to do if it is something else."""
    path = Path(folder) / MANIFEST
    make = f"`skipless prepare SOURCE --images --out {folder}` makes one"
    if not path.is_file():
        raise ValueError(f"{folder} is not a folder of prepared images (no {MANIFEST}): {make}")
    if not holds_images(folder):
        raise ValueError(f"{path} is of tokens, and images are asked for: {make}")
    return read_json(path, ImageManifest.from_json, "prepare the folder again with --force")


class ImageStore:
    """The images of one split of a prepared folder. Pixels stay on disk until they are asked for; labels are read.

    Opening checks that the files have their lengths, and hashes those that differ in size or times from when they were
    last found good.
    """

    def __init__(self, folder: str | Path, split: str = "train"):
        self.folder, self.split, self.manifest = Path(folder), split, read_images(folder)
        if split not in self.manifest.splits:
            raise ValueError(f"{folder} has no images for {split!r}; put some into SOURCE/{split} and prepare it again")
        found = self.manifest.splits[split]
        for each in (found.pixels, found.labels):
            check_size(self.folder / each.file, each.bytes)
        verify_shards(self.folder, [found.pixels, found.labels], trust=True)
        labels = self.folder / found.labels.file
        with reading(labels, REMAKE):
            self.labels = np.fromfile(labels, LABEL).astype(np.int64)
            if self.labels.max() >= len(self.manifest.classes):
                raise ValueError(f"label {self.labels.max()} of {len(self.manifest.classes)} classes")
        self._path = self.folder / found.pixels.file
        with reading(self._path, REMAKE):
            self._handle = os.open(self._path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self._one_reader = threading.Lock()
        weakref.finalize(self, os.close, self._handle)

    def __reduce__(self) -> tuple:
        """A copy in another process, as a DataLoader's, opens the files itself."""
        return ImageStore, (self.folder, self.split)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, rows and columns of an image."""
        return self.manifest.channels, self.manifest.side, self.manifest.side

    def gather(self, numbers: np.ndarray, rows: np.ndarray) -> None:
        """Fill rows, bytes shaped (len(numbers), *shape), with the images of these numbers."""
        size = self.manifest.image_bytes
        with self._one_reader:
            for row, number in zip(rows, numbers.tolist(), strict=True):
                data = read_at(self._handle, size, number * size)
                if len(data) < size:
                    raise ValueError(f"{self._path} was cut short while it was in use: {REMAKE}")
                row[:] = np.frombuffer(data, np.uint8).reshape(self.shape)

    def repeat_rate(self, patch: int) -> float:
        """How alike two rows of the stream are before training, as the repeat rate is for tokens: half the cosine of
        two patches of an image, since the other half of a row is its place (`nn.patches`).

        Mean inner product over mean squared norm of the normalised patches of up to 2,000 images, evenly spaced; 0
        where that is negative, or an image is one patch.
        """
        numbers = np.unique(np.linspace(0, len(self) - 1, min(len(self), _MOST_MEASURED)).astype(np.int64))
        pixels = np.empty((len(numbers), *self.shape), np.uint8)
        self.gather(numbers, pixels)
        mean, std = (np.array(each)[:, None, None] for each in (self.manifest.mean, self.manifest.std))
        count, grid = len(numbers), self.manifest.side // patch
        cut = ((pixels - mean) / std).reshape(count, -1, grid, patch, grid, patch)
        rows = cut.transpose(0, 2, 4, 1, 3, 5).reshape(count, grid**2, -1)
        if grid == 1:
            return 0.0
        squares, whole = (rows**2).sum(), (rows.sum(axis=1) ** 2).sum()
        return max(float((whole - squares) / squares / (grid**2 - 1)), 0.0) / 2.0

"""Pictures that a test can learn from: stripes across and stripes along, which no shift makes into each other."""

import tarfile
from pathlib import Path

import numpy as np
import pytest

CLASSES = ("across", "along")


def striped(folder: Path, train: int = 32, test: int = 16, side: int = 16, suffix: str = "png") -> Path:
    """folder/train/CLASS/N.png and folder/test/CLASS/N.png, so many of each class."""
    image = pytest.importorskip("PIL.Image")
    noise = np.random.default_rng(0)
    for part, count in (("train", train), ("test", test)):
        for name in CLASSES:
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                wave = 60.0 * np.sin(np.pi / 2 * np.arange(side) + noise.uniform(0, 2 * np.pi))
                lines = np.repeat(wave[:, None] if name == "across" else wave[None], side, axis=int(name == "across"))
                pixels = 128 + lines[:, :, None] + noise.normal(0, 20, (side, side, 3))
                file = folder / part / name / f"{number:03d}.{suffix}"
                image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file)
    return folder


def packed(folder: Path, part: str, path: Path, mode: str = "w:xz") -> Path:
    """A tar of one part of a source, or of all of it."""
    with tarfile.open(path, mode) as tar:
        tar.add(folder / part if part else folder, arcname=part or folder.name)
    return path

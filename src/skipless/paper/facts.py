"""The facts of prepared data, text or images: enough to rebuild every experiment on it, without the folder."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from skipless.data.image_store import ImageStore
from skipless.data.store import TokenStore, fingerprint
from skipless.model.config import Images, ModelConfig
from skipless.schema import build

CORPORA = {"train-00": "Wikipedia", "parts": "Wikipedia"}  # texts by the name of their file or folder, as logs have it


@dataclass(frozen=True)
class Text:
    """Those of tokens.

    repeat_rate is rounded to three decimals, as schemes take it. unigram is the entropy of its tokens in nats: what a
    network reaches that ignores its context. fingerprint names the very tokens.
    """

    name: str
    vocab_size: int
    repeat_rate: float
    unigram: float
    tokens: int
    fingerprint: str
    folder: str | None = None
    kind: ClassVar[str] = "Text"

    def sizes(self, _: ModelConfig) -> dict[str, Any]:
        """Changes to a network that make it one for these tokens."""
        return {"vocab_size": self.vocab_size}

    @classmethod
    def read(cls, folder: str | Path) -> "Text":
        """The facts of a folder made by `skipless prepare`."""
        folder = Path(folder).resolve()
        store = TokenStore(folder)
        if store.manifest.shards("valid"):
            TokenStore(folder, "valid")  # verified now and noted, so that runs side by side find it so
        counts = np.zeros(store.vocab_size)
        for piece in store.pieces():
            counts += np.bincount(piece, minlength=store.vocab_size)
        shares = counts[counts > 0] / counts.sum()
        return cls(
            name=str(store.manifest.options["corpus"]["name"]),
            vocab_size=store.vocab_size,
            repeat_rate=round(store.repeat_rate or 0.0, 3),
            unigram=round(float(-(shares * np.log(shares)).sum()), 4),
            tokens=len(store),
            fingerprint=fingerprint(folder) or "",
            folder=str(folder),
        )

    def to_json(self) -> dict[str, Any]:
        """All but the folder, which is another one on another machine."""
        return _without_folder(self)

    @property
    def title(self) -> str:
        """Its name as a reader knows it, and its size: "Wikipedia (train-00), 28.9M tokens"."""
        name = f"{CORPORA[self.name]} ({self.name})" if self.name in CORPORA else self.name
        return f"{name}, {self.tokens / 1e6:.1f}M tokens"

    def describe(self) -> str:
        """In words, for a table's head."""
        return f"{self.title} of {self.vocab_size:,} kinds (unigram {self.unigram:.2f})"


@dataclass(frozen=True)
class ImageSet:
    """Those of images.

    repeat_rate, to three decimals, is that of patches as large as the presets' (ImageStore.repeat_rate). unigram is the
    entropy of their classes in nats: what a network reaches that does not look. fingerprint names the very pixels.
    """

    name: str
    side: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: int
    repeat_rate: float
    unigram: float
    images: int
    fingerprint: str
    folder: str | None = None
    kind: ClassVar[str] = "Images"

    @classmethod
    def read(cls, folder: str | Path) -> "ImageSet":
        """The facts of a folder made by `skipless prepare --images`."""
        folder = Path(folder).resolve()
        store = ImageStore(folder)
        found = store.manifest
        if "valid" in found.splits:
            ImageStore(folder, "valid")  # verified now and noted, so that runs side by side find it so
        counts = np.bincount(store.labels, minlength=len(found.classes))
        shares = counts[counts > 0] / counts.sum()
        patch = Images(found.side, Images.patch, found.channels, found.mean, found.std).patch
        return cls(
            name=str(found.options.get("images", {}).get("name", folder.name)),
            side=found.side,
            channels=found.channels,
            mean=found.mean,
            std=found.std,
            classes=len(found.classes),
            repeat_rate=round(store.repeat_rate(patch), 3),
            unigram=round(float(-(shares * np.log(shares)).sum()), 4),
            images=len(store),
            fingerprint=fingerprint(folder) or "",
            folder=str(folder),
        )

    def sizes(self, model: ModelConfig) -> dict[str, Any]:
        """Changes to a network of images that make it one for these."""
        patch = Images.patch if model.images is None else model.images.patch
        images = Images(self.side, patch, self.channels, self.mean, self.std)
        return {"images": images, "length": images.length, "classes": self.classes}

    def to_json(self) -> dict[str, Any]:
        """All but the folder, which is another one on another machine."""
        return _without_folder(self)

    @property
    def title(self) -> str:
        """Its name and its size: "cifar10, 50,000 images"."""
        return f"{self.name}, {self.images:,} images"

    def describe(self) -> str:
        """In words, for a table's head."""
        return f"{self.title} of {self.side} × {self.side} in {self.classes} classes (entropy {self.unigram:.2f})"


Facts = Text | ImageSet


def facts_of(values: Mapping[str, Any]) -> Facts:
    """Those of a record; ValueError where they are none."""
    kind = ImageSet if "classes" in values else Text
    return build(kind, dict(values), "text", "text.")


def _without_folder(facts: Any) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(facts).items() if name != "folder"}

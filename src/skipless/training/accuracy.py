"""How well a network names the classes of images: loss and accuracy, by class, and what it takes for what."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from skipless.data.image_loader import ImageLoader
from skipless.ops.modes import autocast
from skipless.training.config import Precision

MOST_CLASSES = 20  # that a table shows


@dataclass(frozen=True)
class ImageResult:
    """loss in nats per image, without label smoothing; accuracy, the share of images whose class is the likeliest.

    answers (images, 2): the class of each image and the likeliest one; None where only the sums are known.
    """

    loss: float
    accuracy: float
    images: int
    answers: np.ndarray | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, nats: float, right: float, images: float) -> "ImageResult":
        """The result of sums over images, which may be sums over processes."""
        if not images:
            raise ValueError("no images were scored: give at least one")
        return cls(nats / images, right / images, int(images))

    def numbers(self) -> dict[str, float | None]:
        """What a log and a checkpoint keep of it."""
        return {"loss": self.loss, "accuracy": self.accuracy, "images": float(self.images)}

    @classmethod
    def from_numbers(cls, values: Mapping[str, Any]) -> "ImageResult":
        return cls(values["loss"], values["accuracy"], int(values["images"]))

    def words(self) -> str:
        return f"validation loss {self.loss:.4f}, accuracy {self.accuracy:.2%} of {self.images:,} images"


def evaluate_images(
    model: nn.Module,
    loader: ImageLoader,
    *,
    most: int | None = None,
    device: torch.device | str | None = None,
    precision: Precision | None = None,
) -> ImageResult:
    """Loss and accuracy over a loader's images in order, `most` of all ranks' or every one; this rank's share.

    As many calls on every rank, since a sharded model must be called by all of them together; a share may be empty.
    """
    place = torch.device(device) if device else next(model.parameters()).device
    precision = precision or ("bf16" if place.type == "cuda" else "fp32")
    wanted = len(loader.store) if most is None else min(most, len(loader.store))
    nats, right = (torch.zeros((), dtype=torch.float64, device=place) for _ in range(2))
    images, answers, training = 0, [], model.training
    model.eval()
    try:
        with torch.no_grad(), autocast(precision, place), loader.sweep() as batches:
            for first, batch in zip(range(0, wanted, loader.batch_size), batches, strict=False):
                own = int((loader.shuffle.share(first) < wanted).sum())
                pixels = batch.pixels if len(batch.pixels) else torch.zeros(1, *loader.store.shape, dtype=torch.uint8)
                logits = model(pixels.to(place))[:own].double()
                targets = batch.targets[:own].to(place)
                nats += nn.functional.cross_entropy(logits, targets, reduction="sum") if own else 0.0
                likeliest = logits.argmax(dim=1)
                right += (likeliest == targets).sum()
                answers.append(torch.stack([targets, likeliest], dim=1))
                images += own
    finally:
        model.train(training)
    if not images and loader.world > 1:
        return ImageResult(0.0, 0.0, 0)
    return replace(ImageResult.of(float(nats), float(right), images), answers=torch.cat(answers).cpu().numpy())


@dataclass(frozen=True)
class ClassResult:
    """One class: its images, how many were named right, and what the others were taken for, most often first."""

    name: str
    images: int
    right: int
    taken_for: dict[str, int]

    @property
    def accuracy(self) -> float:
        """The share named right; NaN of a class without images."""
        return self.right / self.images if self.images else float("nan")


def by_class(answers: np.ndarray, classes: Sequence[str]) -> list[ClassResult]:
    """What came of the images of each class. answers (images, 2): each one's class, and the one it was taken for."""
    pairs: dict[int, Counter[int]] = {}
    for label, answer in answers.tolist():
        pairs.setdefault(label, Counter())[answer] += 1
    results = []
    for number, name in enumerate(classes):
        found = pairs.get(number, Counter())
        wrong = {classes[other]: count for other, count in found.most_common() if other != number}
        results.append(ClassResult(name, found.total(), found[number], wrong))
    return results


def confusions(results: Sequence[ClassResult]) -> list[tuple[str, str, int]]:
    """(class, what it was taken for, how often) of all classes, most often first."""
    pairs = [(result.name, other, count) for result in results for other, count in result.taken_for.items()]
    return sorted(pairs, key=lambda pair: -pair[2])


def class_table(results: Sequence[ClassResult], most: int = MOST_CLASSES) -> tuple[list[str], list[list[str]]]:
    """Head and cells of a table of the classes, the worst first; of more than `most` those, and a row that says so."""
    known = sorted((each for each in results if each.images), key=lambda each: each.accuracy)
    rows = [[each.name, f"{each.images:,}", f"{each.accuracy:.1%}", _mistaken(each)] for each in known[:most]]
    if rest := known[most:]:
        images, right = (sum(getattr(each, name) for each in rest) for name in ("images", "right"))
        rows.append([f"the {len(rest):,} others", f"{images:,}", f"{right / images:.1%}", ""])
    return ["class", "images", "accuracy", "taken for"], rows


def _mistaken(result: ClassResult) -> str:
    return next((f"{name} ({count:,})" for name, count in result.taken_for.items()), "")

"""Batches of images as a function of (seed, step, rank), shifted and mirrored at random; nothing to remember."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from skipless.data.image_store import ImageStore
from skipless.data.loader import Batch, Permutation, Prefetch, Shuffle, is_cuda, mix


@dataclass(frozen=True)
class Augmentation:
    """Each time an image is seen: shifted by −crop … crop pixels along both axes, black beyond its edge, and one time
    in two mirrored left to right, if flip.
    """

    crop: int = 4
    flip: bool = True

    def moves(self, samples: np.ndarray, seed: int) -> np.ndarray:
        """(samples, 3) of int64: first row, first column, whether mirrored; by the sample's number and the seed."""
        key = np.random.SeedSequence([seed, 1]).generate_state(1, np.uint64)[0]
        drawn, places = mix(mix(samples.astype(np.uint64)) ^ key), np.uint64(2 * self.crop + 1)
        rest, row = np.divmod(drawn, places)
        rest, column = np.divmod(rest, places)
        mirrored = rest % np.uint64(2) if self.flip else np.zeros_like(rest)
        return np.stack([row, column, mirrored], axis=1).astype(np.int64)


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Pixels (batch, channels, side, side) of bytes, the class of each (batch,), and how each is moved (batch, 3).

    `inputs` are the moved images: a few tensor operations on whichever device the batch is.
    """

    pixels: Tensor
    targets: Tensor
    moves: Tensor | None = None
    crop: int = 0
    documents = None  # as a Batch of tokens may have

    @property
    def inputs(self) -> Tensor:
        """(batch, channels, side, side) of bytes."""
        return self.pixels if self.moves is None else moved(self.pixels, self.moves, self.crop)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.pixels, self.targets] if self.moves is None else [self.pixels, self.targets, self.moves]

    def map(self, change: Callable[[Tensor], Tensor]) -> "ImageBatch":
        return ImageBatch(*map(change, self.tensors), *([None] if self.moves is None else []), self.crop)

    def to(self, device: torch.device | str) -> "ImageBatch":
        """The batch on a device; from pinned memory the copy does not wait."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))


AnyBatch = Batch | ImageBatch  # whatever a network is trained on


def moved(pixels: Tensor, moves: Tensor, crop: int) -> Tensor:
    """Each image (channels, side, side) padded by `crop` black pixels, cut out again from its first row and column, and
    mirrored where its third number is 1. moves: (batch, 3).
    """
    batch, _, side, _ = pixels.shape
    row, column, mirrored = moves.unbind(1)
    along = torch.arange(side, device=pixels.device)
    across = torch.where(mirrored[:, None] == 1, side - 1 - along, along)
    padded = torch.nn.functional.pad(pixels, [crop] * 4).permute(0, 2, 3, 1)
    image = torch.arange(batch, device=pixels.device)[:, None, None]
    return padded[image, (along + row[:, None])[:, :, None], (across + column[:, None])[:, None, :]].permute(0, 3, 1, 2)


class ImageLoader:
    """Batches of `batch_size` images over all ranks together; this rank gets its slice, in the order of a Shuffle.

    augmentation None leaves images as they are. How an image is moved follows from the seed and the sample's number, so
    that a batch depends neither on `world` nor on what was seen before.
    """

    def __init__(
        self,
        store: ImageStore,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        *,
        augmentation: Augmentation | None = None,
    ):
        self.store, self.batch_size, self.seed, self.rank, self.world = store, batch_size, seed, rank, world
        self.augmentation = augmentation
        self.shuffle = Shuffle(len(store), batch_size, seed, rank, world)
        self._sweep_order = Permutation(len(store), 0)

    def batch(self, step: int) -> ImageBatch:
        """This rank's rows of the batch of `step`, on the CPU."""
        return self._batch(step)

    def _batch(self, step: int, pin: bool = False) -> ImageBatch:
        rows, augmentation = self._rows(self.shuffle.at(step), pin), self.augmentation
        if augmentation is None:
            return rows
        moves = torch.empty(len(rows.targets), 3, dtype=torch.int64, pin_memory=pin)
        moves.numpy()[:] = augmentation.moves(self.shuffle.samples(step), self.seed)
        return ImageBatch(rows.pixels, rows.targets, moves, augmentation.crop)

    def _rows(self, numbers: np.ndarray, pin: bool = False) -> ImageBatch:
        pixels = torch.empty(len(numbers), *self.store.shape, dtype=torch.uint8, pin_memory=pin)
        self.store.gather(numbers, pixels.numpy())
        labels = torch.empty(len(numbers), dtype=torch.int64, pin_memory=pin)
        labels.numpy()[:] = self.store.labels[numbers]
        return ImageBatch(pixels, labels)

    def batches(self, start: int = 0, device: torch.device | str | None = None, ahead: int = 4) -> Prefetch[ImageBatch]:
        """Batches of steps start, start+1, …, without end, made by a thread up to `ahead` before they are asked for."""
        pin = is_cuda(device)
        return Prefetch((self._batch(step, pin) for step in count(start)), device, ahead)

    def sweep(self) -> Prefetch[ImageBatch]:
        """Every image once and as it is, for evaluation, in one pseudo-random order, of which the first ones are a fair
        sample. All ranks get equally many batches.

        The last batch may be smaller, and has no rows for some ranks where it does not reach all of them.
        """
        return Prefetch(self._sweep())

    def _sweep(self) -> Iterator[ImageBatch]:
        for first in range(0, len(self.store), self.batch_size):
            yield self._rows(self._sweep_order(self.shuffle.share(first)))

"""Batches of images: functions of seed, step and rank, moved as said, each image once in an epoch."""

import pickle

import numpy as np
import pytest
import torch
from tests.pictures import striped

from skipless.data.image_files import prepare_images
from skipless.data.image_loader import Augmentation, ImageBatch, ImageLoader, moved
from skipless.data.image_store import ImageStore


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> ImageStore:
    folder = tmp_path_factory.mktemp("images")
    prepare_images(striped(folder / "source", train=11, test=3), folder / "data")
    return ImageStore(folder / "data")


def same(one: ImageBatch, two: ImageBatch) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.tensors, two.tensors, strict=True))


def names(loader: ImageLoader, steps: range) -> list[int]:
    """The number of each image, by its pixels."""
    known = {store_image(loader.store, number).tobytes(): number for number in range(len(loader.store))}
    return [known[image.numpy().tobytes()] for step in steps for image in loader.batch(step).pixels]


def store_image(store: ImageStore, number: int) -> np.ndarray:
    row = np.empty((1, *store.shape), np.uint8)
    store.gather(np.array([number]), row)
    return row[0]


def test_an_epoch_is_a_permutation_and_the_next_another(store: ImageStore) -> None:
    loader = ImageLoader(store, 2, seed=3)
    first, second = names(loader, range(11)), names(loader, range(11, 22))
    assert sorted(first) == sorted(second) == list(range(22))
    assert first != second
    assert names(ImageLoader(store, 2, seed=4), range(11)) != first


def test_a_batch_is_a_function_of_seed_and_step(store: ImageStore) -> None:
    make = lambda seed=0: ImageLoader(store, 6, seed, augmentation=Augmentation())  # noqa: E731
    wanted = [make().batch(step) for step in range(9)]
    again = make()
    assert all(same(again.batch(step), wanted[step]) for step in (8, 2, 5))
    with make().batches(start=4) as batches:
        assert all(same(next(batches), wanted[step]) for step in range(4, 9))
    assert not same(make(1).batch(0), wanted[0])
    assert not torch.equal(wanted[0].moves, wanted[1].moves)


def test_ranks_share_the_batch_of_one(store: ImageStore) -> None:
    whole = ImageLoader(store, 6, 2, augmentation=Augmentation())
    parts = [ImageLoader(store, 6, 2, rank, 3, augmentation=Augmentation()) for rank in range(3)]
    for step in (0, 7):
        together = [torch.cat(each) for each in zip(*(part.batch(step).tensors for part in parts), strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(together, whole.batch(step).tensors, strict=True))
    with pytest.raises(ValueError, match="batch_size=6 does not divide over 4 ranks: use 4 or 8"):
        ImageLoader(store, 6, 0, 0, 4)


def test_moves_are_cut_from_the_padded_image(store: ImageStore) -> None:
    """Against one image after another, by numpy."""
    batch = ImageLoader(store, 22, augmentation=Augmentation()).batch(0)
    assert batch.moves is not None
    for image, out, (row, column, mirrored) in zip(batch.pixels, batch.inputs, batch.moves.tolist(), strict=True):
        padded = np.pad(image.numpy(), ((0, 0), (4, 4), (4, 4)))
        wanted = padded[:, row : row + 16, column : column + 16]
        np.testing.assert_array_equal(out.numpy(), wanted[:, :, ::-1] if mirrored else wanted)


def test_moves_are_even(store: ImageStore) -> None:
    """81 shifts, and one in two mirrored: counts of 40,500 draws lie within five deviations of their means."""
    moves = Augmentation().moves(np.arange(40_500), seed=5)
    shifts = np.bincount(9 * moves[:, 0] + moves[:, 1], minlength=81)
    assert np.abs(shifts - 500).max() < 5 * 500**0.5
    assert abs(moves[:, 2].sum() - 20_250) < 5 * 10_125**0.5
    still = Augmentation(0, False).moves(np.arange(9), seed=5)
    assert not still.any()
    assert torch.equal(moved(torch.arange(4, dtype=torch.uint8).view(1, 1, 2, 2), torch.tensor([[0, 0, 1]]), 0),
                       torch.tensor([[[[1, 0], [3, 2]]]], dtype=torch.uint8))  # fmt: skip


def test_a_sweep_has_every_image_once_and_as_it_is(store: ImageStore) -> None:
    parts = [ImageLoader(store, 4, 9, rank, 2, augmentation=Augmentation()) for rank in range(2)]
    with parts[0].sweep() as one, parts[1].sweep() as two:
        batches = [list(one), list(two)]
    assert len(batches[0]) == len(batches[1]) == 6
    seen = torch.cat([batch.inputs for each in batches for batch in each])
    assert len(seen) == 22
    assert len({image.numpy().tobytes() for image in seen}) == 22
    first = torch.cat([batches[0][0].targets, batches[1][0].targets, batches[0][1].targets, batches[1][1].targets])
    assert 0 < first.sum() < 8  # not one class after the other


def test_a_store_goes_to_other_processes(store):
    loader = ImageLoader(store, 4, seed=3)
    assert same(pickle.loads(pickle.dumps(loader)).batch(2), loader.batch(2))

"""From pixels to the rows of a stream: patches of an image and their places."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from skipless.ops.modes import is_readable

_NORMALISED = 10.0  # deviations that no pixel is away from the mean


class PatchEmbedding(nn.Module):
    """(W·patch/√n + place)/√2 for each patch of n numbers, in reading order: the counterpart of a table of tokens.

    Where tokens are unlike at random, neighbouring patches are alike: a plain sky gives one row over and over, and a
    kernel of equal rows has nothing left to preserve in a network without skips. So every row is one half content and
    one half a learned place, and places start nearly orthogonal. With pixels of mean 0 and variance 1 and both matrices
    of N(0, 1/width), as tables of tokens start, rows have an expected squared norm of 1, and two of them half the
    cosine of their patches: `mean_cosine` of the patches / 2 is their repeat rate.

    mean and std, of each channel, make pixels of 0 … 255 such numbers. They are no buffers: they are known from the
    configuration before a model's tensors are.
    """

    def __init__(self, patch: int, grid: int, width: int, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.patch, self.grid, self.mean, self.std = patch, grid, tuple(mean), tuple(std)
        self.weight = nn.Parameter(torch.empty(width, len(self.mean) * patch**2))
        self.places = nn.Parameter(torch.empty(grid**2, width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Both matrices as a table of tokens starts."""
        for table in (self.weight, self.places):
            table.normal_(0.0, self.weight.shape[0] ** -0.5)

    def forward(self, images: Tensor, *, normalised: bool = False) -> Tensor:
        """(batch, channels, side, side) of pixels in 0 … 255, or of what `normalised` makes of them → (batch, patches,
        width)."""
        self.check(images)
        if not normalised:
            check_pixels(images)
        pixels = images.to(self.weight.dtype) if normalised else self.normalised(images)
        rows = cut(pixels, self.patch) / math.sqrt(self.weight.shape[1])
        content = nn.functional.linear(rows, self.weight)
        return (content + self.places.to(content.dtype)) * math.sqrt(0.5)

    def normalised(self, images: Tensor) -> Tensor:
        """(pixel − mean)/std in the weights' dtype."""
        channels = images.to(self.weight.dtype).unbind(1)
        each = zip(channels, self.mean, self.std, strict=True)
        return torch.stack([(channel - mean) / std for channel, mean, std in each], dim=1)

    def check(self, images: Tensor) -> None:
        """Refuse what is no batch of such images."""
        side = self.patch * self.grid
        wanted = (len(self.mean), side, side)
        shape = tuple(images.shape)
        if images.dim() != 4 or shape[1:] != wanted or images.dtype == torch.bool:
            remedies = {wanted: "images[None] for one", (side, side, len(self.mean)): "images.permute(0, 3, 1, 2)"}
            remedy = remedies.get(shape) or remedies.get(shape[1:])
            raise ValueError(
                f"images are {images.dtype} shaped {shape}; they must be (batch, {', '.join(map(str, wanted))}) of "
                f"pixels from 0 to 255, such as torch.uint8{f': {remedy}' if remedy else ''}"
            )


def check_pixels(images: Tensor) -> None:
    """Refuse floats that were scaled or normalised already: the network would see one grey. A GPU is not waited for."""
    if not images.is_floating_point() or not is_readable(images) or not images.numel():
        return
    low, high = (float(each) for each in images.detach().aminmax())
    small = high <= (1.0 if low >= 0.0 else _NORMALISED)
    if small and low < high and not bool((images == images.round()).all()):
        remedy = "images * 255" if low >= 0.0 else "give them as they are before that"
        raise ValueError(
            f"images run from {low:.4g} to {high:.4g}; they must be pixels from 0 to 255, which the network normalises "
            f"by its own mean and std: {remedy}"
        )


def cut(images: Tensor, patch: int) -> Tensor:
    """(batch, channels, side, side) → (batch, patches, channels·patch²), in reading order."""
    rows = images.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # batch, channel, row, y, column, x
    return rows.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

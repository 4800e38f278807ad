"""Images as transformers hands them over: what its processor makes of pictures, and what a network of images takes."""

import math
from typing import Any

from torch import Tensor

from skipless.model.config import Images
from skipless.ops.modes import is_readable

_WHITE = 255.0
_BEYOND = 10.0  # times what an image can reach: noise stays below, raw pixels do not


def image_processor(images: Images) -> Any:
    """transformers' own ViTImageProcessor, which resizes pictures to the network's size and normalises as training did.

    The file it saves names no class of ours: AutoImageProcessor reads it with torchvision where that is installed, and
    with Pillow alone otherwise. mean and std are in units of white, as other tools read them: with ToTensor, say.
    """
    try:
        from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

        return ViTImageProcessorPil(
            size={"height": images.side, "width": images.side},
            image_mean=[mean / _WHITE for mean in images.mean],
            image_std=[std / _WHITE for std in images.std],
            do_convert_rgb=images.channels == 3,
        )
    except ImportError as error:
        raise ValueError(
            "an image processor needs Pillow, which is not installed: pip install 'skipless[vision]'"
        ) from error


def check_pixels(pixels: Any, images: Images) -> None:
    """Refuse what is no batch of normalised images of this size. Values on a GPU are not waited for."""
    wanted = (images.channels, images.side, images.side)
    must = f"they must be floats (batch, {', '.join(map(str, wanted))}), as the export's AutoImageProcessor makes them"
    if not isinstance(pixels, Tensor):
        seen = "missing" if pixels is None else f"of type {type(pixels).__name__}"
        raise ValueError(f'pixel_values are {seen}; {must} with return_tensors="pt"')
    if not pixels.is_floating_point():
        raise ValueError(f"pixel_values are {pixels.dtype}: raw pixels? {must}, with mean 0 and deviation 1")
    shape = tuple(pixels.shape)
    if pixels.dim() != 4 or shape[1:] != wanted or not shape[0]:
        raise ValueError(f"pixel_values are shaped {shape}; {must}{_remedy(shape, wanted)}")
    if not is_readable(pixels):
        return
    low, high = (float(each) for each in pixels.detach().aminmax())
    if not math.isfinite(low) or not math.isfinite(high):
        raise ValueError("pixel_values hold NaN or infinity, and then no logit of their image is a number")
    pairs = list(zip(images.mean, images.std, strict=True))
    black, white = min(-mean / std for mean, std in pairs), max((_WHITE - mean) / std for mean, std in pairs)
    if max(-low, high) > _BEYOND * max(-black, white):
        raise ValueError(
            f"pixel_values run from {low:.4g} to {high:.4g}, and an image normalised for this network from {black:.4g} "
            f"to {white:.4g}: raw pixels? {must}"
        )


def _remedy(shape: tuple[int, ...], wanted: tuple[int, int, int]) -> str:
    """What to do about a shape that is nearly right."""
    channels, side, _ = wanted
    if shape == wanted:
        return ": pixel_values[None] for one image"
    if len(shape) == 4 and shape[1:] == (side, side, channels):
        return ": pixel_values.permute(0, 3, 1, 2), for the channels come first"
    if len(shape) == 4 and shape[1] != channels:
        return f": this network reads {channels} channel{'s' if channels > 1 else ''}, not {shape[1]}"
    return ""


def check_labels(labels: Any, classes: int) -> None:
    """Refuse numbers of classes that the network has not; −100 is ignored, as in transformers."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or classes < 2:  # of another problem_type
        return
    if not is_readable(labels) or not labels.numel():
        return
    counted = labels[labels != -100]
    if counted.numel() and not 0 <= int(counted.min()) <= int(counted.max()) < classes:
        raise ValueError(
            f"labels run from {int(counted.min())} to {int(counted.max())}, and the network has classes 0 … "
            f"{classes - 1}; for others load it with num_labels=…, ignore_mismatched_sizes=True, which draws a new head"
        )

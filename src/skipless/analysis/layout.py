"""Which dimension of a hidden state counts rows and which locations, whatever the model's layout."""

from collections.abc import Iterable

from torch import Tensor, nn

_TORCHS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def batch_second(x: Tensor, blocks: Iterable[nn.Module], given: tuple[int, int] | None) -> bool:
    """Whether a hidden state that enters or leaves the blocks is (T, rows, width).

    torch's own layers say so. Others may transpose around an attention that has the batch second, so there `given`,
    (rows, T) of the batch's ids or mask, decides; only where it cannot tell, the attention's batch_first does.
    """
    blocks = list(blocks)
    flagged = any(getattr(module, "batch_first", True) is False for block in blocks for module in block.modules())
    shape = tuple(x.shape[:2])
    if not flagged or given is None or all(type(block) in _TORCHS for block in blocks):
        return flagged
    if given[0] != given[1] and shape in (given, given[::-1]):
        return shape != given
    return flagged


def rows_first(x: Tensor, swapped: bool) -> Tensor:
    """(rows, T, width) of a hidden state with or without rows, on a line or on a grid."""
    if x.dim() == 2:
        return x[None]
    x = x.flatten(1, -2)
    return x.transpose(0, 1) if swapped else x


def check_locations(x: Tensor, keep: Tensor | None) -> None:
    """Raise unless every row of (rows, T, width) has two locations to compare and keep, False at padding, fits."""
    if x.shape[1] < 2:
        raise ValueError("the batch has 1 location per row; cosines compare locations, so give at least 2 tokens")
    if keep is not None and keep.shape != x.shape[:2]:
        raise ValueError(
            f"attention_mask is {tuple(keep.shape)} but the first block reads {tuple(x.shape[:2])} locations; "
            "leave the mask out, or give one entry per location"
        )
    if keep is not None and int(keep.sum(-1).min()) < 2:
        raise ValueError("a row of the batch has fewer than 2 tokens outside the padding; leave such rows out")

"""Whole matrices out of FSDP2's shards, and back."""

from typing import Any, cast

from torch import Tensor


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a DTensor, on every rank; any other tensor as it is."""
    return cast(Any, tensor).full_tensor() if hasattr(tensor, "full_tensor") else tensor


def resharded(whole: Tensor, like: Tensor) -> Tensor:
    """The part of `whole`, equal on every rank, that `like` keeps here: placed as `like` is, without communication."""
    if not hasattr(like, "full_tensor"):
        return whole
    from torch.distributed.tensor import DTensor, Replicate  # loads slowly, and only sharded runs get here

    like = cast(DTensor, like)
    replicated = DTensor.from_local(whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    return replicated.redistribute(placements=like.placements)

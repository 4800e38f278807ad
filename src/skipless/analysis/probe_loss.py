"""Gradients to send back: one unit vector per location, or those of the cross-entropy with labels."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from skipless.analysis.measure import hidden
from skipless.model.transformer import Transformer

IGNORED = -100


def unit_gradient(like: Tensor) -> Tensor:
    """An independent random unit vector at every location, the same for every call; torch's own generator rests."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(like.shape, generator=generator)
    return (noise / noise.norm(dim=-1, keepdim=True)).to(like)


def labelled_loss(model: nn.Module, output: Any, labels: Tensor) -> Tensor:
    """Cross-entropy of the model's logits, shifted by one location for causal language models."""
    logits = logits_of(output)
    check_labels(labels, logits.shape[-1])
    if predicts_next(model):
        logits, labels = logits[:, :-1], labels[:, 1:]
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels are {tuple(labels.shape)} and logits {tuple(logits.shape)}; labels need one class per location "
            "of the logits (or per row, where the model pools), else give loss=lambda output: …"
        )
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten().long(), ignore_index=IGNORED)


def logits_of(output: Any) -> Tensor:
    """The logits among what a model returns."""
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else hidden(output)


def predicts_next(model: nn.Module) -> bool:
    """Whether the output at a location is for the token after it."""
    if isinstance(model, Transformer):
        return model.config.head == "lm"
    return type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def check_labels(labels: Tensor, classes: int) -> None:
    """Integers in 0 … classes−1, or −100; torch itself reads past the end, dies without a word, or ignores what wrapped
    around to −100."""
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels are {labels.dtype}; class labels are integers, as in torch.long")
    largest = torch.iinfo(labels.dtype).max
    if largest < classes - 1:
        raise ValueError(
            f"labels are {labels.dtype}, which holds at most {largest}, but the model has {classes} classes: larger "
            "ones wrap around; make them torch.long before labels are stored in them"
        )
    real = labels[labels != IGNORED]
    if real.numel() == 0:
        raise ValueError(f"every label is {IGNORED}, which is ignored, so there is no loss to differentiate")
    low, high = int(real.min()), int(real.max())
    if low < 0 or high >= classes:
        raise ValueError(
            f"labels hold {low if low < 0 else high}, but the model has {classes} classes: they must lie in "
            f"0 … {classes - 1}, or be {IGNORED} to be ignored"
        )

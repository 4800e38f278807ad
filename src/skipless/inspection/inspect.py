"""Inspect a transformer: what is asked, what is measured block by block, and the verdict."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from skipless.inspection.diagnosis import Structure, diagnose
from skipless.inspection.gradients import GradientTaker, matrix_sizes
from skipless.inspection.hooks import Recorder, find_blocks, hidden, uncompiled
from skipless.inspection.inspection import BlockSignal, Inspection
from skipless.inspection.statistics import ActivationStats, Wanted, predict
from skipless.model import transformer
from skipless.model.transformer import Transformer
from skipless.theory.certificate import Thresholds

Batch = Tensor | Mapping[str, Any] | tuple

_IMAGES, _TOKENS = "pixel_values", "input_ids"


def check_batch(model: nn.Module, batch: Batch, labels: Tensor | None) -> None:
    """Raise for what cannot be inspected: no tensor, another device, one token, ids outside the vocabulary."""
    tensors = {name: value for name, value in _named(batch).items() if isinstance(value, Tensor)}
    if not tensors:
        raise ValueError(f"batch is {type(batch).__name__} without a tensor; give token ids (rows, T), or a mapping")
    if labels is not None:
        tensors["labels"] = labels
    place = next((p.device for p in model.parameters()), None)
    for name, tensor in tensors.items():
        if place is not None and tensor.device != place and not _spread(model):
            raise ValueError(f"{name} is on {tensor.device} and the model on {place}; move one: {name}.to('{place}')")
    ids = tensors.get(_TOKENS)
    if ids is None and isinstance(batch, Tensor) and not batch.is_floating_point():
        ids = batch
    if ids is not None:
        _check_ids(model, ids)


def _check_ids(model: nn.Module, ids: Tensor) -> None:
    if ids.dim() != 2:
        raise ValueError(
            f"token ids are {tuple(ids.shape)}; they must be (rows, T): ids[None] makes a batch of one row"
        )
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"token ids are {ids.dtype}; an embedding reads torch.int64 or torch.int32: ids.long()")
    if ids.shape[1] < 2:
        raise ValueError("the batch has 1 token per row; cosines compare locations, so give at least 2 tokens")
    if ids.numel() == 0:
        raise ValueError(f"the batch is empty: {tuple(ids.shape)}")
    vocabulary = _vocabulary(model)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or (vocabulary is not None and high >= vocabulary):
        limit = "" if vocabulary is None else f" and below the model's {vocabulary}"
        raise ValueError(f"token ids run from {low} to {high}; they must be at least 0{limit}")


def given_labels(batch: Batch, labels: Tensor | None) -> Tensor | None:
    """The labels, whichever way they came: as an argument, or in the mapping as for a training step."""
    inside = batch.get("labels") if isinstance(batch, Mapping) else None
    if inside is not None and labels is not None:
        raise ValueError("labels are in the batch and given beside it; leave one out")
    return inside if labels is None else labels


def padding(batch: Batch) -> Tensor | None:
    """True at real tokens, (rows, T), or None where nothing is padded."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or bool((mask != 0).all()):
        return None
    return mask != 0


def rows_and_length(batch: Batch) -> tuple[int, int] | None:
    """(rows, T) of the mask or the token ids, or None where the batch has neither."""
    named = _named(batch)
    integers = [value for value in named.values() if isinstance(value, Tensor) and not value.is_floating_point()]
    for value in (named.get("attention_mask"), named.get(_TOKENS), *integers):
        if isinstance(value, Tensor) and value.dim() == 2:
            return value.shape[0], value.shape[1]
    return None


def model_inputs(model: nn.Module, batch: Batch) -> tuple[tuple, dict[str, Any]]:
    """Arguments of the model's forward: labels are left to us, and no cache is filled."""
    accepted = signature(model.forward).parameters
    args: tuple = ()
    kwargs: dict[str, Any] = {}
    if isinstance(batch, Mapping):
        kwargs = {str(name): value for name, value in batch.items() if name != "labels"}
    elif isinstance(batch, Tensor) and batch.is_floating_point() and _IMAGES in accepted:
        kwargs[_IMAGES] = batch
    elif isinstance(batch, Tensor) and _TOKENS in accepted:
        kwargs[_TOKENS] = batch
    else:
        args = batch if isinstance(batch, tuple) else (batch,)
    if "use_cache" in accepted:
        kwargs.setdefault("use_cache", False)
    return args, kwargs


def _named(batch: Batch) -> dict[str, Any]:
    if isinstance(batch, Tensor):
        return {"batch": batch}
    if isinstance(batch, Mapping):
        return {str(name): value for name, value in batch.items()}
    if isinstance(batch, tuple):
        return {f"batch[{index}]": value for index, value in enumerate(batch)}
    raise ValueError(f"batch is a {type(batch).__name__}; give a tensor, a mapping of tensors, or a tuple of arguments")


def _vocabulary(model: nn.Module) -> int | None:
    """Rows of the input embedding, where the model says which that is."""
    if isinstance(model, Transformer):
        return model.config.vocab_size
    find = getattr(model, "get_input_embeddings", None)
    try:
        table = find() if callable(find) else None
    except NotImplementedError:
        return None
    rows = getattr(table, "num_embeddings", None)
    return rows if isinstance(rows, int) else None


def _spread(model: nn.Module) -> bool:
    """Whether the model lies on several devices and moves its inputs itself."""
    return len({p.device for p in model.parameters()}) > 1


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


Loss = Callable[[Any], Tensor]


def inspect(
    model: nn.Module | str | Path,
    batch: Batch,
    *,
    blocks: Sequence[str] | str | None = None,
    labels: Tensor | None = None,
    loss: Loss | None = None,
    keep_kernels: bool = True,
    thresholds: Thresholds | None = None,
) -> Inspection:
    """Measure what every block does to the signal and to its gradient, and say in words where it is lost, if it is.

    model: any PyTorch transformer, or a folder that save_pretrained wrote. Its weights, gradients, mode and hooks are
        left as they were; it runs in evaluation mode.
    batch: token ids (rows, T), images, or a mapping of the model's arguments; padding by attention_mask is left out.
    blocks: found by find_blocks unless named.
    labels: gradients are then of the cross-entropy (next-token for causal language models, −100 ignored); loss, of
        loss(output). With neither, they are of one independent random unit gradient per location at the last block's
        output, which is what theory predicts.
    thresholds: what counts as lost.
    """
    name = str(model) if isinstance(model, str | Path) else type(unwrapped(model)).__name__
    if isinstance(model, str | Path):
        from skipless.inspection.load import open_pretrained

        model = open_pretrained(model)
    model = unwrapped(model)
    labels = given_labels(batch, labels)
    check_batch(model, batch, labels)
    found = find_blocks(model, blocks)
    keep = padding(batch)
    theory = isinstance(_native(model), Transformer) and blocks is None and keep is None  # padded rows share no Σ
    wanted = Wanted(picture=keep_kernels, kernel=theory, keep=keep, given=rows_and_length(batch))
    recorder, taken = _run(model, batch, found, wanted, _loss_of(model, labels, loss))
    signals, locations = assemble(recorder, taken.groups)
    if theory:
        signals = _with_theory(signals, _native(model), recorder)
    verdict, advice = diagnose(signals, Structure.of(model, found, signals), thresholds)
    pictures = [stats.picture for stats in recorder.stats if stats.picture is not None]
    return Inspection(name, signals, verdict, advice, np.stack(pictures) if pictures else None, locations)


def assemble(
    recorder: Recorder, gradients: Sequence[dict[str, float]]
) -> tuple[tuple[BlockSignal, ...], dict[str, np.ndarray]]:
    """The recorder's numbers as BlockSignals, gradients relative to the output's, and norms by location."""
    if len(recorder.described) <= len(recorder.blocks):
        missing = recorder.blocks[max(len(recorder.described) - 1, 0)][0]
        raise ValueError(f"block {missing} did not run in this forward; name the blocks that do: blocks=[…]")
    names = ["input", *(name for name, _ in recorder.blocks)]
    depth = len(recorder.blocks)
    gradient_norms, attention, carries, real = recorder.gradients, recorder.attention, recorder.carries, recorder.real
    last = gradient_norms.get(depth)
    unit = None if last is None else _unit(float(last.mean(where=real)))
    signals = []
    for index, (name, stats) in enumerate(zip(names, recorder.stats, strict=True)):
        arrived, seen = gradient_norms.get(index), attention.get(index)
        known = arrived is not None and unit is not None
        numbers = {f: getattr(stats, f) for f in _SHARED}
        signals.append(
            BlockSignal(
                block=index,
                name=name,
                **numbers,
                gradient_mean=float(arrived.mean(where=real)) / unit if known else None,
                gradient_max=float(arrived.max(where=real, initial=0.0)) / unit if known else None,
                attention_entropy=seen.entropy if seen else None,
                attention_first=seen.first if seen else None,
                attention_spread=seen.spread if seen else None,
                carry=carries.get(index),
                parameter_gradients=gradients[index - 1] if index else {},
                parameter_sizes=matrix_sizes(recorder.blocks[index - 1][1]) if index else {},
            )
        )
    return tuple(signals), _by_location(recorder.stats, gradient_norms, real, unit)


_SHARED = (
    *("norm_min", "norm_mean", "norm_max", "cosine_mean", "cosine_quantiles"),
    *("effective_rank", "stable_rank", "collapse", "kurtosis", "outlier"),
)


def _by_location(
    stats: Sequence[ActivationStats], gradients: dict[int, np.ndarray], real: np.ndarray, unit: float | None
) -> dict[str, np.ndarray]:
    found = {"norm": np.stack([each.norms for each in stats])}
    if unit is not None and len(gradients) == len(stats):
        rows = np.stack([gradients[index] for index in range(len(stats))])
        counts = np.broadcast_to(real, rows.shape).sum(1)
        means = np.where(counts > 0, rows.sum(1, where=real) / np.maximum(counts, 1), np.nan)
        found["gradient"] = means / unit
    return found


def _unit(last: float) -> float:
    """What gradients are relative to: the output's, or 1 where that is 0 or not finite."""
    return last if 0 < last < math.inf else 1.0


def _run(
    model: nn.Module, batch: Batch, blocks: list[tuple[str, nn.Module]], wanted: Wanted, loss: Loss | None
) -> tuple[Recorder, GradientTaker]:
    """One forward and one backward under hooks."""
    recorder, taker = Recorder(blocks, wanted), GradientTaker(model, blocks)
    with evaluating(model), uncompiled(model), torch.enable_grad(), taker:
        args, kwargs = model_inputs(model, batch)
        with recorder:
            output = model(*args, **kwargs)
        if loss is not None:
            loss(output).backward()
        elif recorder.last is not None:
            last = recorder.last
            del output  # the head's part of the graph is not needed
            torch.autograd.backward(last, unit_gradient(last))
        recorder.last = None
    return recorder, taker


def _loss_of(model: nn.Module, labels: Tensor | None, loss: Loss | None) -> Loss | None:
    if loss is not None and labels is not None:
        raise ValueError("labels and loss are both given; a gradient is of one of them: leave one out")
    if labels is None:
        return loss
    return lambda output: labelled_loss(model, output, labels)


@contextmanager
def evaluating(model: nn.Module):
    """Evaluation mode, each module's own mode being put back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def unwrapped(model: nn.Module) -> nn.Module:
    """The network inside DataParallel, DistributedDataParallel or torch.compile, whose own hooks must not run."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {model!r}; it must be a torch.nn.Module, or a folder that save_pretrained wrote")
    for attribute in ("_orig_mod", "module"):
        inner = getattr(model, attribute, None)
        if isinstance(inner, nn.Module) and type(model).__module__.startswith("torch."):
            return unwrapped(inner)
    return model


def _native(model: nn.Module) -> Any:
    """Our own Transformer, bare or inside its Hugging Face wrapper; else what was given."""
    inner = getattr(model, "model", None)
    return inner if isinstance(inner, Transformer) else model


def _with_theory(signals: tuple[BlockSignal, ...], native: Transformer, recorder: Recorder) -> tuple[BlockSignal, ...]:
    """Beside each measurement what theory expects at initialisation, from the measured Σ_0."""
    start = recorder.described[0].kernel
    if start is None:
        return signals
    start = start if start.dtype == torch.float64 else start.cpu().double()
    if not bool(torch.isfinite(start).all() & (torch.diagonal(start) > 0).all()):
        return signals
    predicted = predict(transformer.kernel_blocks(native.config), start)
    return tuple(
        replace(each, predicted=predicted[each.block] if each.block < len(predicted) else None) for each in signals
    )


def assert_signal_preserved(
    model: nn.Module,
    batch: Batch,
    *,
    blocks: Sequence[str] | str | None = None,
    labels: Tensor | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    allow_drift: bool = True,
    thresholds: Thresholds | None = None,
) -> Inspection:
    """Raise AssertionError unless the signal survives every block; return the inspection. Arguments as of inspect.

    allow_drift=False also refuses squared norms outside 1/4 … 4 of the input's, in networks without norms.
    """
    found = inspect(model, batch, blocks=blocks, labels=labels, loss=loss, keep_kernels=False, thresholds=thresholds)
    kind = found.verdict.kind
    if kind == "preserved" or (kind == "drift" and allow_drift):
        return found
    raise AssertionError(f"{found.model}: {found.verdict.text} {found.advice}\n{_around(found)}")


def _around(found: Inspection) -> str:
    """The numbers of the blocks next to the verdict's."""
    at = found.verdict.block or 0
    near = [each for each in found.blocks if abs(each.block - at) <= 2]
    lines = ["block  norm²     cosine   gradient²"]
    for each in near:
        gain = "-" if each.gradient_mean is None else f"{each.gradient_mean:.3g}"
        lines.append(f"{each.block:>5}  {each.norm_mean:<8.3g}  {each.cosine_mean:<7.4f}  {gain}")
    return "\n".join(lines)

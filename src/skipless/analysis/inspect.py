"""inspect(model, batch): where the signal of a network dies, from one forward and one backward pass."""

import math
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from skipless.analysis.activation_stats import ActivationStats, Wanted
from skipless.analysis.diagnose import Structure, diagnose
from skipless.analysis.find_blocks import find_blocks
from skipless.analysis.inspection import BlockSignal, Inspection
from skipless.analysis.measure import Recorder
from skipless.analysis.parameter_gradients import GradientTaker, matrix_sizes
from skipless.analysis.prediction import predict
from skipless.analysis.probe_loss import labelled_loss, unit_gradient
from skipless.analysis.request import Batch, check_batch, given_labels, model_inputs, padding, rows_and_length
from skipless.analysis.uncompiled import uncompiled
from skipless.model import signal
from skipless.model.transformer import Transformer
from skipless.theory.certificate import Band

Loss = Callable[[Any], Tensor]


def inspect(
    model: nn.Module | str | Path,
    batch: Batch,
    *,
    blocks: Sequence[str] | str | None = None,
    labels: Tensor | None = None,
    loss: Loss | None = None,
    keep_kernels: bool = True,
    band: Band | None = None,
) -> Inspection:
    """Measure what every block does to the signal and to its gradient, and say in words where it is lost, if it is.

    model: any PyTorch transformer, or a folder that save_pretrained wrote. Its weights, gradients, mode and hooks are
        left as they were; it runs in evaluation mode.
    batch: token ids (rows, T), images, or a mapping of the model's arguments; padding by attention_mask is left out.
    blocks: found by find_blocks unless named.
    labels: gradients are then of the cross-entropy (next-token for causal language models, −100 ignored); loss, of
        loss(output). With neither, they are of one independent random unit gradient per location at the last block's
        output, which is what theory predicts.
    band: what counts as lost.
    """
    name = str(model) if isinstance(model, str | Path) else type(unwrapped(model)).__name__
    if isinstance(model, str | Path):
        from skipless.analysis.open_model import open_model

        model = open_model(model)
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
    verdict, advice = diagnose(signals, Structure.of(model, found, signals), band)
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
    predicted = predict(signal.kernel_blocks(native.config), start)
    return tuple(
        replace(each, predicted=predicted[each.block] if each.block < len(predicted) else None) for each in signals
    )

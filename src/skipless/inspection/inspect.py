"""Inspect a transformer: measure what each block does to the signal, in full precision and in half, and judge it."""

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from skipless.inspection.diagnosis import Structure, diagnose, from_behind
from skipless.inspection.evidence import Evidence
from skipless.inspection.gradients import BlockGradients, GradientTaker, Weight, matrix_sizes, weights_of
from skipless.inspection.hooks import Recorder, batch_second, check_locations, hidden, rows_first, uncompiled
from skipless.inspection.inputs import (
    Batch,
    check_batch,
    given_labels,
    labelled_loss,
    model_inputs,
    padding,
    read_by,
    rows_and_length,
    some_rows,
    unit_gradient,
    with_decoder_ids,
)
from skipless.inspection.inspection import BlockSignal, Inspection
from skipless.inspection.prediction import predict
from skipless.inspection.probes import Seen, Watched, padding_seen, probe
from skipless.inspection.remarks import idle_outside, not_learning, not_read, of_model, remarks
from skipless.inspection.stacks import Block, find_blocks, find_stacks, listening, says_causal
from skipless.inspection.statistics import ActivationStats, InspectOptions
from skipless.inspection.wiring import idle_norms
from skipless.model import kernel_maps
from skipless.model.quantise import QUANTISATIONS, quantised
from skipless.model.transformer import Transformer
from skipless.ops.precision import HALF, autocast
from skipless.theory.certificate import Thresholds

Loss = Callable[[Any], Tensor]
Taken = dict[str, BlockGradients]  # by the block's name


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
    blocks: every stack is found by find_stacks unless one is named.
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
    batch = with_decoder_ids(model, batch, labels)
    stacks = find_stacks(model, blocks)
    theory = isinstance(_native(model), Transformer) and blocks is None and padding(batch) is None  # rows share one Σ
    options = InspectOptions(picture=keep_kernels, kernel=theory, several=len(stacks) > 1, streams=_streams(model))
    recorders = [_recorder(model, batch, stack, options) for stack in stacks]
    taken, notes = _run(model, batch, recorders, _loss_of(model, labels, loss))
    complete = sorted((each for each in recorders if each.complete), key=lambda each: each.started)
    if not complete:
        raise ValueError(_not_run(recorders))
    every = [block for recorder in complete for block in recorder.blocks]
    weights = dict(zip((name for name, _ in every), weights_of([block for _, block in every]), strict=True))
    inside = {id(module) for recorder in recorders for _, block in recorder.blocks for module in block.modules()}
    with evaluating(model), uncompiled(model):
        outside = [(name, module) for name, module in model.named_modules() if id(module) not in inside]
        *idle, beside = idle_norms([*(block.named_modules() for _, block in every), outside])
    norms = dict(zip((name for name, _ in every), idle, strict=True))
    notes += [*idle_outside(beside)]
    seen = _probed(model, batch, complete)
    found = [
        _found((name, model, thresholds), recorder, taken, (weights, norms), each)
        for recorder, each in zip(complete, seen, strict=True)
    ]
    whole = at_fault(found, recorders)
    return replace(whole, notes=(*whole.notes, *notes))


def _recorder(model: nn.Module, batch: Batch, stack: list[Block], options: InspectOptions) -> Recorder:
    own = read_by(batch, stack[0][0])
    shape = rows_and_length(own)
    alone = None
    if shape is not None and shape[0] == shape[1] > 1:
        alone = _entering(model, some_rows(batch, [0]), stack[0][1])
    return Recorder(stack, replace(options, mask=padding(own), batch_shape=shape, one_row=alone))


@torch.no_grad()
def _entering(model: nn.Module, batch: Batch, block: nn.Module) -> tuple[int, ...] | None:
    """The shape of what enters a block."""
    seen: list[tuple[int, ...]] = []

    def before(index: int):
        return lambda _, args, kwargs: seen.append(tuple(hidden([*args, *kwargs.values()]).shape))

    with listening([block], before, lambda index: lambda *_: None), evaluating(model), uncompiled(model):
        args, kwargs = model_inputs(model, batch)
        model(*args, **kwargs)
    return seen[0] if seen else None


def _probed(model: nn.Module, batch: Batch, recorders: Sequence[Recorder]) -> list[Seen]:
    """What each stack sees; decoders with ids of their own are asked by those."""
    found: dict[int, Seen] = {}
    for decoder in (False, True):
        chosen = [i for i, r in enumerate(recorders) if (read_by(batch, r.blocks[0][0]) is not batch) == decoder]
        stacks = [_watched(recorders[i]) for i in chosen]
        if not chosen:
            continue
        with evaluating(model), uncompiled(model):
            try:
                found |= dict(zip(chosen, probe(model, batch, stacks, decoder), strict=True))
            except Exception as error:  # a model may refuse three rows, or its hooks what has no gradient
                why = (str(error).strip() or type(error).__name__).partition("\n")[0].rstrip(".")
                note = f"Whether it sees the future or other rows was not asked: {why}."
                found |= dict.fromkeys(chosen, Seen(note=note))
    if padding(batch) is not None:
        with evaluating(model), uncompiled(model):
            seen = padding_seen(model, batch, [_watched(recorder) for recorder in recorders])
        for index, block in enumerate(seen):
            if block is not None and recorders[index].attention:
                found[index] = replace(found[index], leaks={**found[index].leaks, "padding": block})
    return [found[index] for index in range(len(recorders))]


def _watched(recorder: Recorder) -> Watched:
    """It is made to look back where most of its blocks put no weight on what follows, or where they say so."""
    ahead = [each.ahead for each in recorder.attention.values()]
    masked = 2 * sum(weight == 0 for weight in ahead) > len(ahead)
    blocks = [block for _, block in recorder.blocks]
    return Watched(blocks, recorder.swapped, masked or any(map(says_causal, blocks)), bool(ahead))


def _found(
    asked: tuple[str, nn.Module, Thresholds | None],
    recorder: Recorder,
    taken: Taken,
    held: tuple[dict[str, dict[str, Weight]], dict[str, tuple[str, ...]]],
    seen: Seen,
) -> Inspection:
    """The inspection of one stack; taken and held, the parameters and the norms that do not normalise, are of all of
    them, by the block's name."""
    (name, model, thresholds), (weights, norms) = asked, held
    gradients, own = [taken[block] for block, _ in recorder.blocks], {block for block, _ in recorder.blocks}
    sizes = [weights[block] for block, _ in recorder.blocks]
    cousins = [each for block, each in weights.items() if block not in own]
    signals, locations = assemble(recorder, gradients, sizes)
    if recorder.options.kernel:
        signals = _with_theory(signals, _native(model), recorder)
    evidence = Evidence(
        signals,
        sizes,
        [each.matrices for each in gradients],
        [each.unused for each in gradients],
        seen.wired,
        seen.leaks,
        cousins,
        [norms[block] for block, _ in recorder.blocks],
        recorder.options.mask is not None,
    )
    verdict, advice = diagnose(evidence, Structure.of(model, recorder.blocks, signals), thresholds)
    pictures = [stats.picture for stats in recorder.stats if stats.picture is not None]
    pictures = pictures if len({picture.shape for picture in pictures}) == 1 else []
    notes = tuple(remarks(model, recorder.blocks, evidence, seen))
    return Inspection(name, signals, verdict, advice, np.stack(pictures) if pictures else None, locations, notes)


def at_fault(found: list[Inspection], recorders: list[Recorder]) -> Inspection:
    """The stack that is at fault, the first to run where there are several, or else the longest; the others with it.

    A gradient that is lost from the last block on comes from what follows, so a later stack is asked first.
    """
    lost = [each for each in found if each.verdict.lost]
    own = [each for each in lost if not from_behind(each.verdict, each.blocks)]
    chosen = [*own, *reversed(lost), max(found, key=lambda each: len(each.blocks))][0]
    others = tuple(_follows(each, chosen) for each in found if each is not chosen)
    notes = [*chosen.notes]
    for each in others:
        said = f"{each.verdict.words}. {each.advice}" if each.verdict.lost else f"{each.verdict.words}."
        notes.append(f"{stack_name(each)}, {len(each.blocks) - 1} blocks, was inspected too: {said}")
        notes += [f"{stack_name(each)}: {note}" for note in each.notes if note not in chosen.notes]
    for each in recorders:
        if not each.complete:
            why = each.refused or "it did not run"
            notes.append(f"{each.blocks[0][0].rpartition('.')[0]}, {len(each.blocks)} blocks, was left out: {why}.")
    if others:
        named = [replace(each, model=f"{each.model}, {stack_name(each)}") for each in (chosen, *others)]
        chosen, others = named[0], tuple(named[1:])
    return replace(chosen, notes=tuple(notes), others=others)


def _follows(each: Inspection, chosen: Inspection) -> Inspection:
    """A stack with what the one at fault does to it: a gradient that is spoilt before it arrives."""
    if not (chosen.verdict.lost and each.verdict.lost and from_behind(each.verdict, each.blocks)):
        return each
    return replace(each, advice=f"This gradient comes from what follows the last block: see {stack_name(chosen)}.")


def stack_name(found: Inspection) -> str:
    """The name of the list that holds the blocks."""
    return found.blocks[-1].name.rpartition(".")[0] or "the model"


def _not_run(recorders: Sequence[Recorder]) -> str:
    for each in recorders:
        if each.refused is not None:
            return each.refused
    each = max(recorders, key=lambda each: len(each.described))
    missing = each.blocks[max(len(each.described) - 1, 0)][0]
    return f"block {missing} did not run in this forward; name the blocks that do: blocks=[…]"


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


def _loss_of(model: nn.Module, labels: Tensor | None, loss: Loss | None) -> Loss | None:
    if loss is not None and labels is not None:
        raise ValueError("labels and loss are both given; a gradient is of one of them: leave one out")
    if labels is None:
        return loss
    return lambda output: labelled_loss(model, output, labels)


def _run(model: nn.Module, batch: Batch, recorders: list[Recorder], loss: Loss | None) -> tuple[Taken, list[str]]:
    """One forward and one backward under hooks; and notes on the model and on what it gives.

    Without a loss the backward starts at the last block that runs; a stack that this does not reach, as of two towers,
    gets one of its own.
    """
    every = [block for recorder in recorders for block in recorder.blocks]
    taker = GradientTaker(model, every)
    with evaluating(model), uncompiled(model), torch.enable_grad(), taker:
        args, kwargs = model_inputs(model, batch)
        with ExitStack() as listening:
            for recorder in recorders:
                listening.enter_context(recorder)
            called = listening.enter_context(_calls(model, recorders))
            output = model(*args, **kwargs)
        ran = sorted((each for each in recorders if each.last is not None), key=lambda each: -each.started)
        cut = [each.blocks[0][0] for each in recorders if each.cut]
        notes = list(of_model(model, batch, output, cut))
        notes += [note for each in ran for note in not_read(output, each.last, each.blocks[-1][0])]
        if loss is not None:
            loss(output).backward()
        del output  # the head's part of the graph is not needed
        for number, recorder in enumerate(ran if loss is None else []):
            last = recorder.last
            if last is not None and last.requires_grad and not recorder.reached:
                recorder.sent = True
                torch.autograd.backward(last, unit_gradient(last), retain_graph=number + 1 < len(ran))
        first = min((each.started for each in ran), default=0.0)
        before = [name for name, began in called.items() if began < first]
        notes += [*not_learning([n for n in before if not cut and taker.missed(model.get_submodule(n))])]
        for recorder in recorders:
            recorder.forget()
    return dict(zip((name for name, _ in every), taker.taken, strict=True)), notes


@contextmanager
def _calls(model: nn.Module, recorders: Sequence[Recorder]) -> Generator[dict[str, float]]:
    """When modules outside the blocks were first called, filled while this is open."""
    inside = {id(module) for recorder in recorders for _, block in recorder.blocks for module in block.modules()}
    found: dict[str, float] = {}
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            leaf = next(module.children(), None) is None and next(module.parameters(recurse=False), None) is not None
            if leaf and id(module) not in inside:
                note = module.register_forward_pre_hook(
                    lambda *_, name=name: found.setdefault(name, time.perf_counter()) and None
                )
                hooks.callback(note.remove)
        yield found


def assemble(
    recorder: Recorder, gradients: Sequence[BlockGradients], weights: Sequence[Mapping[str, Weight]]
) -> tuple[tuple[BlockSignal, ...], dict[str, np.ndarray]]:
    """The recorder's numbers as BlockSignals, gradients relative to the output's, and norms by location."""
    names = ["input", *(name for name, _ in recorder.blocks)]
    arrivals, attention, carries, real = recorder.gradients, recorder.attention, recorder.carries, recorder.real
    returned, last = recorder.returned, recorder.gradients.get(len(recorder.blocks))
    unit = 1.0 if last is None or recorder.sent else _unit(float(last.mean(where=real)))
    signals = []
    for index, (name, stats) in enumerate(zip(names, recorder.stats, strict=True)):
        arrived, seen, back = arrivals.get(index), attention.get(index), returned.get(index)
        numbers = {f: getattr(stats, f) for f in _SHARED}
        signals.append(
            BlockSignal(
                block=index,
                name=name,
                **numbers,
                gradient_mean=None if arrived is None else float(arrived.mean(where=real)) / unit,
                gradient_max=None if arrived is None else float(arrived.max(where=real, initial=0.0)) / unit,
                attention_entropy=seen.entropy if seen else None,
                attention_first=seen.first if seen else None,
                attention_spread=seen.spread if seen else None,
                carry=carries[index][0] if index in carries else None,
                parameter_gradients=gradients[index - 1].groups if index else {},
                parameter_sizes=matrix_sizes(weights[index - 1]) if index else {},
                attention_own=seen.own if seen else None,
                attention_ahead=seen.ahead if seen else None,
                kept=carries[index][1] if index in carries else None,
                attached=recorder.attached.get(index),
                gradient_back=None if back is None else float(back.mean(where=real)) / unit,
                coefficient=carries[index][2] if index in carries else None,
                kept_back=recorder.handed.get(index),
                gradient_zeros=None if arrived is None else float((arrived == 0).mean(where=real)),
            )
        )
    return tuple(signals), _by_location(recorder.stats, arrivals, real, None if last is None else unit)


_SHARED = (
    *("norm_min", "norm_mean", "norm_max", "cosine_mean", "cosine_quantiles"),
    *("effective_rank", "stable_rank", "collapse", "kurtosis", "outlier", "least"),
)


def _by_location(
    stats: Sequence[ActivationStats], gradients: dict[int, np.ndarray], real: np.ndarray, unit: float | None
) -> dict[str, np.ndarray]:
    if len({each.norms.shape for each in stats}) > 1:
        return {}  # locations are merged or added on the way
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


def _with_theory(signals: tuple[BlockSignal, ...], native: Transformer, recorder: Recorder) -> tuple[BlockSignal, ...]:
    """Beside each measurement what theory expects at initialisation, from the measured Σ_0."""
    start = recorder.described[0].kernel
    if start is None:
        return signals
    start = start if start.dtype == torch.float64 else start.cpu().double()
    if not bool(torch.isfinite(start).all() & (torch.diagonal(start, dim1=-2, dim2=-1) > 0).all()):
        return signals
    predicted = predict(kernel_maps.kernel_blocks(native.config), start)
    return tuple(
        replace(each, predicted=predicted[each.block] if each.block < len(predicted) else None) for each in signals
    )


def _native(model: nn.Module) -> Any:
    """Our own Transformer, bare or inside its Hugging Face wrapper; else what was given."""
    inner = getattr(model, "model", None)
    return inner if isinstance(inner, Transformer) else model


def _streams(model: nn.Module) -> int:
    """How many parts of the channels theory follows apart: the heads, where each has a kernel of its own; else 1."""
    native = _native(model)
    return native.config.heads if isinstance(native, Transformer) and native.config.scheme.by_head else 1


def unwrapped(model: nn.Module) -> nn.Module:
    """The network inside DataParallel, DistributedDataParallel or torch.compile, whose own hooks must not run."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {model!r}; it must be a torch.nn.Module, or a folder that save_pretrained wrote")
    for attribute in ("_orig_mod", "module"):
        inner = getattr(model, attribute, None)
        if isinstance(inner, nn.Module) and type(model).__module__.startswith("torch."):
            return unwrapped(inner)
    return model


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


@torch.no_grad()
def rounding(
    model: nn.Module,
    batch: Batch,
    precision: str = "bf16",
    *,
    blocks: Sequence[str] | str | None = None,
) -> list[float]:
    """‖x̂ − x‖/‖x − x̄‖ after every block, first to last: what rounding adds, over what tells locations apart.

    x is computed in the parameters' precision, x̂ under autocast in `precision`, "bf16" or "fp16", or with matrices and
    their inputs rounded as "int8", "fp8" and the others of skipless.model.quantise; x̄ is the mean of a row's locations,
    padding left out. What one block of a network without skips adds, all that follow hand on, so that it grows with
    depth. model, batch and blocks are as for `inspect`; the model is left as it was.
    """
    if precision not in (*HALF, *QUANTISATIONS):
        raise ValueError(f"precision is {precision!r}; use one of {', '.join((*HALF, *QUANTISATIONS))}")
    model = unwrapped(model)
    check_batch(model, batch, None)
    batch = with_decoder_ids(model, batch, None)
    found = [block for _, block in find_blocks(model, blocks)]
    exact = _outputs(model, batch, found, "fp32")
    with quantised(found, precision) if precision in QUANTISATIONS else nullcontext():
        rounded = _outputs(model, batch, found, precision)
    mask = padding(batch)
    check_locations(exact[0], mask)
    return [_share(x, y, mask) for x, y in zip(exact, rounded, strict=True)]


def with_rounding(found: Inspection, shares: Sequence[float]) -> Inspection:
    """The inspection of a network with what `rounding` says of it; nothing is rounded before the first block."""
    blocks = zip(found.blocks, (0.0, *shares), strict=True)
    return replace(found, blocks=tuple(replace(block, rounding=share) for block, share in blocks))


def _outputs(model: nn.Module, batch: Batch, blocks: list[nn.Module], precision: str) -> list[Tensor]:
    """What every block gives, as (rows, T, width); "fp32" leaves the parameters' precision as it is."""
    given: list[Tensor] = []
    device = next(model.parameters()).device
    with (
        listening(
            blocks, lambda index: lambda *_: None, lambda index: lambda *given_: given.append(hidden(given_[-1]))
        ),
        evaluating(model),
        uncompiled(model),
        autocast(precision, device),
    ):
        args, kwargs = model_inputs(model, batch)
        model(*args, **kwargs)
    if len(given) != len(blocks):
        raise ValueError(
            f"{len(given)} outputs came from {len(blocks)} blocks; name those that run, once each: blocks=[…]"
        )
    swapped = batch_second(given[0], blocks, rows_and_length(batch))
    return [rows_first(x, swapped) for x in given]


def _share(exact: Tensor, rounded: Tensor, mask: Tensor | None) -> float:
    real = torch.ones_like(exact[..., :1], dtype=torch.bool) if mask is None else mask[..., None].to(exact.device)
    error = (rounded.double() - exact.double()).where(real, 0.0)
    mean = exact.double().where(real, 0.0).sum(1, keepdim=True) / real.sum(1, keepdim=True)
    apart = (exact.double() - mean).where(real, 0.0)
    return float(error.norm() / apart.norm())

"""Inspect a transformer: measure what each block does to the signal, and judge it."""

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from skipless.console import text_table
from skipless.inspection.diagnosis import diagnose, from_behind
from skipless.inspection.evidence import Evidence
from skipless.inspection.gradients import BlockGradients, GradientTaker, weights_of
from skipless.inspection.hooks import Recorder, undisturbed
from skipless.inspection.inputs import (
    Batch,
    answer,
    check_batch,
    check_loss,
    given_labels,
    id_keys,
    labelled_loss,
    own_network,
    padding,
    read_by,
    rows_and_length,
    some_rows,
    unit_gradient,
    unwrapped,
    with_decoder_ids,
    without_inference,
)
from skipless.inspection.inspection import BlockSignal, Inspection
from skipless.inspection.notes import idle_outside, not_learning, not_read, of_model, on_stack
from skipless.inspection.prediction import predict
from skipless.inspection.probes import Seen, Watched, padding_seen, probe
from skipless.inspection.stacks import Block, find_stacks, hidden, listening, says_causal
from skipless.inspection.statistics import InspectOptions
from skipless.inspection.wiring import idle_norms
from skipless.model import kernel_maps
from skipless.model.transformer import Transformer
from skipless.theory.certificate import Thresholds

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
    batch: token ids (rows, T), images, or a mapping or a tuple of the model's arguments; padding by attention_mask is
        left out.
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
    batch = without_inference(batch)
    batch = with_decoder_ids(model, batch, labels)
    stacks = find_stacks(model, blocks)
    native = own_network(model) if blocks is None and padding(batch) is None else None  # whose rows share one Σ
    streams = native.config.heads if native is not None and native.config.scheme.by_head else 1
    options = InspectOptions(picture=keep_kernels, kernel=native is not None, several=len(stacks) > 1, streams=streams)
    devices = {parameter.device.index for parameter in model.parameters() if parameter.is_cuda}
    # autograd records, whatever is around, and random numbers that the model draws are put back
    with torch.inference_mode(False), torch.random.fork_rng([*devices]), undisturbed(model):
        recorders = [_recorder(model, batch, stack, options) for stack in stacks]
        gradients, notes = _run(model, batch, recorders, _loss_of(model, labels, loss))
        complete = in_order(recorders)
        if not complete:
            raise ValueError(_not_run(recorders))
        (beside,) = idle_norms([_outside(model, recorders)])
        seen = zip(complete, _probed(model, batch, complete), strict=True)
        alone = [_evidence(model, recorder, gradients, each) for recorder, each in seen]
    found = []
    for recorder, own in zip(complete, alone, strict=True):
        evidence = _with_others(own, [each for each in alone if each is not own])
        if native is not None:
            evidence = replace(evidence, signals=_with_theory(evidence.signals, native, recorder))
        found.append(judged(name, recorder, evidence, thresholds, on_stack(evidence)))
    whole = at_fault(found, recorders)
    return replace(whole, notes=(*whole.notes, *notes, *idle_outside(beside)))


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

    with listening([block], before):
        answer(model, batch)
    return seen[0] if seen else None


def _loss_of(model: nn.Module, labels: Tensor | None, loss: Loss | None) -> Loss | None:
    if loss is not None and labels is not None:
        raise ValueError("labels and loss are both given; a gradient is of one of them: leave one out")
    if labels is None:
        return loss
    return lambda output: labelled_loss(model, output, labels)


def _run(
    model: nn.Module, batch: Batch, recorders: list[Recorder], loss: Loss | None
) -> tuple[dict[str, BlockGradients], list[str]]:
    """One forward and one backward under hooks: gradients by the block's name, and notes on what the model gives.

    Without a loss the backward starts at the last block that runs; a stack that this does not reach, as of two towers,
    gets one of its own.
    """
    every = [block for recorder in recorders for block in recorder.blocks]
    taker = GradientTaker(model, every)
    with torch.enable_grad(), taker:
        with ExitStack() as hooks:
            for recorder in recorders:
                hooks.enter_context(recorder)
            called = hooks.enter_context(_calls(model, recorders))
            output = answer(model, batch)
        ran = sorted((each for each in recorders if each.last is not None), key=lambda each: -each.started)
        cut = [each.blocks[0][0] for each in recorders if each.cut]
        notes = list(of_model(model, batch, output, cut))
        notes += [note for each in ran for note in not_read(output, each.last, each.blocks[-1][0])]
        if loss is not None:
            check_loss(loss(output)).backward()
        del output  # the head's part of the graph is not needed
        for number, recorder in enumerate(ran if loss is None else []):
            last = recorder.last
            if last is not None and last.requires_grad and not recorder.reached:
                recorder.sent = True
                torch.autograd.backward(last, unit_gradient(last), retain_graph=number + 1 < len(ran))
        if not cut and all(0 in each.gradients for each in ran):  # else the verdict says where the gradient ends
            first = min((each.started for each in ran), default=0.0)
            before = [name for name, began in called.items() if began < first]
            notes += [*not_learning([name for name in before if taker.missed(model.get_submodule(name))])]
        for recorder in recorders:
            recorder.forget()
    return dict(zip((name for name, _ in every), taker.taken, strict=True)), notes


@contextmanager
def _calls(model: nn.Module, recorders: Sequence[Recorder]) -> Generator[dict[str, float]]:
    """When modules outside the blocks were first called, filled while this is open."""
    found: dict[str, float] = {}
    with ExitStack() as hooks:
        for name, module in _outside(model, recorders):
            leaf = next(module.children(), None) is None and next(module.parameters(recurse=False), None) is not None
            if leaf:
                note = module.register_forward_pre_hook(
                    lambda *_, name=name: found.setdefault(name, time.perf_counter()) and None
                )
                hooks.callback(note.remove)
        yield found


def _outside(model: nn.Module, recorders: Sequence[Recorder]) -> list[Block]:
    """Modules that no block holds."""
    inside = {id(module) for recorder in recorders for _, block in recorder.blocks for module in block.modules()}
    return [(name, module) for name, module in model.named_modules() if id(module) not in inside]


def in_order(recorders: Sequence[Recorder]) -> list[Recorder]:
    """Those of which every block was measured, as they ran."""
    return sorted((each for each in recorders if each.complete), key=lambda each: each.started)


def _not_run(recorders: Sequence[Recorder]) -> str:
    for each in recorders:
        if each.refused is not None:
            return each.refused
    each = max(recorders, key=lambda each: len(each.described))
    missing = each.blocks[max(len(each.described) - 1, 0)][0]
    return f"block {missing} did not run in this forward; name the blocks that do: blocks=[…]"


def _probed(model: nn.Module, batch: Batch, recorders: Sequence[Recorder]) -> list[Seen]:
    """What each stack sees; of two kinds of ids, of those that enter it."""
    watched = [_watched(recorder) for recorder in recorders]
    found, refused = [Seen(reads=False)] * len(watched), False
    for second in (False, True):
        left = [index for index, seen in enumerate(found) if not seen.reads]
        if not left or (second and id_keys(batch)[1] is None):
            break
        try:
            asked = probe(model, batch, [watched[index] for index in left], second, known=second and not refused)
        except Exception as error:  # a model may refuse three rows, or its hooks what has no gradient
            refused, asked = True, [Seen(note=_not_asked("the future or other rows", error), reads=False)] * len(left)
        for index, seen in zip(left, asked, strict=True):
            found[index] = seen if seen.reads or seen.note else found[index]
    if padding(batch) is not None:
        try:
            blocks = padding_seen(model, batch, watched)
        except Exception as error:
            note = _not_asked("padding", error)
            return [replace(seen, note=" ".join(filter(None, (seen.note, note)))) for seen in found]
        for index, block in enumerate(blocks):
            if block is not None and recorders[index].attention:
                found[index] = replace(found[index], leaks={**found[index].leaks, "padding": block})
    return found


def _not_asked(what: str, error: Exception) -> str:
    why = (str(error).strip() or type(error).__name__).partition("\n")[0].rstrip(".")
    return f"Whether it sees {what} was not asked: {why}."


def _watched(recorder: Recorder) -> Watched:
    """It is made to look back where most of its blocks put no weight on what follows, or where they say so."""
    ahead = [each.ahead for each in recorder.attention.values()]
    masked = 2 * sum(weight == 0 for weight in ahead) > len(ahead)
    blocks = [block for _, block in recorder.blocks]
    causal, named = masked or any(map(says_causal, blocks)), "decoder" in recorder.blocks[0][0]
    return Watched(blocks, recorder.swapped, causal, bool(ahead), named)


def _evidence(model: nn.Module, recorder: Recorder, gradients: Mapping[str, BlockGradients], seen: Seen) -> Evidence:
    """What was measured in a stack itself. gradients: by the block's name."""
    modules = [block for _, block in recorder.blocks]
    weights, taken = weights_of(modules), [gradients[name] for name, _ in recorder.blocks]
    return Evidence(
        model,
        recorder.blocks,
        recorder.signals(taken, weights),
        weights,
        gradients=[each.matrices for each in taken],
        unused=[each.unused for each in taken],
        norms=idle_norms([module.named_modules() for module in modules]),
        seen=seen,
        padded=recorder.options.mask is not None,
    )


def _with_others(own: Evidence, others: Sequence[Evidence]) -> Evidence:
    """A stack with what may stand in for siblings: parameters of other stacks, and signals of their blocks of its own
    class."""
    classes = {type(block).__name__ for _, block in own.blocks}
    kin = [
        signal
        for each in others
        for (_, block), signal in zip(each.blocks, each.signals[1:], strict=True)
        if type(block).__name__ in classes
    ]
    return replace(own, cousins=[weights for each in others for weights in each.weights], kin=kin)


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


def judged(
    name: str,
    recorder: Recorder,
    evidence: Evidence,
    thresholds: Thresholds | None = None,
    notes: Iterable[str] = (),
) -> Inspection:
    """The inspection of one stack."""
    found = diagnose(evidence, thresholds)
    return Inspection(
        name,
        evidence.signals,
        found.verdict,
        found.advice,
        kernels=recorder.kernels,
        locations=recorder.locations,
        notes=tuple(notes),
        at_fault=found.at_fault,
    )


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


def assert_signal_preserved(
    model: nn.Module,
    batch: Batch,
    *,
    blocks: Sequence[str] | str | None = None,
    labels: Tensor | None = None,
    loss: Loss | None = None,
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
    raise AssertionError(f"{found.model}: {found.verdict.text} {found.advice}\n{text_table(*found.table())}")

"""From numbers to words: which block loses the signal, how, and what to change."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from skipless.analysis.advice import advise
from skipless.analysis.faults import first_fault
from skipless.analysis.inspection import BlockSignal
from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer
from skipless.theory.certificate import Band, Verdict

_CARRIED = 0.1  # cosine of a location with itself one block earlier; about 0 without a shortcut, in any width


@dataclass(frozen=True)
class Structure:
    """What a network looks like from outside: depth, shortcuts, norms (in the branch or after the sum), and its
    ModelConfig where it is ours."""

    depth: int
    shortcuts: bool
    norms: bool
    norms_after: bool = False
    config: ModelConfig | None = None

    @classmethod
    def of(
        cls, model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], signals: Sequence[BlockSignal]
    ) -> "Structure":
        """By our configuration, else by the modules' names and by what was measured."""
        config = _config(model)
        if config is not None:
            skips = (config.attention_skip, config.mlp_skip)
            shortcuts = any(skip.shortcut != 0 for skip in skips)
            return cls(len(blocks), shortcuts, config.norm != "none", config.norm == "post", config)
        carried = sorted(each.carry for each in signals if each.carry is not None and math.isfinite(each.carry))
        shortcuts = bool(carried) and carried[len(carried) // 2] > _CARRIED
        norms = any("norm" in type(module).__name__.lower() for _, block in blocks for module in block.modules())
        constant = all(math.isclose(each.norm_mean, signals[-1].norm_mean, rel_tol=0.2) for each in signals[1:])
        return cls(len(blocks), shortcuts, norms, norms and constant)


def diagnose(signals: Sequence[BlockSignal], structure: Structure, band: Band | None = None) -> tuple[Verdict, str]:
    """The verdict and what to change.

    A block that differs from its neighbours by orders of magnitude is a fault of that block, unless the forward signal
    was lost before it; otherwise the first block where it is lost, collapse before norms before gradients.
    """
    band = band or Band()
    lost = _first(signals, structure, band, (_broken, _collapsed, _norms_lost))
    fault = first_fault(signals)
    if fault is not None and (lost is None or lost.block is None or fault.block <= lost.block):
        return fault.verdict, fault.advice
    verdict = lost or _first(signals, structure, band, (_gradients_lost,)) or _kept(signals, structure, band)
    return verdict, advise(verdict, signals, structure) if verdict.kind != "preserved" else ""


def _first(signals: Sequence[BlockSignal], structure: Structure, band: Band, rules: Sequence) -> Verdict | None:
    return next((found for rule in rules if (found := rule(signals, structure, band)) is not None), None)


def _broken(signals: Sequence[BlockSignal], structure: Structure, band: Band) -> Verdict | None:
    for each in signals:
        if not math.isfinite(each.norm_max):
            return Verdict("explosion", each.block, f"Activations are not finite {_at(each)}.")
        if each.norm_mean == 0:
            return Verdict("vanishing", each.block, f"Activations are all zero {_at(each)}.")
        if math.isnan(each.cosine_mean):
            text = f"Activations are zero {_at(each)} but for at most one location of each row: none can be compared."
            return Verdict("vanishing", each.block, text)
    return None


def _collapsed(signals: Sequence[BlockSignal], structure: Structure, band: Band) -> Verdict | None:
    for each in signals:
        if each.cosine_mean > band.collapse_cosine:
            text = f"Rank collapse {_at(each)}: the mean cosine between locations is {each.cosine_mean:.4f}"
            text += f", the effective rank {each.effective_rank:.1f}" if math.isfinite(each.effective_rank) else ""
            return Verdict("collapse", each.block, f"{text}.{_query_key_words(signals, each.block)}")
    return None


def _norms_lost(signals: Sequence[BlockSignal], structure: Structure, band: Band) -> Verdict | None:
    """Relative to what enters; a stream that is normalised on its way into each branch is free to grow."""
    if structure.norms:
        return None
    start = signals[0].norm_mean
    for each in signals[1:]:
        if each.norm_max > band.lost_norm * start:
            text = f"Norms explode {_at(each)}: squared norm {each.norm_max / start:.3g} times the input's."
            return Verdict("explosion", each.block, text)
        if each.norm_mean < start / band.lost_norm:
            text = f"Norms vanish {_at(each)}: squared norm {each.norm_mean / start:.3g} times the input's."
            return Verdict("vanishing", each.block, text)
    return None


def _gradients_lost(signals: Sequence[BlockSignal], structure: Structure, band: Band) -> Verdict | None:
    """From the output backwards, the first block whose gradient is gone; the input's need only be finite."""
    for each in reversed(signals):
        gain = each.gradient_mean
        if not all(map(math.isfinite, [gain or 0.0, *each.parameter_gradients.values()])):
            return Verdict("explosion", max(each.block, 1), f"Gradients are not finite {_at(each)}.")
        if gain is None or each.block == 0:
            continue
        if gain == 0:
            return Verdict("vanishing", each.block, f"Gradients are all zero {_at(each)}.")
        if not gain < band.lost_gradient:
            text = f"Gradients explode {_at(each)}: squared gradient norm {gain:.3g} times the output's."
            return Verdict("explosion", each.block, text)
        if not gain > 1 / band.lost_gradient:
            text = f"Gradients vanish {_at(each)}: squared gradient norm {gain:.3g} times the output's."
            return Verdict("vanishing", each.block, text)
    return None


def _kept(signals: Sequence[BlockSignal], structure: Structure, band: Band) -> Verdict:
    last, start = signals[-1], signals[0].norm_mean
    low, high = start / band.drift, start * band.drift
    drifting = [each for each in signals[1:] if not low <= each.norm_min <= each.norm_max <= high]
    if drifting and not structure.norms:
        text = (
            f"The signal survives all {last.block} blocks, but from block {drifting[0].block} on squared norms leave "
            f"{1 / band.drift:g} … {band.drift:g} times the input's: they end in "
            f"{last.norm_min / start:.3g} … {last.norm_max / start:.3g}."
        )
        return Verdict("drift", drifting[0].block, text)
    rank = f", effective rank {last.effective_rank:.1f}" if math.isfinite(last.effective_rank) else ""
    text = f"The signal survives all {last.block} blocks: mean cosine {last.cosine_mean:.3f}{rank}."
    return Verdict("preserved", None, text)


def _query_key_words(signals: Sequence[BlockSignal], block: int) -> str:
    """Whether queries and keys still learn after a collapse."""
    after = [each.query_key_gradient for each in signals[max(block, 1) :] if each.query_key_gradient is not None]
    if not after or not all(ratio <= 1e-2 for ratio in after):
        return ""
    return (
        f" From there on the gradients of queries and keys are at most {max(after):.1g} of those of values and outputs."
    )


def _at(each: BlockSignal) -> str:
    return "at the input, before any block" if each.block == 0 else f"at block {each.block} ({each.name})"


def _config(model: Any) -> ModelConfig | None:
    inner = getattr(model, "model", None)
    for candidate in (model, inner):
        if isinstance(candidate, Transformer):
            return candidate.config
    return None

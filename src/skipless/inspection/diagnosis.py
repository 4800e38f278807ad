"""Diagnosis: where a measured signal is lost, which block is at fault, and what to change."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from skipless.inspection.evidence import Diagnosis, Evidence, at, nothing_left
from skipless.inspection.faults import first_fault
from skipless.inspection.inputs import own_network
from skipless.inspection.inspection import BlockSignal
from skipless.model.config import ModelConfig
from skipless.theory.certificate import Thresholds, Verdict, survives
from skipless.theory.feasibility import round_up, smallest_gamma_final
from skipless.theory.schemes import ExponentialSPA, UniformSPA

_CARRIED = 0.1  # cosine of a location with itself one block earlier; about 0 without a shortcut, in any width
_GONE = 0.25  # of the squared differences between locations, what is left where they have become alike
_ROUNDED = 1e-3  # differences over norms that half precision rounds away
_LARGE = 3.0  # by what matrices multiply what they read; 1 or 2 where they are drawn as usual
_UNLIKE = 4.0  # largest over least squared norm at the input; 2 for embeddings of a narrow network
_GAMMA = 0.005  # the paper's final decay rate without shortcuts


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
    def of(cls, evidence: Evidence) -> "Structure":
        """By our configuration, else by the modules' names and by what was measured."""
        own, blocks, signals = own_network(evidence.model), evidence.blocks, evidence.signals
        if own is not None:
            config = own.config
            skips = (config.attention_skip, config.mlp_skip)
            shortcuts = any(skip.shortcut != 0 for skip in skips)
            return cls(len(blocks), shortcuts, config.norm != "none", config.norm == "post", config)
        carried = sorted(each.carry for each in signals if each.carry is not None and math.isfinite(each.carry))
        shortcuts = bool(carried) and carried[len(carried) // 2] > _CARRIED
        norms = any(
            "norm" in type(module).__name__.lower() and not any(n.rpartition(".")[0] == name for n in unused)
            for (_, block), unused in zip(blocks, evidence.unused or [()] * len(blocks), strict=True)
            for name, module in block.named_modules()
        )
        constant = all(math.isclose(each.norm_mean, signals[-1].norm_mean, rel_tol=0.2) for each in signals[1:])
        return cls(len(blocks), shortcuts, norms, norms and constant)


def diagnose(evidence: Evidence, thresholds: Thresholds | None = None) -> Diagnosis:
    """The verdict and what to change.

    A block that is at fault by itself comes first, unless the forward signal was lost before it; otherwise the first
    block where it is lost, collapse before norms before gradients.
    """
    limits, signals, structure = thresholds or Thresholds(), evidence.signals, Structure.of(evidence)
    lost = _broken(signals) or _collapsed(signals, limits) or _norms_lost(signals, structure, limits)
    fault = first_fault(evidence)
    if fault is not None and (lost is None or (fault.verdict.block or 0) <= (lost.block or 0)):
        return fault
    verdict = lost or _gradients_lost(signals, limits) or _preserved(signals, structure, limits)
    if verdict.kind == "preserved":
        return Diagnosis(verdict, "")
    return Diagnosis(verdict, f"{advise(verdict, signals, structure)}{_drawn_large(evidence) if verdict.lost else ''}")


def _drawn_large(evidence: Evidence) -> str:
    """A sentence where most matrices multiply what they read by several times."""
    gains = [w.size * w.reads**0.5 for block in evidence.weights for w in block.values() if w.matrix]
    if not gains or not _LARGE < median(gains) < math.inf:
        return ""
    return (
        f" Matrices are large: a typical one multiplies what it reads by {median(gains):.2g} (its entries' deviation "
        "times √width). Draw them with a deviation of 1/√width, where that is 1."
    )


def _broken(signals: Sequence[BlockSignal]) -> Verdict | None:
    for each in signals:
        if not math.isfinite(each.norm_max):
            return Verdict("explosion", each.block, f"Activations are not finite {at(each)}.")
        if (dead := nothing_left(each)) is not None:
            return dead
    return None


def _collapsed(signals: Sequence[BlockSignal], limits: Thresholds) -> Verdict | None:
    """Where locations are alike because what told them apart is gone.

    Early in training a network with shortcuts adds the same vector to all locations, which brings cosines as near to 1
    and takes nothing away: the differences are still there, and it trains on.
    """
    apart = 0.0
    for each in signals:
        left = each.norm_mean * each.collapse**2
        gone = each.block == 0 or math.isnan(left) or left < _GONE * apart or each.collapse < _ROUNDED
        if each.cosine_mean > limits.collapse_cosine and gone:
            text = f"Rank collapse {at(each)}: the mean cosine between locations is {each.cosine_mean:.4f}"
            text += f", the effective rank {each.effective_rank:.1f}" if math.isfinite(each.effective_rank) else ""
            return Verdict("collapse", each.block, f"{text}.{_query_key_words(signals, each.block)}")
        apart = max(apart, left)
    return None


def _norms_lost(signals: Sequence[BlockSignal], structure: Structure, limits: Thresholds) -> Verdict | None:
    """Relative to what enters; a stream that is normalised on its way into each branch is free to grow."""
    if structure.norms:
        return None
    start = signals[0].norm_mean
    for each in signals[1:]:
        if each.norm_max > limits.lost_norm * start:
            text = f"Norms explode {at(each)}: squared norm {each.norm_max / start:.3g} times the input's."
            return Verdict("explosion", each.block, text)
        if each.norm_mean < start / limits.lost_norm:
            text = f"Norms vanish {at(each)}: squared norm {each.norm_mean / start:.3g} times the input's."
            return Verdict("vanishing", each.block, text)
    return None


def _gradients_lost(signals: Sequence[BlockSignal], limits: Thresholds) -> Verdict | None:
    """From the output backwards, the first block whose gradient is gone; the input's need only be finite."""
    for each in reversed(signals):
        gain = each.gradient_mean
        if not all(map(math.isfinite, [gain or 0.0, *each.parameter_gradients.values()])):
            return Verdict("explosion", max(each.block, 1), f"Gradients are not finite {at(each)}.")
        if gain is None or each.block == 0:
            continue
        if gain == 0:
            return Verdict("vanishing", each.block, f"Gradients are all zero {at(each)}.")
        if not 1 / limits.lost_gradient < gain < limits.lost_gradient:
            kind, word = ("vanishing", "vanish") if gain < 1 else ("explosion", "explode")
            text = f"Gradients {word} {at(each)}: squared gradient norm {gain:.3g} times the output's."
            return Verdict(kind, each.block, text)
    return None


def _preserved(signals: Sequence[BlockSignal], structure: Structure, limits: Thresholds) -> Verdict:
    last, start = signals[-1], signals[0].norm_mean
    low, high = start / limits.drift, start * limits.drift
    drifting = [each for each in signals[1:] if not low <= each.norm_min <= each.norm_max <= high]
    if drifting and not structure.norms:
        text = (
            f"{survives(last.block)}, but from block {drifting[0].block} on squared norms leave "
            f"{1 / limits.drift:g} … {limits.drift:g} times the input's: they end in "
            f"{last.norm_min / start:.3g} … {last.norm_max / start:.3g}."
        )
        return Verdict("drift", drifting[0].block, text)
    rank = f", effective rank {last.effective_rank:.1f}" if math.isfinite(last.effective_rank) else ""
    text = f"{survives(last.block)}: mean cosine {last.cosine_mean:.3f}{rank}."
    return Verdict("preserved", None, text)


def _query_key_words(signals: Sequence[BlockSignal], block: int) -> str:
    """Whether queries and keys still learn after a collapse."""
    after = [each.query_key_gradient for each in signals[max(block, 1) :] if each.query_key_gradient is not None]
    if not after or not all(ratio <= 1e-2 for ratio in after):
        return ""
    return (
        f" From there on the gradients of queries and keys are at most {max(after):.1g} of those of values and outputs."
    )


def advise(verdict: Verdict, signals: Sequence[BlockSignal], structure: Structure) -> str:
    """Plain words, most effective change first."""
    if verdict.block == 0 and not math.isfinite(signals[0].norm_max):
        return "What enters the first block is not finite: look at the embedding's weights, and at the batch."
    if verdict.block == 0:
        return (
            "The batch itself carries no signal: its locations are alike or zero. Inspect with real data, and look at "
            "the embedding."
        )
    if verdict.kind == "drift":
        return _against_drift(signals, structure)
    if verdict.kind == "collapse":
        return _against_collapse(signals, structure)
    if from_behind(verdict, signals):
        return "This gradient comes from what follows the last block: look at the head and at the loss."
    return _against_scale(verdict, structure)


def from_behind(verdict: Verdict, signals: Sequence[BlockSignal]) -> bool:
    """Whether the gradient is lost before it reaches the last block, so that the head or the loss is at fault."""
    last = signals[-1].gradient_mean
    backward = verdict.text.startswith("Gradients") and verdict.block == signals[-1].block
    return backward and last is not None and not 0 < last < math.inf


def _against_drift(signals: Sequence[BlockSignal], structure: Structure) -> str:
    """The repeat rate is that of the mean kernel, which theory starts from; the mean of cosines is another number."""
    config, start = structure.config, signals[0]
    scheme = config.scheme if config is not None else None
    preserving = scheme is not None and scheme.preserves_signal
    words = "Nothing is lost, and a wider network drifts less."
    if start.norm_max > _UNLIKE * start.norm_min:
        words = f"Nothing is lost. Squared norms differ as they enter, {start.norm_min:.2g} … {start.norm_max:.2g}"
        if config is not None:
            known = "bright and plain images" if config.images is not None else "trained embeddings of tokens"
            words += f", as those of {known} do"
        words += "; SPA keeps the mean over inputs, not each." if preserving else "."
    if config is None or not preserving:
        return words
    rate, assumed = (start.predicted or {}).get("cosine", start.cosine_mean), getattr(scheme, "repeat_rate", 0.0)
    if abs(max(rate, 0.0) - assumed) > 0.02:
        words += f" The scheme assumes repeat_rate={assumed:g}; locations start with a cosine of {max(rate, 0.0):.2g}."
    if getattr(scheme, "calibration", None) == "paper" and config.mlp_init != "mirrored":
        words += " calibration='exact' keeps the diagonal at 1 where the MLPs move it."
    return words


def _against_collapse(signals: Sequence[BlockSignal], structure: Structure) -> str:
    scheme = structure.config.scheme if structure.config is not None else None
    if scheme is not None and scheme.preserves_signal:
        ways = {ExponentialSPA: "raise it", UniformSPA: "lower it"}
        way = ways.get(type(scheme), "end with locations farther apart")
        ends = f"The scheme ends too close to collapse ({scheme.describe()})"
        return f"{ends}: {way}, or shape the MLPs' activation (dks-gelu)."
    rate = max(signals[0].cosine_mean, 0.0)
    spa = f"ExponentialSPA(gamma_final={_GAMMA:g}, repeat_rate={rate:.2g})"
    if not structure.shortcuts:
        return (
            f"Without shortcuts softmax attention averages locations away. Use E-SPA with γ_L = {_GAMMA:g}, {spa}, and "
            "a shaped activation (dks-gelu); or put a shortcut around every sub-block, with the norm inside the branch "
            "(Pre-LN)."
        )
    weighted = _weighted_skip(structure.depth)
    if structure.norms_after:
        words = "The norm after each sum shrinks the shortcut block by block. Move it into the branch (Pre-LN)"
        return f"{words}; or {weighted}."
    return f"The branches outweigh the shortcuts: {weighted}; or put a norm inside the branch (Pre-LN)."


def _against_scale(verdict: Verdict, structure: Structure) -> str:
    weighted = _weighted_skip(structure.depth)
    if not structure.shortcuts:
        return (
            "Every block multiplies the signal, so gains other than 1 compound. Initialise each matrix orthogonally "
            f"with gain 1, shape the activation (dks-gelu), and use E-SPA with γ_L = {_GAMMA:g}, calibration='exact'; "
            "or normalise inside the branch."
        )
    if structure.norms_after:
        words = "The norm after each sum rescales gradients at every block. Move it into the branch (Pre-LN)"
        return f"{words}; or {weighted}."
    return f"The sums compound: {weighted}; or put a norm inside the branch (Pre-LN)."


def _weighted_skip(depth: int) -> str:
    """β = 1/√L keeps a normalised skip's share of the input at e^{−1/2} after L blocks."""
    beta = 1.0 / math.sqrt(max(depth, 2))
    alpha = math.sqrt(1.0 - beta**2)
    gamma = round_up(smallest_gamma_final(alpha, max(depth, 2)), 2)
    return (
        f"weight the residual branch by β = {beta:.2g} and the shortcut by α = √(1−β²) = {alpha:.3g}, which with E-SPA "
        f"needs γ_L ≥ {gamma:g}"
    )

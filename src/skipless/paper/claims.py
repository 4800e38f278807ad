"""Claims stated before the runs: what counts as agreement with the paper."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from skipless.figures import kernels
from skipless.figures.kernels import InputSignal, Study, study, verdict_words
from skipless.paper.runs import Outcome, Sample, steps_ratio
from skipless.theory import kernels as theory_kernels


@dataclass(frozen=True)
class Check:
    """One statement about a figure, what was computed, and whether it holds."""

    where: str
    claim: str
    ours: str
    holds: bool


# Sec. 1, App. B and G: which rows of Fig. 7 keep the signal over 100 blocks.
_SURVIVES = {
    "Standard": False,
    "U-SPA": True,
    "E-SPA": True,
    "Skipless + LN": False,
    "Pre-LN": True,
    "Pre-LN, α = 0.98": True,
    "Post-LN": False,
}
_IN_FIG_1 = ("Standard", "U-SPA", "E-SPA")
# Diagonal at the last location without the correction, from the closed form of App. B in 66-digit arithmetic.
_DRIFT = 4.78


def kernel_checks() -> list[Check]:
    """All statements, computed anew: seconds."""
    rows = [study(network, kernels.SIGNAL) for network in kernels.networks()]
    return [*(_survival(row) for row in rows), _uniform(rows[1]), _slower(rows), *_inputs(), *_corrections()]


def _survival(row: Study) -> Check:
    label, verdict = row.network.label, row.certificate.verdict
    kept = _SURVIVES[label]
    words = f"{verdict_words(verdict)}, mean cosine {row.certificate.reports[-1].mean_cosine:.4f}"
    where = "Fig. 1 and 7" if label in _IN_FIG_1 else "Fig. 7"
    claim = f"{label}: the signal {'survives' if kept else 'is lost within'} {kernels.DEPTH} blocks"
    return Check(where, claim, words, verdict.lost is not kept)


def _uniform(row: Study) -> Check:
    found = row.certificate.reports[-1].mean_cosine
    claim = f"U-SPA: cosines end at ρ_L = {kernels.RHO_FINAL}"
    return Check("Fig. 1 and 7", claim, f"{found:.4f}", abs(found - kernels.RHO_FINAL) < 0.02)


def _slower(rows: list[Study]) -> Check:
    by_label = {row.network.label: row.certificate.reports[-1].mean_cosine for row in rows}
    usual, weighted = by_label["Pre-LN"], by_label["Pre-LN, α = 0.98"]
    claim = "Pre-LN's cosines rise faster with depth than those with α = 0.98"
    half = kernels.DEPTH // 2
    early = {row.network.label: row.certificate.reports[half].mean_cosine for row in rows}
    holds = early["Pre-LN"] > early["Pre-LN, α = 0.98"]
    words = (
        f"block {half}: {early['Pre-LN']:.3f} and {early['Pre-LN, α = 0.98']:.3f}; end: {usual:.3f} and {weighted:.3f}"
    )
    return Check("Fig. 7", claim, words, holds)


def _inputs() -> list[Check]:
    checks = []
    for signal in kernels.token_signals():
        found = theory_kernels.mean_cosine(signal.kernel())
        claim = f"inputs with r = {signal.repeat_rate:g}: that share of pairs is equal"
        checks.append(Check("Fig. 5", claim, f"{found:.4f}", abs(found - signal.repeat_rate) < 0.01))
    return checks


def _corrections() -> list[Check]:
    plain, corrected = (study(network, kernels.CORRECTION_SIGNAL) for network in kernels.correction_networks())
    drift, kept = (float(each.diagonals()[-1].mean()) for each in (plain, corrected))
    average = float(study(plain.network, _average()).diagonals()[-1][-1])
    return [
        Check("Fig. 6", "uncorrected, the mean diagonal grows with depth", f"{drift:.2f}", drift > 1.5),
        Check("Fig. 6", "corrected, it stays near 1", f"{kept:.2f}", abs(kept - 1.0) < 0.25),
        Check(
            "ours, by App. B",
            f"uncorrected, over the mean input, the last location reaches {_DRIFT}",
            f"{average:.2f}",
            abs(average - _DRIFT) < 0.01,
        ),
    ]


def _average() -> InputSignal:
    return replace(kernels.CORRECTION_SIGNAL, kind="average")


Mark = Literal["pass", "fail", "not run"]


@dataclass(frozen=True)
class Verdict:
    """A band's judgement and the numbers it rests on."""

    mark: Mark
    detail: str = ""


@dataclass(frozen=True)
class Results:
    """All that bands may look at: outcomes by arm, and the text's unigram entropy."""

    outcomes: Mapping[str, Outcome]
    unigram: float

    def sample(self, arm: str, quantity: str = "train_loss") -> Sample | None:
        """The quantity of "arm" or "arm@multiple"."""
        name, _, multiple = arm.partition("@")
        outcome = self.outcomes.get(name)
        return None if outcome is None else outcome.sample(quantity, float(multiple or 1.0))


class Band(Protocol):
    """A claim that can be judged."""

    def claim(self) -> str:
        """In words."""
        ...

    def judge(self, findings: Results) -> Verdict:
        """Pass, fail or not run."""
        ...


@dataclass(frozen=True)
class Lower:
    """One arm ends lower than another, by more than a margin and half of what seeds differ by."""

    better: str
    worse: str
    margin: float = 0.0
    quantity: str = "train_loss"

    def claim(self) -> str:
        """In words."""
        by = f" by more than {self.margin:g}" if self.margin else ""
        return f"{self.better} ends below {self.worse}{by}{_of(self.quantity)}"

    def judge(self, findings: Results) -> Verdict:
        """Compare means."""
        pair = _pair(findings, self.better, self.worse, self.quantity)
        if pair is None:
            return Verdict("not run")
        better, worse = pair
        if math.isinf(better.mean):
            return Verdict("fail", f"{self.better} diverged")
        gap, noise = worse.mean - better.mean, better.half_range + worse.half_range
        return _verdict(gap - noise > self.margin, f"{_show(better)} against {_show(worse)}")


@dataclass(frozen=True)
class Match:
    """One arm is at most `within` above another: it matches it, or is better."""

    arm: str
    other: str
    within: float
    quantity: str = "train_loss"

    def claim(self) -> str:
        """In words."""
        return f"{self.arm} is at most {self.within:g} above {self.other}{_of(self.quantity)}"

    def judge(self, findings: Results) -> Verdict:
        """Compare means; what seeds differ by counts against it."""
        pair = _pair(findings, self.arm, self.other, self.quantity)
        if pair is None:
            return Verdict("not run")
        arm, other = pair
        if math.isinf(arm.mean):
            return Verdict("fail", f"{self.arm} diverged")
        noise = arm.half_range + other.half_range
        return _verdict(arm.mean - other.mean + noise <= self.within, f"{_show(arm)} against {_show(other)}")


@dataclass(frozen=True)
class Learns:
    """An arm ends well below the unigram entropy: it has learned from context."""

    arm: str
    by: float = 0.5

    def claim(self) -> str:
        """In words."""
        return f"{self.arm} ends more than {self.by:g} below the unigram entropy"

    def judge(self, findings: Results) -> Verdict:
        """Against the text's own entropy."""
        sample = findings.sample(self.arm)
        if sample is None:
            return Verdict("not run")
        good = sample.mean + sample.half_range < findings.unigram - self.by
        return _verdict(good, f"{_show(sample)} against {findings.unigram:.2f}")


@dataclass(frozen=True)
class Plateau:
    """An arm stays at the unigram entropy, or diverges: it has learned nothing from context."""

    arm: str
    within: float = 0.15

    def claim(self) -> str:
        """In words."""
        return f"{self.arm} stays within {self.within:g} of the unigram entropy, or diverges at every rate"

    def judge(self, findings: Results) -> Verdict:
        """Against the text's own entropy."""
        sample = findings.sample(self.arm)
        if sample is None:
            return Verdict("not run")
        good = math.isinf(sample.mean) or sample.mean - sample.half_range > findings.unigram - self.within
        return _verdict(good, f"{_show(sample)} against {findings.unigram:.2f}")


@dataclass(frozen=True)
class SmallerGap:
    """The gap between two arms is smaller than that between two others; (lower, higher) each."""

    small: tuple[str, str]
    large: tuple[str, str]
    quantity: str = "train_loss"

    def claim(self) -> str:
        """In words."""
        first, second = (f"from {low} to {high}" for low, high in (self.small, self.large))
        return f"the gap {first} is smaller than {second}{_of(self.quantity)}"

    def judge(self, findings: Results) -> Verdict:
        """Compare differences of means."""
        found = [_pair(findings, *arms, self.quantity) for arms in (self.small, self.large)]
        if found[0] is None or found[1] is None:
            return Verdict("not run")
        small, large = (pair[1].mean - pair[0].mean for pair in found if pair is not None)
        good = math.isfinite(small) and small < large
        return _verdict(good, f"{small:.3g} against {large:.3g}")


@dataclass(frozen=True)
class NoWiderGap:
    """The gap between two arms exceeds that between two others by no more than seeds differ; (lower, higher) each."""

    gap: tuple[str, str]
    than: tuple[str, str]
    quantity: str = "train_loss"

    def claim(self) -> str:
        """In words."""
        first, second = (f"from {low} to {high}" for low, high in (self.gap, self.than))
        return f"the gap {first} exceeds that {second} by no more than seeds differ{_of(self.quantity)}"

    def judge(self, findings: Results) -> Verdict:
        """Compare differences of means; half of each arm's range over seeds is allowed."""
        gap, than = (_pair(findings, *arms, self.quantity) for arms in (self.gap, self.than))
        if gap is None or than is None:
            return Verdict("not run")
        first, second = (pair[1].mean - pair[0].mean for pair in (gap, than))
        noise = sum(sample.half_range for sample in (*gap, *than))
        return _verdict(first - second <= noise, f"{first:.3f} against {second:.3f}, seeds ± {noise:.3f}")


@dataclass(frozen=True)
class NoSpike:
    """The smoothed training loss of an arm never rises by more than `most` above the lowest before it, in any run."""

    arm: str
    most: float = 0.1

    def claim(self) -> str:
        """In words."""
        return f"the training loss of {self.arm} never rises by more than {self.most:g}"

    def judge(self, findings: Results) -> Verdict:
        """By the curves of all seeds at the usual length."""
        outcome = findings.outcomes.get(self.arm)
        runs = {} if outcome is None else outcome.runs.get(1.0, {})
        if outcome is not None and (outcome.failed or any(run.diverged for run in runs.values())):
            return Verdict("fail", f"{self.arm} diverged")
        curves = [run.curve for run in runs.values() if run.curve]
        if not curves:
            return Verdict("not run")
        rise = max(largest_rise([loss for _, loss in curve]) for curve in curves)
        return _verdict(rise <= self.most, f"{rise:.3f} at most")


def largest_rise(losses: Sequence[float]) -> float:
    """How far a loss gets above the lowest one before it: max over s < t of l_t − l_s, 0 where it only falls."""
    lowest = itertools.accumulate(losses, min)
    return max(loss - low for loss, low in zip(losses, lowest, strict=True))


@dataclass(frozen=True)
class Reaches:
    """An arm reaches, in at most so many times the steps, the loss of another at the usual length."""

    arm: str
    target: str
    most: float

    def claim(self) -> str:
        """In words."""
        return f"{self.arm} reaches the loss of {self.target} in at most {self.most:g} times its steps"

    def judge(self, findings: Results) -> Verdict:
        """By runs of several lengths."""
        target, outcome = findings.sample(self.target), findings.outcomes.get(self.arm)
        if target is None or outcome is None:
            return Verdict("not run")
        losses = {multiple: runs[0].train_loss for multiple, runs in outcome.runs.items() if 0 in runs}
        ratio = steps_ratio(target.mean, losses)
        if ratio is None:
            return Verdict("fail", f"{self.arm} diverged") if outcome.failed else Verdict("not run")
        if ratio.bound == ">" and ratio.value < self.most:
            return Verdict("not run", f"not in {ratio.value:g} times, and no longer run")
        return _verdict(ratio.bound != ">" and ratio.value <= self.most, f"{ratio.text()} times")


@dataclass(frozen=True)
class Above:
    """A measure of an arm is above a bound."""

    arm: str
    quantity: str
    bound: float

    def claim(self) -> str:
        """In words."""
        return f"{self.quantity.replace('_', ' ')} of {self.arm} is above {self.bound:g}"

    def judge(self, findings: Results) -> Verdict:
        """The mean less half of what seeds differ by."""
        sample = findings.sample(self.arm, self.quantity)
        if sample is None:
            return Verdict("not run")
        return _verdict(sample.mean - sample.half_range > self.bound, _show(sample))


def _pair(findings: Results, first: str, second: str, quantity: str) -> tuple[Sample, Sample] | None:
    samples = findings.sample(first, quantity), findings.sample(second, quantity)
    return None if samples[0] is None or samples[1] is None else (samples[0], samples[1])


def _verdict(good: bool, detail: str) -> Verdict:
    return Verdict("pass" if good else "fail", detail)


def _of(quantity: str) -> str:
    return "" if quantity == "train_loss" else f" in {quantity.replace('_', ' ')}"


def _show(sample: Sample) -> str:
    if math.isinf(sample.mean):
        return "diverged"
    return f"{sample.mean:.3f}" + (f" ± {sample.half_range:.3f}" if len(sample.values) > 1 else " (one seed)")

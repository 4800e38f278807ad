"""Claims, stated before the runs: what counts as agreement with the paper.

A quantity is the mean over seeds. Where seeds differ, half of their range counts against the claim, except in claims
about gaps, which are of means, and about numbers of steps, which are of the first seed. An arm is named as in its
table, "e-spa"; "e-spa@5" is the same one trained five times as long.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from skipless.paper.experiments import Scale
from skipless.paper.runs import Outcome, Sample, steps_ratio

Mark = Literal["pass", "fail", "not run"]


@dataclass(frozen=True)
class Verdict:
    """How a claim is judged, and the numbers that say so."""

    mark: Mark
    detail: str = ""


NOT_RUN = Verdict("not run")


@dataclass(frozen=True)
class Results:
    """All that a claim may look at: outcomes by arm, and the text's unigram entropy."""

    outcomes: Mapping[str, Outcome]
    unigram: float

    def sample(self, arm: str, quantity: str = "train_loss") -> Sample | None:
        """The quantity of "arm" or "arm@multiple"."""
        name, _, multiple = arm.partition("@")
        outcome = self.outcomes.get(name)
        return None if outcome is None else outcome.sample(quantity, float(multiple or 1.0))

    def pair(self, arms: tuple[str, str], quantity: str) -> tuple[Sample, Sample] | None:
        """The quantity of two arms; None until both have been run."""
        first, second = (self.sample(arm, quantity) for arm in arms)
        return None if first is None or second is None else (first, second)


class Claim(Protocol):
    """A claim that can be judged."""

    def text(self) -> str:
        """In words."""
        ...

    def judge(self, results: Results) -> Verdict:
        """Pass, fail or not run."""
        ...


@dataclass(frozen=True)
class Lower:
    """One arm ends lower than another, by more than a margin and half of what seeds differ by."""

    better: str
    worse: str
    margin: float = 0.0
    quantity: str = "train_loss"

    def text(self) -> str:
        by = f" by more than {self.margin:g}" if self.margin else ""
        return f"{self.better} ends below {self.worse}{by}{_of(self.quantity)}"

    def judge(self, results: Results) -> Verdict:
        if (pair := results.pair((self.better, self.worse), self.quantity)) is None:
            return NOT_RUN
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

    def text(self) -> str:
        return f"{self.arm} is at most {self.within:g} above {self.other}{_of(self.quantity)}"

    def judge(self, results: Results) -> Verdict:
        if (pair := results.pair((self.arm, self.other), self.quantity)) is None:
            return NOT_RUN
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

    def text(self) -> str:
        return f"{self.arm} ends more than {self.by:g} below the unigram entropy"

    def judge(self, results: Results) -> Verdict:
        if (sample := results.sample(self.arm)) is None:
            return NOT_RUN
        good = sample.mean + sample.half_range < results.unigram - self.by
        return _verdict(good, f"{_show(sample)} against {results.unigram:.2f}")


@dataclass(frozen=True)
class Plateau:
    """An arm stays at the unigram entropy, or diverges: it has learned nothing from context."""

    arm: str
    within: float = 0.15

    def text(self) -> str:
        return f"{self.arm} stays within {self.within:g} of the unigram entropy, or diverges at every rate"

    def judge(self, results: Results) -> Verdict:
        if (sample := results.sample(self.arm)) is None:
            return NOT_RUN
        good = math.isinf(sample.mean) or sample.mean - sample.half_range > results.unigram - self.within
        return _verdict(good, f"{_show(sample)} against {results.unigram:.2f}")


@dataclass(frozen=True)
class SmallerGap:
    """The gap between two arms is smaller than that between two others; (lower, higher) each."""

    small: tuple[str, str]
    large: tuple[str, str]
    quantity: str = "train_loss"

    def text(self) -> str:
        first, second = (f"from {low} to {high}" for low, high in (self.small, self.large))
        return f"the gap {first} is smaller than {second}{_of(self.quantity)}"

    def judge(self, results: Results) -> Verdict:
        first, second = results.pair(self.small, self.quantity), results.pair(self.large, self.quantity)
        if first is None or second is None:
            return NOT_RUN
        small, large = (high.mean - low.mean for low, high in (first, second))
        return _verdict(math.isfinite(small) and small < large, f"{small:.3g} against {large:.3g}")


@dataclass(frozen=True)
class NoWiderGap:
    """The gap between two arms exceeds that between two others by no more than seeds differ; (lower, higher) each.

    Half of each arm's range over seeds is allowed.
    """

    gap: tuple[str, str]
    than: tuple[str, str]
    quantity: str = "train_loss"

    def text(self) -> str:
        first, second = (f"from {low} to {high}" for low, high in (self.gap, self.than))
        return f"the gap {first} exceeds that {second} by no more than seeds differ{_of(self.quantity)}"

    def judge(self, results: Results) -> Verdict:
        gap, than = results.pair(self.gap, self.quantity), results.pair(self.than, self.quantity)
        if gap is None or than is None:
            return NOT_RUN
        first, second = (high.mean - low.mean for low, high in (gap, than))
        noise = sum(sample.half_range for sample in (*gap, *than))
        return _verdict(first - second <= noise, f"{first:.3f} against {second:.3f}, seeds ± {noise:.3f}")


@dataclass(frozen=True)
class NoSpike:
    """The smoothed training loss of an arm never rises by more than `most` above the lowest before it, in any run.

    Judged by the curves of all seeds at the usual length.
    """

    arm: str
    most: float = 0.1

    def text(self) -> str:
        return f"the training loss of {self.arm} never rises by more than {self.most:g}"

    def judge(self, results: Results) -> Verdict:
        outcome = results.outcomes.get(self.arm)
        runs = {} if outcome is None else outcome.runs.get(1.0, {})
        if outcome is not None and (outcome.failed or any(run.diverged for run in runs.values())):
            return Verdict("fail", f"{self.arm} diverged")
        curves = [run.curve for run in runs.values() if run.curve]
        if not curves:
            return NOT_RUN
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

    def text(self) -> str:
        return f"{self.arm} reaches the loss of {self.target} in at most {self.most:g} times its steps"

    def judge(self, results: Results) -> Verdict:
        target, outcome = results.sample(self.target), results.outcomes.get(self.arm)
        if target is None or outcome is None:
            return NOT_RUN
        ratio = steps_ratio(target.mean, outcome.losses)
        if ratio is None:
            return Verdict("fail", f"{self.arm} diverged") if outcome.failed else NOT_RUN
        if ratio.bound == ">" and ratio.value < self.most:
            return Verdict("not run", f"not in {ratio.value:g} times, and no longer run")
        return _verdict(ratio.bound != ">" and ratio.value <= self.most, f"{ratio.text()} times")


@dataclass(frozen=True)
class _Bound:
    """A measure of an arm lies on one side of a bound, with all that seeds differ by."""

    arm: str
    quantity: str
    bound: float
    side: ClassVar[str]

    def text(self) -> str:
        return f"{self.quantity.replace('_', ' ')} of {self.arm} is {self.side} {self.bound:g}"

    def judge(self, results: Results) -> Verdict:
        if (sample := results.sample(self.arm, self.quantity)) is None:
            return NOT_RUN
        above, below = sample.mean - sample.half_range > self.bound, sample.mean + sample.half_range < self.bound
        return _verdict(above if self.side == "above" else below, _show(sample))


class Above(_Bound):
    """A measure of an arm is above a bound."""

    side = "above"


class Below(_Bound):
    """A measure of an arm is below a bound."""

    side = "below"


@dataclass(frozen=True)
class _Restated:
    """Another claim, of which something more is to be said."""

    claim: Claim

    @property
    def quantity(self) -> str:
        return quantity_of(self.claim)

    def text(self) -> str:
        return self.claim.text()

    def judge(self, results: Results) -> Verdict:
        return self.claim.judge(results)


class Later(_Restated):
    """A claim that was added after some of its runs, beside one that passes too easily, or fails to say enough."""

    def text(self) -> str:
        return f"(added after the first runs) {self.claim.text()}"


@dataclass(frozen=True)
class At(_Restated):
    """A claim about one scale alone, such as an accuracy that takes 50 epochs. At others it is not made."""

    scale: str


def quantity_of(claim: Claim) -> str:
    """What a claim is about."""
    return getattr(claim, "quantity", "train_loss")


def made_at(claims: Sequence[Claim], scale: Scale) -> tuple[Claim, ...]:
    """The claims that are made at this scale: none where runs are too short to be judged."""
    return tuple(each for each in claims if scale.judged and (not isinstance(each, At) or each.scale == scale.name))


def _verdict(good: bool, detail: str) -> Verdict:
    return Verdict("pass" if good else "fail", detail)


def _of(quantity: str) -> str:
    return "" if quantity == "train_loss" else f" in {quantity.replace('_', ' ')}"


def _show(sample: Sample) -> str:
    if math.isinf(sample.mean):
        return "diverged"
    digits = ".2g" if abs(sample.mean) < 1e-3 else ".3f"
    return f"{sample.mean:{digits}}" + (f" ± {sample.half_range:{digits}}" if len(sample.values) > 1 else " (one seed)")

"""DKS and TAT: from a target for the whole network to the constants of a shaped activation.

Both methods ask an activation φ̂(x) = γ(φ(αx + β) + δ) to keep unit variance and to keep it stably, Q(1) = 1 and
Q'(1) = 1, and then spend the last two degrees of freedom on the C map of the network f of `depth` nonlinearities:

    DKS (Martens et al. 2021):  C(0) = 0,   and C'_f(1) = ξ: orthogonal inputs stay so, all others part slowly;
    TAT (Zhang et al. 2022):    C'(1) = 1,  and C''_f(1) = τ (smooth φ) or C_f(0) = η (leaky ReLU).

A block with normalised skips, α_s² + β_s² = 1, maps c ↦ α_s²c + β_s²C(c); α_s is `skip_weight` here, 0 without skips.

Departs: the two papers bound the target over every subnetwork, the residual branch alone included; here the network
itself meets it. The two agree without skips.
"""

import functools
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, replace

import numpy as np
import scipy

from skipless.theory import local_maps
from skipless.theory.activations import ShapedActivation, base_name
from skipless.theory.feasibility import check_depth, check_skip_weight, round_down
from skipless.theory.propagation import Skip

_WEAK_SCALE = 1e-2  # an α at which φ(αx + β) is as good as its third-order Taylor polynomial
_WEAK_STRENGTH = 1e-3
_SHIFTS = np.linspace(-4.0, 4.0, 161)  # where β₀ is looked for
_STEP, _FINEST_STEP = math.log(2), 1e-4  # growth of log s between two solutions: the first tried, and the last
_ACCURACY = 1e-11
_LARGEST_SCALE = 8.0  # α beyond which φ(αx + β) is a kink or a step in all but name
ShiftRule = Callable[[ShapedActivation], float]
Measure = Callable[[ShapedActivation], float]


class TooFewLayers(ValueError):
    """A slope of the network's C map that so few layers cannot have; `largest_xi` is the largest that they can."""

    def __init__(self, message: str, largest_xi: float) -> None:
        super().__init__(message)
        self.largest_xi = largest_xi


@functools.cache  # the same few are asked for again and again
def dks(base: str | Callable, depth: int, xi: float = 5.0, skip_weight: float = 0.0) -> ShapedActivation:
    """Deep Kernel Shaping: Q(1) = 1, Q'(1) = 1, C(0) = 0, and C'(1) = ψ with C'_f(1) = `xi` (Martens et al. 2021).

    `depth` counts the nonlinearities between input and output: one per transformer block. Several solutions exist; the
    one returned lies on the branch that starts at the linear network (α → 0 as ψ → 1), with the input shift nearest 0,
    and the positive one of a mirrored pair (tanh). On that branch β → β₀ where φ''(β₀)² + 2φ'(β₀)φ'''(β₀) = 0.
    `base` is a name, or a function that `register_activation` has given one.
    """
    base = _shapeable(base)
    excess = local_slope(depth, xi, skip_weight) - 1
    branch = Branch(base, centred, lambda f: float(local_maps.c_slope(f)) - 1)
    solve = _dks_leaky_relu if base == "leaky_relu" else branch.solve
    try:
        return solve(excess)
    except BranchEnd as end:
        limit = (1 + (1 - skip_weight**2) * end.strength) ** depth
        raise TooFewLayers(
            f"DKS with base={base!r} cannot reach xi={xi:g} in {depth} layers with skip_weight={skip_weight:g}: its "
            f"local slope stays below {1 + end.strength:.4f}. Take xi below {limit:.4g}, as "
            f"{_call('dks', base, depth, skip_weight, xi=round_down(limit, 3))}, or more layers",
            round_down(limit, 3),
        ) from end


@functools.cache
def tat(
    base: str | Callable,
    depth: int,
    *,
    eta: float | None = None,
    tau: float | None = None,
    skip_weight: float = 0.0,
) -> ShapedActivation:
    """Tailored Activation Transformation: Q(1) = 1, Q'(1) = 1, C'(1) = 1, and one network target (Zhang et al. 2022).

    `tau` asks for C''_f(1) = τ, the paper's target for smooth activations; `eta` for C_f(0) = η, its target for leaky
    ReLU, met here for smooth activations too through the local curvature. Give one; without either a smooth base takes
    tau=0.3 and leaky ReLU eta=0.9. Leaky ReLU has no C''(1) and goes to `tat_leaky_relu`.

    As with DKS the solution continues the linear network's, with the smallest |β|. There E[φ̂] has the sign of E[φ̂'']
    and φ''(β₀)² + √2·φ'(β₀)φ'''(β₀) = 0. The opposite sign solves the equations too, where φ' is small and αγ large;
    the `dks` package rejects such roots by αγ ≥ 2, for their unstable Q map.
    """
    base = _shapeable(base)
    if eta is not None and tau is not None:
        raise ValueError(f"give one target, not both eta={eta} and tau={tau}")
    if base == "leaky_relu":
        if tau is not None:
            raise ValueError(f"tau={tau}: leaky ReLU has infinite C''(1), use eta (the paper: eta=0.9)")
        return tat_leaky_relu(depth, 0.9 if eta is None else eta, skip_weight)
    branch = Branch(base, unit_slope, lambda f: float(local_maps.c_curvature(f)))
    if eta is not None:
        return _tat_eta(branch, depth, eta, skip_weight)
    tau = 0.3 if tau is None else tau
    try:
        return branch.solve(local_curvature(depth, tau, skip_weight))
    except BranchEnd as end:
        limit = end.strength * depth * (1 - skip_weight**2)
        raise ValueError(
            f"TAT with base={base!r} cannot reach tau={tau:g} in {depth} layers: take tau below {limit:.4g}, as "
            f"{_call('tat', base, depth, skip_weight, tau=round_down(limit, 3))}, or more layers"
        ) from end


def tat_leaky_relu(depth: int, eta: float = 0.9, skip_weight: float = 0.0) -> ShapedActivation:
    """TAT for leaky ReLU: the negative slope a with C_f(0) = `eta`, and γ = √(2/(1+a²)) (Zhang et al. 2022).

    Q(q) = q for any a and C'(1) = 1, so a alone remains; C_f is the closed-form C map composed `depth` times. C_f(0)
    falls from its largest value at ReLU (a = 0) to 0 at the identity (a = 1).
    """
    check_depth(depth)
    check_skip_weight(skip_weight)

    def leaky(a: float) -> ShapedActivation:
        return ShapedActivation("leaky_relu", output_scale=math.sqrt(2 / (1 + a**2)), negative_slope=a)

    def surplus(a: float) -> float:
        return float(local_maps.network_c_map(leaky(a), 0.0, depth, skip_weight)) - eta

    largest = float(local_maps.network_c_map(leaky(0.0), 0.0, depth, skip_weight))
    if not 0 < eta <= largest:
        raise _eta_out_of_reach("leaky_relu", eta, depth, largest, skip_weight)
    return leaky(scipy.optimize.brentq(surplus, 0.0, 1.0, xtol=1e-15))


def default_activation(depth: int, skip: Skip) -> tuple[ShapedActivation, float]:
    """DKS-GELU and its ξ: 5, or the largest that so few blocks allow."""
    weight = _skip_weight(skip)
    try:
        return dks("gelu", depth, 5.0, weight), 5.0
    except TooFewLayers as few:
        return dks("gelu", depth, few.largest_xi, weight), few.largest_xi


_GATED = {"swiglu": "silu", "geglu": "gelu", "reglu": "leaky_relu", "glu": "silu"}


def named_activation(name: str, depth: int, skip: Skip) -> ShapedActivation:
    """ "dks-gelu", "tat-leaky_relu" and so on: shaped for `depth` nonlinearities; a bare name is left as it is."""
    method, _, base = name.rpartition("-")
    if base in _GATED:
        plain, shaped = _GATED[base], "tat" if method == "tat" else "dks"
        raise ValueError(
            f"activation is {name!r}, a gated MLP, and those are not built here: without norms an error in a squared "
            "norm would about double in every block, and mirrored pairs of them do not start linear "
            f"(docs/derivations.md); use '{shaped}-{plain}', or {plain!r} with mlp_init='mirrored', at 3/2 of the "
            "gated hidden width"
        )
    if method == "":
        return ShapedActivation(base)
    if method not in ("dks", "tat"):
        raise ValueError(f"activation is {name!r}; the transformation before the dash must be 'dks' or 'tat'")
    solve = dks if method == "dks" else tat
    try:
        return solve(base, depth, skip_weight=_skip_weight(skip))
    except ValueError as error:
        raise ValueError(f"activation={name!r} over {depth} blocks: {error}") from error


def name_of(shaped: ShapedActivation, depth: int, skip: Skip) -> str | None:
    """The name that is solved to these constants for so many blocks, or None."""
    for name in (f"dks-{shaped.base}", f"tat-{shaped.base}"):
        with suppress(ValueError):
            solved = default_activation(depth, skip)[0] if name == "dks-gelu" else named_activation(name, depth, skip)
            pairs = zip(astuple(solved), astuple(shaped), strict=True)
            if all(a == b or math.isclose(a, b, rel_tol=1e-6) for a, b in pairs):
                return name
    return None


def _skip_weight(skip: Skip) -> float:
    """The weight that DKS and TAT count with: of a normalised skip; other skips are not counted."""
    return skip.shortcut if 0.0 < skip.shortcut < 1.0 else 0.0


def local_slope(depth: int, xi: float, skip_weight: float = 0.0) -> float:
    """ψ = C'(1) of one activation such that the network has C'_f(1) = (α_s² + (1−α_s²)ψ)^L = ξ."""
    check_depth(depth)
    check_skip_weight(skip_weight)
    if not 1 < xi < math.inf:
        raise ValueError(f"DKS needs xi > 1, got {xi}: at 1 the network is linear. The paper uses 5")
    return 1 + math.expm1(math.log(xi) / depth) / (1 - skip_weight**2)


def local_curvature(depth: int, tau: float, skip_weight: float = 0.0) -> float:
    """κ = C''(1) of one activation such that, with C'(1) = 1, the network has C''_f(1) = L(1−α_s²)κ = τ."""
    check_depth(depth)
    check_skip_weight(skip_weight)
    if not 0 < tau < math.inf:
        raise ValueError(f"TAT needs tau > 0, got {tau}: at 0 the network is linear. The usual value is 0.3")
    return tau / (depth * (1 - skip_weight**2))


def _dks_leaky_relu(excess: float) -> ShapedActivation:
    """a from C'(1) = ψ. With no input shift and δ = −E[φ], Q'(1) = 1 holds by homogeneity, and

    C'(1) = E[φ'²]/Var φ = (1+a²)/((1+a²) − (1−a)²/π) = ψ   ⇔   (1−a)² = k(1+a²),  k = π(ψ−1)/ψ,

    whose root in [0, 1] is a = (1−k)/(1 + √(k(2−k))). ReLU, a = 0, has the largest slope: ψ = π/(π−1).
    """
    k = math.pi * excess / (1 + excess)
    if k > 1:
        raise BranchEnd(1 / (math.pi - 1))
    a = (1 - k) / (1 + math.sqrt(k * (2 - k)))
    mean, second = (1 - a) / math.sqrt(2 * math.pi), (1 + a**2) / 2
    return ShapedActivation(
        "leaky_relu", output_shift=-mean, output_scale=1 / math.sqrt(second - mean**2), negative_slope=a
    )


class BranchEnd(Exception):
    """The branch turns back, or passes α = 8, before the nonlinearity asked for; `strength` is the largest on it."""

    def __init__(self, strength: float) -> None:
        super().__init__(f"no solution beyond nonlinearity {strength:g}")
        self.strength = strength


class Branch:
    """Shaped activations of one smooth `base`, indexed by their nonlinearity s = `measure`(φ̂) > 0.

    DKS and TAT give four equations for (α, β, δ, γ). γ follows from Q(1) = 1 and δ from the condition on C(0) or C'(1),
    in closed form; what remains is (α, β) from Q'(1) = 1 and a measure of nonlinearity, C'(1) − 1 or C''(1). That pair
    has many roots. The right one is picked by continuation: as the nonlinearity s → 0, α ~ √s and β → β₀, a root of
    Q'(1) = 1 at vanishing α; from there the root is followed up to the s that was asked for.

    `shift_rule` gives δ from φ(αx + β). Solved points are remembered, so that a search along the branch is cheap.
    """

    def __init__(self, base: str, shift_rule: ShiftRule, measure: Measure) -> None:
        self.base, self.shift_rule, self.measure = base, shift_rule, measure
        self._solved: dict[float, np.ndarray] = {}

    def solve(self, strength: float) -> ShapedActivation:
        """φ̂ with Q(1) = 1, Q'(1) = 1, `shift_rule` and `measure`(φ̂) = `strength`, all to 1e-11; `BranchEnd` if none."""
        if not self._solved:
            weakest = min(strength, _WEAK_STRENGTH)
            if not self._accept(weakest, self._linear_limit(weakest)):
                raise self._no_start()
        known = [s for s in self._solved if s <= strength]
        s = max(known) if known else min(self._solved)
        step = _STEP
        while s != strength:
            move = np.clip(math.log(strength / s), -step, step)
            trial = strength if abs(move) < step else s * math.exp(move)
            if self._accept(trial, self._solved[s] + [0.5 * move, 0.0]):
                s = trial
            elif (step := step / 2) < _FINEST_STEP:
                raise BranchEnd(s)
        return self._shape(self._solved[s])

    def _shape(self, point: np.ndarray) -> ShapedActivation:
        raw = ShapedActivation(self.base, input_scale=math.exp(point[0]), input_shift=point[1])
        shifted = replace(raw, output_shift=self.shift_rule(raw))
        return replace(shifted, output_scale=local_maps.variance_gain(shifted))

    def _no_start(self) -> ValueError:
        return ValueError(
            f"{self.base!r} cannot be shaped: no input shift in [{_SHIFTS[0]:g}, {_SHIFTS[-1]:g}] makes a nearly "
            f"linear network of it with Q'(1) = 1; use it as it is, activation={self.base!r}, or "
            "another one such as 'gelu'"
        )

    def _accept(self, strength: float, guess: np.ndarray) -> bool:
        """Solve for (log α, β) from `guess`, and remember the root if it is one and belongs to the same branch."""

        def residual(point: np.ndarray) -> np.ndarray:
            point = np.minimum(point, [math.log(2 * _LARGEST_SCALE), np.inf])  # where a wild step may not follow
            shaped = self._shape(point)
            return np.array([local_maps.q_slope(shaped) - 1, self.measure(shaped) - strength]) / strength

        found = scipy.optimize.root(residual, guess, method="hybr", options={"xtol": 1e-13})
        same_branch = np.abs(found.x - guess).max() < 0.5 and found.x[0] < math.log(_LARGEST_SCALE)
        if same_branch and np.abs(found.fun).max() * strength < _ACCURACY:
            self._solved[strength] = found.x
            return True
        return False

    def _linear_limit(self, strength: float) -> np.ndarray:
        """(log α, β₀) for a small `strength`: β₀ is the root nearest 0 of Q'(1) = 1 at small α, and s ∝ α²."""

        def weak(beta: float) -> ShapedActivation:
            return self._shape(np.array([math.log(_WEAK_SCALE), beta]))

        def excess(beta: float) -> float:
            return (float(local_maps.q_slope(weak(beta))) - 1) / _WEAK_SCALE**2

        values = np.array([excess(beta) for beta in _SHIFTS])
        changes = np.flatnonzero(np.sign(values[:-1]) != np.sign(values[1:]))
        shifts = [scipy.optimize.brentq(excess, _SHIFTS[i], _SHIFTS[i + 1]) for i in changes]
        if not shifts:
            raise self._no_start()
        beta = min(shifts, key=lambda b: (round(abs(b), 6), -b))
        return np.array([math.log(_WEAK_SCALE) + 0.5 * math.log(strength / self.measure(weak(beta))), beta])


def _tat_eta(branch: Branch, depth: int, eta: float, skip_weight: float) -> ShapedActivation:
    """The point of the branch with C_f(0) = η, found by its local curvature κ: C_f(0) → 0 with κ and grows with it."""

    def surplus(log_kappa: float) -> float:
        shaped = branch.solve(math.exp(log_kappa))
        return float(local_maps.network_c_map(shaped, 0.0, depth, skip_weight)) - eta

    low = high = math.log(local_curvature(depth, 0.3, skip_weight))
    if not 0 < eta < 1:
        raise _eta_out_of_reach(branch.base, eta, depth, 1.0, skip_weight)
    try:
        while surplus(high) < 0:
            low, high = high, high + 0.5
    except BranchEnd as end:
        high = math.log(end.strength)
        if (missing := surplus(high)) < 0:
            raise _eta_out_of_reach(branch.base, eta, depth, eta + missing, skip_weight) from end
    while surplus(low) > 0:
        low -= 0.5
    return branch.solve(math.exp(scipy.optimize.brentq(surplus, low, high, xtol=1e-13)))


def _eta_out_of_reach(base: str, eta: float, depth: int, largest: float, skip_weight: float) -> ValueError:
    """largest: of C_f(0); 1 where eta is no cosine below it."""
    works = f", as {_call('tat', base, depth, skip_weight, eta=round_down(largest, 3))}," if largest < 1 else ""
    return ValueError(
        f"TAT with base={base!r} cannot reach eta={eta:g} in {depth} layers: C_f(0) lies in (0, {largest:.4g}]. Take "
        f"eta in that range{works} or more layers for a larger one"
    )


def _call(method: str, base: str, depth: int, skip_weight: float, **target: float) -> str:
    """The call that works, for an error to name."""
    numbers = target | ({"skip_weight": skip_weight} if skip_weight else {})
    return f"skipless.{method}({base!r}, {depth}, {', '.join(f'{name}={value:g}' for name, value in numbers.items())})"


def centred(raw: ShapedActivation) -> float:
    """δ with E[φ̂] = 0, which is C(0) = 0: the rule of DKS."""
    return -_mean(raw, raw)


def unit_slope(raw: ShapedActivation) -> float:
    """δ with E[φ̂'²] = E[φ̂²], which is C'(1) = 1: the rule of TAT.

    (E[φ] + δ)² = E[φ'²] − Var φ, never negative (Poincaré). Of the two signs, that of E[φ''].
    """
    mean = _mean(raw, raw)
    excess = _mean(raw, lambda x: raw.derivative(x) ** 2 - (raw(x) - mean) ** 2)
    bend = _mean(raw, lambda x: raw.derivative(x, order=2))
    return -mean + math.copysign(math.sqrt(max(excess, 0.0)), bend)


def _mean(raw: ShapedActivation, f: Callable[[np.ndarray], np.ndarray]) -> float:
    """E[f(z)] for an f made of `raw`."""
    return float(local_maps.expectation(f, order=local_maps.order_for(raw.input_scale)))


def _shapeable(base: str | Callable) -> str:
    name = base_name(base)
    if name in ("relu", "identity"):
        raise ValueError(f"{name!r} has no constant left to shape: use 'leaky_relu' or a smooth activation")
    return name

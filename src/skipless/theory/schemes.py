"""The ways to initialise attention: each turns (depth, skip weight) into one AttentionShape per block.

A scheme is a frozen value with only the fields that mean something for it. Width and heads play no part, except in
ALiBi, whose slopes are per head, and in E-SPA with a decay for each head. `register_scheme` makes a scheme known by
name: the paper's four, and your own.

Calibrations beyond the paper's, at the end, propagate a kernel once to see what the MLPs leave of it.
"""

import dataclasses
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import scipy

from skipless import lazy
from skipless.files import UnknownNameError
from skipless.schema import build, check_own, check_plain
from skipless.theory import exponential, kernels, uniform
from skipless.theory.exponential import exponential_steps
from skipless.theory.feasibility import (
    Grid,
    check_blocks,
    check_correlation,
    check_correlations,
    check_decay_rates,
    check_depth,
    check_end,
    check_final_rates,
    check_grid,
    check_kernel,
    check_repeat_rate,
    grid_sides,
)
from skipless.theory.shapes import (
    AlibiShape,
    AttentionShape,
    DenseShape,
    ExponentialShape,
    IdentityShape,
    PlainShape,
    RescaledShape,
    ShapeByHead,
    SymmetricExponentialShape,
    SymmetricUniformShape,
    UniformShape,
    non_negative,
)
from skipless.theory.uniform import UniformSchedule, uniform_steps

KernelMap = Callable[[np.ndarray], np.ndarray]
Calibration = Literal["paper", "exact", "mlp-aware"]
SCHEMES: dict[str, type["Scheme"]] = {}
Kind = TypeVar("Kind", bound="type[Scheme]")


@dataclass(frozen=True)
class Scheme(ABC):
    """How attention starts in every block: the protocol of the paper's schemes and of your own.

    Derive a frozen dataclass from it, give it `shapes`, and name it:

        @register_scheme("mine")
        @dataclass(frozen=True)
        class Mine(Scheme):
            decay: float = 0.1
            preserves_signal = True

            def shapes(self, depth, skip_weight=0.0, causal=True, *, length=None, **context): ...

    Fields are plain data: numbers, text, tuples of them. In JSON the scheme is {"kind": "mine", "decay": 0.1}. A field
    repeat_rate, where there is one, is set to that of the tokens by `skipless train`.

    What a scheme says of itself, by a class attribute or a property:
    preserves_signal: its matrices keep locations apart while QKᵀ = 0. So queries start at zero, and a skip around
    attention must be normalised, α² + β² = 1.
    bounded: its shapes serve no more locations than the `length` they were made for, and if not causal exactly those.
    heads, blocks, locations: how many of them the network must have; None where any number will do.
    by_head: every head is a stream of its own with a kernel of its own, and the shapes are ShapeByHead. The network
    must then start without mixing heads: value_output="identity", and MLPs that are mirrored or absent.
    """

    kind: ClassVar[str] = ""
    preserves_signal: ClassVar[bool] = False

    def __post_init__(self):
        check_own(self)

    @abstractmethod
    def shapes(
        self,
        depth: int,
        skip_weight: float = 0.0,
        causal: bool = True,
        *,
        length: int | None = None,
        mlp: KernelMap | None = None,
        normalised: bool = False,
    ) -> list[AttentionShape]:
        """One shape per block, each as causal as asked; ValueError for what the scheme has no answer to.

        Any shape will do. One with O(T) vectors runs on the fast kernels; a DenseShape, or a TableShape of your own,
        runs as a T×T table. skip_weight: α of a normalised skip around attention, 0 without one. length: the training
        length. mlp: the MLP sub-block's map of a kernel, or None. normalised: whether a norm stands before attention.
        All are always given; **context takes those that a scheme does not use.
        """

    @property
    def bounded(self) -> bool:
        return False

    @property
    def heads(self) -> int | None:
        return None

    @property
    def blocks(self) -> int | None:
        return None

    @property
    def locations(self) -> int | None:
        return None

    @property
    def by_head(self) -> bool:
        return False

    def describe(self) -> str:
        """What stands beside the scheme's name in tables and figures."""
        fields = {name: value for name, value in self.to_dict().items() if name != "kind"}
        return ", ".join(f"{name} = {value}" for name, value in fields.items()) or self.kind

    def to_dict(self) -> dict[str, Any]:
        """Its kind and its fields, as JSON has them; what is None is left out, so that old runs keep their names."""
        given = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return {"kind": self.kind, **{n: list(v) if isinstance(v, tuple) else v for n, v in given.items()}}

    @staticmethod
    def from_dict(data: Any) -> "Scheme":
        """The inverse of to_dict. It imports no code but what is installed as an extension, whatever the data says."""
        fields = dict(data) if isinstance(data, dict) else {}
        cls = scheme_class(fields.pop("kind", None))
        return build(cls, fields, cls.__name__, "scheme.")


def scheme_class(kind: Any) -> type[Scheme]:
    """The class of a name; ValueError for one that is not known, or that belongs to code not yet imported."""
    if isinstance(kind, str) and kind not in SCHEMES:
        lazy.import_extensions()
    if not isinstance(kind, str) or kind not in SCHEMES:
        raise UnknownNameError(
            f"scheme kind is {kind!r}; it must be one of {', '.join(SCHEMES)}, or one of your own whose code was "
            "imported first: `--import FILE.py` on the command line, `import` in Python"
        )
    return SCHEMES[kind]


def register_scheme(kind: str) -> Callable[[Kind], Kind]:
    """Make a scheme known by its name in JSON and on the command line: a decorator above @dataclass(frozen=True).

    Configurations, certificates, networks, training, checkpoints and exports then take it as they take the paper's.
    Import its class before you load any of them: files name a scheme, and hold no code.
    """
    if not isinstance(kind, str) or not re.fullmatch(r"[a-z][a-z0-9-]*", kind):
        raise ValueError(
            f"a scheme's name is {kind!r}; use small letters, digits and dashes: @register_scheme('two-scales')"
        )

    def register(cls: Kind) -> Kind:
        if not (isinstance(cls, type) and issubclass(cls, Scheme)):
            raise ValueError(f"@register_scheme({kind!r}) stands above {cls!r}; it must be a class derived from Scheme")
        if "__dataclass_params__" not in vars(cls) or not vars(cls)["__dataclass_params__"].frozen:
            raise ValueError(
                f"@register_scheme({kind!r}) needs a frozen dataclass, so that {cls.__name__} is a value that JSON "
                "holds: write @dataclass(frozen=True) in the line below"
            )
        known = SCHEMES.get(kind)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"the name {kind!r} belongs to {known.__module__}.{known.__qualname__}: give {cls.__name__} another one"
            )
        _check_class(cls)
        check_plain(cls)
        cls.kind = kind
        SCHEMES[kind] = cls
        return cls

    return register


def _check_class(cls: type[Scheme]) -> None:
    """Refuse a `shapes` that is missing or takes other arguments than a network gives, and a field named `kind`."""
    if "kind" in {field.name for field in dataclasses.fields(cls)}:
        raise ValueError(f"{cls.__name__} has a field 'kind', which in JSON is the scheme's name: call it otherwise")
    call = "shapes(self, depth, skip_weight=0.0, causal=True, *, length=None, **context)"
    if inspect.isabstract(cls):
        raise ValueError(f"{cls.__name__} has no `shapes`, which gives one AttentionShape for each block: def {call}")
    try:
        inspect.signature(cls.shapes).bind(None, 1, 0.0, True, length=1, mlp=None, normalised=False)
    except TypeError as error:
        raise ValueError(f"{cls.__name__}.shapes: {error}; a network gives what this takes: def {call}") from error


@register_scheme("standard")
@dataclass(frozen=True)
class StandardAttention(Scheme):
    """Softmax attention as everyone uses it: a running average at zero logits; with alibi_heads, ALiBi's biases."""

    alibi_heads: int = 0

    def __post_init__(self):
        super().__post_init__()
        if self.alibi_heads < 0:
            raise ValueError(f"alibi_heads is {self.alibi_heads}; it must be at least 0, which means no ALiBi")

    @property
    def heads(self) -> int | None:
        return self.alibi_heads or None

    def describe(self) -> str:
        return "ALiBi" if self.alibi_heads else "plain softmax"

    def shapes(self, depth: int, skip_weight: float = 0.0, causal: bool = True, **context: Any) -> list[AttentionShape]:
        """The same shape in every block, whatever the skips."""
        shape = AlibiShape(self.alibi_heads, causal) if self.alibi_heads else PlainShape(causal)
        return [shape] * check_depth(depth)


@register_scheme("value-skipinit")
@dataclass(frozen=True)
class ValueSkipInit(Scheme):
    """Attn = (αI + βA)V with trainable α = 1, β = 0 at initialisation: identity attention. Sec. 3.1.

    per_head gives every head its own α and β.
    """

    per_head: bool = False

    def describe(self) -> str:
        return "identity attention"

    def shapes(self, depth: int, skip_weight: float = 0.0, causal: bool = True, **context: Any) -> list[AttentionShape]:
        """The identity in every block, whatever the skips."""
        return [IdentityShape(causal)] * check_depth(depth)


@register_scheme("u-spa")
@dataclass(frozen=True)
class UniformSPA(Scheme):
    """U-SPA: kernels with off-diagonals ρ_0 = r rising to ρ_L. Sec. 3.2, App. B, C.

    rhos gives ρ_1 … ρ_L one by one, in place of rho_final and schedule.

    calibration: "paper" ignores the MLPs; "exact" rescales each location so that the average kernel keeps a unit
    diagonal (needs length); "mlp-aware" starts each block from what the MLP left, where that stays non-negative.
    """

    rho_final: float = 0.8
    repeat_rate: float = 0.0
    schedule: UniformSchedule = "linear"
    calibration: Calibration = "paper"
    rhos: tuple[float, ...] | None = None
    preserves_signal = True

    def __post_init__(self):
        super().__post_init__()
        if self.rhos is not None:
            check_correlations(self.rhos, self.repeat_rate)
            check_end("rho_final", self.rho_final, UniformSPA.rho_final, "rhos", self.rhos[-1])
            if self.schedule != "linear":
                raise ValueError(
                    f"schedule={self.schedule!r} beside rhos, which are the schedule: leave one of them out"
                )
            object.__setattr__(self, "rho_final", self.rhos[-1])
        check_correlation("rho_final", self.rho_final)
        check_repeat_rate(self.repeat_rate)

    @property
    def bounded(self) -> bool:
        return self.calibration == "exact"

    @property
    def blocks(self) -> int | None:
        return None if self.rhos is None else len(self.rhos)

    def describe(self) -> str:
        return f"ρ_L = {self.rho_final:g}{'' if self.rhos is None else ', by block'}"

    def shapes(
        self,
        depth: int,
        skip_weight: float = 0.0,
        causal: bool = True,
        *,
        length: int | None = None,
        mlp: KernelMap | None = None,
        normalised: bool = False,
    ) -> list[AttentionShape]:
        """One shape per block. mlp maps a kernel through the MLP sub-block; length is where "exact" calibrates.

        normalised says that a norm stands before attention, which calibrations beyond the paper's take into account.
        """
        check_calibration(self.calibration, skip_weight)
        kind = UniformShape if causal else SymmetricUniformShape
        if self.rhos is None:
            steps = uniform_steps(self.rho_final, depth, self.repeat_rate, self.schedule, skip_weight)
        else:
            check_blocks("rhos", self.rhos, depth)
            steps = uniform.steps_through(self.rhos, self.repeat_rate, skip_weight)
        if self.calibration == "mlp-aware":
            steps = uniform_aware(steps, need_mlp(mlp))
        shapes: list[AttentionShape] = [kind(before, after) for before, after in steps]
        if self.calibration == "exact":
            limit = need_length(length, "exact")
            return exact(shapes, self.repeat_rate, skip_weight, limit, mlp, normalised)
        return shapes


@register_scheme("e-spa")
@dataclass(frozen=True)
class ExponentialSPA(Scheme):
    """E-SPA, the paper's main method: kernels exp(−γ_l|i−j|) with γ falling from ∞ to γ_L. Sec. 3.2, App. B, C, F.

    gammas gives γ_1 … γ_L one by one, in place of gamma_final and App. C's schedule.

    gamma_final may be a tuple, one γ_L for each head: several scales in one block. Each head then follows an E-SPA of
    its own, and the kernel is the mean of theirs (docs/derivations.md). Heads of one γ_L side by side are one call.

    grid is for encoders of images: locations are the places of a grid in reading order, and the kernel
    exp(−γ_l(|Δrow| + |Δcolumn|)). It is (rows, columns), or "square" for any number that makes one; None is a line.

    calibration as in UniformSPA; "mlp-aware" is a T×T table for E-SPA and needs length.
    """

    gamma_final: float | tuple[float, ...] = 0.005
    repeat_rate: float = 0.0
    calibration: Calibration = "paper"
    gammas: tuple[float, ...] | None = None
    grid: Grid | None = None
    preserves_signal = True

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "grid", check_grid(self.grid))
        object.__setattr__(self, "gamma_final", check_final_rates(self.gamma_final))
        if self.gammas is not None:
            check_decay_rates(self.gammas)
            check_end("gamma_final", self.gamma_final, ExponentialSPA.gamma_final, "gammas", self.gammas[-1])
            object.__setattr__(self, "gamma_final", self.gammas[-1])
        check_repeat_rate(self.repeat_rate)

    @property
    def bounded(self) -> bool:
        return self.calibration != "paper" or self.locations is not None

    @property
    def heads(self) -> int | None:
        return len(self.gamma_final) if isinstance(self.gamma_final, tuple) else None

    @property
    def by_head(self) -> bool:
        return self.heads is not None

    @property
    def blocks(self) -> int | None:
        return None if self.gammas is None else len(self.gammas)

    @property
    def locations(self) -> int | None:
        return self.grid[0] * self.grid[1] if isinstance(self.grid, tuple) else None

    def describe(self) -> str:
        lie = "" if self.grid is None else ", by row and column"
        if isinstance(self.gamma_final, tuple):
            return f"γ_L = {', '.join(f'{gamma:g}' for gamma in self.gamma_final)} by head{lie}"
        return f"γ_L = {self.gamma_final:g}{'' if self.gammas is None else ', by block'}{lie}"

    def shapes(
        self,
        depth: int,
        skip_weight: float = 0.0,
        causal: bool = True,
        *,
        length: int | None = None,
        mlp: KernelMap | None = None,
        normalised: bool = False,
    ) -> list[AttentionShape]:
        """One shape per block; with a normalised skip α, App. F's decay rates γ_{l,α}."""
        if isinstance(self.gamma_final, tuple):
            context: dict[str, Any] = {"length": length, "mlp": mlp, "normalised": normalised}
            chains = {
                gamma: dataclasses.replace(self, gamma_final=gamma).shapes(depth, skip_weight, causal, **context)
                for gamma in set(self.gamma_final)
            }
            return [ShapeByHead(heads) for heads in zip(*(chains[gamma] for gamma in self.gamma_final), strict=True)]
        check_calibration(self.calibration, skip_weight)
        self._check_grid(skip_weight, causal, length)
        if self.gammas is None:
            steps = exponential_steps(self.gamma_final, depth, skip_weight)
        else:
            check_blocks("gammas", self.gammas, depth)
            steps = exponential.steps_through(self.gammas, skip_weight)
        if self.calibration == "mlp-aware":
            limit, through = need_length(length, "mlp-aware"), need_mlp(mlp)
            sides = grid_sides(self.grid, limit)
            targets = (kernels.exponential_grid(step.gamma_out, *sides) for step in steps)
            between = (lambda kernel: kernels.cosine(through(kernel))) if normalised else through
            return carrying(targets, self.repeat_rate, causal, between, instead="calibration='paper'")
        shapes: list[AttentionShape] = [
            ExponentialShape(step, self.repeat_rate)
            if causal
            else SymmetricExponentialShape(step, self.repeat_rate, grid=self.grid)
            for step in steps
        ]
        if self.calibration == "exact":
            limit = need_length(length, "exact")
            return exact(shapes, self.repeat_rate, skip_weight, limit, mlp, normalised)
        return shapes

    def _check_grid(self, skip_weight: float, causal: bool, length: int | None) -> None:
        """Refuse what a grid has no answer to."""
        if self.grid is None:
            return
        if causal:
            raise ValueError(
                f"grid={self.grid!r} with causal=True: a grid has no order in which all places see those before them; "
                "use causal=False, or grid=None"
            )
        if skip_weight:
            raise ValueError(
                f"grid={self.grid!r} with skip_weight={skip_weight}: App. F's decay rates are those of a line; use "
                "skip_weight=0, or grid=None"
            )
        if length is not None:
            grid_sides(self.grid, length)


def check_calibration(name: str, skip_weight: float) -> None:
    """The calibration exists for these skips."""
    if name == "mlp-aware" and skip_weight:
        raise ValueError(
            f"calibration='mlp-aware' has no form with skips (skip_weight={skip_weight}): use calibration='exact', "
            "or skip_weight=0"
        )


def need_length(length: int | None, name: str) -> int:
    """The length at which a T×T kernel is propagated once, which only the caller knows."""
    if length is None:
        raise ValueError(f"calibration={name!r} propagates a T×T kernel once: say for which length")
    return length


def need_mlp(mlp: KernelMap | None) -> KernelMap:
    """The MLP sub-block's map of a kernel, which only the caller knows."""
    if mlp is None:
        raise ValueError("calibration='mlp-aware' needs mlp=, the MLP sub-block's map of a kernel")
    return mlp


def exact(
    shapes: Sequence[AttentionShape],
    repeat_rate: float,
    skip_weight: float,
    length: int,
    mlp: KernelMap | None = None,
    normalised: bool = False,
) -> list[AttentionShape]:
    """The same softmaxes P with D = diag(P Σ̄ Pᵀ)^{−½}, Σ̄ the average kernel propagated so far.

    Every branch then has a unit diagonal, so normalised skips keep one too. normalised: a norm stands before attention,
    which then sees the stream's cosines.
    Departs: App. F leaves the diagonal free; it reaches 11 at L=36, γ_L=.2, α=.98, T=512.
    """
    kernel = kernels.uniform(repeat_rate, length)
    calibrated: list[AttentionShape] = []
    for shape in shapes:
        weights = np.exp(shape.bias(length))
        branch = weights @ (kernels.cosine(kernel) if normalised else kernel) @ weights.T
        scale = 1.0 / np.sqrt(np.diagonal(branch))
        calibrated.append(RescaledShape(shape, scale))
        kernel = skip_weight**2 * kernel + (1.0 - skip_weight**2) * (scale[:, None] * branch * scale[None, :])
        kernel = mlp(kernel) if mlp else kernel
    return calibrated


def carrying(
    targets: Iterable[np.ndarray],
    repeat_rate: float = 0.0,
    causal: bool = True,
    between: KernelMap | None = None,
    *,
    instead: str | None = None,
) -> list[AttentionShape]:
    """The shapes that carry I to the first T×T target, that to the second, and so on: A_l = L_l L̂_(l−1)⁻¹.

    A target holds cosines: symmetric, 1 on its diagonal, positive definite. L̂ factors what `between`, as an MLP does,
    makes of the last target on its way to the next block; None leaves it as it is. Sec. 3.1, 3.4.
    The factors are Cholesky's, or symmetric roots where attention is not causal. Repeated tokens are corrected as in
    App. B, by rows: D keeps the diagonal of the average kernel at 1.
    Departs: the paper ignores the MLP because A_l ≥ 0 is not guaranteed; here a negative entry is an error, which says
    to use `instead`.
    """
    shapes: list[AttentionShape] = []
    before = average = np.zeros(())
    for block, target in enumerate(targets, start=1):
        target = check_kernel(target, f"the kernel of block {block}", len(before) if shapes else None)
        if block == 1:
            before, average = np.eye(len(target)), kernels.uniform(repeat_rate, len(target))
        stay = f"a smaller or a larger step, or end with the kernel of block {block - 1}"
        remedy = instead or (stay if shapes else "a kernel whose factor L has no entry below 0")
        name = f"the step between kernels in block {block}"
        matrix = non_negative(_factor_ratio(target, before, causal), name, remedy)
        branch = matrix @ average @ matrix.T
        scale = 1.0 / np.sqrt(np.diagonal(branch))
        shapes.append(DenseShape(scale[:, None] * matrix, causal))
        before, average = target, scale[:, None] * branch * scale[None, :]
        if between is not None:
            before, average = between(before), between(average)
    return shapes


def _factor_ratio(target: np.ndarray, source: np.ndarray, causal: bool) -> np.ndarray:
    """L(target) L(source)⁻¹ with Cholesky factors, or symmetric roots for non-causal attention."""
    if causal:
        upper = scipy.linalg.cholesky(source), scipy.linalg.cholesky(target)
        return scipy.linalg.solve_triangular(upper[0], upper[1]).T
    return np.linalg.solve(kernels.symmetric_root(source), kernels.symmetric_root(target)).T


def uniform_aware(steps: Sequence[tuple[float, float]], mlp: KernelMap) -> list[tuple[float, float]]:
    """U-SPA's (ρ_in, ρ_out) per block, ρ_in being what the MLP before the block left."""

    def through_mlp(rho: float) -> float:
        """A uniform kernel stays uniform, so two locations say all of it."""
        return float(kernels.cosine(mlp(kernels.uniform(rho, 2)))[0, 1])

    aware = [*steps[:1], *((through_mlp(before), after) for before, after in steps[1:])]
    for block, (before, after) in enumerate(aware, start=1):
        if before > after:
            raise ValueError(
                f"calibration='mlp-aware' in block {block}: the MLP before it leaves cosines of {before:.4g}, above "
                f"its target {after:.4g}, and attention cannot lower them; use calibration='paper' or 'exact'"
            )
    return aware

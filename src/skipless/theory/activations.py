"""Activations with an affine map inside and outside: φ̂(x) = γ(φ(αx + β) + δ).

DKS (Martens et al. 2021) and TAT (Zhang et al. 2022) leave the architecture alone and choose
(α, β, δ, γ) so that the network's kernel maps behave. This file holds the function; `shaping` chooses the constants.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import scipy

from skipless import lazy
from skipless.console import nearest
from skipless.files import UnknownNameError
from skipless.schema import check_own

Array = np.ndarray
_RECTIFIED = ("relu", "leaky_relu")


class Smooth(NamedTuple):
    """φ, φ' and φ'' of a base function that is analytic on the real line.

    odd_factor is c where φ(x) − φ(−x) = c·x for every x: 1 for x·g(x) with g(x) + g(−x) = 1, and for softplus. source
    is the function that a user registered.
    """

    value: Callable[[Array], Array]
    slope: Callable[[Array], Array]
    curvature: Callable[[Array], Array]
    odd_factor: float | None = None
    source: Callable | None = None


def _logistic(x: Array) -> Array:
    return scipy.special.expit(x)


def _normal_cdf(x: Array) -> Array:
    return scipy.special.ndtr(x)


def _density(x: Array) -> Array:
    return np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _logistic_slope(x: Array) -> Array:
    return _logistic(x) * _logistic(-x)


def _logistic_curvature(x: Array) -> Array:
    return -_logistic_slope(x) * np.tanh(0.5 * x)


def _sech2(x: Array) -> Array:
    return 4.0 * _logistic_slope(2.0 * x)


_GELU_SCALE, _GELU_CUBIC = math.sqrt(2 / math.pi), 0.044715


def _gelu_gate(x: Array) -> tuple[Array, Array, Array]:
    """The argument κ(x + 0.044715x³) of the tanh form, and its two derivatives."""
    return (
        _GELU_SCALE * (x + _GELU_CUBIC * x**3),
        _GELU_SCALE * (1 + 3 * _GELU_CUBIC * x**2),
        _GELU_SCALE * 6 * _GELU_CUBIC * x,
    )


def _gelu_tanh_slope(x: Array) -> Array:
    u, du, _ = _gelu_gate(x)
    return _logistic(2 * u) + 0.5 * x * _sech2(u) * du


def _gelu_tanh_curvature(x: Array) -> Array:
    u, du, ddu = _gelu_gate(x)
    return _sech2(u) * (du + 0.5 * x * (ddu - 2 * np.tanh(u) * du**2))


_SMOOTH: dict[str, Smooth] = {
    "gelu": Smooth(
        lambda x: x * _normal_cdf(x),
        lambda x: _normal_cdf(x) + x * _density(x),
        lambda x: (2 - x * x) * _density(x),
        odd_factor=1.0,
    ),
    "gelu_tanh": Smooth(lambda x: x * _logistic(2 * _gelu_gate(x)[0]), _gelu_tanh_slope, _gelu_tanh_curvature, 1.0),
    "identity": Smooth(lambda x: 1.0 * x, np.ones_like, np.zeros_like, 2.0),
    "sigmoid": Smooth(_logistic, _logistic_slope, _logistic_curvature),
    "silu": Smooth(
        lambda x: x * _logistic(x),
        lambda x: _logistic(x) + x * _logistic_slope(x),
        lambda x: 2 * _logistic_slope(x) + x * _logistic_curvature(x),
        odd_factor=1.0,
    ),
    "sin": Smooth(np.sin, np.cos, lambda x: -np.sin(x)),
    "softplus": Smooth(lambda x: np.logaddexp(0.0, x), _logistic, _logistic_slope, 1.0),
    "tanh": Smooth(np.tanh, _sech2, lambda x: -2 * np.tanh(x) * _sech2(x)),
}

BASE_NAMES: tuple[str, ...] = tuple(sorted((*_SMOOTH, *_RECTIFIED)))  # ours; users may add their own


def add_base(name: str, smooth: Smooth) -> None:
    """Make φ known under a name that is free; `skipless.register_activation` makes all of this of a torch function."""
    _SMOOTH[name] = smooth


def base_name(base: Any) -> str:
    """The name of a base, which may be given by the function that was registered."""
    if isinstance(base, str):
        check_base(base)
        return base
    name = next((name for name, each in _SMOOTH.items() if callable(base) and each.source is base), None)
    if name is None:
        raise ValueError(
            f"the activation is {base!r}; it must be a name such as 'gelu', so that a checkpoint can say it, or a "
            "function of your own that has one: @skipless.register_activation('mine')"
        )
    return name


def check_base(name: str) -> None:
    """Refuse a name that is neither ours nor registered."""
    if name not in _SMOOTH and name not in _RECTIFIED:
        lazy.import_extensions()
    if name not in _SMOOTH and name not in _RECTIFIED:
        near = nearest(name, sorted((*_SMOOTH, *_RECTIFIED)))
        raise UnknownNameError(
            f"there is no activation {name!r}; {near} (one of your own is known once its code is imported: "
            "`--import FILE.py` on the command line, `import` in Python)"
        )


@dataclass(frozen=True)
class ShapedActivation:
    """φ̂(x) = γ(φ(αx + β) + δ), with φ named by `base`.

    Fields are α = `input_scale`, β = `input_shift`, δ = `output_shift`, γ = `output_scale`; the defaults leave φ as it
    is. `negative_slope` is leaky ReLU's slope left of 0 and belongs to that base alone. The fields are a string and
    numbers, so `dataclasses.asdict` is JSON and `ShapedActivation(**fields)` restores an equal object: a model config
    stores the solved constants and loading it needs no solver.

    "gelu" is the exact x·Φ(x); "gelu_tanh" is its tanh approximation (which the `dks` package calls "gelu").
    """

    base: str
    input_scale: float = 1.0
    input_shift: float = 0.0
    output_shift: float = 0.0
    output_scale: float = 1.0
    negative_slope: float = 0.0

    def __post_init__(self) -> None:
        check_base(self.base)
        check_own(self)
        for name in ("input_scale", "input_shift", "output_shift", "output_scale", "negative_slope"):
            value = float(getattr(self, name))
            if not math.isfinite(value):
                raise ValueError(f"{name}={value} of activation {self.base!r} must be finite")
            object.__setattr__(self, name, value)
        if self.negative_slope != 0.0 and self.base != "leaky_relu":
            raise ValueError(
                f"negative_slope={self.negative_slope} applies to 'leaky_relu' only, not to {self.base!r}: "
                "use negative_slope=0.0"
            )

    @property
    def rectified(self) -> bool:
        """Whether φ is ReLU or leaky ReLU: kinked, so that its kernel maps need closed forms, not quadrature."""
        return self.base in _RECTIFIED

    def __call__(self, x: Array) -> Array:
        return self.derivative(x, order=0)

    def derivative(self, x: Array, order: int = 1) -> Array:
        """φ̂⁽ᵏ⁾(x) = γαᵏφ⁽ᵏ⁾(αx + β) for `order` k = 0, 1, 2 (plus γδ at k = 0).

        At a rectifier's kink φ' takes the slope of the left side, as PyTorch does. Its φ'' is a Dirac mass, which
        no array can hold, and is refused.
        """
        inner = self.input_scale * np.asarray(x, dtype=np.float64) + self.input_shift
        outer = self._base_derivative(inner, order)
        if order == 0:
            return self.output_scale * (outer + self.output_shift)
        return self.output_scale * self.input_scale**order * outer

    def _base_derivative(self, x: Array, order: int) -> Array:
        if order not in (0, 1, 2):
            raise ValueError(f"derivative order {order} is not known: use 0, 1 or 2")
        if not self.rectified:
            return _SMOOTH[self.base][order](x)
        if order == 2:
            raise ValueError(f"{self.base!r} has no second derivative as a function: use a smooth base")
        gate = np.where(x > 0, 1.0, self.negative_slope)
        return gate * x if order == 0 else gate


def odd_factor(activation: ShapedActivation) -> float | None:
    """c with φ̂(x) − φ̂(−x) = c·x for every x, or None where that difference is not linear.

    It is twice the odd part of φ̂. δ cancels, so c = γα·factor(φ), and 1 + a is leaky ReLU's factor. A shift inside,
    β ≠ 0, breaks the symmetry of every φ but the identity: no smooth activation of DKS or TAT has such a c.
    """
    base, slope = activation.base, activation.negative_slope
    factor = 1.0 + slope if activation.rectified else _SMOOTH[base].odd_factor
    straight = base == "identity" or (base == "leaky_relu" and slope == 1.0)
    if factor is None or (activation.input_shift != 0.0 and not straight):
        return None
    return activation.output_scale * activation.input_scale * factor

"""Where the constructions exist: range checks and bounds, as errors that name the nearest value that works."""

import math
import operator
from collections.abc import Sequence
from itertools import count
from typing import Any, Literal

import numpy as np

from skipless.schema import check

Grid = Literal["square"] | tuple[int, int]  # as many rows as columns, whatever their number; or both, in this order


def check_length(length: int) -> int:
    """A sequence length: an integer of at least 1."""
    if int(length) != length or length < 1:
        raise ValueError(f"length is {length!r}; it must be an integer of at least 1")
    return int(length)


def check_kernel(kernel: Any, name: str, length: int | None = None) -> np.ndarray:
    """A T×T kernel of cosines, of `length` locations where that is given."""
    kernel = np.asarray(kernel, dtype=np.float64)
    if kernel.ndim != 2 or kernel.shape[0] != kernel.shape[1] or not kernel.size or length not in (None, len(kernel)):
        wanted = "T×T" if length is None else f"{length}×{length}, as the one before it"
        raise ValueError(f"{name} is shaped {kernel.shape}; it must be {wanted}: the cosine of each two locations")
    unlike = np.abs(kernel - kernel.T)
    i, j = np.unravel_index(unlike.argmax(), kernel.shape)
    if not unlike[i, j] <= 1e-6:
        pair = f"{kernel[i, j]:.4g} from location {i} to {j} and {kernel[j, i]:.4g} back"
        raise ValueError(f"{name} has {pair}; a kernel is finite and symmetric: fill both its halves")
    own = np.diagonal(kernel)
    if np.abs(own - 1.0).max() > 1e-6:
        seen = own[np.abs(own - 1.0).argmax()]
        raise ValueError(f"{name} has {seen:.4g} on its diagonal; cosines have 1: use theory.kernels.cosine(kernel)")
    try:
        np.linalg.cholesky(kernel)
    except np.linalg.LinAlgError as error:
        raise ValueError(
            f"{name} is not positive definite (smallest eigenvalue {np.linalg.eigvalsh(kernel)[0]:.2g}): use a rougher "
            "kernel, or one whose locations are less alike"
        ) from error
    return kernel


def check_grid(grid: Any) -> Grid | None:
    """How locations lie: (rows, columns), "square", or None for a line."""
    if grid is None or (isinstance(grid, str) and grid == "square"):
        return grid
    given = tuple(grid) if isinstance(grid, list | tuple) else ()
    sides = [operator.index(side) for side in given if hasattr(side, "__index__") and not isinstance(side, bool)]
    if not len(given) == len(sides) == 2 or min(sides) < 1:
        raise ValueError(f"grid is {grid!r}; it must be (rows, columns), both at least 1, or 'square', or None")
    return sides[0], sides[1]


def grid_sides(grid: Grid | None, length: int) -> tuple[int, int]:
    """Rows and columns of so many locations in reading order; a line is one row."""
    check_length(length)
    if grid is None:
        return 1, length
    if grid == "square":
        side = math.isqrt(length)
        if side**2 != length:
            near = min(side**2, (side + 1) ** 2, key=lambda square: abs(square - length))
            raise ValueError(f"{length} locations make no square grid; the nearest that do are {near}")
        return side, side
    rows, columns = grid
    if rows * columns != length:
        fits = f", or grid=({length // columns}, {columns})" if length % columns == 0 else ""
        raise ValueError(
            f"grid={grid} has {rows * columns} locations, and length is {length}; use length={rows * columns}{fits}"
        )
    return rows, columns


def nearest_divisor(whole: int, part: int) -> int:
    """The number nearest to `part` that divides `whole`; of two the smaller."""
    return next(n for step in count() for n in (part - step, part + step) if n > 0 and whole % n == 0)


def check_depth(depth: int) -> int:
    """A number of blocks: an integer of at least 1."""
    if int(depth) != depth or depth < 1:
        raise ValueError(f"depth is {depth!r}; it must be an integer of at least 1")
    return int(depth)


def check_decay_rate(name: str, gamma: float) -> None:
    """γ in (0, ∞]: at γ = 0 all locations coincide, and ∞ means uncorrelated locations."""
    if not gamma > 0:
        raise ValueError(
            f"{name} is {gamma}; a decay rate must be positive (0 is rank collapse; the paper's final rate is 0.005)"
        )


def check_gamma_final(gamma_final: float, name: str = "gamma_final") -> None:
    """γ_L in (0, ∞)."""
    check_decay_rate(name, gamma_final)
    if math.isinf(gamma_final):
        raise ValueError(f"{name} is ∞; attention would then be the identity in every block: use ValueSkipInit")


def check_final_rates(gamma_final: Any) -> float | tuple[float, ...]:
    """γ_L as a number, or as a tuple of one for each head."""
    if isinstance(gamma_final, str) or not hasattr(gamma_final, "__len__"):
        rate = check(gamma_final, float, "gamma_final")
        check_gamma_final(rate)
        return rate
    rates = check(gamma_final, tuple[float, ...], "gamma_final")
    if not rates:
        raise ValueError("gamma_final is empty; give one decay rate, or one for each head, such as (0.5, 0.05)")
    for head, rate in enumerate(rates):
        check_gamma_final(rate, f"gamma_final[{head}]")
    return rates


def check_correlation(name: str, rho: float) -> None:
    """ρ in [0, 1): at ρ = 1 all locations coincide."""
    if not 0.0 <= rho < 1.0:
        raise ValueError(f"{name} is {rho}; a uniform correlation must lie in [0, 1) (1 is rank collapse)")


def check_decay_rates(gammas: Sequence[float]) -> None:
    """γ_1 … γ_L by block: finite, positive, and each below the one before it (Thm 2)."""
    if not gammas:
        raise ValueError("gammas is empty; give one decay rate for each block, such as (1.0, 0.2, 0.05)")
    for block, gamma in enumerate(gammas):
        check_decay_rate(f"gammas[{block}]", gamma)
        if math.isinf(gamma):
            raise ValueError(f"gammas[{block}] is ∞; attention would then be the identity: use ValueSkipInit")
        if block and gamma >= (before := gammas[block - 1]):
            raise ValueError(
                f"gammas[{block}]={gamma} is not below gammas[{block - 1}]={before}; decay rates must fall from block "
                f"to block for attention to be non-negative (Thm 2): use less than {before}"
            )


def check_correlations(rhos: Sequence[float], rho_initial: float) -> None:
    """ρ_1 … ρ_L by block: in [0, 1), and each above the one before it, the first above the input's (Thm 1)."""
    if not rhos:
        raise ValueError("rhos is empty; give one correlation for each block, such as (0.2, 0.4, 0.6)")
    for block, rho in enumerate(rhos):
        check_correlation(f"rhos[{block}]", rho)
        before, name = (rhos[block - 1], f"rhos[{block - 1}]") if block else (rho_initial, "repeat_rate")
        if rho <= before:
            raise ValueError(
                f"rhos[{block}]={rho} is not above {name}={before}; correlations must rise from block to block for "
                f"attention to be non-negative (Thm 1): use more than {before}"
            )


def check_blocks(name: str, values: Sequence[float], depth: int) -> None:
    """Refuse a list that has not one value for each block."""
    if len(values) != check_depth(depth):
        raise ValueError(f"{name} has {len(values)} values and depth is {depth}; give {depth}, one for each block")


def check_end(name: str, final: Any, default: Any, by_block: str, last: float) -> None:
    """A final value beside values by block is theirs, or was not given."""
    if final not in (default, last):
        raise ValueError(
            f"{name}={final} beside {by_block}, which ends at {last}; {by_block} says it already: leave {name} out, or "
            f"use {name}={last}"
        )


def check_repeat_rate(repeat_rate: float) -> None:
    """r in [0, 1), the probability that two locations of a sequence hold the same token."""
    if not 0.0 <= repeat_rate < 1.0:
        raise ValueError(
            f"repeat_rate is {repeat_rate}; it is the probability that two locations hold the same token "
            "and must lie in [0, 1) (about 0.008 for 32k SentencePiece, 0.05 for characters)"
        )


def check_skip_weight(skip_weight: float) -> None:
    """α in [0, 1), so that the residual weight √(1−α²) is positive."""
    if not 0.0 <= check(skip_weight, float, "skip_weight") < 1.0:
        raise ValueError(
            f"skip_weight is {skip_weight}; a normalised skip needs 0 ≤ α < 1, so that β = √(1−α²) > 0 (0 is skipless)"
        )


def smallest_gamma_final(skip_weight: float, depth: int) -> float:
    """The γ_L at which App. F's λ_α reaches 0: −½ ln(1−α^{2L}). Feasible rates lie above it."""
    if skip_weight == 0.0:
        return 0.0
    passing = 2 * depth * math.log(skip_weight)  # ln α^{2L}
    return -0.5 * (math.log1p(-math.exp(passing)) if passing < -1.0 else math.log(-math.expm1(passing)))


def largest_skip_weight(gamma_final: float, depth: int) -> float:
    """The α at which App. F's λ_α reaches 0: a(γ_L)^{1/L}. Feasible weights lie below it."""
    return math.exp(math.log(-math.expm1(-2.0 * gamma_final)) / (2 * depth))


def check_exponential_skip(lam_squared: float, gamma_final: float, depth: int, skip_weight: float) -> None:
    """App. F needs λ_α² = (λ_0²−α²)/(1−α²) to be positive; given as it was computed, whatever its rounding."""
    if lam_squared > 0.0:
        return
    gamma = round_up(smallest_gamma_final(skip_weight, depth))
    alpha = round_down(largest_skip_weight(gamma_final, depth))
    raise ValueError(
        f"gamma_final={gamma_final} with skip_weight={skip_weight} over {depth} blocks makes λ_α² = "
        f"(λ_0²−α²)/(1−α²) not positive (App. F); with this skip weight use gamma_final ≥ {gamma}, "
        f"or with this gamma_final use skip_weight ≤ {alpha}"
    )


def check_step_skip(name: str, block: int, value: float, lost: float, skip_weight: float, bound: float) -> None:
    """A block's share `lost`, of what a skip α leaves its branch to change, must be below 1; `bound` is where it is."""
    if not lost < 1.0:
        nearest = f"≥ {round_up(bound)}" if name == "gammas" else f"≤ {round_down(bound)}"
        raise ValueError(
            f"{name}[{block}]={value} with skip_weight={skip_weight} asks more of block {block + 1} than its residual "
            f"branch can change (App. F, Sec. 3.4); after the values before it use {nearest}, or a smaller skip weight"
        )


def largest_rho_final(skip_weight: float, depth: int, rho_initial: float, schedule: str) -> float:
    """The ρ_L at which the residual branch would need ρ_res = 1. Feasible values lie below it.

    Every block needs α² < (1−ρ_l)/(1−ρ_{l−1}). Linear and quadratic schedule: the last block binds, which takes the
    share s = 1/L or 1 − (1−1/L)² of the way: (β² + α²ρ_0 s) / (β² + α² s); geometric: 1 − (1−ρ_0) α^{2L}.
    """
    alpha2 = skip_weight**2
    beta2 = 1.0 - alpha2
    if schedule == "geometric":
        return 1.0 - (1.0 - rho_initial) * alpha2**depth
    last = 1.0 / depth if schedule == "linear" else 1.0 - (1.0 - 1.0 / depth) ** 2
    return (beta2 + alpha2 * rho_initial * last) / (beta2 + alpha2 * last)


def check_uniform_skip(
    rho_residual: float, rho_final: float, depth: int, skip_weight: float, rho_initial: float, schedule: str
) -> None:
    """Sec. 3.4 needs ρ_res = (ρ_l−α²ρ_{l−1})/β² < 1 in every block; given the largest, as it was computed."""
    if rho_residual < 1.0:
        return
    bound = largest_rho_final(skip_weight, depth, rho_initial, schedule)
    digits = next((n for n in (4, 8, 12) if round_down(bound, n) > rho_initial), 16)
    hint = "" if schedule == "geometric" else " (schedule='geometric' reaches higher)"
    raise ValueError(
        f"rho_final={rho_final} with skip_weight={skip_weight} over {depth} blocks needs a residual branch with "
        f"ρ_res = (ρ_l−α²ρ_(l−1))/β² ≥ 1 (Sec. 3.4); with this skip weight use rho_final ≤ "
        f"{round_down(bound, digits)}{hint}"
    )


def round_up(value: float, digits: int = 4) -> float:
    """The smallest number of `digits` significant digits above `value`: a bound a user can type."""
    return _round(value, digits, math.floor, +1)


def round_down(value: float, digits: int = 4) -> float:
    """The largest number of `digits` significant digits below `value`."""
    return _round(value, digits, math.ceil, -1)


def _round(value: float, digits: int, towards, step: int) -> float:
    if value == 0.0:
        return 0.0
    places = digits - 1 - math.floor(math.log10(abs(value)))
    return round((towards(value * 10.0**places) + step) / 10.0**places, places)

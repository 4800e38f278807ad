"""Where the constructions exist: range checks and bounds, as errors that name the nearest value that works."""

import math


def check_length(length: int) -> int:
    """A sequence length: an integer of at least 1."""
    if int(length) != length or length < 1:
        raise ValueError(f"length is {length!r}; it must be an integer of at least 1")
    return int(length)


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


def check_correlation(name: str, rho: float) -> None:
    """ρ in [0, 1): at ρ = 1 all locations coincide."""
    if not 0.0 <= rho < 1.0:
        raise ValueError(f"{name} is {rho}; a uniform correlation must lie in [0, 1) (1 is rank collapse)")


def check_repeat_rate(repeat_rate: float) -> None:
    """r in [0, 1), the probability that two locations of a sequence hold the same token."""
    if not 0.0 <= repeat_rate < 1.0:
        raise ValueError(
            f"repeat_rate is {repeat_rate}; it is the probability that two locations hold the same token "
            "and must lie in [0, 1) (about 0.008 for 32k SentencePiece, 0.05 for characters)"
        )


def check_skip_weight(skip_weight: float) -> None:
    """α in [0, 1), so that the residual weight √(1−α²) is positive."""
    if not 0.0 <= skip_weight < 1.0:
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


def largest_rho_final(skip_weight: float, depth: int, rho_initial: float, schedule: str) -> float:
    """The ρ_L at which the residual branch would need ρ_res = 1. Feasible values lie below it.

    Every block needs α² < (1−ρ_l)/(1−ρ_{l−1}). Linear schedule: the last block binds,
    (β² + α²ρ_0/L) / (β² + α²/L); geometric: 1 − (1−ρ_0) α^{2L}.
    """
    alpha2 = skip_weight**2
    beta2 = 1.0 - alpha2
    if schedule == "geometric":
        return 1.0 - (1.0 - rho_initial) * alpha2**depth
    return (beta2 + alpha2 * rho_initial / depth) / (beta2 + alpha2 / depth)


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

"""Learning rates: the paper's ladder {1, 2, 3, 5}·10ⁿ, the rate each kind of network is expected to like, and grids.

Every arm of an item gets the same number of rates, centred on the expected one, and another beyond the best while that
lies at the edge and is better than its neighbour, three at most: equal tuning. Arms of great depth may instead take the
rate of a shallower one by a law.
"""

import math
from collections.abc import Mapping

from skipless.model.config import ModelConfig

MANTISSAS = (1, 2, 3, 5)
MOST_BEYOND = 3
SAME = 0.01  # nats: two seeds differ by as much

# At 36 blocks × 512 over 3,000 steps. Vanilla and Pre-LN with Adam and Muon and weighted skips are measured; networks
# with one of two skips lie between those with none and both. SOAP, whose step size is Adam's, takes Adam's best rate
# at `small`, found before SOAP was first run there.
EXPECTED: dict[tuple[str, str], float] = {
    ("skipless", "adam"): 3e-5,
    ("skipless", "muon"): 1e-3,
    ("skipless", "soap"): 1e-4,
    ("one-skip", "adam"): 1e-4,
    ("one-skip", "muon"): 2e-3,
    ("one-skip", "soap"): 2e-4,
    ("weighted", "adam"): 5e-4,
    ("weighted", "muon"): 5e-3,
    ("weighted", "soap"): 1e-3,
    ("residual", "adam"): 5e-4,
    ("residual", "muon"): 1e-2,
    ("residual", "soap"): 1e-3,
    # Mirrored MLPs without skips, at 36 blocks × 256 over 1,500 steps with one seed; SOAP's is a guess between them.
    ("mirrored", "adam"): 2e-4,
    ("mirrored", "muon"): 2e-3,
    ("mirrored", "soap"): 3e-4,
}

# The rate falls as depth^−power. Each of L blocks moves the output of a network without skips by about as much as its
# own matrices move, relative to their size; Muon moves all of them by the same share. With one direction in common the
# L shares add up, so that the whole moves by the same amount if each moves by 1/L of it. For ReLU MLPs trained by SGD
# the power is 3/2 (Jelassi et al. 2023, arXiv:2305.07810).
DEPTH_POWER = 1.0


def kind(model: ModelConfig) -> str:
    """ "skipless", "one-skip", "weighted" (normalised, stable, SkipInit) or "residual" (1, 1), as in Pre-LN.

    "mirrored": skipless, with MLPs that start mirrored.
    """
    attention, mlp = model.attention_skip, model.mlp_skip
    if model.skipless:
        return "mirrored" if model.mlp_init == "mirrored" else "skipless"
    if attention.shortcut == 0.0 or mlp.shortcut == 0.0:
        return "one-skip"
    return "residual" if attention.residual == mlp.residual == 1.0 else "weighted"


def expected(model: ModelConfig, optimizer: str) -> float:
    """The rate at the middle of a network's grid."""
    return EXPECTED[kind(model), optimizer]


def by_depth(rate: float, depth: int, at: int = 36, power: float = DEPTH_POWER) -> float:
    """The rate of a network of `depth` blocks from the best one of `at` blocks, to three digits: ∝ depth^−power."""
    return float(f"{rate * (at / depth) ** power:.3g}")


def grid(middle: float, count: int) -> tuple[float, ...]:
    """`count` neighbouring rates of the ladder around one of them, lowest first; an even count leans upwards."""
    if count < 1:
        raise ValueError(f"--rates is {count}; every arm needs at least 1")
    at = _place(middle)
    return tuple(_rate(place) for place in range(at - (count - 1) // 2, at + count // 2 + 1))


def beyond(losses: Mapping[float, float]) -> float | None:
    """The next rate of the ladder beyond the best one, if that is the lowest or highest of several; else None.

    None also where its neighbour is as good: the loss no longer depends on the rate. Diverged runs have an infinite
    loss; where all have diverged, the next lower rate.
    """
    if len(losses) < 2:
        return None
    tried = sorted(losses)
    if all(map(math.isinf, losses.values())):
        return _rate(_place(tried[0]) - 1)
    best = min(tried, key=lambda rate: (losses[rate], rate))
    for edge, neighbour, step in ((tried[0], tried[1], -1), (tried[-1], tried[-2], 1)):
        if best == edge and losses[neighbour] - losses[best] > SAME:
            return _rate(_place(edge) + step)
    return None


def _place(rate: float) -> int:
    """The rate's number on the ladder; 1 has 0."""
    exponent = math.floor(math.log10(rate) + 1e-9)
    mantissa = round(rate / 10.0**exponent, 6)
    if mantissa not in MANTISSAS:
        near = min((_rate(4 * exponent + n) for n in range(5)), key=lambda other: abs(math.log(other / rate)))
        raise ValueError(f"the rate {rate:g} is not of the form {{1, 2, 3, 5}}·10ⁿ; the nearest is {near:g}")
    return 4 * exponent + MANTISSAS.index(mantissa)


def _rate(place: int) -> float:
    exponent, index = divmod(place, len(MANTISSAS))
    return float(f"{MANTISSAS[index]}e{exponent}")

"""Items of our own: with Muon, what in E-SPA itself closes the rest of the gap to Pre-LN; what rounding costs, and what
holds great depth together.

Their bands were written before their first run. Those on γ_L follow from a network of 12 blocks × 64 on a CPU, where a
faster decay and exact calibration learned sooner than App. H's default γ_L = 0.005. That biases hardly matter is a
guess: they start at 0, and with Muon their rate is low. So is that matrices kept orthogonal cost little: they keep the
signal, and can learn less. Rates by kind of matrix are arms of `optimisers` (muon-vo).

Those on rounding were written after 108 blocks had diverged in bfloat16 at all rates of `depth` but the lowest, and
before any run in float16 on a GPU. In bfloat16 rounding moves the output of 72 and 108 blocks by a fifth to a half of
what tells locations apart, at the start and on a CPU; in float16 by 3 to 9 %. Rounding may not be why: on a CPU, with
256 tokens a step at 5e-5, 108 blocks diverged after 145 steps as bfloat16 rounds and after 345 in float32.

Those on steady depth were written after the same run on a CPU (one seed, float32) had diverged after 345 steps as it
is, 365 with queries and keys held still, 490 with matrices kept orthogonal, 130 without biases, and not within 560 with
the MLP's matrices at a fifth of the rate, at no cost in loss. None had run on a GPU. On a CPU again, the MLP's
first matrix alone at a fifth had spikes and did not diverge within 700 steps; the second alone exploded before 350.
"""

from dataclasses import replace
from typing import Any

from skipless.model.presets import REPEAT_RATE
from skipless.ops.precision import Precision
from skipless.recipes.reproduce.arm import Arm
from skipless.recipes.reproduce.bands import Learns, Lower, Match
from skipless.recipes.reproduce.item import Item
from skipless.theory.schemes import Calibration, ExponentialSPA
from skipless.train.optim.config import ORTHOGONAL_ROLES


def _shaped(gamma: float, calibration: Calibration = "paper") -> Arm:
    exact = "" if calibration == "paper" else f"-{calibration}"
    label = f"γ_L = {gamma:g}{f', {calibration} calibration' if exact else ''}"
    scheme = ExponentialSPA(gamma, REPEAT_RATE, calibration)
    return Arm(f"gamma-{gamma:g}{exact}", label, "wikitext103/e-spa", {"scheme": scheme}, optimizer="muon")


CLOSING = Item(
    "closing",
    "Decay, calibration and biases of vanilla E-SPA, trained by Muon",
    "beyond the paper, which tunes γ_L over 0.005 and 0.2, with Adam",
    (
        Arm("e-spa", "γ_L = 0.005, the paper's default", "wikitext103/e-spa", optimizer="muon"),
        _shaped(0.05),
        _shaped(0.2),
        _shaped(0.2, "exact"),
        _shaped(0.2, "mlp-aware"),
        Arm("no-bias", "γ_L = 0.005, no biases", "wikitext103/e-spa", {"mlp_bias": False}, optimizer="muon"),
        replace(
            _shaped(0.05),
            name="gamma-0.05-vo",
            label="γ_L = 0.05, W_V and W_O at 0.3",
            role_rates={"value": 0.3, "output": 0.3},
            core=False,
        ),
    ),
    (
        Lower("gamma-0.2", "e-spa"),
        Lower("gamma-0.2-exact", "e-spa"),
        Match("gamma-0.2-exact", "gamma-0.2", 0.05),
        Match("gamma-0.2-mlp-aware", "gamma-0.2", 0.05),
        Match("no-bias", "e-spa", 0.05),
    ),
)


def _kept(name: str, label: str, *roles: str) -> Arm:
    return Arm(name, label, "wikitext103/e-spa", optimizer="muon", keep_orthogonal=roles)


KEPT_ORTHOGONAL = Item(
    "kept-orthogonal",
    "Matrices of vanilla E-SPA that stay orthogonal, trained by Muon",
    "beyond the paper, whose matrices only start so",
    (
        _kept("e-spa", "orthogonal at the start, as in the paper"),
        _kept("value-output", "W_V and W_O kept orthogonal", "value", "output"),
        _kept("and-mlp", "the MLP's too", "value", "output", "up", "down"),
    ),
    (Match("value-output", "e-spa", 0.1), Match("and-mlp", "e-spa", 0.1)),
)


def _rounded(depth: int, precision: Precision) -> Arm:
    label = f"{depth} blocks, {precision}"
    return Arm(f"e-spa-{depth}/{precision}", label, f"depth/e-spa-{depth}", precision=precision)


ROUNDING = Item(
    "rounding",
    "Vanilla E-SPA by depth, in bfloat16 and in float16",
    "beyond the paper, which does not say what it computes in",
    tuple(_rounded(depth, precision) for depth in (36, 72, 108) for precision in ("bf16", "fp16")),
    (
        Learns("e-spa-108/fp16"),
        Lower("e-spa-108/fp16", "e-spa-108/bf16"),
        Lower("e-spa-72/fp16", "e-spa-72/bf16"),
        Match("e-spa-36/fp16", "e-spa-36/bf16", 0.05),
    ),
)


def _deep(depth: int, way: str = "", words: str = "", **fields: Any) -> Arm:
    name, label = f"e-spa-{depth}" + f"/{way}" * bool(way), f"{depth} blocks" + f", {words}" * bool(words)
    return Arm(name, label, f"depth/e-spa-{depth}", **fields)


_SLOW = {"words": "the MLP at a fifth of the rate", "role_rates": {"up": 0.2, "down": 0.2}}

DEPTH_STEADY = Item(
    "depth-steady",
    "What holds 72 and 108 blocks of vanilla E-SPA together while they train",
    "beyond the paper, which trains all of it at one rate by Adam",
    (
        _deep(72),
        _deep(72, "slow-mlp", **_SLOW),
        _deep(108),
        _deep(108, "slow-mlp", **_SLOW),
        _deep(108, "kept", "kept orthogonal", keep_orthogonal=ORTHOGONAL_ROLES),
        _deep(108, "muon", "Muon", optimizer="muon"),
        _deep(36, "slow-mlp", **_SLOW, core=False),
        _deep(108, "slow-up", "the MLP's first matrix at a fifth", role_rates={"up": 0.2}, core=False),
        _deep(108, "slow-down", "the MLP's second matrix at a fifth", role_rates={"down": 0.2}, core=False),
    ),
    (
        Learns("e-spa-108/slow-mlp"),
        Lower("e-spa-108/slow-mlp", "e-spa-108"),
        Lower("e-spa-72/slow-mlp", "e-spa-72"),
        Lower("e-spa-108/kept", "e-spa-108"),
        Lower("e-spa-108/muon", "e-spa-108"),
    ),
)

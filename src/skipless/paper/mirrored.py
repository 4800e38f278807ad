"""Tables of our own: MLPs whose hidden units start as mirrored pairs, φ(x) − φ(−x) = x, so that a network without skips
and norms starts exactly linear.

Their claims were written before their first run. What they rest on was measured with one seed, and partly without equal
tuning. At 36 blocks × 256 over 1,500 steps, the embedding's rate between 6e-3 and 1e-2: with Adam mirrored E-SPA ended
at 4.89 and Pre-LN at 5.03; with Muon at 4.74, W_V and W_O held still, and Pre-LN at 4.61; E-SPA with DKS was .2 behind
mirrored with Muon. So with Adam it is claimed to end below Pre-LN, and with Muon to need no more than 1.25 times its
steps. On a CPU (36 × 96, bytes, 120 steps) W_V = W_O = I ended within .02 of Haar matrices held still, and below
trained ones: identity values are claimed to cost nothing. Over three times the steps only Adam's sign is claimed: with
Muon the gap to Pre-LN had grown.

Factors on the rate of a kind of matrix are part of a recipe. Those of mirrored networks, 3 on W_Q and W_K, which start
at zero product, and 1/2 on the MLP's, were the best of a few at 1,500 steps; on a CPU, over 500 steps with W_V and W_O
held still, 6 was better than 3 and 12, and 1/2 better than 1 and 1/4. `mirrored-factors` is to say which it is on a
GPU. Pre-LN is best at one rate for all: with these factors it was .2 worse.

Where the gap to Pre-LN with Muon lies was looked for afterwards, by runs with one seed (results/mirrored-gap.md): most
of it is at locations that have more than 32 others before them. With a trained gain on the bias of every head most
heads turn to the identity, a few let go of the bias and attend far, and half of the gap is gone: 4.66 where the same
network without gains has 4.71 and Pre-LN 4.58. It is claimed to need no more than 1.25 times Pre-LN's steps, as is the
network whose MLPs got the parameters that W_V and W_O do not take, 5d hidden units instead of 4d: as large as Pre-LN.

Readers were tried afterwards, on a CPU (results/mirrored-gap.md): heads beside those that carry the stream, with W_V
and W_O that start at 0. Where a mirrored network with gains was far behind Pre-LN with Muon and equally many
parameters, half as many heads again took most of the gap away. So the network with readers is claimed to end within
.05 of Pre-LN with Muon, below the one without, and within .05 of Pre-LN after three times the steps too, where the gap
had grown. With Adam, where it was ahead and then behind, it is claimed to be no worse than Pre-LN at both lengths.
Without clipping, batches of 1,024 tokens gave single gradients up to 60 times the usual, and it diverged; clipped as
here it did not.

The factors of the network with readers, 1.5 on W_Q and W_K and 1/2 on all else, are the best of six pairs of rates and
factors on a CPU, at 16 blocks × 64 over 2,000 steps of Muon: a ratio of 3 between W_Q and the MLP, where all arms of
`mirrored-factors` had 6 or more. Without readers the same ratio was .025 better than 6 there, at one rate and seed. So
`qk3-mlp1` was added to `mirrored-factors`, with its claim, after the others had run.

Depth: 108 blocks at half the best rate of 36 had trained at the first try, Pre-LN at its unchanged rate. Whether the
law over depth does Pre-LN harm is seen beside a Pre-LN whose rate does not change, and the claim is made against both.

The long run is claimed to end below Pre-LN's with Adam, whose loss E-SPA without mirrored MLPs missed by .24 there, and
within .1 of Pre-LN's with Muon: as far as it is behind over 1,500 steps. Both failed for `mirrored-gain`, which ended
.06 above Pre-LN with Adam. The network with readers, as large as Pre-LN, was added then, with the same two claims.

Claims on SOAP are left out, as are its arms, until they are run by default.

The last three tables ask what such networks are good for: few bits, blocks that all work, activations that need not be
stored. Pre-LN at an equal budget is the control, and every network is trained by Adam and by Muon. All three look at
the same runs, those of `mirrored` at their best rates: a run is asked for all of it at once.

Their claims were written before any run at this size. What they rest on: at width 64, with one seed, nf4 had cost E-SPA
.36 nats and a network with skips and norms .08, and rounding is known to grow with depth without skips, so Pre-LN is
claimed to bear few bits better. That Muon removes outliers, and that there are fewer without norms, are guesses. A
block of a mirrored network rotates the stream, so that what follows cannot do without it; Pre-LN's only adds to it. So
dropping one is claimed to cost more, and 36 blocks to gain more over 27. At its start a mirrored network of 36 blocks ×
96 can be run backwards in float32 to 7e-6 of its input (inspection/inverse.py, on a CPU); Pre-LN's first block cannot.

Seen after the claims were written, on a CPU (24 blocks × 64, 300 steps of bytes by Muon, one seed, Pre-LN second):
nf4 .36 and .002 nats, folded .10; int8 .001 and 0; one block dropped 3.1 and .08; the worst block alone backwards .18
and 21, the median one .04 and 6e-8. What starts invertible does not stay so. In float64 the MLPs do, with a condition
number of 2, and attention does not: in two early blocks another input, 7 % away, gives the same output to 3e-10.
"""

from dataclasses import replace
from typing import Any

from skipless.model.presets import REPEAT_RATE
from skipless.paper import experiments
from skipless.paper.claims import Below, Later, Learns, Lower, Match, NoSpike, NoWiderGap, Reaches, SmallerGap
from skipless.paper.experiments import Arm, Optimizer, PaperTable
from skipless.paper.measures import FORMATS
from skipless.theory.schemes import ExponentialSPA
from skipless.training.config import DEPTH_POWER

EMBEDDING_RATES = experiments.grid(5e-3, 3)
FACTORS_QK, FACTORS_MLP = 3.0, 0.5
FIXED_EMBEDDING = (1e-2,)
GAIN_RATE = 1e-2
STEPS_POWER = 1 / 3  # of the law over steps, not measured here: others find about 0.3

_OPTIMISERS: dict[Optimizer, str] = {"adam": "Adam", "muon": "Muon", "soap": "SOAP"}
_VALUE_OUTPUT: dict[Optimizer, float] = {"adam": 0.3, "muon": 0.1, "soap": 0.3}
_SLOWER = {"value": 0.3, "output": 0.3}
_PLAIN: dict[str, Any] = {"mlp_init": "mirrored", "activation": "gelu"}
_SLOWER_DECAY = {"scheme": ExponentialSPA(0.05, REPEAT_RATE)}
_MIRRORED = {**_PLAIN, **_SLOWER_DECAY}
_IDENTITY = {**_MIRRORED, "value_output": "identity"}
_GAIN = {**_IDENTITY, "bias_gain": True}
_READERS = {**_GAIN, "readers": 4}  # half of the paper's heads: as many parameters as Pre-LN


def _factors(query_key: float = FACTORS_QK, mlp: float = FACTORS_MLP, **others: float) -> dict[str, float]:
    return {"query": query_key, "key": query_key, "up": mlp, "down": mlp, **others}


def _explored(query_key: float, mlp: float = FACTORS_MLP) -> Arm:
    usual = mlp == FACTORS_MLP
    name = f"qk{query_key:g}" + ("" if usual else f"-mlp{mlp:g}")
    label = f"W_Q and W_K at {query_key:g}, the MLP at {mlp:g}"
    factors = _factors(query_key, mlp)
    return Arm(name, label, "wikitext103/e-spa", _IDENTITY, optimizer="muon", role_rates=factors, seeds=1)


FACTORS = PaperTable(
    "mirrored-factors",
    "Rates by kind of matrix of a mirrored network without W_V, W_O; Muon",
    "beyond the paper, which has one rate for all but the embedding",
    (_explored(3.0), _explored(6.0), _explored(10.0), _explored(6.0, 1.0), _explored(6.0, 0.25), _explored(3.0, 1.0)),
    (
        Lower("qk6", "qk3"),
        Lower("qk6", "qk10"),
        Lower("qk6", "qk6-mlp1"),
        Lower("qk6", "qk6-mlp0.25"),
        Later(Lower("qk3-mlp1", "qk3")),
    ),
    embedding_rates=FIXED_EMBEDDING,
    note="An exploration, with one seed: it chooses the factors of the other tables on mirrored networks.",
)


def _mirrored(words: str, changes: dict[str, Any], seeds: int | None = 3, **factors: float) -> Arm:
    """A mirrored arm, yet without a name and an optimiser. factors: on the rates of W_V and W_O."""
    gain_rate, rates = GAIN_RATE if changes.get("bias_gain") else None, _factors(**factors)
    label = f"E-SPA mirrored, {words}"
    return Arm("", label, "wikitext103/e-spa", changes, role_rates=rates, gain_rate=gain_rate, seeds=seeds)


def _networks(optimizer: Optimizer) -> dict[str, Arm]:
    """Every kind of network of `mirrored`, with one optimiser."""
    slower, wider = _VALUE_OUTPUT[optimizer], _GAIN | {"hidden": 5 * experiments.PAPER_WIDTH}
    by_dks, rates = ("E-SPA, DKS-GELU, W_V and W_O at 0.3", _SLOWER) if optimizer == "muon" else ("E-SPA, DKS-GELU", {})
    kinds = {
        "pre-ln": Arm("", "Pre-LN", "wikitext103/pre-ln", seeds=3),
        "mirrored": _mirrored(f"W_V and W_O at {slower:g}", _MIRRORED, value=slower, output=slower),
        "mirrored-identity": _mirrored("W_V = W_O = I", _IDENTITY),
        "mirrored-frozen": _mirrored("W_V and W_O held still", _MIRRORED, None, value=0.0, output=0.0),
        "mirrored-gain": _mirrored("W_V = W_O = I, gains on biases", _GAIN),
        "mirrored-wider": _mirrored("W_V = W_O = I, gains, 5d hidden units: as many parameters as Pre-LN", wider),
        "e-spa": Arm("", by_dks, "wikitext103/e-spa", _SLOWER_DECAY, role_rates=rates),
        "e-spa-skip": Arm("", "E-SPA, normalised skips, no LN", "wikitext103/e-spa-skip"),
    }
    return {
        kind: replace(
            arm,
            name=f"{kind}/{optimizer}",
            label=f"{arm.label}, {_OPTIMISERS[optimizer]}",
            optimizer=optimizer,
            core=optimizer != "soap",
            seeds=None if optimizer == "soap" else arm.seeds,
        )
        for kind, arm in kinds.items()
    }


ARMS = {optimizer: _networks(optimizer) for optimizer in _OPTIMISERS}
_KINDS = tuple(ARMS["adam"])

MIRRORED = PaperTable(
    "mirrored",
    "Mirrored networks, without skips and norms, beside Pre-LN",
    "beyond the paper, which needs about 5 times the steps with Adam",
    tuple(sorted((ARMS[way][kind] for kind in _KINDS for way in _OPTIMISERS), key=lambda arm: not arm.core)),
    (
        Lower("mirrored/adam", "pre-ln/adam", 0.05),
        Lower("mirrored-identity/adam", "pre-ln/adam", 0.05),
        Reaches("mirrored-identity/muon", "pre-ln/muon", 1.25),
        Reaches("mirrored-gain/muon", "pre-ln/muon", 1.25),
        Reaches("mirrored-wider/muon", "pre-ln/muon", 1.25),
        Lower("mirrored-gain/muon", "mirrored-identity/muon"),
        Match("mirrored-identity/adam", "mirrored/adam", 0.02),
        Match("mirrored-identity/muon", "mirrored/muon", 0.02),
        Lower("mirrored/adam", "e-spa/adam"),
        Lower("mirrored/muon", "e-spa/muon"),
        Match("e-spa-skip/adam", "pre-ln/adam", 0.0),
    ),
    quantities=("train_loss", "valid_loss"),
    step_ladder=(0.5, 0.75, 1.0, 1.5, 2.0, 3.0),
    baseline="pre-ln/adam",
    embedding_rates=EMBEDDING_RATES,
    note=(
        "γ_L = 0.05 for all E-SPA without skips. Factors on the rate of mirrored networks: 3 on W_Q and W_K, 0.5 on "
        "the MLP; gains at 0.01. Every arm's embedding is tuned; tables of other items have it at 0.001 for all."
    ),
)


def _with_readers(optimizer: Optimizer) -> Arm:
    """`mirrored-gain` with half as many heads again, which have W_V and W_O and read."""
    arm = ARMS[optimizer]["mirrored-gain"]
    return replace(
        arm,
        name=f"mirrored-readers/{optimizer}",
        label=f"E-SPA mirrored, W_V = W_O = I, gains, readers: as many parameters as Pre-LN, {_OPTIMISERS[optimizer]}",
        changes=_READERS,
        role_rates=_factors(1.5, value=0.5, output=0.5) if optimizer == "muon" else arm.role_rates,
    )


READERS = PaperTable(
    "mirrored-readers",
    "Mirrored networks with heads that read beside those that carry, and Pre-LN",
    "beyond the paper, which needs about 5 times the steps with Adam",
    tuple(
        replace(arm, step_multiples=(1.0, 3.0))
        for way in ("muon", "adam")
        for arm in (ARMS[way]["pre-ln"], ARMS[way]["mirrored-gain"], _with_readers(way))
    ),
    (
        Lower("mirrored-readers/muon", "mirrored-gain/muon"),
        Match("mirrored-readers/muon", "pre-ln/muon", 0.05),
        Match("mirrored-readers/muon@3", "pre-ln/muon@3", 0.05),
        Match("mirrored-readers/adam", "pre-ln/adam", 0.0),
        Match("mirrored-readers/adam@3", "pre-ln/adam@3", 0.0),
    ),
    quantities=("train_loss", "valid_loss"),
    embedding_rates=EMBEDDING_RATES,
    note=(
        "Rates are those tuned over the usual steps. W_Q and W_K of mirrored networks have 3 times the rate, the MLP "
        "half of it, gains 0.01; with readers and Muon W_Q and W_K have 1.5 times the rate, all other matrices half. "
        "All but `mirrored-gain` have equally many parameters."
    ),
)

LONGER = PaperTable(
    "mirrored-longer",
    "Mirrored networks and Pre-LN after three times the steps",
    "beyond the paper, which trains E-SPA five times as long as Pre-LN",
    (
        *(
            replace(ARMS[way][kind], step_multiples=(1.0, 3.0))
            for way, kinds in {
                "adam": ("pre-ln", "mirrored-identity", "mirrored-gain"),
                "muon": ("pre-ln", "mirrored-gain"),
            }.items()
            for kind in kinds
        ),
        replace(
            ARMS["muon"]["mirrored-gain"],
            name="mirrored-gain-law/muon",
            label=ARMS["muon"]["mirrored-gain"].label + ", rates by the law over steps",
            step_multiples=(3.0,),
            follows="mirrored-gain/muon",
            depth_power=0.0,
            steps_power=STEPS_POWER,
            seeds=None,
        ),
    ),
    (
        Lower("mirrored-gain/adam@3", "pre-ln/adam@3"),
        Lower("mirrored-identity/adam@3", "pre-ln/adam@3"),
        Lower("mirrored-gain-law/muon@3", "mirrored-gain/muon@3"),
    ),
    quantities=("train_loss", "valid_loss"),
    embedding_rates=EMBEDDING_RATES,
    note=(
        "Rates are those tuned over 1,500 steps. By the law over steps all rates of a run three times as long are "
        "0.69 of them, 3^(−1/3)."
    ),
)

LONG = PaperTable(
    "mirrored-long",
    "Mirrored networks and Pre-LN of 36 blocks × 512 over 16,000 steps",
    "beyond the paper, whose network of this size ends at 3.12 after 100,000 steps of WikiText-103",
    tuple(
        replace(arm, step_multiples=(1.0, 8.0), steps_power=STEPS_POWER, seeds=None)
        for arm in (
            *(ARMS[way][kind] for way in ("adam", "muon") for kind in ("pre-ln", "mirrored-gain")),
            _with_readers("muon"),
        )
    ),
    (
        Lower("mirrored-gain/muon@8", "pre-ln/adam@8"),
        Lower("mirrored-gain/adam@8", "pre-ln/adam@8"),
        Match("mirrored-gain/muon@8", "pre-ln/muon@8", 0.1),
        Later(Lower("mirrored-readers/muon@8", "pre-ln/adam@8")),
        Later(Match("mirrored-readers/muon@8", "pre-ln/muon@8", 0.1)),
    ),
    quantities=("train_loss", "valid_loss"),
    keeps_weights=True,
    embedding_rates=FIXED_EMBEDDING,
    note=(
        "For the scale `medium`: rates are tuned over 2,000 steps and halved for 16,000; the embedding's is 0.01, the "
        "best of every arm of `mirrored`, and halved too."
    ),
)


def _deep(kind: str, depth: int) -> Arm:
    """An arm of `mirrored` with Muon, deeper; "pre-ln-constant" keeps Pre-LN's rate whatever the depth."""
    constant = kind == "pre-ln-constant"
    network = "pre-ln" if constant else kind
    arm = ARMS["muon"][network]
    words = ", the rate of 36" if constant else ""
    return replace(
        arm,
        name=f"{kind}/{depth}",
        label=f"{arm.label}, {depth} blocks{words}",
        changes={**arm.changes, "depth": depth},
        follows="" if depth == 36 else f"{network}/36",
        depth_power=0.0 if constant else DEPTH_POWER,
        seeds=None,
    )


DEPTH = PaperTable(
    "mirrored-depth",
    "Mirrored networks and Pre-LN by depth, rates by one law, trained by Muon",
    "beyond the paper, which trains 36, 72 and 108 blocks, each at a rate of its own",
    (
        *(_deep(kind, depth) for depth in (36, 72, 108, 216) for kind in ("pre-ln", "mirrored-gain")),
        *(_deep("pre-ln-constant", depth) for depth in (72, 108, 216)),
    ),
    (
        Learns("mirrored-gain/216"),
        NoSpike("mirrored-gain/216"),
        NoWiderGap(("pre-ln/108", "mirrored-gain/108"), ("pre-ln/36", "mirrored-gain/36")),
        NoWiderGap(("pre-ln-constant/108", "mirrored-gain/108"), ("pre-ln/36", "mirrored-gain/36")),
    ),
    quantities=("train_loss", "valid_loss"),
    embedding_rates=EMBEDDING_RATES,
    note=(
        f"Rates are tuned at 36 blocks and fall as depth^−{DEPTH_POWER:g}; the embedding's stays. Pre-LN "
        "is also shown at the rate of 36 blocks."
    ),
)


def _other(kind: str, label: str, preset: str, **fields: Any) -> Arm:
    return Arm(f"{kind}/muon", f"{label}, Muon", f"wikitext103/{preset}", _PLAIN, optimizer="muon", **fields)


OTHERS = PaperTable(
    "mirrored-others",
    "Other attention with mirrored MLPs, and Pre-LN with them, trained by Muon",
    "beyond the paper, whose MLPs are orthogonal or Gaussian",
    (
        ARMS["muon"]["pre-ln"],
        _other("pre-ln-mirrored", "Pre-LN, mirrored MLPs", "pre-ln"),
        ARMS["muon"]["mirrored"],
        _other("u-spa-mirrored", "U-SPA mirrored", "u-spa", role_rates=ARMS["muon"]["mirrored"].role_rates),
        _other(
            "v-skipinit-mirrored",
            "V-SkipInit mirrored, gains at 0.001",
            "v-skipinit",
            role_rates=ARMS["muon"]["mirrored"].role_rates,
            gain_rate=1e-3,
        ),
    ),
    (
        Learns("u-spa-mirrored/muon"),
        Learns("v-skipinit-mirrored/muon"),
        Lower("mirrored/muon", "u-spa-mirrored/muon"),
        Lower("mirrored/muon", "v-skipinit-mirrored/muon"),
        Match("pre-ln-mirrored/muon", "pre-ln/muon", 0.05),
        Match("pre-ln/muon", "pre-ln-mirrored/muon", 0.05),
    ),
    quantities=("train_loss", "valid_loss"),
    embedding_rates=EMBEDDING_RATES,
    note="All but Pre-LN as it is have mirrored MLPs; U-SPA and V-SkipInit the factors of mirrored E-SPA.",
)


_WAYS: tuple[Optimizer, ...] = ("adam", "muon")
_STUDIED = tuple(
    replace(ARMS[way][kind], seeds=None) for way in _WAYS for kind in ("pre-ln", "e-spa-skip", "e-spa", "mirrored")
)
_USES: dict[str, Any] = {
    "reference": "beyond the paper, which asks how they train",
    "measure": "uses",
    "embedding_rates": EMBEDDING_RATES,
    "side_by_side": True,
}


def _shallower(way: Optimizer, kind: str) -> Arm:
    """A network of 27 blocks at the rates of 36."""
    arm = ARMS[way][kind]
    changes = {**arm.changes, "depth": 27}
    name, label = f"{kind}-27/{way}", f"{arm.label}, 27 blocks"
    return replace(arm, name=name, label=label, changes=changes, follows=arm.name, depth_power=0.0, seeds=None)


LOW_BITS = PaperTable(
    "low-bits",
    "Loss after rounding matrices and activations to few bits",
    arms=_STUDIED,
    claims=(
        *(Lower(f"pre-ln/{way}", f"mirrored/{way}", 0.0, "nf4_rise") for way in _WAYS),
        *(Lower(f"pre-ln/{way}", f"mirrored/{way}", 0.0, "int8_rise") for way in _WAYS),
        *(Match(f"mirrored/{way}", f"pre-ln/{way}", 0.01, "int8-weights_rise") for way in _WAYS),
        Lower("pre-ln/muon", "pre-ln/adam", 0.0, "kurtosis"),
        Lower("mirrored/adam", "pre-ln/adam", 0.0, "kurtosis"),
        Lower("e-spa-skip/adam", "mirrored/adam", 0.0, "nf4_rise"),
    ),
    quantities=(
        "valid_loss",
        *(f"{name}_rise" for name in FORMATS),
        *(f"folded_{name}_rise" for name in ("int8", "int4-weights", "nf4", "fp8")),
        "kurtosis",
        "largest",
    ),
    note=(
        "Rises of the loss in nats, round to nearest, no calibration: `skipless eval RUN --quantise NAME`. int8 and "
        "fp8 round activations too (W8A8), -weights only weights (W8A16, W4A16); -tensor has one scale a tensor. "
        "Folded: after neighbouring matrices were merged, where that is possible. Kurtosis (a normal distribution "
        "has 3) and largest (over the root mean square) are of what enters the matrices, the worst block's."
    ),
    **_USES,
)

BLOCKS = PaperTable(
    "blocks",
    "Do all blocks work? One dropped, two swapped, read after each; 27 against 36",
    arms=(*_STUDIED, *(_shallower(way, kind) for way in _WAYS for kind in ("pre-ln", "mirrored"))),
    claims=(
        *(Lower(f"pre-ln/{way}", f"mirrored/{way}", 0.5, "drop_rise") for way in _WAYS),
        *(Lower(f"pre-ln/{way}", f"mirrored/{way}", 0.0, "swap_rise") for way in _WAYS),
        *(Lower(f"pre-ln/{way}", f"mirrored/{way}", 0.0, "half_way_rise") for way in _WAYS),
        *(
            SmallerGap((f"pre-ln/{way}", f"pre-ln-27/{way}"), (f"mirrored/{way}", f"mirrored-27/{way}"), "valid_loss")
            for way in _WAYS
        ),
    ),
    quantities=("valid_loss", "drop_rise", "drop_rise_least", "swap_rise", "swap_rise_least", "half_way_rise"),
    profiles=("readout_rise",),
    note=(
        "Rises of the loss in nats, the mean over blocks (pairs of neighbours), and that of the block it costs "
        "least. Half-way: the next token read after half of the blocks, by a linear map onto the last block's "
        "output, fitted by least squares, and the network's own unembedding. Networks of 27 blocks have the rates of "
        "36."
    ),
    **_USES,
)

BACKWARDS = PaperTable(
    "backwards",
    "Activations recomputed backwards instead of stored",
    arms=_STUDIED,
    claims=(
        *(Below(f"mirrored/{way}", "start_chain", 1e-3) for way in _WAYS),
        *(Below(f"mirrored/{way}", "end_alone", 1e-2) for way in _WAYS),
        *(Lower(f"mirrored/{way}", f"pre-ln/{way}", 0.0, "end_chain") for way in _WAYS),
    ),
    quantities=("valid_loss", "start_alone", "start_chain", "end_alone", "end_chain"),
    profiles=("end_chained",),
    note=(
        "Relative errors in float32, before and after training. Alone: the input of a block found from its own "
        "output, the worst block's; chain: the input of the first block found from the output of the last, through "
        "all of them. At most 20 sweeps a sub-block (inspection/inverse.py)."
    ),
    **_USES,
)

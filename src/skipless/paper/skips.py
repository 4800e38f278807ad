"""Tables on networks with weighted skips, and on C4. Claims were written before the first run at this size."""

from skipless.model.presets import REPEAT_RATE
from skipless.paper import numbers
from skipless.paper.claims import Learns, Lower, Match
from skipless.paper.experiments import Arm, PaperTable
from skipless.paper.numbers import Printed
from skipless.theory.feasibility import smallest_gamma_final
from skipless.theory.propagation import Skip
from skipless.theory.schemes import ExponentialSPA

_PRE_LN = Arm("pre-ln", "Pre-LN", "wikitext103/pre-ln", printed=numbers.train_loss("pre-ln"))

SKIPS = PaperTable(
    "skips",
    "Normalised skips, α = 0.98, with and without norms",
    "Fig. 3",
    (
        Arm("e-spa-skip", "E-SPA, normalised skips, no LN", "wikitext103/e-spa-skip"),
        _PRE_LN,
        Arm("skip", "standard attention, normalised skips, no LN", "wikitext103/skip"),
        Arm("e-spa-skip-ln", "E-SPA, normalised skips, LN", "wikitext103/e-spa-skip-ln"),
        Arm("skip-ln", "standard attention, normalised skips, LN", "wikitext103/skip-ln"),
    ),
    (
        Match("e-spa-skip", "pre-ln", 0.1),
        Match("e-spa-skip-ln", "pre-ln", 0.1),
        Match("skip-ln", "pre-ln", 0.1),
        Lower("e-spa-skip", "skip", 0.02),
        Lower("pre-ln", "skip"),
    ),
    note="The figure prints no numbers: with E-SPA no norm is needed to match Pre-LN, with standard attention one is.",
)


_SHAPE = (
    '32 blocks, and windows four times as long as in other tables, on the text that is named below. "Other loss" is on '
    "the text of --other-text, such as a sample of C4."
)


def _c4(name: str, label: str, core: bool = True) -> Arm:
    printed = (Printed("Table 2", "valid_perplexity", numbers.TABLE_2[name]),) if name in numbers.TABLE_2 else ()
    return Arm(name, label, f"c4/{name}", printed=printed, core=core)


C4 = PaperTable(
    "c4",
    "Networks without skips, beside Pre-LN, in C4's shape",
    "Fig. 4a and 13",
    (_c4("e-spa", "E-SPA"), _c4("pre-ln", "Pre-LN"), _c4("u-spa", "U-SPA"), _c4("v-skipinit", "V-SkipInit")),
    (
        Learns("e-spa"),
        Lower("e-spa", "u-spa", 0.05, "valid_loss"),
        Lower("e-spa", "v-skipinit", 0.05, "valid_loss"),
        Lower("pre-ln", "e-spa", 0.2, "valid_loss"),
        Lower("e-spa", "u-spa", 0.05),
        Lower("e-spa", "v-skipinit", 0.05),
        Lower("pre-ln", "e-spa", 0.2),
    ),
    quantities=("valid_perplexity", "train_loss", "other_loss"),
    note=_SHAPE,
)

C4_SKIPS = PaperTable(
    "c4-skips",
    "Kinds of skips in C4's shape, with and without norms",
    "Table 2, with the weights of Table 7",
    (
        _c4("e-spa-skip", "E-SPA, normalised, no LN"),
        _c4("pre-ln", "Pre-LN"),
        _c4("e-spa-skip-ln", "E-SPA, normalised, LN"),
        _c4("skip", "standard, normalised, no LN"),
        _c4("stable", "standard, stable, no LN"),
        _c4("skipinit", "standard, SkipInit, no LN"),
        _c4("skip-ln", "standard, normalised, LN", core=False),
        _c4("stable-ln", "standard, stable, LN", core=False),
        _c4("skipinit-ln", "standard, SkipInit, LN", core=False),
        _c4("u-spa-skip", "U-SPA, normalised, no LN", core=False),
        _c4("u-spa-skip-ln", "U-SPA, normalised, LN", core=False),
    ),
    (
        Match("e-spa-skip-ln", "pre-ln", 0.05, "valid_loss"),
        Match("e-spa-skip", "pre-ln", 0.1, "valid_loss"),
        Lower("e-spa-skip", "skip", 0.0, "valid_loss"),
        Lower("e-spa-skip", "stable", 0.0, "valid_loss"),
        Lower("pre-ln", "skipinit", 0.05, "valid_loss"),
        Lower("e-spa-skip", "u-spa-skip", 0.05, "valid_loss"),
        Lower("e-spa-skip-ln", "u-spa-skip-ln", 0.05, "valid_loss"),
        Lower("skipinit-ln", "skipinit", 0.1, "valid_loss"),
    ),
    quantities=("valid_perplexity", "train_loss", "other_loss"),
    note=_SHAPE,
)


def _stable(beta: float, norm: bool, core: bool = True) -> Arm:
    name, words = ("stable-ln", "LN") if norm else ("stable", "no LN")
    skip = Skip(1.0, beta)
    changes = {"attention_skip": skip, "mlp_skip": skip}
    return Arm(f"{name}-{beta:g}", f"β = {beta:g}, {words}", f"wikitext103/{name}", changes, core=core)


STABLE = PaperTable(
    "stable",
    "Stable skips (α = 1, β of order 1/√L)",
    "Fig. 11",
    (
        _PRE_LN,
        _stable(0.1, norm=False),
        _stable(0.2, norm=True),
        _stable(0.05, norm=False),
        _stable(0.15, norm=False, core=False),
        _stable(0.2, norm=False, core=False),
        _stable(0.05, norm=True, core=False),
        _stable(0.1, norm=True, core=False),
        _stable(0.15, norm=True, core=False),
    ),
    (
        Match("stable-ln-0.2", "pre-ln", 0.1),
        Lower("pre-ln", "stable-0.1"),
        Lower("stable-0.1", "stable-0.05"),
        Lower("stable-0.1", "stable-0.2"),
        Lower("stable-ln-0.2", "stable-ln-0.05"),
    ),
)


def _one_skip(name: str, label: str, attention: Skip, mlp: Skip, core: bool = True) -> Arm:
    """E-SPA with one of the two skips; as every run with skips it has plain GELU, and the lowest γ_L that fits."""
    gamma = next(g for g in (0.005, 0.2, 0.4, 0.6) if g >= smallest_gamma_final(attention.shortcut, 36))
    scheme = ExponentialSPA(gamma, REPEAT_RATE)
    changes = {"attention_skip": attention, "mlp_skip": mlp, "activation": "gelu", "scheme": scheme}
    return Arm(name, label, "wikitext103/e-spa", changes, core=core)


_NORMALISED = Skip.normalised
SEPARATE = PaperTable(
    "separate",
    "A skip around attention only, or around the MLP only",
    "Fig. 12",
    (
        Arm("neither", "no skip, GELU", "wikitext103/e-spa-gelu", printed=numbers.train_loss("e-spa-gelu")),
        _one_skip("mlp-0.97", "MLP α = 0.97", Skip(), _NORMALISED(0.97)),
        _one_skip("attention-0.98", "attention α = 0.98", _NORMALISED(0.98), Skip()),
        _PRE_LN,
        *(
            _one_skip(f"mlp-{alpha:g}", f"MLP α = {alpha:g}", Skip(), _NORMALISED(alpha), core=False)
            for alpha in (0.9, 0.98, 0.99)
        ),
        *(
            _one_skip(f"attention-{alpha:g}", f"attention α = {alpha:g}", _NORMALISED(alpha), Skip(), core=False)
            for alpha in (0.9, 0.97, 0.99)
        ),
    ),
    (
        Lower("mlp-0.97", "neither", 0.05),
        Lower("attention-0.98", "neither", 0.05),
        Lower("pre-ln", "mlp-0.97", 0.05),
        Lower("pre-ln", "attention-0.98", 0.05),
        Lower("mlp-0.97", "mlp-0.99"),
        Lower("mlp-0.9", "mlp-0.99"),
        Lower("attention-0.98", "attention-0.9"),
        Lower("attention-0.99", "attention-0.9"),
    ),
    note="The paper prints no numbers: MLPs like weights of 0.9 or 0.97, attention 0.98 or 0.99.",
)

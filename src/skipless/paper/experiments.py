"""A table of the paper as data: its arms, the sizes it can be run at, and the learning rates that arms are tried at.

Equal tuning: every arm gets the same number of rates, centred on the expected one, and another beyond the best while
that lies at the edge and is better than its neighbour, three at most.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from skipless.model.config import ModelConfig
from skipless.model.presets import preset
from skipless.paper.numbers import Printed
from skipless.paper.records import Facts
from skipless.theory.schemes import ExponentialSPA, UniformSPA
from skipless.training.config import DEPTH_POWER, DataConfig, Experiment, OptimizerConfig, Precision, TrainConfig

if TYPE_CHECKING:
    from skipless.paper.claims import Claim

# Names in logs. "pace" is the time of a step, with nothing beside it.
Measure = Literal["", "probes", "tasks", "uses", "pace"]
Optimizer = Literal["adam", "muon", "soap"]


@dataclass(frozen=True)
class PaperTable:
    """A table or figure of the paper, or a new one of the same kind: arms, and claims made before they were run.

    quantities: what is shown, losses or names of measures. measure: what runs at the best rate are asked for besides.
    step_ladder: multiples of the usual steps that an arm is trained for, until it reaches the loss that `baseline` has
    after the usual number. keeps_weights: of longer runs and of measured ones. kernels: nothing is trained, theory
    alone. embedding_rates: an odd number of neighbouring rates at which every arm's embedding is tried; a single one is
    not tuned, and () is the scale's own rate. side_by_side: its page has one table, of quantities by arms.
    profiles: further measures that its page shows block by block. scales: the sizes it can be run at, by name.
    """

    name: str
    title: str
    reference: str
    arms: "tuple[Arm, ...]" = ()
    claims: "tuple[Claim, ...]" = ()
    quantities: tuple[str, ...] = ("train_loss",)
    measure: Measure = ""
    step_ladder: tuple[float, ...] = ()
    baseline: str = ""
    note: str = ""
    keeps_weights: bool = False
    kernels: bool = False
    side_by_side: bool = False
    profiles: tuple[str, ...] = ()
    embedding_rates: tuple[float, ...] = ()
    scales: "Mapping[str, Scale]" = field(default_factory=lambda: SCALES, hash=False)

    def __post_init__(self):
        names = [arm.name for arm in self.arms]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"table {self.name!r} has two arms {doubled[0]!r}; names must differ")
        leaders = [arm.name for arm in self.arms if not arm.follows]
        for arm in self.arms:
            if arm.follows and arm.follows not in leaders:
                raise ValueError(f"arm {arm.name!r} follows {arm.follows!r}; it must be one of {', '.join(leaders)}")
        if (start := self.embedding_start) is not None:
            nearest = grid(start, len(self.embedding_rates) | 1)
            if self.embedding_rates != nearest:
                raise ValueError(
                    f"embedding_rates of table {self.name!r} are {self.embedding_rates}; they must be an odd number of "
                    f"neighbours among the rates {{1, 2, 3, 5}}·10ⁿ, such as {nearest}"
                )

    @property
    def embedding_start(self) -> float | None:
        """The embedding's rate while the others are tuned: the middle of its rates; None is the scale's own."""
        return self.embedding_rates[len(self.embedding_rates) // 2] if self.embedding_rates else None

    @property
    def on_images(self) -> bool:
        """Whether its networks are trained on images, and not on text."""
        return any(arm.corpus == "images" for arm in self.arms)

    def chosen(self, scale: "Scale", names: tuple[str, ...] = ()) -> "tuple[Arm, ...]":
        """The arms to run: core ones, all of them at the paper's scale, or those named; "all" names every one."""
        if not names:
            return self.arms if scale.name == "paper" else tuple(arm for arm in self.arms if arm.core)
        return self.arms if "all" in names else tuple(arm for arm in self.arms if arm.name in names)

    def arm(self, name: str) -> "Arm":
        return next(arm for arm in self.arms if arm.name == name)


_TIMED_STEPS = 100


@dataclass(frozen=True)
class Arm:
    """A preset with some fields changed, trained by one optimiser: one row of a table.

    printed: what the paper says of it. step_multiples: multiples of the usual steps that it is trained for; its rate is
    tuned at 1. precision and seeds (at the best rate): None is the scale's own. core: whether it is run at every scale;
    other arms are run at the paper's, and with --arms. gain_rate: of the gains of SkipInit and Value-SkipInit; None is
    the optimiser's own. rate: its only rate, if it is not tuned here; middle: that of its grid, where it is not the
    usual one of its kind. follows: another arm of its table, whose best rates it takes instead of tuning its own; the
    rate by the law over depth with this power (by_depth). steps_power: of the law over steps (by_steps), by which all
    rates of its longer runs fall; 0 leaves them as they were tuned.
    """

    name: str
    label: str
    preset: str
    changes: dict[str, Any] = field(default_factory=dict, hash=False)
    optimizer: Optimizer = "adam"
    role_rates: dict[str, float] = field(default_factory=dict, hash=False)
    keep_orthogonal: tuple[str, ...] = ()
    gain_rate: float | None = None
    printed: tuple[Printed, ...] = ()
    step_multiples: tuple[float, ...] = (1.0,)
    precision: Precision | None = None
    core: bool = True
    seeds: int | None = None
    rate: float | None = None
    follows: str = ""
    depth_power: float = DEPTH_POWER
    steps_power: float = 0.0
    middle: float | None = None

    @property
    def corpus(self) -> str:
        """Which of the paper's two corpora it is trained on, "wikitext103" or "c4"; or "images"."""
        group = self.preset.partition("/")[0]
        return {"c4": "c4", "vit": "images"}.get(group, "wikitext103")

    def model(self, scale: "Scale", text: Facts) -> ModelConfig:
        """The network at this scale, for this text."""
        return _model(self, scale, text)

    def outline(self, scale: "Scale", text: Facts) -> ModelConfig:
        """The network without its activation, for which nothing need be solved: enough for sizes and costs."""
        plain = _plain(self)
        return plain.replace(**{**scale.sizes(plain, self.corpus), **text.sizes(plain)})

    def multiples_at(self, scale: "Scale") -> tuple[float, ...]:
        """The step multiples that are run at this scale."""
        return tuple(multiple for multiple in self.step_multiples if multiple <= scale.longest)

    def rates(self, scale: "Scale", text: Facts, count: int) -> tuple[float, ...]:
        """`count` rates around the one expected for its kind of network, or its own single one."""
        if self.rate is not None:
            return (self.rate,)
        middle = self.middle or expected(self.model(scale, text), self.optimizer)
        if factor := scale.faster.get(self.optimizer):
            middle = near(factor * middle)
        return grid(middle, count)

    def experiment(
        self,
        scale: "Scale",
        text: Facts,
        rate: float,
        seed: int = 0,
        multiple: float = 1.0,
        measure: Measure = "",
        embedding_rate: float | None = None,
    ) -> Experiment:
        """Everything a run depends on. measure: what is wanted besides losses. embedding_rate: None is the scale's."""
        train, model = scale.schedule(self.corpus, seed, multiple), self.model(scale, text)
        train = dataclasses.replace(train, precision=self.precision or train.precision)
        if model.images is not None:
            train = dataclasses.replace(train, length=model.length)
        if measure == "probes":
            train = dataclasses.replace(train, probe_at=(0, train.steps // 2, train.steps))
        if measure == "pace":
            steps = min(_TIMED_STEPS, train.steps)
            every = max(steps // 5, 1)
            train = dataclasses.replace(train, steps=steps, warmup=steps // 2, log_every=every, eval_every=0)
        return Experiment(
            name=f"{self.name.replace('/', '-')}-{rate:g}-{seed}",
            model=model,
            data=DataConfig(corpus=text.name, folder=text.folder),
            optimizer=OptimizerConfig(
                self.optimizer,
                rate,
                scale.embedding(self.corpus) if embedding_rate is None else embedding_rate,
                role_rates=dict(self.role_rates),
                keep_orthogonal=self.keep_orthogonal,
                gain_rate=self.gain_rate,
            ),
            train=train,
        )


@functools.lru_cache(maxsize=1024)
def _model(arm: Arm, scale: "Scale", text: Facts) -> ModelConfig:
    plain = _plain(arm)
    changes = {**arm.changes, **scale.sizes(plain, arm.corpus), **text.sizes(plain)}
    if isinstance(plain.scheme, ExponentialSPA | UniformSPA):
        changes["scheme"] = dataclasses.replace(plain.scheme, repeat_rate=text.repeat_rate)
    return preset(arm.preset, **changes)


def _plain(arm: Arm) -> ModelConfig:
    """The arm's preset at the paper's size, without an activation to solve and the mirrored MLPs that need one."""
    kept = {name: value for name, value in arm.changes.items() if name not in ("activation", "mlp_init")}
    return preset(arm.preset, activation="identity", **kept)


PAPER_WIDTH = 1024


@dataclass(frozen=True)
class Scale:
    """A size that tables are run at: what all arms share. Depth is the paper's at every one: it is what it is about.

    width is that of networks which are 1024 wide in the paper; 0 is the paper's own scale, App. H. rates and seeds are
    the command's defaults. longest: the largest step multiple that is run. judged: whether claims are meant for it.
    faster: by optimiser, how many times the expected rates its grids are centred on. training: further fields of
    TrainConfig.
    """

    name: str
    steps: int = 0
    width: int = 0
    head_width: int = 0
    length: int = 0
    batch_size: int = 0
    embedding_rate: float = 1e-3
    rates: int = 3
    seeds: int = 2
    longest: float = math.inf
    judged: bool = True
    faster: dict[str, float] = field(default_factory=dict, hash=False)
    training: dict[str, Any] = field(default_factory=dict, hash=False)

    def sizes(self, model: ModelConfig, corpus: str) -> dict[str, Any]:
        """Changes to a preset that bring it to this scale."""
        if not self.width:
            return {}
        width = self.width * model.width // PAPER_WIDTH
        heads = max(width // self.head_width, 1)
        sizes = {"width": width, "heads": heads, "length": self.window(corpus)[0]}
        if model.readers:
            sizes["readers"] = max(model.readers * heads // model.heads, 1)
        hidden = model.hidden or 0
        return sizes if hidden in (0, 4 * model.width) else {**sizes, "hidden": hidden * width // model.width}

    def window(self, corpus: str) -> tuple[int, int]:
        """Length and rows of a batch. C4's is four times as long, as in App. H, with as many tokens in all."""
        if not self.width:
            return (2048, 8) if corpus == "c4" else (512, 16)
        times = 4 if corpus == "c4" else 1
        return times * self.length, max(self.batch_size // times, 1)

    def embedding(self, corpus: str) -> float:
        """The embedding's rate, one for all networks: App. H's, or the one of this scale."""
        return self.embedding_rate if self.width else 5e-4 if corpus == "c4" else 2e-4

    def schedule(self, corpus: str, seed: int = 0, multiple: float = 1.0) -> TrainConfig:
        """The training of an arm, `multiple` times as long as usual. Warm-up is a tenth, or App. H's 4,000 steps.

        A run of the usual length has no checkpoints, since only its log is wanted. Stopped early it saves one.
        """
        length, batch_size = self.window(corpus)
        if not self.width:
            steps = 50_000 if corpus == "c4" else 100_000
            return TrainConfig(round(multiple * steps), batch_size, length, seed=seed, log_every=100, eval_every=5_000)
        steps = round(multiple * self.steps)
        usual: dict[str, Any] = {
            "warmup": max(steps // 10, 1),
            "eval_every": steps,
            "checkpoint_every": self.steps if multiple >= 2.0 else 0,
            "keep": 1,
        }
        return TrainConfig(steps, batch_size, length, seed=seed, **usual | self.training)


ON_A_CPU = {"precision": "fp32", "compile": False, "impl": "sdpa", "log_every": 1}
ON_A_GPU = {"precision": "bf16", "compile": True, "impl": "auto", "log_every": 25}
SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            "tiny",
            3,
            16,
            8,
            16,
            2,
            rates=1,
            seeds=1,
            longest=2.0,
            judged=False,
            training={**ON_A_CPU, "ema": 0.5, "eval_tokens": 32},
        ),
        # Narrow networks over few steps take larger rates. Muon's factor is from runs of 200 steps, before any run of a
        # table. Adam's was 8, from such runs too, until `longer` and `activations` had run: networks that sat at the
        # unigram entropy at all three rates gave no hint that lower ones would learn.
        Scale(
            "cpu",
            500,
            64,
            16,
            128,
            4,
            embedding_rate=5e-3,
            longest=5.0,
            faster={"adam": 4.0, "muon": 2.0, "soap": 4.0},
            training={**ON_A_CPU, "log_every": 10, "ema": 0.02, "eval_tokens": 65_536},
        ),
        Scale(
            "small", 1500, 256, 64, 256, 32, longest=10.0, training={**ON_A_GPU, "ema": 0.01, "eval_tokens": 131_072}
        ),
        Scale(
            "medium",
            2000,
            512,
            64,
            512,
            16,
            seeds=1,
            longest=8.0,
            training={**ON_A_GPU, "log_every": 50, "ema": 0.01, "eval_tokens": 262_144},
        ),
        Scale("paper", rates=5, seeds=3),
    )
}


_MOST_RUNS = 1000  # of one arm


def check_runs(name: str, number: int) -> None:
    """Refuse a number of rates or seeds that no arm can be run at."""
    if not 1 <= number <= _MOST_RUNS:
        raise ValueError(f"--{name} is {number}; it must lie in 1 … {_MOST_RUNS}")


@dataclass(frozen=True)
class Setting:
    """What holds for all runs of a call: scale, text, and how many rates and seeds each arm gets.

    own_seeds: whether arms that ask for a number of seeds of their own get it.
    """

    scale: Scale
    text: Facts
    rates: int
    seeds: int
    own_seeds: bool = False

    @classmethod
    def of(cls, scale: Scale, text: Facts, rates: int | None = None, seeds: int | None = None) -> "Setting":
        """The scale's own numbers where none are given; arms' own seeds too, where runs are long enough to judge."""
        counts = {"rates": scale.rates if rates is None else rates, "seeds": scale.seeds if seeds is None else seeds}
        for name, count in counts.items():
            check_runs(name, count)
        return cls(scale, text, **counts, own_seeds=seeds is None and scale.judged)

    def seeds_of(self, arm: Arm) -> int:
        """How many seeds the arm gets at its best rate."""
        return arm.seeds if self.own_seeds and arm.seeds is not None else self.seeds


MANTISSAS = (1, 2, 3, 5)
MOST_BEYOND = 3  # rates tried beyond the first ones
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


def by_steps(rate: float, multiple: float, power: float) -> float:
    """The rate of a run of `multiple` times the steps at which `rate` is best, to three digits: ∝ steps^−power."""
    return float(f"{rate * multiple**-power:.3g}") if power else rate


def grid(middle: float, count: int) -> tuple[float, ...]:
    """`count` neighbours among the rates {1, 2, 3, 5}·10ⁿ around one, lowest first; an even count leans upwards."""
    if count < 1:
        raise ValueError(f"--rates is {count}; every arm needs at least 1")
    at = _index(middle)
    return tuple(_rate(index) for index in range(at - (count - 1) // 2, at + count // 2 + 1))


def beyond(losses: Mapping[float, float]) -> float | None:
    """The next rate beyond the best one, if that is the lowest or highest of several; else None.

    None also where its neighbour is as good: the loss no longer depends on the rate. Diverged runs have an infinite
    loss; where all have diverged, the next lower rate.
    """
    if len(losses) < 2:
        return None
    tried = sorted(losses)
    if all(map(math.isinf, losses.values())):
        return _rate(_index(tried[0]) - 1)
    best = min(tried, key=lambda rate: (losses[rate], rate))
    for edge, neighbour, step in ((tried[0], tried[1], -1), (tried[-1], tried[-2], 1)):
        if best == edge and losses[neighbour] - losses[best] > SAME:
            return _rate(_index(edge) + step)
    return None


def near(rate: float) -> float:
    """The nearest of the rates {1, 2, 3, 5}·10ⁿ, by ratio."""
    exponent = math.floor(math.log10(rate) + 1e-9)
    return min((_rate(4 * exponent + n) for n in range(5)), key=lambda other: abs(math.log(other / rate)))


def _index(rate: float) -> int:
    """The rate's number among the rates {1, 2, 3, 5}·10ⁿ, from 0 for 1."""
    exponent = math.floor(math.log10(rate) + 1e-9)
    mantissa = round(rate / 10.0**exponent, 6)
    if mantissa not in MANTISSAS:
        raise ValueError(f"the rate {rate:g} is not of the form {{1, 2, 3, 5}}·10ⁿ; the nearest is {near(rate):g}")
    return 4 * exponent + MANTISSAS.index(mantissa)


def _rate(index: int) -> float:
    exponent, digit = divmod(index, len(MANTISSAS))
    return float(f"{MANTISSAS[digit]}e{exponent}")

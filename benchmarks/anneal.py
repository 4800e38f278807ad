"""The gradual route: do skips that fall to none during training end better than none from the start?

    python benchmarks/anneal.py --out results

Networks of 36 blocks on the bytes of Python's standard library, one optimiser, the same rates and batches for all:
E-SPA without skips from the start, with normalised skips kept, with skips annealed away over the first part of the
steps, and a network that was first trained with skips and then loses them over as many steps again. Writes
anneal-cpu.jsonl (each run as it ends; runs that are there already are kept), anneal.md and anneal.png.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from skipless.data.loader import TokenLoader
from skipless.data.prepare import Preparation, prepare
from skipless.data.store import TokenStore
from skipless.data.training import Bytes
from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer
from skipless.theory.propagation import Skip
from skipless.theory.schemes import ExponentialSPA
from skipless.theory.shaping import dks
from skipless.train.anneal import SkipAnneal, SkipCourse
from skipless.train.optim import OptimizerConfig, build_optimizer, clip_gradients, set_rates, warmup_cosine

LENGTH, BATCH = 64, 16
ALPHA, GAMMA = 0.98, 0.2  # 36 blocks: γ_L ≥ .133 for α = .98
ARMS = ("vanilla", "skips", "annealed", "trained, then annealed")


@dataclass(frozen=True)
class Plan:
    """One run: which network, at which rate, from which seed, for how many steps, and when its skips fall."""

    arm: str
    rate: float
    seed: int
    steps: int
    fall: tuple[int, int] | None = None

    @property
    def key(self) -> tuple:
        """What tells runs apart in the log."""
        return self.arm, self.rate, self.seed, self.steps


def plans(options: argparse.Namespace) -> list[Plan]:
    """Every run at every rate, in an order in which those that start from others come after them."""
    steps, end = options.steps, round(options.fall * options.steps)
    courses = {arm: None if arm in ("vanilla", "skips") else (0, end) for arm in ARMS}
    return [
        Plan(arm, rate, seed, steps, fall)
        for arm, fall in courses.items()
        for rate in options.rates
        for seed in options.seeds
    ]


def best_rate(records: list[dict[str, Any]], arm: str) -> float:
    """The rate of the arm's lowest mean validation loss; a run that ended in NaN counts as infinite."""
    found: dict[float, list[float]] = {}
    for record in records:
        if record["arm"] == arm:
            found.setdefault(record["rate"], []).append(record["valid"])
    return min(found, key=lambda rate: sum(v if math.isfinite(v) else math.inf for v in found[rate]))


def network(plan: Plan, repeat_rate: float, depth: int, width: int) -> Transformer:
    """E-SPA with exact calibration and DKS for no skips, so that arms differ in their skips alone."""
    torch.manual_seed(plan.seed)
    skip = Skip() if plan.arm.startswith("vanilla") else Skip.normalised(ALPHA)
    return Transformer(
        ModelConfig(
            vocab_size=256,
            width=width,
            depth=depth,
            heads=4,
            length=LENGTH,
            scheme=ExponentialSPA(GAMMA, round(repeat_rate, 3), "exact"),
            attention_skip=skip,
            mlp_skip=skip,
            activation=dks("gelu", depth),
        ),
        impl="sdpa",
    )


def train(plan: Plan, model: Transformer, loader: TokenLoader, first: int) -> dict[str, list[float]]:
    """Losses and α by step; batches are numbered from `first` on."""
    config = OptimizerConfig("muon", rate=plan.rate, embedding_rate=2e-3)
    optimizer = build_optimizer(model, config)
    anneal: Callable[[int], float] = lambda step: model.config.attention_skip.shortcut  # noqa: E731
    if plan.fall is not None:
        anneal = SkipAnneal(model, SkipCourse(ALPHA, *plan.fall), every=2)
    losses, alphas = [], []
    for step in range(plan.steps):
        alphas.append(anneal(step))
        batch = loader.batch(first + step)
        set_rates(optimizer, warmup_cosine(step + 1, plan.steps, plan.steps // 10))
        loss = torch.nn.functional.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        clip_gradients(model.parameters(), config.clip)
        optimizer.step()
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            break
    return {"loss": losses, "alpha": alphas}


@torch.no_grad()
def validate(model: Transformer, store: TokenStore, windows: int = 128) -> float:
    """Mean loss over the first windows of the validation text."""
    tokens = torch.from_numpy(store.read(0, windows * LENGTH + 1).astype("int64"))
    inputs, targets = tokens[:-1].reshape(-1, LENGTH), tokens[1:].reshape(-1, LENGTH)
    pairs = zip(inputs.split(32), targets.split(32), strict=True)
    losses = [torch.nn.functional.cross_entropy(model(i).flatten(0, 1), t.flatten()) for i, t in pairs]
    return float(torch.stack(losses).mean())


class Runs:
    """The runs of a log, and those added to it. Runs with skips leave their weights for others to start from."""

    def __init__(self, log: Path, data: Path, options: argparse.Namespace):
        self.log, self.options = log, options
        self.store, self.valid = TokenStore(data), TokenStore(data, "valid")
        self.weights: dict[tuple[float, int], dict] = {}
        lines = log.read_text().splitlines() if log.is_file() else []
        self.done = {(r["arm"], r["rate"], r["seed"], r["steps"]): r for r in map(json.loads, lines)}

    def get(self, plan: Plan) -> dict[str, Any]:
        """The run's record, from the log or by running it."""
        if plan.key not in self.done:
            self.done[plan.key] = record = self._run(plan)
            with self.log.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(
                f"{plan.arm}, rate {plan.rate:g}, seed {plan.seed}: {record['valid']:.4f} ({record['seconds']} s)",
                flush=True,
            )
        return self.done[plan.key]

    def _run(self, plan: Plan) -> dict[str, Any]:
        model = network(plan, self.store.repeat_rate or 0.0, self.options.depth, self.options.width)
        loader, began, first = TokenLoader(self.store, LENGTH, BATCH, seed=plan.seed), time.process_time(), 0
        before = None
        if plan.arm == "trained, then annealed":
            model.load_state_dict(self._trained(plan))
            first, before = plan.steps, validate(model, self.valid)
        course = train(plan, model, loader, first)
        if plan.arm == "skips":
            self.weights[plan.rate, plan.seed] = model.state_dict()
        record = {**vars(plan), "valid_before": before, "valid": validate(model, self.valid)}
        return (
            record | {"seconds": round(time.process_time() - began, 1), "torch": torch.__version__} | _rounded(course)
        )

    def _trained(self, plan: Plan) -> dict:
        """Weights of the run with skips at the same rate and seed, run again if its record is all there is."""
        if (plan.rate, plan.seed) not in self.weights:
            self._run(Plan("skips", plan.rate, plan.seed, plan.steps))
        return self.weights[plan.rate, plan.seed]


def _rounded(course: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: [round(value, 4) for value in values] for name, values in course.items()}


def main() -> None:
    """Run what is missing, then write the table and the figure."""
    from anneal_report import write

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rates", type=float, nargs="*", default=[2e-3, 5e-3])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--fall", type=float, default=0.6, help="share of the steps over which skips fall")
    parser.add_argument("--depth", type=int, default=36)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as data:
        prepare(Preparation("stdlib", Bytes()), data)
        runs = Runs(options.out / "anneal-cpu.jsonl", Path(data), options)
        records = [runs.get(plan) for plan in plans(options)]
        rate = best_rate(records, "vanilla")
        records += [runs.get(Plan("vanilla", rate, seed, 2 * options.steps)) for seed in options.seeds]
    write(records, options.out, options.steps)


if __name__ == "__main__":
    main()

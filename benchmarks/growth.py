"""How the time of a training step grows with depth, and with length at a constant number of tokens.

    python benchmarks/growth.py --out results/growth.jsonl --plot results/growth.png
    python benchmarks/growth.py --device cpu --depths 6 8 10 --lengths 16 32 64 --width 32 --tokens 64 --steps 1

Both should be straight lines: a block costs what a block costs, and with constant tokens only attention depends on the
length T, by an amount ∝ T. A line a + b·x is fitted to the times of each arm, and the largest distance from it is
printed in percent of the time. The whole step is replayed from a CUDA graph where there is a GPU.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from step_arms import OURS, THEIRS, VOCABULARY, Run, Shape, compiled, network
from step_timing import Budget, Results, measure, release, surroundings

STRAIGHT = 0.05  # of the time, the largest distance from the line that still counts as one


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=(*OURS, *THEIRS), default=("e-spa", "pre-ln"))
    parser.add_argument("--depths", nargs="*", type=int, default=(9, 18, 36, 72, 144), help="at 16 x 512 tokens")
    lengths = (512, 1024, 2048, 4096, 8192, 16_384, 32_768)
    parser.add_argument("--lengths", nargs="*", type=int, default=lengths, help="at --tokens tokens a step")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=36, help="of the networks whose length grows")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--impl", default="auto", help="attention of this library's networks")
    parser.add_argument("--hf-compile", default="whole", choices=("whole", "layers"))
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on a GPU")
    parser.add_argument("--budget-seconds", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path, help="a JSONL file to append to")
    parser.add_argument("--plot", type=Path, help="a picture of the times and the lines")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def shapes(options: argparse.Namespace) -> Iterator[tuple[str, int, Shape]]:
    """(what grows, how far, shape), small ones first."""
    small = options.device == "cpu"
    vocabulary, batch, length = (64, 2, 16) if small else (VOCABULARY, 16, 512)
    for depth in options.depths:
        yield "depth", depth, Shape(f"depth-{depth}", depth, options.width, batch, length, vocabulary)
    depth = min(options.depth, 6) if small else options.depth
    for length in options.lengths:
        if options.tokens % length:
            raise ValueError(f"--tokens {options.tokens} is not a multiple of length {length}")
        batch = options.tokens // length
        yield "length", length, Shape(f"length-{length}", depth, options.width, batch, length, vocabulary)


def line(points: list[tuple[float, float]]) -> tuple[float, float, float]:
    """(a, b, worst): the line a + b·x nearest to the points by relative distance, and the largest such distance."""
    x, y = np.array(points, dtype=float).T
    terms = np.stack([np.ones_like(x), x], axis=1)
    (a, b), *_ = np.linalg.lstsq(terms / y[:, None], np.ones_like(y), rcond=None)
    return float(a), float(b), float(np.abs((a + b * x) / y - 1.0).max())


def curves(rows: list[dict]) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """The measured (x, milliseconds) of every arm and what grows."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        found.setdefault((row["grows"], row["arm"]), []).append((row["to"], row["ms"]))
    return found


def report(rows: list[dict]) -> str:
    """A line of text per curve: its times, its fit, and whether it is straight."""
    lines = []
    for (grows, arm), points in curves(rows).items():
        times = "  ".join(f"{x:g}: {y:.2f}" for x, y in points)
        lines.append(f"{arm} over {grows}, ms   {times}")
        if len(points) > 2:
            a, b, worst = line(points)
            verdict = "straight" if worst <= STRAIGHT else "not straight"
            lines.append(f"    {a:.3f} + {b:.5f}·{grows} ms, off by at most {worst:.1%}: {verdict}")
    return "\n".join(lines)


def plot(rows: list[dict], path: Path) -> None:
    """Times and fitted lines, depth on the left and length on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for (grows, arm), points in curves(rows).items():
        axis = axes[int(grows == "length")]
        x, y = np.array(points).T
        (drawn,) = axis.plot(x, y, "o", label=arm)
        if len(points) > 2:
            a, b, _ = line(points)
            axis.plot(x, a + b * x, color=drawn.get_color(), linewidth=1)
    for axis, label in zip(axes, ("blocks", "length at a constant number of tokens"), strict=True):
        axis.set(xlabel=label, ylabel="ms per step", ylim=(0, None))
        axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure every arm at every size, as far as the budget goes; then fit, print and draw."""
    options = arguments()
    run, budget, results = Run.of(options), Budget(options.budget_seconds), Results(options.out)
    results.note(surroundings(options))
    mode = "graph" if run.device.type == "cuda" else "eager"
    for grows, size, shape in shapes(options):
        for arm in options.arms:
            if budget.over():
                print(f"the budget is spent; {arm} at {shape.name} is not measured")
                continue
            common = {"grows": grows, "to": size, "arm": arm, "shape": str(shape), "impl": run.impl}
            try:
                model = compiled(network(arm, shape, run), run)
                for used, values in measure(model, shape, run, (mode,), options.steps):
                    results.add({**common, "mode": used, **values})
            except (RuntimeError, ValueError, ImportError) as error:
                results.note({**common, "failed": str(error)})
            model = None
            release()
    print(report(results.rows))
    if options.plot is not None and results.rows:
        plot(results.rows, options.plot)


if __name__ == "__main__":
    main()

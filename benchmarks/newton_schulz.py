"""Muon's Newton–Schulz in Gram matrices beside direct steps, in one run on one GPU; under a minute.

    python benchmarks/newton_schulz.py --out results/newton-schulz.jsonl
    python benchmarks/newton_schulz.py --device cpu --sizes 2x64x256               (only that it runs)

The matrices of 36-block networks of widths 1024 and 512, in bfloat16. First correctness: on matrices that are easy and
hard, each way is compared with direct steps in float64; where Gram matrices are further off than direct steps, there
is no speed. Then both are timed in turns, by replaying CUDA graphs. "of_direct" is a way's time over that of direct
steps; "whole" has torch's products instead of halves of symmetric ones. TFLOP/s count the products that a way computes,
each as a whole one.
"""

import argparse
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from step_timing import MismatchError, Results, release, surroundings
from symmetric import arm_of, size_of, timed
from torch import Tensor

from skipless.training.optim.muon import gram_newton_schulz, newton_schulz

SIZES = ("72x1024x4096", "144x1024x1024", "72x512x2048")
WAYS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "direct": (newton_schulz, "symmetric"),
    "gram": (gram_newton_schulz, "symmetric"),
    "direct, whole": (newton_schulz, "plain"),
    "gram, whole": (gram_newton_schulz, "plain"),
}
ROUNDS = 2
COLUMNS = ("size", "way", "ms", "of_direct", "tflops", "error", "of_direct_error")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=size_of, default=SIZES, help="matrices x rows x columns")
    parser.add_argument("--out", type=Path, help="a JSONL file to append to")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def hard(rows: int, cols: int, device: str) -> dict[str, Tensor]:
    """Matrices (1, rows, cols) that differ in their singular values, in float32."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, *shape, device=device, generator=generator)

    short = min(rows, cols)
    left, right = (torch.linalg.qr(normal(side, short))[0] for side in (rows, cols))
    index = torch.arange(short, device=device)
    return {
        "gaussian": normal(rows, cols),
        "condition 1e4": left * torch.pow(10.0, -4.0 * index / max(1, short - 1)) @ right.mT,
        "power law": left / (1.0 + index) @ right.mT,
        "rank 8": normal(rows, 8) @ normal(8, cols),
        "one large direction": 0.5 * math.sqrt(short) * normal(rows, 1) @ normal(1, cols) + normal(rows, cols),
        "zero": torch.zeros(1, rows, cols, device=device),
    }


def check(way: str, matrices: dict[str, Tensor]) -> tuple[float, float]:
    """The way's worst relative error against float64, and its worst error over that of direct steps.

    MismatchError where a way other than direct steps is further off than these on any matrix: by more than a hundredth,
    as nearly square matrices go the direct way.
    """
    worst, most = 0.0, 0.0
    function, products = WAYS[way]
    for name, matrix in matrices.items():
        x = matrix.bfloat16()
        truth = newton_schulz(x.double())
        with arm_of(products):
            found = function(x).double()
            direct = newton_schulz(x).double()
        if name == "zero":
            if found.any():
                raise MismatchError(f"{way}: a zero matrix comes out as {float(found.norm()):.3g}; no speed")
            continue
        far, near = (float((each - truth).norm() / truth.norm()) for each in (found, direct))
        worst, most = max(worst, far), max(most, far / near)
        if not far <= 1.01 * near:
            times = f"{far / near:.3g} times as far from float64 as direct steps"
            raise MismatchError(f"{way}: {times} on the matrix {name!r}; no speed")
    return worst, most


def flops(way: str, count: int, rows: int, cols: int) -> float:
    """Of whole products in five steps; Gram matrices serve from 1.5 times as many columns as rows on."""
    short, long = sorted((rows, cols))
    square, wide = 2.0 * count * short**3, 2.0 * count * short**2 * long
    if way.startswith("gram") and long >= 1.5 * short:
        return 14 * square + 4 * wide
    return 5 * (square + 2 * wide)


@torch.no_grad()
def main() -> None:
    """Check, then measure all ways of a size in turns, and print them."""
    options = arguments()
    on_gpu = options.device.startswith("cuda")
    results = Results(options.out)
    results.note(surroundings(options))
    for size in options.sizes:
        count, rows, cols = map(int, size.split("x"))
        matrices = hard(rows, cols, options.device)
        errors = {way: check(way, matrices) for way in WAYS}
        generator = torch.Generator(options.device).manual_seed(0)
        x = torch.randn((count, rows, cols), device=options.device, dtype=torch.bfloat16, generator=generator)
        spent: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(ROUNDS):
            for way, (function, products) in WAYS.items():
                with arm_of(products):
                    spent[way].append(timed(lambda function=function, x=x: function(x), on_gpu))
        times = {way: statistics.median(each) for way, each in spent.items()}
        for way, ms in times.items():
            row = {"size": size, "way": way, "ms": ms, "of_direct": ms / times["direct"]}
            row |= {"tflops": flops(way, count, rows, cols) / ms / 1e9, "rounds_ms": spent[way]}
            results.add(row | {"error": errors[way][0], "of_direct_error": errors[way][1]})
        release()
    print("".join(f"{column:>17}" for column in COLUMNS))
    for row in results.rows:
        print("".join(f"{v:>17.4f}" if isinstance(v, float) else f"{v:>17}" for v in (row[c] for c in COLUMNS)))


if __name__ == "__main__":
    main()

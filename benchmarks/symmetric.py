"""Muon's Newton–Schulz with symmetric products computed by half beside torch's whole ones, in one run on one GPU.

    python benchmarks/symmetric.py --out results/symmetric.jsonl
    python benchmarks/symmetric.py --launches 128,64,8,3 128,64,4,3 128,64,8,4     (other tiles of the kernel)
    python benchmarks/symmetric.py --device cpu --sizes 2x64x128                   (only that it runs: no kernel there)

The matrices of a 36-block network of width 1024, in bfloat16. Every arm is first compared with float64 on two matrices:
one that is more than twice as far off as torch's own products gets no speed. Then each is timed by replaying a CUDA
graph, and beside it the two symmetric products alone. TFLOP/s count whole products for all arms; "ratio" is torch's
time over the arm's.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from attention import milliseconds
from step_timing import MismatchError, Results, release, surroundings
from torch import Tensor

from skipless.training.optim import muon
from skipless.training.optim.muon import COEFFICIENTS, newton_schulz

SIZES = ("144x1024x1024", "72x1024x4096")
STEPS, CHECKED, ALLOWED = 5, 2, 2.0
COLUMNS = ("task", "size", "arm", "ms", "tflops", "ratio", "error")
Task = Callable[[Tensor], Tensor]


def size_of(text: str) -> str:
    """The text, if it is three positive numbers."""
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not matrices x rows x columns, such as {SIZES[0]}")
    return text


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=size_of, default=SIZES, help="matrices x rows x columns")
    parser.add_argument("--launches", nargs="+", default=[], help="block,depth,warps,stages; default: the kernel's own")
    parser.add_argument("--out", type=Path, help="a JSONL file to append to")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


@contextmanager
def arm_of(name: str) -> Iterator[None]:
    """Within: torch's products ("plain"), those that the library chooses ("symmetric"), or the kernel by a launch."""
    if name == "plain":
        with patch.object(muon, "gram_supports", lambda x: False):
            yield
    elif name == "symmetric":
        yield
    else:
        from skipless.ops.gpu import gram

        launch = gram.Launch(*map(int, name.split(",")))
        with patch.object(gram, "LAUNCH", launch):
            yield


def tasks(x: Tensor) -> Iterator[tuple[str, Task, Tensor, float]]:
    """(name, what is timed, its input, FLOPs), on the matrices x."""
    _, b, c = COEFFICIENTS
    count, rows, columns = x.shape
    short, square = min(rows, columns), 2.0 * count * rows**3
    flops = STEPS * 2.0 * count * short * (short**2 + 2 * rows * columns)
    yield "newton_schulz", lambda x: newton_schulz(x, STEPS), x, flops
    yield "gram", muon.gram, x, 2.0 * count * rows**2 * columns
    with arm_of("plain"):
        g = muon.gram(x)
    yield "quadratic", lambda g: muon.quadratic(g, b, c), g, square


def check(task: Task, x: Tensor, arm: str) -> float:
    """The arm's error over that of torch's products, both against float64, in norm. MismatchError above 2."""
    few = x[:CHECKED]
    truth = task(few.double())
    with arm_of(arm):
        ours = task(few)
    with arm_of("plain"):
        theirs = task(few)
    far, near = (float((each.double() - truth).norm()) for each in (ours, theirs))
    if not far <= ALLOWED * near:
        raise MismatchError(f"{arm}: {far / near:.3g} times as far from float64 as torch's products; no speed")
    return far / near


def timed(call: Callable[[], object], on_gpu: bool) -> float:
    """Milliseconds of one call."""
    if on_gpu:
        return milliseconds(call)
    times = []
    for _ in range(4):
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[1:])


@torch.no_grad()
def main() -> None:
    """Check, measure and print every arm, plain first."""
    options = arguments()
    on_gpu = options.device.startswith("cuda")
    results = Results(options.out)
    results.note(surroundings(options))
    for size in options.sizes:
        generator = torch.Generator(options.device).manual_seed(0)
        shape = tuple(map(int, size.split("x")))
        x = torch.randn(shape, device=options.device, dtype=torch.bfloat16, generator=generator)
        x /= torch.linalg.matrix_norm(x, keepdim=True)
        print(f"{size}: the kernel {'serves' if muon.gram_supports(x) else 'does not serve'} these", flush=True)
        for name, task, given, flops in tasks(x):
            plain = 0.0
            for arm in ("plain", *(options.launches or ("symmetric",))):
                error = check(task, given, arm)
                with arm_of(arm):
                    spent = timed(lambda task=task, given=given: task(given), on_gpu)
                plain = plain or spent
                row = {"task": name, "size": size, "arm": arm, "ms": spent, "tflops": flops / spent / 1e9}
                results.add(row | {"ratio": plain / spent, "error": error})
        release()
    print("".join(f"{column:>15}" for column in COLUMNS))
    for row in results.rows:
        print("".join(f"{v:>15.3f}" if isinstance(v, float) else f"{v:>15}" for v in (row[c] for c in COLUMNS)))


if __name__ == "__main__":
    main()

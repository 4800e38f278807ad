"""Times the GPU kernels of attention over sizes of tiles, to choose skipless.ops.gpu.launch from.

    python benchmarks/tune_attention.py --widths 64 128 --lengths 512 2048 --out tune.jsonl

Every kernel is compiled in a pool of processes first, checked against the first choice of tiles, and then timed alone,
by replaying a CUDA graph of it. "saving" is the key side that saves the gradients of its scores,
"query_side_from_saved" the query side that reads them, "row_products" the kernel before both. A section is how many
MiB heads read whose longest tiles come first, side by side; 0: one head after another.
"""

import argparse
import itertools
import json
import multiprocessing
from pathlib import Path

import torch
from attention import milliseconds, require_gpu

from skipless.ops.bias import BiasVectors
from skipless.ops.gpu import launch as kernels
from skipless.ops.gpu.launch import Launch
from skipless.ops.layout import Layout, kernel_layout
from skipless.theory.shapes import ExponentialShape, UniformShape

SHAPES = {"e-spa": lambda: ExponentialShape.between(0.05, 0.04, 0.008), "u-spa": lambda: UniformShape(0.7, 0.72)}
FORWARD = [(128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 4, 3), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3),
           (64, 128, 4, 2), (64, 64, 4, 2), (128, 32, 4, 4), (64, 32, 4, 4), (64, 32, 4, 3)]  # fmt: skip
KEY_SIDE = [(64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 3), (32, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3),
            (32, 64, 4, 3), (128, 64, 8, 2), (64, 64, 8, 2)]  # fmt: skip
QUERY_SIDE = [(128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 32, 8, 3), (64, 32, 4, 3),
              (128, 32, 4, 3), (64, 128, 8, 2), (128, 128, 8, 1)]  # fmt: skip
SAVING = [(32, 64, 4, 3), (64, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 4), (32, 128, 8, 3), (64, 128, 8, 2)]
FROM_SAVED = [(64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 8, 3), (64, 32, 4, 4), (128, 64, 8, 3), (128, 128, 8, 2)]
ROW_PRODUCTS = [(64, 64, 4, 1), (32, 64, 4, 1), (128, 64, 4, 1), (64, 64, 8, 1), (16, 64, 4, 1)]
KERNELS = {
    "forward": FORWARD,
    "query_side": QUERY_SIDE,
    "key_side": KEY_SIDE,
    "row_products": ROW_PRODUCTS,
    "saving": SAVING,
    "query_side_from_saved": FROM_SAVED,
}
TOKENS = 8192


class Problem:
    """Tensors of one attention problem and what the kernels fill, on the GPU."""

    def __init__(self, kind: str, width: int, length: int, documents: int):
        torch.manual_seed(0)
        batch, heads = max(TOKENS // length, 1), 8
        q, k, v, self.dout = (
            torch.randn(batch, length, heads, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            for _ in range(4)
        )
        bias = BiasVectors.of(SHAPES[kind](), length, "cuda").for_kernels()
        ids = torch.arange(length, device="cuda").expand(batch, -1) * documents // length
        layout = kernel_layout(Layout.packed(ids), batch, True) if documents else None
        self.inputs = kernels.KernelInputs(q, k, v, bias, layout, True)
        self.out, self.gradients = torch.empty_like(q), tuple(torch.empty_like(t) for t in (q, k, v))
        self.lse = torch.empty(q.shape[:3], device="cuda")
        self.delta = torch.empty_like(self.lse)
        self.scores = torch.zeros(batch * heads, length, length, device="cuda", dtype=torch.bfloat16)
        self.run("forward", FORWARD[0])
        self.run("query_side", QUERY_SIDE[0])

    def run(self, kernel: str, size: tuple) -> tuple:
        """Launch one kernel with tiles of this size; what it fills."""
        launch, inputs, sums, (dq, dk, dv) = Launch(*size), self.inputs, (self.lse, self.delta), self.gradients
        if kernel == "forward":
            kernels.run_forward(inputs, self.out, self.lse, launch)
            return (self.out,)
        if kernel == "query_side":
            kernels.run_query_side(inputs, self.out, self.dout, sums, dq, launch)
            return (dq,)
        if kernel == "row_products":
            kernels.run_row_products(inputs, self.out, self.dout, self.delta, launch)
            return (self.delta,)
        if kernel == "query_side_from_saved":
            kernels.run_query_side_from_saved(inputs, self.scores, dq, launch)
            return (dq,)
        scores = self.scores if kernel == "saving" else None
        kernels.run_key_side(inputs, self.dout, sums, (dk, dv), launch, scores=scores)
        return (dk, dv)


def order_by(section: float) -> None:
    """From now on heads that read so many MiB come side by side."""
    kernels._SECTION_BYTES = round(section * 2**20)


def compile_one(job: tuple) -> None:
    """Run it once in a process of its own, so that Triton's cache on disk holds it."""
    *where, section, kernel, size = job
    try:
        order_by(section)
        Problem(*where).run(kernel, size)
    except Exception as error:
        print(f"{job}: {type(error).__name__}", flush=True)


def measure(job: tuple, problems: dict, wanted: dict) -> dict | None:
    """One row: the time, and the largest difference from what the first size computed, in units of its norm."""
    *where, section, kernel, size = job
    problem = problems.setdefault(tuple(where), None) or Problem(*where)
    problems[tuple(where)] = problem
    try:
        order_by(section)
        got = [t.float().clone() for t in problem.run(kernel, size)]
        first = wanted.setdefault((*where, kernel), got)
        error = max(float((a - b).norm() / b.norm()) for a, b in zip(got, first, strict=True))
        time = milliseconds(lambda: problem.run(kernel, size), budget_ms=20.0)
    except Exception as error:
        print(f"{job}: {type(error).__name__}: {str(error)[:100]}", flush=True)
        return None
    names = ("kind", "width", "length", "documents", "section", "kernel", "size")
    return {**dict(zip(names, job, strict=True)), "ms": round(time, 4), "error": round(error, 5)}


def main() -> None:
    """Compile, check, time, print the best five of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--kinds", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--documents", type=int, nargs="+", default=[0], help="packed into a row; 0: no layout")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    now = kernels._SECTION_BYTES / 2**20
    parser.add_argument("--sections", type=float, nargs="+", default=[now], metavar="MIB", help=f"default: {now:g}")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    require_gpu()
    axes = (arguments.kinds, arguments.widths, arguments.lengths, arguments.documents, arguments.sections)
    jobs = [
        (*where, kernel, size)
        for where in itertools.product(*axes)
        for kernel in arguments.kernels
        for size in KERNELS[kernel]
    ]
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        pool.map(compile_one, [job for job in jobs if job[2] == arguments.lengths[0]], chunksize=2)
    problems, wanted, rows = {}, {}, []
    for job in jobs:
        if row := measure(job, problems, wanted):
            rows.append(row)
            if arguments.out:
                with arguments.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    group_by = ("kernel", "width", "kind", "length", "documents", "section")
    for key, group in itertools.groupby(rows, key=lambda r: tuple(r[name] for name in group_by)):
        best = sorted(group, key=lambda r: r["ms"])[:5]
        print(*key, [(r["size"], r["ms"], r["error"]) for r in best])


if __name__ == "__main__":
    main()

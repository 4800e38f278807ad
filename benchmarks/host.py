"""Microseconds that the host spends in this library's operators per block and step, without the GPU.

    python benchmarks/host.py --out results/host.jsonl

Kernels are replaced by functions that do nothing, and tensors are small and on the CPU: what is left is what torch and
Python do around a launch, which a step without a CUDA graph pays in every block. Triton's own part of a launch is not
in it. CPU time of this process, the least of several rounds, as other work on the machine would add to the clock's.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch
from step_timing import Results

from skipless.ops.gpu import activation, rotary
from skipless.ops.gpu import attention as kernels

ROUNDS = 12
BATCH, LENGTH, HEADS, WIDTH = 2, 64, 8, 64


class Nothing:
    """A kernel that is launched and does nothing."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **__: None


def microseconds(call: Callable[[], object], calls: int) -> float:
    """Of one of so many calls."""
    least = float("inf")
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(calls):
            call()
        least = min(least, time.process_time() - began)
    return 1e6 * least / calls


def operators() -> dict[str, Callable[[], object]]:
    """Calls of the operators of a compiled E-SPA block, forward and backward."""
    qkv = torch.zeros(BATCH, LENGTH, 3 * HEADS * WIDTH, dtype=torch.bfloat16)
    angles = [torch.zeros(1, 1, LENGTH, WIDTH // 2)] * 2
    bias = [torch.zeros(()), *(torch.zeros(512) for _ in range(3)), None, None]
    attend, attend_back = (torch.ops.skipless.rotary_attention, torch.ops.skipless.rotary_attention_backward)
    out, lse, rotated = attend.default(qkv, None, *angles, HEADS, HEADS, *bias, [], True)
    dout = torch.zeros_like(out)
    x, shift = torch.zeros(BATCH * LENGTH, 4 * HEADS * WIDTH, dtype=torch.bfloat16), torch.zeros(4 * HEADS * WIDTH)
    gelu, gelu_back = torch.ops.skipless.biased_gelu, torch.ops.skipless.biased_gelu_backward
    back = (dout, qkv, None, *angles, rotated, out, lse, HEADS, HEADS, *bias, [], True)
    return {
        "attention": lambda: attend.default(qkv, None, *angles, HEADS, HEADS, *bias, [], True),
        "attention, backward": lambda: attend_back.default(*back),
        "activation": lambda: gelu.default(x, shift, 1.0, 0.0, 0.0, 1.0),
        "activation, backward": lambda: gelu_back.default(x, x, shift, 1.0, 0.0, 1.0, True),
    }


def main() -> None:
    """Measure each operator, and their sum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=400, help="in each of twelve rounds")
    parser.add_argument("--label", default="", help="what is measured, such as a commit")
    parser.add_argument("--out", type=Path, help="a JSONL file to append to")
    options = parser.parse_args()
    results = Results(options.out)
    results.note({"torch": torch.__version__, "label": options.label})
    torch.set_num_threads(1)
    stubs = {kernels: ("forward", "key_side", "query_side", "query_side_from_saved", "row_products")}
    stubs |= {rotary: ("rotate",), activation: ("forward_kernel", "backward_kernel")}
    with ExitStack() as stack, torch.no_grad():
        for module, names in stubs.items():
            for name in names:
                stack.enter_context(patch.object(module, name, Nothing()))
        for name, call in operators().items():
            results.add({"operator": name, "microseconds": microseconds(call, options.calls)})
    results.note({"block_microseconds": sum(row["microseconds"] for row in results.rows)})


if __name__ == "__main__":
    main()

"""What fits on how many H200s, and the time of a step by formulas: 1B to 70B parameters and 1,000 blocks, under FSDP2.

    python benchmarks/scale.py --out results/scale.jsonl           (half an hour on one core; needs no GPU)
    python benchmarks/scale.py --sizes 1.3B --networks e-spa
    python benchmarks/scale.py --markdown                          (the table of docs/many-nodes.md; simulates nothing)

Formulas are those of skipless.training.cost. Beside them stands the peak of torch's memory tracker over a forward and a
backward pass that are simulated: tensors without memory (FakeTensorMode), a process group that sends nothing, and FSDP2
as the trainer shards. Attention, activation, norm and loss are those of a GPU by their shapes alone, and W_Q, W_K and
W_V one product, as in compiled blocks. To the tracker's peak the optimiser's moments are added.
"""

import argparse
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from step_timing import Results
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from skipless.model.config import ModelConfig
from skipless.model.presets import preset
from skipless.model.transformer import Transformer
from skipless.training.cost import MEMORY, Step, fewest_gpus
from skipless.training.distributed import World, distribute

# blocks and width; 12·d² parameters a block, and 32,000·d
SIZES = {
    "1.3B": (24, 2048),
    "6.6B": (32, 4096),
    "13B": (40, 5120),
    "32B": (60, 6656),
    "70B": (87, 8192),
    "1,000 × 1024": (1000, 1024),
    "1,000 × 2048": (1000, 2048),
}
_IDENTITY = {"mlp_init": "mirrored", "activation": "gelu", "value_output": "identity"}
NETWORKS = {"pre-ln": ("pre-ln", {}), "e-spa": ("e-spa", {}), "identity": ("e-spa", _IDENTITY)}
NAMES = {"pre-ln": "Pre-LN", "e-spa": "E-SPA", "identity": "mirrored, identity values"}
LENGTH, HEAD_WIDTH = 2048, 128
ROWS, NODE, MOST = (8, 4, 2, 1), 8, 1024  # of LENGTH tokens on each GPU; GPUs of a node, and the most that are asked


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=tuple(SIZES))
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=tuple(NETWORKS))
    parser.add_argument("--recompute", nargs="+", type=int, choices=(0, 1), default=(0, 1))
    parser.add_argument("--markdown", action="store_true", help="print the table of formulas and stop")
    parser.add_argument("--out", type=Path, help="a JSONL file to append to")
    return parser.parse_args()


def network(name: str, depth: int, width: int, length: int = LENGTH) -> ModelConfig:
    """A configuration with heads of 128, or as many of them as the width allows."""
    base, fields = NETWORKS[name]
    heads = max(1, width // HEAD_WIDTH)
    return preset(
        f"wikitext103/{base}", depth=depth, width=width, heads=heads, length=length, init="gaussian", **fields
    )


def planned(name: str, size: str, recompute: bool) -> Step | None:
    """The step with as many rows on each GPU, up to 8, as fit on up to 1,024; then on the fewest, and at least a node.

    None where not one row fits.
    """
    model = network(name, *SIZES[size])
    for rows in ROWS:
        if step := fewest_gpus(Step(model, rows, LENGTH, recompute=recompute), MOST):
            return step if step.gpus >= NODE else replace(step, gpus=NODE)
    return None


class Norm(torch.autograd.Function):
    """RMSNorm by its shapes, keeping what compiled code keeps: its input and a number a token."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, *upstream: Tensor):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _joint(x: Tensor, layers: tuple[nn.Linear, ...], *_: object, **__: object) -> Tensor:
    return torch.cat([layer(x) for layer in layers], dim=-1)


def _exact(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1], dtype=dtype)


@contextmanager
def simulated(gpus: int) -> Iterator[World]:
    """A world of so many processes in which nothing is computed or sent, and code goes the ways of a GPU."""
    dist.init_process_group("fake", rank=0, world_size=gpus, store=FakeStore())
    mesh = dist.device_mesh.init_device_mesh("cpu", (gpus,))
    patches = {
        "torch.distributed.device_mesh.init_device_mesh": lambda *_: mesh,
        "skipless.model.transformer.check_ids": lambda *_: None,
        "skipless.ops.attention.why_not_triton": lambda _: None,
        "skipless.nn.block.kernel_supports": lambda *_: True,
        "skipless.nn.attention.project_jointly": _joint,
        "skipless.ops.cross_entropy._each_row": lambda *_: None,
        "skipless.ops.cross_entropy._exact_product": _exact,
        "torch.nn.RMSNorm.forward": lambda norm, x: Norm.apply(x, norm.weight.to(x.dtype)),
    }
    try:
        with ExitStack() as stack, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
            for name, value in patches.items():
                stack.enter_context(patch(name, value))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            yield World(0, gpus, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def tracked(step: Step) -> dict[str, float]:
    """Bytes at the peak of a simulated forward and backward pass by kind, and the optimiser's moments."""
    with simulated(step.gpus) as world:
        model = distribute(Transformer(step.model, impl="auto"), world, "fsdp", torch.bfloat16)
        assert isinstance(model, Transformer)
        for block in model.each_block():
            options = block.layers()[0].options
            block.layers()[0].options = replace(options, impl="triton")
        if step.recompute:
            model.recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        tokens = torch.zeros(step.rows, step.length + 1, dtype=torch.long)
        tracker = FSDPMemTracker(model)
        tracker.track_inputs((tokens,))
        with tracker, torch.autocast("cpu", torch.bfloat16):
            model(tokens[:, :-1], targets=tokens[:, 1:]).backward()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
        found = {str(kind).rpartition(".")[2].lower(): float(size) for kind, size in peak.items()}
    found["moments"] = 8.0 * step.parameters.total / step.gpus
    return found | {"total": found["total"] + found["moments"]}


def row_of(name: str, size: str, step: Step) -> dict:
    """What the formulas say of a step."""
    return {
        "size": size,
        "network": name,
        "recompute": step.recompute,
        "parameters": step.parameters.total,
        "gpus": step.gpus,
        "tokens": step.tokens,
        "state_gb": step.state_bytes / 1e9,
        "activations_gb": step.activation_bytes / 1e9,
        "peak_gb": step.peak_bytes / 1e9,
        "seconds": step.seconds,
        "bound": step.bound,
        "link_seconds": step.link_seconds,
        "host_seconds": step.host_seconds,
        "tokens_per_second": step.tokens * step.gpus / step.seconds,
        "muon_seconds": replace(step, optimizer="muon").seconds,
    }


def cells(step: Step | None) -> list[str]:
    """Rows, GPUs, memory and time of one way, and the time with Muon."""
    if step is None:
        return ["–"] * 6
    times = [step.seconds, replace(step, optimizer="muon").seconds]
    memory = f"{step.peak_bytes / 1e9:.0f}"
    return [f"{step.rows}", f"{step.gpus}", memory, *(f"{seconds:.2f}" for seconds in times), step.bound]


def markdown(steps: dict[tuple[str, str, bool], Step | None]) -> str:
    """The table of the docs: a line per size and network, without and with recompute."""
    half = ["rows", "GPUs", "GB", "step, s", "Muon, s", "bound by"]
    head = ["size", "network", "parameters", *half, *half]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for size, name in dict.fromkeys((size, name) for size, name, _ in steps):
        keeps, again = steps[size, name, False], steps[size, name, True]
        count = next(step.parameters.total for step in (keeps, again) if step)
        line = [size, NAMES[name], f"{count / 1e9:.1f}B", *cells(keeps), *cells(again)]
        lines.append(f"| {' | '.join(line)} |")
    return "\n".join(lines)


def main() -> None:
    """Each size and network by formulas, then simulated beside them."""
    options = arguments()
    kinds = (False, True) if options.markdown else sorted(map(bool, options.recompute))
    steps = {(s, n, again): planned(n, s, again) for s in options.sizes for n in options.networks for again in kinds}
    if options.markdown:
        print(markdown(steps))
        return
    results = Results(options.out)
    results.note({"torch": torch.__version__, "memory_gb": MEMORY / 1e9, "length": LENGTH})
    for (size, name, recompute), step in steps.items():
        if step is None:
            results.note({"size": size, "network": name, "recompute": recompute, "fits": False})
            continue
        began = time.perf_counter()
        found = tracked(step)
        row = row_of(name, size, step) | {"simulated_gb": found["total"] / 1e9}
        row |= {"formula_over_simulated": step.peak_bytes / found["total"], "simulation_s": time.perf_counter() - began}
        results.add(row | {"simulated": {kind: value / 1e9 for kind, value in found.items() if value}})


if __name__ == "__main__":
    main()

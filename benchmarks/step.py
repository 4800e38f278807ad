"""Milliseconds per training step of skip-free models beside Pre-LN, in one run on one GPU.

    python benchmarks/step.py --width 512 --steps 30

Each arm first shows that its compiled blocks compute what the eager ones do; then come 16 × 512 tokens in bfloat16,
fused Adam.
"""

import argparse
import json
import time

import torch

from skipless.model.presets import preset
from skipless.model.transformer import Transformer

ARMS = ("wikitext103/pre-ln", "wikitext103/e-spa", "wikitext103/u-spa", "wikitext103/v-skipinit")


def build(name: str, width: int, depth: int) -> Transformer:
    """The preset's network on the GPU."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        return Transformer(preset(name, width=width, depth=depth))


def loss_of(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    """Next-token loss under autocast."""
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(tokens[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def check(name: str, width: int) -> float:
    """Largest difference between eager and compiled logits of a shallow copy, in bfloat16."""
    model = build(name, width, 6)
    tokens = torch.randint(0, 32_000, (2, 513), device="cuda")
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
        eager = model(tokens[:, :-1])
        compiled = model.compile_blocks()(tokens[:, :-1])
    return float((eager - compiled).abs().max() / eager.abs().max())


def measure(name: str, width: int, depth: int, steps: int) -> dict:
    """Milliseconds per step after five to warm up, and what follows from them."""
    model = build(name, width, depth).compile_blocks()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(0, 32_000, (16, 513), device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(model, tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    began = time.perf_counter()
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    compiled = time.perf_counter() - began
    began = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    milliseconds = 1e3 * (time.perf_counter() - began) / steps
    flops = 6 * 16 * 512 * model.config.matrix_parameters + 12 * depth * width * 512 * 16 * 512 / 2
    return {
        "arm": name,
        "ms": round(milliseconds, 2),
        "tflops": round(flops / milliseconds / 1e9, 1),
        "compile_s": round(compiled, 1),
        "memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
    }


def main() -> None:
    """Check, measure, print a line per arm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=36)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--arms", nargs="*", default=ARMS)
    arguments = parser.parse_args()
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, **vars(arguments)}))
    for name in arguments.arms:
        error = check(name, arguments.width)
        if error > 0.05:
            raise SystemExit(
                f"{name}: compiled and eager logits differ by {error:.3g} of their range; no speed is printed"
            )
        torch._dynamo.reset()
        torch.cuda.reset_peak_memory_stats()
        row = measure(name, arguments.width, arguments.depth, arguments.steps)
        print(json.dumps({**row, "compiled_vs_eager": round(error, 5)}), flush=True)


if __name__ == "__main__":
    main()

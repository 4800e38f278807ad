"""One decoding step, batch 1, with a cache of keys and values: folded against unfolded in one run.

    python benchmarks/decode_fold.py --width 1024 --depth 36 --dtype float32 [--device cuda]

Refuses to print when the folded model's logits differ. On CUDA each step is replayed from a CUDA graph, since launching
36 blocks of small kernels would hide what is measured: reading the weights. Rounds alternate between the two models.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from skipless.model.cache import KVCache, decode
from skipless.model.config import ModelConfig
from skipless.model.fold import fold
from skipless.model.transformer import Transformer


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=36)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--past", type=int, default=64, help="cached tokens")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float64"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def network(options: argparse.Namespace, dtype: torch.dtype, **sizes: int) -> Transformer:
    """A vanilla E-SPA model with query weights as after training, not zero."""
    fields = {"vocab_size": options.vocab, "width": options.width, "heads": options.heads, "depth": options.depth}
    torch.manual_seed(0)
    with torch.device(options.device):
        model = Transformer(ModelConfig(**{**fields, **sizes, "query_key": "normal"}), impl="sdpa")
    return model.to(dtype).eval().requires_grad_(False)


def check_exact(options: argparse.Namespace) -> float:
    """max |Δlogits| in float64 at this depth and width 64; more than 1e-9 ends the run."""
    model = network(options, torch.float64, width=64, heads=4, vocab_size=64)
    tokens = torch.randint(64, (1, 32), device=options.device)
    worst = float((model(tokens) - fold(model)(tokens)).abs().max())
    if not worst <= 1e-9:
        sys.exit(f"fold changes logits by {worst:.1e} in float64: nothing is measured")
    return worst


def step(model: Transformer, options: argparse.Namespace) -> Callable[[], torch.Tensor]:
    """Decode one token after `past` cached ones, over and over from the same place."""
    prompt = torch.randint(options.vocab, (1, options.past), generator=torch.Generator().manual_seed(1))
    cache = KVCache(len(model.blocks), capacity=options.past + 1)
    decode(model, prompt.to(options.device), cache)
    token = prompt[:, :1].to(options.device)

    def once() -> torch.Tensor:
        cache.truncate(options.past)
        return decode(model, token, cache)

    return captured(once) if options.device == "cuda" else once


def captured(once: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The same step as one CUDA graph."""
    for _ in range(3):
        once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = once()

    def replay() -> torch.Tensor:
        graph.replay()
        torch.cuda.synchronize()
        return logits

    return replay


def milliseconds(call: Callable[[], torch.Tensor]) -> float:
    """One timed call, the device idle before and after."""
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    """Check, measure, print."""
    options = arguments()
    exact = check_exact(options)
    model = network(options, getattr(torch, options.dtype))
    folded = fold(model)
    steps = {"unfolded": step(model, options), "folded": step(folded, options)}
    logits = {name: call().double().clone() for name, call in steps.items()}
    drift = float((logits["folded"] - logits["unfolded"]).norm() / logits["unfolded"].norm())
    if not drift < 0.05:
        sys.exit(
            f"folded and unfolded logits differ by {drift:.1e} of their norm in {options.dtype}: no speed is printed"
        )
    times = [{name: milliseconds(call) for name, call in steps.items()} for _ in range(options.rounds)]
    median = {name: statistics.median(row[name] for row in times) for name in steps}
    ratio = statistics.median(row["folded"] / row["unfolded"] for row in times)
    report = folded.report
    device = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{options.depth} blocks x {options.width}, {options.dtype}, {options.past} cached tokens, batch 1, {device}")
    print(f"block weights {report.weights_before:,} -> {report.weights_after:,} (-{report.saved:.1%})")
    print(f"step: unfolded {median['unfolded']:.3f} ms, folded {median['folded']:.3f} ms, ratio {ratio:.3f}")
    print(f"|Δlogits|: {exact:.1e} in float64 at width 64; relative {drift:.1e} in {options.dtype} at this width")


if __name__ == "__main__":
    main()

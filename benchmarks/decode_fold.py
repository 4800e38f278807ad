"""One decoding step, batch 1, with a cache of keys and values: folded, unfolded and Pre-LN of the same size in one run.

    python benchmarks/decode_fold.py --width 1024 --depth 36 --dtype bfloat16 [--device cuda] [--compile]

First the checks: in float64 folding changes no logit; at full size the folded network is at most twice as far from
float32 logits as the unfolded one in the same precision; a replayed step gives the eager step's logits. Where one fails
no speed is printed. On CUDA each step is replayed from a CUDA graph, since launching 36 blocks of small kernels would
hide what is measured: reading the weights. A round is some steps without a pause between them, as when text is
generated; rounds alternate between the networks.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from kernel_times import kernel_times
from torch import Tensor

from skipless.model.config import ModelConfig
from skipless.model.fold import default_max_condition, fold
from skipless.model.generate import KVCache, decode
from skipless.model.presets import preset
from skipless.model.transformer import Transformer

Step = Callable[[], Tensor]


def positive(text: str) -> int:
    """The number, if it is at least 1."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=36)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--past", type=int, default=64, help="cached tokens")
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument("--steps", type=positive, default=20, help="of a round")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float64"])
    parser.add_argument("--compile", action="store_true", help="compile the blocks, so that small kernels fuse")
    parser.add_argument("--profile", action="store_true", help="print each network's kernels, idle time and clock")
    parser.add_argument("--out", type=Path, help="a JSONL file to append to")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def network(options: argparse.Namespace, name: str = "e-spa", **sizes: int) -> Transformer:
    """A float32 network with query weights as after training, not zero."""
    fields = {"vocab_size": options.vocab, "width": options.width, "heads": options.heads, "depth": options.depth}
    torch.manual_seed(0)
    config: ModelConfig = preset(f"wikitext103/{name}", **{**fields, **sizes, "query_key": "normal"})
    with torch.device(options.device):
        model = Transformer(config)
    return model.eval().requires_grad_(False)


def check_exact(options: argparse.Namespace) -> float:
    """max |Δlogits| in float64 at this depth and width 64; more than 1e-9 ends the run."""
    model = network(options, width=64, heads=4, vocab_size=64).double()
    tokens = torch.randint(64, (1, 32), device=options.device)
    worst = float((model(tokens) - fold(model)(tokens)).abs().max())
    if not worst <= 1e-9:
        sys.exit(f"fold changes logits by {worst:.1e} in float64: nothing is measured")
    return worst


class Decoding:
    """One token after each row of the prompt, over and over from the same place; on CUDA also from a graph.

    It owns what the graph reads, cache and token: freed, they would be overwritten, and the graph would read that.
    """

    def __init__(self, model: Transformer, options: argparse.Namespace, prompt: Tensor):
        self.model, self.past = model, prompt.shape[1]
        self.cache = KVCache(len(model.blocks), capacity=self.past + 1)
        decode(model, prompt.to(options.device), self.cache)
        self.token = prompt[:, :1].to(options.device)
        if options.compile:
            model.compile_blocks()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits = self.once()

    def once(self) -> Tensor:
        """The step, kernel by kernel."""
        self.cache.truncate(self.past)
        return decode(self.model, self.token, self.cache)

    def capture(self) -> None:
        """From now on `step` replays."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.once()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.logits = self.once()

    def step(self) -> Tensor:
        """The logits, on a GPU once it gets there."""
        if self.graph is None:
            return self.once()
        self.graph.replay()
        return self.logits


def check_precision(truth: Tensor, found: dict[str, Tensor], options: argparse.Namespace) -> dict[str, float]:
    """max |Δlogits| to the float32 network, of both; twice the unfolded one's ends the run."""
    errors = {name: float((logits.double() - truth).abs().max()) for name, logits in found.items()}
    scale = float(truth.abs().max())
    print(f"max |Δlogits| to float32, of logits up to {scale:.2f}: {rounded(errors)}", flush=True)
    if not errors["folded"] <= 2 * errors["unfolded"] + 1e-4 * scale:
        sys.exit(f"in {options.dtype} the folded logits are off by more than twice the unfolded: no speed is printed")
    return errors


def check_replay(name: str, decoding: Decoding) -> float:
    """max |Δlogits| between a replayed and an eager step, relative to the largest; 1e-2 ends the run."""
    eager = decoding.once().double()
    decoding.capture()
    error = float((decoding.step().double() - eager).abs().max() / eager.abs().max())
    if not error < 1e-2:
        sys.exit(f"{name}: a replayed step's logits differ by {error:.1e} from an eager one's: no speed is printed")
    return error


def milliseconds(call: Step, steps: int, on_gpu: bool) -> float:
    """Of one call among several in a row, the device idle before and after them."""
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(steps):
        call()
    wait()
    return 1e3 * (time.perf_counter() - start) / steps


def rounded(values: dict[str, float]) -> str:
    """Names and numbers for a line of text."""
    return ", ".join(f"{name} {value:.2e}" for name, value in values.items())


def main() -> None:
    """Check, measure, print."""
    options = arguments()
    dtype, on_gpu = getattr(torch, options.dtype), options.device.startswith("cuda")
    exact = check_exact(options)
    print(f"max |Δlogits| of folding in float64 at width 64: {exact:.1e}", flush=True)
    model = network(options)
    prompt = torch.randint(options.vocab, (1, options.past), generator=torch.Generator().manual_seed(1))
    eager = argparse.Namespace(**{**vars(options), "compile": False})
    truth = Decoding(model, eager, prompt).logits.double()
    folded = fold(model, max_condition=default_max_condition(dtype))
    report = folded.report
    models = {"unfolded": model.to(dtype), "folded": folded.to(dtype), "pre-ln": network(options, "pre-ln").to(dtype)}
    decodings = {name: Decoding(each, options, prompt) for name, each in models.items()}
    errors = check_precision(truth, {name: decodings[name].logits for name in ("unfolded", "folded")}, options)
    if on_gpu:
        replays = {name: check_replay(name, decoding) for name, decoding in decodings.items()}
        print(f"replayed against eager, relative: {rounded(replays)}", flush=True)
    if options.profile:
        for name, decoding in decodings.items():
            print(f"\n{name}\n{kernel_times(decoding.step, on_gpu)}", flush=True)
    rounds = range(options.rounds)
    times = [{name: milliseconds(d.step, options.steps, on_gpu) for name, d in decodings.items()} for _ in rounds]
    median = {name: statistics.median(row[name] for row in times) for name in models}
    device = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{options.depth} blocks x {options.width}, {options.dtype}, {options.past} cached tokens, batch 1, {device}")
    print(f"block weights {report.weights_before:,} -> {report.weights_after:,} (-{report.saved:.1%})")
    for name, value in median.items():
        versus = " ".join(f"{value / median[other]:.3f} of {other}" for other in ("unfolded", "pre-ln"))
        print(f"{name:9} {value:8.3f} ms  {1e3 / value:8.1f} tokens/s  {versus}")
    if options.out is not None:
        row = {"device": device, "command": sys.argv, "ms": median, "errors": errors, "exact": exact}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

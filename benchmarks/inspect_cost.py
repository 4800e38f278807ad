"""What an inspection costs: its time and peak memory over those of one forward and backward pass of the same loss.

    python benchmarks/inspect_cost.py --depth 36 --width 1024 --batch 8 --length 512 --out costs.jsonl

Each figure is from a process of its own: on a GPU the best of `--repeats` after one to warm up, and the most memory
that torch held; on a processor one pass, in seconds of all its threads together, so that other work on the machine
counts little, and the process's peak resident memory (Linux) above what imports take. An arm is measured after its
inspection, on a small copy, agrees with hooks written by hand.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from skipless.inspection.inspect import inspect
from skipless.inspection.load import build_family
from skipless.inspection.stacks import find_blocks
from skipless.model.presets import preset
from skipless.model.transformer import Transformer

ARMS = ("e-spa", "pre-ln", "hf:llama", "hf:gpt2")
VOCABULARY = 32_000
LIMITS = {"time": 3.0, "memory": 1.2}


def build(arm: str, width: int, depth: int, device: str, dtype: torch.dtype) -> nn.Module:
    """The network of an arm, as initialised."""
    torch.manual_seed(0)
    with torch.device(device):
        if arm in ("e-spa", "pre-ln"):
            return Transformer(preset(f"wikitext103/{arm}", width=width, depth=depth, heads=width // 64)).to(dtype)
        options: dict[str, Any] = {"num_hidden_layers": depth, "hidden_size": width, "num_attention_heads": width // 64}
        if arm == "hf:llama":
            options["intermediate_size"] = 8 * width // 3 // 64 * 64  # as many parameters as an MLP of 4·width
        if arm == "hf:gpt2":
            options["activation_function"] = "gelu_pytorch_tanh"  # the same function in one kernel
        return build_family(arm.removeprefix("hf:"), vocab_size=VOCABULARY, **options).to(dtype)


def once(model: nn.Module, ids: torch.Tensor) -> None:
    """One forward and backward of the next-token loss; gradients are then let go."""
    out = model(ids)
    logits = getattr(out, "logits", out)
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    model.zero_grad(set_to_none=True)


def inspected(model: nn.Module, ids: torch.Tensor) -> None:
    """An inspection with the gradients of the same loss."""
    inspect(model, ids, labels=ids)


def check(arm: str, device: str) -> float:
    """Largest error of a block's mean cosine, beside hooks written by hand on a small copy."""
    model, states = build(arm, 128, 6, device, torch.float32), []
    ids = torch.randint(0, VOCABULARY, (2, 64), device=device)

    def keep(module: nn.Module, args: tuple, out: Any) -> None:
        states.append((out[0] if isinstance(out, tuple) else out).detach().double())

    hooks = [block.register_forward_hook(keep) for _, block in find_blocks(model)]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    found = inspect(model, ids)
    if any(each.attention_entropy is None for each in found.blocks[1:]):
        raise SystemExit(f"{arm}: attention was not seen; no cost is printed")
    unit = [state / state.norm(dim=-1, keepdim=True) for state in states]
    means = [float(((u @ u.mT).sum((-2, -1)) - 64).mean() / (64 * 63)) for u in unit]
    return max(abs(each.cosine_mean - mean) for each, mean in zip(found.blocks[1:], means, strict=True))


def resident(field: str) -> float:
    """The process's resident memory in GB: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1e6


def measure(task: str, arm: str, options: argparse.Namespace) -> dict[str, float]:
    """Seconds and GB of one task, "pass" or "inspect", in this process."""
    cuda = options.device.startswith("cuda")
    start = 0.0 if cuda else resident("VmRSS")
    model = build(arm, options.width, options.depth, options.device, getattr(torch, options.dtype))
    ids = torch.randint(0, VOCABULARY, (options.batch, options.length), device=options.device)
    work = inspected if task == "inspect" else once
    work(model, ids if cuda else ids[:1, :8])  # kernels, thread pools, quadrature tables
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times, clock = [], time.perf_counter if cuda else time.process_time
    for _ in range(options.repeats if cuda else 1):
        began = clock()
        work(model, ids)
        if cuda:
            torch.cuda.synchronize()
        times.append(clock() - began)
    peak = torch.cuda.max_memory_allocated() / 1e9 if cuda else resident("VmHWM") - start
    return {"seconds": round(min(times), 4), "gb": round(peak, 3)}


def apart(task: str, arm: str) -> dict[str, float]:
    """`measure` in a process of its own, with this one's options."""
    command = [sys.executable, __file__, *sys.argv[1:], "--task", task, "--arms", arm]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{arm}, {task}: ended with {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=36)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=ARMS)
    parser.add_argument("--out", type=Path, help="JSONL to add lines to")
    parser.add_argument("--task", choices=("pass", "inspect"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Check, measure and print every arm."""
    options = parsed()
    if options.task:
        print(json.dumps(measure(options.task, options.arms[0], options)))
        return
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else f"{torch.get_num_threads()} threads"
    sizes = {name: getattr(options, name) for name in ("width", "depth", "batch", "length", "dtype")}
    print(f"{options.device} ({device}), {sizes}, torch {torch.__version__}")
    print(f"{'arm':<10}{'pass s':>10}{'inspect s':>11}{'ratio':>8}{'pass GB':>10}{'inspect GB':>12}{'ratio':>8}")
    for arm in options.arms:
        error = check(arm, options.device)
        if error > 1e-4:
            raise SystemExit(f"{arm}: cosines differ by {error:.3g} from hooks written by hand; no cost is printed")
        one, two = apart("pass", arm), apart("inspect", arm)
        ratios = {"time": two["seconds"] / one["seconds"], "memory": two["gb"] / one["gb"]}
        within = all(ratios[name] <= limit for name, limit in LIMITS.items())
        print(
            f"{arm:<10}{one['seconds']:>10.3f}{two['seconds']:>11.3f}{ratios['time']:>8.2f}"
            f"{one['gb']:>10.2f}{two['gb']:>12.2f}{ratios['memory']:>8.2f}{'' if within else '  over the limit'}",
            flush=True,
        )
        row = {"arm": arm, **sizes, "pass": one, "inspect": two, **{n: round(v, 3) for n, v in ratios.items()}}
        row |= {"device": device, "torch": torch.__version__, "error": error}
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

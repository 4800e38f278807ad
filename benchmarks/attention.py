"""Shaped attention beside plain causal attention: milliseconds, ratios and memory, in one run on one GPU.

    python benchmarks/attention.py --out results/attention.jsonl

Every row is checked first: output and gradients against the float32 reference at the same inputs (T ≤ 2048), or at
q = 0 against the O(T) scan (longer). Peers are torch's own fused kernels for plain causal attention, which do less: no
bias. All are timed alike, by replaying a CUDA graph; inputs are (batch, T, heads, width), seen as a model sees them.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from skipless.ops.attention import shaped_attention
from skipless.ops.bias import BiasVectors
from skipless.ops.reference import initial_attention
from skipless.theory.shapes import ExponentialShape, UniformShape

SHAPES = {"e-spa": ExponentialShape.between(0.05, 0.04, 0.008), "u-spa": UniformShape(0.7, 0.72)}
# batch, T, head width; 8 heads
SIZES = [
    (16, 512, 64),
    (16, 512, 128),
    (8, 2048, 64),
    (8, 2048, 128),
    (2, 8192, 128),
    (1, 32768, 128),
    (1, 131072, 128),
]
HEADS = 8
LONGEST_DENSE = 2048
ALLOWED = 0.02  # of the norm, in bfloat16: flash attention's own error is half of it


def inputs(batch: int, length: int, width: int) -> list[Tensor]:
    """q, k, v and the output's gradient."""
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = (batch, length, HEADS, width)
    made = [torch.randn(sizes, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(4)]
    return [t.transpose(1, 2).requires_grad_(index < 3) for index, t in enumerate(made)]


def plain(backend: SDPBackend) -> Callable:
    """Plain causal attention by one of torch's kernels."""

    def attend(q, k, v):
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def shaped(kind: str, impl: str, length: int) -> Callable:
    """Shaped attention by one of ours."""
    bias = BiasVectors.of(SHAPES[kind], length, "cuda")
    return lambda q, k, v: shaped_attention(q, k, v, bias, impl=impl)


def arms(length: int) -> dict[str, Callable]:
    """By name; the first is the peer that ratios are against."""
    found = {"flash": plain(SDPBackend.FLASH_ATTENTION), "cudnn": plain(SDPBackend.CUDNN_ATTENTION)}
    for kind in SHAPES:
        found[f"{kind}/triton"] = shaped(kind, "triton", length)
        if length <= 8192:
            found[f"{kind}/flex"] = shaped(kind, "flex", length)
    return found


def error_of(name: str, attend: Callable, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> float:
    """Largest error of output and gradients, relative in norm, against the definition in float32; two rows suffice."""
    kind = name.partition("/")[0]
    if q.shape[2] > LONGEST_DENSE:
        return error_at_start(SHAPES[kind], attend, k, v, dout) if kind in SHAPES else 0.0
    few = [t[:2, :2].detach().clone().requires_grad_(t.requires_grad) for t in (q, k, v, dout)]
    wide = [t.detach().float().requires_grad_(t.requires_grad) for t in few]
    shape = SHAPES.get(kind)
    if shape is None:
        want = scaled_dot_product_attention(*wide[:3], is_causal=True)
    else:
        want = shaped_attention(*wide[:3], shape, impl="reference")
    got = attend(*few[:3])
    pairs = [(got, want)]
    pairs += zip(torch.autograd.grad(got, few[:3], few[3]), torch.autograd.grad(want, wide[:3], wide[3]), strict=True)
    return max(float((a.detach().float() - b.detach()).norm() / b.detach().norm()) for a, b in pairs)


def error_at_start(shape, attend: Callable, k: Tensor, v: Tensor, dout: Tensor) -> float:
    """The same at q = 0, for the output and dv, against the scan in float64: any length."""
    k, v, dout = (t[:1, :1].detach() for t in (k, v, dout))
    ours, exact = v.clone().requires_grad_(), v.double().requires_grad_()
    got, want = attend(torch.zeros_like(k).requires_grad_(), k, ours), initial_attention(shape, exact)
    (dv,), (true,) = torch.autograd.grad(got, ours, dout), torch.autograd.grad(want, exact, dout.double())
    pairs = ((got.detach(), want.detach()), (dv, true))
    return max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)


def milliseconds(call: Callable[[], object], budget_ms: float = 150.0) -> float:
    """Of one call, the median over replays of a CUDA graph of several."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    repeats = max(1, min(20, int(20 / (1e3 * (time.perf_counter() - began)))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    times: list[float] = []
    while sum(times) * repeats < budget_ms or len(times) < 5:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / repeats)
    return sorted(times[1:])[(len(times) - 1) // 2]


def extra_memory(call: Callable[[], object]) -> float:
    """Bytes at the peak of a call beyond what was there before, less what it returns."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    returned = sum(t.numel() * t.element_size() for t in (result if isinstance(result, tuple) else (result,)))
    return torch.cuda.max_memory_allocated() - before - returned


def measure(name: str, attend: Callable, sizes: tuple) -> dict:
    """One row, or the reason why there is none."""
    torch.cuda.empty_cache()
    q, k, v, dout = inputs(*sizes)

    def both():
        out = attend(q, k, v)
        return (out, *torch.autograd.grad(out, (q, k, v), dout))

    row = {"arm": name, "batch": sizes[0], "T": sizes[1], "D": sizes[2]}
    error = error_of(name, attend, q, k, v, dout)
    if not error < ALLOWED:
        return row | {"error": error, "refused": f"error above {ALLOWED}: no speed is printed"}
    both()
    memory = extra_memory(both)
    with torch.no_grad():
        forward = milliseconds(lambda: attend(q, k, v))
    whole = milliseconds(both)
    flops = 3.5 * 4 * sizes[0] * HEADS * sizes[1] ** 2 * sizes[2] / 2
    figures = {"forward_ms": forward, "both_ms": whole, "tflops": flops / whole / 1e9, "extra_mb": memory / 1e6}
    return row | {n: round(x, 4) for n, x in figures.items()} | {"error": round(error, 5)}


def table(rows: list[dict]) -> str:
    """A Markdown table with each row's speed over its peers' (above 1 is faster)."""
    lines = [
        "| B, T, D | arm | forward ms | fwd+bwd ms | TFLOP/s | × flash | × cuDNN | extra MB | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        where = f"{row['batch']}, {row['T']}, {row['D']}"
        if "both_ms" not in row:
            lines.append(f"| {where} | {row['arm']} | {row.get('refused', row.get('failed'))} | | | | | | |")
            continue
        peers = {r["arm"]: r.get("both_ms") for r in rows if (r["T"], r["D"]) == (row["T"], row["D"])}
        ratios = [f"{peers[p] / row['both_ms']:.2f}" if peers.get(p) else "" for p in ("flash", "cudnn")]
        cells = [f"{row['forward_ms']:.3f}", f"{row['both_ms']:.3f}", f"{row['tflops']:.0f}", *ratios]
        lines.append(f"| {where} | {row['arm']} | {' | '.join(cells)} | {row['extra_mb']:.1f} | {row['error']:.4f} |")
    return "\n".join(lines)


def require_gpu() -> None:
    """End with a line where there is none."""
    if not torch.cuda.is_available():
        raise SystemExit("this measures kernels on an NVIDIA GPU, and torch finds none")


def main() -> None:
    """Check and time every arm at every size; write rows as they come, the table at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=sorted({size[1] for size in SIZES}))
    parser.add_argument("--arms", nargs="+", help="only these")
    parser.add_argument("--out", type=Path, help="JSONL, one line per row; the table goes beside it as .md")
    arguments = parser.parse_args()
    require_gpu()
    head = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    rows, lines = [], [json.dumps(head)]
    for sizes in SIZES:
        for name, attend in arms(sizes[1]).items() if sizes[1] in arguments.lengths else ():
            if arguments.arms and name not in arguments.arms:
                continue
            try:
                row = measure(name, attend, sizes)
            except Exception as error:
                row = {"arm": name, "batch": sizes[0], "T": sizes[1], "D": sizes[2], "failed": str(error)[:200]}
            rows.append(row)
            lines.append(json.dumps(row))
            print(lines[-1], flush=True)
            if arguments.out:
                arguments.out.write_text("\n".join(lines) + "\n")
                arguments.out.with_suffix(".md").write_text(f"`{json.dumps(head)}`\n\n{table(rows)}\n")
    print(table(rows))


if __name__ == "__main__":
    main()

"""Milliseconds per training step of skip-free networks beside Pre-LN and Hugging Face's, in one run on one GPU.

    python benchmarks/step.py --shapes narrow --out results/step.jsonl
    python benchmarks/step.py --shapes wikitext103 --arms e-spa pre-ln --profile
    python benchmarks/step.py --device cpu --shapes tiny --steps 2                  (only that it runs)

Every arm trains as the trainer does: compiled, bfloat16, fused Adam, clipping; random tokens. "eager" launches each
kernel from the host, "graph" replays the whole step from one CUDA graph. First compiled code is compared with eager
code and the graph's losses with eager ones: where they differ, the arm gets no speed. Rows are written as they come,
and --budget-seconds ends cleanly between two arms. MFU is of 989 TFLOP/s. Hugging Face's networks get torch's causal
attention, which their own "sdpa" ("-masked") does not use when compiled.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from kernel_times import kernel_times
from step_arms import OURS, SHAPES, THEIRS, Run, Shape, compiled, network
from step_timing import MODES, Budget, Results, check, measure, release, surroundings, warmed_up

COLUMNS = ("shape", "arm", "mode", "ms", "tflops", "mfu", "vs_pre_ln", "vs_hf", "memory_gb")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--arms", nargs="+", choices=(*OURS, *THEIRS), default=(*OURS, *THEIRS[:2]))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=("wikitext103", "c4", "narrow"))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="on a CPU only eager")
    parser.add_argument("--steps", type=int, default=20, help="per round, of which the median of three counts")
    parser.add_argument("--impl", default="auto", help="attention of this library's networks")
    parser.add_argument("--optimizer", default="adam", choices=("adam", "muon"), help="muon: this library's arms only")
    parser.add_argument("--hf-compile", default="whole", choices=("whole", "layers"))
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on a GPU")
    parser.add_argument("--profile", action="store_true", help="print each arm's kernels, idle time and clock instead")
    parser.add_argument("--budget-seconds", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path, help="a JSONL file to append to")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    return parser.parse_args()


def run_arm(arm: str, shape: Shape, run: Run, options: argparse.Namespace) -> Iterator[dict]:
    """The rows of one arm, or the kernels of its step printed."""
    error = check(arm, shape, run)
    model = compiled(network(arm, shape, run), run)
    on_gpu = run.device.type == "cuda"
    modes = tuple(options.modes) if on_gpu else ("eager",)
    if options.profile:
        for mode in modes:
            print(f"\n{arm}, {shape}, {mode}\n{kernel_times(warmed_up(model, shape, run, mode), on_gpu)}", flush=True)
        return
    parameters = sum(p.numel() for p in model.parameters())
    common = {"shape": shape.name, "arm": arm, "impl": run.impl, "parameters": parameters, "compiled_vs_eager": error}
    for mode, values in measure(model, shape, run, modes, options.steps):
        yield {**common, "mode": mode, **values}


def with_ratios(rows: list[dict]) -> list[dict]:
    """Every row with its time over Pre-LN's and over the quickest of Hugging Face's, in the same mode and shape."""
    references = {"vs_pre_ln": ("pre-ln",), "vs_hf": THEIRS}
    done = []
    for row in rows:
        alike = [other for other in rows if (other["shape"], other["mode"]) == (row["shape"], row["mode"])]
        times = {name: [o["ms"] for o in alike if o["arm"] in arms] for name, arms in references.items()}
        done.append({**row, **{name: row["ms"] / min(known) for name, known in times.items() if known}})
    return done


def table(rows: list[dict]) -> str:
    """The columns that matter, aligned."""

    def cell(value: object) -> str:
        return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)

    cells = [COLUMNS, *([cell(row.get(name)) for name in COLUMNS] for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(COLUMNS))]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in cells)


def main() -> None:
    """Check, measure, print a row per arm and mode as it comes, and the table at the end."""
    options = arguments()
    run, budget, results = Run.of(options), Budget(options.budget_seconds), Results(options.out)
    results.note(surroundings(options))
    for shape in (SHAPES[name] for name in options.shapes):
        for arm in options.arms:
            if budget.over():
                print(f"the budget is spent; {shape.name}/{arm} and what follows is not measured")
                print(table(with_ratios(results.rows)))
                return
            try:
                for row in run_arm(arm, shape, run, options):
                    results.add(row)
            except (RuntimeError, ValueError, ImportError) as error:
                results.note({"shape": shape.name, "arm": arm, "failed": str(error)})
            release()
    if results.rows:
        print(table(with_ratios(results.rows)))


if __name__ == "__main__":
    main()

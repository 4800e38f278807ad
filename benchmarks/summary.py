"""Tables and a figure from the logs of the other benchmarks in one folder.

    python benchmarks/summary.py results/h200

Reads attention.jsonl, step.jsonl, growth.jsonl and decode.jsonl, those that are there; writes summary.md and speed.png
beside them. Nothing is measured and nothing typed: every number comes from a log.
"""

import argparse
import json
from pathlib import Path

PEAK = 989e12
COLOURS = {"flash": "#777777", "cudnn": "#bbbbbb", "e-spa/triton": "#0072b2", "u-spa/triton": "#009e73"}
LABELS = {"flash": "flash, no bias", "cudnn": "cuDNN, no bias", "e-spa/triton": "E-SPA", "u-spa/triton": "U-SPA"}


def read(path: Path) -> tuple[dict, list[dict]]:
    """(what was measured on, rows, each with the number of its run); rows that failed are left to the log."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    head = next((line for line in lines if "torch" in line and "ms" not in line), {})
    run, rows = 0, []
    for line in lines:
        run += "command" in line
        if "both_ms" in line or "ms" in line:
            rows.append({**line, "run": run})
    return head, rows


def grid(header: list[str], rows: list[list]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def attention(rows: list[dict]) -> str:
    """Forward and backward beside plain attention at the same size."""
    cells = []
    for row in rows:
        peers = {r["arm"]: r["both_ms"] for r in rows if (r["T"], r["D"]) == (row["T"], row["D"])}
        ratios = [f"{peers[name] / row['both_ms']:.2f}" for name in ("flash", "cudnn")]
        times = [f"{row['forward_ms']:.3f}", f"{row['both_ms']:.3f}", f"{row['tflops']:.0f}"]
        where = f"{row['batch']} × {row['T']}, {row['D']}"
        cells.append([where, LABELS[row["arm"]], *times, *ratios, f"{row['extra_mb']:.1f}"])
    header = ["batch × T, head width", "", "forward ms", "both ms", "TFLOP/s", "× flash", "× cuDNN", "extra MB"]
    return grid(header, cells)


def step(rows: list[dict]) -> str:
    """Training steps beside Pre-LN of this library and Hugging Face's Llama in the same run."""
    cells = []
    for row in rows:
        same = {r["arm"]: r["ms"] for r in rows if all(r[key] == row[key] for key in ("run", "shape", "mode"))}
        ratios = [f"{same[name] / row['ms']:.3f}" if name in same else "" for name in ("pre-ln", "llama")]
        figures = [f"{row['ms']:.1f}", f"{row['mfu']:.1f} %", *ratios, f"{row['memory_gb']:.1f}"]
        cells.append([row["run"], row["shape"], row["arm"], row["impl"], row["mode"], *figures])
    return grid(["run", "shape", "network", "attention", "launch", "ms", "MFU", "× Pre-LN", "× Llama", "GB"], cells)


def growth(rows: list[dict]) -> str:
    """Milliseconds by depth and by length."""
    return grid(["grows", "to", "sizes", "ms"], [[r["grows"], r["to"], r["shape"], f"{r['ms']:.1f}"] for r in rows])


def decode(rows: list[dict]) -> str:
    """Milliseconds of one decoding step."""
    last = rows[-1]["ms"]
    speed = {name: last["pre-ln"] / ms for name, ms in last.items()}
    cells = [[name, f"{ms:.3f}", f"{last['unfolded'] / ms:.3f}", f"{speed[name]:.3f}"] for name, ms in last.items()]
    return grid(["network", "ms", "× unfolded", "× Pre-LN"], cells)


SECTIONS = {
    "attention": ("Attention, bfloat16, 8 heads, causal; × is speed over the peer's, forward and backward", attention),
    "step": ("Training step; × is speed over the peer's", step),
    "growth": ("Growth of a step of vanilla E-SPA", growth),
    "decode": ("Decoding, batch 1; × is speed over the peer's", decode),
}


def draw(rows: list[dict], path: Path, device: str) -> None:
    """TFLOP/s of forward and backward against the length, head width 128."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, colour in COLOURS.items():
        mine = sorted((r["T"], r["tflops"]) for r in rows if r["arm"] == name and r["D"] == 128)
        if not mine:
            continue
        style = "-" if "/" in name else "--"
        axes.plot(*zip(*mine, strict=True), style, color=colour, marker="o", markersize=4)
        axes.annotate(LABELS[name], mine[-1], (7, 0), textcoords="offset points", color=colour, va="center", fontsize=9)
    lengths = sorted({r["T"] for r in rows})
    axes.set(xscale="log", ylim=(0, None), xlabel="length", ylabel="TFLOP/s, forward and backward")
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths], minor=False)
    axes.minorticks_off()
    axes.set_xlim(lengths[0] / 1.3, lengths[-1] * 6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"Shaped attention beside plain attention, {device}, head width 128", fontsize=10, loc="left")
    figure.savefig(path, dpi=160)


def main() -> None:
    """Write summary.md and speed.png."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    found = {name: read(folder / f"{name}.jsonl") for name in SECTIONS}
    if not any(rows for _, rows in found.values()):
        raise SystemExit(f"{folder} holds none of {', '.join(f'{name}.jsonl' for name in SECTIONS)}")
    text = "# Speed\n\nGenerated by `python benchmarks/summary.py` from the logs beside it.\n"
    for name, (title, section) in SECTIONS.items():
        if found[name][1]:
            text += f"\n## {title}\n\n{section(found[name][1])}"
    (folder / "summary.md").write_text(text)
    head, rows = found["attention"]
    if rows:
        draw(rows, folder / "speed.png", head.get("device", "one GPU"))
    print(text)


if __name__ == "__main__":
    main()

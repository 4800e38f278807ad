"""Decoding speed beside loss: networks whose final losses are in a log, by the number of rows decoded side by side.

    python benchmarks/inference.py [--batch 1 8 64] [--past 128] [--dtype float32] [--device cpu] [--out FILE]

The networks are those of the long run (36 blocks x 512 over 16,000 steps), drawn anew: speed does not depend on what
was learned. Networks without skips are folded. First the checks: a decoded token's logits are those of the whole row,
and folding changes none of them. Where one fails no speed is printed. Rounds alternate between the networks; a CUDA
device replays each step from a graph.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from decode_fold import Decoding, check_replay, milliseconds, positive

from skipless.model.fold import FoldedTransformer, default_max_condition, fold
from skipless.model.transformer import Transformer
from skipless.paper.experiments import SCALES
from skipless.paper.records import Record, ResultsFolder
from skipless.paper.tables import TABLES

TABLE, SCALE, MULTIPLE = "mirrored-long", "medium", 8.0
FULL_ROWS = 2  # of the check against whole rows
LARGEST_ERROR = 1e-3  # of a logit, over the largest, in float32


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 8, 64], help="rows decoded side by side")
    parser.add_argument("--past", type=positive, default=128, help="cached tokens of each row")
    parser.add_argument("--depth", type=positive, help="fewer blocks, for a trial")
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--steps", type=positive, default=10, help="of a round")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--compile", action="store_true", help="compile the blocks, so that small kernels fuse")
    parser.add_argument("--results", type=Path, default=Path("results"), help="the folder of the logs")
    parser.add_argument("--out", type=Path, help="a JSONL file to append to")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def finished(results: Path) -> dict[str, Record]:
    """The long run's networks by the name of their arm."""
    records = ResultsFolder(results, SCALE).records.values()
    found = {r.arm: r for r in records if r.item == TABLE and r.multiple == MULTIPLE}
    if not found:
        sys.exit(f"{results} holds no finished run of {TABLE}-{SCALE}; --results names the folder of the logs")
    return found


def network(arm: str, options: argparse.Namespace) -> Transformer:
    """The arm's network, with query weights as after training, not zero."""
    text = ResultsFolder(options.results, SCALE).texts()[0]
    config = TABLES[TABLE].arm(arm).model(SCALES[SCALE], text).replace(query_key="normal")
    config = config.replace(depth=options.depth) if options.depth else config
    torch.manual_seed(0)
    with torch.device(options.device):
        model = Transformer(config)
    return model.eval().requires_grad_(False)


def check(model: Transformer, options: argparse.Namespace) -> FoldedTransformer | Transformer:
    """What is timed. In float32 its decoded logits must be those of whole rows, and so must the folded ones."""
    tokens = torch.randint(model.config.vocab_size, (FULL_ROWS, options.past), device=options.device)
    tokens = torch.cat([tokens, tokens[:, :1]], dim=1)
    whole = model(tokens)[:, -1]
    vanilla = model.config.vanilla
    timed = fold(model, max_condition=default_max_condition(getattr(torch, options.dtype))) if vanilla else model
    for name, each in {"decoded": model, "folded": timed}.items():
        decoding = Decoding(each, options, tokens[:, :-1])
        error = float((decoding.logits[:, -1] - whole).abs().max() / whole.abs().max())
        if not error <= LARGEST_ERROR:
            sys.exit(f"{name} logits are {error:.1e} off those of the whole row: no speed is printed")
    return timed


def main() -> None:
    """Check, measure, print."""
    options = arguments()
    dtype, on_gpu = getattr(torch, options.dtype), options.device.startswith("cuda")
    records = finished(options.results)
    models = {name: check(network(name, options), options).to(dtype) for name in records}
    device = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{options.dtype}, {options.past} cached tokens a row, {device}", flush=True)
    for batch in options.batch:
        prompt = torch.randint(256, (batch, options.past), generator=torch.Generator().manual_seed(1))
        decodings = {name: Decoding(model, options, prompt) for name, model in models.items()}
        if on_gpu:
            for name, decoding in decodings.items():
                check_replay(name, decoding)
        rounds = range(options.rounds)
        times = [{n: milliseconds(d.step, options.steps, on_gpu) for n, d in decodings.items()} for _ in rounds]
        for name, record in records.items():
            median = statistics.median(row[name] for row in times)
            row = {
                "arm": name, "train_loss": record.train_loss, "valid_loss": record.valid_loss, "batch": batch,
                "weights": sum(p.numel() for p in models[name].parameters()), "ms": median,
                "tokens_per_second": 1e3 * batch / median, "dtype": options.dtype, "past": options.past,
                "device": device, "torch": torch.__version__,
            }  # fmt: skip
            print(
                f"batch {batch:3} {name:24} loss {record.train_loss:.3f} {row['weights'] / 1e6:6.1f}M weights "
                f"{median:9.2f} ms {row['tokens_per_second']:9.1f} tokens/s",
                flush=True,
            )
            if options.out is not None:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

"""Is the loader's time hidden? Steps of real work on a GPU with batches from the loader, and with one batch for ever.

    python benchmarks/loader.py [--device cuda] [--steps 300] [--length 1024] [--batch 64]

Prepares the standard library as bytes in a temporary folder. The work is a stack of matrix products on an embedding of
the batch, as wide as asked; it waits for the device each step, so that nothing but prefetching can hide the loader.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from skipless.data.loader import Batch, TokenLoader
from skipless.data.prepare import Preparation, prepare
from skipless.data.store import TokenStore
from skipless.data.tokenizer import Bytes


def work(batch: Batch, table: Tensor, weights: Tensor) -> None:
    """Some milliseconds on the device, depending on the batch."""
    hidden = table[batch.inputs].flatten(0, 1)
    for weight in weights:
        hidden = hidden @ weight
    hidden.float().sum().item()


def seconds_per_step(batches: Iterator[Batch], steps: int, table: Tensor, weights: Tensor) -> float:
    """Mean time of a step after ten to warm up."""
    for _ in range(10):
        work(next(batches), table, weights)
    started = time.perf_counter()
    for _ in range(steps):
        work(next(batches), table, weights)
    return (time.perf_counter() - started) / steps


def main() -> None:
    """Print milliseconds per step with and without loading, and how long the reader waited."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    chosen = parser.parse_args()
    dtype = torch.bfloat16 if chosen.device == "cuda" else torch.float32
    table = torch.randn(256, chosen.width, device=chosen.device, dtype=dtype)
    weights = torch.randn(chosen.layers, chosen.width, chosen.width, device=chosen.device, dtype=dtype)
    weights = weights / chosen.width**0.5
    with tempfile.TemporaryDirectory() as folder:
        prepare(Preparation("stdlib", Bytes()), folder)
        loader = TokenLoader(TokenStore(folder), chosen.length, chosen.batch)
        making = []
        for _ in range(2):  # the second time the pages are mapped
            started = time.perf_counter()
            for step in range(50):
                loader.batch(step)
            making.append((time.perf_counter() - started) / 50)
        fixed = loader.batch(0).to(chosen.device)
        without = seconds_per_step(iter(lambda: fixed, None), chosen.steps, table, weights)
        with loader.batches(device=chosen.device) as batches:
            loaded = seconds_per_step(batches, chosen.steps, table, weights)
            waited = batches.waited / (chosen.steps + 10)
    print(
        f"{chosen.device}, batch {chosen.batch} x {chosen.length}; making a batch takes "
        f"{1e3 * making[0]:.3f} ms, then {1e3 * making[1]:.3f} ms"
    )
    print(f"step with one batch for ever {1e3 * without:.3f} ms, with the loader {1e3 * loaded:.3f} ms")
    print(f"waited for the loader {1e3 * waited:.3f} ms a step")


if __name__ == "__main__":
    main()

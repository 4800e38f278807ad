"""Speed of `skipless prepare`'s tokenising against calling SentencePiece directly on the same cores.

    python benchmarks/tokenise.py [TEXT] [--model FILE] [--cores N] [--rounds N] [--mb N]

Direct: all text in memory, `encode(documents, num_threads=cores)`, with lists of ints (the usual call), with numpy
arrays (the fastest one), and with lists from a packed file. Ours: the whole of `prepare`, from the file to flushed
shards and manifest, with its hashes and repeat rate. Rounds alternate and the best of each counts, since other work
may share the machine; CPU time is that of all threads.
"""

import argparse
import lzma
import tempfile
import time
from pathlib import Path

import sentencepiece

from skipless.data.prepare import Preparation, available_cores, prepare
from skipless.data.text import open_corpus
from skipless.data.tokenizer import FileTokenizer

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def main() -> None:
    """Print the speeds and their ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("text", nargs="?", type=Path, default=SHARED / "wikipedia" / "train-00.txt.xz")
    parser.add_argument("--model", type=Path, default=SHARED / "tokenizer" / "wiki32k.model")
    parser.add_argument("--cores", type=int, default=available_cores())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mb", type=float, default=20.0, help="how much of the text to use")
    chosen = parser.parse_args()
    documents, size = [], 0
    for text in open_corpus(chosen.text):
        documents.append(text)
        size += len(text.encode())
        if size > chosen.mb * 1e6:
            break
    processor = sentencepiece.SentencePieceProcessor(model_file=str(chosen.model))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        joined = "\n\n\n".join(documents).encode()
        (folder / "plain.txt").write_bytes(joined)
        (folder / "packed.txt.xz").write_bytes(lzma.compress(joined, preset=1))
        ways = {
            "direct, lists": lambda: processor.encode(documents, num_threads=chosen.cores),
            "direct, numpy": lambda: processor.encode(documents, num_threads=chosen.cores, return_type="numpy"),
            "direct, .txt.xz": lambda: processor.encode(read(folder / "packed.txt.xz"), num_threads=chosen.cores),
            "prepare, .txt": lambda: run(folder / "plain.txt", chosen),
            "prepare, .txt.xz": lambda: run(folder / "packed.txt.xz", chosen),
        }
        report(ways, size, chosen.rounds)


def read(text: Path) -> list[str]:
    """The documents as one would read them by hand."""
    with lzma.open(text) as file:
        return file.read().decode().split("\n\n\n")


def run(text: Path, chosen: argparse.Namespace) -> None:
    """One whole preparation into a folder of its own."""
    with tempfile.TemporaryDirectory() as out:
        prepare(Preparation(str(text), FileTokenizer(chosen.model)), out, chosen.cores)


def report(ways: dict, size: int, rounds: int) -> None:
    """Time the ways in turn and print the best of each against the direct ones."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    work: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            started, worked = time.perf_counter(), time.process_time()
            way()
            times[name].append(time.perf_counter() - started)
            work[name].append(time.process_time() - worked)
    speed = {name: size / 1e6 / min(seconds) for name, seconds in times.items()}
    print(f"{size / 1e6:.1f} MB of text, best of {rounds}")
    for name, value in speed.items():
        lists, arrays = value / speed["direct, lists"], value / speed["direct, numpy"]
        effort = 1e3 * min(work[name]) / (size / 1e6)
        print(f"{name:18} {value:7.1f} MB/s   {lists:5.2f}x lists   {arrays:5.2f}x numpy   {effort:6.1f} ms CPU per MB")


if __name__ == "__main__":
    main()

"""Which tokenizer to prepare with: trained on a bounded sample of the corpus, read from a file, or bytes."""

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from skipless.data.corpora import Part
from skipless.data.files import named_errors
from skipless.data.tokenizer import ByteTokenizer, SentencePieceTokenizer, Tokenizer, load_tokenizer
from skipless.data.unigram import FAILED

LONGEST_LINE = 4096  # bytes; the trainer leaves out lines above 4192
SMALLEST_VOCAB = 259  # <unk>, </s>, the 256 bytes and one piece


@dataclass(frozen=True)
class TrainUnigram:
    """Train SentencePiece (unigram, byte fallback) on up to `sample_mb` MB of the training text.

    The sample is the beginning of every part of the corpus, in proportion to the parts' sizes: the same on each run,
    and quick at any corpus size. Training takes about 25 times the sample's size in memory.
    """

    vocab_size: int = 32_000
    sample_mb: float = 64.0

    def __post_init__(self):
        if self.vocab_size < SMALLEST_VOCAB:
            raise ValueError(
                f"a vocabulary of {self.vocab_size}: byte fallback alone needs {SMALLEST_VOCAB}; or use --bytes"
            )
        if self.sample_mb <= 0:
            raise ValueError(f"sample_mb={self.sample_mb}: the tokenizer needs some text; 64 is usual")

    def describe(self) -> dict:
        """What a prepared folder remembers of this choice."""
        return {"kind": "unigram", **asdict(self)}

    def make(self, parts: Sequence[Part], keep: Callable[[bytes], bool]) -> Tokenizer:
        """Train on the documents of `parts` that `keep` accepts."""
        lines = sample_lines(parts, round(self.sample_mb * 1e6), keep)
        return SentencePieceTokenizer(train_apart(lines, self.vocab_size))


@dataclass(frozen=True)
class FileTokenizer:
    """Use a SentencePiece model that is there already."""

    path: Path

    def describe(self) -> dict:
        """By content, not by path."""
        with named_errors(self.path):
            return {"kind": "file", "sha256": hashlib.sha256(self.path.read_bytes()).hexdigest()}

    def make(self, parts: Sequence[Part], keep: Callable[[bytes], bool]) -> Tokenizer:
        """Load it."""
        return load_tokenizer(self.path)


@dataclass(frozen=True)
class Bytes:
    """The 256 byte values."""

    def describe(self) -> dict:
        """Nothing to choose."""
        return {"kind": "bytes"}

    def make(self, parts: Sequence[Part], keep: Callable[[bytes], bool]) -> Tokenizer:
        """The byte tokenizer."""
        return ByteTokenizer()


TokenizerChoice = TrainUnigram | FileTokenizer | Bytes


def sample_lines(parts: Sequence[Part], budget: int, keep: Callable[[bytes], bool]) -> Iterator[bytes]:
    """Lines of the first documents of each part, `budget` bytes in all, shared by the parts' sizes.

    A share that a part does not use passes to the later ones; a corpus smaller than the budget is taken whole.
    """
    weights = [max(part.size() or 1, 1) for part in parts]
    for index, part in enumerate(parts):
        share = budget * weights[index] // sum(weights[index:])
        for text in part.documents():
            if share <= 0:
                break
            data = text.encode("utf-8")
            if keep(data):
                yield from _lines(data[:share])
                share -= min(len(data), share)
                budget -= min(len(data), budget)


def _lines(data: bytes) -> Iterator[bytes]:
    for line in data.split(b"\n"):
        while len(line) > LONGEST_LINE:
            cut = line.rfind(b" ", 0, LONGEST_LINE)
            cut = cut if cut > 0 else LONGEST_LINE
            yield line[:cut]
            line = line[cut:]
        if line:
            yield line


def train_apart(lines: Iterator[bytes], vocab_size: int) -> bytes:
    """A trained SentencePiece model, made by a process of its own that Ctrl-C ends and that dies with this one."""
    package_root = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "skipless.data.unigram", str(vocab_size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
    )
    if child.stdin is None:
        raise RuntimeError("the trainer has no standard input")
    with child:
        try:
            count = _feed(child.stdin, lines)
            model, complaint = child.communicate()
        except BaseException:
            child.kill()
            with suppress(BrokenPipeError):
                child.stdin.close()
            raise
    if child.returncode:
        raise _explain(child.returncode, complaint.decode("utf-8", "replace").strip(), vocab_size, count)
    return model


def _feed(stdin, lines: Iterator[bytes]) -> int:
    count = 0
    try:
        for line in lines:
            stdin.write(line + b"\n")
            count += 1
    except BrokenPipeError:
        pass  # the child's exit code says why
    return count


def _explain(code: int, complaint: str, vocab_size: int, lines: int) -> ValueError | OSError:
    if lines == 0:
        return ValueError("the corpus holds no text to train a tokenizer on: is it the right path?")
    if found := re.search(r"too high \(\d+\)\. Please set it to a value <= (\d+)", complaint):
        return ValueError(
            f"a vocabulary of {vocab_size:,} is more than this text allows: use --vocab {found[1]} or less, a larger "
            "corpus or --sample-mb, or --bytes"
        )
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", complaint):
        return ValueError(
            f"a vocabulary of {vocab_size:,} is less than this text's characters need: use --vocab {found[1]} or more"
        )
    if code == FAILED:
        return ValueError(
            f"SentencePiece could not train on this text: {complaint.splitlines()[-1] if complaint else code}"
        )
    last = complaint.splitlines()[-1] if complaint else "no message"
    return OSError(
        f"training the tokenizer ended with exit code {code} ({last}): if memory ran out, use a smaller --sample-mb"
    )

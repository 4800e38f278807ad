"""Tokenizers: bytes and SentencePiece, and how to get one: take the bytes, open a file, or train on a corpus.

`python -m skipless.data.tokenizer VOCAB_SIZE` is the process that trains: lines in, a SentencePiece model out.

Training is a process of its own because the trainer cannot be interrupted and keeps its memory.
"""

import hashlib
import io
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from skipless.console import Progress
from skipless.data.formats import named_errors
from skipless.data.text import Part

MODEL_FILE = "tokenizer.model"
MARK = "▁"  # U+2581, by which SentencePiece stands for a space
THREADS = 16  # fixed: the trained model depends on the number of threads, and must not depend on the machine
LONGEST_LINE = 4096  # bytes; the trainer leaves out lines above 4192
LARGEST_VOCAB = 10_000_000
SMALLEST_VOCAB = 259  # <unk>, </s>, the 256 bytes and one piece
MOST_MEGABYTES = 1_000_000  # of text
_ROUND = re.compile(r"EM sub_iter=\d+ size=(\d+)")  # in the trainer's log: pieces that are left
_SAYS = "skipless: "
_COMPLAINT = re.compile(f"{_SAYS}(.*)")
FAILED = 3  # exit code of the process where SentencePiece refuses the text


class Tokenizer(Protocol):
    """Text to token ids and back.

    `end` is put after each document; `sha256` tells tokenizers apart; `model` is what a prepared folder keeps as
    tokenizer.model, or None where the kind says all.
    """

    kind: str
    vocab_size: int
    end: int
    sha256: str
    model: bytes | None

    def encode(self, text: str) -> np.ndarray:
        """Token ids (int32), without the end-of-document token."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of token ids; end-of-document tokens stand for no text."""
        ...

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        """All documents in one array of the shards' dtype, each followed by `end`. Safe from several threads."""
        ...

    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes of the text that each token stands for, (vocab_size,) int64: ▁ is a space, control tokens none.

        Sums of these are the size of the text where the tokenizer neither normalises it nor puts a space before it.
        """
        ...


def token_dtype(vocab_size: int) -> np.dtype:
    """Little-endian uint16 where the vocabulary allows it, else uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class ByteTokenizer:
    """The 256 byte values: the character-level case, r ≈ .05.

    The end of a document is 0xFF, which no UTF-8 text contains, so that the vocabulary stays at 256.
    """

    kind = "bytes"
    vocab_size = 256
    end = 0xFF
    model: bytes | None = None
    sha256 = hashlib.sha256(b"skipless bytes, end 255").hexdigest()

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text; bytes that do not form UTF-8, as a model may produce, become U+FFFD."""
        return bytes(int(token) for token in tokens if int(token) != self.end).decode("utf-8", "replace")

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        joined = b"".join(text.encode("utf-8") + b"\xff" for text in texts)
        return np.frombuffer(joined, dtype=np.uint8).astype(token_dtype(self.vocab_size))

    def token_bytes(self) -> np.ndarray:
        sizes = np.ones(self.vocab_size, dtype=np.int64)
        sizes[self.end] = 0
        return sizes


class SentencePieceTokenizer:
    """A SentencePiece model. Models trained by skipless give back exactly the text they were given.

    SentencePiece writes spaces as ▁ and so cannot tell a real ▁ (U+2581) from one; we spell a real one by its three
    byte pieces. Models from elsewhere keep their own normalisation and may not be exact.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes, name: str = "the SentencePiece model"):
        sentencepiece = import_module("sentencepiece")
        self.model: bytes | None = model
        self._processor: Any = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
            self.vocab_size = int(self._processor.get_piece_size())
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"{name} is not a SentencePiece model: give the .model file that its training wrote"
            ) from error
        self.end = int(self._processor.eos_id())
        if self.end < 0:
            raise ValueError(f"{name} has no </s> piece to end documents with: train it with eos_id ≥ 0")
        self.sha256 = hashlib.sha256(model).hexdigest()
        self._mark = self._mark_bytes()

    def _mark_bytes(self) -> np.ndarray | None:
        """The byte pieces of a real ▁, if the model has them and puts no ▁ of its own before each text."""
        pieces = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in MARK.encode()]
        exact = all(self._processor.is_byte(piece) for piece in pieces) and self._processor.decode([*pieces]) == MARK
        dummy_prefix = len(self._processor.encode("")) or self._processor.encode("a", out_type=str)[0].startswith(MARK)
        return np.array(pieces, dtype=np.int32) if exact and not dummy_prefix else None

    def encode(self, text: str) -> np.ndarray:
        if MARK not in text or self._mark is None:
            return self._processor.encode(text, return_type="numpy")
        first, *others = text.split(MARK)
        pieces = [self._processor.encode(first, return_type="numpy")]
        for other in others:
            pieces += [self._mark, self._processor.encode(other, return_type="numpy")]
        return np.concatenate(pieces)

    def decode(self, tokens: Iterable[int]) -> str:
        return self._processor.decode([int(token) for token in tokens if int(token) != self.end])

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        end = np.array([self.end], dtype=np.int32)
        pieces = [piece for text in texts for piece in (self.encode(text), end)]
        joined = np.concatenate(pieces) if pieces else end[:0]
        return joined.astype(token_dtype(self.vocab_size))

    def token_bytes(self) -> np.ndarray:
        def size(token: int) -> int:
            if self._processor.is_control(token):
                return 0
            piece = self._processor.id_to_piece(token)
            return 1 if self._processor.is_byte(token) else len(piece.replace(MARK, " ").encode())

        return np.array([size(token) for token in range(self.vocab_size)], dtype=np.int64)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer called "bytes", or that of a SentencePiece .model file. For a prepared folder see TokenStore."""
    if str(path) == "bytes":
        return ByteTokenizer()
    path = Path(path)
    with named_errors(path):
        model = path.read_bytes()
    return SentencePieceTokenizer(model, str(path))


def check_megabytes(name: str, size: float) -> None:
    """A size of text that is some, and that a machine could hold."""
    if not 0.0 < size <= MOST_MEGABYTES:
        raise ValueError(f"{name}={size}: use a size above 0, of at most {MOST_MEGABYTES:,} MB; 64 is usual")


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
        if self.vocab_size > LARGEST_VOCAB:
            raise ValueError(f"a vocabulary of {self.vocab_size:,}: the largest is {LARGEST_VOCAB:,}; 32,000 is usual")
        check_megabytes("sample_mb", self.sample_mb)

    def describe(self) -> dict:
        """What a prepared folder remembers of this choice."""
        return {"kind": "unigram", **asdict(self)}

    def make(self, parts: Sequence[Part], keep: Callable[[bytes], bool], progress: Progress | None = None) -> Tokenizer:
        """Train on the documents of `parts` that `keep` accepts."""
        lines = sample_lines(parts, round(self.sample_mb * 1e6), keep)
        return SentencePieceTokenizer(train_tokenizer(lines, self.vocab_size, progress))


@dataclass(frozen=True)
class FileTokenizer:
    """Use a SentencePiece model that is there already."""

    path: Path

    def describe(self) -> dict:
        """The file by its content, not by its path."""
        with named_errors(self.path):
            return {"kind": "file", "sha256": hashlib.sha256(self.path.read_bytes()).hexdigest()}

    def make(self, parts: Sequence[Part], keep: Callable[[bytes], bool], progress: Progress | None = None) -> Tokenizer:
        return load_tokenizer(self.path)


@dataclass(frozen=True)
class Bytes:
    """The 256 byte values."""

    def describe(self) -> dict:
        return {"kind": "bytes"}

    def make(self, parts: Sequence[Part], keep: Callable[[bytes], bool], progress: Progress | None = None) -> Tokenizer:
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


def train_tokenizer(lines: Iterator[bytes], vocab_size: int, progress: Progress | None = None) -> bytes:
    """A trained SentencePiece model, made by a process of its own that Ctrl-C ends and that ends with this one.

    It takes up to a minute of CPU time for each megabyte of words that all differ, such as numbers or indented names.
    """
    progress = progress or Progress(quiet=True)
    package_root = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "skipless.data.tokenizer", str(vocab_size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    complaint: list[str] = []
    listener = threading.Thread(target=_listen, args=(child.stderr, complaint, vocab_size, progress), daemon=True)
    with child:
        try:
            listener.start()
            count = _feed(child.stdin, lines)
            with suppress(BrokenPipeError):
                child.stdin.close()
            model = child.stdout.read()
        except BaseException:
            child.kill()
            with suppress(BrokenPipeError):
                child.stdin.close()
            raise
        finally:
            if listener.is_alive():
                listener.join()
            progress.stop()
    if child.returncode:
        raise _explain(child.returncode, "\n".join(complaint), vocab_size, count)
    return model


def _listen(stderr: IO[bytes], complaint: list[str], vocab_size: int, progress: Progress) -> None:
    """Keep what the process complains of, and show how far it is: rounds that leave 3/4 of the pieces, to 1.1 as many.

    Its first lines say what it reads, its last ones the error.
    """
    rounds = total = 0
    for line in _until_closed(stderr):
        words = line.decode("utf-8", "replace").rstrip()
        if found := _ROUND.search(words):
            rounds += 1
            left = math.log(max(int(found[1]) / (1.1 * vocab_size), 1.0)) / math.log(4 / 3)
            if total == 0:
                progress.start("training the tokenizer", percent=True)
            total = max(total, rounds + 1 + 2 * math.ceil(left))
            progress.show(done=rounds, total=total)
        elif found := _COMPLAINT.match(words):
            complaint.append(found[1])


def _until_closed(stream: IO[bytes]) -> Iterator[bytes]:
    """The lines of a pipe, which Ctrl-C may close while another thread still reads it."""
    with suppress(ValueError):
        yield from stream


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


def tokenizer_process() -> int:
    """Read lines, train, write the model; the trainer's complaint goes to standard error with exit code FAILED."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        model = _train_unigram((line[:-1] for line in sys.stdin.buffer), int(sys.argv[1]))
    except RuntimeError as error:
        print(*(f"{_SAYS}{line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
        return FAILED
    with suppress(BrokenPipeError):
        sys.stdout.buffer.write(model)
    return 0


def _train_unigram(lines: Iterator[bytes], vocab_size: int) -> bytes:
    """A unigram model with byte fallback that gives back any text exactly: no normalisation, no ▁ of its own."""
    model = io.BytesIO()
    import_module("sentencepiece").SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        model_type="unigram",
        vocab_size=vocab_size,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        allow_whitespace_only_pieces=True,
        unk_id=0,
        eos_id=1,
        bos_id=-1,
        pad_id=-1,
        num_threads=THREADS,
        minloglevel=0,  # its log says how far it is
    )
    return model.getvalue()


def _end_with(parent: int) -> None:
    """End this process when its parent has ended."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(tokenizer_process())

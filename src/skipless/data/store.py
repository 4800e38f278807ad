"""The tokens of a prepared folder: its manifest, its shards as one array, and how shards are written and checked."""

import hashlib
import json
import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from skipless.data.tokenizer import MODEL_FILE, ByteTokenizer, SentencePieceTokenizer, Tokenizer, token_dtype
from skipless.files import WholeFile, hash_of, mapping, read_json, reading, write_whole, writing
from skipless.schema import build

if TYPE_CHECKING:
    from skipless.data.image_store import ImageFile

logger = logging.getLogger("skipless")
MANIFEST = "manifest.json"
VERIFIED = "verified.json"
FORMAT = 1
IMAGES = "images"  # the kind of a prepared folder that is not of tokens
_MOST_OPEN = 64  # shards, of which a process may not have thousands open
_MOST_READ = 1 << 26  # tokens at once
REMAKE = "delete it, and the same `skipless prepare` command makes it anew"


@dataclass(frozen=True)
class Shard:
    """One file of tokens, raw and little-endian: what it holds and its hash."""

    split: str
    file: str
    tokens: int
    documents: int
    text_bytes: int
    sha256: str

    def __post_init__(self):
        if Path(self.file).name != self.file or min(self.tokens, self.documents, self.text_bytes) < 0:
            raise ValueError(f"{self} is no shard: it is a file of the folder, and its counts are not negative")


@dataclass(frozen=True)
class Section:
    """A run of documents, about shard_mb of text, and the shards it became: at most one for each split.

    `end` is where the next section starts: a part of the corpus and a document in it. It makes any section
    reproducible by itself.
    """

    index: int
    end: tuple[int, int]
    last: bool
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Split:
    """What a split holds in all. repeat_rate is r = P(two tokens are equal), None below two tokens."""

    tokens: int
    documents: int
    text_bytes: int
    repeat_rate: float | None


@dataclass(frozen=True)
class TokenizerNote:
    """What a folder remembers of its tokenizer."""

    kind: Literal["bytes", "sentencepiece"]
    sha256: str
    vocab_size: int
    end: int

    def __post_init__(self):
        if not 0 <= self.end < self.vocab_size < 1 << 31:
            raise ValueError(f"{self}: end is one of its tokens, of which there are fewer than 2³¹")

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "TokenizerNote":
        kind: Any = tokenizer.kind
        return cls(kind, tokenizer.sha256, tokenizer.vocab_size, tokenizer.end)


@dataclass(frozen=True)
class Manifest:
    """The table of contents of a prepared folder, written last: a folder with a manifest is complete."""

    options: dict
    tokenizer: TokenizerNote
    dtype: str
    splits: dict[str, Split]
    sections: tuple[Section, ...]

    def __post_init__(self):
        if np.dtype(self.dtype) != token_dtype(self.tokenizer.vocab_size):
            raise ValueError(f"dtype is {self.dtype!r}, not that of {self.tokenizer.vocab_size:,} tokens")
        if self.tokenizer.kind == "bytes" and self.tokenizer != TokenizerNote.of(ByteTokenizer()):
            raise ValueError(f"{self.tokenizer} is not the tokenizer of bytes")
        for name, split in self.splits.items():
            shards = self.shards(name)
            counts = [sum(getattr(shard, count) for shard in shards) for count in ("tokens", "documents", "text_bytes")]
            if counts != [split.tokens, split.documents, split.text_bytes]:
                raise ValueError(f"splits.{name} is {split}, and its shards add up to {counts}")
            if split.repeat_rate is not None and not 0.0 <= split.repeat_rate <= 1.0:
                raise ValueError(f"splits.{name}.repeat_rate is {split.repeat_rate}; it is a probability")
        if [section.index for section in self.sections] != list(range(len(self.sections))):
            raise ValueError("the sections are not numbered from 0 on")
        if {shard.split for section in self.sections for shard in section.shards} > self.splits.keys():
            raise ValueError("shards are of other splits than are listed")

    def shards(self, split: str) -> list[Shard]:
        return [shard for section in self.sections for shard in section.shards if shard.split == split]

    def to_json(self) -> str:
        """Sorted and without dates: equal content, equal bytes."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, values: Any) -> "Manifest":
        if (version := values["format"]) != FORMAT:
            raise ValueError(f"format {version!r}, and this version reads {FORMAT}")
        return build(cls, {name: value for name, value in values.items() if name != "format"}, "a manifest")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared folder. Without one the error says whether the folder is unfinished or another's."""
    path = folder / MANIFEST
    if not path.is_file():
        started = (folder / "options.json").is_file()
        problem = "is not finished" if started else "is not a prepared folder"
        raise ValueError(f"{folder} {problem} (no {MANIFEST}): run `skipless prepare … --out {folder}`")
    return read_json(path, lambda values: _of_tokens(values, path), "prepare the folder again with --force")


def _of_tokens(values: Any, path: Path) -> Manifest:
    if mapping(values).get("kind") == IMAGES:
        raise ValueError(
            f"{path} is of images, and tokens are asked for; a network of images is one such as vit/mirrored"
        )
    return Manifest.from_json(values)


def holds_images(folder: str | Path) -> bool:
    """Whether a prepared folder is one of images; one of tokens, or none, is not."""
    path = Path(folder) / MANIFEST
    return path.is_file() and read_json(path, lambda values: mapping(values).get("kind") == IMAGES)


def fingerprint(folder: str | Path) -> str | None:
    """A short name for the tokens of a prepared folder, by their hashes; None where there is no manifest."""
    path = Path(folder) / MANIFEST
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else None


class TokenStore:
    """The tokens of one split of a prepared folder, as if they were one array; shards stay on disk until touched.

    Opening checks that the tokenizer is the one the shards were made with and that each shard has its length. With
    verify="changed" a shard is hashed when it differs in size or times from when it was last found good (prepare
    notes that); "always" hashes all; "never" none.
    """

    def __init__(
        self,
        folder: str | Path,
        split: str = "train",
        verify: Literal["changed", "always", "never"] = "changed",
    ):
        if verify not in ("changed", "always", "never"):
            raise ValueError(f"verify={verify!r}: use 'changed', 'always' or 'never'")
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self.split = split
        self.dtype = np.dtype(self.manifest.dtype)
        self.vocab_size, self.end = self.manifest.tokenizer.vocab_size, self.manifest.tokenizer.end
        self.shards = self.manifest.shards(split)
        if not self.shards:
            held = ", ".join(f"{name} ({part.tokens:,} tokens)" for name, part in self.manifest.splits.items())
            raise ValueError(
                f"{self.folder} has no tokens for {split!r}; it has {held}. For validation text prepare with a larger "
                "--valid-fraction or with --valid"
            )
        check_sizes(self.folder, self.shards, self.dtype.itemsize)
        if verify != "never":
            verify_shards(self.folder, self.shards, trust=verify == "changed")
        self._handles: OrderedDict[int, int] = OrderedDict()  # of the shards last read
        self._one_reader = threading.Lock()
        weakref.finalize(self, _close, self._handles)
        self._ends = np.cumsum([shard.tokens for shard in self.shards])
        self._starts = self._ends - [shard.tokens for shard in self.shards]

    def __reduce__(self) -> tuple:
        """A copy in another process, as a DataLoader's, opens the files itself."""
        return TokenStore, (self.folder, self.split, "never")

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __repr__(self) -> str:
        return f"TokenStore({str(self.folder)!r}, {self.split!r}): {len(self):,} tokens of {self.vocab_size:,} kinds"

    @property
    def repeat_rate(self) -> float | None:
        """r of this split, as prepare measured it."""
        return self.manifest.splits[self.split].repeat_rate

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer kept beside the shards; an error if it is not the one that made them."""
        return folder_tokenizer(self.folder, self.manifest.tokenizer)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuse a tokenizer other than the one that made the shards."""
        match_tokenizer(self.folder, self.manifest.tokenizer, tokenizer)

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens start … start+length−1 in the shards' dtype, across shards if need be."""
        if start < 0 or length < 0 or start + length > len(self):
            raise ValueError(f"tokens {start} to {start + length} of {len(self)}: out of range")
        pieces = [np.empty(0, self.dtype)]
        while length > 0:
            index = int(np.searchsorted(self._ends, start, side="right"))
            pieces.append(self._tokens(index, start - int(self._starts[index]), length))
            start, length = start + len(pieces[-1]), length - len(pieces[-1])
        return pieces[1] if len(pieces) == 2 else np.concatenate(pieces)

    def gather(self, starts: np.ndarray, rows: np.ndarray) -> None:
        """Fill each row of `rows`, integers shaped (len(starts), length), with the tokens from its start on."""
        length = rows.shape[1]
        shards = np.searchsorted(self._ends, starts, side="right")
        firsts = starts - self._starts[np.minimum(shards, len(self.shards) - 1)]
        for row, start, shard, first in zip(rows, starts.tolist(), shards.tolist(), firsts.tolist(), strict=True):
            inside = self._tokens(shard, first, length) if shard < len(self.shards) else ()
            row[:] = inside if len(inside) == length else self.read(start, length)

    def pieces(self, length: int = 1 << 20) -> Iterator[np.ndarray]:
        """All tokens in order, in arrays of at most `length`."""
        for index, shard in enumerate(self.shards):
            for start in range(0, shard.tokens, length):
                yield self._tokens(index, start, length)

    def _tokens(self, index: int, first: int, most: int) -> np.ndarray:
        """Tokens of a shard from `first` on, `most` or as many as it has.

        By reading and not by mapping it into memory: there, a file that is cut short meanwhile would end the process.
        """
        count, size = min(most, self.shards[index].tokens - first, _MOST_READ), self.dtype.itemsize
        with self._one_reader:
            data = read_at(self._opened(index), count * size, first * size)
        if len(data) < count * size:
            path = self.folder / self.shards[index].file
            raise ValueError(f"{path} was cut short while it was in use: {REMAKE}")
        return np.frombuffer(data, self.dtype)

    def _opened(self, index: int) -> int:
        if index not in self._handles:
            if len(self._handles) == _MOST_OPEN:
                os.close(self._handles.popitem(last=False)[1])
            path = self.folder / self.shards[index].file
            with reading(path, REMAKE):
                self._handles[index] = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self._handles.move_to_end(index)
        return self._handles[index]


def _close(handles: dict[int, int]) -> None:
    for handle in handles.values():
        os.close(handle)


def _seek_and_read(handle: int, size: int, start: int) -> bytes:
    os.lseek(handle, start, os.SEEK_SET)
    return os.read(handle, size)


# (handle, size, start) → bytes of an open file; Windows lacks pread
read_at: Callable[[int, int, int], bytes] = getattr(os, "pread", _seek_and_read)


def folder_tokenizer(folder: Path, described: TokenizerNote) -> Tokenizer:
    """The tokenizer of a folder whose manifest describes it so."""
    if described.kind == "bytes":
        tokenizer: Tokenizer = ByteTokenizer()
    else:
        path = folder / MODEL_FILE
        if not path.is_file():
            raise ValueError(f"{path} is missing: the same `skipless prepare` command puts it back")
        tokenizer = SentencePieceTokenizer(path.read_bytes(), str(path))
    match_tokenizer(folder, described, tokenizer)
    return tokenizer


def match_tokenizer(folder: Path, described: TokenizerNote, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that is not the described one."""
    if TokenizerNote.of(tokenizer) != described:
        raise ValueError(
            f"this tokenizer ({tokenizer.kind}, {tokenizer.vocab_size:,} pieces, {tokenizer.sha256[:12]}) did not make "
            f"the shards in {folder}, which are of {described.kind}, {described.vocab_size:,} pieces, "
            f"{described.sha256[:12]}: use the folder's own (prepare puts a deleted {MODEL_FILE} back), or prepare "
            "another folder"
        )


class ShardWriter:
    """Writes one shard: `add` token arrays, then `finish`; nothing of the shard's name exists before that."""

    def __init__(self, folder: Path, split: str, index: int):
        self.split, self.path = split, folder / f"{split}-{index:05d}.bin"
        self._file = WholeFile(self.path)
        self._hash = hashlib.sha256()
        self._tokens = self._documents = self._text_bytes = 0

    def add(self, tokens: np.ndarray, documents: int, text_bytes: int) -> None:
        """Append tokens; documents and text_bytes are counted for the manifest."""
        data = np.ascontiguousarray(tokens).data.cast("B")
        with writing(self.path):
            self._file.write(data)
        self._hash.update(data)
        self._tokens += len(tokens)
        self._documents += documents
        self._text_bytes += text_bytes

    def finish(self) -> Shard:
        """Flush to the disk and give the file its name."""
        with writing(self.path):
            self._file.finish()
        sha256 = self._hash.hexdigest()
        return Shard(self.split, self.path.name, self._tokens, self._documents, self._text_bytes, sha256)

    def abandon(self) -> None:
        self._file.abandon()


def check_sizes(folder: Path, shards: Iterable[Shard], itemsize: int) -> None:
    """`check_size` of each shard."""
    for shard in shards:
        check_size(folder / shard.file, shard.tokens * itemsize)


def check_size(path: Path, expected: int) -> None:
    """Refuse a file that is missing or not as long as it was when finished."""
    if not path.is_file():
        raise ValueError(f"{path} is missing: the same `skipless prepare` command makes it anew")
    if (size := path.stat().st_size) != expected:
        raise ValueError(f"{path} has {size:,} bytes instead of {expected:,}: it is cut short or changed; {REMAKE}")


def verify_shards(folder: Path, shards: "Sequence[Shard | ImageFile]", trust: bool) -> None:
    """Check sizes and hashes; with `trust`, skip the hash of a file untouched since it was last found good.

    Several processes may do so at once. Where the note cannot be written, the next one hashes again.
    """
    path = folder / VERIFIED
    try:
        known = read_json(path, mapping) if trust else {}
    except (OSError, ValueError):
        known = {}
    good = dict(known)
    for shard in shards:
        stat = (folder / shard.file).stat()
        stamp = [shard.sha256, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
        if known.get(shard.file) != stamp:
            check_hash(folder, shard)
            good[shard.file] = stamp
    if good != known and os.access(folder, os.W_OK):
        try:
            write_whole(path, json.dumps(good).encode())
        except OSError as error:
            logger.info("the shards are good, but that could not be noted: %s", error)


def check_hash(folder: Path, shard: "Shard | ImageFile") -> None:
    """Refuse a shard whose content is not what was written."""
    path = folder / shard.file
    if hash_of(path) != shard.sha256:
        raise ValueError(f"{path} is damaged (its SHA-256 is not the manifest's): {REMAKE}")

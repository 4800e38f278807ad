"""Tokenising a stream of documents with all cores, in order and in bounded memory, section by section."""

import os
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from skipless.data.corpora import Part, held_out
from skipless.data.files import Seen
from skipless.data.shards import Section, Shard, ShardWriter
from skipless.data.tokenizer import Tokenizer

CHUNK = 1 << 20  # characters handed to a thread at once

Place = tuple[int, int]  # a part, and a document in it


@dataclass(frozen=True)
class Source:
    """A part of a corpus and where its documents go: to one split, or by their hash ("hash")."""

    part: Part
    goes_to: Literal["train", "valid", "hash"]


@dataclass
class Chunk:
    """Documents of one section on their way to the tokenizer. `closes` marks a section's last chunk."""

    section: int
    goes_to: str = "train"
    documents: list[str] = field(default_factory=list)
    size: int = 0
    end: Place = (0, 0)
    closes: bool = False
    last: bool = False


@dataclass(frozen=True)
class Encoded:
    """Tokens of one split of a chunk."""

    split: str
    tokens: np.ndarray
    documents: int
    text_bytes: int


def chunks(sources: Sequence[Source], start: Place, first: int, size: int, seen: Seen | None = None) -> Iterator[Chunk]:
    """Documents from `start` on, in chunks; a section closes with the document that brings it to `size` characters.

    Sections depend on the documents alone. The corpus's end closes the last one, which may be empty.
    """
    section, filled, chunk = first, 0, Chunk(first)
    for index in range(start[0], len(sources)):
        source, done = sources[index], start[1] if index == start[0] else 0
        if chunk.goes_to != source.goes_to:
            if chunk.documents:
                yield chunk
            chunk = Chunk(section, source.goes_to)
        for text in source.part.documents(done, seen):
            done += 1
            chunk.documents.append(text)
            chunk.size += len(text)
            filled += len(text)
            chunk.end, chunk.closes = (index, done), filled >= size
            if chunk.closes or chunk.size >= CHUNK:
                yield chunk
                section, filled = (section + 1, 0) if chunk.closes else (section, filled)
                chunk = Chunk(section, source.goes_to)
    chunk.end, chunk.closes, chunk.last = (len(sources), 0), True, True
    yield chunk


def encode_chunk(tokenizer: Tokenizer, chunk: Chunk, valid_fraction: float) -> list[Encoded]:
    """The chunk's tokens for each split that gets any."""
    texts: dict[str, list[str]] = {"train": [], "valid": []}
    sizes = dict.fromkeys(texts, 0)
    for text in chunk.documents:
        data, split = text.encode("utf-8"), chunk.goes_to
        if split == "hash":
            split = "valid" if held_out(data, valid_fraction) else "train"
        texts[split].append(text)
        sizes[split] += len(data)
    return [
        Encoded(split, tokenizer.encode_documents(mine), len(mine), sizes[split])
        for split, mine in texts.items()
        if mine
    ]


def tokenised(
    found: Iterator[Chunk], tokenizer: Tokenizer, valid_fraction: float, workers: int
) -> Generator[tuple[Chunk, list[Encoded]]]:
    """Chunks with their tokens, in order. At most 2·workers + 2 chunks are held at a time.

    Threads, not processes: SentencePiece runs outside Python's lock.
    """
    waiting: deque[tuple[Chunk, Future]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="skipless-tokenise")
    try:
        for chunk in found:
            waiting.append((chunk, pool.submit(encode_chunk, tokenizer, chunk, valid_fraction)))
            if len(waiting) > 2 * workers + 1:
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class SectionWriter:
    """Writes the shards of one section after another; an unfinished section leaves nothing behind."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._open: dict[str, ShardWriter] = {}

    def add(self, chunk: Chunk, encoded: list[Encoded]) -> Section | None:
        """Write a chunk's tokens; the finished section if this chunk closes it."""
        for part in encoded:
            if part.split not in self._open:
                self._open[part.split] = ShardWriter(self._folder, part.split, chunk.section)
            self._open[part.split].add(part.tokens, part.documents, part.text_bytes)
        if not chunk.closes:
            return None
        shards: list[Shard] = [self._open[split].finish() for split in sorted(self._open)]
        self._open.clear()
        return Section(chunk.section, chunk.end, chunk.last, tuple(shards))

    def abandon(self) -> None:
        """Remove what is unfinished."""
        for writer in self._open.values():
            writer.abandon()
        self._open.clear()


def available_cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

"""Prepare: from a corpus to a folder of token shards. It can be killed at any moment and run again.

Documents are tokenised by all cores, in order and in bounded memory, section by section of the corpus. The folder, in
the order in which its files appear:

    options.json      what was asked for; once a section is finished other options refuse the folder
    sections.jsonl    which tokenizer, and one line per finished section, until the manifest takes its place
    tokenizer.model   the SentencePiece model (not for bytes)
    train-00000.bin   tokens, raw; and valid-00000.bin from the same section of the corpus
    manifest.json     counts, hashes and the repeat rate: the folder is complete
    verified.json     when each shard was last found good; may be deleted
"""

import json
import os
import re
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from skipless.console import Progress, count
from skipless.data.formats import Reading, Seen
from skipless.data.store import (
    MANIFEST,
    VERIFIED,
    Manifest,
    Section,
    Shard,
    ShardWriter,
    Split,
    TokenizerNote,
    check_sizes,
    folder_tokenizer,
    match_tokenizer,
    read_manifest,
    verify_shards,
)
from skipless.data.text import Corpus, Part, held_out, open_corpus, share_held_out
from skipless.data.tokenizer import (
    MODEL_FILE,
    Tokenizer,
    TokenizerChoice,
    TrainUnigram,
    check_megabytes,
    load_tokenizer,
    token_dtype,
)
from skipless.files import (
    FolderLock,
    Journal,
    append_line,
    check_folder,
    mapping,
    read_json,
    read_lines,
    reading,
    remove_parts,
    write_json,
    write_whole,
    writing,
)
from skipless.schema import build, changed_fields
from skipless.theory.kernels import repeat_rate

OPTIONS, JOURNAL = "options.json", "sections.jsonl"
SHARD = re.compile(r"(train|valid)-(\d{5,}|images|labels)\.bin")
_FORCE = "start over with --force"
CHUNK = 1 << 20  # characters handed to a thread at once
MOST_WORKERS = 1024
Cursor = tuple[int, int]  # a part, and a document in it


@dataclass(frozen=True)
class Preparation:
    """What to prepare: a corpus, a tokenizer, and which text to hold out.

    Validation text is `valid` if given, else the share `valid_fraction` of the documents, chosen by their hash, if
    given, else what the corpus itself holds out, else a share of .005 (.05 of stdlib). A share above 0 of two or more
    documents is at least one of them. A shard holds about shard_mb million characters.
    """

    corpus: str = "stdlib"
    tokenizer: TokenizerChoice = field(default_factory=TrainUnigram)
    valid: str | None = None
    valid_fraction: float | None = None
    shard_mb: float = 64.0
    reading: Reading = field(default_factory=Reading)
    download: bool = False

    def __post_init__(self):
        if self.valid is not None and self.valid_fraction is not None:
            raise ValueError("validation text is given twice: use either --valid or --valid-fraction")
        if self.valid_fraction is not None and not 0.0 <= self.valid_fraction < 1.0:
            raise ValueError(f"valid_fraction={self.valid_fraction}: use a share from 0 to below 1; .005 is usual")
        check_megabytes("shard_mb", self.shard_mb)


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
    end: Cursor = (0, 0)
    closes: bool = False
    last: bool = False


@dataclass(frozen=True)
class Encoded:
    """Tokens of one split of a chunk."""

    split: str
    tokens: np.ndarray
    documents: int
    text_bytes: int


@dataclass(frozen=True)
class _Texts:
    """The corpora behind a Preparation, opened."""

    corpus: Corpus
    valid: Corpus | None
    fraction: float

    @property
    def sources(self) -> list[Source]:
        rest = "hash" if self.valid is None else "train"
        held = self.valid.parts if self.valid else ()
        return [Source(part, rest) for part in self.corpus.parts] + [Source(part, "valid") for part in held]

    def with_validation(self) -> "_Texts":
        """A share that would hold out no document takes one, if there are two."""
        return self if self.valid else replace(self, fraction=share_held_out(self.corpus, self.fraction))

    def trains(self, text: bytes) -> bool:
        return self.valid is not None or not held_out(text, self.fraction)


def default_folder(corpus: str, vocabulary: str, root: str | Path = "data") -> Path:
    """Where shards go unless said otherwise: data/stdlib-32000."""
    path = Path(corpus)
    if path.is_dir():
        name = path.resolve().name
    elif any(character in corpus for character in "*?["):
        name = path.resolve().parent.name
    else:
        name = path.name.split(".")[0]
    return Path(root) / f"{name or 'corpus'}-{vocabulary}"


def prepare(
    plan: Preparation,
    out: str | Path,
    workers: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Tokenise a corpus into `out` and return its manifest. Resumes where an earlier run stopped.

    The result depends on the plan and the text alone, not on `workers` or interruptions. On a finished folder it
    checks every shard and writes nothing; a shard that was deleted is made again. force starts over.
    """
    workers = available_cores() if workers is None else workers
    if not 1 <= workers <= MOST_WORKERS:
        raise ValueError(f"workers={workers}: give 1 to {MOST_WORKERS} threads; there are {available_cores()} cores")
    progress = progress or Progress(quiet=True)
    texts = _open_texts(plan)
    options = _options(plan, texts)
    folder = Folder(Path(out))
    with folder.locked():
        folder.claim(options, force)
        if folder.complete():
            manifest = read_manifest(folder.path)
            shards = [shard for section in manifest.sections for shard in section.shards]
            if all(folder.present(section) for section in manifest.sections):
                return _nothing_to_do(folder, manifest, shards, progress)
            folder.reopen()
        texts = texts.with_validation()
        tokenizer = _tokenizer(folder, plan, texts, progress)
        try:
            _fill(folder, round(plan.shard_mb * 1e6), texts, tokenizer, workers, progress)
        finally:
            progress.stop()
        return _finish(folder, options, tokenizer, progress)


class Folder:
    """A folder under preparation. Its own files are the only ones it ever deletes."""

    def __init__(self, path: Path):
        self.path = path

    @contextmanager
    def locked(self) -> Generator[None]:
        """Keep a second `skipless prepare` out; the lock ends with the process, however that ends."""
        check_folder(self.path, OPTIONS)
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(self.path, "preparing", "wait for it, or use another --out")
        with lock:
            yield

    def claim(self, options: dict, force: bool) -> None:
        """Make the folder that of these options, or refuse: tokens by other options, or a folder of something else."""
        path = self.path / OPTIONS
        there = read_json(path, mapping, _FORCE) if path.is_file() and not force else options
        if there.keys() != options.keys():
            raise ValueError(
                f"{path} is not of `skipless prepare`, or of another version: give --out a folder of its own"
            )
        changed = [] if force else changed_fields(there, json.loads(json.dumps(options)))
        differing = [f"{name}: {old} there, {new} now" for name, old, new in changed]
        if differing and (self.complete() or self.sections()):
            raise ValueError(
                f"{self.path} was prepared with other options ({'; '.join(differing)}): use another --out, or --force "
                "to start over"
            )
        if differing or force:
            self._clear()
        remove_parts(self.path)
        if self.complete():  # an earlier run may have been killed between its manifest and its journal's end
            (self.path / JOURNAL).unlink(missing_ok=True)
        if not path.is_file():
            write_json(path, options, indent=1)

    def _clear(self) -> None:
        others = (MODEL_FILE, JOURNAL, VERIFIED, OPTIONS)
        own = [file.name for file in self.path.iterdir() if SHARD.fullmatch(file.name)]
        for name in (MANIFEST, *own, *others):  # options.json last: with it the folder is one of ours
            (self.path / name).unlink(missing_ok=True)

    def complete(self) -> bool:
        return (self.path / MANIFEST).is_file()

    def reopen(self) -> None:
        """Turn a finished folder back into an unfinished one, for shards that have gone missing."""
        manifest = read_manifest(self.path)
        lines = [{"tokenizer": asdict(manifest.tokenizer)}, *map(asdict, manifest.sections)]
        Journal(self.path / JOURNAL).replace(lines)
        (self.path / MANIFEST).unlink()

    def tokenizer(self) -> TokenizerNote | None:
        """The description of the tokenizer that made the finished sections, if there are any."""
        with reading(self.path / JOURNAL, _FORCE):
            lines = read_lines(self.path / JOURNAL)
            return build(TokenizerNote, lines[0]["tokenizer"], "the note of a tokenizer") if lines else None

    def sections(self) -> dict[int, Section]:
        """Finished sections by index, whether or not their files are still there."""
        with reading(self.path / JOURNAL, _FORCE):
            lines = read_lines(self.path / JOURNAL)
            found = [build(Section, line, "a section", "section.") for line in lines if "index" in line]
        return {section.index: section for section in found}

    def present(self, section: Section) -> bool:
        return all((self.path / shard.file).is_file() for shard in section.shards)

    def note(self, line: dict) -> None:
        append_line(self.path / JOURNAL, line)

    def finish(self, manifest: str) -> None:
        """Write the manifest; the journal has done its work."""
        write_whole(self.path / MANIFEST, manifest.encode())
        os.unlink(self.path / JOURNAL)


def available_cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _open_texts(plan: Preparation) -> _Texts:
    corpus = open_corpus(plan.corpus, plan.reading, plan.download)
    if plan.valid is not None:
        return _Texts(corpus, open_corpus(plan.valid, plan.reading, plan.download), 0.0)
    if plan.valid_fraction is None and corpus.validation is not None:
        return _Texts(corpus, corpus.validation, 0.0)
    return _Texts(corpus, None, corpus.valid_fraction if plan.valid_fraction is None else plan.valid_fraction)


def _options(plan: Preparation, texts: _Texts) -> dict:
    def described(corpus: Corpus) -> dict:
        return {"name": corpus.name, "fingerprint": corpus.fingerprint()[:16]}

    return {
        "corpus": described(texts.corpus),
        "valid": described(texts.valid) if texts.valid else {"fraction": texts.fraction},
        "tokenizer": plan.tokenizer.describe(),
        "shard_mb": plan.shard_mb,
        "text_field": plan.reading.text_field,
        "invalid_utf8": plan.reading.invalid_utf8,
    }


def _nothing_to_do(folder: Folder, manifest: Manifest, shards: list[Shard], progress: Progress) -> Manifest:
    check_sizes(folder.path, shards, np.dtype(manifest.dtype).itemsize)
    verify_shards(folder.path, shards, trust=False)
    folder_tokenizer(folder.path, manifest.tokenizer)
    progress.say(f"{folder.path} is complete: {len(shards)} shards checked, nothing to do")
    return manifest


def _tokenizer(folder: Folder, plan: Preparation, texts: _Texts, progress: Progress) -> Tokenizer:
    """The folder's tokenizer: as an earlier run left it, or made now and kept."""
    path = folder.path / MODEL_FILE
    described = folder.tokenizer()
    if described is None and path.exists():
        raise ValueError(f"{path} is there, and no preparation has noted it: move it away, or name it with --tokenizer")
    if path.is_file():
        tokenizer = load_tokenizer(path)
    else:
        if isinstance(plan.tokenizer, TrainUnigram):
            size, sample = plan.tokenizer.vocab_size, plan.tokenizer.sample_mb
            progress.say(
                f"training a tokenizer: unigram, {size:,} pieces, on up to {sample:g} MB of {texts.corpus.name}"
            )
        tokenizer = plan.tokenizer.make(texts.corpus.parts, texts.trains, progress)
    if described is None:
        folder.note({"tokenizer": asdict(TokenizerNote.of(tokenizer))})  # first: a file without a note is not ours
    else:
        match_tokenizer(folder.path, described, tokenizer)
    if tokenizer.model is not None and not path.is_file():
        write_whole(path, tokenizer.model)
    return tokenizer


def _fill(
    folder: Folder, characters: int, texts: _Texts, tokenizer: Tokenizer, workers: int, progress: Progress
) -> None:
    """Write every section, of about so many characters, that is not there yet."""
    known = folder.sections()
    present = _checked(folder, known, token_dtype(tokenizer.vocab_size), progress)
    sizes = [source.part.size() for source in texts.sources]
    total = None if None in sizes else sum(size or 0 for size in sizes)
    index, start, last = 0, (0, 0), False
    while not last:
        if index not in present:
            stop = min((later for later in present if later > index), default=None)
            read = sum(size or 0 for size in sizes[: start[0]])
            progress.start("tokenising", total, read, percent=True)
            found = chunks(texts.sources, start, index, characters, progress.advance)
            with closing(tokenised(found, tokenizer, texts.fraction, workers)) as stream:
                for section in _write(folder, stream, stop, progress):
                    _same(known.get(section.index), section)
                    present[section.index] = section
        index, start, last = index + 1, present[index].end, present[index].last


def _checked(folder: Folder, known: dict[int, Section], dtype: np.dtype, progress: Progress) -> dict[int, Section]:
    """The finished sections whose shards are there, each found whole and undamaged."""
    present = {index: section for index, section in known.items() if folder.present(section)}
    shards = [shard for section in present.values() for shard in section.shards]
    check_sizes(folder.path, shards, dtype.itemsize)
    verify_shards(folder.path, shards, trust=False)
    if present:
        progress.say(f"resuming: {len(present)} finished sections ({len(shards)} shards) checked and kept")
    return present


def _same(before: Section | None, now: Section) -> None:
    if before not in (None, now):
        raise ValueError(f"section {now.index} comes out otherwise than before: the corpus has changed; use --force")


def _write(folder: Folder, stream, stop: int | None, progress: Progress) -> Iterator[Section]:
    """Write sections up to `stop`, or to the end of the corpus, noting each one when it is safe."""
    writer, tokens, began = SectionWriter(folder.path), 0, time.monotonic()
    try:
        for chunk, encoded in stream:
            section = writer.add(chunk, encoded)
            tokens += sum(len(part.tokens) for part in encoded)
            rate = tokens / max(time.monotonic() - began, 1e-9)
            progress.show(f"{tokens / 1e6:.1f}M tokens, {rate / 1e6:.1f}M/s")
            if section is not None:
                folder.note(asdict(section))
                yield section
                if section.last or section.index + 1 == stop:
                    return
    finally:
        writer.abandon()


def _finish(folder: Folder, options: dict, tokenizer: Tokenizer, progress: Progress) -> Manifest:
    sections = tuple(section for _, section in sorted(folder.sections().items()))
    shards = [shard for section in sections for shard in section.shards]
    dtype = token_dtype(tokenizer.vocab_size)
    if not any(shard.split == "train" for shard in shards):
        raise ValueError(
            f"{options['corpus']['name']} holds no text to train on: check the path, or lower --valid-fraction"
        )
    splits = {}
    for name in ("train", "valid"):
        mine = [shard for shard in shards if shard.split == name]
        tokens = sum(shard.tokens for shard in mine)
        rate = repeat_rate(_pieces(folder.path, mine, dtype)) if tokens > 1 else None
        documents, text_bytes = sum(shard.documents for shard in mine), sum(shard.text_bytes for shard in mine)
        splits[name] = Split(tokens, documents, text_bytes, rate)
        measured = f", r = {rate:.5f}" if rate is not None else ""
        size = f"{count(tokens, 'token')} in {count(documents, 'document')}, {text_bytes / 1e6:.1f} MB"
        progress.say(f"{name}: {size}{measured}")
    verify_shards(folder.path, shards, trust=False)
    manifest = Manifest(options, TokenizerNote.of(tokenizer), dtype.str, splits, sections)
    folder.finish(manifest.to_json())
    return manifest


def _pieces(folder: Path, shards: list[Shard], dtype: np.dtype) -> Iterator[np.ndarray]:
    for shard in shards:
        tokens = np.memmap(folder / shard.file, dtype=dtype, mode="r")
        for start in range(0, len(tokens), 1 << 20):
            yield np.asarray(tokens[start : start + (1 << 20)])


def chunks(
    sources: Sequence[Source], start: Cursor, first: int, size: int, seen: Seen | None = None
) -> Iterator[Chunk]:
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
        for writer in self._open.values():
            writer.abandon()
        self._open.clear()

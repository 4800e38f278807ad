"""Formats: the documents of a file, by its suffix, plain or packed, read as a stream.

    .txt              an article: articles are separated by two or more empty lines, which belong to none of them;
                      a file without such a gap is one document
    .raw              an article of WikiText: it starts at a first-level heading, " = Title = "
    .py .md .rst      the whole file
    .jsonl .ndjson    the text field of each line
    .parquet          the text column of each row

each plain or packed (.gz, .xz, .zst). A document longer than 4 MiB is cut at line ends into several, so that memory
stays bounded; empty documents are left out. Nothing else is changed: text keeps its line ends and spaces.
"""

import codecs
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import IO, BinaryIO, Literal, cast

KINDS = {
    ".txt": "text",
    ".raw": "wikitext",
    ".py": "whole",
    ".md": "whole",
    ".rst": "whole",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
COMPRESSIONS = (".gz", ".xz", ".zst")
LONGEST = 4 << 20  # bytes of a document; longer ones are cut
BLOCK = 1 << 20  # bytes read at once
HEADING = re.compile(rb" = [^=\s].* = \r?\n")
Seen = Callable[[int], None]  # hears how many stored bytes a read took


@dataclass(frozen=True)
class Reading:
    """How to read files: the field that holds the text of .jsonl and .parquet, and what to do with invalid UTF-8.

    "error" names the file and the byte; "replace" puts U+FFFD in its place.
    """

    text_field: str = "text"
    invalid_utf8: Literal["error", "replace"] = "error"

    def __post_init__(self):
        if self.invalid_utf8 not in ("error", "replace"):
            raise ValueError(f"invalid_utf8={self.invalid_utf8!r}: use 'error' or 'replace'")


def kind_of(path: Path) -> str | None:
    """The format of a file by its suffix, below that of its compression; None if it is not one we read."""
    inner = path.with_suffix("") if compression(path) else path
    return KINDS.get(inner.suffix.lower())


def compression(path: Path) -> str:
    """The suffix that names the file's compression, or an empty string."""
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSIONS else ""


def documents(path: Path, reading: Reading, skip: int = 0, seen: Seen | None = None) -> Iterator[str]:
    """The documents of one file after the first `skip`, read as a stream."""
    kind = kind_of(path)
    if kind == "parquet":
        found = _parquet(path, reading, seen)
    elif kind == "jsonl":
        found = _jsonl(path, reading, seen)
    elif kind in ("text", "whole", "wikitext"):
        found = _text(path, kind, reading, seen)
    else:
        raise ValueError(
            f"{path}: the suffix must be one of {' '.join(KINDS)}, and may be followed by .gz, .xz or .zst"
        )
    with closing(found):
        yield from islice((text for text in found if text), skip, None)


def _text(path: Path, kind: str, reading: Reading, seen: Seen | None) -> Generator[str]:
    with opened(path, seen) as stream:
        found = _offsets(wikitext_articles(stream)) if kind == "wikitext" else articles(_blocks(stream), kind == "text")
        for at, data in found:
            yield _decode(path, at, data, reading)


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    while block := stream.read(BLOCK):
        yield block


def _offsets(pieces: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    at = 0
    for piece in pieces:
        yield at, piece
        at += len(piece)


def articles(blocks: Iterable[bytes], split: bool = True) -> Iterator[tuple[int, bytes]]:
    """(byte offset, bytes) of each document, split at two or more empty lines; with split=False only where too long.

    The result depends on the bytes, not on how they arrive in blocks.
    """
    separator, rest, at, opening = b"", b"", 0, True
    for block in blocks:
        rest += block
        if not split:
            pieces = list(_pieces(at, rest, slack=8))
        else:
            separator = separator or _separator(rest)
            *complete, rest = rest.split(separator) if separator else [rest]
            for document in complete:
                yield from _pieces(*_strip(at, document, opening, True))
                at, opening = at + len(document) + len(separator), True
            pieces = list(_pieces(*_strip(at, rest, opening, False), slack=8))
        yield from pieces[:-1]
        opening = opening and len(pieces) == 1
        at, rest = pieces[-1]
    yield from _pieces(*(_strip(at, rest, opening, True) if split else (at, rest)))


def _separator(data: bytes) -> bytes:
    """Three line ends of the kind the file's first line has; empty while there is no line end."""
    end = data.find(b"\n")
    if end < 0:
        return b""
    return b"\r\n\r\n\r\n" if data[:end].endswith(b"\r") else b"\n\n\n"


def _strip(at: int, data: bytes, left: bool, right: bool) -> tuple[int, bytes]:
    bare = data.lstrip(b"\r\n") if left else data
    at += len(data) - len(bare)
    return at, bare.rstrip(b"\r\n") if right else bare


def _pieces(at: int, data: bytes, slack: int = 0) -> Iterator[tuple[int, bytes]]:
    """Cut `data` so that no piece is longer than LONGEST: after the last line end, or else between two characters.

    With slack the last piece may be so much longer: a separator may still be about to end there.
    """
    while len(data) > LONGEST + slack:
        cut = data.rfind(b"\n", 0, LONGEST) + 1
        if not cut:
            cut = next((i for i in range(LONGEST, LONGEST - 4, -1) if data[i] & 0xC0 != 0x80), LONGEST)
        yield at, data[:cut]
        at, data = at + cut, data[cut:]
    yield at, data


def wikitext_articles(lines: Iterable[bytes]) -> Iterator[bytes]:
    """WikiText's lines as articles: a first-level heading after an empty line starts one. Nothing is left out."""
    held: list[bytes] = []
    size, blank, started = 0, True, False
    for line in lines:
        heading = blank and HEADING.fullmatch(line) is not None
        if (heading and started) or size > LONGEST:
            yield b"".join(held)
            held, size = [], 0
        started = started or heading
        held.append(line)
        size += len(line)
        blank = not line.strip()
    yield b"".join(held)


def _decode(path: Path, at: int, data: bytes, reading: Reading) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if reading.invalid_utf8 == "replace":
            return data.decode("utf-8", "replace")
        wide = at == 0 and data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        likely = "UTF-16" if wide else "LATIN1"
        raise ValueError(
            f"{path}: byte {at + error.start} (0x{data[error.start]:02x}) is not valid UTF-8: convert the file "
            f"(iconv -f {likely} -t UTF-8), or replace such bytes by U+FFFD: `skipless prepare --invalid-utf8 replace`"
        ) from error


def _jsonl(path: Path, reading: Reading, seen: Seen | None) -> Generator[str]:
    at = 0
    with opened(path, seen) as stream:
        for number, line in enumerate(stream, 1):
            record = line if at else line.removeprefix(codecs.BOM_UTF8)  # no part of the JSON, RFC 8259, section 8.1
            if record.strip():
                text = _decode(path, at + len(line) - len(record), record, reading)
                yield from _long(_record_text(f"{path}, line {number}", text, reading))
            at += len(line)


def _record_text(place: str, line: str, reading: Reading) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON ({error}): each line must be one object") from error
    if not isinstance(record, dict) or not isinstance(record.get(reading.text_field), str):
        fields = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
        raise ValueError(
            f"{place} has no text in {reading.text_field!r}: name the field (`skipless prepare --text-field`); it has: "
            f"{fields}"
        )
    text = record[reading.text_field]
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair
        if reading.invalid_utf8 == "replace":
            return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        raise ValueError(
            f"{place}: {error.reason} at character {error.start}: mend the line, or replace it: `skipless prepare "
            "--invalid-utf8 replace`"
        ) from error
    return text


def _long(text: str) -> Iterator[str]:
    if len(text) <= LONGEST // 4:  # no character takes more than four bytes
        yield text
    else:
        yield from (piece.decode("utf-8") for _, piece in _pieces(0, text.encode("utf-8")))


def _parquet(path: Path, reading: Reading, seen: Seen | None) -> Generator[str]:
    if compression(path):
        raise ValueError(f"{path}: parquet is compressed inside and must be seekable: unpack it first")
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError as error:
        raise ValueError(f"{path}: reading parquet needs pyarrow: pip install 'skipless[data]'") from error
    with named_errors(path):
        try:
            file = parquet.ParquetFile(path)
        except ValueError as error:  # pyarrow's ArrowInvalid
            raise ValueError(
                f"{path} is not a whole parquet file ({str(error).splitlines()[0]}): fetch it again"
            ) from error
        with file:
            yield from _parquet_rows(path, file, reading)
    if seen:
        seen(path.stat().st_size)


def _parquet_rows(path: Path, file, reading: Reading) -> Iterator[str]:
    names = file.schema_arrow.names
    if reading.text_field not in names:
        raise ValueError(f"{path} has no column {reading.text_field!r}: name one with --text-field: {', '.join(names)}")
    row = 0
    for batch in file.iter_batches(batch_size=256, columns=[reading.text_field]):
        for text in batch.column(0).to_pylist():
            if not isinstance(text, str):
                raise ValueError(f"{path}, row {row}: {reading.text_field!r} holds {text!r}, not text")
            yield from _long(text)
            row += 1


@contextmanager
def opened(path: Path, seen: Seen | None = None) -> Generator[BinaryIO]:
    """The file's bytes, decompressed by suffix (.gz, .xz, .zst); `seen` hears of each packed byte once."""
    with named_errors(path), io.BufferedReader(Metered(path, seen), 1 << 18) as packed:
        unpack = {".gz": gzip.open, ".xz": lzma.open, ".zst": lambda packed: _zstd(path, packed)}.get(compression(path))
        yield cast(BinaryIO, packed if unpack is None else unpack(packed))


class Metered(io.FileIO):
    """A file that reports how many of its (packed) bytes have been read: what a progress bar counts."""

    def __init__(self, path: Path, seen: Seen | None):
        super().__init__(path)
        self._seen = seen

    def readinto(self, buffer, /) -> int | None:
        """Fill the buffer and report the number of bytes."""
        count = super().readinto(buffer)
        if self._seen and count:
            self._seen(count)
        return count


def _zstd(path: Path, packed: IO[bytes]) -> IO[bytes]:
    try:
        return import_module("compression.zstd").open(packed)  # Python 3.14 and later
    except ImportError:
        pass
    try:
        zstandard = import_module("zstandard")
    except ImportError as error:
        raise ValueError(
            f"{path}: reading .zst needs Python 3.14 or the zstandard package: pip install zstandard, or repack as .xz"
        ) from error
    return io.BufferedReader(ZstdReader(packed, zstandard), 1 << 20)


class ZstdReader(io.RawIOBase):
    """Frames of a .zst read one after another through the `zstandard` package, whose own reader hides truncation."""

    def __init__(self, packed: IO[bytes], zstandard):
        self._packed, self._zstandard = packed, zstandard
        self._frame, self._spare, self._ready = None, b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer, /) -> int:
        """Fill the buffer; EOFError if the last frame is cut short."""
        while not self._ready:
            packed = self._spare or self._packed.read(1 << 14)
            self._spare = b""
            if not packed:
                if self._frame is not None:
                    raise EOFError("the last zstd frame is not complete")
                return 0
            frame = self._frame or self._zstandard.ZstdDecompressor().decompressobj()
            self._ready = frame.decompress(packed)
            self._spare = frame.unused_data if frame.eof else b""
            self._frame = None if frame.eof else frame
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


@contextmanager
def named_errors(path: Path) -> Generator[None]:
    """Turn what goes wrong while reading `path` into one line that names it and says what to do."""
    try:
        yield
    except Exception as error:
        damaged = (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile)
        if isinstance(error, damaged) or type(error).__name__ == "ZstdError":
            raise OSError(f"{path} is damaged or cut short ({error}): fetch or pack it again") from error
        if not isinstance(error, OSError) or error.errno is None:
            raise
        raise OSError(f"{path} cannot be read ({error.strerror}): check the path and its permissions") from error

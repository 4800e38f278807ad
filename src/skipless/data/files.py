"""Opening files: decompression by suffix, a count of the bytes read, and errors that name the file."""

import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, BinaryIO, cast

COMPRESSIONS = (".gz", ".xz", ".zst")
Seen = Callable[[int], None]


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


class ZstdReader(io.RawIOBase):
    """Frames of a .zst read one after another through the `zstandard` package, whose own reader hides truncation."""

    def __init__(self, packed: IO[bytes], zstandard):
        self._packed, self._zstandard = packed, zstandard
        self._frame, self._spare, self._ready = None, b"", b""

    def readable(self) -> bool:
        """True, as io asks."""
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


def compression(path: Path) -> str:
    """The suffix that names the file's compression, or an empty string."""
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSIONS else ""


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


@contextmanager
def named_errors(path: Path) -> Generator[None]:
    """Turn what goes wrong while reading `path` into one line that names it and says what to do."""
    try:
        yield
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise OSError(f"{path} is damaged or cut short ({error}): fetch or pack it again") from error
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(f"{path} cannot be read ({error.strerror}): check the path and its permissions") from error
    except Exception as error:
        if type(error).__name__ != "ZstdError":
            raise
        raise OSError(f"{path} is damaged or cut short ({error}): fetch or pack it again") from error


@contextmanager
def opened(path: Path, seen: Seen | None = None) -> Generator[BinaryIO]:
    """The file's bytes, decompressed by suffix (.gz, .xz, .zst); `seen` hears of each packed byte once."""
    with named_errors(path), io.BufferedReader(Metered(path, seen), 1 << 18) as packed:
        unpack = {".gz": gzip.open, ".xz": lzma.open, ".zst": lambda packed: _zstd(path, packed)}.get(compression(path))
        yield cast(BinaryIO, packed if unpack is None else unpack(packed))

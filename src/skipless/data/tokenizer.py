"""Tokenizers: SentencePiece with an exact round trip, and plain bytes. Each knows its end-of-document token."""

import hashlib
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from skipless.data.files import named_errors

MODEL_FILE = "tokenizer.model"
MARK = "▁"  # U+2581, by which SentencePiece stands for a space


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
        """The UTF-8 bytes as int32."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text; bytes that do not form UTF-8, as a model may produce, become U+FFFD."""
        return bytes(int(token) for token in tokens if int(token) != self.end).decode("utf-8", "replace")

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        """All documents, each followed by 0xFF."""
        joined = b"".join(text.encode("utf-8") + b"\xff" for text in texts)
        return np.frombuffer(joined, dtype=np.uint8).astype(token_dtype(self.vocab_size))


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
        """Token ids (int32)."""
        if MARK not in text or self._mark is None:
            return self._processor.encode(text, return_type="numpy")
        first, *others = text.split(MARK)
        pieces = [self._processor.encode(first, return_type="numpy")]
        for other in others:
            pieces += [self._mark, self._processor.encode(other, return_type="numpy")]
        return np.concatenate(pieces)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of the tokens."""
        return self._processor.decode([int(token) for token in tokens if int(token) != self.end])

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        """All documents, each followed by `end`."""
        end = np.array([self.end], dtype=np.int32)
        pieces = [piece for text in texts for piece in (self.encode(text), end)]
        joined = np.concatenate(pieces) if pieces else end[:0]
        return joined.astype(token_dtype(self.vocab_size))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer called "bytes", or that of a SentencePiece .model file. For a prepared folder see TokenStore."""
    if str(path) == "bytes":
        return ByteTokenizer()
    path = Path(path)
    with named_errors(path):
        model = path.read_bytes()
    return SentencePieceTokenizer(model, str(path))

"""Tokenizers that travel with a model: SentencePiece unigram files and plain bytes as fast tokenizers, and back."""

import hashlib
import re
import struct
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_UNMATCHABLE = -1e4
_SPACE = "▁"
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """UTF-8 bytes as tokens 0 … 255, of which two that no UTF-8 text contains are special: 0xFF is <end>, the end of a
    document, after which the next begins; 0xFE is <pad>. None is added to a text, and "<end>" in a text is text."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    # ByteLevel writes byte b as one printable character: its own, or the next free one from U+0100 on
    vocabulary = {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}
    del vocabulary[chr(0xFE)], vocabulary[chr(0xFF)]
    tokenizer = Tokenizer(models.BPE(vocabulary | {"<pad>": 0xFE, "<end>": 0xFF}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<end>",
        eos_token="<end>",
        pad_token="<pad>",
        padding_side="left",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True)
class SentencePieceFile:
    """What a unigram .model file says: pieces as (text, score, type), and how text is normalised."""

    pieces: list[tuple[str, float, int]]
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    byte_fallback: bool = False

    @classmethod
    def read(cls, path: str | Path) -> "SentencePieceFile":
        """Read the protocol buffer. sentencepiece's own reader hides the normaliser; transformers' needs protobuf."""
        try:
            top = list(_fields(Path(path).read_bytes()))
            pieces = [_piece(body) for number, body in top if number == 1]
            trainer = dict(pair for number, body in top if number == 2 for pair in _fields(body))
            normaliser = dict(pair for number, body in top if number == 3 for pair in _fields(body))
        except (IndexError, KeyError, TypeError, AttributeError, UnicodeDecodeError, struct.error) as error:
            raise ValueError(f"{path} is not a SentencePiece model file: {error!r}") from error
        if not pieces or trainer.get(3, 1) != 1:
            kind = {2: "BPE", 3: "word", 4: "character"}.get(trainer.get(3, 1), "empty")
            raise ValueError(f"{path} is a SentencePiece model of kind {kind}; only unigram models are exported")
        if trainer.get(24, 0) or not normaliser.get(5, 1):
            raise ValueError(f"{path} keeps whitespace as a suffix or unescaped; only the usual ▁ prefix is exported")
        return cls(
            pieces,
            normaliser.get(2, b""),
            bool(normaliser.get(3, 1)),
            bool(normaliser.get(4, 1)),
            bool(trainer.get(35, 0)),
        )

    def named(self, kind: int) -> list[str]:
        """Pieces of one type: unknown (2), control (3) or user-defined (4)."""
        return [text for text, _, own in self.pieces if own == kind]


def _piece(body: bytes) -> tuple[str, float, int]:
    fields = dict(_fields(body))
    return fields[1].decode(), struct.unpack("<f", fields.get(2, bytes(4)))[0], fields.get(3, _NORMAL)


def _fields(body: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of a protocol buffer message: an integer, or the raw bytes of anything else.

    Which of the two a number has is the file format's word; a file that breaks it raises TypeError where it is used.
    """
    at = 0
    while at < len(body):
        key, at = _varint(body, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(body, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(body, at)
        else:
            size = {1: 8, 5: 4}[kind]
        yield key >> 3, body[at : at + size]
        at += size


def _varint(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = body[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


def sentencepiece_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """A unigram SentencePiece file as a fast tokenizer with the same ids, no special tokens added.

    Special tokens in text are text, as in SentencePiece (split_special_tokens). Padding is on the left and uses <unk>,
    which byte fallback never produces.
    """
    file = SentencePieceFile.read(path)
    unknown = [index for index, piece in enumerate(file.pieces) if piece[2] == _UNKNOWN]
    if len(unknown) != 1:
        raise ValueError(f"{path} has {len(unknown)} unknown pieces; a SentencePiece model has one")
    # only normal pieces match text; a low score says so to tokenizers, which matches every piece
    vocabulary = [
        (text, score if kind in (_NORMAL, _USER_DEFINED) else _UNMATCHABLE) for text, score, kind in file.pieces
    ]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=unknown[0], byte_fallback=file.byte_fallback))
    tokenizer.normalizer = _normaliser(file)
    if absent := _absent_characters(file):
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(map(re.escape, absent))), "isolated")
    strip = [decoders.Strip(" ", left=1, right=0)] if file.add_dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    control, unk = file.named(_CONTROL), file.pieces[unknown[0]][0]
    special = {name: token for name, token in (("bos_token", "<s>"), ("eos_token", "</s>")) if token in control}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=unk,
        pad_token="<pad>" if "<pad>" in control else unk,
        padding_side="left",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        **special,
    )


def _absent_characters(file: SentencePieceFile) -> list[str]:
    """Characters of pieces such as <s> that no normal piece contains. Set apart in the text, they keep those pieces
    from matching where the low score cannot: against unknown characters, which score lower still. They become bytes one
    by one all the same; without byte fallback, neighbours would have to merge into one <unk>."""
    texts: dict[bool, set[str]] = {True: set(), False: set()}
    for text, _, kind in file.pieces:
        texts[kind in (_NORMAL, _USER_DEFINED)].update(text)
    return sorted(texts[False] - texts[True]) if file.byte_fallback else []


def _normaliser(file: SentencePieceFile) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(file.charsmap)] if file.charsmap else []
    if file.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    steps += [normalizers.Prepend(_SPACE)] if file.add_dummy_prefix else []
    return normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])


def export_tokenizer(sentencepiece_file: str | Path, folder: str | Path) -> PreTrainedTokenizerFast:
    """Write the tokenizer beside a saved model, where AutoTokenizer.from_pretrained(folder) finds it offline."""
    tokenizer = sentencepiece_tokenizer(sentencepiece_file)
    tokenizer.save_pretrained(str(folder))
    return tokenizer


def fast_tokenizer(tokenizer: Any) -> Any:
    """The fast tokenizer with the same ids as one of skipless.data: bytes, SentencePiece, or a FastTokenizer's own."""
    if isinstance(tokenizer, FastTokenizer):
        return tokenizer.inner
    if tokenizer.model is None:
        return byte_tokenizer()
    with tempfile.NamedTemporaryFile(suffix=".model") as file:
        file.write(tokenizer.model)
        file.flush()
        return sentencepiece_tokenizer(file.name)


class FastTokenizer:
    """A tokenizer of transformers as a skipless Tokenizer. Its end-of-document token is its </s>, `start` its <s>.

    Byte tokenizers saved before theirs had one end at 0xFF too, as ByteTokenizer does.
    """

    kind = "transformers"
    model: bytes | None = None

    def __init__(self, inner: Any):
        self.inner = inner
        self.vocab_size = len(inner)
        self._byte_level = "ByteLevel" in type(inner.backend_tokenizer.decoder).__name__
        end = inner.eos_token_id
        if end is None and self._byte_level and self.vocab_size == 256:
            end = 0xFF
        if end is None:
            raise ValueError("the tokenizer has no end-of-text token: set eos_token and save it again")
        self.end = int(end)
        self.start: int | None = inner.bos_token_id
        self.sha256 = hashlib.sha256(inner.backend_tokenizer.to_str().encode()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.inner.encode(text, add_special_tokens=False), dtype=np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text; special tokens, the end of a document among them, stand for none."""
        ids = [int(token) for token in tokens if int(token) != self.end]
        return str(self.inner.decode(ids, skip_special_tokens=True))

    def encode_documents(self, texts: Iterable[str]) -> np.ndarray:
        return np.concatenate([np.append(self.encode(text), self.end) for text in texts])

    def token_bytes(self) -> np.ndarray:
        special = {*self.inner.all_special_ids, self.end}

        def size(token: int) -> int:
            piece = self.inner.convert_ids_to_tokens(token)
            if token in special:
                return 0
            if self._byte_level:
                return len(piece)
            return 1 if _BYTE_PIECE.fullmatch(piece) else len(piece.replace("▁", " ").encode())

        return np.array([size(token) for token in range(self.vocab_size)], dtype=np.int64)

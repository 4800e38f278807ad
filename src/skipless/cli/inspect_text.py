"""Real text for `skipless inspect`: rows of tokens from a file, a corpus or a prepared folder."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skipless.data.corpora import open_corpus
from skipless.data.store import MANIFEST, TokenStore

Encode = Callable[[str], Any]


def from_file(path: Path, encode: Encode, shape: tuple[int, int], vocabulary: int) -> Tensor:
    """The beginning of one file, read as it is."""
    if not path.is_file():
        raise ValueError(f"--text is {path}, which is no file; give a text file, or --corpus for a folder or a name")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text is {path}, which is not UTF-8 text ({error})") from error
    return rows_of(iter([encode(text)]), shape, vocabulary, str(path))


def from_corpus(spec: str, encode: Encode, shape: tuple[int, int], vocabulary: int) -> Tensor:
    """The first documents of a corpus, one after another. A prepared folder has its tokens already."""
    if (Path(spec) / MANIFEST).is_file():
        store = TokenStore(spec)
        if store.vocab_size > vocabulary:
            raise ValueError(
                f"{spec} was prepared with {store.vocab_size:,} tokens and the model knows {vocabulary:,}: prepare the "
                "text with the model's own tokenizer, or name the text itself"
            )
        return rows_of(store.pieces(shape[0] * shape[1]), shape, vocabulary, spec)
    return rows_of((encode(document) for document in open_corpus(spec)), shape, vocabulary, spec)


def rows_of(pieces: Iterator[Any], shape: tuple[int, int], vocabulary: int, source: str) -> Tensor:
    """(rows, length) of consecutive tokens; of `pieces`, sequences of tokens, no more are read than that takes."""
    rows, length = shape
    found, wanted = [], rows * length
    for piece in pieces:
        found.append(np.asarray(piece, dtype=np.int64)[: wanted - sum(map(len, found))])
        if sum(map(len, found)) == wanted:
            break
    tokens = np.concatenate([np.empty(0, np.int64), *found])
    if len(tokens) < wanted:
        raise ValueError(
            f"{source} holds {len(tokens)} tokens; {rows} rows of {length} need {wanted}: use a longer text"
            f"{_fitting(len(tokens), rows, length)}"
        )
    if tokens.max() >= vocabulary:
        raise ValueError(
            f"{source} has token {tokens.max()}, but the model knows {vocabulary}: read it with the model's own "
            "tokenizer (--tokenizer)"
        )
    return torch.from_numpy(tokens).reshape(rows, length)


def _fitting(tokens: int, rows: int, length: int) -> str:
    """The shape nearest to what was asked for that so few tokens fill, if there is one."""
    if tokens >= length:
        return f", or --batch {tokens // length}"
    if tokens >= 2 * rows:
        return f", or --length {tokens // rows}"
    return f", or --batch 1 --length {tokens}" if tokens >= 2 else ""

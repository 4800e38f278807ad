"""The text that runs are trained on, as far as their results depend on it."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from skipless.data.store import MANIFEST, TokenStore, fingerprint
from skipless.recipes.data import prepared


@dataclass(frozen=True)
class Text:
    """A prepared folder's facts: enough to rebuild every experiment on it, so that a log can do without the folder.

    repeat_rate is rounded to three decimals, as schemes take it. unigram is the entropy of its tokens in nats: what a
    network reaches that ignores its context. fingerprint names the very tokens.
    """

    name: str
    vocab_size: int
    repeat_rate: float
    unigram: float
    tokens: int
    fingerprint: str
    folder: str | None = None

    @classmethod
    def read(cls, folder: str | Path) -> "Text":
        """The facts of a folder made by `skipless prepare`."""
        folder = Path(folder).resolve()
        store = TokenStore(folder)
        if store.manifest.shards("valid"):
            TokenStore(folder, "valid")  # verified now and noted, so that runs side by side find it so
        counts = np.zeros(store.vocab_size)
        for piece in store.pieces():
            counts += np.bincount(piece, minlength=store.vocab_size)
        shares = counts[counts > 0] / counts.sum()
        return cls(
            name=str(store.manifest.options["corpus"]["name"]),
            vocab_size=store.vocab_size,
            repeat_rate=round(store.repeat_rate or 0.0, 3),
            unigram=round(float(-(shares * np.log(shares)).sum()), 4),
            tokens=len(store),
            fingerprint=fingerprint(folder) or "",
            folder=str(folder),
        )

    def to_json(self) -> dict[str, Any]:
        """All but the folder, which is another one on another machine."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "folder"}

    def describe(self) -> str:
        """In words, for a table's head."""
        return f"{self.name}, {self.tokens / 1e6:.1f}M tokens of {self.vocab_size:,} kinds (unigram {self.unigram:.2f})"


def find_text(data: str | None, scale: str) -> Text:
    """The text that --data names: a prepared folder, or a corpus, which is prepared under data/ if it is not yet.

    Without it the smallest scale takes bytes of the Python standard library; the others want to be told.
    """
    vocab = 257 if scale == "tiny" else 32_000
    if data is None and scale != "tiny":
        raise ValueError(f"scale {scale!r} needs text: --data FOLDER, made by `skipless prepare`, or text files")
    if data is not None and (Path(data) / MANIFEST).is_file():
        return Text.read(data)
    return Text.read(prepared(data or "stdlib", vocab))

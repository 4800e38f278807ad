"""The model and the batch that `skipless inspect` was asked for."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar

from skipless.analysis.open_model import FAMILIES, open_model
from skipless.cli.inspect_family import family
from skipless.cli.inspect_text import Encode, from_corpus, from_file
from skipless.cli.memory import check_fits
from skipless.model import presets
from skipless.model.transformer import Transformer

_LENGTH = 128
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


@dataclass(frozen=True, eq=False)
class Request:
    """What was typed. length, and depth, width and heads in sizes, are None where they were not given."""

    model: str
    text: Path | None = None
    corpus: str | None = None
    tokenizer: str | None = None
    length: int | None = None
    rows: int = 2
    sizes: Mapping[str, int | None] | None = None
    seed: int = 0

    def open(self) -> tuple[nn.Module, Encode | None]:
        """The model and its tokenizer, if it has one."""
        if self.length is not None and self.length < 2:
            raise ValueError(f"--length is {self.length}; cosines compare locations, so give at least 2")
        if self.rows < 1:
            raise ValueError(f"--batch is {self.rows}; give at least 1 row")
        if self.text is not None and self.corpus is not None:
            raise ValueError(
                f"--text {self.text} and --corpus {self.corpus} are both given; a batch is of one: drop one"
            )
        if self.tokenizer is not None and not self.reads:
            raise ValueError(f"--tokenizer is {self.tokenizer}, but no text is read; add --corpus or --text")
        torch.manual_seed(self.seed)
        disable_progress_bar()
        sizes = {name: value for name, value in (self.sizes or {}).items() if value is not None}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"--{name} is {value}; give at least 1")
        if self.model.startswith("hf:"):
            return family(self.model[3:], sizes), None
        folder = Path(self.model)
        if not folder.is_dir():
            return _preset(self.model, sizes), None
        if sizes:
            raise ValueError(f"--{next(iter(sizes))} is for presets and families; the weights in {folder} have theirs")
        return _stored(folder, need_tokenizer=self.reads and self.tokenizer is None)

    @property
    def reads(self) -> bool:
        """Whether tokens come from a text."""
        return self.text is not None or self.corpus is not None

    def batch(self, model: nn.Module, encode: Encode | None) -> Tensor:
        """Tokens of a text or random ones, (rows, length); images of noise for models that read images."""
        config: Any = getattr(model, "config", None)
        generator = torch.Generator().manual_seed(self.seed)
        if getattr(config, "image_size", None) is not None:
            if self.reads:
                raise ValueError("a text is given, but the model reads images; leave --text and --corpus out")
            if self.length is not None:
                raise ValueError(
                    f"--length is {self.length}, but {self.model} reads images, which have a fixed size; leave it out"
                )
            side = config.image_size
            return torch.randn(self.rows, config.num_channels, side, side, generator=generator)
        length = _LENGTH if self.length is None else self.length
        limit = getattr(config, "max_position_embeddings", None) or 0  # XLNet's −1 is no limit
        ours = any(isinstance(module, Transformer) for module in model.modules())  # no length is too long for those
        if 1 <= limit < length and not ours:
            raise ValueError(f"--length is {length}; the model has {limit} positions: use --length {limit}")
        vocabulary = getattr(config, "vocab_size", None)
        if vocabulary is None or getattr(model, "main_input_name", "input_ids") != "input_ids":
            known = ", ".join(f"hf:{name}" for name in FAMILIES)
            raise ValueError(
                f"{self.model} reads neither tokens nor images of a size that its config names; use {known}, or "
                "skipless.inspect(model, batch) with a batch of your own"
            )
        if not self.reads:
            return torch.randint(0, vocabulary, (self.rows, length), generator=generator)
        encode, shape = self._encoder(encode, vocabulary), (self.rows, length)
        if self.text is not None:
            return from_file(self.text, encode, shape, vocabulary)
        return from_corpus(str(self.corpus), encode, shape, vocabulary)

    def _encoder(self, own: Encode | None, vocabulary: int) -> Encode:
        """The tokenizer that was named, or the model's own; models without one read bytes."""
        if self.tokenizer is None and own is not None:
            return own
        from skipless.train.subject import find_tokenizer

        tokenizer = find_tokenizer(self.tokenizer or "bytes")
        if tokenizer.vocab_size > vocabulary:
            why = "" if self.tokenizer else ", which models without a tokenizer read,"
            raise ValueError(
                f"{self.tokenizer or 'bytes'}{why} has {tokenizer.vocab_size:,} tokens and the model knows "
                f"{vocabulary:,}: name the tokenizer it was made for (--tokenizer)"
            )
        return tokenizer.encode


def _preset(name: str, sizes: Mapping[str, int]) -> Transformer:
    if name not in presets.names():
        near = difflib.get_close_matches(name, presets.names(), n=3, cutoff=0.3)
        hint = f" (nearest: {', '.join(near)})" if near else ""
        raise ValueError(
            f"{name} is no folder, no preset{hint} and no family ({', '.join(f'hf:{family}' for family in FAMILIES)})"
        )
    config = presets.preset(name, **sizes)
    check_fits(config.matrix_parameters, name)
    return Transformer(config).eval()


def _stored(folder: Path, need_tokenizer: bool) -> tuple[nn.Module, Encode | None]:
    """A run's newest weights, or what save_pretrained wrote; a tokenizer is looked for only if a text is read."""
    from skipless.train.run import EXPERIMENT
    from skipless.train.subject import load_subject

    if (folder / EXPERIMENT).is_file():
        subject = load_subject(folder, None if need_tokenizer else "bytes")
        return subject.model, subject.tokenizer.encode if need_tokenizer else None
    model = open_model(folder)
    if not need_tokenizer:
        return model, None
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(
            f"{folder} holds no tokenizer ({', '.join(_TOKENIZER_FILES)}); name one: --tokenizer FILE.model, a "
            "prepared folder, or bytes"
        )
    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    return model, lambda text: tokenizer.encode(text, add_special_tokens=False)

"""Log-probabilities of tokens under a causal model: what loss, perplexity and zero-shot tasks are made of."""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from skipless.data.tokenizer import Tokenizer
from skipless.model.config import ModelConfig
from skipless.ops.layout import Layout
from skipless.ops.precision import Precision, autocast

LOGITS_AT_ONCE = 1 << 25  # entries: 128 MB in float32, about 1000 locations of a vocabulary of 32,000
BATCH_TOKENS = 16_384
_FLEX_BLOCK = 128


class LanguageModel(Protocol):
    """What is needed of a model: Transformer and FoldedTransformer have it."""

    config: ModelConfig

    def hidden(self, tokens: Tensor, *, layout: Layout | None = None) -> Tensor:
        """(batch, T, width)."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """(…, vocab_size)."""
        ...


@dataclass(frozen=True, eq=False)
class Windows:
    """Rows to score: tokens (batch, T+1); scored (batch, T), True where the target counts, or None for all.

    documents (batch, T), as a Batch has them, keep attention within documents.
    """

    tokens: Tensor
    scored: Tensor | None = None
    documents: Tensor | None = None

    def to(self, device: torch.device) -> "Windows":
        """On a device."""
        move = lambda tensor: None if tensor is None else tensor.to(device, non_blocking=True)  # noqa: E731
        return Windows(self.tokens.to(device, non_blocking=True), move(self.scored), move(self.documents))


@dataclass(frozen=True, eq=False)
class Row:
    """One sequence of at least two tokens, whose last `scored` tokens count."""

    tokens: np.ndarray
    scored: int

    def __len__(self) -> int:
        return len(self.tokens) - 1


class Scorer:
    """A model made ready by `scoring`: asks it for log-probabilities of tokens."""

    def __init__(self, model: LanguageModel, device: torch.device):
        self.model, self.device = model, device

    def log_probs(self, windows: Windows) -> Tensor:
        """log p(target | what is before it) of the scored targets, row after row: (n,) in float32 or better.

        Only scored locations are projected on the vocabulary, LOGITS_AT_ONCE logits at a time.
        """
        windows = windows.to(self.device)
        layout = None if windows.documents is None else Layout.packed(windows.documents)
        hidden = self.model.hidden(windows.tokens[:, :-1], layout=layout)
        targets = windows.tokens[:, 1:]
        if windows.scored is not None:
            hidden, targets = hidden[windows.scored], targets[windows.scored]
        hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
        rows = max(1, LOGITS_AT_ONCE // self.model.config.vocab_size)
        pieces = [self._project(h, t) for h, t in zip(hidden.split(rows), targets.split(rows), strict=True)]
        return torch.cat(pieces)

    def _project(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = self.model.logits(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(dim=-1)

    def row_log_likelihoods(self, rows: Sequence[Row], batch_tokens: int = BATCH_TOKENS) -> np.ndarray:
        """The log-likelihood of each row's scored tokens, float64, in the order of `rows`."""
        sums = np.zeros(len(rows))
        for index, windows in padded_batches(rows, batch_tokens, wants_few_sizes(self.model.config, self.device)):
            assert windows.scored is not None
            each = self.log_probs(windows).double().cpu()
            owner = windows.scored.nonzero()[:, 0]
            sums[index] = torch.zeros(len(windows.tokens), dtype=torch.float64).index_add_(0, owner, each)[: len(index)]
        return sums


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DDP, or itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def config_of(model: nn.Module) -> ModelConfig:
    """The model's configuration."""
    return cast(LanguageModel, unwrapped(model)).config


def check_vocabulary(model: nn.Module, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for."""
    known = config_of(model).vocab_size
    if tokenizer.vocab_size > known:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size:,} pieces and the model an embedding of {known:,}: use the "
            "tokenizer that the model was trained with"
        )


@contextmanager
def scoring(
    model: nn.Module, device: torch.device | str | None = None, precision: Precision | None = None
) -> Generator[Scorer]:
    """While open, a Scorer of the model: in eval mode, without gradients, under autocast for "bf16" and "fp16".

    device None is where the model is; another one moves it there. precision None is bf16 on a GPU and fp32 elsewhere.
    """
    inner, config = unwrapped(model), config_of(model)
    if config.head != "lm" or not config.causal:
        raise ValueError(
            f"the model has head={config.head!r} and causal={config.causal}; only a causal language model (head='lm') "
            "gives probabilities of next tokens"
        )
    if device is not None and torch.empty(0, device=device).device != next(inner.parameters()).device:
        inner.to(device)
    if isinstance(inner, FSDPModule) and "hidden" not in vars(inner):
        register_fsdp_forward_method(inner, "hidden")  # else its sharded embedding is met as it is
    place = next(inner.parameters()).device
    precision = precision or ("bf16" if place.type == "cuda" else "fp32")
    if precision not in get_args(Precision):
        raise ValueError(f"precision is {precision!r}; use 'bf16', 'fp16' or 'fp32'")
    training = inner.training
    inner.eval()
    try:
        with torch.no_grad(), autocast(precision, place):
            yield Scorer(cast(LanguageModel, inner), place)
    finally:
        inner.train(training)


def wants_few_sizes(config: ModelConfig, device: torch.device) -> bool:
    """Whether batches are best padded to few sizes: on a GPU, unless attention ends at the calibrated length."""
    return device.type == "cuda" and config.most_locations is None


def padded_batches(
    rows: Sequence[Row], batch_tokens: int = BATCH_TOKENS, few_sizes: bool = False
) -> Iterator[tuple[np.ndarray, Windows]]:
    """(indices of rows, their Windows), longest first, so that rows of like length share a batch.

    Padding is on the right, where a causal model cannot see it: it needs no Layout and shifts no location. few_sizes
    makes lengths multiples of 128 and fills batches with blank rows, since kernels compile for every size they meet.
    """
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    while order:
        length = len(rows[order[0]])
        if few_sizes:
            length = -(-length // _FLEX_BLOCK) * _FLEX_BLOCK
        size = max(1, batch_tokens // length)
        taken, order = order[:size], order[size:]
        yield np.array(taken), _padded([rows[index] for index in taken], length, size if few_sizes else len(taken))


def _padded(rows: Sequence[Row], length: int, size: int) -> Windows:
    tokens = torch.zeros(size, length + 1, dtype=torch.int64)
    scored = torch.zeros(size, length, dtype=torch.bool)
    for place, row in enumerate(rows):
        tokens[place, : len(row) + 1] = torch.from_numpy(row.tokens.astype(np.int64))
        scored[place, len(row) - row.scored : len(row)] = True
    return Windows(tokens, scored)


def token_windows(pieces: Iterable[np.ndarray], length: int, stride: int | None = None) -> Iterator[Row]:
    """Rows over a stream of tokens given in pieces: each token but the first is scored once.

    Window k holds tokens kS … kS+T and scores those that window k−1 did not: all T of them for stride S = T (None).
    The last may be shorter.
    """
    stride = length if stride is None else stride
    if length < 1 or not 1 <= stride <= length:
        raise ValueError(f"length={length}, stride={stride}: length must be at least 1, stride from 1 to length")
    seen = 0  # tokens of the buffer that are scored, or come before all that are
    buffer = np.empty(0, dtype=np.int64)
    for piece in pieces:
        buffer = np.concatenate([buffer, piece])
        while len(buffer) > length:
            yield Row(buffer[: length + 1], length + 1 - max(seen, 1))
            buffer, seen = buffer[stride:], length + 1 - stride
    if len(buffer) > max(seen, 1):
        yield Row(buffer, len(buffer) - max(seen, 1))

"""Evaluation on text: loss, perplexity and bits per byte over prepared tokens or documents."""

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from glob import has_magic
from itertools import chain, islice
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from skipless.data.loader import Batch, TokenLoader
from skipless.data.text import held_out, open_corpus, share_held_out
from skipless.data.tokenizer import Tokenizer
from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer
from skipless.ops.layout import Layout
from skipless.ops.modes import autocast
from skipless.training.config import Precision
from skipless.training.distributed import plain

LOGITS_AT_ONCE = 1 << 25  # entries: 128 MB in float32, about 1000 locations of a vocabulary of 32,000
BATCH_TOKENS = 16_384  # rows × length of a batch
_POOL = 64  # batches of rows read before they are sorted by length
_FLEX_BLOCK = 128  # lengths are padded to multiples of it where few sizes are wanted


@dataclass(frozen=True)
class EvalResult:
    """loss in nats per token; perplexity = exp(loss); bits_per_byte = loss · tokens / (ln 2 · bytes).

    bytes is the UTF-8 size of the text that the scored tokens stand for, to which end-of-document tokens add loss but
    no size. None, like bits_per_byte, where the text is not known.
    """

    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int
    bytes: int | None

    @classmethod
    def of(cls, nats: float, tokens: int, size: int | None) -> "EvalResult":
        """The result of sums over tokens, which may be sums over processes: nats = loss · tokens."""
        if not tokens:
            raise ValueError("no tokens were scored: give at least one window of two tokens")
        loss = nats / tokens
        perplexity = math.inf if loss > 709.0 else math.exp(loss)
        return cls(loss, perplexity, nats / math.log(2.0) / size if size else None, tokens, size)

    def numbers(self) -> dict[str, float | None]:
        """What a log and a checkpoint keep of it."""
        return {"loss": self.loss, "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}

    @classmethod
    def from_numbers(cls, values: Mapping[str, Any]) -> "EvalResult":
        """The inverse, without how much was scored."""
        return cls(values["loss"], values["perplexity"], values["bits_per_byte"], 0, None)

    def words(self) -> str:
        return f"validation loss {self.loss:.4f}, perplexity {self.perplexity:.2f}"


@dataclass(frozen=True, eq=False)
class Windows:
    """Rows to score: tokens (batch, T+1); scored (batch, T), True where the target counts, or None for all.

    documents (batch, T), as a Batch has them, keep attention within documents.
    """

    tokens: Tensor
    scored: Tensor | None = None
    documents: Tensor | None = None

    def to(self, device: torch.device) -> "Windows":
        move = lambda tensor: None if tensor is None else tensor.to(device, non_blocking=True)  # noqa: E731
        return Windows(self.tokens.to(device, non_blocking=True), move(self.scored), move(self.documents))


@dataclass(frozen=True)
class Windowing:
    """How text is cut. Documents are joined, each followed by the end token, as in prepared data; or kept separate.

    packed, for joined documents: attention stays within each, as in training with data.packed.

    Windows of `length` targets start every `stride` tokens (None: `length`, no overlap) and score what the one before
    did not; a smaller stride gives each token more context, at length/stride times the cost. The text, or each document
    if separate, is preceded by an end token, so that its first token is scored too.
    """

    length: int = 512
    stride: int | None = None
    separate: bool = False
    batch_tokens: int = BATCH_TOKENS
    packed: bool = False


def evaluate_loss(
    model: nn.Module,
    windows: TokenLoader | Iterable[Batch | Windows | Tensor],
    *,
    max_tokens: int | None = None,
    device: torch.device | str | None = None,
    precision: Precision | None = None,
    tokenizer: Tokenizer | None = None,
) -> EvalResult:
    """The token-weighted loss over all windows in order; for a loader also over the shorter one that it leaves out.

    max_tokens is rounded up to whole windows of a loader. A loader's rank sees its share, of which max_tokens is the
    most and which may be empty: add up loss · tokens, tokens and bytes over ranks for EvalResult.of. Bytes are counted
    by the tokenizer, which a loader brings along; that is exact for tokenizers that skipless trained.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; it must be at least 1, or None for all")
    if isinstance(windows, TokenLoader):
        tokenizer = tokenizer or windows.store.tokenizer
        each = _loader_windows(windows, max_tokens)
    else:
        each = _listed_windows(windows, max_tokens)
    sizes = None if tokenizer is None else tokenizer.token_bytes()
    nats, tokens, size = _sums(model, each, device, precision, sizes)
    if not tokens and isinstance(windows, TokenLoader) and windows.world > 1:
        return EvalResult(0.0, 1.0, None, 0, 0)
    return EvalResult.of(nats, tokens, size)


def _loader_windows(loader: TokenLoader, max_tokens: int | None) -> Iterator[Windows]:
    """The loader's windows; equally many on every rank, since all must call a sharded model. Rank 0 scores the tail."""
    whole = loader.windows * loader.length
    most = whole + loader.length if max_tokens is None else max_tokens * loader.world
    wanted = min(-(-most // loader.length), loader.windows)
    with loader.sweep() as batches:
        for first, batch in zip(range(0, wanted, loader.batch_size), batches, strict=False):
            yield _some_rows(batch, int((loader.shuffle.share(first) < wanted).sum()), loader.length)
    rest = len(loader.store) - whole
    if rest > 1 and most > whole:
        tokens = torch.from_numpy(loader.store.read(whole, rest).astype(np.int64))[None]
        documents = _document_ids(tokens, loader.store.end) if loader.documents else None
        yield _some_rows(Batch(tokens, documents), int(loader.rank == 0), rest - 1)


def _some_rows(batch: Batch, rows: int, length: int) -> Windows:
    """The batch with its first `rows` rows scored; a blank row where it has none."""
    if not len(batch.tokens):
        blank = torch.zeros(1, length + 1, dtype=torch.int64)
        documents = None if batch.documents is None else blank[:, 1:]
        return Windows(blank, torch.zeros(1, length, dtype=torch.bool), documents)
    if rows == len(batch.tokens):
        return Windows(batch.tokens, None, batch.documents)
    scored = torch.zeros(len(batch.tokens), length, dtype=torch.bool)
    scored[:rows] = True
    return Windows(batch.tokens, scored, batch.documents)


def _listed_windows(items: Iterable[Batch | Windows | Tensor], max_tokens: int | None) -> Iterator[Windows]:
    left = math.inf if max_tokens is None else max_tokens
    for item in items:
        if isinstance(item, Windows):
            windows = item
        else:
            windows = Windows(item) if isinstance(item, Tensor) else Windows(item.tokens, None, item.documents)
        scored = torch.ones_like(windows.tokens[:, 1:], dtype=torch.bool) if windows.scored is None else windows.scored
        count = int(scored.sum())
        if count > left:
            scored = scored & (scored.flatten().cumsum(0).view_as(scored) <= left)
            windows = Windows(windows.tokens, scored, windows.documents)
        yield windows
        left -= count
        if left <= 0:
            return


def evaluate_text(
    model: nn.Module,
    tokenizer: Tokenizer,
    texts: str | Path | Iterable[str],
    windowing: Windowing | None = None,
    *,
    max_tokens: int | None = None,
    device: torch.device | str | None = None,
    precision: Precision | None = None,
) -> EvalResult:
    """The loss on text: documents, or a corpus by name or path, of which held_out_texts says what is read.

    Bytes are those of the text itself, so that bits per byte compare across tokenizers. max_tokens ends the text there.
    """
    check_vocabulary(model, tokenizer)
    windowing = windowing or Windowing()
    documents = _Documents(held_out_texts(texts) if isinstance(texts, str | Path) else texts, tokenizer, max_tokens)
    place = torch.device(device) if device else next(model.parameters()).device
    windows = _text_windows(documents, tokenizer.end, windowing, few_sizes=wants_few_sizes(config_of(model), place))
    nats, tokens, _ = _sums(model, windows, device, precision, None)
    return EvalResult.of(nats, tokens, documents.bytes)


def held_out_texts(spec: str | Path, download: bool = False) -> Iterable[str]:
    """The documents to evaluate on. A file or glob is read whole.

    A folder or named corpus gives the part that `skipless prepare` keeps from training: its validation files or split,
    or else the documents held out by their hash.
    """
    corpus = open_corpus(spec, download=download)
    if Path(spec).is_file() or has_magic(str(spec)):
        return _some(corpus, spec)
    if corpus.validation is not None:
        return _some(corpus.validation, spec)
    share = share_held_out(corpus, corpus.valid_fraction)
    return _some((text for text in corpus if held_out(text.encode(), share)), spec)


def _some(texts: Iterable[str], spec: str | Path) -> Iterator[str]:
    """The documents of a corpus; ValueError names one that has none."""
    count = 0
    for count, text in enumerate(texts, 1):  # noqa: B007  (read below)
        yield text
    if not count:
        raise ValueError(f"{spec} holds no text to evaluate on: name one that does")


class _Documents:
    """Encoded documents, each with its end token, up to max_tokens; `bytes` counts the text of those handed out."""

    def __init__(self, texts: Iterable[str], tokenizer: Tokenizer, max_tokens: int | None):
        self.texts, self.tokenizer = texts, tokenizer
        self.left = math.inf if max_tokens is None else max_tokens
        self.bytes = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        for text in self.texts:
            if self.left < 1:
                return
            tokens = np.append(self.tokenizer.encode(text), self.tokenizer.end)
            if len(tokens) > self.left:
                tokens = tokens[: int(self.left)]
                self.bytes += int(self.tokenizer.token_bytes()[tokens].sum())
            else:
                self.bytes += len(text.encode())
            self.left -= len(tokens)
            yield tokens


@dataclass(frozen=True, eq=False)
class Row:
    """One sequence of at least two tokens, whose last `scored` tokens count."""

    tokens: np.ndarray
    scored: int

    def __len__(self) -> int:
        return len(self.tokens) - 1


def _text_windows(
    documents: Iterable[np.ndarray], end: int, windowing: Windowing, few_sizes: bool
) -> Iterator[Windows]:
    start, length, stride = np.array([end]), windowing.length, windowing.stride
    if windowing.separate:
        rows = (row for tokens in documents for row in token_windows([start, tokens], length, stride))
    else:
        rows = token_windows(chain([start], documents), length, stride)
    while pool := list(islice(rows, _POOL * max(1, windowing.batch_tokens // length))):
        for _, windows in padded_batches(pool, windowing.batch_tokens, few_sizes):
            packed = windowing.packed and not windowing.separate
            yield replace(windows, documents=_document_ids(windows.tokens, end)) if packed else windows


def _document_ids(tokens: Tensor, end: int) -> Tensor:
    """Document ids of the inputs of rows (batch, T+1), as a loader counts: an end token belongs to what it ends."""
    ends = (tokens[:, :-1] == end).long()
    return ends.cumsum(dim=1) - ends


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


def wants_few_sizes(config: ModelConfig, device: torch.device) -> bool:
    """Whether batches are best padded to few sizes: on a GPU, unless attention ends at the calibrated length."""
    return device.type == "cuda" and config.max_length is None


def _sums(
    model: nn.Module,
    windows: Iterable[Windows],
    device: torch.device | str | None,
    precision: Precision | None,
    sizes: np.ndarray | None,
) -> tuple[float, int, int | None]:
    """Loss in nats, tokens and, where the bytes of each token are given, bytes."""
    table = None if sizes is None else torch.from_numpy(sizes)
    tokens = size = 0
    with scoring(model, device, precision) as scorer:
        nats = torch.zeros((), dtype=torch.float64, device=scorer.device)
        for each in windows:
            nats -= scorer.log_probs(each).double().sum()
            targets = each.tokens[:, 1:] if each.scored is None else each.tokens[:, 1:][each.scored]
            tokens += targets.numel()
            size += 0 if table is None else int(table[targets.cpu()].sum())
    return float(nats), tokens, None if table is None else size


class Scorer:
    """A model made ready by `scoring`: asks it for log-probabilities of tokens."""

    def __init__(self, model: Transformer, device: torch.device):
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


@contextmanager
def scoring(
    model: nn.Module, device: torch.device | str | None = None, precision: Precision | None = None
) -> Generator[Scorer]:
    """While open, a Scorer of the model, as `evaluating` has it. device None is where it is; another one moves it."""
    inner, config = plain(model), config_of(model)
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
    with evaluating(inner, place, precision):
        yield Scorer(inner, place)


@contextmanager
def evaluating(model: nn.Module, place: torch.device, precision: Precision | None) -> Generator[None]:
    """While open: eval mode, no gradients, and autocast. precision None is bf16 on a GPU and fp32 elsewhere."""
    precision = precision or ("bf16" if place.type == "cuda" else "fp32")
    if precision not in get_args(Precision):
        raise ValueError(f"precision is {precision!r}; use 'bf16', 'fp16' or 'fp32'")
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), autocast(precision, place):
            yield
    finally:
        model.train(training)


def check_vocabulary(model: nn.Module, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for."""
    known = config_of(model).vocab_size
    if tokenizer.vocab_size > known:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size:,} pieces and the model an embedding of {known:,}: use the "
            "tokenizer that the model was trained with"
        )


def config_of(model: nn.Module) -> ModelConfig:
    """The model's configuration."""
    return plain(model).config

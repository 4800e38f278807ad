"""Batches as a function of (seed, step, rank): a pseudo-random permutation of windows, nothing to remember."""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count
from math import isqrt
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from skipless.data.store import TokenStore
from skipless.schema import check

ROUNDS = 6


@dataclass(frozen=True)
class Permutation:
    """A bijection of 0 … size−1 chosen by (seed, epoch).

    A Feistel network on pairs: x = a·right + left with a = ⌈√size⌉, and by turns left += F(right) mod a and
    right += F(left) mod ⌈size/a⌉. Fewer than a results are ≥ size; those go through again (cycle walking). Stable
    across machines and numpy versions: SeedSequence and integer arithmetic only.
    """

    size: int
    seed: int
    epoch: int = 0

    def __post_init__(self):
        if self.size < 1 or self.seed < 0 or self.epoch < 0:
            raise ValueError(f"size={self.size}, seed={self.seed}, epoch={self.epoch}: size ≥ 1 and the others ≥ 0")

    @cached_property
    def _keys(self) -> np.ndarray:
        return np.random.SeedSequence([self.seed, self.epoch]).generate_state(ROUNDS, np.uint64)

    @cached_property
    def _sides(self) -> tuple[np.uint64, np.uint64]:
        columns = isqrt(self.size - 1) + 1
        return np.uint64(columns), np.uint64(-(-self.size // columns))

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Where the positions (integers in 0 … size−1, any shape) go."""
        values = self._once(np.asarray(positions).astype(np.uint64))
        while (outside := values >= self.size).any():
            values[outside] = self._once(values[outside])
        return values.astype(np.int64)

    def _once(self, values: np.ndarray) -> np.ndarray:
        columns, rows = self._sides
        right, left = np.divmod(values, columns)
        for number, key in enumerate(self._keys):
            if number % 2:
                right = (right + mix(left ^ key) % rows) % rows
            else:
                left = (left + mix(right ^ key) % columns) % columns
        return right * columns + left


def mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every bit of the input reaches every bit of the output."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


_permutation = lru_cache(maxsize=16)(Permutation)


class Shuffle:
    """Which of `size` samples this rank sees at a step, of `batch_size` over all ranks together.

    Sample g = step · batch_size + row is number π_epoch(g mod size), where epoch = g div size and π_epoch is a
    pseudo-random order by (seed, epoch). The global batch therefore does not depend on `world`, and fewer samples than
    a batch just have short epochs.
    """

    def __init__(self, size: int, batch_size: int, seed: int = 0, rank: int = 0, world: int = 1):
        if batch_size < 1 or seed < 0:
            raise ValueError(f"batch_size={batch_size}, seed={seed}: the first ≥ 1, the seed ≥ 0")
        if not 0 <= rank < world:
            raise ValueError(f"rank={rank} of world={world}: ranks go from 0 to world−1")
        if batch_size % world:
            below, above = batch_size // world * world, -(-batch_size // world) * world
            nearest = " or ".join(str(size) for size in (below, above) if size)
            raise ValueError(f"batch_size={batch_size} does not divide over {world} ranks: use {nearest}")
        self.size, self.batch_size, self.rank, self.world = size, batch_size, rank, world
        self._seed = seed

    def samples(self, step: int) -> np.ndarray:
        """g of every row that this rank sees at `step`, (batch_size / world,)."""
        if step < 0:
            raise ValueError(f"step={step}: steps count from 0")
        share = self.batch_size // self.world
        first = step * self.batch_size + self.rank * share
        return np.arange(first, first + share)

    def at(self, step: int) -> np.ndarray:
        """The numbers of the samples that this rank sees at `step`, (batch_size / world,)."""
        samples = self.samples(step)
        epochs, positions = np.divmod(samples, self.size)
        found = np.empty(len(samples), dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            found[here] = _permutation(self.size, self._seed, int(epoch))(positions[here])
        return found

    def share(self, first: int) -> np.ndarray:
        """This rank's part of the numbers first … first + batch_size − 1, as far as there are any; for evaluation."""
        numbers = np.arange(first, min(first + self.batch_size, self.size))
        return np.array_split(numbers, self.world)[self.rank]


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of T+1 tokens, (batch, T+1) int64, and for packed documents the ids of the inputs, (batch, T) int64.

    Location t of `inputs` predicts location t of `targets`. Documents count up from 0 in each row; the end-of-document
    token belongs to the document it ends, and predicts the first token of the next.
    """

    tokens: Tensor
    documents: Tensor | None = None

    @property
    def inputs(self) -> Tensor:
        """(batch, T): all but the last token."""
        return self.tokens[:, :-1]

    @property
    def targets(self) -> Tensor:
        """(batch, T): all but the first token."""
        return self.tokens[:, 1:]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.tokens] if self.documents is None else [self.tokens, self.documents]

    def map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        return Batch(change(self.tokens), None if self.documents is None else change(self.documents))

    def to(self, device: torch.device | str) -> "Batch":
        """The batch on a device; from pinned memory the copy does not wait."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))


class TokenLoader:
    """Batches of `batch_size` windows of `length` tokens, over all ranks together; this rank gets its slice.

    Window w is tokens wT … wT+T, so that each token but the first is a target once in an epoch; fewer than T tokens at
    the end are left out. Shuffle says which windows a step has: the global batch does not depend on `world`.

    With documents=True batches carry document ids, for Layout.packed(batch.documents).
    """

    def __init__(
        self,
        store: TokenStore,
        length: int,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        *,
        documents: bool = False,
    ):
        for name, value in (("length", length), ("batch_size", batch_size)):
            if check(value, int, name) < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self.windows = (len(store) - 1) // length
        if self.windows < 1:
            raise ValueError(
                f"{store.folder} ({store.split}) has {len(store):,} tokens, and one window of length={length} needs "
                f"{length + 1:,}: use length ≤ {len(store) - 1}, or more text"
            )
        self.store, self.length, self.batch_size, self.seed = store, length, batch_size, seed
        self.rank, self.world, self.documents = rank, world, documents
        self.shuffle = Shuffle(self.windows, batch_size, seed, rank, world)

    def window_ids(self, step: int) -> np.ndarray:
        """The windows that this rank sees at `step`, (batch_size / world,)."""
        return self.shuffle.at(step)

    def batch(self, step: int) -> Batch:
        """This rank's rows of the batch of `step`, on the CPU: (batch_size / world, T+1)."""
        return self._rows(self.window_ids(step))

    def _rows(self, windows: np.ndarray, pin: bool = False) -> Batch:
        # filled in place: a copy to pinned memory would wake all of torch's threads, and they cost more than it does
        rows = torch.empty(len(windows), self.length + 1, dtype=torch.int64, pin_memory=pin)
        self.store.gather(windows * self.length, rows.numpy())
        if not self.documents:
            return Batch(rows)
        ends = rows.numpy()[:, :-1] == self.store.end
        documents = torch.empty(len(windows), self.length, dtype=torch.int64, pin_memory=pin)
        np.cumsum(ends, axis=1, out=documents.numpy())
        documents.numpy()[:] -= ends
        return Batch(rows, documents)

    def batches(self, start: int = 0, device: torch.device | str | None = None, ahead: int = 4) -> "Prefetch[Batch]":
        """Batches of steps start, start+1, …, without end, made by a thread up to `ahead` before they are asked for."""
        pin = is_cuda(device)
        return Prefetch((self._rows(self.window_ids(step), pin) for step in count(start)), device, ahead)

    def sweep(self) -> "Prefetch[Batch]":
        """Every window once and in order, for evaluation. All ranks get equally many batches.

        The last batch may be smaller, and has no rows for some ranks where it does not reach all of them.
        """
        return Prefetch(self._sweep())

    def _sweep(self) -> Iterator[Batch]:
        for first in range(0, self.windows, self.batch_size):
            yield self._rows(self.shuffle.share(first))


def is_cuda(device: torch.device | str | None) -> bool:
    """Whether batches go to a GPU, and their rows into pinned memory."""
    return device is not None and torch.device(device).type == "cuda"


class Movable(Protocol):
    """A batch of any kind."""

    def to(self, device: torch.device | str) -> Self: ...


B = TypeVar("B", bound=Movable)


class Prefetch(Generic[B]):
    """An iterator that a background thread keeps ahead of.

    Batches for a CUDA device should be in pinned memory: they are copied without waiting. Use it in a `with` block,
    or call close, to end the thread early.
    """

    def __init__(self, batches: Iterator[B], device: torch.device | str | None = None, ahead: int = 4):
        if ahead < 1:
            raise ValueError(f"ahead={ahead}: at least one batch must be ready")
        self._device = None if device is None else torch.device(device)
        if self._device is not None and is_cuda(device) and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._ready: queue.Queue[B | BaseException] = queue.Queue(ahead)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(batches,), daemon=True, name="skipless-loader")
        self._thread.start()

    def _fill(self, batches: Iterator[B]) -> None:
        try:
            if self._device is not None and is_cuda(self._device):
                torch.cuda.set_device(self._device)  # a thread starts on device 0, whatever its parent uses
            for batch in batches:
                self._put(batch)
                if self._closed.is_set():
                    return
            self._put(StopIteration())
        except Exception as error:
            self._put(error)

    def _put(self, item: B | BaseException) -> None:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                break
            except queue.Full:
                pass

    def __iter__(self) -> "Prefetch[B]":
        return self

    def __next__(self) -> B:
        if self._closed.is_set():
            raise StopIteration
        item = self._ready.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        return item if self._device is None else item.to(self._device)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> "Prefetch[B]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

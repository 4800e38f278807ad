"""Matrices divided over ranks: which rank computes which, and how they come to their owners and back.

What an optimiser computes of a whole matrix (Muon: Newton–Schulz) need not be computed by every rank. Each matrix has
an owner, the same by every rank's reckoning. Owners work in rounds, so that none holds more than a batch at a time:

    replicated (DDP)   the owner has the matrix already, and broadcasts what it computes
    sharded (FSDP2)    all send their rows of it to the owner, which sends the same rows of its result back

Casting, sending and stacking change no bit. So a result differs from one process's only where a kernel rounds in
another order for a stack of another size; and replicas cannot drift apart, since all take the owner's numbers.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

Stack = list[int]  # matrices of one kind, by number, that their owner computes as one batch
Round = list[list[Stack]]  # the stacks of each rank
Work = Callable[[Stack, Tensor], Tensor]  # whole matrices (n, rows, cols) to as many of the same shape


def rounds(
    kinds: Sequence[Hashable], sizes: Sequence[int], costs: Sequence[float], ranks: int, most: int
) -> list[Round]:
    """Owners of matrices, round after round: in each a rank has at most `most` numbers, or one matrix that is larger.

    The costliest come first, each to the rank with room that has the least to do in the round (Graham 1969, longest
    processing time). Matrices of one kind and owner make a stack. Nothing but the arguments decides, so that all ranks
    find the same.
    """
    most = max(most, *sizes, 1)
    found: list[list[Stack]] = []
    loads, filled = [0.0] * ranks, [most] * ranks
    for number in sorted(range(len(sizes)), key=lambda number: -costs[number]):
        if min(filled) + sizes[number] > most:
            found.append([[] for _ in range(ranks)])
            loads, filled = [0.0] * ranks, [0] * ranks
        owner = min((rank for rank in range(ranks) if filled[rank] + sizes[number] <= most), key=loads.__getitem__)
        loads[owner] += costs[number]
        filled[owner] += sizes[number]
        found[-1][owner].append(number)
    return [[_stacks(numbers, kinds) for numbers in owned] for owned in found]


def batches(kinds: Sequence[Hashable], sizes: Sequence[int], most: int) -> list[Stack]:
    """Stacks for one process that computes all: matrices of one kind, at most about `most` numbers at a time."""
    found: dict[Hashable, Stack] = {}
    counts: Counter[Hashable] = Counter()
    for number, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        counts[kind] += 1
        found.setdefault((kind, counts[kind] * size // most), []).append(number)
    return list(found.values())


def _stacks(numbers: list[int], kinds: Sequence[Hashable]) -> list[Stack]:
    alike: dict[Hashable, Stack] = {}
    for number in sorted(numbers):
        alike.setdefault(kinds[number], []).append(number)
    return list(alike.values())


@dataclass(frozen=True)
class Matrices:
    """Matrices as one rank sees them: whole shapes, and of a stack the `rows` that are here, to be sent in `dtype`."""

    shapes: Sequence[tuple[int, int]]
    rows: Callable[[Stack], list[Tensor]]
    dtype: torch.dtype
    device: torch.device

    def room(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def write(self, stack: Stack, into: Tensor) -> None:
        """What is here of a stack into (n, rows, cols): cast and laid together in one pass."""
        torch._foreach_copy_(list(into.unbind()), self.rows(stack))


@dataclass(frozen=True)
class Ranks:
    """Processes that train the same matrices: each has all of them whole or, sharded, its rows of every one."""

    group: dist.ProcessGroup
    sharded: bool

    @classmethod
    def of(cls, parameter: Tensor, replicas: dist.ProcessGroup | None = None) -> "Ranks | None":
        """The ranks that can divide the work on a parameter; None where each process computes it for itself.

        Sharded by rows over one axis: the ranks of that axis. Not sharded: `replicas`, if given. A group of one has
        nothing to divide, and other placements (over two axes, or by columns) are not known here.
        """
        if not isinstance(parameter, DTensor):
            group, sharded = replicas, False
        else:
            known = parameter.placements == (Shard(0),)
            group, sharded = parameter.device_mesh.get_group() if known else None, True
        return None if group is None or group.size() == 1 else cls(group, sharded)

    def rows(self, count: int, rank: int) -> int:
        """How many of `count` rows a rank has: as torch.chunk cuts them, so that the last ranks may have none."""
        if not self.sharded:
            return count
        each = -(-count // self.group.size())
        return max(0, min(count, (rank + 1) * each) - rank * each)

    def results(self, owned: Round, matrices: Matrices, work: Work) -> Iterator[tuple[Stack, Tensor]]:
        """(stack, what this rank keeps of its results) for every stack of a round, each computed by its owner.

        All ranks must get here, with the same round. Replicas hold one rank's results at a time: use them at once.
        """
        return (self._of_shards if self.sharded else self._of_replicas)(owned, matrices, work)

    def _of_replicas(self, owned: Round, matrices: Matrices, work: Work) -> Iterator[tuple[Stack, Tensor]]:
        here = self.group.rank()
        own = matrices.room(self._count(owned[here], matrices, here))
        for stack, piece in zip(owned[here], self._pieces(own, owned[here], matrices, here), strict=True):
            matrices.write(stack, piece)
            piece.copy_(work(stack, piece))
        for rank, stacks in enumerate(owned):
            flat = own if rank == here else matrices.room(self._count(stacks, matrices, here))
            dist.broadcast(flat, group=self.group, group_src=rank)
            yield from zip(stacks, self._pieces(flat, stacks, matrices, here), strict=True)

    def _of_shards(self, owned: Round, matrices: Matrices, work: Work) -> Iterator[tuple[Stack, Tensor]]:
        here, every = self.group.rank(), range(self.group.size())
        stacks, mine = [stack for each in owned for stack in each], owned[here]
        to_owners = [self._count(each, matrices, here) for each in owned]
        from_ranks = [self._count(mine, matrices, rank) for rank in every]

        kept, gathered = matrices.room(sum(to_owners)), matrices.room(sum(from_ranks))
        pieces = self._pieces(kept, stacks, matrices, here)
        for stack, piece in zip(stacks, pieces, strict=True):
            matrices.write(stack, piece)
        dist.all_to_all_single(gathered, kept, from_ranks, to_owners, group=self.group)
        arrived = [self._pieces(flat, mine, matrices, rank) for rank, flat in enumerate(gathered.split(from_ranks))]
        for stack, *parts in zip(mine, *arrived, strict=True):  # a result takes the place of what it is made from
            result = work(stack, torch.cat(parts, dim=1))
            torch._foreach_copy_(parts, list(result.split([part.shape[1] for part in parts], dim=1)))
        dist.all_to_all_single(kept, gathered, to_owners, from_ranks, group=self.group)
        yield from zip(stacks, pieces, strict=True)

    def _sizes(self, stacks: list[Stack], matrices: Matrices, rank: int) -> list[tuple[int, int, int]]:
        """(n, rows, cols) of what a rank has of each stack."""
        shapes = [matrices.shapes[stack[0]] for stack in stacks]
        return [(len(stack), self.rows(rows, rank), cols) for stack, (rows, cols) in zip(stacks, shapes, strict=True)]

    def _count(self, stacks: list[Stack], matrices: Matrices, rank: int) -> int:
        return sum(map(math.prod, self._sizes(stacks, matrices, rank)))

    def _pieces(self, flat: Tensor, stacks: list[Stack], matrices: Matrices, rank: int) -> list[Tensor]:
        """What a rank has of each stack, as views of one tensor in which they lie one after the other."""
        sizes = self._sizes(stacks, matrices, rank)
        parts = flat.split([math.prod(size) for size in sizes])
        return [part.view(size) for part, size in zip(parts, sizes, strict=True)]


def computed(
    ranks: Ranks | None, matrices: Matrices, kinds: Sequence[Hashable], costs: Sequence[float], most: int, work: Work
) -> Iterator[tuple[Stack, Tensor]]:
    """(stack, what this rank keeps of its results) for all matrices, of which a rank has `most` numbers at a time.

    Owners compute them in rounds; without ranks this process computes all.
    """
    sizes = [math.prod(shape) for shape in matrices.shapes]
    if ranks is not None:
        for owned in rounds(kinds, sizes, costs, ranks.group.size(), most):
            yield from ranks.results(owned, matrices, work)
        return
    for stack in batches(kinds, sizes, most):
        whole = matrices.room(len(stack), *matrices.shapes[stack[0]])
        matrices.write(stack, whole)
        yield stack, work(stack, whole)

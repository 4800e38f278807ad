"""A pseudo-random order of 0 … n−1 in O(1) memory: any position can be asked for without the ones before it."""

from dataclasses import dataclass
from functools import cached_property
from math import isqrt

import numpy as np

ROUNDS = 6


@dataclass(frozen=True)
class Permutation:
    """A bijection of 0 … size−1 chosen by (seed, epoch).

    A Feistel network on pairs: x = a·right + left with a = ⌈√size⌉, and in turn left += F(right) mod a and
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
        for turn, key in enumerate(self._keys):
            if turn % 2:
                right = (right + _mix(left ^ key) % rows) % rows
            else:
                left = (left + _mix(right ^ key) % columns) % columns
        return right * columns + left


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every bit of the input reaches every bit of the output."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))

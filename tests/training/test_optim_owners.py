"""Weights divided over ranks: owners by formulas, then Muon on two and three processes against one."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, multiprocessing, nn

from skipless.training.optim import muon
from skipless.training.optim.muon import Muon, keep_orthogonal, multiplications
from skipless.training.optim.owners import Ranks, rounds

SIDES = st.tuples(st.integers(1, 6), st.integers(1, 6))


@settings(max_examples=80, deadline=None)
@given(shapes=st.lists(SIDES, max_size=20), ranks=st.integers(1, 5), most=st.integers(1, 60))
def test_every_matrix_has_one_owner_and_no_rank_holds_too_much(shapes, ranks, most):
    sizes, costs = [r * c for r, c in shapes], [multiplications(*shape) for shape in shapes]
    found = rounds(shapes, sizes, costs, ranks, most)
    assert found == rounds(shapes, sizes, costs, ranks, most)
    assert sorted(n for each in found for stacks in each for stack in stacks for n in stack) == [*range(len(shapes))]
    for each in found:
        assert len(each) == ranks
        for stacks in each:
            assert sum(sizes[n] for stack in stacks for n in stack) <= max(most, *sizes)
            assert all(len({shapes[n] for n in stack}) == 1 for stack in stacks)
            assert len({shapes[stack[0]] for stack in stacks}) == len(stacks)


@settings(max_examples=80, deadline=None)
@given(shapes=st.lists(SIDES, min_size=1, max_size=20), ranks=st.integers(1, 5))
def test_in_a_round_no_rank_works_while_another_could_have(shapes, ranks):
    """Without the last of its matrices, the least costly, the busiest rank has at most the mean to do."""
    costs = [multiplications(*shape) for shape in shapes]
    (owned,) = rounds(shapes, [r * c for r, c in shapes], costs, ranks, 10**6)
    lists = [[costs[n] for stack in stacks for n in stack] for stacks in owned]
    busiest = max(lists, key=sum)
    assert sum(busiest) - min(busiest) <= sum(costs) / ranks


def test_owners_of_a_few_matrices():
    """Three blocks of a wide matrix (9 to do) and two squares (3 each), over two ranks."""
    kinds, sizes, costs = ["wide", "square", "square"] * 3, [4, 1, 1] * 3, [9, 3, 3] * 3
    assert rounds(kinds, sizes, costs, 2, 100) == [[[[0, 6], [5, 8]], [[1, 2, 4, 7], [3]]]]
    assert rounds(kinds, sizes, costs, 2, 6) == [[[[0]], [[3]]], [[[5, 8], [6]], [[1, 2, 4, 7]]]]


def test_seventy_billion_parameters_are_balanced_over_64_ranks():
    """A wide matrix is a batch by itself: five rounds, and a tenth more than the mean."""
    shapes = ([(8192, 8192)] * 4 + [(8192, 32768), (32768, 8192)]) * 87
    costs = [multiplications(*shape) for shape in shapes]
    found = rounds(shapes, [rows * cols for rows, cols in shapes], costs, 64, 2**28)
    seconds = [max(sum(costs[n] for stack in stacks for n in stack) for stacks in owned) for owned in found]
    assert [each / 8192**3 for each in seconds] == [45, 45, 60, 60, 15]
    assert sum(seconds) == pytest.approx(1.10 * sum(costs) / 64, rel=0.01)


def test_products_of_newton_schulz():
    """In units of n³ for five steps: 15 of a square, 45 at four times as many columns, where Gram matrices take 30."""
    assert multiplications(8, 8) == multiplications(8, 8, way="gram") == 15 * 8**3
    assert multiplications(8, 32) == multiplications(32, 8) == 45 * 8**3
    assert multiplications(8, 32, way="gram") == multiplications(32, 8, way="gram") == 30 * 8**3
    assert multiplications(8, 32, 3) == 27 * 8**3
    assert multiplications(8, 32, 3, "gram") == (2 * 4 + 3 + 6) * 8**3


@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_have_the_rows_that_torch_cuts(size):
    """And whole matrices where they are replicas, or no others to divide them with."""
    group: Any = SimpleNamespace(size=lambda: size)
    for count in range(1, 12):
        cut = [len(chunk) for chunk in torch.empty(count).chunk(size)]
        assert [Ranks(group, sharded=True).rows(count, rank) for rank in range(size)] == cut + [0] * (size - len(cut))
    weight = torch.empty(2, 3)
    assert Ranks.of(weight, group) == Ranks(group, sharded=False)
    assert Ranks(group, sharded=False).rows(7, 1) == 7
    assert Ranks.of(weight) is None
    alone: Any = SimpleNamespace(size=lambda: 1)
    assert Ranks.of(weight, alone) is None


# two roles of a block, with three kinds of shape; 5 and 7 rows are cut unevenly, and of 2 rows a third rank has none
SHAPES = {"up": [(8, 4), (5, 6), (8, 4), (5, 6), (8, 4)], "down": [(4, 8), (2, 6), (8, 4), (7, 3)]}


class Weights(nn.Module):
    """Parameters by role, orthogonal to begin with."""

    def __init__(self, shapes: dict[str, list[tuple[int, int]]]):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        for role, several in shapes.items():
            orthogonal = [nn.init.orthogonal_(torch.empty(shape), generator=draw) for shape in several]
            self.register_module(role, nn.ParameterList(orthogonal))

    def groups(self) -> list[dict]:
        rates = {"up": 0.1, "down": 0.05}
        return [{"name": name, "params": list(role), "lr": rates[name]} for name, role in self.named_children()]


def steps(model: Weights, optimizer: Muon, count: int, without: tuple[str, ...] = ()) -> None:
    """Updates by gradients that every process draws alike, and by none of parameters `without`."""
    for number in range(count):
        draw = torch.Generator().manual_seed(number + 1)
        for name, parameter in model.named_parameters():
            whole = torch.randn(parameter.shape, generator=draw)
            parameter.grad = None if name in without else placed(whole, parameter)
        optimizer.step()


def placed(whole: Tensor, like: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements) if isinstance(like, DTensor) else whole


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


CASES = {
    "direct": {},
    "gram": {"newton_schulz": "gram", "weight_decay": 0.1, "nesterov": False},
    "half": {"dtype": torch.bfloat16},
    "orthogonal": {"weight_decay": 0.1},
    "one matrix": {},
    "without gradients": {},
}


def work(rank: int, size: int, folder: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", rank=rank, world_size=size, init_method=f"file://{folder}/rendezvous")
    computed: list[Tensor] = []
    for name in ("direct", "gram"):
        muon.WAYS[name] = lambda x, steps, way=muon.WAYS[name]: computed.append(x) or way(x, steps)
    for case, options in CASES.items():
        shapes = {"up": [(8, 4)]} if case == "one matrix" else SHAPES
        without = ("up.0", "down.3") if case == "without gradients" else ()
        for most in (2**28, 70):
            muon._BATCH_ENTRIES = most
            models = [Weights(shapes) for _ in range(3)]
            fully_shard(models[2])
            groups = [None, dist.group.WORLD, None]
            parts = [Muon(m.groups(), replicas=g, **options) for m, g in zip(models, groups, strict=True)]
            if case == "orthogonal":
                for part, group in zip(parts, groups, strict=True):
                    keep_orthogonal(part, ["up"], group)
            seen = []
            for model, part in zip(models, parts, strict=True):
                computed.clear()
                steps(model, part, 3, without)
                seen.append(sum(x.shape[0] for x in computed))
                assert all(x.numel() <= most for x in computed), (case, most)
            count = seen[0] // 3
            assert 3 * (count // size - 1) <= seen[1] == seen[2] <= 3 * (-(-count // size) + 1), (case, seen)
            if count == 1:
                assert seen[1] == (3 if rank == 0 else 0)
            for path, alone in models[0].named_parameters():
                for model, part in zip(models[1:], parts[1:], strict=True):
                    parameter = model.get_parameter(path)
                    momenta = [p.state[q] for p, q in ((parts[0], alone), (part, parameter))]
                    same = [full(state["momentum_buffer"]) for state in momenta if state]
                    assert len(same) == (0 if path in without else 2)
                    assert not same or torch.equal(*same)
                    assert torch.equal(full(parameter), alone), (case, most, path)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # as skipless.training.distributed.exit_process does, and why


@pytest.mark.parametrize("size", [2, 3])
def test_several_processes_update_as_one_to_the_bit(tmp_path: Path, size: int):
    """Replicated and sharded, of any number of matrices, in one round and in several; each computes its share."""
    multiprocessing.start_processes(work, args=(size, tmp_path), nprocs=size, start_method="forkserver")

"""What an inspection asks of a device: how many operations, and how often the host waits for a number.

Deep narrow networks on a GPU are bound by the first, and whatever reads one number a block is bound by the second.
Neither depends on the network's width, so small networks on a processor tell. Times are measured by
benchmarks/inspect_cost.py.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from skipless.inspection.inspect import inspect
from skipless.inspection.load import build_family
from skipless.model.presets import preset
from skipless.model.transformer import Transformer

SHALLOW, DEEP = 6, 18
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}
NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "e-spa": lambda depth: Transformer(preset("wikitext103/e-spa", width=32, depth=depth, heads=4)),
    "llama": lambda depth: build_family("llama", num_hidden_layers=depth, **SIZES),
    "gpt2": lambda depth: build_family("gpt2", num_hidden_layers=depth, **SIZES),
}
# Operations of an inspection over those of one forward and backward pass. One of the two is a pass of its own, the runs
# of three rows are two forwards more, and this library's networks have their theory beside them.
MOST = {"e-spa": 6.0, "llama": 3.7, "gpt2": 6.0}
# How often the host waits for a block: a spectrum, which on a GPU another thread takes, and theory's two maps.
WAITS = {"e-spa": 3, "llama": 1, "gpt2": 1}


class Operations(TorchDispatchMode):
    """Counts what is dispatched."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


class Waits(TorchFunctionMode):
    """Counts calls that would make the host wait for a GPU."""

    _WAIT = ("cpu", "tolist", "item", "equal", "nonzero", "__bool__", "__float__", "__int__", "__index__")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        masked = any(isinstance(each, Tensor) and each.dtype == torch.bool for each in args[1:2])
        name = getattr(func, "__name__", "")
        self.count += name in self._WAIT or (name == "__getitem__" and masked)
        return func(*args, **(kwargs or {}))


def once(model: nn.Module, ids: Tensor) -> None:
    out = model(ids)
    logits = getattr(out, "logits", out)
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    model.zero_grad(set_to_none=True)


def counted(mode: Operations | Waits, work: Callable[[], object]) -> int:
    work()  # tables that are made once
    with mode:
        work()
    return mode.count


@pytest.mark.parametrize("name", NETWORKS)
def test_operations_and_waits_stay_within_their_budget(name):
    ids = torch.randint(0, 64, (3, 16), generator=torch.Generator().manual_seed(0))
    waits = {}
    for depth in (SHALLOW, DEEP):
        torch.manual_seed(0)
        model = NETWORKS[name](depth)
        waits[depth] = counted(Waits(), lambda model=model: inspect(model, ids, labels=ids))
    assert waits[DEEP] - waits[SHALLOW] <= WAITS[name] * (DEEP - SHALLOW)
    assert waits[SHALLOW] <= 45 + WAITS[name] * SHALLOW
    passed = counted(Operations(), lambda: once(model, ids))
    inspected = counted(Operations(), lambda: inspect(model, ids, labels=ids))
    assert inspected <= MOST[name] * passed, f"{inspected} operations beside {passed}"


def test_blocks_run_once_for_each_of_three_passes():
    """The measured one, and two of three rows that say what is seen and how blocks are put together."""
    model, runs = NETWORKS["llama"](SHALLOW), []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda *_: runs.append(1))
    inspect(model, torch.randint(0, 64, (3, 16)))
    assert len(runs) == 3 * SHALLOW

"""Spans: when a block begins and ends, also where it is a list of modules that is never called itself.

Many write a block as ModuleList([attention, mlp]) and add the shortcuts in the loop over such lists. Its members are
called one by one. What enters the block is what the first of them reads, and what leaves it is what the first of the
next block reads; behind the last block, what the next module outside reads, or what the module around gives.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all

Before = Callable[[nn.Module, tuple, dict], Any]  # a forward pre-hook with keywords
After = Callable[[nn.Module, tuple, dict, Any], Any]  # a forward hook with keywords


def is_called(block: nn.Module) -> bool:
    """Whether a block is a module with a forward of its own."""
    return not isinstance(block, nn.ModuleList | nn.ModuleDict)


@contextmanager
def listening(
    blocks: Sequence[nn.Module], before: Callable[[int], Before], after: Callable[[int], After]
) -> Generator[None]:
    """In here before(index) runs as each block begins and after(index) as it ends, both counted from 0.

    Of a list, nothing that before gives can be exchanged: its members do not read all of what enters it.
    """
    with ExitStack() as hooks:
        for index, block in enumerate(blocks):
            if is_called(block):
                hooks.callback(block.register_forward_pre_hook(before(index), with_kwargs=True).remove)
                hooks.callback(block.register_forward_hook(after(index), with_kwargs=True).remove)
        lists = {index: block for index, block in enumerate(blocks) if not is_called(block)}
        if lists:
            hooks.enter_context(_Spans(lists, before, after).open())
        yield


class _Spans:
    def __init__(self, lists: dict[int, nn.Module], before: Callable[[int], Before], after: Callable[[int], After]):
        self.lists, self.before, self.after = lists, before, after
        self._inside = {id(module) for block in lists.values() for module in block.modules()}
        self._last = max(lists)
        self._missing: set[int] = set()
        self._current: int | None = None
        self._entered: Tensor | None = None

    @contextmanager
    def open(self) -> Generator[None]:
        with ExitStack() as hooks:
            for index, block in self.lists.items():
                for member in block.children():
                    hooks.callback(member.register_forward_pre_hook(self._called(index), with_kwargs=True).remove)
            hooks.callback(hooks_of_all.register_module_forward_pre_hook(self._outside).remove)
            hooks.callback(hooks_of_all.register_module_forward_hook(self._around).remove)
            yield

    def _called(self, index: int) -> Before:
        def hook(member: nn.Module, args: tuple, kwargs: dict) -> None:
            if index != self._current:
                x = _stream([*args, *kwargs.values()])
                if x is None:
                    return
                if self._current is not None:
                    self._end(x)
                block = self.lists[index]
                self._current, self._entered = index, x
                learning = (each for each in block.children() if any(True for _ in each.parameters()))
                self._missing = {id(each) for each in learning}
                self.before(index)(block, (x,), {})
            self._missing.discard(id(member))

        return hook

    def _outside(self, module: nn.Module, args: tuple) -> None:
        """Another module is called, after all members of the last block were."""
        if self._current != self._last or self._missing or id(module) in self._inside:
            return
        x = _stream(args)
        if x is not None and self._entered is not None and x.shape == self._entered.shape:
            self._end(x)

    def _around(self, module: nn.Module, args: tuple, out: Any) -> None:
        """A module that holds the last block is done, and no other was called behind it."""
        if self._current != self._last or id(module) in self._inside:
            return
        if any(each is self.lists[self._last] for each in module.modules()):
            x = _stream(out)
            if x is not None and self._entered is not None and x.shape == self._entered.shape:
                self._end(x)
            self._current = None

    def _end(self, x: Tensor) -> None:
        index, self._current = self._current, None
        if index is not None:
            self.after(index)(self.lists[index], (self._entered,), {}, x)


def _stream(values: Any) -> Tensor | None:
    """The first floating tensor of two dimensions or more."""
    found = [values] if isinstance(values, Tensor) else values.values() if isinstance(values, dict) else values
    if not isinstance(found, list | tuple) and not hasattr(found, "__iter__"):
        return None
    whole = (each for each in found if isinstance(each, Tensor) and each.is_floating_point() and each.dim() > 1)
    return next(whole, None)

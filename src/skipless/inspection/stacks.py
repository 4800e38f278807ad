"""Stacks: the lists of blocks in a model, found without knowing its class, and when each block begins and ends.

Many write a block as ModuleList([attention, mlp]) and add the shortcuts in the loop over such lists. Its members are
called one by one. What enters the block is what the first of them reads, and what leaves it is what the first of the
next block reads; behind the last block, what the next module outside reads, or what the module around gives.
"""

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from inspect import currentframe
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all

from skipless.console import nearest

Block = tuple[str, nn.Module]  # with its name in the model
Before = Callable[[nn.Module, tuple, dict], Any]  # a forward pre-hook with keywords
After = Callable[[nn.Module, tuple, dict, Any], Any]  # a forward hook with keywords
_ATTENTION = ("attention", "attn")
TORCHS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def _unheard(index: int) -> Callable[..., None]:
    return lambda *given: None


def find_blocks(model: nn.Module, names: Sequence[str] | str | None = None) -> list[Block]:
    """(name, module) of every block of one stack, first to last.

    names may be one list's name ("model.layers"), the names of the blocks themselves in order, or None: then the
    longest of `find_stacks`, the first one where two are as long.
    """
    return max(find_stacks(model, names), key=len)


def find_stacks(model: nn.Module, names: Sequence[str] | str | None = None) -> list[list[Block]]:
    """Every stack of blocks, in the order in which the model holds them; one where `names` says which (`find_blocks`).

    A stack is an nn.ModuleList or nn.Sequential whose members each hold attention: the innermost, where a list of
    stages holds lists of blocks; or a run of members that are built alike, in a list that holds an embedding or a head
    too. A block may be a list itself, as in ModuleList([attention, mlp]), and where a list holds bare attention and the
    lists beside it are as long, as in zip(attentions, mlps), a block is one member of each. A model without attention
    has the longest list of modules of one kind instead, and so has one where only some blocks attend.
    """
    if isinstance(names, str):
        return [_members(model, names)]
    if names is not None:
        if not names:
            raise ValueError("blocks is empty; name at least one module, or leave it out to have them found")
        return [[(name, _module(model, name)) for name in names]]
    lists = [(name, each) for name, each in model.named_modules() if isinstance(each, nn.ModuleList | nn.Sequential)]
    attending = [(name, each) for name, each in lists if _all_attend(each)]
    inner = [(name, each) for name, each in attending if not _holds_stacks(name, attending)]
    found = [pair for pair in inner if not _inside(pair[0], [other for other in inner if other is not pair])]
    runs = [run for name, each in lists if (run := _longest_run(name, each)) and not _covers(run, found)]
    outer = [*found, *(block for run in runs for block in run)]
    mixed = [(n, each) for n, each in lists if _alike(each) and not _inside(n, outer) and not _stages(n, each, outer)]
    longest = max(mixed, key=lambda pair: len(pair[1]), default=None)
    longer = longest is not None and _attends_somewhere(longest[1]) and len(longest[1]) > _longest(found)
    if longest is not None and (not outer or (longer and not runs)):
        found = [pair for pair in found if not pair[0].startswith(f"{longest[0]}.")] + [longest]
        runs = [run for run in runs if not _inside(run[0][0], found)]
    if longest is not None and not runs and [name for name, _ in found] == [longest[0]] and _is_pair(longest[1]):
        return [[(longest[0], longest[1])]]
    if not found and not runs:
        raise ValueError(_nothing_found(model, lists))
    return [*(_zipped(model, name) or _members(model, name) for name, _ in found), *runs]


def holds_attention(module: nn.Module) -> bool:
    """Whether the module is or contains attention, going by the names of modules and classes."""
    return any(
        word in part
        for name, each in module.named_modules()
        for part in (name.lower(), type(each).__name__.lower())
        for word in _ATTENTION
    )


def _all_attend(group: nn.ModuleList | nn.Sequential) -> bool:
    """Members of one class, or of several (as in networks that mix two kinds of block), each with attention."""
    return len(group) > 0 and all(next(m.children(), None) is not None and holds_attention(m) for m in group)


def _longest_run(name: str, group: nn.ModuleList | nn.Sequential) -> list[Block]:
    """The longest run of blocks that are built alike, each with attention, in a list that holds other things too."""
    best: list[Block] = []
    run: list[Block] = []
    shapes = None
    for index, member in group.named_children():
        own = [(label, values.shape) for label, values in member.named_parameters()]
        attends = next(member.children(), None) is not None and holds_attention(member)
        run = [*(run if own == shapes else []), (f"{name}.{index}" if name else index, member)] if attends else []
        shapes = own if attends else None
        best = max(best, run, key=len)
    inside = [member for _, member in best]
    rest = {type(member) for member in group if not any(member is each for each in inside)} - {nn.Sequential}
    if not rest & set(map(type, inside)) and 1 < len(best) < len(group) <= 2 * len(best):
        return best
    return []  # too short, or blocks of one class of which only some attend


def _is_pair(group: nn.ModuleList | nn.Sequential) -> bool:
    """Whether a list is one block: its attention and its MLP."""
    return len(group) == 2 and sum(map(holds_attention, group)) == 1


def _covers(run: Sequence[Block], found: Sequence[Block]) -> bool:
    """Whether the blocks of a run lie inside a stack that was found, or hold one."""
    return any(_inside(name, found) or _inside(other, [(name, each)]) for name, each in run for other, _ in found)


def _attends_somewhere(group: nn.ModuleList | nn.Sequential) -> bool:
    return any(holds_attention(member) for member in group)


def _holds_stacks(name: str, attending: Sequence[Block]) -> bool:
    """Whether this is a list of stages: a member is, or holds, another list of blocks.

    A list of bare attentions inside a block is no stack, so the members of the inner one must be more than that.
    """
    prefix = f"{name}." if name else ""
    return any(
        other != name and other.startswith(prefix) and not any(_is_attention(member) for member in group.children())
        for other, group in attending
    )


def _is_attention(module: nn.Module) -> bool:
    return any(word in type(module).__name__.lower() for word in _ATTENTION)


def _alike(group: nn.ModuleList | nn.Sequential) -> bool:
    """Members that each hold a matrix among other modules, of one class or one build unless some of them attend."""
    members = list(group.children())
    whole = all(next(m.children(), None) is not None and any(p.dim() > 1 for p in m.parameters()) for m in members)
    built = {tuple((name, p.shape) for name, p in member.named_parameters()) for member in members}
    alike = 1 in (len(built), len({type(member) for member in members})) or _attends_somewhere(group)
    listed = any(isinstance(member, nn.ModuleList) for member in members)  # never called themselves
    return len(members) > 0 and whole and alike and not listed


def _inside(name: str, found: Sequence[Block]) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other, _ in found)


def _stages(name: str, group: nn.Module, found: Sequence[Block]) -> bool:
    """Whether every member of a list holds a stack that was found."""
    prefixes = [f"{name}.{member}." if name else f"{member}." for member, _ in group.named_children()]
    return all(any(other.startswith(prefix) for other, _ in found) for prefix in prefixes)


def _longest(found: Sequence[Block]) -> int:
    return max((len(list(group.children())) for _, group in found), default=0)


def _members(model: nn.Module, name: str) -> list[Block]:
    group = _module(model, name)
    if not isinstance(group, nn.ModuleList | nn.Sequential):
        return [(name, group)]
    return [(f"{name}.{index}" if name else index, member) for index, member in group.named_children()]


def _zipped(model: nn.Module, name: str) -> list[Block]:
    """Blocks of a list of bare attention and of the lists beside it that are as long; none where there is no other."""
    around, _, own = name.rpartition(".")
    lists = {
        label: [*each.children()]
        for label, each in model.get_submodule(around).named_children()
        if isinstance(each, nn.ModuleList)
    }
    attention = lists.get(own, [])
    beside = {label: each for label, each in lists.items() if len(each) == len(attention) > 1}
    if len(beside) < 2 or not all(map(_is_attention, attention)):
        return []
    if any(holds_attention(member) for label, each in beside.items() if label != own for member in each):
        return []
    together = zip(*beside.values(), strict=True)
    return [
        (f"{name}.{index}", nn.ModuleDict(dict(zip(beside, parts, strict=True))))
        for index, parts in enumerate(together)
    ]


def _module(model: nn.Module, name: str) -> nn.Module:
    modules = dict(model.named_modules())
    if name not in modules:
        raise ValueError(f"the model has no module {name!r}; {nearest(name, filter(None, modules))}")
    return modules[name]


def says_causal(block: nn.Module) -> bool:
    """Whether a block says that it is to see only what came before: by an attribute, by the name of its attention's
    class, as CausalSelfAttention, or by a mask that it keeps."""
    for module in block.modules():
        said = [getattr(module, word, None) for word in ("causal", "is_causal")]
        named = re.search("(?<!non)(?<!a)causal.*att", type(module).__name__.lower()) is not None  # not a convolution
        if True in said or (named and False not in said):
            return True
        if any(_triangle(buffer) for buffer in module.buffers(recurse=False)):
            return True
    return False


def _triangle(buffer: Tensor) -> bool:
    """A square of ones on and below the diagonal and zeros above; or of True above it, or of a number below −1e3."""
    square = buffer.squeeze()
    if square.dim() != 2 or not 1 < len(square) == square.shape[-1] or square.is_complex():
        return False
    square = square[:16, :16].float()
    ones = torch.ones_like(square)
    hides = torch.equal(square < -1e3, ones.triu(1) > 0) or torch.equal(square, ones.triu(1))
    return hides or torch.equal(square, ones.tril())


def plain_lists(model: nn.Module) -> Iterator[str]:
    """Names of Python's own lists, tuples and dicts that hold modules which the model does not know of."""
    known = {id(module) for module in model.modules()}
    for name, module in model.named_modules():
        for word, value in vars(module).items():
            values = value.values() if isinstance(value, dict) else value
            if word.startswith("_") or not isinstance(value, list | tuple | dict):
                continue
            if any(isinstance(each, nn.Module) and id(each) not in known for each in values):
                yield f"{name}.{word}" if name else word


def _nothing_found(model: nn.Module, lists: Sequence[Block]) -> str:
    seen = ", ".join(f"{name or 'the model itself'} ({len(list(module.children()))})" for name, module in lists[:8])
    plain = next(plain_lists(model), None)
    if plain is not None:
        return (
            f"{plain} of {type(model).__name__} is a plain list of modules: parameters() does not see them, so an "
            f"optimizer does not either; make it a list that torch knows: nn.ModuleList({plain.rpartition('.')[2]})"
        )
    named = (pair for pair in lists if pair[0])
    longest = max(named, key=lambda pair: len([*pair[1].children()]), default=("encoder", model))[0]
    return (
        f"{type(model).__name__} has no list of modules that each hold attention (lists seen: {seen or 'none'}); "
        f"name its blocks: blocks=['{longest}.0', '{longest}.1', …] or blocks='{longest}'"
    )


def check_recorded(x: Tensor, live: bool) -> None:
    """Raise where what a block reads is to have a gradient and the block runs without: it is run again on the way back.

    Under torch.no_grad() alone it is a fault of the model, which is inspected.
    """
    frame = None if live or torch.is_grad_enabled() or not x.requires_grad else currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            raise ValueError(
                "blocks run inside torch.utils.checkpoint with use_reentrant=True, where no gradient can be followed; "
                "take use_reentrant=False, or turn checkpointing off"
            )
        frame = frame.f_back


def is_called(block: nn.Module) -> bool:
    """Whether a block is a module with a forward of its own."""
    return not isinstance(block, nn.ModuleList | nn.ModuleDict)


@contextmanager
def listening(
    blocks: Sequence[nn.Module],
    before: Callable[[int], Before] = _unheard,
    after: Callable[[int], After] = _unheard,
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
                x = stream([*args, *kwargs.values()])
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
        x = stream(args)
        if x is not None and self._entered is not None and x.shape == self._entered.shape:
            self._end(x)

    def _around(self, module: nn.Module, args: tuple, out: Any) -> None:
        """A module that holds the last block is done, and no other was called behind it."""
        if self._current != self._last or id(module) in self._inside:
            return
        if any(each is self.lists[self._last] for each in module.modules()):
            x = stream(out)
            if x is not None and self._entered is not None and x.shape == self._entered.shape:
                self._end(x)
            self._current = None

    def _end(self, x: Tensor) -> None:
        index, self._current = self._current, None
        if index is not None:
            self.after(index)(self.lists[index], (self._entered,), {}, x)


def stream(values: Any) -> Tensor | None:
    """The hidden state among a block's arguments or results: the first floating tensor of two dimensions or more; of
    one tuple, list or mapping that holds them all, among its members."""
    own = list(_each(values))
    whole = (x for x in own if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1)
    inner = own[0] if len(own) == 1 and isinstance(own[0], Mapping | tuple | list) else ()
    return next(whole, None) if not inner else stream(inner)


def hidden(values: Any) -> Tensor:
    """The same, or the only tensor, or an error that says what there is instead."""
    found = values if isinstance(values, Tensor) else stream(values)
    if found is None:
        raise ValueError(
            f"a block reads or gives {', '.join(type(value).__name__ for value in _each(values)) or 'nothing'}, and no "
            "hidden state, (batch, T, width), is found in it; name modules that map one to the next: blocks=[…]"
        )
    return found


def _each(values: Any) -> Iterable[Any]:
    if isinstance(values, Mapping):
        return values.values()
    return values if isinstance(values, Iterable) and not isinstance(values, Tensor) else [values]

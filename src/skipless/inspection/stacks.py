"""Stacks: the lists of blocks in a model, found without knowing its class."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from skipless.console import nearest

Block = tuple[str, nn.Module]  # with its name in the model
_ATTENTION = ("attention", "attn")


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
    too. A block may be a list itself, as in ModuleList([attention, mlp]). A model without attention has the longest
    list of modules of one kind instead, and so has one where only some blocks attend.
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
    runs = [run for name, each in lists if (run := _run(name, each)) and not _covers(run, found)]
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
    return [*(_members(model, name) for name, _ in found), *runs]


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


def _run(name: str, group: nn.ModuleList | nn.Sequential) -> list[Block]:
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
    """Members that each hold a matrix among other modules, of one class unless some of them attend."""
    members = list(group.children())
    whole = all(next(m.children(), None) is not None and any(p.dim() > 1 for p in m.parameters()) for m in members)
    alike = len({type(member) for member in members}) == 1 or _attends_somewhere(group)
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


def _module(model: nn.Module, name: str) -> nn.Module:
    modules = dict(model.named_modules())
    if name not in modules:
        raise ValueError(f"the model has no module {name!r}; {nearest(name, modules)}")
    return modules[name]


def says_causal(block: nn.Module) -> bool:
    """Whether a block says that it is to see only what came before: by an attribute, or by a mask that it keeps."""
    for module in block.modules():
        if any(getattr(module, word, False) is True for word in ("causal", "is_causal")):
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
    return (
        f"{type(model).__name__} has no list of modules that each hold attention (lists seen: {seen or 'none'}); "
        "name its blocks: blocks=['encoder.0', 'encoder.1', …] or blocks='encoder'"
    )

"""Stacks: the lists of blocks in a model, found without knowing its class."""

from collections.abc import Sequence

from torch import nn

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
    stages holds lists of blocks. A model without attention has the longest list of modules of one kind instead, and
    so has one where only some blocks attend.
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
    mixed = [(n, each) for n, each in lists if _alike(each) and not _inside(n, found) and not _stages(n, each, found)]
    longest = max(mixed, key=lambda pair: len(pair[1]), default=None)
    if longest is not None and (not found or (_attends_somewhere(longest[1]) and len(longest[1]) > _longest(found))):
        found = [pair for pair in found if not pair[0].startswith(f"{longest[0]}.")] + [longest]
    if not found:
        raise ValueError(_nothing_found(model, lists))
    return [_members(model, name) for name, _ in found]


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


def _nothing_found(model: nn.Module, lists: Sequence[Block]) -> str:
    seen = ", ".join(f"{name or 'the model itself'} ({len(list(module.children()))})" for name, module in lists[:8])
    return (
        f"{type(model).__name__} has no list of modules that each hold attention (lists seen: {seen or 'none'}); "
        "name its blocks: blocks=['encoder.0', 'encoder.1', …] or blocks='encoder'"
    )

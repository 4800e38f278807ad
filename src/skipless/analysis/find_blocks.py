"""Finding a network's blocks: the longest list of modules that each hold attention, or those a user names."""

import difflib
from collections.abc import Sequence

from torch import nn

_ATTENTION = ("attention", "attn")


def find_blocks(model: nn.Module, names: Sequence[str] | str | None = None) -> list[tuple[str, nn.Module]]:
    """(name, module) of every block, first to last.

    names may be one list's name ("model.layers"), the names of the blocks themselves in order, or None: then the
    longest nn.ModuleList or nn.Sequential whose members each hold attention, the first one where two are as long.
    """
    if isinstance(names, str):
        return _members(model, names)
    if names is not None:
        if not names:
            raise ValueError("blocks is empty; name at least one module, or leave it out to have them found")
        return [(name, _module(model, name)) for name in names]
    lists = [
        (name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential)
    ]
    found = [(name, module) for name, module in lists if _alike_with_attention(module)]
    if not found:
        raise ValueError(_nothing_found(model, lists))
    name, _ = max(found, key=lambda pair: len(pair[1]))
    return _members(model, name)


def holds_attention(module: nn.Module) -> bool:
    """Whether the module is or contains attention, going by the names of modules and classes."""
    return any(
        word in part
        for name, each in module.named_modules()
        for part in (name.lower(), type(each).__name__.lower())
        for word in _ATTENTION
    )


def _alike_with_attention(group: nn.ModuleList | nn.Sequential) -> bool:
    """Members of one class, or of several (as in networks that mix two kinds of block), each with attention."""
    return len(group) > 0 and all(next(m.children(), None) is not None and holds_attention(m) for m in group)


def _members(model: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    group = _module(model, name)
    if not isinstance(group, nn.ModuleList | nn.Sequential):
        return [(name, group)]
    return [(f"{name}.{index}" if name else index, member) for index, member in group.named_children()]


def _module(model: nn.Module, name: str) -> nn.Module:
    modules = dict(model.named_modules())
    if name not in modules:
        near = difflib.get_close_matches(name, modules, n=3, cutoff=0.4)
        raise ValueError(f"the model has no module {name!r}; nearest: {', '.join(near) or 'none'}")
    return modules[name]


def _nothing_found(model: nn.Module, lists: Sequence[tuple[str, nn.Module]]) -> str:
    seen = ", ".join(f"{name or 'the model itself'} ({len(list(module.children()))})" for name, module in lists[:8])
    return (
        f"{type(model).__name__} has no list of modules that each hold attention (lists seen: {seen or 'none'}); "
        "name its blocks: blocks=['encoder.0', 'encoder.1', …] or blocks='encoder'"
    )

"""What comes from outside as plain data, checked against the types of a dataclass before anything is made of it."""

import dataclasses
import functools
import inspect
import numbers
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from skipless.console import nearest

T = TypeVar("T")
_NO_DEFAULT = object()

KINDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    tuple: "a list",
    list: "a list",
    dict: "a mapping",
}


def build(kind: type[T], data: Any, where: str, prefix: str = "") -> T:
    """The dataclass of a mapping of its fields, each of its type, its own dataclasses likewise.

    ValueError names the first field that is unknown, missing or of another type, by `prefix` and its name; where: what
    the data is said to be.
    """
    return kind(**check_fields(kind, data, where, prefix))


def check_fields(kind: Any, data: Any, where: str, prefix: str = "") -> dict[str, Any]:
    """The fields of a dataclass as JSON has them, each of its type."""
    known = {each.name: each for each in dataclasses.fields(kind) if each.init}
    if not isinstance(data, dict):
        raise ValueError(f"{where} is {shortened(data)}; it must be a mapping of {', '.join(known)}")
    for name in data:
        if name not in known:
            raise ValueError(f"{where} has no field {name!r}; {nearest(name, known)}")
    for name, each in known.items():
        if name not in data and each.default is each.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where} lacks {name!r}")
    hints = _hints(kind)
    return {name: check(value, hints[name], prefix + name) for name, value in data.items()}


def check_names(kind: Any, data: Any) -> None:
    """Refuse names that are no fields of the dataclass, with the nearest one that is."""
    if not isinstance(data, Mapping):
        raise ValueError(f"a {kind.__name__} is read from a mapping of its fields, not from {type(data).__name__}")
    known = {each.name for each in dataclasses.fields(kind)}
    for name in data:
        if name not in known:
            raise ValueError(f"{kind.__name__} has no field {name!r}; {nearest(name, known)}")


def check_own(instance: Any, prefix: str = "") -> None:
    """For __post_init__: refuse a field that is not of its type; NumPy's numbers become Python's, and lists tuples."""
    for name, hint in _hints(type(instance)).items():
        value = getattr(instance, name)
        if type(value) is hint or value is getattr(type(instance), name, _NO_DEFAULT):
            continue  # as most are; a default may also be None, to be filled in
        checked = check(value, hint, prefix + name)
        if checked is not value:
            object.__setattr__(instance, name, checked)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {each.name: hints[each.name] for each in dataclasses.fields(kind)}


def check(value: Any, hint: Any, name: str) -> Any:
    """A value out of JSON for a field's type, its lists as tuples and its mappings as the dataclasses they stand for.

    ValueError names the value and what it must be. A field of several types is left to its own class.
    """
    if type(value) is hint:
        return value  # most are
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [kind for kind in args if kind is not type(None)]
        if len(kinds) > 1 or (value is None and type(None) in args):
            return value
        if typing.get_origin(kinds[0]) is Literal:
            return check_choice(value, (None, *typing.get_args(kinds[0])), name)
        return check(value, kinds[0], name)
    if hint is Any:
        return value
    if origin is Literal:
        return check_choice(value, args, name)
    if dataclasses.is_dataclass(hint):
        if isinstance(value, hint):
            return value
        made = getattr(hint, "from_dict", None)
        if made is not None and inspect.isabstract(hint):  # which says by itself what the data are fields of
            return made(value)
        fields = check_fields(hint, value, name, f"{name}.")
        return made(fields) if made is not None else hint(**fields)
    if origin is tuple and hasattr(value, "tolist"):
        value = value.tolist()  # NumPy's
    if origin is tuple and isinstance(value, list | tuple):
        kinds = [args[0]] * len(value) if Ellipsis in args else args
        if len(value) != len(kinds):
            raise ValueError(f"{name} is {shortened(value)}; it must be a list of {len(kinds)}")
        pairs = enumerate(zip(value, kinds, strict=True))
        return tuple(check(part, kind, f"{name}[{index}]") for index, (part, kind) in pairs)
    if origin is list and isinstance(value, list):
        return [check(part, args[0], f"{name}[{index}]") for index, part in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {key: check(part, args[1], f"{name}.{key}") for key, part in value.items()}
    if hint in (int, float) and isinstance(value, numbers.Real) and not isinstance(value, int | float):
        value = value.__index__() if isinstance(value, numbers.Integral) else float(value)  # NumPy's
    if hint is int and isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        return int(value)
    kind = origin or hint
    if isinstance(value, bool) is not (kind is bool) or not isinstance(value, int | float if kind is float else kind):
        raise ValueError(f"{name} is {shortened(value)}; it must be {KINDS[kind]}")
    return value


def changed_fields(there: dict[str, Any], here: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(dotted name, value there, value here) of every field that two nested mappings differ in; None where it lacks."""
    one, other = _flat(there), _flat(here)
    pairs = [(name, one.get(name), other.get(name)) for name in sorted(one.keys() | other.keys())]
    return [(name, old, new) for name, old, new in pairs if old != new]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def check_plain(kind: Any) -> None:
    """Refuse a dataclass with a field that JSON cannot give back as it was."""
    for name, hint in _hints(kind).items():
        if not _is_plain(hint):
            raise ValueError(
                f"{kind.__name__}.{name} is declared as {hint!r}, which JSON does not hold; use bool, int, float, str, "
                "a Literal of them, tuple[float, ...], or one of these or None"
            )


def _is_plain(hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal or hint in (bool, int, float, str, type(None), Ellipsis) or dataclasses.is_dataclass(hint):
        return True
    return origin in (tuple, typing.Union, types.UnionType) and all(map(_is_plain, args))


def check_choice(value: Any, allowed: tuple, name: str) -> Any:
    """A value that must be one of a few."""
    if not any(type(value) is type(one) and value == one for one in allowed):
        raise ValueError(f"{name} is {shortened(value)}; it must be one of {', '.join(map(repr, allowed))}")
    return value


def shortened(value: Any, most: int = 60) -> str:
    """A value as an error quotes it."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"

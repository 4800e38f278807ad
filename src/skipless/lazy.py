"""Names that are imported when they are first used, so that `import skipless` and `skipless --help` stay quick."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any


def exports(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package (PEP 562) from {module in it: the public names it defines}.

    A module without names stands for itself. No name may also be a module's: importing the module would replace it.
    """
    home_of = {name: f"{package}.{module}" for module, names in homes.items() for name in names}
    modules = [module for module, names in homes.items() if not names]
    public = sorted([*home_of, *modules])

    def find(name: str) -> Any:
        if name in home_of:
            return getattr(import_module(home_of[name]), name)
        if name in modules:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}; public names: {', '.join(public)}")

    return find, lambda: public, public


def later(module: str, name: str) -> Any:
    """A function of a layer above: `Inspection.figure` draws with skipless.figures, which imports Inspection."""
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as missing:
        if missing.name != "matplotlib":
            raise
        raise ModuleNotFoundError(
            "figures need matplotlib: pip install 'skipless[plot]'", name="matplotlib"
        ) from missing


def import_after(other: str, own: str) -> None:
    """Import the module `own` once somebody has imported `other`, or now if that has happened."""
    if other in sys.modules:
        import_module(own)
    else:
        sys.meta_path.insert(0, _Watch(other, own))


class _Watch:
    """A finder that finds nothing itself: it lets others find one module, and acts when that has been executed."""

    def __init__(self, other: str, own: str):
        self.other, self.own = other, own

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.other:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            import_module(self.own)

        spec.loader.exec_module = exec_module
        return spec

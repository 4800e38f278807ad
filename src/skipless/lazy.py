"""Code that is imported when it is first used, so that `import skipless` and `skipless --help` stay quick.

And the user's own code, which is imported when the user names it.
"""

import functools
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module, metadata
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

EXTENSIONS = "skipless.extensions"  # the group of entry points


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


def import_code(name: str) -> None:
    """Import a file FILE.py, or a module, that the user names: it registers schemes and activations of their own.

    ValueError in one sentence where that fails. Only what somebody types may come here, never what a file says.
    """
    path = Path(name)
    if path.suffix != ".py":
        _run(f"--import {name}", lambda: _import_with_code(name))
        return
    if not path.is_file():
        raise ValueError(f"--import {name}: there is no such file (working folder {Path.cwd()})")
    known = sys.modules.get(path.stem)
    if known is not None:
        if Path(getattr(known, "__file__", None) or "").resolve() == path.resolve():
            return
        raise ValueError(f"--import {name}: a module named {path.stem!r} is there already: give the file another name")
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"--import {name} is no Python file")
    module = sys.modules[path.stem] = module_from_spec(spec)  # as dataclasses expect it
    try:
        _run(f"--import {name}", functools.partial(spec.loader.exec_module, module))
    except BaseException:
        del sys.modules[path.stem]
        raise


def _import_with_code(name: str) -> None:
    """Import a module. A folder without __init__.py counts as one for Python, and runs nothing."""
    if getattr(import_module(name), "__file__", "built in") is None:
        raise ValueError(f"{name} is a folder without __init__.py, so nothing of it runs; name a file in it, FILE.py")


@functools.cache
def import_extensions() -> None:
    """Import what installed packages offer as entry points of the group "skipless.extensions", all of it, once."""
    for entry in metadata.entry_points(group=EXTENSIONS):
        _run(f"the installed extension {entry.name!r} ({entry.value})", entry.load)


def _run(name: str, load: Callable[[], Any]) -> None:
    try:
        load()
    except (Exception, SystemExit) as error:  # a script that ends itself would end the command without a word
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, SyntaxError) else f", line {last.lineno} of {Path(last.filename).name}"
        raise ValueError(f"{name}: {type(error).__name__}: {error}{where}") from error

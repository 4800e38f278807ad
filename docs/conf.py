"""The site, by Sphinx: ./dev docs. Sources are the repository's own pages, so that every link between them holds.

Pages are Markdown as they lie in the repository. The reference is made here, from docstrings, which are plain text
and not reStructuredText. Formulas are plain text as well, Σ_{l−1} or e^(−γ); the site lowers what _ lowers and raises
what ^ raises. A link inside the site that leads nowhere is a warning, and warnings are errors.
"""

import importlib
import inspect
import pkgutil
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util import logging

import skipless

project = "skipless"
author = "the skipless authors"
version = release = skipless.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "results/**.md"]
exclude_patterns = ["build", ".venv", "skipless-*"]
html_theme = "furo"
html_title = "skipless"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_copyright = False
smartquotes = False  # γ' is γ prime
html_show_sourcelink = False
html_copy_source = False
myst_heading_anchors = 4  # links to sections, as on the repository's own pages
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 100
suppress_warnings = ["toc.not_included"]  # results/ has a page for every table; results/README.md links them

ROOMS = ["theory", "ops", "nn", "model", "hf", "data", "inspection", "training", "figures", "paper"]
FUNCTION = re.compile(r"`((?:theory|ops|nn|model)\.[\w.]+)`")

_GROUP = r"\((?:[^()]|\([^()]*\))*\)|\{[^{}]*\}"  # brackets that hold an index or an exponent are not shown
_INDEX = rf"_(?:{_GROUP}|(?:up|down|out|res|rows|columns|[A-Za-z0-9Α-ω]{{1,2}})(?![A-Za-z0-9Α-ω_]))"
_EXPONENT = rf"\^(?:{_GROUP}|[−-]?[A-Za-z0-9Α-ω½]+)"
_SYMBOL = r"(?<![A-Za-z0-9Α-ω_.])[A-Za-zΑ-ω][\u0300-\u036f]?"  # one letter, or names of code would be formulas
SCRIPTS = re.compile(rf"({_SYMBOL}|(?<=[)\d'])(?=\^))((?:{_INDEX}|{_EXPONENT})+)")
SCRIPT = re.compile(f"{_INDEX}|{_EXPONENT}")


def public_names() -> dict[str, dict[str, set[str] | None]]:
    """By room and module, the names to show; None is all of them."""
    shown: dict[str, dict[str, set[str] | None]] = {room: {} for room in ROOMS}
    for name in [*(found.name for found in pkgutil.iter_modules(skipless.theory.__path__, "theory.")), "ops.reference"]:
        shown[name.split(".")[0]][f"skipless.{name}"] = None
    for room in [skipless, *(importlib.import_module(f"skipless.{name}") for name in ROOMS)]:
        for name in getattr(room, "__all__", []):
            module = getattr(getattr(room, name), "__module__", None)  # a package among the names has none
            if module and not module.startswith("skipless.theory."):
                shown[module.split(".")[1]].setdefault(module, set()).add(name)
    return shown


def fill_in(app: Sphinx, docname: str, source: list[str]) -> None:
    """The reference's sections, and links to it from the functions that other pages name."""
    if docname == "docs/reference":
        for room, modules in public_names().items():
            source[0] += f"\n## {room}\n"
            for module, names in sorted(modules.items()):
                members = ", ".join(sorted(names or ()))
                source[0] += f"\n### {module.removeprefix('skipless.')}\n"
                source[0] += f"```{{eval-rst}}\n.. automodule:: {module}\n   :members: {members}\n```\n"
    elif docname in ("docs/equations", "docs/why"):
        source[0] = FUNCTION.sub(r"{py:obj}`\1 <skipless.\1>`", source[0])


def plain_text(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """A docstring as reStructuredText that looks the same: formulas stand as they are, `names` in code."""
    paragraphs = inspect.cleandoc("\n".join(lines)).split("\n\n")
    lines[:] = []
    for paragraph in paragraphs:
        rows = paragraph.split("\n")
        if all(row.startswith("  ") for row in rows):
            lines += ["::", "", *(f"    {row}" for row in rows), ""]
        elif any(row.startswith("  ") for row in rows) and not rows[0].startswith("- "):
            lines += [*(f"| {row}" for row in escaped(paragraph).split("\n")), ""]
        else:
            lines += [*escaped(paragraph).split("\n"), ""]


def escaped(text: str) -> str:
    """Nothing in it is markup but `names`."""
    parts = re.split(r"`([^`]+)`", text)  # between the odd ones, code
    parts[::2] = (re.sub(r"([\\*|_`])", r"\\\1", part) for part in parts[::2])
    parts[1::2] = (f"\\ ``{code}``\\ " for code in parts[1::2])
    return "".join(parts)


def is_skipped(app: Sphinx, what: str, name: str, obj: object, skip: bool, options: object) -> bool | None:
    """The fields of a named tuple say nothing that its signature does not."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field number") else None


def formula(text: str) -> list[nodes.Node]:
    """Text in which W_V, Σ_{l−1} and a_L^(l/L) have indices and exponents."""
    parts: list[nodes.Node] = []
    start = 0
    for found in SCRIPTS.finditer(text):
        parts.append(nodes.Text(text[start : found.start()] + found[1]))
        for script in SCRIPT.findall(found[2]):
            kind = nodes.subscript if script[0] == "_" else nodes.superscript
            inner = script[2:-1] if script[1] in "({" else script[1:]
            parts.append(kind("", "", *formula(inner)))
        start = found.end()
    return [*parts, nodes.Text(text[start:])]


def set_formulas(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Indices and exponents in prose, and in blocks of formulas; code stays as it is."""
    code = (nodes.FixedTextElement, nodes.literal, nodes.raw, addnodes.desc_signature)
    for text in list(doctree.findall(nodes.Text)):
        above, block = text.parent, text.parent
        while above is not None and not isinstance(above, code):
            above = above.parent
        is_formula = isinstance(block, nodes.literal_block) and block.get("language") in ("text", "default")
        if (above is None or is_formula) and SCRIPTS.search(text):
            block.replace(text, formula(text.astext()))
            if is_formula:
                block.rawsource = ""  # or its text would be highlighted, and its children left out


class Links(HTMLParser):
    """The links of a page, and the anchors that others may point at."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and (name == "href" or (name == "src" and tag != "script")):
                self.links.append(value)
            elif value and name in ("id", "name"):
                self.anchors.add(value)


def dead_links(site: Path) -> list[str]:
    """'page: link' for each link inside the site without a file or an anchor."""
    pages = {path: Links(path.read_text()) for path in sorted(site.rglob("*.html"))}
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            missing = parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors
            if not target.exists() or missing:
                dead.append(f"{path.relative_to(site)}: {link}")
    return dead


def check_links(app: Sphinx, failure: Exception | None) -> None:
    """Warn of links that lead nowhere; ./dev docs takes warnings for errors."""
    for link in [] if failure else dead_links(Path(app.outdir).resolve()):
        logging.getLogger(__name__).warning("a link leads nowhere: %s", link)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", fill_in)
    app.connect("autodoc-process-docstring", plain_text)
    app.connect("autodoc-skip-member", is_skipped)
    app.connect("doctree-resolved", set_formulas)
    app.connect("build-finished", check_links)

"""The shape of the package: what an import costs, which way imports point, how long a file may be."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCES = sorted((REPOSITORY / "src").rglob("*.py"))
SLOW_TO_IMPORT = {"transformers", "matplotlib", "typer", "rich", "sentencepiece"}
VAGUE_NAMES = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}
LONGEST_FILE = 550
SHORTEST_FILE = 60
LONGEST_FUNCTION = 100  # a story told on one page: attention's forward, the training step, the loop
# A shorter file needs a reason.
SHORT_FILES = {
    "skipless/__main__.py": "python -m skipless",
    "skipless/inspection/pytest_plugin.py": "needs pytest, as nothing else in src does",
    "skipless/hf/recompute.py": "imported later than the rest of hf, for a circle in transformers",
    "skipless/ops/cuda_graph.py": "graphs of decoding and of training",
    "skipless/ops/gpu/cross_entropy.py": "needs triton, as nothing outside ops/gpu does",
    "skipless/ops/modes.py": "asked by attention, the loss, training and whatever checks numbers",
}

relative_name = pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPOSITORY / "src")))


def run_fresh(code: str) -> dict:
    """What `code`, run in a new interpreter, leaves in `answer`, and the top-level `modules` loaded by then."""
    wrapped = (
        "import json, sys, time\nanswer = None\n"
        f"{code}\n"
        "modules = sorted({name.partition('.')[0] for name in sys.modules})\n"
        "print('\\n' + json.dumps({'answer': answer, 'modules': modules}))\n"
    )
    done = subprocess.run([sys.executable, "-c", wrapped], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("code", ["import skipless", "from skipless import ExponentialSPA"])
def test_import_loads_nothing_slow(code: str) -> None:
    assert not SLOW_TO_IMPORT & set(run_fresh(code)["modules"])


def test_import_is_quick() -> None:
    """Half a second beyond torch; CPU time, and torch as the measure, since a machine may be slow or busy."""
    code = """
import os
times = [os.times().user]
import torch
times.append(os.times().user)
import skipless
skipless.Transformer
times.append(os.times().user)
answer = times
"""
    start, torch, ours = run_fresh(code)["answer"]
    assert ours - torch < max(0.5, 0.25 * (torch - start))


@pytest.mark.parametrize(
    "module", ["model.kernel_maps", "model.presets", "training.load", "data.prepare", "paper.experiments"]
)
def test_configurations_need_neither_torch_nor_scipy_s_parts(module: str) -> None:
    """Names, sizes and corpora are read at once; scipy itself loads its parts when they are used."""
    code = f"import skipless.{module}\nanswer = [name for name in sys.modules if name.startswith('scipy.')]"
    seen = run_fresh(code)
    assert "torch" not in seen["modules"]
    assert not {"scipy.special", "scipy.linalg", "scipy.optimize", "scipy.signal"} & set(seen["answer"])


def test_every_public_name_resolves() -> None:
    code = """
import skipless
for name in skipless.__all__:
    getattr(skipless, name)
answer = sorted(set(skipless.__all__) - set(dir(skipless)))
"""
    assert run_fresh(code)["answer"] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    import skipless

    with pytest.raises(AttributeError, match="NoSuchName"):
        _ = skipless.NoSuchName


def test_type_checkers_may_read_its_annotations() -> None:
    """PEP 561: without the marker a user's checker takes everything from an installed skipless for Any."""
    from importlib.resources import files

    assert (files("skipless") / "py.typed").is_file()


def test_help_does_not_import_torch() -> None:
    code = """
sys.argv = ["skipless", "--help"]
from skipless.cli import main
try:
    main()
except SystemExit as stop:
    answer = stop.code or 0
else:
    answer = 0
"""
    seen = run_fresh(code)
    assert seen["answer"] == 0
    assert not {"torch", "scipy", "transformers", "matplotlib"} & set(seen["modules"])


def test_layers() -> None:
    """`lint-imports` holds: no module imports from a layer above its own (pyproject.toml)."""
    pytest.importorskip("importlinter")
    code = "from importlinter.cli import lint_imports_command\nlint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--no-cache"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 kept, 0 broken" in done.stdout


@relative_name
def test_file_is_one_well_named_idea(path: Path) -> None:
    assert path.name not in VAGUE_NAMES, f"{path.name} says nothing of what it holds"
    lines, name = len(path.read_text().splitlines()), str(path.relative_to(REPOSITORY / "src"))
    assert lines <= LONGEST_FILE, f"{name} has {lines} lines; find the second noun in it"
    short = lines < SHORTEST_FILE and path.name != "__init__.py"
    assert short == (name in SHORT_FILES), f"{name} has {lines} lines; under {SHORTEST_FILE} it needs a reason"


@relative_name
def test_functions_are_short(path: Path) -> None:
    functions = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lengths = {f"{path}:{f.lineno} {f.name}": f.end_lineno - f.lineno + 1 for f in functions if f.end_lineno}
    long = {where: lines for where, lines in lengths.items() if lines > LONGEST_FUNCTION}
    assert not long, f"functions of more than {LONGEST_FUNCTION} lines: {long}"


def test_the_design_names_every_file() -> None:
    page = (REPOSITORY / "docs" / "design.md").read_text()
    tree = page[page.index("## Every file") : page.index("## An order to read in")]
    named = set(re.findall(r"\b(\w+)(?:\.py)?\b", tree))
    files = {path.stem for path in SOURCES if path.stem not in ("__init__", "__main__")}
    assert files <= named, f"docs/design.md does not name {sorted(files - named)}"
    assert {word[:-3] for word in re.findall(r"\b\w+\.py\b", tree)} <= files, "docs/design.md names files that are gone"

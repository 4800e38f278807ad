"""Every Python block of the documents runs as written.

The blocks of one document share a namespace, in order, as a reader would paste them. A block opened by
```` ```python no-run ```` is left out, and one opened by ```` ```python needs=PACKAGE ```` where that is not installed.
"""

import importlib.util
import re
import runpy
import tomllib
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parent.parent
DOCUMENTS = [REPOSITORY / "README.md", REPOSITORY / "SECURITY.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```python[ \t]*(?P<tag>[^\n]*)\n(?P<code>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
INSPECTION = re.compile(r"^```text\nblock .*?\n\n(.*?)^```$", re.MULTILINE | re.DOTALL)  # what stands below the table
TAG = re.compile(r"(no-run|needs=(?P<package>\w+))?")


def blocks(text: str) -> list[tuple[int, str, str]]:
    """(number of lines before the code, tag, code) of each Python block."""
    return [(text[: m.start("code")].count("\n"), m["tag"].strip(), m["code"]) for m in FENCE.finditer(text)]


WITH_CODE = [path for path in DOCUMENTS if blocks(path.read_text())]


@pytest.mark.parametrize("path", WITH_CODE, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_python_blocks_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And print the verdicts that the page shows; their tables hold numbers that differ between machines."""
    monkeypatch.chdir(tmp_path)  # what a block writes stays out of the repository
    monkeypatch.setenv("MPLBACKEND", "agg")
    namespace = {"__name__": "__main__"}
    for lines_before, tag, code in blocks(path.read_text()):
        known = TAG.fullmatch(tag)
        assert known, f"{path.name}:{lines_before}: unknown tag {tag!r} on a Python block; known: no-run, needs=PACKAGE"
        if tag == "no-run" or (known["package"] and not importlib.util.find_spec(known["package"])):
            continue
        padded = "\n" * lines_before + code  # so that a traceback points at the document's line
        exec(compile(padded, str(path), "exec"), namespace)
    printed = capsys.readouterr().out
    for shown in INSPECTION.findall(path.read_text()):
        assert shown in printed


SHELL = re.compile(r"^```sh\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


def test_every_command_shown_has_the_options_it_is_given() -> None:
    """Commands in sh blocks are not run, as they train and read files; but each is there, with these options."""
    from typer.testing import CliRunner

    from skipless.cli.app import app

    shown: dict[str, set[str]] = {}
    for path in DOCUMENTS:
        for block in SHELL.findall(path.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                words = line.split("  #")[0].split()
                if "skipless" in words[:1]:
                    shown.setdefault(words[1], set()).update(w.split("=")[0] for w in words[2:] if w.startswith("--"))
    assert {"prepare", "train", "inspect", "reproduce"} <= set(shown)
    for command, options in shown.items():
        if command.startswith("--"):
            continue
        done = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
        assert done.exit_code == 0, f"no command {command}"
        missing = {option for option in options if not re.search(rf"{option}\b", done.output)}
        assert not missing, f"skipless {command} has no {missing}"


def test_the_example_of_a_gpt_trains() -> None:
    """Small, on a page of ours: it ends below the entropy of the bytes, and is no longer than promised."""
    example = REPOSITORY / "examples" / "nanogpt_espa.py"
    assert len(example.read_text().splitlines()) <= 100
    text = REPOSITORY / "docs" / "training.md"
    counts = torch.bincount(torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long())
    entropy = torch.distributions.Categorical(counts.float()).entropy().item()
    sizes = ["--depth", "4", "--width", "64", "--length", "64"]
    losses = runpy.run_path(str(example))["main"]([str(text), "120", *sizes, "--rate", "3e-3"])
    assert sum(losses[-10:]) / 10 < entropy - 0.2


PROMISES = [REPOSITORY / "docs" / "equations.md", REPOSITORY / "docs" / "reliability.md", REPOSITORY / "SECURITY.md"]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@pytest.mark.parametrize("path", PROMISES, ids=lambda path: path.name)
def test_every_promise_names_a_test_that_is_there(path: Path) -> None:
    text = path.read_text()
    named = TEST.findall(text)
    assert len(named) > 5
    for file, name in named:
        assert f"def {name}(" in (REPOSITORY / file).read_text(), f"{file} has no {name}"
    rows = [line for line in text.splitlines() if line.startswith("|") and not line.startswith(("|---", "| promise"))]
    assert all(TEST.search(row) for row in rows if not row.endswith("| test |"))


def test_the_readme_shows_code() -> None:
    assert any(tag == "" for _, tag, _ in blocks((REPOSITORY / "README.md").read_text()))


@pytest.mark.parametrize("command", ["./dev demo", "./dev test"])
def test_the_readme_names_the_two_commands(command: str) -> None:
    assert command in (REPOSITORY / "README.md").read_text()


def test_the_source_archive_holds_what_documents_link_to_and_tests_read() -> None:
    """README, licence and pyproject.toml come by themselves; the rest must be named there."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    held = {"README.md", "LICENSE", *project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]}
    linked = {
        (path.parent / target).resolve().relative_to(REPOSITORY).parts[0]
        for path in DOCUMENTS
        for target in LINK.findall(path.read_text())
    }
    assert linked | {"benchmarks", "dev"} <= held

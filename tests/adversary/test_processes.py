"""The same as programs of their own, as a shell starts them; and model folders with code in them."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.adversary.catalogue import BINARIES, DAMAGES, GENERATE, HARMLESS, READERS, VALUES, put, said
from tests.adversary.conftest import run

VALUE_CASES = [words for words in VALUES if not any("\udcff" in word for word in words)][::19][:30]
FILE_CASES = [(file, damage) for file in READERS for damage in DAMAGES if (file, damage) not in HARMLESS][::9][:24]
BINARY_CASES = BINARIES[::4][:8]


def program(words: list[str], folder: Path, answers: bytes = b"") -> tuple[int, list[str]]:
    """Exit code and lines of standard error."""
    command = [sys.executable, "-m", "skipless", *words]
    done = subprocess.run(command, cwd=folder, input=answers, capture_output=True, check=False, timeout=120)
    return done.returncode, done.stderr.decode().splitlines()


def check(code: int, lines: list[str]) -> None:
    assert code == 2, lines
    assert not any("Traceback" in line for line in lines)
    assert lines[-1].startswith(("skipless: ", "╰"))  # the end of a box that says what is wrong with an option


@pytest.mark.catalogue(4)
@pytest.mark.parametrize("words", VALUE_CASES, ids=" ".join)
def test_a_bad_value(here: Path, words: list[str]) -> None:
    check(*program(words, here))


@pytest.mark.catalogue(3)
@pytest.mark.parametrize(("file", "damage"), FILE_CASES)
def test_a_damaged_file(here: Path, file: str, damage: str) -> None:
    for hashes in here.glob("*/hashes.json"):
        hashes.unlink()
    put(here / file, DAMAGES[damage]((here / file).read_bytes()))
    check(*program(READERS[file], here))


@pytest.mark.catalogue(1)
@pytest.mark.parametrize(("file", "damage", "content", "words"), BINARY_CASES, ids=lambda each: str(each)[:30])
def test_a_file_of_another_kind(here: Path, file: str, damage: str, content: bytes, words: list[str]) -> None:
    put(here / file, content)
    check(*program(words, here))


def test_there_are_sixty() -> None:
    assert len(VALUE_CASES) + len(FILE_CASES) + len(BINARY_CASES) >= 60


def hostile(export: Path, where: str) -> Path:
    """A copy of an export that asks for code of its own, which leaves a file behind where it runs."""
    folder = shutil.copytree(export, export.with_name("hostile"))
    (folder / "hashes.json").unlink()
    for name, changes in {
        "config.json": {
            "model_type": "hostile",
            "architectures": ["Model"],
            "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
        },
        "tokenizer_config.json": {"tokenizer_class": "Tokens", "auto_map": {"AutoTokenizer": ["code.Tokens", None]}},
    }.items():
        if where in (name, "both"):
            (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))
    marks = "from pathlib import Path\nPath('ran').write_text('')\n"
    for name in ("code.py", "setup.py", "__init__.py", "modeling_hostile.py"):
        (folder / name).write_text(f"{marks}class Config: pass\nclass Model: pass\nclass Tokens: pass\n")
    return folder


OPENERS = {
    "inspect": "inspect hostile --length 8 --batch 1 --corpus text.txt",
    "generate": GENERATE.replace("run", "hostile", 1),
    "eval": "eval hostile --corpus text.txt --device cpu --max-tokens 32",
    "eval --tokenizer": "eval run --tokenizer hostile --corpus text.txt --device cpu --max-tokens 32",
    "export --tokenizer": "export run --tokenizer hostile --out new",
}


@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json", "both"])
@pytest.mark.parametrize("command", OPENERS)
def test_code_in_a_model_folder_is_neither_run_nor_asked_about(here: Path, monkeypatch, where, command) -> None:
    hostile(here / "export", where)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 50))
    ending = run(*said(OPENERS[command]))
    assert not ending.traceback
    assert not Path("ran").exists()
    reads = "tokenizer_config.json" if "--tokenizer" in command else "config.json"
    if where in (reads, "both"):
        assert ending.code == 2, ending
        assert f"hostile/{reads} asks for code that lies beside it (auto_map), which is never run here" in ending.err


def test_nor_after_a_yes_on_standard_input(here: Path) -> None:
    hostile(here / "export", "both")
    environment = os.environ.get("HF_HOME")
    code, lines = program(said(OPENERS["inspect"]), here, b"y\n" * 50)
    check(code, lines)
    assert not (here / "ran").exists()
    assert environment == os.environ.get("HF_HOME")

"""The application itself: what every command line answers."""

import inspect
import json
import subprocess
import sys
from importlib import import_module

import pytest
from typer.testing import CliRunner

import skipless
from skipless.cli.app import COMMANDS, app


def test_it_says_its_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"skipless {skipless.__version__}\n"


def test_an_unknown_command_is_refused():
    assert CliRunner().invoke(app, ["trian"]).exit_code == 2


def test_an_unknown_command_names_the_nearest():
    assert "'train'" in CliRunner().invoke(app, ["trian"]).stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_of_help_is_the_command_s_own(name):
    """Help is read from the table, so that it imports no command; here the two are held together."""
    function = import_module(f"skipless.cli.{COMMANDS[name].module}").command
    assert (inspect.getdoc(function) or "").partition("\n")[0] == COMMANDS[name].help
    shown = CliRunner().invoke(app, [name, "--help"])
    assert shown.exit_code == 0
    assert f"skipless {name}" in shown.stdout


WRONG_PATHS = {
    "demo": ["demo", "--out", __file__],
    "kernels": ["kernels", "nosuch"],
    "inspect": ["inspect", "nosuch"],
    "inspect --text": ["inspect", "wikitext103/e-spa", "--text", "nosuch.txt"],
    "inspect --corpus": ["inspect", "wikitext103/e-spa", "--corpus", "nosuch"],
    "eval": ["eval", "nosuch"],
    "generate": ["generate", "nosuch", "--prompt", "The"],
    "prepare": ["prepare", "nosuch"],
    "train": ["train", "nosuch"],
    "train a file": ["train", "nosuch.json"],
    "train --data": ["train", "wikitext103/e-spa", "--data", "nosuch"],
    "export": ["export", "nosuch"],
    "report": ["report", "nosuch"],
    "reproduce": ["reproduce", "nosuch"],
    "reproduce --data": ["reproduce", "baselines", "--data", "nosuch"],
}
RUN = """
import json, os, sys
from skipless.cli import main
seen = {}
for name, words in json.loads(sys.argv[1]).items():
    sys.argv, before = ["skipless", *words], os.times().user
    try:
        main()
    except SystemExit as stop:
        code = stop.code or 0
    heavy = {"torch", "transformers", "matplotlib", "scipy.optimize"} & set(sys.modules)
    seen[name] = [code, sorted(heavy), os.times().user - before]
print("\\n" + json.dumps(seen))
"""


def answers(commands: dict[str, list[str]], folder) -> dict[str, list]:
    """Exit code, slow libraries that are loaded by then and CPU time of commands, one after another in one process."""
    words = [sys.executable, "-c", RUN, json.dumps(commands)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=folder, timeout=120)
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_lists_and_refusals_of_a_wrong_path_come_at_once(tmp_path):
    """Within a second of CPU time and without what is slow to import; a busy machine may take longer by the clock."""
    listed = {"train --list": ["train", "--list"], "kernels --list": ["kernels", "--list"]}
    for name, (code, heavy, seconds) in answers({**listed, **WRONG_PATHS}, tmp_path).items():
        assert (name, code, heavy) == (name, 0 if "--list" in name else 2, [])
        assert seconds < 1.0, f"{name} took {seconds:.2f} s"


def test_the_paper_s_tables_are_listed_without_torch(tmp_path):
    code, heavy, seconds = answers({"list": ["reproduce", "--list"]}, tmp_path)["list"]
    assert code == 0
    assert "torch" not in heavy
    assert seconds < 2.5

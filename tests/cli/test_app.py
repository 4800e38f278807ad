"""The application itself: what every command line answers."""

import inspect
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

"""The application itself: what every command line answers."""

from typer.testing import CliRunner

import skipless
from skipless.cli.app import app


def test_it_says_its_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"skipless {skipless.__version__}\n"


def test_an_unknown_command_is_refused():
    assert CliRunner().invoke(app, ["trian"]).exit_code == 2

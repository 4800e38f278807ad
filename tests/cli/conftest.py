"""What tests of several commands share."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from skipless.cli import main


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """So small a network gains nothing from two, and on a busy machine they wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def skipless(tmp_path: Path, capsys, monkeypatch) -> Callable[..., tuple[str, str]]:
    """Runs a command in this process, in an empty folder: what it wrote on standard output and on standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["skipless", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
        seen = capsys.readouterr()
        assert (stop.value.code or 0) == code, seen.out + seen.err
        return seen.out, seen.err

    return run

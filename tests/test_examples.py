"""The files in examples/ run as they are; my_scheme.py has tests of its own, in tests/model/test_own_schemes.py."""

import re
import runpy
from pathlib import Path

import pytest
from tests.pictures import striped

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("network", ["mirrored", "pre-ln"])
def test_a_vision_transformer_learns(tmp_path, network, capsys):
    """From half of the answers right to nearly all."""
    sizes = {"depth": 3, "width": 64, "epochs": 30, "batch": 16}
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    words += ["--network", network, "--out", str(tmp_path / "vit")]
    runpy.run_path(str(EXAMPLES / "vit_cifar.py"))["main"]([str(striped(tmp_path / "pictures")), *words])
    found = re.search(rf"{network}: ([\d.]+)% of 32 test images", capsys.readouterr().out)
    assert found is not None
    assert float(found[1]) > 90.0


def test_examples_are_short():
    assert all(len(path.read_text().splitlines()) <= 100 for path in EXAMPLES.glob("*.py"))

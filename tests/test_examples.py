"""The files in examples/ run as they are; my_scheme.py has tests of its own, in tests/model/test_own_schemes.py."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Two classes of noisy images of 8 × 8: bright above, and bright below."""
    image = pytest.importorskip("PIL.Image")
    folder, noise = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for part, count in (("train", 32), ("test", 16)):
        for name, rows in (("above", slice(0, 4)), ("below", slice(4, 8))):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = noise.integers(0, 100, (8, 8, 3), np.uint8)
                pixels[rows] += 150
                image.fromarray(pixels).save(folder / part / name / f"{number}.jpg")
    return folder


@pytest.mark.parametrize("network", ["mirrored", "mirrored-u-spa", "pre-ln"])
def test_a_vision_transformer_learns(images, network, capsys):
    """From half of the answers right to nearly all."""
    sizes = {"depth": 3, "width": 64, "epochs": 15, "batch": 16, "rate": 1e-2}
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    runpy.run_path(str(EXAMPLES / "vit_cifar.py"))["main"]([str(images), "--network", network, *words])
    found = re.search(rf"{network}: ([\d.]+)% of 32 test images", capsys.readouterr().out)
    assert found is not None
    assert float(found[1]) > 90.0


def test_examples_are_short():
    assert all(len(path.read_text().splitlines()) <= 100 for path in EXAMPLES.glob("*.py"))

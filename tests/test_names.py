"""The names a researcher guesses: each works as it is guessed, whatever else has been imported."""

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import skipless as sk
from skipless.data.prepare import Preparation, prepare
from skipless.data.tokenizer import Bytes

SOURCE = Path(sk.__file__).parent
ROOMS = ("theory", "ops", "nn", "model", "data", "inspection", "training", "training.optim", "figures", "paper")


def modules() -> Iterator[str]:
    """Every module of the package that can be imported where there is no GPU."""
    for found in pkgutil.walk_packages(sk.__path__, "skipless."):
        if not found.name.endswith("__main__"):
            yield found.name


@pytest.fixture(autouse=True, scope="module")
def _everything_imported() -> None:
    """Importing a module puts it into its package under its own name, where it could hide a public one."""
    for name in modules():
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as missing:
            if (missing.name or "").startswith("skipless"):
                raise


@pytest.fixture
def model() -> sk.Transformer:
    torch.manual_seed(0)
    return sk.Transformer("e-spa", depth=4, width=256, vocab_size=1000)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 1000, (2, 32), generator=torch.Generator().manual_seed(0))


def test_a_transformer_by_the_name_of_its_preset(model: sk.Transformer) -> None:
    assert model.config == sk.preset("wikitext103/e-spa", depth=4, width=256, vocab_size=1000)


def test_a_transformer_of_one_block() -> None:
    model = sk.Transformer("e-spa", depth=1, width=64, vocab_size=100)
    assert sk.certificate(model.config).verdict.kind == "preserved"


def test_attention_for_a_model_of_one_s_own() -> None:
    attention = sk.nn.ShapedAttention(256, heads=8, shape=sk.ExponentialSPA().shapes(12)[3])
    assert attention(torch.randn(2, 16, 256)).shape == (2, 16, 256)


def test_train_load_and_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vocabulary, repeat rate and warm-up follow from the data and the steps."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for number in range(4):
        (tmp_path / "text" / f"{number}.txt").write_text(f"The signal survives depth {number}. " * 60)
    prepare(Preparation("text", Bytes()), Path("data/wiki"))
    small = {"heads": 2, "length": 32, "batch_size": 2, "precision": "fp32", "compile": False, "device": "cpu"}
    sk.train("wikitext103/e-spa", data="data/wiki", depth=2, width=32, steps=2, out="runs/e-spa", quiet=True, **small)
    model = sk.load("runs/e-spa")
    assert model.config.vocab_size == 256
    assert model.generate("The signal").startswith("The signal")


def test_the_second_argument_is_the_targets(model: sk.Transformer, tokens: torch.Tensor) -> None:
    x, y = tokens[:, :-1], tokens[:, 1:]
    expected = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    assert model(x, y).item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.equal(model(x, y), model(x, targets=y))


def test_a_certificate_prints_as_a_table(model: sk.Transformer) -> None:
    certificate = sk.certificate(model.config)
    head, *rows, blank, verdict = str(certificate).splitlines()
    assert head.split() == [
        *("block", "norm²:", "least", "mean", "largest", "cosine", "eff.", "rank", "gradient²:", "mean", "largest")
    ]
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3", "4"]
    assert rows[0].split()[1:4] == ["1", "1", "1"]
    assert (blank, verdict) == ("", certificate.verdict.text)
    assert certificate._repr_html_().count("<tr>") == 6
    assert len(str(sk.certificate(sk.preset("depth/e-spa-108"))).splitlines()) <= 18


def test_an_inspection_prints_as_a_table_and_draws_itself(model: sk.Transformer, tokens, tmp_path: Path) -> None:
    found = sk.inspect(model, tokens)
    head, *rows, blank, verdict = str(found).splitlines()
    assert head.startswith("block")
    assert len(rows) == 5
    assert (blank, verdict) == ("", f"Transformer: {found.verdict.text}")
    assert found._repr_html_().endswith(f"<p>Transformer: {found.verdict.text}</p>")
    figure = found.figure(tmp_path / "inspect.png")
    assert (tmp_path / "inspect.png").read_bytes().startswith(b"\x89PNG")
    assert len(figure.axes) == len(found.figure().axes) >= 8
    with pytest.raises(ValueError, match=r"inspect.jpg; the name must end in .png, .pdf, .svg"):
        found.figure(tmp_path / "inspect.jpg")


def test_a_certificate_draws_itself(model: sk.Transformer, tmp_path: Path) -> None:
    figure = sk.certificate(model).figure(str(tmp_path / "certificate.svg"))
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        *("squared norm, mean and range", "mean cosine", "effective rank", "squared gradient norm")
    ]
    assert "<svg" in (tmp_path / "certificate.svg").read_text()


def test_a_transformer_s_certificate_is_its_configuration_s(model: sk.Transformer) -> None:
    assert sk.certificate(model) == sk.certificate(model.config)


@pytest.mark.parametrize("room", ROOMS)
def test_packages_export_their_nouns(room: str) -> None:
    package = importlib.import_module(f"skipless.{room}")
    own = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert package.__all__
    assert dir(package) == package.__all__
    for name in package.__all__:
        assert getattr(package, name).__module__.startswith(f"skipless.{room}"), name
        assert name not in own, f"importing skipless.{room}.{name} would hide the public name"


def test_no_module_hides_a_public_name() -> None:
    rooms = {module.name for module in pkgutil.iter_modules(sk.__path__)}
    for name in set(sk.__all__) - rooms:
        assert not isinstance(getattr(sk, name), type(sk)), f"skipless.{name} is a module"


def test_type_checkers_see_every_public_name() -> None:
    """The imports under TYPE_CHECKING and the table that runs name the same things."""
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert sorted(seen) == sk.__all__
    for name, module in seen.items():
        assert getattr(importlib.import_module(str(module)), name) is getattr(sk, name)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"module 'skipless.nn' has no attribute 'Attention'; .*ShapedAttention"):
        _ = sk.nn.Attention


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sk.Transformer(3), "config is 3; it must be a ModelConfig"),
        (lambda: sk.certificate("x"), "no preset 'x'"),
        (lambda: sk.inspect(42, torch.zeros(1, 4, dtype=torch.long)), "model is 42; it must be a torch.nn.Module"),
    ],
)
def test_a_wrong_object_gets_an_error_that_teaches(call, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()

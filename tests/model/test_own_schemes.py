"""Schemes that users write: registered, certified, built, trained, saved, and refused where they cannot be."""

import dataclasses
import importlib.metadata
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.model.commands import check_resumed_and_exported, kill_at_a_checkpoint, training_words
from typer.testing import CliRunner

import skipless
from skipless import ModelConfig, Scheme, Transformer, lazy, register_scheme
from skipless.cli.app import app
from skipless.data.prepare import Preparation, prepare
from skipless.data.tokenizer import Bytes
from skipless.model.config import attention_shapes
from skipless.model.generate import generate
from skipless.ops.attention import shaped_attention, why_not_triton
from skipless.ops.bias import AttentionInputs, BiasVectors
from skipless.theory import DenseShape, PlainShape, TableShape, kernels
from skipless.theory.schemes import SCHEMES
from skipless.theory.shapes import AttentionShape, CompactBias

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_scheme.py"
SMALL = {"vocab_size": 64, "width": 32, "heads": 4, "depth": 4, "length": 24, "mlp_init": "mirrored"}


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """What a test registers is forgotten after it."""
    before, modules = dict(SCHEMES), set(sys.modules)
    yield
    SCHEMES.clear()
    SCHEMES.update(before)
    if "my_scheme" in set(sys.modules) - modules:
        del sys.modules["my_scheme"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text(EXAMPLE.read_text() * 8)
    prepare(Preparation(str(folder / "text.txt"), tokenizer=Bytes()), folder / "tokens", workers=1)
    return folder / "tokens"


@dataclass(frozen=True)
class Leaning(AttentionShape):
    """Less attention to others than to oneself, falling by a rate for each head: none of the paper's shapes."""

    decay: float
    causal: bool = True

    def compact(self, length: int) -> CompactBias:
        zero = np.zeros(1)
        return CompactBias(np.array([self.decay, 0.0, 0.1, 2.0]), zero - 2.0, zero, 1.0 + zero)


@dataclass(frozen=True)
class Halves(TableShape):
    """Half of every location's attention stays, half goes to its predecessor."""

    causal: bool = True

    def dense(self, length: int) -> np.ndarray:
        matrix = 0.8 * np.eye(length) + 0.6 * np.eye(length, k=-1)
        matrix[0, 0] = 1.0
        return matrix


@dataclass(frozen=True, eq=False)
class Given(TableShape):
    """A matrix, unchecked."""

    matrix: object
    causal: bool = True

    def dense(self, length: int) -> np.ndarray:
        return self.matrix


def shaped(shape: AttentionShape, kind: str = "one-shape") -> type[Scheme]:
    @register_scheme(kind)
    @dataclass(frozen=True)
    class OneShape(Scheme):
        preserves_signal = True

        def shapes(self, depth, skip_weight=0.0, causal=True, **context):
            return [shape] * depth

    return OneShape


def test_the_example_runs_from_definition_to_export_and_back(tmp_path, data, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lazy.import_code(str(EXAMPLE))
    sys.modules["my_scheme"].main(str(data), "run")
    assert "The signal survives all 8 blocks" in capsys.readouterr().out
    own = [line for line in EXAMPLE.read_text().partition('"""\n\n')[2].splitlines() if line.strip()]
    assert len(own) < 60
    saved = json.loads((tmp_path / "run" / "experiment.json").read_text())["model"]["scheme"]
    assert saved == {"kind": "smooth", "gamma_final": 0.05, "share": 0.5, "repeat_rate": 0.0}


def test_its_kernels_are_the_family_it_says():
    """A Σ Aᵀ goes through the kernels of the definition, block by block, in theory and in a network of width 32."""
    lazy.import_code(str(EXAMPLE))
    config = ModelConfig(scheme=SCHEMES["smooth"](gamma_final=0.2), **SMALL)
    expected = [config.scheme.kernel(a, 24) for a in np.exp(-skipless.theory.exponential.decay_rates(0.2, 4)[1:])]
    kernel = np.eye(24)
    for shape, target in zip(attention_shapes(config), expected, strict=True):
        kernel = shape.dense(24) @ kernel @ shape.dense(24).T
        np.testing.assert_allclose(kernel, target, atol=1e-10)
    model = Transformer(config).double()
    tokens = torch.randint(64, (1, 24))
    start = model.embed(tokens)[0].detach().numpy()
    left = model.hidden(tokens)[0].detach().numpy()
    through = np.linalg.multi_dot([shape.dense(24) for shape in reversed(attention_shapes(config))])
    np.testing.assert_allclose(
        left @ left.T, through @ start @ start.T @ through.T, atol=1e-5 * np.abs(left).max() ** 2
    )


def test_a_killed_run_goes_on_and_is_exported(tmp_path, data, monkeypatch):
    """By the commands, which know the scheme by --import alone: without it they say so."""
    monkeypatch.chdir(tmp_path)
    code, fields = ["--import", str(EXAMPLE)], ["model.scheme=smooth", "model.scheme.share=0.4", "model.heads=4"]
    train = training_words(data, fields, *code)
    kill_at_a_checkpoint(train, tmp_path / "run")
    saved = json.loads((tmp_path / "run" / "experiment.json").read_text())["model"]["scheme"]
    assert (saved["kind"], saved["share"]) == ("smooth", 0.4)
    assert saved["repeat_rate"] > 0.0  # that of the tokens

    without = CliRunner().invoke(app, ["export", "run"])
    assert "run/experiment.json: scheme kind is 'smooth'" in str(without.exception)  # and not that it is damaged
    assert "--import FILE.py" in str(without.exception)

    native = check_resumed_and_exported(train, *code, continued=4)
    looked = CliRunner().invoke(app, ["inspect", "run", *code])  # by itself at a length that it serves
    assert looked.exit_code == 0, looked.exception
    assert "all 3 blocks" in " ".join(looked.output.split())
    with pytest.raises(ValueError, match="16"):  # all that its tables were made for
        native.generate(torch.arange(16)[None], 4)


def test_kernels_takes_the_fields_of_a_scheme(monkeypatch, tmp_path):
    words = ["kernels", "smooth", "--import", str(EXAMPLE), "--depth", "3", "--length", "12", "--json", "-"]
    done = CliRunner().invoke(app, [*words, "--no-figure", "--set", "share=0.25"])
    assert json.loads(done.stdout)["networks"][0]["config"]["scheme"]["share"] == 0.25
    refused = CliRunner().invoke(app, [*words, "--set", "shair=0.25"])
    assert "did you mean 'share'" in str(refused.exception)


@pytest.mark.parametrize("kind", ["evil", "evil.py", "./evil.py", "evil:Evil", "__import__('evil')", ["evil"], None])
def test_no_code_is_imported_that_a_file_names(tmp_path, monkeypatch, kind):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'gone off')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    data = ModelConfig(**SMALL).to_dict() | {"scheme": {"kind": kind, "import": "evil", "module": "evil.py"}}
    (tmp_path / "experiment.json").write_text(json.dumps({"name": "e", "model": data}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "skipless", **data}))
    for words in (["train", "experiment.json", "--show"], ["inspect", "."], ["export", "."]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code != 0
        assert not (tmp_path / "gone off").exists(), words
    with pytest.raises(ValueError, match="scheme kind is"):
        ModelConfig.from_dict(data)
    assert not (tmp_path / "gone off").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1/0\n", "ZeroDivisionError: division by zero, line 1 of bad.py"),
        ("def f(:\n", "SyntaxError: "),
        ("import nosuch_module\n", "No module named 'nosuch_module', line 1 of bad.py"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3, line 2 of bad.py"),
        (None, "there is no such file"),
    ],
)
def test_code_that_does_not_import_is_one_sentence(tmp_path, text, words):
    if text is not None:
        (tmp_path / "bad.py").write_text(text)
    done = CliRunner().invoke(app, ["kernels", "e-spa", "--import", str(tmp_path / "bad.py")])
    assert isinstance(done.exception, ValueError)
    assert words in str(done.exception)
    assert "bad" not in sys.modules


def test_a_file_named_as_a_module_that_is_there_is_refused(tmp_path):
    (tmp_path / "json.py").write_text("")
    with pytest.raises(ValueError, match="'json' is there already: give the file another name"):
        lazy.import_code(str(tmp_path / "json.py"))


def test_an_installed_extension_is_found_by_the_name_of_its_scheme(monkeypatch):
    entry = importlib.metadata.EntryPoint("mine", "tests.model.test_own_schemes:shaped", lazy.EXTENSIONS)
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda self: shaped(PlainShape(), "installed"))
    monkeypatch.setattr(lazy.metadata, "entry_points", lambda group: [entry] if group == lazy.EXTENSIONS else [])
    lazy.import_extensions.cache_clear()
    assert Scheme.from_dict({"kind": "installed"}).kind == "installed"
    assert Scheme.from_dict({"kind": "installed"}).describe() == "installed"

    def broken(self):
        raise KeyError("x")

    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", broken)
    lazy.import_extensions.cache_clear()
    assert Scheme.from_dict({"kind": "e-spa"}).kind == "e-spa"  # which needs none
    with pytest.raises(ValueError, match=r"the installed extension 'mine' \(tests.*\): KeyError: 'x', line"):
        Scheme.from_dict({"kind": "nosuch"})
    lazy.import_extensions.cache_clear()


def test_a_compact_shape_of_one_s_own_runs_on_vectors():
    """The fast kernels take it, and a network of it agrees with its dense oracle."""
    scheme = shaped(Leaning(0.3))()
    model = Transformer(ModelConfig(scheme=scheme, **SMALL)).double()
    bias = BiasVectors.of(Leaning(0.3), 24)
    assert bias.table is None
    q, k, v = torch.randn(3, 1, 4, 24, 16)
    reason = why_not_triton(AttentionInputs(q, k, v, bias))
    assert reason is None or "triton is not installed" in reason or "q is on cpu" in reason
    values = torch.randn(1, 4, 24, 16, dtype=torch.float64)
    attended = shaped_attention(torch.zeros_like(values), values, values, Leaning(0.3), impl="reference")
    expected = torch.from_numpy(Leaning(0.3).dense(24)) @ values
    torch.testing.assert_close(attended, expected)
    torch.testing.assert_close(model.blocks[0].layers()[0].shape.dense(24), Leaning(0.3).dense(24))


def test_a_table_for_each_head_is_refused():
    with pytest.raises(ValueError, match="one for all heads: tables by head are a ShapeByHead"):
        DenseShape(np.stack([np.eye(24)] * 4), True)

    class ByHead(TableShape):
        causal = True

        def dense(self, length):
            return np.stack([np.eye(length)] * 4)

    shape = ByHead()
    with pytest.raises(ValueError, match=r"one for all heads. Slopes by head have a compact form"):
        BiasVectors.of(shape, 4)


@pytest.mark.parametrize("causal", [True, False])
def test_a_table_of_one_s_own_attends_by_its_matrix(causal):
    shape = Halves(causal) if causal else DenseShape(np.full((24, 24), 1 / 24) + np.eye(24), causal=False)
    values = torch.randn(1, 4, 24, 16, dtype=torch.float64)
    attended = shaped_attention(torch.zeros_like(values), values, values, shape)
    torch.testing.assert_close(attended, torch.from_numpy(shape.dense(24)) @ values)


def test_a_table_of_one_s_own_decodes_as_it_reads():
    """Past the training length too: the table is asked for again."""
    model = Transformer(ModelConfig(scheme=shaped(Halves())(), **SMALL)).eval()
    tokens = torch.randint(64, (2, 20))
    written = generate(model, tokens, 30)
    with torch.no_grad():
        assert torch.equal(written[:, -1], model(written[:, :-1])[:, -1].argmax(-1))


def test_registration_refuses_what_could_not_be_saved():
    class Bare(Scheme):
        def shapes(self, depth, skip_weight=0.0, causal=True, **context):
            return [PlainShape(causal)] * depth

    frozen = dataclass(frozen=True)
    without_shapes = frozen(type("WithoutShapes", (Scheme,), {}))
    without_context = frozen(type("WithoutContext", (Scheme,), {"shapes": lambda self, depth, skip_weight, causal: []}))
    for kind, cls, words in [
        ("Mine!", Bare, "use small letters, digits and dashes"),
        ("mine", Bare, r"write @dataclass\(frozen=True\) in the line below"),
        ("mine", dict, "must be a class derived from Scheme"),
        ("e-spa", dataclass(frozen=True)(type("Other", (Bare,), {})), "'e-spa' belongs to .*ExponentialSPA"),
        (Bare, Bare, r"name is <class .*@register_scheme\('two-scales'\)"),
        ("mine", without_shapes, "WithoutShapes has no `shapes`.*def shapes"),
        ("mine", without_context, "WithoutContext.shapes: got an unexpected keyword argument 'length'.*context"),
        ("mine", dataclasses.make_dataclass("Own", [("kind", str)], bases=(Bare,), frozen=True), "field 'kind'"),
        ("mine", dataclasses.make_dataclass("Own", [("table", np.ndarray)], bases=(Bare,), frozen=True), "Own.table"),
    ]:
        with pytest.raises(ValueError, match=words):
            register_scheme(kind)(cls)
    assert "mine" not in SCHEMES
    with pytest.raises(ValueError, match=r"put @register_scheme\('…'\) above its class"):
        ModelConfig(scheme=Bare(), **SMALL)


def test_a_cell_of_a_notebook_may_run_twice():
    first, second = shaped(PlainShape()), shaped(PlainShape())
    assert SCHEMES["one-shape"] is second is not first


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (lambda depth: [PlainShape()] * 2, "gave 2 shapes for 4 blocks; it must give one for each"),
        (
            lambda depth: (PlainShape() for _ in range(depth)),
            "gave a generator for 4 blocks; it must give one for each, in a list",
        ),
        (lambda depth: [np.eye(24)] * depth, r"gave a ndarray for block 1; .* DenseShape\(matrix, causal=True\)"),
        (
            lambda depth: [PlainShape(False)] * depth,
            "block 1 a shape with causal=False, and the network has causal=True",
        ),
        (lambda depth: [Given(np.ones((24, 24)))] * depth, "block 1: the matrix looks ahead, by 1 from location 0"),
        (lambda depth: [Given(-np.eye(24))] * depth, "block 1: row 0 of the matrix runs from -1"),
        (lambda depth: [Given(np.eye(25))] * depth, r"block 1: dense\(24\) gave a ndarray shaped \(25, 25\); it must"),
        (
            lambda depth: [Given(np.eye(24).tolist())] * depth,
            r"gave a list shaped \(24, 24\); it must be a NumPy array",
        ),
    ],
)
def test_what_shapes_gives_is_checked(shapes, words):
    @register_scheme("wrong")
    @dataclass(frozen=True)
    class Wrong(Scheme):
        def shapes(self, depth, skip_weight=0.0, causal=True, **context):
            return shapes(depth)

    with pytest.raises(ValueError, match=words):
        Transformer(ModelConfig(scheme=Wrong(), **SMALL))


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ([kernels.uniform(0.5, 8), kernels.uniform(0.2, 8)], "in block 2 needs .* or end with the kernel of block 1"),
        ([np.eye(8) - 0.1 * np.eye(8, k=1) - 0.1 * np.eye(8, k=-1)], "in block 1 .* whose factor L has no entry below"),
        ([np.tril(kernels.exponential(0.5, 8))], "0 from location 0 to 1 and 0.6065 back; .* fill both its halves"),
        ([2 * kernels.exponential(0.5, 8)], r"kernel of block 1 has 2 on its diagonal; .*kernels\.cosine\(kernel\)"),
        ([np.full((8, 8), np.nan)], "nan from location 0 to 0"),
        ([np.eye(8), np.ones((8, 8))], r"kernel of block 2 is not positive definite \(smallest eigenvalue"),
        ([np.eye(8), np.eye(4)], r"block 2 is shaped \(4, 4\); it must be 8×8, as the one before it"),
        ([np.ones(8)], r"is shaped \(8,\); it must be T×T"),
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_carrying_refuses_what_is_no_kernel_and_what_no_softmax_can_do(targets, words, causal):
    with pytest.raises(ValueError, match=words):
        skipless.theory.carrying(targets, causal=causal)


def mixed(share: float, gamma: float, other: float, d: np.ndarray) -> np.ndarray:
    return share * np.exp(-gamma * d) + (1.0 - share) * np.exp(-other * d)


@pytest.mark.parametrize(
    ("kernel", "possible"),
    [
        (lambda rate, d: mixed(0.5, rate, rate / 4, d), True),
        (lambda rate, d: mixed(0.5, rate, rate / 20, d), False),
        (lambda rate, d: mixed(0.5, 2.0, rate, d), False),
        (lambda rate, d: mixed(rate / 6, 2.0, 0.05, d), False),
        (lambda rate, d: (1.0 + d) ** -rate, True),
        (lambda rate, d: (1.0 + rate * d) * np.exp(-rate * d), False),
    ],
    ids=["mixture", "decays far apart", "one decay stays", "share falls", "power", "matern"],
)
def test_small_steps_through_other_families(kernel, possible):
    """36 blocks of what docs/derivations.md says can be carried and cannot; from I all can, in one step."""
    d = np.abs(np.subtract.outer(np.arange(64), np.arange(64))).astype(float)
    rates = np.geomspace(5.7, 0.005 if possible else 0.05, 36)
    skipless.theory.carrying([kernel(rates[-1], d)])
    if possible:
        total = np.linalg.multi_dot(
            [shape.dense(64) for shape in skipless.theory.carrying(kernel(r, d) for r in rates)][::-1]
        )
        np.testing.assert_allclose(total @ total.T, kernel(rates[-1], d), atol=1e-10)
    else:
        with pytest.raises(ValueError, match="a softmax gives none below 0"):
            skipless.theory.carrying(kernel(rate, d) for rate in rates)


def test_a_scheme_may_compute_in_torch(tmp_path):
    """Also where a model is built without memory, as transformers loads an export."""

    @register_scheme("in-torch")
    @dataclass(frozen=True)
    class InTorch(Scheme):
        preserves_signal = True

        def shapes(self, depth, skip_weight=0.0, causal=True, *, length, **context):
            return [DenseShape(torch.eye(length, dtype=torch.float64).numpy(), causal)] * depth

    model = Transformer(ModelConfig(scheme=InTorch(), **SMALL))
    skipless.hf.SkiplessForCausalLM.from_native(model).save_pretrained(tmp_path)
    again = skipless.hf.SkiplessForCausalLM.from_pretrained(tmp_path)
    tokens = torch.randint(64, (1, 24))
    assert torch.equal(again(tokens).logits, model(tokens))


def test_a_folder_is_no_module_of_ones_own(tmp_path, monkeypatch):
    """Python imports one as a namespace without running anything: whoever names it would wait for their scheme."""
    (tmp_path / "schemes_of_mine").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"schemes_of_mine is a folder without __init__\.py.* name a file in it"):
        lazy.import_code("schemes_of_mine")

"""The site builds without a warning, and a dead link is one. Skipped without Sphinx (./dev docs installs it)."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
for package in ("sphinx", "myst_parser", "furo"):
    pytest.importorskip(package, reason=f"the site needs {package}: pip install 'skipless[docs]'")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    options = ["--fail-on-warning", "--quiet", "-b", "html", "-c", "docs", "-d", str(folder / "doctrees")]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, ".", str(folder / "site")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.mark.slow
def test_every_page_is_there(site: Path) -> None:
    for page in [*REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("results/**/*.md"), REPOSITORY / "README.md"]:
        assert (site / page.relative_to(REPOSITORY)).with_suffix(".html").exists()


@pytest.mark.slow
def test_the_reference_has_every_public_name(site: Path) -> None:
    import skipless

    page = (site / "docs" / "reference.html").read_text()
    for name in skipless.__all__:
        found = getattr(skipless, name)
        if hasattr(found, "__qualname__"):
            assert f'id="{found.__module__}.{found.__qualname__}"' in page


@pytest.mark.slow
def test_functions_in_the_list_of_equations_lead_to_the_reference(site: Path) -> None:
    page = (site / "docs" / "equations.html").read_text()
    for line in (REPOSITORY / "docs" / "equations.md").read_text().splitlines():
        if line.startswith("| ") and "| paper |" not in line:
            name = line.split("|")[3].strip(" `")
            assert f'href="reference.html#skipless.{name}"' in page, name


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("W_V and A_nn", "W[V] and A[nn]"),
        ("Σ_{l−1} = L_{l−1} L_{l−1}ᵀ", "Σ[l−1] = L[l−1] L[l−1]ᵀ"),
        ("D̄_(n−1)(x) W_down", "D̄[n−1](x) W[down]"),
        ("e^(−γ(|i−j| + 1)), a_L^(l/L), diag(Σ)^−½, 2^28", "e{−γ(|i−j| + 1)}, a[L]{l/L}, diag(Σ){−½}, 2{28}"),
        ("e^(−γ_l·distance)", "e{−γ[l]·distance}"),
        *((code, code) for code in ("repeat_rate", "q_map", "__init__", "x.T_q", "log_columns", "a _ b", "k_steps")),
    ],
)
def test_formulas_have_indices_and_exponents_and_names_of_code_have_none(text: str, shown: str) -> None:
    from docutils import nodes

    def spelled(node: nodes.Node) -> str:
        inner = "".join(map(spelled, node.children))
        brackets = {nodes.subscript: "[]", nodes.superscript: "{}"}.get(type(node))
        return node.astext() if brackets is None else f"{brackets[0]}{inner}{brackets[1]}"

    formula = runpy.run_path(str(REPOSITORY / "docs" / "conf.py"))["formula"]
    assert "".join(map(spelled, formula(text))) == shown


def test_dead_links_are_found(tmp_path: Path) -> None:
    dead_links = runpy.run_path(str(REPOSITORY / "docs" / "conf.py"))["dead_links"]
    (tmp_path / "a.html").write_text('<a href="b.html#here">1</a><a href="b.html#gone">2</a><a href="c.html">3</a>')
    (tmp_path / "b.html").write_text('<p id="here"></p><img src="x.png"><a href="https://example.org/gone">4</a>')
    assert dead_links(tmp_path) == ["a.html: b.html#gone", "a.html: c.html", "b.html: x.png"]

"""`skipless kernels` from the outside: names, flags, files, exit codes."""

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from skipless.console import check_target, print_table, write_output
from skipless.inspection import studies
from skipless.inspection.studies import InputSignal
from skipless.model.kernel_maps import certificate
from skipless.model.presets import preset
from skipless.theory.schemes import ExponentialSPA

SMALL = ("--depth", "6", "--length", "20")


@pytest.fixture
def kernels(skipless) -> Callable[..., str]:
    """The command: what it printed, or complained of."""
    return lambda *words, code=0: skipless("kernels", *words, code=code)[code == 2]


def written() -> set[str]:
    return {str(path) for path in Path().rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["standard", "alibi", "v-skipinit", "u-spa", "e-spa", "fig1", "fig7"])
def test_schemes_and_figures(kernels, name: str) -> None:
    kernels(name, *SMALL)
    assert written() == {f"skipless-kernels/{name}.png"}


def test_fig5(kernels) -> None:
    out = kernels("fig5", "--length", "20", "--json", "five.json")
    assert written() == {"skipless-kernels/fig5.png", "five.json"}
    assert out.splitlines()[-1].startswith("At r = 0.05, 20 locations hold")
    inputs = json.loads(Path("five.json").read_text())["inputs"]
    assert [each["repeat_rate"] for each in inputs] == list(studies.TOKEN_RATES)
    np.testing.assert_array_equal(inputs[2]["kernel"], InputSignal(0.02, 20).kernel())


def test_fig6_golden_values(kernels) -> None:
    out = kernels("fig6", "--input", "average", "--json", "six.json")
    plain, corrected = json.loads(Path("six.json").read_text())["networks"]
    assert plain["diagonals"][36][50] == pytest.approx(3.19, abs=0.005)
    assert plain["diagonals"][36][99] == pytest.approx(4.78, abs=0.005)
    np.testing.assert_allclose(corrected["diagonals"], 1.0, atol=1e-12)
    assert out.splitlines()[-1].endswith("with it at 1.00 ± 0.00.")


def test_the_default_is_fig7_with_the_papers_verdicts(kernels) -> None:
    out = kernels("--json", "seven.json")
    assert written() == {"skipless-kernels/fig7.png", "seven.json"}
    verdicts = {
        network["label"]: network["certificate"]["verdict"]["kind"]
        for network in json.loads(Path("seven.json").read_text())["networks"]
    }
    assert verdicts == {
        "Standard": "collapse",
        "U-SPA": "preserved",
        "E-SPA": "preserved",
        "Skipless + LN": "collapse",
        "Pre-LN": "preserved",
        "Pre-LN, α = 0.98": "preserved",
        "Post-LN": "collapse",
    }
    assert out.splitlines()[-1].startswith("The signal dies in 3 of 7 networks: Standard (collapse at block ")
    assert "\x1b" not in out


def test_json_of_a_preset_is_theory(kernels) -> None:
    kernels("wikitext103/e-spa", *SMALL, "--json", "data/deep/preset.json", "--no-figure", "--blocks", "0,6")
    assert written() == {"data/deep/preset.json"}
    data = json.loads(Path("data/deep/preset.json").read_text())
    network, signal = data["networks"][0], InputSignal(**data["input"])
    config = preset("wikitext103/e-spa", depth=6, length=20)
    assert signal == InputSignal(0.008, 20, "sample", 0)
    assert network["config"] == json.loads(config.to_json())
    expected = certificate(config, signal.kernel()).as_dict()
    assert network["certificate"] == json.loads(json.dumps(expected))
    assert list(network["cosines"]) == ["0", "6"]
    np.testing.assert_array_equal(network["cosines"]["0"], signal.kernel())


def test_json_on_standard_output_is_only_json(kernels) -> None:
    data = json.loads(kernels("u-spa", *SMALL, "--json", "-", "--no-figure"))
    assert data["networks"][0]["label"] == "U-SPA"
    assert written() == set()


def test_flags_reach_the_network(kernels) -> None:
    words = ("--gamma-final", "0.9", "--repeat-rate", "0.05", "--skip", "0.6", "--mlp-skip", "1,0.5")
    more = ("--norm", "pre", "--activation", "gelu", "--calibration", "exact", "--json", "-", "--no-figure")
    config = json.loads(kernels("e-spa", *SMALL, *words, *more))["networks"][0]["config"]
    scheme = {"kind": "e-spa", "gamma_final": 0.9, "repeat_rate": 0.05, "calibration": "exact"}
    assert config["scheme"] == scheme
    assert (config["attention_skip"]["shortcut"], config["attention_skip"]["residual"]) == (0.6, 0.8)
    assert (config["mlp_skip"]["shortcut"], config["mlp_skip"]["residual"]) == (1.0, 0.5)
    assert (config["norm"], config["activation"]["base"], config["depth"], config["length"]) == ("pre", "gelu", 6, 20)
    assert config["hidden"] > 0


@pytest.mark.parametrize(("short", "name"), [("mirrored", "mirrored/e-spa"), ("pre-ln", "wikitext103/pre-ln")])
def test_short_names_of_presets_are_those_of_train(kernels, short, name) -> None:
    found, meant = (json.loads(kernels(each, *SMALL, "--json", "-", "--no-figure")) for each in (short, name))
    assert found["networks"] == meant["networks"]


@pytest.mark.parametrize("name", ["e-spa", "wikitext103/e-spa"])
def test_mirrored_mlps_change_nothing_that_attention_does(kernels, name) -> None:
    words = (*SMALL, "--repeat-rate", "0.02", "--json", "-", "--no-figure")
    mirrored, alone = (json.loads(kernels(name, *words, *more)) for more in (("--mirrored",), ("--activation", "none")))
    (ours,), (theirs,) = mirrored["networks"], alone["networks"]
    assert (ours["config"]["mlp_init"], ours["config"]["activation"]["base"]) == ("mirrored", "gelu")
    assert ours["config"]["hidden"] > 0 == theirs["config"]["hidden"]
    assert ours["certificate"] == theirs["certificate"]


def test_a_presets_mlps_can_be_left_out(kernels) -> None:
    words = ("--activation", "none", "--json", "-", "--no-figure")
    assert json.loads(kernels("c4/pre-ln", *SMALL, *words))["networks"][0]["config"]["hidden"] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("u-spa", "--gamma-final", "0.1"), "U-SPA takes --rho-final"),
        (("e-spa", "--rho-final", "0.1"), "E-SPA takes --gamma-final"),
        (("standard", "--calibration", "exact"), "--calibration belongs to E-SPA and U-SPA"),
        (("fig7", "--skip", "0.9"), "--skip does not apply to fig7, which takes --depth"),
        (("fig5", "--depth", "9"), "which takes --length, --seed"),
        (("standard", "--mlp-skip", "0.9"), "add --activation"),
        (("e-spa", "--calibration", "mlp-aware"), "needs MLPs"),
        (("e-spa", "--mirrored", "--activation", "none"), "--mirrored is about MLPs"),
        (("e-spa", "--mirrored", "--activation", "tanh"), "φ(x) − φ(−x) must be a multiple of x"),
        (("fig7", "--mirrored"), "--mirrored does not apply to fig7"),
        (("e-spa", "--skip", "1,1"), "give one weight"),
        (("standard", "--skip", "1.5"), "in [0, 1)"),
        (("standard", "--skip", "big"), "in [0, 1)"),
        (("e-spa", "--skip", "0.98", "--depth", "36"), "gamma_final ≥ 0.133"),
        (("standard", "--blocks", "1,101"), "blocks 1 to 100"),
        (("standard", "--blocks", "one"), "whole numbers"),
        (("e-spa", "--seed", "1", "--input", "average"), "leave one of them out"),
        (("e-spa", "--repeat-rate", "1.5"), "0.008 for 32k SentencePiece"),
        (("standard", "--depth", "0"), "at least 1"),
        (("standard", "--activation", "swish"), "there are gelu"),
        (("standard", "--figure", "x.jpg"), ".png, .pdf, .svg"),
        (("standard", "--figure", "x.png", "--no-figure"), "contradict"),
        (("standard", "--figure", ".png/"), "must end in"),
        (("espa",), "did you mean e-spa"),
        (("miror",), "did you mean mirrored?"),
        (("nonsense",), "schemes: standard, alibi"),
        (("wikitext103/espa",), "wikitext103/e-spa"),
    ],
)
def test_what_a_user_can_put_right_is_one_line(kernels, words: tuple[str, ...], said: str) -> None:
    error = kernels(*words, code=2)
    assert said in error
    assert len(error.splitlines()) == 1
    assert written() == set()


@pytest.mark.parametrize("option", ["--figure", "--json"])
def test_an_unwritable_place_is_refused_before_the_work(kernels, option: str) -> None:
    Path("file").touch()
    Path("folder.png").mkdir()
    assert "file" in kernels("standard", option, "file/x.png", code=2)
    assert "is a folder" in kernels("standard", option, "folder.png", code=2)


def test_a_second_run_replaces_the_firsts_output(kernels) -> None:
    kernels("e-spa", *SMALL, "--json", "e.json")
    first = Path("skipless-kernels/e-spa.png").read_bytes(), Path("e.json").read_bytes()
    kernels("e-spa", *SMALL, "--json", "e.json")
    assert (Path("skipless-kernels/e-spa.png").read_bytes(), Path("e.json").read_bytes()) == first
    assert written() == {"skipless-kernels/e-spa.png", "e.json"}


def test_check_turns_a_lost_signal_into_an_exit_code(kernels) -> None:
    collapsing = ("standard", "--depth", "30", "--length", "20", "--no-figure")
    assert "collapse" in kernels(*collapsing)
    assert "collapse" in kernels(*collapsing, "--check", code=1)
    kernels("u-spa", *SMALL, "--no-figure", "--check")


@pytest.mark.parametrize("suffix", ["pdf", "svg", "PNG"])
def test_the_suffix_chooses_the_format(kernels, suffix: str) -> None:
    kernels("e-spa", *SMALL, "--figure", f"new/picture.{suffix}")
    assert written() == {f"new/picture.{suffix}"}


def test_without_matplotlib_the_table_is_printed(skipless, monkeypatch) -> None:
    for module in [name for name in sys.modules if name.startswith(("skipless.cli.kernels", "skipless.figures"))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    out, err = skipless("kernels", "e-spa", *SMALL)
    assert "pip install 'skipless[plot]'" in err
    assert "mean cosine" in out


@pytest.mark.parametrize("command", [("kernels", "e-spa", *SMALL), ("inspect", "wikitext103/e-spa", "--width", "32")])
def test_a_figure_asked_for_without_matplotlib_is_refused_before_the_work(command, monkeypatch, skipless):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out, err = skipless(*command, "--figure", "x.png", code=2)
    assert "--figure x.png needs matplotlib: pip install 'skipless[plot]'" in " ".join(err.split())
    assert out == ""


def test_list_names_everything(kernels) -> None:
    listed = kernels("--list").split()
    assert {"fig1", "fig7", "alibi", "wikitext103/e-spa", "depth/e-spa-108"} <= set(listed)


def test_same_seed_same_sequence(kernels) -> None:
    words = ("fig1", *SMALL, "--no-figure")
    assert kernels(*words) == kernels(*words, "--seed", "0") != kernels(*words, "--seed", "1")


def test_tables_are_coloured_only_in_a_terminal(monkeypatch) -> None:
    table = (
        ["network", "rank", "verdict"],
        [["a", "1.0", "collapse"], ["b [x]", "12.5", "preserved"]],
        ["red", "green"],
    )
    monkeypatch.delenv("NO_COLOR", raising=False)

    def shown(**settings) -> str:
        page = io.StringIO()
        print_table(Console(width=60, file=page, **settings), *table)
        return page.getvalue()

    assert "\x1b[31mcollapse" in shown(force_terminal=True, color_system="standard")
    assert "\x1b[31m" not in shown(force_terminal=True, color_system="standard", no_color=True)
    assert "b [x]" in shown(force_terminal=True)
    assert shown(force_terminal=False).splitlines()[2] == "b [x]    12.5  preserved"


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch) -> None:
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match=r"x\.json"):
        write_output(tmp_path / "x.json", b"data")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("length", ["0", "1", "-3"])
def test_fig5_needs_a_pair_of_locations(kernels, length: str) -> None:
    assert f"--length is {length}; fig5 counts equal pairs" in kernels("fig5", "--length", length, code=2)


def test_figure_and_data_in_one_file_are_refused(kernels) -> None:
    words = kernels("e-spa", *SMALL, "--json", "x.png", "--figure", "./x.png", code=2)
    assert "--figure is x.png, which --json writes too; name another file" in words
    Path("link.json").symlink_to("skipless-kernels/e-spa.png")
    assert "which --json writes too" in kernels("e-spa", *SMALL, "--json", "link.json", code=2)
    assert written() == set()


def test_a_symlink_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link.json").symlink_to(Path("there") / "data.json")
    for data in (b"first", b"second"):  # the target is made, then replaced
        write_output(tmp_path / "link.json", data)
        assert (tmp_path / "link.json").is_symlink()
        assert (tmp_path / "there" / "data.json").read_bytes() == data
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["data.json", "link.json", "there"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_gets_the_data_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        check_target(pipe, b"mark")
        write_output(pipe, b"data")
        assert pipe.is_fifo()
        assert os.read(reader, 100) == b"data"
    finally:
        os.close(reader)


def test_help_imports_nothing_heavy() -> None:
    code = "import sys\nfrom skipless.cli import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n" + (
        "heavy = {'torch', 'scipy.special', 'scipy.linalg', 'scipy.optimize', 'transformers', 'matplotlib'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, "kernels", "--help"], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    for option in ("--gamma-final", "--json", "--check", "--blocks"):
        assert option in done.stdout


def test_it_needs_no_torch() -> None:
    code = "import sys\nfrom skipless.cli import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n" + (
        "print('torch' in sys.modules)"
    )
    words = ["kernels", "wikitext103/e-spa", "--depth", "9", "--length", "12", "--no-figure"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert "The signal survives all 9 blocks" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


def test_defaults_of_the_paper() -> None:
    assert InputSignal(0.02, 100, "sample", 0) == studies.SIGNAL
    assert ExponentialSPA().gamma_final == studies.GAMMA_FINAL

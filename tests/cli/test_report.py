"""`skipless report` from the outside: what it takes, what it writes, what it says when it cannot."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from skipless.cli.report import read_results
from skipless.inspection.inspection import Inspection
from skipless.theory import kernels


@pytest.fixture
def said(skipless) -> Callable[..., str]:
    """A command: what it printed, or complained of."""
    return lambda *words, code=0: skipless(*words, code=code)[code == 2]


def states(depth: int = 3, length: int = 8) -> np.ndarray:
    return np.stack([kernels.exponential(rate, length) for rate in np.linspace(3.0, 0.5, depth + 1)])


def make_run(folder: Path, *, norm: str = "none", scale: float = 1.0) -> Path:
    (folder / "probes").mkdir(parents=True)
    (folder / "experiment.json").write_text(json.dumps({"name": "tiny", "model": {"norm": norm}}))
    lines = [{"step": step, "loss": 5.0, "ema": 5.5} for step in (1, 2)] + [{"step": 2, "valid_loss": 4.5}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in (0, 2):
        np.savez_compressed(folder / "probes" / f"step-{step:08d}.npz", step=step, states=scale * states())
    return folder


def page_data(path: Path = Path("report.html")) -> dict:
    text = path.read_text(encoding="utf-8")
    return json.loads(text.split('id="data">')[1].split("</script>")[0])


def test_an_input_is_not_overwritten(said) -> None:
    text = Inspection.of_states("measured", states()).to_json()
    Path("data.json").write_text(text)
    words = said("report", "data.json", "--out", "../" + Path.cwd().name + "/data.json", code=2)
    assert "data.json, which is read too; name another file" in words
    assert Path("data.json").read_text() == text


def test_runs_inspections_and_certificates_on_one_page(said) -> None:
    make_run(Path("one"))
    Path("inspection.json").write_text(Inspection.of_states("measured", states()).to_json())
    said("kernels", "fig1", "--depth", "6", "--length", "20", "--no-figure", "--json", "fig1.json")
    words = said("report", "one", "inspection.json", "fig1.json", "--out", "sub/page.html", "--title", "All of it")
    assert "6 networks, 1 run)" in words
    data = page_data(Path("sub/page.html"))
    names = [network["name"] for network in data["networks"]]
    assert names == ["tiny, step 0", "tiny, step 2", "measured", "Standard", "U-SPA", "E-SPA"]
    assert [curve["name"] for curve in data["curves"]] == ["tiny"]
    assert all(network["kernels"] for network in data["networks"])
    assert [path.name for path in Path("sub").iterdir()] == ["page.html"]  # nothing is left beside it


def test_runs_of_one_recipe_have_their_folders_names(said) -> None:
    Path("more").mkdir()
    said("report", *(str(make_run(Path(folder))) for folder in ("a", "b", "more/b")))
    data = page_data()
    assert [curve["name"] for curve in data["curves"]] == ["tiny (a)", "tiny (b)", "tiny (b) (2)"]
    assert len({network["name"] for network in data["networks"]}) == 6


def test_what_the_demo_writes_is_no_file_of_certificates(said) -> None:
    Path("demo.json").write_text('{"skipless": "0.1.0", "counting": {}, "networks": []}')
    words = said("report", "demo.json", code=2)
    assert "holds neither an inspection nor certificates of networks" in words


def test_norms_of_a_normalised_stream_are_not_judged(said) -> None:
    said("report", str(make_run(Path("plain"), scale=100.0)))
    assert "norms drift" in Path("report.html").read_text()
    said("report", str(make_run(Path("normed"), norm="pre", scale=100.0)))
    assert "norms drift" not in Path("report.html").read_text()


def test_a_list_of_inspections(said) -> None:
    several = [Inspection.of_states(name, states()).as_dict() for name in ("a", "b")]
    Path("several.json").write_text(json.dumps(several))
    assert "2 networks" in said("report", "several.json")


def test_what_cannot_be_shown_is_named(said) -> None:
    Path("empty").mkdir()
    Path("words.json").write_text("not json")
    Path("other.json").write_text('{"inputs": []}')
    Path("half.json").write_text('{"model": "x", "blocks": [{}], "verdict": {}}')
    run = make_run(Path("run"))
    (run / "probes" / "step-00000000.npz").write_bytes(b"half a file")
    cases = {
        "missing": "does not exist; give a run's folder",
        "empty": "without metrics.jsonl",
        "words.json": "words.json cannot be shown (not JSON: ",
        "other.json": "neither an inspection nor certificates",
        "half.json": "half.json cannot be shown (the inspection is damaged",
        "run": "not a probe of a run, or damaged",
    }
    for path, words in cases.items():
        assert words in said("report", path, code=2)
    assert "is a folder" in said("report", "run", "--out", "empty", code=2)
    assert not Path("report.html").exists()


def test_curves_of_arms_with_several_seeds_name_theirs() -> None:
    """Their number stands beside a table's mean over all of them."""
    results = Path(__file__).parents[2] / "results"
    curves, _, _ = read_results([results / "depth-steady-small.json"], most=99)
    assert "depth-steady, small: e-spa-108/slow-mlp, seed 0" in curves
    curves, _, _ = read_results([results / "optimisers-small.json"], most=99)
    assert {name for name in curves if "e-spa/muon ×3" in name} == {"optimisers, small: e-spa/muon ×3"}


def test_of_too_many_curves_the_usual_length_is_kept_or_none():
    item = Path(__file__).parents[2] / "results" / "optimisers-small.json"
    every, tables, words = read_results([item], most=99)
    usual = {name for name in every if "×" not in name}
    assert words == ""
    assert tables[0].head == ("", "adam", "muon", "soap", "muon-vo", "muon-gain")
    steps = next(table for table in tables if table.title.endswith("steps to a loss"))
    assert "paper" not in steps.head  # which has no number of it
    assert all(len(row) == len(steps.head) for row in steps.rows)
    kept, _, words = read_results([item], most=len(usual))
    assert set(kept) == usual
    assert f"of {len(every)} curves the {len(usual)} of the usual length" in words
    none, same, words = read_results([item], most=3)
    assert none == {}
    assert len(same) == len(tables)
    assert f"tables without their {len(every)} curves" in words


def test_items_named_one_by_one_share_the_room_of_a_chart(said) -> None:
    items = sorted((Path(__file__).parents[2] / "results").glob("*-small.json"))
    words = said("report", *items)
    assert re.search(r"tables without their \d+ curves, too many for a chart", words)
    assert page_data()["curves"] == []
    results = items[0].parent
    said("report", results, items[0])
    assert Path("report.html").read_text().count("<summary>baselines (Fig. 2), scale small: claims") == 1
    both = [item for item in items if item.name in ("baselines-small.json", "skips-small.json")]
    curves, _, words = read_results(both, most=24)
    assert words == ""
    assert len({json.dumps(records) for records in curves.values()}) == len(curves)  # runs that items share

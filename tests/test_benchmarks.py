"""The benchmarks run: on a CPU they measure nothing of interest, but must not be found broken on a GPU."""

import json
import sys
from pathlib import Path

import pytest
from tests.processes import Program

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
SCRIPTS = ("step", "growth", "decode_fold", "inference", "newton_schulz")


RUN = """
import runpy, sys
del sys.argv[0]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
HELP = """
import runpy, sys
folder, *names = sys.argv[1:]
sys.path.insert(0, folder)
for name in names:
    sys.argv = [name, "--help"]
    try:
        runpy.run_path(f"{folder}/{name}.py", run_name="__main__")
    except SystemExit as end:
        assert end.code == 0, name
"""


def started(name: str, *arguments: object) -> Program:
    return Program(RUN, FOLDER / f"{name}.py", *arguments)


def run(name: str, *arguments: object) -> str:
    return started(name, *arguments).finished()


def test_help():
    _, *pages = Program(HELP, FOLDER, *SCRIPTS).finished().split("usage: ")
    assert len(pages) == len(SCRIPTS)
    assert all("--device" in page for page in pages)


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_of_every_kind_of_arm(tmp_path):
    pytest.importorskip("transformers")
    out = tmp_path / "results" / "step.jsonl"
    arms = ("e-spa", "pre-ln", "llama")
    text = run("step", "--device", "cpu", "--shapes", "tiny", "--steps", 1, "--out", out, "--arms", *arms)
    assert [row.get("arm") for row in rows(out)] == [None, *arms]
    assert all(row["ms"] > 0 for row in rows(out)[1:])
    assert text.splitlines()[-4].split()[:4] == ["shape", "arm", "mode", "ms"]
    assert text.splitlines()[-2].split()[6] == "1.000"  # Pre-LN over itself


def test_a_spent_budget_ends_with_what_there_is(tmp_path):
    out = tmp_path / "step.jsonl"
    text = run("step", "--device", "cpu", "--shapes", "tiny", "--budget-seconds", -1, "--out", out)
    assert "the budget is spent; tiny/e-spa" in text
    assert len(rows(out)) == 1


def test_growth_fits_lines_and_draws_them(tmp_path):
    pytest.importorskip("matplotlib")
    sizes = ("--depths", 6, 7, 8, "--lengths", 16, 32, "--width", 32, "--tokens", 32, "--steps", 1, "--arms", "e-spa")
    out, picture = tmp_path / "growth.jsonl", tmp_path / "growth.png"
    text = run("growth", "--device", "cpu", *sizes, "--out", out, "--plot", picture)
    assert [(row["grows"], row["to"]) for row in rows(out)[1:]] == [
        ("depth", 6), ("depth", 7), ("depth", 8), ("length", 16), ("length", 32),
    ]  # fmt: skip
    assert "off by at most" in text
    assert picture.stat().st_size > 1000


def test_decoding_compares_logits_before_it_prints_a_speed(tmp_path):
    sizes = (
        "--width",
        32,
        "--depth",
        6,
        "--heads",
        2,
        "--vocab",
        64,
        "--past",
        4,
        "--rounds",
        2,
        "--steps",
        2,
        "--device",
        "cpu",
    )
    out = tmp_path / "decode.jsonl"
    lines = run("decode_fold", *sizes, "--dtype", "bfloat16", "--out", out).splitlines()
    assert lines[0].startswith("max |Δlogits| of folding in float64")
    assert lines[1].startswith("max |Δlogits| to float32")
    assert [line.split()[0] for line in lines[-3:]] == ["unfolded", "folded", "pre-ln"]
    assert set(rows(out)[0]["ms"]) == {"unfolded", "folded", "pre-ln"}


def test_decoding_at_several_batch_sizes_beside_losses(tmp_path):
    out = tmp_path / "inference.jsonl"
    sizes = ("--depth", 2, "--past", 4, "--batch", 1, 3, "--rounds", 1, "--steps", 1, "--device", "cpu")
    lines = run("inference", *sizes, "--results", FOLDER.parent / "results", "--out", out).splitlines()
    found = rows(out)
    assert len(lines) == 1 + len(found)
    assert [row["batch"] for row in found] == [1, 1, 1, 3, 3, 3]
    assert {row["arm"]: row["train_loss"] for row in found}["mirrored-readers/muon"] == 3.52663
    assert all(row["tokens_per_second"] == pytest.approx(1e3 * row["batch"] / row["ms"]) for row in found)


def test_newton_schulz_is_checked_before_it_is_timed(tmp_path):
    out = tmp_path / "newton-schulz.jsonl"
    run("newton_schulz", "--device", "cpu", "--sizes", "2x64x256", "1x32x32", "--out", out)
    _, *found = rows(out)
    assert [row["way"] for row in found] == ["direct", "gram", "direct, whole", "gram, whole"] * 2
    assert [row["of_direct_error"] < 1.0 for row in found] == [False, True, False, True] + [False] * 4


def test_the_hosts_time_is_that_of_four_operators(tmp_path):
    pytest.importorskip("triton")
    out = tmp_path / "host.jsonl"
    run("host", "--calls", 1, "--out", out)
    _, *found, total = rows(out)
    assert [row["operator"] for row in found] == [
        "attention", "attention, backward", "activation", "activation, backward",
    ]  # fmt: skip
    assert total["block_microseconds"] == pytest.approx(sum(row["microseconds"] for row in found))


def test_a_profile_names_operators_and_their_sum():
    lines = run("step", "--device", "cpu", "--shapes", "tiny", "--arms", "e-spa", "--profile").splitlines()
    shares = [float(line.split("%")[0]) for line in lines if "%" in line]
    assert lines[-1].endswith("in all")
    assert shares[-1] == 100.0
    assert shares[:-1] == sorted(shares[:-1], reverse=True)


def test_idle_time_is_what_no_kernel_covers(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    from kernel_times import idle

    # 2 between the first two, none inside the long one, 1 before the last
    assert idle([("c", 20, 21), ("a", 0, 3), ("b", 5, 19), ("d", 6, 7)]) == 3.0


def finished_run(folder: Path, loss: float) -> None:
    """What a run and its evaluations leave, by hand."""
    from skipless.model.presets import preset
    from skipless.training.config import Experiment, TrainConfig

    folder.mkdir(parents=True)
    experiment = Experiment("x", model=preset("wikitext103/e-spa"), train=TrainConfig(batch_size=4, length=8))
    (folder / "experiment.json").write_text(experiment.to_json())
    logged = [
        {"step": 1, "loss": 9.0, "ema": 9.0},
        {"step": 2, "valid_loss": 5.0},
        {"step": 2, "loss": 5.0, "ema": 6.0},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in logged))
    (folder / "finished.json").write_text(json.dumps({"steps": 2_000_000, "train_loss": loss}))
    text = {"loss": 3.0, "perplexity": 20.09, "bits_per_byte": 1.25}
    (folder / "news.json").write_text(json.dumps({"texts": {"some/news.xz": text}, "tasks": {}}))
    task = {"questions": 1234, "chance": 0.25, "accuracy": 0.5, "accuracy_stderr": 0.0123}
    scores = {"piqa": {**task, "normalised": 0.4, "normalised_stderr": 0.01}, "boolq": {**task, "normalised": None}}
    (folder / "tasks.json").write_text(json.dumps({"texts": {}, "tasks": scores}))


def test_runs_are_compared_with_their_evaluations(tmp_path):
    pytest.importorskip("matplotlib")
    finished_run(tmp_path / "a", 4.0)
    finished_run(tmp_path / "b", 4.5)
    page = run("compare_runs", tmp_path)
    assert "| a | 486M | 2,000,000 | 64M | 4.000 | 3.000 (20.1), 1.250 |" in page
    assert "| piqa | 1,234 | 25.0 | 50.0 ± 1.2 / 40.0 ± 1.0 | 50.0 ± 1.2 / 40.0 ± 1.0 |" in page
    assert "| boolq | 1,234 | 25.0 | 50.0 ± 1.2 | 50.0 ± 1.2 |" in page
    assert (tmp_path / "README.md").read_text().strip() == page.strip()
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_every_run_is_drawn_and_what_was_not_measured_is_a_dash(tmp_path):
    pytest.importorskip("matplotlib")
    sys.path.insert(0, str(FOLDER))
    try:
        import compare_runs
    finally:
        sys.path.remove(str(FOLDER))
    for name in "abcdefg":
        finished_run(tmp_path / name, 4.0)
    (tmp_path / "a" / "metrics.jsonl").write_text('{"step": 1, "loss": 9.0, "ema": 9.0}\n')  # no validation
    text = {"loss": 3.0, "perplexity": 20.09, "bits_per_byte": None}
    (tmp_path / "a" / "news.json").write_text(json.dumps({"texts": {"some/news.xz": text}, "tasks": {}}))
    runs = [compare_runs.read(each) for each in sorted(tmp_path.iterdir())]
    assert "| 3.000 (20.1), – |" in compare_runs.page(runs)
    (axes,) = compare_runs.picture(runs).axes
    assert len(axes.get_legend().get_texts()) == 7


def test_a_run_that_has_not_ended_is_not_compared(tmp_path):
    finished_run(tmp_path / "a", 4.0)
    (tmp_path / "a" / "finished.json").unlink()
    comparison = started("compare_runs", tmp_path)
    assert comparison.wait(300) == 2
    assert "no finished.json; let the run end first" in comparison.outputs()[1]
    assert not (tmp_path / "README.md").exists()

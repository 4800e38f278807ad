"""`skipless reproduce` from the outside, at the smallest size: it runs what is missing, and no more."""

import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from skipless.cli import reproduce as reproduce_command
from skipless.cli.reproduce import ReproduceArguments, run
from skipless.data.prepare import Preparation, prepare
from skipless.data.tokenizer import Bytes
from skipless.paper import workers
from skipless.paper.experiments import SCALES, Setting
from skipless.paper.measures import unpack
from skipless.paper.records import ResultsFolder, Text, record_of
from skipless.paper.runs import Limits, missing
from skipless.paper.tables import TABLES
from skipless.paper.workers import RunRequest, Scheduler, run_one
from skipless.training.divergence import Diverged

pytestmark = pytest.mark.usefixtures("one_thread")
ARMS = ["e-spa", "pre-ln", "u-spa", "v-skipinit", "skipless-ln"]
QUESTIONS = {
    "boolq": {"passage": "Tea is hot.", "question": "is tea hot", "answer": True},
    "hellaswag": {"activity_label": "a", "ctx_a": "A man", "ctx_b": "he", "endings": ["x", "y"], "label": "1"},
    "winogrande": {"sentence": "Ann beat Bo so _ won. ", "option1": "Ann", "option2": "Bo", "answer": "1"},
    "piqa": {"goal": "open it", "sol1": "pull", "sol2": "push ", "label": 1},
    "social_i_qa": {"context": "a", "question": "?", "answerA": "a", "answerB": "b", "answerC": "c", "label": "3"},
}


class Unpicklable(Exception):
    def __init__(self, words):
        super().__init__(words)
        self.traced = sys


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Bytes of some of this project's sources."""
    home = tmp_path_factory.mktemp("text")
    sources = Path(__file__).parents[2] / "src" / "skipless" / "theory"
    (home / "text.txt").write_text("\n\n\n".join(path.read_text() for path in sorted(sources.glob("*.py"))))
    prepare(Preparation(str(home / "text.txt"), tokenizer=Bytes(), valid_fraction=0.2), home / "tokens", workers=1)
    return home / "tokens"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    for name, question in QUESTIONS.items():
        (folder / f"{name}.validation.jsonl").write_text(json.dumps(question) + "\n")
    return folder


@pytest.fixture
def reproduce(skipless, data: Path) -> Callable[..., tuple[str, str]]:
    """The command, on a CPU and, unless data=False, on a small text."""
    text = data

    def run(*words: str, code: int = 0, data: bool = True) -> tuple[str, str]:
        return skipless("reproduce", *words, *(["--data", text] if data else []), "--device", "cpu", code=code)

    return run


@pytest.fixture
def instant(monkeypatch) -> list[RunRequest]:
    """Runs that take no time; what they were asked for."""
    requests: list[RunRequest] = []

    def done(request: RunRequest):
        requests.append(request)
        values = {
            "step_seconds": 0.01,
            "jobs": request.limits.jobs,
            "device": "CPU",
            "torch": "",
            "commit": "",
            "time": "",
        }
        loss = 5.0 + abs(math.log(request.run.rate / 1e-5))
        metrics = [{"step": request.run.experiment.train.steps, "ema": loss, "valid_loss": 5.0}]
        return record_of(request.run, metrics, {"seconds": 1.0, **values})

    monkeypatch.setattr(workers, "run_one", done)
    return requests


def keys(log: str = "baselines-tiny") -> list[str]:
    return [json.loads(line)["key"] for line in (Path("results/logs") / f"{log}.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_every_item(reproduce, skipless, tasks: Path, monkeypatch) -> None:
    # uses takes seconds a run, and one of its tables is below; images have tests of their own, as have checkpoints
    tiny = SCALES["tiny"]
    monkeypatch.setitem(SCALES, "tiny", replace(tiny, training={**tiny.training, "checkpoint_every": 0}))
    tables = [table for table in TABLES.values() if table.measure != "uses" and not table.on_images]
    out, err = reproduce(*(table.name for table in tables), "--tasks-folder", str(tasks))
    results = Path("results")
    assert "still missing" not in err
    for table in tables:
        stem = table.name if table.kernels else f"{table.name}-tiny"
        page, data = (results / f"{stem}.md").read_text(), json.loads((results / f"{stem}.json").read_text())
        assert page.startswith(f"# {table.title}\n")
        assert (results / f"{stem}.png").stat().st_size > 5000
        if not table.kernels:
            assert data["missing"] == 0
            assert "are done." in page
            rows = data["tables"][table.quantities[0]]
            assert {arm.name for arm in table.chosen(SCALES["tiny"])} <= {row["arm"] for row in rows}
            assert all(row["ours"] is not None for row in rows if row["multiple"] == 1.0)
    records = ResultsFolder(results, "tiny").records
    assert not any(record.diverged for record in records.values())
    assert sum(len((file).read_text().splitlines()) for file in (results / "logs").iterdir()) == len(records)
    probed = next(record for record in records.values() if record.measure == "probes")
    assert {step: list(blocks) for step, blocks in unpack(probed.kernels).items()} == {
        step: [0, 1, 12, 24, 36] for step in (0, 1, 3)
    }
    assert 0.0 < probed.measures["agreement_with_theory"] <= 1.0
    # weights are kept where a table says so
    assert all(list(run.glob("*.safetensors")) for run in (results / "runs").iterdir())
    kept = {
        record.key for record in records.values() if record.measure == "tasks" or record.item in ("longer", "c4-longer")
    }
    assert {run.name.removeprefix("tiny-") for run in (results / "runs").iterdir()} <= kept

    monkeypatch.setattr(workers, "run_one", lambda _: pytest.fail("it trains again"))
    rebuilt = ("baselines", "training-kernels", "optimisers")
    pages = {path: path.read_bytes() for name in rebuilt for path in results.glob(f"{name}-tiny.*")}
    assert len(pages) == 9
    for path in pages:
        path.unlink()
    again, _ = reproduce(*rebuilt, "--tables-only", data=False)
    assert all(line in out.splitlines() for line in again.splitlines())
    assert {path: path.read_bytes() for path in pages} == pages
    for path, shown in (("results", r" kB, \d+ tables"), ("results/baselines-tiny.json", r" kB, 5 runs, \d tables?")):
        assert re.search(shown, skipless("report", path)[0])
        assert "baselines (Fig. 2), scale tiny: train loss" in Path("report.html").read_text()


def test_one_item_and_again(reproduce, monkeypatch) -> None:
    out, err = reproduce("baselines")
    assert err.count("s; ") == 5
    assert [line.split(",")[0].split(": ")[1] for line in err.splitlines()] == ARMS
    lines = out.splitlines()
    assert lines[1] == "Networks without skips, beside Pre-LN (Fig. 2), scale tiny"
    assert lines[3].split()[:4] == ["E-SPA", "2.79", "±", "0.02"]
    assert [Path(line.removeprefix("wrote ")).is_file() for line in lines if line.startswith("wrote ")] == [True] * 3
    assert len(keys()) == 5
    assert not list(Path("results/runs").iterdir())  # no weights, no run folders
    monkeypatch.setattr(workers, "run_one", lambda _: pytest.fail("it trains again"))
    assert reproduce("baselines")[0] == out
    assert reproduce("baselines", "--tables-only", data=False)[0] == out
    # of all tables those without runs of their own are left out, and named
    with monkeypatch.context() as patch:
        patch.setattr("skipless.cli.reproduce._write", lambda tables, *_: print(*(table.name for table in tables)))
        names, err = reproduce("all", "--tables-only", data=False)
    assert names.split() == ["kernels", "baselines"]
    assert "left out, since they have not been run: activations, skips" in err
    # E-SPA, U-SPA and V-SkipInit with RoPE are those of the baselines
    monkeypatch.setattr(workers, "run_one", run_one)
    _, err = reproduce("positions")
    assert [line.split(",")[0].split(": ")[1] for line in err.splitlines()] == [
        "e-spa-none",
        "u-spa-none",
        "v-skipinit-none",
    ]


def test_rates_seeds_and_arms(reproduce, instant: list[RunRequest]) -> None:
    out, _ = reproduce("baselines", "--rates", "3", "--seeds", "2", "--arms", "e-spa,skipless")
    runs = [request.run for request in instant]
    # the lowest rate is best, so that more below it are tried until one is worse, for each
    assert [(run.arm, run.rate, run.seed) for run in runs] == [
        *(("e-spa", rate, 0) for rate in (2e-5, 3e-5, 5e-5, 1e-5, 5e-6)),
        *(("skipless", rate, 0) for rate in (2e-5, 3e-5, 5e-5, 1e-5, 5e-6)),
        ("skipless", 1e-5, 1),  # what is compiled for the network is used first
        ("e-spa", 1e-5, 1),
    ]
    assert "at the edge" not in out


def test_ctrl_c_writes_what_there_is_and_goes_on(reproduce, instant: list[RunRequest], monkeypatch) -> None:
    quick = workers.run_one

    def stopped(request: RunRequest):
        if len(instant) == 2:
            raise KeyboardInterrupt
        return quick(request)

    monkeypatch.setattr(workers, "run_one", stopped)
    out, err = reproduce("baselines", code=130)
    assert "stopped; the same command goes on from there" in err
    assert "wrote results/baselines-tiny.md" in out
    assert "At least 3 runs are still missing" in Path("results/baselines-tiny.md").read_text()
    monkeypatch.setattr(workers, "run_one", quick)
    reproduce("baselines")
    assert [request.run.arm for request in instant] == ARMS
    assert len(set(keys())) == len(keys()) == 5


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_killed_it_goes_on(reproduce, data: Path, jobs: str) -> None:
    """Killed after its first run; workers end with it, and the next call does the rest, each once."""
    command = [sys.executable, "-m", "skipless", "reproduce", "baselines", "--data", str(data), "--jobs", jobs]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, "--device", "cpu"], stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        process.send_signal(signal.SIGKILL)
    assert "loss" in first
    time.sleep(3.0)  # a worker looks every second whether it is still wanted
    done = len(keys())
    assert 1 <= done < 5
    _, err = reproduce("baselines", "--jobs", jobs)
    assert err.count("loss") == 5 - done
    assert len(set(keys())) == len(keys()) == 5


def _has_lines(log: Path) -> bool:
    """Whether anything is logged; the folder of a run that has ended may be gone by now."""
    try:
        return log.stat().st_size > 0
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_sigterm_to_the_command_alone_saves_what_its_workers_train(data: Path, tmp_path: Path) -> None:
    """As `timeout` and clusters send it. Every run under way has a checkpoint of the last step that it logged."""
    command = [sys.executable, "-m", "skipless", "reproduce", "baselines", "--data", str(data), "--jobs", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [*command, "--device", "cpu", "--out", str(tmp_path)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment) as process:
        while sum(map(_has_lines, tmp_path.glob("runs/*/metrics.jsonl"))) < 2:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, complaint = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped; the same command goes on from there" in complaint
    assert "Traceback" not in complaint
    unfinished = [log for log in tmp_path.glob("runs/*/metrics.jsonl") if not (log.parent / "finished.json").exists()]
    assert unfinished
    for log in unfinished:
        last = json.loads(log.read_text().splitlines()[-1])["step"]
        assert (log.parent / "checkpoints" / f"step-{last:06d}" / "state.json").is_file()


def test_a_budget_that_nothing_fits_in(reproduce, instant: list[RunRequest]) -> None:
    _, err = reproduce("baselines", "--budget", "0.001")
    assert instant == []
    assert "5 runs are still missing" in err
    assert "  baselines: e-spa, rate 3e-05, seed 0" in err.splitlines()


def test_the_budget_is_kept(reproduce, instant: list[RunRequest], data: Path, monkeypatch) -> None:
    """Runs are expected to take as long as those before them; none is begun that would end too late."""
    quick, now = workers.run_one, [0.0]

    def slow(request: RunRequest):
        now[0] += 3.0
        return replace(quick(request), seconds=3.0)

    monkeypatch.setattr(workers, "run_one", slow)
    setting, folder = Setting.of(SCALES["tiny"], Text.read(data)), ResultsFolder("results", "tiny")
    crew = Scheduler([TABLES["baselines"]], setting, folder, Limits(budget=8.0, device="cpu"), clock=lambda: now[0])
    assert len(crew.work()) == 3
    assert [request.seconds for request in instant] == pytest.approx([7.6, 4.6])  # a twentieth is kept for saving


def test_a_gpu_lost_on_the_way_is_not_replaced_by_a_cpu(
    reproduce, instant: list[RunRequest], data: Path, monkeypatch
) -> None:
    seen = iter([True])
    setting, folder = Setting.of(SCALES["tiny"], Text.read(data)), ResultsFolder("results", "tiny")
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: next(seen, False))
        Scheduler([TABLES["baselines"]], setting, folder, Limits()).work()
        assert {request.limits.device for request in instant} == {"cuda"}
        with pytest.raises(ValueError, match="torch sees no GPU"):
            run_one(instant[0])


def test_a_run_whose_time_is_up_goes_on_later(reproduce, data: Path) -> None:
    setting = Setting.of(SCALES["tiny"], Text.read(data))
    run = missing([TABLES["baselines"]], setting, {})[0]
    request = RunRequest(run, Path("run"), Limits(device="cpu"), seconds=0.0)
    assert run_one(request) is None
    spent = float(Path("run/spent.txt").read_text())
    record = run_one(replace(request, seconds=math.inf))
    assert record is not None
    assert record.seconds >= spent > 0.0
    assert [step for step, _ in record.curve] == [1, 2, 3]
    again = run_one(request)  # killed before its record was written
    assert again is not None
    assert again.train_loss == record.train_loss


def test_a_run_of_other_settings_is_not_gone_on_with(reproduce, data: Path) -> None:
    setting = Setting.of(SCALES["tiny"], Text.read(data))
    run = missing([TABLES["baselines"]], setting, {})[0]
    request = RunRequest(run, Path("run"), Limits(device="cpu"), seconds=0.0)
    assert run_one(request) is None
    slower = replace(run.experiment, train=replace(run.experiment.train, log_every=3))
    record = run_one(replace(request, run=replace(run, experiment=slower), seconds=math.inf))
    assert record is not None
    assert [step for step, _ in record.curve] == [3]


def test_divergence_is_recorded(reproduce, monkeypatch) -> None:
    def diverges(*_, **__):
        raise Diverged(2, "diverged at step 2")

    monkeypatch.setattr(workers, "train", diverges)
    out, err = reproduce("baselines", "--rates", "2", "--arms", "e-spa")
    assert err.count("diverged at step 2") == 5  # two rates, and the next three lower ones
    assert "E-SPA" in out
    assert "diverged" in out
    lines = Path("results/logs/baselines-tiny.jsonl").read_text().splitlines()
    assert [json.loads(line)["train_loss"] for line in lines] == [None] * 5


def test_a_failed_run_does_not_stop_the_others(reproduce, instant: list[RunRequest], monkeypatch) -> None:
    quick = workers.run_one

    def failing(request: RunRequest):
        if request.run.arm == "pre-ln":
            raise RuntimeError("out of memory")
        return quick(request)

    monkeypatch.setattr(workers, "run_one", failing)
    _, err = reproduce("baselines", code=1)
    assert "failed: baselines: pre-ln, rate 0.0005, seed 0: RuntimeError: out of memory (traceback: results/" in err
    written = next(Path("results/runs").glob("*.error.txt"))
    assert 'raise RuntimeError("out of memory")' in written.read_text()
    assert [request.run.arm for request in instant] == [arm for arm in ARMS if arm != "pre-ln"]
    assert "1 run is still missing" in err
    monkeypatch.setattr(workers, "run_one", quick)
    reproduce("baselines")
    assert not written.exists()


def test_networks_that_fail_one_after_another_end_the_command(reproduce, monkeypatch) -> None:
    """One that fails at all its rates does not: the next may do well."""
    tried: list[str] = []

    def failing(request: RunRequest):
        tried.append(request.run.arm)
        raise RuntimeError("no device")

    monkeypatch.setattr(workers, "run_one", failing)
    _, err = reproduce("positions", "--rates", "3", code=2)
    assert "runs of 3 networks in a row failed" in err
    assert [tried.count(arm) for arm in dict.fromkeys(tried)] == [3, 3, 1]


@pytest.mark.parametrize("error", [RuntimeError("words"), Unpicklable("words")])
def test_an_error_crosses_processes_in_words(error, reproduce, data: Path, monkeypatch) -> None:
    """torch.compile's errors hold what it has traced."""

    def failing(_):
        raise error

    monkeypatch.setattr(workers, "run_one", failing)
    run = missing([TABLES["baselines"]], Setting.of(SCALES["tiny"], Text.read(data)), {})[0]
    answer = workers.attempt(RunRequest(run, Path("runs/tiny-1")))
    assert pickle.loads(pickle.dumps(answer)) == (None, f"{type(error).__name__}: words")
    assert "raise error" in Path("runs/tiny-1.error.txt").read_text()


def test_timings_are_taken_alone_and_last(reproduce, instant: list[RunRequest]) -> None:
    reproduce("optimisers", "--arms", "pre-ln/adam,e-spa/muon")
    measures = [request.run.measure for request in instant]
    assert measures[-2:] == ["pace", "pace"]
    assert "pace" not in measures[:-2]
    assert {request.limits.jobs for request in instant} == {1}


def test_downstream_needs_its_tasks(reproduce, instant: list[RunRequest]) -> None:
    _, err = reproduce("downstream")
    assert "downstream is left out: it needs --tasks-folder" in err
    assert instant == []


def test_list(reproduce) -> None:
    reproduce("training-kernels")
    out, _ = reproduce("--list", data=False)
    rows = {line.split()[0]: line for line in out.splitlines() if line and line.split()[0] in TABLES}
    assert set(rows) == set(TABLES)
    assert "tiny: all" in rows["training-kernels"]
    assert "Table 3" in rows["depth"]
    assert "estimates" in out
    assert rows["kernels"].endswith("nothing")
    Path("results/kernels.json").write_text("{}")
    again, _ = reproduce("--list", data=False)
    assert next(line for line in again.splitlines() if line.startswith("kernels ")).endswith("all")


def test_runs_in_the_shape_of_c4_are_evaluated_on_another_text_too(reproduce, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("Tea is hot. " * 40)
    reproduce("c4", "--arms", "pre-ln", "--other-text", str(other))
    (record,) = ResultsFolder("results", "tiny").records.values()
    window = TABLES["c4"].arm("pre-ln").experiment(SCALES["tiny"], Text(**record.text), 1e-3).train
    assert (window.length, window.batch_size) == (4 * 16, 1)
    assert 2.0 < record.measures["other_loss"] < 8.0
    assert f"| Pre-LN | – | {record.measures['other_loss']:.3f} |" in Path("results/c4-tiny.md").read_text()


def test_one_run_tells_three_tables_what_the_network_is_good_for(reproduce) -> None:
    reproduce("low-bits", "blocks", "backwards", "--arms", "mirrored/muon")
    _, measured = sorted(ResultsFolder("results", "tiny").records.values(), key=lambda record: bool(record.measure))
    assert measured.measure == "uses"
    for table in (TABLES[name] for name in ("low-bits", "blocks", "backwards")):
        assert {"valid_loss", *measured.measures} >= set(table.quantities), table.name
        page, data = (Path(f"results/{table.name}-tiny.{kind}").read_text() for kind in ("md", "json"))
        assert set(json.loads(data)["tables"]) == set(table.quantities)
        lines = [line.strip("|").split(" | ") for line in page.split("## Side by side")[1].splitlines()[2:]]
        at = [cell.strip() for cell in lines[0]].index("mirrored/muon")
        shown = {line[0].strip(): line[at] for line in lines[2 : 2 + len(table.quantities)]}
        assert list(shown) == [quantity.replace("_", " ") for quantity in table.quantities]
        assert not any("–" in value for value in shown.values())
    assert measured.measures["start_chain"] < 1e-4  # 36 blocks backwards, in float32
    lengths = {name: len(values) for name, values in measured.by_block.items()}
    assert lengths["drop_rise"] == lengths["kurtosis"] == lengths["end_alone"] == 36
    assert (lengths["swap_rise"], lengths["readout_rise"]) == (35, 37)


def test_a_table_whose_runs_are_all_logged_under_others_is_written_again(capsys) -> None:
    """Those of `backwards` are: low-bits and blocks ask for the same runs."""
    logs = ResultsFolder(Path(__file__).parents[2] / "results", "cpu")
    assert not logs.log("backwards").exists()
    asked = ReproduceArguments(("all",), "cpu", out=logs.path, tables_only=True)
    settings = reproduce_command._settings(asked, [table for table in TABLES.values() if not table.kernels], logs)
    assert {"low-bits", "blocks", "backwards", "longer"} <= settings.keys()
    assert "baselines" not in settings  # it shares some of its runs
    assert "left out, since they have not been run: baselines," in capsys.readouterr().err


def test_the_list_is_quick_and_needs_no_torch(tmp_path: Path) -> None:
    """Over the committed results; seconds of the processor, whatever else the machine does.

    The second of two calls counts: as a user has it, with the bytecode of all modules written.
    """
    code = """
import sys, time
sys.argv = ["skipless", "reproduce", "--list"]
from skipless.cli import main
try:
    main()
except SystemExit as stop:
    assert not stop.code
assert not {"torch", "matplotlib", "transformers"} & set(sys.modules)
print(time.process_time(), file=sys.stderr)
"""
    usual = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    settings = {"cwd": Path(__file__).parents[2], "env": {**usual, "PYTHONPYCACHEPREFIX": str(tmp_path)}}
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, **settings)
        assert done.returncode == 0, done.stderr
    assert float(done.stderr.split()[-1]) < 2.5
    assert "small: all" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["basline"], "there is no table 'basline'; did you mean 'baselines'"),
        ([], "name a table, such as baselines"),
        (["baselines", "--scale", "large"], "--scale is 'large'; there are tiny, cpu, small, medium, paper"),
        (["baselines", "--arms", "espa"], "--arms names 'espa', which no chosen table has; did you mean 'e-spa'"),
        (["baselines", "--jobs", "0"], "--jobs is 0; it must lie in 1 … 256"),
        (["baselines", "--budget", "-1"], "--budget is -1 seconds; it must be positive"),
        (["baselines", "--rates", "0"], "--rates is 0; it must lie in 1 … 1000"),
        (["baselines", "--out", "file"], "--out is file, a file; name a folder"),
    ],
)
def test_what_cannot_be_done_is_said(reproduce, words: list[str], said: str) -> None:
    Path("file").write_text("")
    _, err = reproduce(*words, code=2)
    assert said in err


def test_what_is_needed_is_said(reproduce) -> None:
    _, err = reproduce("baselines", "--scale", "small", code=2, data=False)
    assert "scale 'small' needs text: --data FOLDER" in err
    _, err = reproduce("baselines", "--data", "wikitext-103", code=2, data=False)
    assert "skipless prepare wikitext-103 --download --bytes --out data/wikitext-103-bytes" in err
    _, err = reproduce("baselines", "--tables-only", code=2, data=False)
    assert "results has no logs of scale 'tiny' to make tables from" in err
    with ResultsFolder("results", "tiny").locked():
        _, err = reproduce("baselines", code=2)
    assert "is reproducing in results: wait for it" in err


def test_a_folder_that_cannot_be_written_to_is_refused_before_data_are_prepared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != tmp_path)  # as for a user who is not root
    with pytest.raises(PermissionError, match="new/results cannot be written to; choose another place"):
        run(ReproduceArguments(("baselines",), out=tmp_path / "new" / "results"), Limits())
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(PermissionError, match="file/results cannot be written to"):
        run(ReproduceArguments(("baselines",), out=Path("file", "results")), Limits())


def test_data_that_is_not_there_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match="no corpus 'nosuch'"):
        run(ReproduceArguments(("baselines",), data="nosuch", out=tmp_path / "new"), Limits())
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="--seeds is 0"):  # before data are prepared
        run(ReproduceArguments(("baselines",), data="nosuch", seeds=0, out=tmp_path / "new"), Limits())
    with pytest.raises(ValueError, match="has no logs of scale 'tiny'"):
        run(ReproduceArguments(("baselines",), out=tmp_path / "new", tables_only=True), Limits())
    assert not (tmp_path / "new").exists()

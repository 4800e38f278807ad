import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from skipless.data.prepare import Preparation, prepare
from skipless.data.tokenizer import Bytes, TrainUnigram
from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer
from skipless.training.config import Experiment, TrainConfig
from skipless.training.distributed import World
from skipless.training.load import find_tokenizer
from skipless.training.run import (
    Display,
    RunFinishedError,
    RunFolder,
    flops_per_token,
    git_state,
    least_bytes,
    read_experiment,
    read_metrics,
)
from skipless.training.trainer import Trainer

EXPERIMENT = Experiment("small", model=ModelConfig(vocab_size=32, width=16, depth=2, heads=2, activation="gelu"))


def opened(path, experiment=EXPERIMENT, resume=False) -> RunFolder:
    return RunFolder.open(path, experiment, resume=resume)


def begun(path) -> None:
    with opened(path) as run:
        run.log({"step": 1})


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_a_run_folder_holds(tmp_path):
    with opened(tmp_path / "runs" / "a") as run:
        run.log({"step": 0, "loss": 3.5})
    assert names(run.path) == [
        ".lock",
        "checkpoints",
        "data.json",
        "env.json",
        "experiment.json",
        "export",
        "hashes.json",
        "metrics.jsonl",
    ]
    assert read_experiment(run.path) == EXPERIMENT
    noted = json.loads((run.path / "env.json").read_text())
    assert noted["python"] == ".".join(map(str, sys.version_info[:3]))
    assert noted["command"] == sys.argv
    assert {"torch", "cuda", "device", "skipless", "git", "host", "packages"} <= noted.keys()


def test_other_settings_are_named(tmp_path):
    begun(tmp_path / "run")
    other = EXPERIMENT.override("train.steps=500", "train.warmup=10", "model.width=32", "name=big")
    with pytest.raises(ValueError, match="other settings") as seen:
        opened(tmp_path / "run", other, resume=True)
    for part in (
        "train.steps is 100000 there, 500 here",
        "train.warmup is 4000 there, 10 here",
        "model.width is 16 there, 32 here",
        "name is 'small' there, 'big' here",
        "--resume",
        "another folder",
    ):
        assert part in str(seen.value)
    assert "batch_size" not in str(seen.value)
    assert read_experiment(tmp_path / "run") == EXPERIMENT


def test_an_unfinished_run_asks_for_resume(tmp_path):
    begun(tmp_path)
    with pytest.raises(ValueError, match=r"unfinished: add --resume"):
        opened(tmp_path)
    opened(tmp_path, resume=True).close()
    opened(tmp_path, resume=True).close()
    assert len(json.loads((tmp_path / "env.json").read_text())["resumed"]) == 2


def test_a_folder_where_nothing_was_trained_is_free(tmp_path):
    """A start that was refused after it had written its settings is repeated with others."""
    opened(tmp_path).close()
    other = EXPERIMENT.override("model.vocab_size=64")
    with opened(tmp_path, other) as run:
        assert read_experiment(tmp_path) == other
        run.log({"step": 1})
    with pytest.raises(ValueError, match=r"model\.vocab_size is 64 there, 32 here"):
        opened(tmp_path, resume=True)


def test_how_many_checkpoints_stay_may_change(tmp_path):
    """A full disk asks for fewer of them, and to go on."""
    begun(tmp_path)
    opened(tmp_path, EXPERIMENT.override("train.keep=1"), resume=True).close()


def test_resume_where_nothing_is_starts(tmp_path):
    with opened(tmp_path / "new", resume=True) as run:
        assert read_experiment(run.path) == EXPERIMENT


def test_a_finished_run_says_so(tmp_path):
    with opened(tmp_path) as run:
        run.finish(step=3)
    for resume in (False, True):
        with pytest.raises(RunFinishedError, match="is finished"):
            opened(tmp_path, resume=resume)


def test_places_that_are_no_run(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match=r"holds other files \(thesis.tex\)"):
        opened(tmp_path)
    assert names(tmp_path) == ["thesis.tex"]
    with pytest.raises(ValueError, match="is a file"):
        opened(tmp_path / "thesis.tex")
    with pytest.raises(ValueError, match="is not a run"):
        read_experiment(tmp_path)


def test_a_start_killed_before_experiment_json_is_taken_up(tmp_path):
    for name in (".lock", ".experiment.json.skipless-0123abcd"):
        (tmp_path / name).write_text("")
    with opened(tmp_path):
        assert ".experiment.json.skipless-0123abcd" not in names(tmp_path)


@pytest.mark.parametrize("name", ["movie.part", "env.json", "data.json", "metrics.jsonl", "tokenizer.model", "export"])
def test_a_folder_of_other_files_is_left_alone_whatever_their_names(tmp_path, name):
    (tmp_path / name).write_text("precious")
    with pytest.raises(ValueError, match=rf"holds other files \({name}\)"):
        opened(tmp_path)
    assert (names(tmp_path), (tmp_path / name).read_text()) == ([name], "precious")


def test_an_experiment_that_no_run_wrote_is_left_alone(tmp_path):
    mine = EXPERIMENT.to_json().replace("\n", " ")
    (tmp_path / "experiment.json").write_text(mine)
    with pytest.raises(ValueError, match=r"experiment\.json is there, and no run has written it"):
        opened(tmp_path)
    assert (tmp_path / "experiment.json").read_text() == mine


@pytest.mark.parametrize("name", ["experiment.json", "metrics.jsonl", "tokenizer.model", "hashes.json"])
def test_the_files_of_a_finished_run_are_verified(tmp_path, sources_folder, name):
    """A digit changed by an accident that is still JSON, and one that is not."""
    experiment = EXPERIMENT.override(f"data.folder={sources_folder}", "model.vocab_size=400")
    with opened(tmp_path / "run", experiment) as run:
        run.log({"step": 12, "loss": 3.25})
        run.finish(steps=12)
    read = {"experiment.json": read_experiment, "metrics.jsonl": read_metrics, "tokenizer.model": find_tokenizer}
    read["hashes.json"] = read_experiment
    read[name](run.path)
    file = run.path / name
    whole = file.read_bytes()
    digit = next(at for at in range(len(whole) - 1, 0, -1) if whole[at : at + 1].isdigit())
    for changed in (whole[:digit] + bytes([whole[digit] ^ 1]) + whole[digit + 1 :], whole[:-3]):
        file.write_bytes(changed)
        with pytest.raises(ValueError, match=rf"run/{name} is damaged"):
            read[name](run.path)
    file.write_bytes(whole)
    read[name](run.path)


@pytest.fixture(scope="module")
def sources_folder(tmp_path_factory):
    """A prepared folder with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("\n\n\n".join(Path(__file__).read_text() for _ in range(3)))
    prepare(Preparation(str(folder / "text.txt"), TrainUnigram(400)), folder / "tokens", workers=1)
    return folder / "tokens"


def test_a_run_has_its_tokenizer_from_the_start(tmp_path, sources_folder):
    with opened(tmp_path / "run", EXPERIMENT.override(f"data.folder={sources_folder}", "model.vocab_size=400")):
        kept = (tmp_path / "run" / "tokenizer.model").read_bytes()
    assert kept == (sources_folder / "tokenizer.model").read_bytes()
    (sources_folder / "tokenizer.model").write_bytes(kept[:-1] + b"x")
    with pytest.raises(ValueError, match=r"did not make the shards|is not a SentencePiece model"):
        opened(tmp_path / "other", EXPERIMENT.override(f"data.folder={sources_folder}"))
    (sources_folder / "tokenizer.model").write_bytes(kept)


@pytest.mark.parametrize("name", ["../../escaped", "/escaped", "..", ".", "", "a/../../b"])
def test_a_name_does_not_lead_out_of_runs(name):
    experiment = Experiment.from_json(EXPERIMENT.to_json().replace('"small"', json.dumps(name)))
    with pytest.raises(ValueError, match=r"leads out of runs/: give --out"):
        _ = experiment.folder
    assert Experiment("wiki/e-spa").folder == Path("runs/wiki/e-spa")


def test_files_beside_a_run_stay(tmp_path):
    begun(tmp_path)
    (tmp_path / "movie.part").write_text("precious")
    opened(tmp_path, resume=True).close()
    assert (tmp_path / "movie.part").read_text() == "precious"


def test_a_damaged_experiment_is_named(tmp_path):
    begun(tmp_path)
    os.truncate(tmp_path / "experiment.json", 40)
    with pytest.raises(ValueError, match=r"experiment.json is damaged"):
        opened(tmp_path, resume=True)


@pytest.mark.parametrize("content", ["{", "[1]", "3"])
def test_a_damaged_environment_is_named(tmp_path, content):
    begun(tmp_path / "run")
    (tmp_path / "run" / "env.json").write_text(content)
    with pytest.raises(ValueError, match=r"env\.json is damaged .*; delete it"):
        opened(tmp_path / "run", resume=True)


@pytest.mark.parametrize("line", ["[1]", "{}", "null", '{"step": "3"}'])
def test_a_line_of_the_log_without_a_step_is_named(tmp_path, line):
    begun(tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    complaint = r"metrics.jsonl is damaged \(line 2.*delete the line"
    with opened(tmp_path / "run", resume=True) as run, pytest.raises(ValueError, match=complaint):
        run.rewind(1)


def test_a_run_does_not_go_on_over_other_tokens(tmp_path):
    """The folder of its tokens was prepared anew since; one that kept no fingerprint goes on as it did."""

    def prepared(text: str) -> None:
        (tmp_path / "text.txt").write_text(text * 100)
        plan = Preparation(str(tmp_path / "text.txt"), tokenizer=Bytes(), valid_fraction=0.0)
        prepare(plan, tmp_path / "tokens", workers=1, force=True)

    prepared("a few words\n\n\n")
    experiment = EXPERIMENT.override(f"data.folder={tmp_path / 'tokens'}")
    with opened(tmp_path / "run", experiment) as run:
        run.log({"step": 1})
    prepared("a few words\n\n\n")
    opened(tmp_path / "run", experiment, resume=True).close()
    prepared("other words\n\n\n")
    file = tmp_path / "run" / "data.json"
    with pytest.raises(ValueError, match=r"data\.folder holds other tokens .* delete .*data\.json"):
        opened(tmp_path / "run", experiment, resume=True)
    file.write_text("{")
    with pytest.raises(ValueError, match=r"data\.json is damaged .*; delete it"):
        opened(tmp_path / "run", experiment, resume=True)
    file.unlink()
    opened(tmp_path / "run", experiment, resume=True).close()


def test_a_run_goes_on_when_its_data_have_moved(tmp_path, monkeypatch):
    """Its very tokens by another name are no other setting; those of another folder are."""
    for name in ("some", "other"):
        (tmp_path / f"{name}.txt").write_text(f"{name} words\n\n\n" * 100)
        plan = Preparation(str(tmp_path / f"{name}.txt"), tokenizer=Bytes(), valid_fraction=0.0)
        prepare(plan, tmp_path / name, workers=1)
    monkeypatch.chdir(tmp_path)
    with opened("run", EXPERIMENT.override("data.folder=some")) as run:
        run.log({"step": 1})
    opened("run", EXPERIMENT.override(f"data.folder={tmp_path / 'some'}"), resume=True).close()
    (tmp_path / "some").rename("moved")
    opened("run", EXPERIMENT.override("data.folder=moved"), resume=True).close()
    for wrong in ("data.folder=other", "data.folder=nowhere"):
        with pytest.raises(ValueError, match=r"data\.folder is 'some' there, '(other|nowhere)' here"):
            opened("run", EXPERIMENT.override(wrong), resume=True)
    with pytest.raises(ValueError, match=r"data\.valid is None there, 'moved' here"):
        opened("run", EXPERIMENT.override("data.folder=moved", "data.valid=moved"), resume=True)


def test_two_processes_do_not_train_one_run(tmp_path):
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    with opened(tmp_path), pytest.raises(ValueError, match=f"{holder} is training in"):
        opened(tmp_path, resume=True)
    opened(tmp_path, resume=True).close()


def test_the_lock_of_a_killed_process_is_not_in_the_way(tmp_path, caplog):
    opened(tmp_path).close()
    hold = "import fcntl, os, signal, sys; f = open(sys.argv[1], 'a+'); fcntl.flock(f, fcntl.LOCK_EX); "
    hold += "f.write('process 1 on elsewhere\\n'); f.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", hold, str(tmp_path / ".lock")], check=False)
    opened(tmp_path, resume=True).close()
    assert "was last written by process 1 on elsewhere" in caplog.text


def test_without_file_locks_the_holder_is_looked_for(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    opened(tmp_path).close()
    monkeypatch.setattr("fcntl.flock", unsupported)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here = socket.gethostname()
    for holder, free in (
        (f"process {os.getpid()} on {here}", False),
        ("process 1 on elsewhere", False),
        (f"process {gone.pid} on {here}", True),
        ("", True),
    ):
        (tmp_path / ".lock").write_text(holder)
        if free:
            opened(tmp_path, resume=True).close()
        else:
            with pytest.raises(ValueError, match="is training in"):
                opened(tmp_path, resume=True)


def test_rewinding_makes_the_log_that_of_a_run_without_interruption(tmp_path):
    records = [{"step": step, "loss": 1 / (step + 3)} for step in range(7)]
    with opened(tmp_path / "calm") as run:
        for record in records:
            run.log(record)
    with opened(tmp_path / "killed") as run:
        for record in records[:5]:
            run.log(record)
    with run.metrics.open("a") as file:
        file.write('{"step": 5, "lo')
    assert read_metrics(run.path) == records[:5]
    with opened(tmp_path / "killed", resume=True) as run:
        run.rewind(2)
        for record in records[3:]:
            run.log(record)
        run.sync()
    assert (tmp_path / "killed" / "metrics.jsonl").read_bytes() == (tmp_path / "calm" / "metrics.jsonl").read_bytes()
    assert read_metrics(tmp_path / "calm") == records


def test_rewinding_to_before_the_start(tmp_path):
    with opened(tmp_path) as run:
        run.rewind(None)
        run.log({"step": 0})
        run.rewind(0)
        assert read_metrics(run.metrics) == [{"step": 0}]
        run.rewind(None)
        assert read_metrics(run.metrics) == []


def test_no_line_is_added_to_half_of_one(tmp_path):
    with opened(tmp_path) as run:
        run.metrics.write_bytes(b'{"step": 1}\n{"st')
        run.log({"step": 2})
    assert read_metrics(run.metrics) == [{"step": 1}, {"step": 2}]


def test_metrics_errors(tmp_path):
    with opened(tmp_path) as run:
        with pytest.raises(ValueError, match="has no 'step'"):
            run.log({"loss": 1.0})
        with pytest.raises(ValueError, match="is no file"):
            read_metrics(run.path)
        run.metrics.write_bytes(b'{"step": 1}\n{"st\n{"step": 3}\n')
        with pytest.raises(ValueError, match=r"metrics.jsonl is damaged \(line 2: .*delete the line"):
            read_metrics(run.path)


def test_a_full_disk(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(tmp_path) as run:
        monkeypatch.setattr("skipless.files.Journal.add", full)
        with pytest.raises(
            OSError, match=r"metrics.jsonl could not be written \(No space left on device\): .* --resume"
        ):
            run.log({"step": 1})


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_said_once_and_the_folder_let_go(tmp_path):
    """What could not be written is not tried again at the end, where a bare error would take the place of the first."""

    def fill() -> None:
        with opened(tmp_path) as run:
            run.metrics.symlink_to("/dev/full")
            run.log({"step": 1})

    with pytest.raises(OSError, match=r"metrics.jsonl could not be written .* --resume") as seen:
        fill()
    assert seen.value.__context__ is seen.value.__cause__
    (tmp_path / "metrics.jsonl").unlink()
    begun(tmp_path)


def test_git_state(tmp_path):
    assert git_state(tmp_path) is None
    (tmp_path / "__init__.py").write_text("")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert git_state(tmp_path) is None, "not tracked"
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    state = git_state(tmp_path)
    assert state is not None
    assert (len(state["commit"]), state["dirty"]) == (40, False)
    (tmp_path / "new.py").write_text("")
    state = git_state(tmp_path)
    assert state is not None
    assert state["dirty"]


LINE = {"step": 10, "loss": 5.4321, "ema": 5.5, "rate": 1e-3, "gradient": 0.25}


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("NVIDIA H200", "MFU 51%"),
        ("NVIDIA H100 80GB HBM3", "MFU 51%"),
        ("NVIDIA A100-SXM4-80GB", "MFU 160%"),
        ("CPU", None),
        ("Some other GPU", None),
    ],
)
def test_utilisation_is_shown_where_the_peak_is_known(device, words, capsys):
    """5e9 FLOP a token, 100,000 tokens a second: 5e14 of 9.89e14, or of 3.12e14."""
    display = Display("run", 100, flops_per_token=5e9, device=device)
    display.show(LINE, 100_000.0)
    text = capsys.readouterr().err
    assert "run 10/100  loss 5.432  ema 5.500  grad 0.25  100,000 tok/s" in text
    assert (words in text) if words else ("MFU" not in text)


def test_a_token_costs_six_per_weight_and_attention(experiment):
    """Eight blocks of 12·32² and a tied embedding of 256·32; causal attention's scores and values, 6·8·32·32 more."""
    weights = 8 * 12 * 32**2 + 256 * 32
    assert experiment.model.matrix_parameters == weights
    assert flops_per_token(experiment) == 6 * weights + 6 * 8 * 32 * 32


@pytest.mark.parametrize("processes", [1, 4])
def test_utilisation_is_of_all_devices(experiment, tmp_path, processes):
    """The line counts the tokens of all processes, and the peak is one device's."""
    world = World(0, processes, torch.device("cpu"))
    with RunFolder.open(tmp_path / "run", experiment, resume=False) as run:
        opened = Trainer(experiment, world, run, quiet=True)
    whole = flops_per_token(experiment)
    assert opened.display.flops_per_token == whole / processes
    assert opened.feed.loader.batch(0).tokens.shape[0] == experiment.train.batch_size // processes


def kept(experiment: Experiment) -> int:
    """Bytes that autograd keeps of one forward pass, weights apart: each storage once."""
    model, train = Transformer(experiment.model), experiment.train
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    seen: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    tokens = torch.zeros(train.batch_size, train.length, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens, tokens)
    return sum(each.untyped_storage().nbytes() for at, each in seen.items() if at not in weights)


IDENTITY = {"mlp_init": "mirrored", "value_output": "identity"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hidden": 512},
        {"hidden": 0, "kv_heads": 1},
        {"position": "relative"},
        IDENTITY,
        {**IDENTITY, "bias_gain": True},
        {**IDENTITY, "bias_gain": True, "readers": 40},
    ],
)
def test_the_least_memory_is_below_what_is_taken_and_not_far(changes):
    model = ModelConfig(vocab_size=16, width=32, depth=6, heads=4, length=32, activation="gelu", **changes)
    experiment = Experiment("x", model, train=TrainConfig(batch_size=8, length=32, precision="fp32"))
    estimate = least_bytes(experiment) - 12 * model.matrix_parameters - 8 * 8 * 32 - 6 * 20_000
    assert estimate <= kept(experiment) <= 3 * estimate

"""kill -9 at any moment of the commands that write: every file is the old one, the new one, or not there yet.

Training and the preparation of text have tests of their own, test_loop.py, test_checkpoint_processes.py and
test_resume.py.
"""

import os
from pathlib import Path

import pytest
from tests.processes import Program

PROGRAM = """
import json, math, os, random, shutil, signal, sys, threading, time
from pathlib import Path

import matplotlib, numpy as np, torch, transformers  # once, for all children
from PIL import Image
from tqdm import tqdm

import skipless.figures.inspection, skipless.figures.training, skipless.hf
from skipless.cli import main
from skipless.data.prepare import Preparation, prepare
from skipless.data.tokenizer import Bytes
from skipless.files import is_part
from skipless.model.config import Images, ModelConfig
from skipless.model.transformer import Transformer
from skipless.paper import workers
from skipless.paper.records import record_of
from skipless.training.checkpoint import save_weights
from skipless.training.config import DataConfig, Experiment, TrainConfig

torch.set_num_threads(1)
tqdm.monitor_interval = 0  # its thread might hold a lock while a child is forked, which would wait for it for ever
HOME, COMMAND, FULL = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "1"
WRITES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
chance = random.Random(time.time_ns() if FULL else 0)


def forked(arguments, at=None, seconds=None):
    "The command in a child that dies before its write number `at`, or after so long. How many it made, None if killed."
    heard, said = os.pipe()
    child = os.fork()
    if child == 0:
        count = 0

        def hook(event, values):
            nonlocal count
            opened = event == "open" and isinstance(values[2], int) and values[2] & (os.O_WRONLY | os.O_RDWR)
            if (event in WRITES or opened) and str(values[0]).startswith(str(HOME)):
                if count == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1

        sys.addaudithook(hook)
        sys.argv = ["skipless", *map(str, arguments)]
        for number in (1, 2):
            os.dup2(os.open(os.devnull if number == 1 else HOME.parent / "complaint", os.O_WRONLY | os.O_CREAT), number)
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        os.write(said, str(count).encode())
        os._exit(code)
    os.close(said)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with os.fdopen(heard) as pipe:
        count = pipe.read()
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0, (status, (HOME.parent / "complaint").read_text())
    return None if killed else int(count)


def contents(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in (".lock", "verified.json")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if not any(map(is_part, path.parents))}


def put(place, kept):
    shutil.rmtree(place, ignore_errors=True)
    if kept is not None:
        shutil.copytree(kept, place)


def pictures(count):
    for part, kind in ((part, kind) for part in ("train", "test") for kind in "ab"):
        (HOME / "pictures" / part / kind).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
            Image.fromarray(pixels).save(HOME / "pictures" / part / kind / f"{number}.png")


def run(depth):
    folder = HOME / "run"
    torch.manual_seed(depth)
    pictures(depth)
    model = Transformer(ModelConfig(vocab_size=256, width=16, depth=depth, heads=2, length=16, activation="gelu"))
    if COMMAND == "export images":
        model = Transformer("vit/mirrored", width=16, depth=depth, heads=2, images=Images(16, 4), classes=2)
        folder.mkdir(exist_ok=True)
        (folder / "classes.json").write_text('["a", "b"]')
    save_weights(model, folder / "model.safetensors")
    experiment = Experiment("tiny", model.config, DataConfig(folder="gone"), train=TrainConfig(steps=9, warmup=1))
    (folder / "experiment.json").write_text(experiment.to_json())
    (folder / "finished.json").write_text("{}")
    lines = [json.dumps({"step": step, "ema": 5.0 - 0.1 * step * depth}) for step in range(1, 9)]
    (folder / "metrics.jsonl").write_text("".join(line + "\\n" for line in lines))


def instant(request):
    values = {"step_seconds": 0.01, "jobs": request.limits.jobs, "device": "CPU", "torch": "", "commit": "", "time": ""}
    loss = LOSS + abs(math.log(request.run.rate / 1e-5))
    metrics = [{"step": request.run.experiment.train.steps, "ema": loss, "valid_loss": 5.0}]
    return record_of(request.run, metrics, {"seconds": 1.0, **values})


def export_holds(found, old, new):
    "Without config.json there is nothing to load; with it all is of one export."
    if "config.json" in found:
        whole = new if found["config.json"] == new["config.json"] else old
        assert {name: found.get(name) for name in whole} == whole, "a mixture of two exports"


def prepared_holds(found, old, new):
    "With manifest.json the folder is complete."
    if "manifest.json" in found:
        whole = new if found["manifest.json"] == new["manifest.json"] else old
        assert {name: found.get(name) for name in whole} == whole, "a mixture of two preparations"


def files_hold(found, old, new):
    for name, data in found.items():
        if not is_part(Path(name)):
            assert data in (old.get(name), new.get(name)), f"{name} is neither the old file nor the new one"


def log_holds(found, old, new):
    "A page may be of the runs so far; the log has finished lines of the whole one's, and at most half a line more."
    for name, data in found.items():
        if name.endswith(".jsonl"):
            lines = data.split(b"\\n")
            assert set(lines[:-1]) <= set(new[name].split(b"\\n")), name
        elif name.endswith(".json") and not is_part(Path(name)):
            json.loads(data)


place, workers.run_one, LOSS = HOME / "out", instant, 5.0
HOME.mkdir()
run(2)
(HOME / "text.txt").write_text("The signal dies by block six. " * 400)
if COMMAND == "reproduce":
    prepare(Preparation(str(HOME / "text.txt"), Bytes(), valid_fraction=0.0), HOME / "tokens", workers=1)
inspect = ["inspect", HOME / "run", "--length", "8", "--batch", "1", "--json", place / "a.json", "--figure"]
arguments, holds = {
    "export": (["export", HOME / "run", "--out", place], export_holds),
    "export images": (["export", HOME / "run", "--out", place], export_holds),
    "prepare images": (["prepare", HOME / "pictures", "--images", "--force", "--out", place], prepared_holds),
    "report": (["report", HOME / "run", "--out", place / "page.html"], files_hold),
    "inspect": ([*inspect, place / "a.png"], files_hold),
    "reproduce": (["reproduce", "baselines", "--data", HOME / "tokens", "--device", "cpu", "--out", place], log_holds),
}[COMMAND]

# an older output, and what the whole command makes of it; children inherit what is imported for it
sys.argv = ["skipless", *map(str, arguments)]
try:
    main()
except SystemExit as end:
    assert not end.code
assert threading.active_count() == 1
old = None
if COMMAND != "reproduce":
    put(HOME.parent / "old", place)
    old = HOME.parent / "old"
    run(3)
before = contents(old) if old else {}
put(place, old)
began = time.monotonic()
writes = forked(arguments)
took = time.monotonic() - began
whole = contents(place)
assert writes > 2 and whole != before
moments = [{"at": at} for at in (range(writes) if FULL else chance.sample(range(writes), min(writes, 3)))]
moments += [{"seconds": took * chance.random()} for _ in range(40 if FULL else 1)]
kills = 0
for moment in moments:
    put(place, old)
    kills += forked(arguments, **moment) is None
    holds(contents(place) if place.exists() else {}, before, whole)
    assert forked(arguments) is not None, moment
    after = contents(place)
    left = {name for name in after if is_part(Path(name))}
    assert {name: data for name, data in after.items() if name not in left} == whole, moment
    assert not left or COMMAND in ("report", "inspect"), "only in a folder that is not its own a part may stay"
assert kills >= len(moments) - (40 if FULL else 1), (kills, len(moments))  # the last ones may come too late
print("kills", kills)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked")
@pytest.mark.parametrize("command", ["export", "export images", "prepare images", "report", "inspect", "reproduce"])
def test_a_killed_command_leaves_whole_files_and_goes_on(tmp_path: Path, command: str, full: bool) -> None:
    program = Program(PROGRAM, tmp_path / "home", command, int(full))
    assert "kills" in program.finished(3000 if full else 300)

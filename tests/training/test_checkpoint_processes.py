"""Kills and several processes. One interpreter start each: children are forked from it."""

from pathlib import Path

import pytest
from tests.processes import Program, ranks

COMMON = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from torch import nn
from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer
from skipless.training.checkpoint import load_checkpoint, model_from_weights, save_checkpoint, save_weights
from skipless.training.config import Experiment
from skipless.training.config import OptimizerConfig
from skipless.training.optim.build import build_optimizer
from skipless.training.run import RunFinishedError, RunFolder

torch.set_num_threads(1)
FOLDER = Path(sys.argv[1])
CONFIG = ModelConfig(vocab_size=32, width=16, depth=2, heads=2, length=8, activation="gelu")

def make(name="adam", seed=0, wrap=lambda model: model):
    torch.manual_seed(seed)
    model = wrap(Transformer(CONFIG))
    return model, build_optimizer(model, OptimizerConfig(name=name, rate=1e-2, precondition_every=2))

def step(model, optimizer, index):
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(index))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
    loss.backward()
    optimizer.step()
    return loss.item()

def warm(name="adam"):
    "Import here what every child would import anew."
    model, optimizer = make(name)
    step(model, optimizer, 0)
    aside = FOLDER.with_name(FOLDER.name + "-warm")
    save_checkpoint(aside, 1, model, optimizer, {}, keep=1)
    load_checkpoint(aside, model, optimizer)

def forked(work, when=lambda: False):
    "Run work in a child; kill it as soon as when() holds while it stands still. Whether it came to its end."
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    while True:
        time.sleep(0.003 * chance.random())
        seen = when()
        if seen:
            os.kill(child, signal.SIGSTOP)
        ended, status = os.waitpid(child, os.WUNTRACED if seen else os.WNOHANG)
        if ended and not os.WIFSTOPPED(status):
            assert status == 0, f"the child failed with {status}"
            return True
        if seen and when():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        if seen:
            os.kill(child, signal.SIGCONT)

chance = random.Random(0)
"""

KILLED_WHILE_SAVING = """
def save_on_and_on(last=10**6):
    model, optimizer = make()
    step(model, optimizer, 0)
    start = load_checkpoint(FOLDER, model, optimizer) or (0, {})
    for number in range(start[0] + 1, last + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(number)
        save_checkpoint(FOLDER, number, model, optimizer, {"number": number}, keep=2)

def saving():
    "Half-written checkpoints."
    return list(FOLDER.glob(".step-*.skipless-*"))

warm()
assert forked(lambda: save_on_and_on(3))
last, midway = 3, 0
for attempt in range(15):
    # one more is saved at least; every other time it is killed in the middle of the next
    further = lambda: max(int(path.name[5:]) for path in FOLDER.glob("step-*")) > last + attempt % 3
    forked(save_on_and_on, lambda: further() and (attempt % 2 or saving()))
    midway += bool(saving())
    model, optimizer = make(seed=1)
    number, extra = load_checkpoint(FOLDER, model, optimizer)
    assert extra == {"number": number} and number >= last, (number, extra, last)
    assert all((parameter == number).all() for parameter in model.parameters())
    last = number
assert last > 3 and midway >= 7, (last, midway)
print("saved", last, "midway", midway)
"""

KILLED_WHILE_TRAINING = """
STEPS = 40

def whole(folder):
    experiment = Experiment("killed", model=CONFIG)
    with RunFolder.open(folder, experiment, resume=True) as run:
        model, optimizer = make("muon", seed=os.getpid() % 1000)
        found = load_checkpoint(run.checkpoints, model, optimizer)
        if found is None:
            model, optimizer = make("muon")
        run.rewind(found[0] if found else None)
        for index in range(found[0] if found else 0, STEPS):
            run.log({"step": index + 1, "loss": step(model, optimizer, index)})
            if (index + 1) % 4 == 0:
                save_checkpoint(run.checkpoints, index + 1, model, optimizer, {}, keep=1)
        save_weights(model, run.export / "model.safetensors")
        run.finish(steps=STEPS)

warm("muon")
assert forked(lambda: whole(FOLDER / "calm"))
kills = 0

def logged():
    "Lines in the log of the run that is killed."
    log = FOLDER / "killed" / "metrics.jsonl"
    return log.read_text().count("\\n") if log.exists() else 0

def again():
    try:
        whole(FOLDER / "killed")
    except RunFinishedError:
        pass  # the last kill came after the end was noted

target = 3
while not forked(again, lambda: logged() >= target):
    kills, target = kills + 1, target + chance.randint(1, 8)
assert kills > 2, kills
for name in ("metrics.jsonl", "export/model.safetensors"):
    assert (FOLDER / "calm" / name).read_bytes() == (FOLDER / "killed" / name).read_bytes(), name
print("kills", kills)
"""

SHARDED = """
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from skipless.training.distributed import exit_process

def shard(model):
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)

WRAPS = {"plain": lambda model: model, "fsdp": shard, "ddp": DistributedDataParallel}
rank = int(os.environ["RANK"])

def report(kind, name, model, optimizer, folder):
    save_weights(model, folder / f"{kind}.safetensors")
    losses = [step(model, optimizer, index) for index in range(5, 9)]
    if rank == 0:
        print(name, kind, *(repr(loss) for loss in losses), flush=True)

def save(wrap, name):
    model, optimizer = make(name, wrap=WRAPS[wrap])
    for index in range(5):
        step(model, optimizer, index)
    save_checkpoint(FOLDER / name / wrap, 5, model, optimizer, {"wrap": wrap}, keep=2)
    report(f"save-{wrap}", name, model, optimizer, FOLDER / name / wrap)

def load(saved, wrap, name):
    model, optimizer = make(name, seed=1, wrap=WRAPS[wrap])
    assert load_checkpoint(FOLDER / name / saved, model, optimizer) == (5, {"wrap": saved})
    report(f"load-{saved}-{wrap}", name, model, optimizer, FOLDER / name / saved)

NAMES = ("adam", "muon", "soap")
if rank == 0:  # a world of one
    for name in NAMES:
        save("plain", name)
dist.init_process_group("gloo")
dist.barrier()
for name in NAMES:
    load("plain", "ddp", name)
    load("plain", "fsdp", name)
    save("fsdp", name)
    load("fsdp", "fsdp", name)
    full = FOLDER / name / "full"
    model, optimizer = make(name, wrap=shard)
    original = torch.distributed.checkpoint.filesystem._write_files_from_queue
    def no_space(*arguments, **named):
        raise OSError(28, "No space left on device")
    try:
        if rank == 1:
            torch.distributed.checkpoint.filesystem._write_files_from_queue = no_space
        save_checkpoint(full, 1, model, optimizer, {}, keep=1)
    except OSError as error:
        assert "make room" in str(error) and not list(full.iterdir()), error
    else:
        raise AssertionError("one process's full disk went unnoticed")
    torch.distributed.checkpoint.filesystem._write_files_from_queue = original
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    for name in NAMES:
        load("fsdp", "plain", name)
exit_process()
"""


def start(folder: Path, script: str) -> str:
    return Program(COMMON + script, folder).finished()


@pytest.mark.slow
def test_killed_while_saving(tmp_path):
    assert "midway" in start(tmp_path, KILLED_WHILE_SAVING)


@pytest.mark.slow
def test_killed_while_training_ends_as_if_it_had_not_been(tmp_path):
    assert "kills" in start(tmp_path, KILLED_WHILE_TRAINING)


@pytest.mark.slow
def test_another_number_of_processes(tmp_path):
    """Saved by FSDP2 on two, read on one; saved on one, read by FSDP2 and DDP on two: weights equal, losses follow."""
    rank_0, rank_1 = ranks(2, COMMON + SHARDED, tmp_path)
    lines = [line.split() for line in rank_0.finished().splitlines() if " load-" in f" {line}" or " save-" in line]
    rank_1.finished()
    losses = {(name, kind): [float(value) for value in values] for name, kind, *values in lines}
    assert len(losses) == 3 * 6
    for (name, kind), values in losses.items():
        assert values == pytest.approx(losses[name, "save-plain"], rel=1e-5), (name, kind)
    for name in ("adam", "muon", "soap"):
        for saved, count in (("plain", 3), ("fsdp", 3)):
            files = {file.name: file.read_bytes() for file in (tmp_path / name / saved).glob("*.safetensors")}
            assert len(files) == count
            assert set(files.values()) == {files[f"save-{saved}.safetensors"]}

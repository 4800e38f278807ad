"""A small world of everything the commands read, and a way to run a command in it and see how it ends."""

import contextlib
import io
import json
import logging
import os
import shutil
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.pictures import packed, striped

from skipless.cli import main
from skipless.data.image_files import prepare_images

RESULTS = Path(__file__).parents[2] / "results"
EXPERIMENT = {
    "name": "tiny",
    "model": {"vocab_size": 256, "width": 16, "depth": 2, "heads": 2, "length": 16, "activation": "gelu"},
    "data": {"folder": "data"},
    "train": {
        "steps": 4,
        "batch_size": 2,
        "compile": False,
        "checkpoint_every": 2,
        "log_every": 1,
        "eval_every": 4,
        "eval_tokens": 64,
        "probe_at": [0, 4],
        "precision": "fp32",
    },
}
OF_IMAGES = {
    "name": "vit",
    "model": {
        "vocab_size": 1,
        "width": 16,
        "depth": 2,
        "heads": 2,
        "length": 4,
        "mlp_init": "mirrored",
        "causal": False,
        "head": "pooled",
        "classes": 2,
        "images": {"side": 8},
    },
    "data": {"folder": "images"},
    "train": {**EXPERIMENT["train"], "probe_at": [], "label_smoothing": 0.1},
}
QUESTION = {"goal": "open it", "sol1": "pull", "sol2": "push", "label": 1}


@dataclass(frozen=True)
class Ending:
    """How a command ended: its exit code, what it wrote, and the traceback, if it ended in one."""

    code: int
    out: str
    err: str
    traceback: str = ""


def run(*words: object) -> Ending:
    """The command line in this process, from its entry to its exit code."""
    out, err, code, trace = io.StringIO(), io.StringIO(), 0, ""
    before, handlers = sys.argv, logging.getLogger().handlers[:]
    sys.argv = ["skipless", *map(str, words)]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        except BaseException:
            code, trace = 1, traceback.format_exc()
        finally:
            sys.argv = before
            logging.getLogger().handlers[:] = handlers
    return Ending(code, out.getvalue(), err.getvalue(), trace)


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, pictures, prepared data, runs, exports, an inspection, certificates, results and a task: each whole."""
    home = tmp_path_factory.mktemp("world")
    documents = [f"Document {number} says that foxes jump over dogs, {number} times." * 3 for number in range(60)]
    (home / "text.txt").write_text("\n\n\n".join(documents))
    (home / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    (home / "experiment.json").write_text(json.dumps(EXPERIMENT))
    (home / "vit.json").write_text(json.dumps(OF_IMAGES))
    striped(home / "pictures", train=3, test=2, side=8)
    packed(home / "pictures", "", home / "pictures.tar.xz")
    prepare_images(home / "pictures", home / "images")
    (home / "tasks").mkdir()
    (home / "tasks" / "piqa.validation.jsonl").write_text(json.dumps(QUESTION) + "\n")
    (home / "results" / "logs").mkdir(parents=True)
    shutil.copy(RESULTS / "skips-small.json", home / "results")
    shutil.copy(RESULTS / "logs" / "skips-small.jsonl", home / "results" / "logs")
    with inside(home):
        for words in (
            "prepare lines.jsonl --bytes --valid-fraction 0.3 --out data --workers 1",
            "train experiment.json --out run --device cpu",
            "export run --out export",
            "train vit.json --out vit-run --device cpu",
            "export vit-run --out vit-export",
            "eval vit-run --device cpu --json evaluation.json",
            "inspect run --length 8 --json inspection.json",
            "kernels e-spa --depth 3 --length 6 --no-figure --json certificates.json",
        ):
            ending = run(*words.split())
            assert ending.code == 0, ending
        shutil.copytree("run", "stopped")  # a run that has not come to its end
        for name in ("finished.json", "model.safetensors"):
            (Path("stopped") / name).unlink()
    return home


@pytest.fixture
def here(world: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the world to damage, as the working folder."""
    place = tmp_path / "world"
    shutil.copytree(world, place)
    with inside(place):
        yield place

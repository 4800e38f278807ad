"""Training on images: it learns, resumes bit for bit, and judges by loss and accuracy."""

import dataclasses
import json
import math
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.pictures import striped
from tests.processes import Program

import skipless
from skipless.data.image_files import prepare_images
from skipless.data.image_loader import Augmentation, ImageLoader
from skipless.data.image_store import ImageStore
from skipless.files import write_hashes
from skipless.model.config import Images
from skipless.model.transformer import Transformer
from skipless.paper.recipes import recipe, with_data
from skipless.training.accuracy import by_class, class_table, confusions, evaluate_images
from skipless.training.config import DataConfig, Experiment, TrainConfig
from skipless.training.cuda_graph import GraphedStep
from skipless.training.distributed import World
from skipless.training.load import load_image_model, load_model
from skipless.training.optim.build import build_optimizer, use_tensor_rates
from skipless.training.run import read_metrics, read_result
from skipless.training.trainer import TrainStep, train

HERE = World(0, 1, torch.device("cpu"))
RUN = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from skipless.training.config import Experiment
from skipless.training.trainer import train
train(Experiment.from_json(Path(sys.argv[1]).read_text()), sys.argv[2], resume=True, device="cpu", quiet=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("images")
    prepare_images(striped(place / "source"), place / "data")
    return place / "data"


def experiment_on(folder: Path, name: str = "vit/mirrored", **train_fields) -> Experiment:
    """Three blocks of width 32 on 16 × 16, as the recipe but for sizes."""
    sizes = {"model.depth": 3, "model.width": 32, "model.heads": 2, "data.folder": str(folder)}
    schedule = {"steps": 24, "batch_size": 8, "precision": "fp32", "compile": False, "log_every": 4, "eval_every": 12}
    schedule |= {"checkpoint_every": 6, **train_fields}
    fields = {f"train.{name}": value for name, value in schedule.items()}
    return with_data(recipe(name).with_fields({**sizes, **fields}), given=())


@pytest.mark.parametrize("name", ["vit/mirrored", "vit/mirrored-u-spa", "vit/pre-ln"])
def test_it_learns(folder, tmp_path, name):
    """From half of the answers right to nearly all, under shifts and mirror images."""
    experiment = experiment_on(folder, name, steps=120, batch_size=16, eval_every=120, checkpoint_every=0)
    result = train(experiment, tmp_path / "run", device="cpu", quiet=True)
    assert result.valid is not None
    assert result.valid.accuracy > 0.9
    assert result.valid.images == 32
    assert result.train_loss < 0.69


@pytest.mark.parametrize("optimiser", ["adam", "muon", "soap"])
def test_every_optimiser_trains(folder, tmp_path, optimiser):
    experiment = experiment_on(folder, steps=40, eval_every=40).with_fields({"optimizer.name": optimiser})
    experiment = experiment.with_fields({} if optimiser == "muon" else {"optimizer.rate": 1e-3})
    train(experiment, tmp_path / "run", device="cpu", quiet=True)
    losses = [line["loss"] for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert sum(losses[-3:]) < sum(losses[:3])


def test_the_log_has_loss_and_accuracy_of_all_held_out_images(folder, tmp_path):
    experiment = experiment_on(folder, probe_at=(0,))
    result = train(experiment, tmp_path / "run", device="cpu", quiet=True)
    lines = [line for line in read_metrics(tmp_path / "run") if "valid_accuracy" in line]
    assert [line["step"] for line in lines] == [12, 24]
    assert read_result(tmp_path / "run")["valid"] == {
        name: lines[-1][f"valid_{name}"] for name in ("loss", "accuracy", "images")
    }
    model = skipless.load(tmp_path / "run")
    store = ImageStore(folder, "valid")
    found = evaluate_images(model, ImageLoader(store, 7))
    assert (found.loss, found.accuracy) == (pytest.approx(result.valid.loss, rel=1e-5), result.valid.accuracy)
    batch = ImageLoader(store, 32).batch(0)
    with torch.no_grad():
        logits = model(batch.inputs)
    assert found.accuracy == (logits.argmax(1) == batch.targets).double().mean().item()
    assert found.loss == pytest.approx(torch.nn.functional.cross_entropy(logits, batch.targets).item(), rel=1e-5)
    seen = torch.stack([batch.targets, logits.argmax(1)], dim=1)
    assert sorted(map(tuple, found.answers.tolist())) == sorted(map(tuple, seen.tolist()))
    assert (tmp_path / "run" / "probes" / "step-00000000.npz").is_file()


def test_a_killed_run_ends_as_one_that_was_not(folder, tmp_path):
    """The same weights and the same log, bit for bit."""
    experiment = experiment_on(folder)
    (tmp_path / "experiment.json").write_text(experiment.to_json())
    whole = Program(RUN, tmp_path / "experiment.json", tmp_path / "whole")
    assert whole.wait(120) == 0, whole.outputs()
    killed = Program(RUN, tmp_path / "experiment.json", tmp_path / "killed")
    while not any((tmp_path / "killed" / "checkpoints").glob("step-*6")):
        assert killed.poll() is None, killed.outputs()
    killed.signal(signal.SIGKILL)
    killed.wait(60)
    again = Program(RUN, tmp_path / "experiment.json", tmp_path / "killed")
    assert again.wait(120) == 0, again.outputs()
    logs = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "killed")]
    assert logs[0] == logs[1]
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


class Eager:
    """Stands in for CUDA: what is captured is run again."""

    def warm_up(self, function):
        function()

    def capture(self, function):
        return function


def test_a_graph_of_the_step_takes_images(folder):
    """Its own tensors are filled with each batch, moves included."""
    experiment = experiment_on(folder)
    results = []
    for graphed in (False, True):
        torch.manual_seed(0)
        model = Transformer(experiment.model, impl="sdpa")
        optimizer = build_optimizer(model, experiment.optimizer)
        use_tensor_rates(optimizer)
        step = TrainStep(model, optimizer, experiment.train, HERE, clip=0.1, packed=False)
        advance = GraphedStep(step, Eager()) if graphed else step
        loader = ImageLoader(ImageStore(folder), 8, augmentation=Augmentation())
        results.append([advance(number, loader.batch(number))[0].item() for number in range(5)])
    assert results[0] == results[1]


def test_accuracy_by_class_and_what_is_taken_for_what():
    answers = np.array([(0, 0), (0, 1), (0, 1), (1, 1), (1, 0), (2, 2), (2, 2), (2, 2), (2, 1)])
    results = by_class(answers, ("cat", "dog", "ship", "never"))
    assert [(each.images, each.right, each.taken_for) for each in results] == [
        (3, 1, {"dog": 2}),
        (2, 1, {"cat": 1}),
        (4, 3, {"dog": 1}),
        (0, 0, {}),
    ]
    assert math.isnan(results[3].accuracy)
    assert confusions(results) == [("cat", "dog", 2), ("dog", "cat", 1), ("ship", "dog", 1)]
    head, rows = class_table(results)
    assert head[0] == "class"
    assert rows == [
        ["cat", "3", "33.3%", "dog (2)"],
        ["dog", "2", "50.0%", "cat (1)"],
        ["ship", "4", "75.0%", "dog (1)"],
    ]
    assert class_table(results, most=1)[1] == [rows[0], ["the 2 others", "6", "66.7%", ""]]


def test_a_run_keeps_the_names_of_its_classes(folder, tmp_path):
    """Hashed as the rest: a file that differs is refused, and a run without one asks its data."""
    run, experiment = tmp_path / "run", experiment_on(folder, steps=2, checkpoint_every=1)
    train(experiment, run, device="cpu", quiet=True)
    assert json.loads((run / "classes.json").read_text()) == ["across", "along"]
    assert "classes.json" in json.loads((run / "hashes.json").read_text())["files"]
    gone = experiment.with_fields({"data.folder": "gone"}).to_json().encode() + b"\n"
    (run / "experiment.json").write_bytes(gone)
    write_hashes(run, ["experiment.json", "classes.json", "metrics.jsonl"])
    for path in (run, run / "checkpoints" / "step-000002"):
        assert load_image_model(path).classes == ("across", "along")
    whole = (run / "classes.json").read_bytes()
    (run / "classes.json").write_bytes(whole.replace(b"across", b"below!"))
    with pytest.raises(ValueError, match=r"classes\.json is damaged"):
        load_image_model(run)
    (run / "classes.json").write_bytes(b'["across"]')
    write_hashes(run, ["experiment.json", "classes.json", "metrics.jsonl"])
    with pytest.raises(ValueError, match="it names 1 classes, and the network has 2"):
        load_image_model(run)
    (run / "classes.json").unlink()
    write_hashes(run, ["experiment.json", "metrics.jsonl"])
    assert load_image_model(run).classes is None
    (run / "experiment.json").write_text(experiment.to_json())
    write_hashes(run, ["experiment.json", "metrics.jsonl"])
    assert load_image_model(run).classes == ("across", "along")


def test_shares_of_ranks_add_up(folder):
    experiment = experiment_on(folder)
    torch.manual_seed(0)
    model, store = Transformer(experiment.model), ImageStore(folder, "valid")
    whole = evaluate_images(model, ImageLoader(store, 6))
    parts = [evaluate_images(model, ImageLoader(store, 6, 0, rank, 3)) for rank in range(3)]
    assert sum(part.images for part in parts) == whole.images == 32
    assert sum(part.loss * part.images for part in parts) / 32 == pytest.approx(whole.loss, rel=1e-6)
    assert sum(part.accuracy * part.images for part in parts) / 32 == pytest.approx(whole.accuracy)
    some = [evaluate_images(model, ImageLoader(store, 6, 0, rank, 3), most=7) for rank in range(3)]
    assert sum(part.images for part in some) == 7
    assert evaluate_images(model, ImageLoader(store, 6), most=7).images == 7


def test_what_the_data_say_is_taken_from_them(folder, caplog):
    experiment = experiment_on(folder)
    manifest = ImageStore(folder).manifest
    assert experiment.model.images == Images(16, 4, 3, manifest.mean, manifest.std)
    assert (experiment.model.classes, experiment.model.length, experiment.train.length) == (2, 16, 16)
    assert experiment.model.scheme.repeat_rate == round(ImageStore(folder).repeat_rate(4), 3)
    assert Experiment.from_json(experiment.to_json()) == experiment
    wider = experiment.with_fields({"model.images.patch": 8})
    assert (wider.model.length, wider.train.length) == (4, 4)
    kept = with_data(experiment.with_fields({"model.scheme.repeat_rate": 0.3}), given=("model.scheme.repeat_rate",))
    assert kept.model.scheme.repeat_rate == 0.3
    with_data(experiment.with_fields({"model.scheme.repeat_rate": 0.01}), given=("model.scheme.repeat_rate",))
    assert "the scheme assumes repeat_rate=0.01 and these images have 0.409" in caplog.text


def test_another_folder_may_serve_for_validation(folder, tmp_path, caplog):
    prepare_images(striped(tmp_path / "other", train=2, test=9), tmp_path / "valid")
    experiment = experiment_on(folder, steps=2, eval_every=2).with_fields({"data.valid": str(tmp_path / "valid")})
    result = train(experiment, tmp_path / "run", device="cpu", quiet=True)
    assert result.valid is not None
    assert result.valid.images == 18
    shutil.rmtree(tmp_path / "other" / "test")
    prepare_images(tmp_path / "other", tmp_path / "alone")
    none = experiment_on(tmp_path / "alone", steps=2, eval_every=2)
    assert train(none, tmp_path / "none", device="cpu", quiet=True).valid is None
    assert "no validation during training" in caplog.text
    (tmp_path / "other" / "train" / "along").rename(tmp_path / "other" / "train" / "askew")
    shutil.copytree(tmp_path / "other" / "train", tmp_path / "other" / "test")
    prepare_images(tmp_path / "other", tmp_path / "classes")
    other = experiment.with_fields({"data.valid": str(tmp_path / "classes")})
    with pytest.raises(ValueError, match="cannot serve for validation: its images are of other classes"):
        train(other, tmp_path / "third", device="cpu", quiet=True)


def test_what_does_not_go_together(folder, tmp_path, prepared):
    experiment = experiment_on(folder)

    def refused(words: str, **parts) -> None:
        with pytest.raises(ValueError, match=words):
            train(dataclasses.replace(experiment, **parts), tmp_path / "run", device="cpu", quiet=True)

    refused(
        "model.classes=3, and the images of .* have 2; use --set model.classes=2",
        model=experiment.model.replace(classes=3),
    )
    refused("is of tokens, and images are asked for", data=DataConfig(folder=str(prepared)))
    refused("a network of images needs some: `skipless prepare", data=DataConfig())
    refused("data.packed=True is about documents", data=dataclasses.replace(experiment.data, packed=True))
    with pytest.raises(ValueError, match="a network of images needs some"):
        with_data(recipe("vit/mirrored"))
    with pytest.raises(ValueError, match="is of images, and tokens are asked for"):
        with_data(recipe("wikitext103/e-spa").with_fields({"data.folder": str(folder)}))
    with pytest.raises(ValueError, match=r"train\.length=32, and an image of this network has 16 patches"):
        dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, length=32))
    with pytest.raises(ValueError, match=r"train.label_smoothing=0.1 with model.head='lm'"):
        Experiment("text", train=TrainConfig(label_smoothing=0.1))
    with pytest.raises(ValueError, match=r"data\.crop is -1"):
        DataConfig(crop=-1)


def test_commands_for_text_say_that_it_is_a_network_of_images(folder, tmp_path):
    train(experiment_on(folder, steps=2, eval_every=2), tmp_path / "run", device="cpu", quiet=True)
    with pytest.raises(ValueError, match="holds a network of images, and this is for text"):
        load_model(tmp_path / "run")
    checkpoint = next((tmp_path / "run" / "checkpoints").iterdir())
    whole, saved = skipless.load(tmp_path / "run"), skipless.load(checkpoint)
    images = ImageLoader(ImageStore(folder), 4).batch(0).inputs
    assert torch.equal(whole(images), saved(images))
    assert skipless.inspect(whole, images).verdict.kind in ("preserved", "drift")
    assert json.loads((tmp_path / "run" / "hashes.json").read_text())["files"].keys() == {
        "classes.json",
        "experiment.json",
        "metrics.jsonl",
    }

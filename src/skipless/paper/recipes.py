"""Recipes: a preset's network with its schedule and its data, as an Experiment; and training by one call."""

import dataclasses
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipless.console import Progress, nearest
from skipless.data.image_store import ImageStore, holds_images, read_images
from skipless.data.prepare import Preparation, default_folder, prepare
from skipless.data.store import read_manifest
from skipless.data.text import DATASETS
from skipless.data.tokenizer import Bytes, TrainUnigram
from skipless.files import read_json
from skipless.model import presets
from skipless.model.config import ModelConfig
from skipless.training.config import NO_IMAGES, DataConfig, Experiment, OptimizerConfig, TrainConfig, by_depth
from skipless.training.run import EXPERIMENT

if TYPE_CHECKING:
    from skipless.training.trainer import Result

logger = logging.getLogger("skipless")

# Adam rates that were best on a coarse grid at 36 blocks × 512; the paper tunes its own per network and prints none.
VANILLA_RATE, SKIP_RATE = 3e-5, 5e-4
# The best of results/mirrored-small.md: 36 blocks × 256 over 1,500 steps. At 512 the best rate is the same, and over
# depth it falls as 1/depth: 36, 72, 108 and 216 blocks end within .012 of each other by that law, results/
# mirrored-depth-small.md. Over steps no law has been measured.
MIRRORED = OptimizerConfig(
    "muon", 2e-3, embedding_rate=1e-2, role_rates={"query": 3.0, "key": 3.0, "up": 0.5, "down": 0.5}
)
# With readers: the best of six on a CPU, results/mirrored-gap.md#heads-that-read.
READERS_ROLE_RATES = {"query": 1.5, "key": 1.5, "value": 0.5, "output": 0.5, "up": 0.5, "down": 0.5}
GAIN_RATE = 1e-2
HEAD_WIDTH = 64
# Networks of images, 12 blocks × 256 over 50 epochs of CIFAR-10: a first guess, around which paper/vision.py tunes.
IMAGE_EPOCHS, IMAGE_BATCH, IMAGE_COUNT = 50, 256, 50_000
IMAGE_STEPS = round(IMAGE_EPOCHS * IMAGE_COUNT / IMAGE_BATCH)
IMAGE_EMBEDDING_RATE, LABEL_SMOOTHING = 2e-3, 0.1
IMAGE_SCHEDULE = TrainConfig(
    IMAGE_STEPS,
    IMAGE_BATCH,
    label_smoothing=LABEL_SMOOTHING,
    eval_every=round(IMAGE_COUNT / IMAGE_BATCH) * 5,
    eval_tokens=1 << 20,  # 16,384 images of 64 patches
)
IMAGE_RATES = {"pre-ln": 1e-2, "mirrored": 3e-3, "mirrored-u-spa": 3e-3, "e-spa": 1e-3, "u-spa": 1e-3}


def recipe(name: str) -> Experiment:
    """The Experiment of a preset under App. H: corpus, steps, batch, length, warm-up, Adam and its rates.

    A short name is wikitext103's: recipe("e-spa") is recipe("wikitext103/e-spa"). recipe("mirrored") has the schedule
    and the rates that were measured at its size: Muon, 1,500 steps of 32 × 256 tokens. recipe("vit/mirrored") and its
    kin are trained on images: Muon, 50 epochs of CIFAR-10.
    """
    name = presets.full_name(name)
    model = presets.preset(name)
    group, _, short = name.partition("/")
    data = DataConfig(corpus="c4" if group == "c4" else "wikitext-103", vocab=model.vocab_size)
    gain_rate = GAIN_RATE if model.bias_gain else None
    if model.images is not None:
        data, train = DataConfig(corpus="cifar10"), IMAGE_SCHEDULE
        roles = MIRRORED.role_rates if model.mlp_init == "mirrored" else {}
        rates: dict[str, Any] = {"embedding_rate": IMAGE_EMBEDDING_RATE, "gain_rate": gain_rate}
        optimizer = OptimizerConfig("muon", IMAGE_RATES[short], role_rates=dict(roles), **rates)
    elif group == "mirrored":
        train = TrainConfig(steps=1500, batch_size=32)
        slower = {"value": 0.1, "output": 0.1} if model.value_output == "trained" else {}
        roles = READERS_ROLE_RATES if model.readers else {**MIRRORED.role_rates, **slower}
        optimizer = dataclasses.replace(MIRRORED, role_rates=dict(roles), gain_rate=gain_rate)
    else:
        steps, batch, embedding_rate = (50_000, 8, 5e-4) if group == "c4" else (100_000, 16, 2e-4)
        train = TrainConfig(steps=steps, batch_size=batch)
        optimizer = OptimizerConfig(rate=VANILLA_RATE if model.skipless else SKIP_RATE, embedding_rate=embedding_rate)
    return Experiment(name.replace("/", "-"), model, data, optimizer, train)


def train(
    experiment: str | Path | Experiment,
    *,
    data: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    device: str | None = None,
    tensorboard: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> "Result":
    """Train a network and keep it in a folder: train("e-spa", data="data/wiki", depth=12, width=128, steps=200).

    experiment: a recipe's name, an experiment.json or an Experiment. data: a folder that `skipless prepare` made.
    settings: any field of ModelConfig, its scheme, TrainConfig, OptimizerConfig or DataConfig by its plain name, such
    as gamma_final=0.2, steps=500, rate=1e-3, packed=True; optimizer="muon" is the optimiser's name. Vocabulary and
    repeat rate come from the data and the warm-up from the steps, unless set here. out: the run's folder, by default
    runs/NAME, which skipless.load opens. resume=True goes on where an earlier call stopped.
    """
    from skipless.training import trainer

    chosen, given = plan(experiment, data)
    chosen = settle(chosen, given, {_path_of(chosen, name): value for name, value in settings.items()})
    folder = chosen.folder if out is None else out
    return trainer.train(chosen, folder, resume=resume, device=device, tensorboard=tensorboard, quiet=quiet)


def plan(experiment: str | Path | Experiment, data: str | Path | None = None) -> tuple[Experiment, set[str]]:
    """The experiment of a recipe's name, an experiment.json or itself, and which fields `with_data` is to leave alone.

    A recipe's vocabulary and repeat rate are those of the paper's corpus, and follow the data at hand; those of an
    experiment are given.
    """
    by_name = isinstance(experiment, str | Path) and Path(experiment).suffix != ".json"
    found = experiment if isinstance(experiment, Experiment) else _named(experiment)
    if data is not None:
        found = found.with_fields({"data.folder": str(data)})
    return found, set() if by_name else set(GIVEN)


def settle(
    experiment: Experiment, given: Collection[str], values: Mapping[str, Any], prepare: bool = True
) -> Experiment:
    """What `plan` found, with fields set by their dotted names, and then what follows from sizes and data.

    prepare=False: no corpus is prepared; without a folder nothing follows from the data.
    """
    followed = {} if given else by_law(experiment, values) | by_images(experiment, values)
    experiment = experiment.with_fields({**followed, **values})
    chosen = {*given, *values}
    scheme = values.get("model.scheme")
    if isinstance(scheme, str) and not scheme.startswith("{"):  # its name alone: its fields are nobody's choice
        chosen.remove("model.scheme")
    return with_data(experiment, given=chosen) if prepare or experiment.data.folder is not None else experiment


def by_law(recipe: Experiment, values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a mirrored recipe that follow from the sizes in `values`, by their dotted names; none for others.

    The rate follows from the depth, so that rate·depth stays. Heads, 64 wide, follow from the width, and readers keep
    the recipe's share of them. A field that `values` names does not follow.
    """
    found: dict[str, Any] = {}
    if not recipe.name.startswith("mirrored-"):
        return found
    depth, width = (str(values.get(name, "")) for name in ("model.depth", "model.width"))
    rate, asked = recipe.optimizer.rate, {"optimizer.rate", "optimizer.name"} & set(values)
    if rate is not None and not asked and depth.isdecimal() and int(depth):
        found["optimizer.rate"] = by_depth(rate, int(depth), at=recipe.model.depth)
    if width.isdecimal() and int(width) and int(width) % HEAD_WIDTH == 0 and "model.heads" not in values:
        found["model.heads"] = int(width) // HEAD_WIDTH
        if recipe.model.readers and "model.readers" not in values:
            found["model.readers"] = max(found["model.heads"] * recipe.model.readers // recipe.model.heads, 1)
    if found:
        logger.info("by the law for this size: %s", ", ".join(f"{name}={value:g}" for name, value in found.items()))
    return found


def by_images(recipe: Experiment, values: Mapping[str, Any]) -> dict[str, Any]:
    """The side of the prepared images, which a patch among `values` has to divide; nothing where it is given."""
    folder = recipe.data.folder
    if recipe.model.images is None or folder is None or "model.images.side" in values or not holds_images(folder):
        return {}
    return {"model.images.side": read_images(folder).side}


def _named(name: str | Path) -> Experiment:
    if not isinstance(name, str | Path):
        raise ValueError(
            f"experiment is a {type(name).__name__}; it must be a recipe's name such as 'e-spa', an experiment.json or "
            'an Experiment, such as Experiment("mine", model.config)'
        )
    path = Path(name)
    if (path / EXPERIMENT).is_file():
        raise ValueError(f"{path} is a run: give {path / EXPERIMENT}, and --out {path} --resume to go on with it")
    if path.suffix != ".json":
        return recipe(str(name))
    if not path.is_file():
        raise ValueError(f"{path} does not exist; name a recipe (`skipless train --list`) or a run's experiment.json")
    return read_json(path, Experiment.from_dict, what="is not an experiment")


def _path_of(experiment: Experiment, name: str) -> str:
    """Where a plain name of a field stands: "depth" is "model.depth"."""
    if name in ("name", "optimizer"):
        return {"name": "name", "optimizer": "optimizer.name"}[name]
    kinds = {"model": ModelConfig, "train": TrainConfig, "optimizer": OptimizerConfig, "data": DataConfig}
    kinds["model.scheme"] = type(experiment.model.scheme)
    fields = {field.name: f"{part}.{field.name}" for part, kind in kinds.items() for field in dataclasses.fields(kind)}
    if name not in fields:
        raise ValueError(f"train() has no setting {name!r}; {nearest(name, fields)}")
    return fields[name]


# what the data would say otherwise
GIVEN = (
    "model.vocab_size",
    "model.scheme.repeat_rate",
    "data.vocab",
    *(f"model.images.{name}" for name in ("side", "channels", "mean", "std")),
    "model.classes",
)


def with_data(experiment: Experiment, root: str | Path = "data", *, given: Collection[str] = GIVEN) -> Experiment:
    """The experiment with data.folder set: if it was not, the corpus is prepared under `root` (nothing is downloaded).

    Vocabulary size and repeat rate become those of the tokens, unless they are among the dotted names `given`; then a
    repeat rate that is far from the tokens' is a warning. A vocabulary of at most 257 means bytes. A network of images
    takes size, classes, mean and deviation from them.
    """
    model = experiment.model
    assumed = getattr(model.scheme, "repeat_rate", None)
    if model.images is None:
        what, experiment = "tokens", _with_folder(experiment, root, given)
        manifest = read_manifest(Path(experiment.data.folder or ""))
        values: dict[str, Any] = {"model.vocab_size": manifest.tokenizer.vocab_size}
        rate = manifest.splits["train"].repeat_rate if "train" in manifest.splits else None
    elif experiment.data.folder is None:
        raise ValueError(NO_IMAGES)
    else:
        what, store = "images", ImageStore(experiment.data.folder)
        values = {f"model.images.{name}": getattr(store.manifest, name) for name in ("side", "channels", "mean", "std")}
        values["model.classes"] = len(store.manifest.classes)
        experiment = experiment.with_fields({name: value for name, value in values.items() if name not in given})
        rate = None if assumed is None else round(store.repeat_rate(model.images.patch), 3)

    values = {name: value for name, value in values.items() if name not in given}
    if assumed is not None and rate is not None:
        if not any(name in given for name in ("model.scheme", "model.scheme.repeat_rate")):
            values["model.scheme.repeat_rate"] = round(rate, 3)
        elif not 0.5 < max(assumed, 1e-4) / max(rate, 1e-4) < 2.0:
            words = "the scheme assumes repeat_rate=%g and these %s have %.3g; norms will drift at initialisation: "
            logger.warning(words + "--set model.scheme.repeat_rate=%.3g", assumed, what, rate, rate)
    if values:
        words = ", ".join(f"{name.rpartition('.')[2]}={value}" for name, value in values.items())
        logger.info("from the %s of %s: %s", what, experiment.data.folder, words)
    return experiment.with_fields(values)


def _with_folder(experiment: Experiment, root: str | Path, given: Collection[str]) -> Experiment:
    """The experiment with data.folder set, of tokens: its corpus is prepared if it was not."""
    data = experiment.data
    if data.valid is not None:
        read_manifest(Path(data.valid))  # before an hour of tokenising
    if data.folder is not None:
        return experiment
    asked = "model.vocab_size" in given and "data.vocab" not in given
    vocab = experiment.model.vocab_size if asked or data.vocab is None else data.vocab
    return experiment.with_fields({"data.folder": str(prepared(data.corpus, vocab, root))})


def check_data(folder: Path) -> None:
    """Refuse what is neither a folder of prepared tokens nor one of images."""
    read_images(folder) if holds_images(folder) else read_manifest(folder)


def prepared(corpus: str, vocab: int, root: str | Path = "data") -> Path:
    """The folder under `root` of a corpus, by name or path, in so many pieces; up to 257 are bytes. Made if need be."""
    folder = default_folder(corpus, "bytes" if vocab <= 257 else str(vocab), root)
    if corpus in DATASETS:
        kind = "--bytes" if vocab <= 257 else f"--vocab {vocab}"
        raise ValueError(
            f"{corpus} comes from the network, which is used only where it is asked for: "
            f"`skipless prepare {corpus} --download {kind} --out {folder}`, then --data {folder}"
        )
    tokenizer = Bytes() if vocab <= 257 else TrainUnigram(vocab)
    prepare(Preparation(corpus, tokenizer=tokenizer), folder, progress=Progress())
    return folder

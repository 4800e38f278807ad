"""What a run is fed: batches to train on, and the held-out part of its data to judge it by; tokens or images."""

import logging

from torch import nn

from skipless.data.image_loader import Augmentation, ImageLoader
from skipless.data.image_store import ImageStore
from skipless.data.loader import TokenLoader
from skipless.data.store import TokenStore
from skipless.model.config import ModelConfig
from skipless.training.accuracy import ImageResult, evaluate_images
from skipless.training.config import NO_IMAGES, Experiment, TrainConfig
from skipless.training.distributed import World
from skipless.training.evaluate import EvalResult, evaluate_loss

logger = logging.getLogger("skipless")


class TextFeed:
    """Windows of a prepared folder's tokens, judged by the loss on those of its held-out split."""

    result = EvalResult

    def __init__(self, experiment: Experiment, world: World):
        config, data = experiment.train, experiment.data
        self.config, self.world = config, world
        store = TokenStore(data.folder or "")
        if store.vocab_size > experiment.model.vocab_size:
            raise ValueError(
                f"model.vocab_size={experiment.model.vocab_size} is smaller than the {store.vocab_size} tokens of "
                f"{data.folder}; use --set model.vocab_size={store.vocab_size}"
            )
        _check_length(experiment)
        order = (config.seed, world.rank, world.size)
        self.loader = TokenLoader(store, config.length, config.batch_size, *order, documents=data.packed)
        self.valid = self._held_out(experiment, store)

    def evaluate(self, model: nn.Module) -> EvalResult:
        assert self.valid is not None
        config, world = self.config, self.world
        most = max(config.eval_tokens // world.size, 1)
        share = evaluate_loss(model, self.valid, max_tokens=most, device=world.device, precision=config.precision)
        nats, tokens, size = world.totals(share.loss * share.tokens, share.tokens, share.bytes or 0)
        return EvalResult.of(nats, int(tokens), int(size) or None)

    def _held_out(self, experiment: Experiment, trained: TokenStore) -> TokenLoader | None:
        data, config, world = experiment.data, self.config, self.world
        if not config.eval_tokens:
            return None
        try:
            store = TokenStore(data.valid or trained.folder, "valid")
            if data.valid is not None:
                store.check_tokenizer(trained.tokenizer)
            order = (0, world.rank, world.size)
            return TokenLoader(store, config.length, config.batch_size, *order, documents=data.packed)
        except ValueError as error:
            if data.valid is not None:
                raise ValueError(f"data.valid={data.valid} cannot serve for validation: {error}") from error
            logger.warning("no validation during training: %s", error)
            return None


class ImageFeed:
    """Images of a prepared folder, shifted and mirrored, judged by loss and accuracy on those of its held-out split."""

    result = ImageResult

    def __init__(self, experiment: Experiment, world: World):
        config, data = experiment.train, experiment.data
        self.config, self.world = config, world
        store = ImageStore(data.folder or "")
        if data.packed:
            raise ValueError("data.packed=True is about documents, and images are none; use --set data.packed=false")
        check_images(experiment.model, store, "use --set {name}={value}")
        if data.crop >= (side := store.manifest.side):
            usual = f"use --set data.crop={side // 8}, an eighth of a side"
            raise ValueError(f"data.crop={data.crop} may shift images of {side} × {side} out of sight; {usual}")
        order = (config.seed, world.rank, world.size)
        self.loader = ImageLoader(store, config.batch_size, *order, augmentation=Augmentation(data.crop, data.flip))
        self.valid = self._held_out(experiment, store) if config.eval_tokens else None

    def evaluate(self, model: nn.Module) -> ImageResult:
        """Loss and accuracy on the held-out images: all, or as many as eval_tokens are patches of."""
        assert self.valid is not None
        config, world = self.config, self.world
        most = max(config.eval_tokens // config.length, 1)
        share = evaluate_images(model, self.valid, most=most, device=world.device, precision=config.precision)
        return ImageResult.of(*world.totals(share.loss * share.images, share.accuracy * share.images, share.images))

    def _held_out(self, experiment: Experiment, trained: ImageStore) -> ImageLoader | None:
        other, config, world = experiment.data.valid, self.config, self.world
        if other is None and "valid" not in trained.manifest.splits:
            logger.warning("no validation during training: %s has no images for it", trained.folder)
            return None
        store = ImageStore(other or trained.folder, "valid")
        if store.manifest.classes != trained.manifest.classes or store.shape != trained.shape:
            raise ValueError(
                f"data.valid={other} cannot serve for validation: its images are of other classes or sizes"
            )
        return ImageLoader(store, config.batch_size, 0, world.rank, world.size)


Feed = TextFeed | ImageFeed  # all that the loop knows of the data


def open_feed(experiment: Experiment, world: World) -> Feed:
    """The feed of an experiment whose data is prepared."""
    data = experiment.data
    if data.folder is None and experiment.model.images is None:
        raise ValueError(f"data.folder is not set: prepare {data.corpus!r} first, or let `skipless train` do it")
    if data.folder is None:
        raise ValueError(NO_IMAGES)
    feed = TextFeed(experiment, world) if experiment.model.images is None else ImageFeed(experiment, world)
    _check_rows(experiment.train, world)
    return feed


def check_images(model: ModelConfig, store: ImageStore, advice: str) -> None:
    """Refuse a network that is not of the store's images. In advice {name} is the field, {value} what it should be."""
    manifest, folder = store.manifest, store.folder
    assert model.images is not None
    pairs = {
        "model.images.side": (model.images.side, manifest.side),
        "model.images.channels": (model.images.channels, manifest.channels),
        "model.classes": (model.classes, len(manifest.classes)),
        "model.head": (model.head, "pooled"),
    }
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            seen = f"{name}={ours}, and the images of {folder} have {theirs}"
            if name == "model.head":
                seen = f"{name}={ours!r}, and an image has one class"
            raise ValueError(f"{seen}; {advice.format(name=name, value=theirs)}")
    seen = {"mean": model.images.mean, "std": model.images.std}
    for name, theirs in {"mean": manifest.mean, "std": manifest.std}.items():
        if any(abs(a - b) > 10.0 for a, b in zip(seen[name], theirs, strict=True)):
            logger.warning("model.images.%s is %s, and the images of %s have %s", name, seen[name], folder, theirs)


def _check_length(experiment: Experiment) -> None:
    """Refuse rows longer than attention is calibrated for, and say where network and rows are of different lengths."""
    rows, model = experiment.train.length, experiment.model
    if model.max_length is not None and rows > model.max_length:
        raise ValueError(
            f"train.length={rows} is more than model.length={model.length}, for which attention is calibrated; use "
            f"--set model.length={rows}"
        )
    if rows != model.length:
        logger.warning("train.length=%d and model.length=%d differ: is that meant?", rows, model.length)


def _check_rows(config: TrainConfig, world: World) -> None:
    """Every process must cut its own rows into micro-batches, not only the batch as a whole."""
    rows, parts = config.batch_size // world.size, config.accumulate
    if rows % parts:
        fits = min((n for n in range(1, rows + 1) if rows % n == 0), key=lambda n: abs(n - parts))
        size = -(-rows // parts) * parts * world.size
        raise ValueError(
            f"train.accumulate={parts} does not divide the {rows} rows that each of {world.size} processes has of "
            f"train.batch_size={config.batch_size}; use --set train.accumulate={fits}, or --set train.batch_size={size}"
        )

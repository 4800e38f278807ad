"""What a model is called with while it trains: padding, and the batch's shape, for whoever measures its blocks."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from inspect import signature

from torch import nn

from skipless.analysis.measure import Recorder
from skipless.analysis.request import padding, rows_and_length


@contextmanager
def listening(model: nn.Module, recorder: Recorder) -> Generator[None]:
    """In here a recorder learns of the attention_mask and the ids of its first forward.

    Every module around the blocks is listened to, since a wrapper's own arguments may be anything.
    """

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
        if recorder.described:
            return
        given = dict(zip(signature(module.forward).parameters, args, strict=False)) | kwargs
        wanted = recorder.wanted
        keep = padding(given) if wanted.keep is None else wanted.keep
        recorder.wanted = replace(wanted, keep=keep, given=wanted.given or rows_and_length(given))

    path = recorder.blocks[0][0].split(".")
    with ExitStack() as hooks:
        for depth in range(len(path)):
            around = model.get_submodule(".".join(path[:depth]))
            hooks.callback(around.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield

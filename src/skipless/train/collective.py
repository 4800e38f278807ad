"""What one process does for all: the main one writes files, and every other learns how that went."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

Result = TypeVar("Result")


def world_size() -> int:
    """How many processes train together; 1 where torch.distributed is not in use."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_main() -> bool:
    """Whether this process writes the files of the run."""
    return world_size() == 1 or dist.get_rank() == 0


def on_main(work: Callable[[], Result]) -> Result:
    """Call `work` in the main process; its result, or the error it ends with, comes to every process.

    So no process waits for another that has failed. All processes must get here.
    """
    if world_size() == 1:
        return work()
    outcome: list = [None, None]
    if is_main():
        try:
            outcome[0] = work()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]

"""Several processes: devices, wrapping in DDP or FSDP2, and what they tell each other."""

import os
import re
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from skipless.console import free_memory
from skipless.model.transformer import Transformer

T = TypeVar("T")
_PEER_GONE = re.compile("gloo|NCCL|[Cc]onnection (closed|reset|refused)|Broken pipe")
Strategy = Literal["auto", "ddp", "fsdp"]


@dataclass(frozen=True)
class World:
    """This process among all: its rank, how many there are, and its device."""

    rank: int
    size: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    @property
    def free_memory(self) -> float:
        """Bytes that are free on the device, those that torch keeps for later included."""
        if self.device.type != "cuda":
            return free_memory()
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return float(torch.cuda.mem_get_info(self.device)[0] + kept)

    def mean(self, value: Tensor) -> Tensor:
        """The mean over all processes, on every one."""
        if self.size > 1:
            dist.all_reduce(value)
            value = value / self.size
        return value

    def totals(self, *values: float) -> list[float]:
        """The sum of each over all processes."""
        sums = torch.tensor(values, dtype=torch.float64).to(self.device)
        return (self.mean(sums) * self.size).tolist()

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.size > 1:
            dist.barrier()

    def any(self, flag: bool) -> bool:
        """Whether it is so in any process, on every one."""
        return flag if self.size == 1 else self.mean(torch.tensor(float(flag), device=self.device)).item() > 0


@contextmanager
def join_world(device: str | None = None):
    """The World that torchrun describes, or a world of one. gloo on a CPU, NCCL on a GPU."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
    place = find_device(f"cuda:{local}" if kind == "cuda" else kind)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    started = size > 1 and not dist.is_initialized()
    if started:
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        world = World(rank, size, place)
        yield world
        world.wait()  # not after an error, which other processes may not share
    except RuntimeError as error:
        if size == 1 or not (isinstance(error, dist.DistError) or _PEER_GONE.search(str(error))):
            raise
        why = str(error).strip().partition("\n")[0]
        raise ConnectionError(
            f"process {rank} lost another one of the {size} that train together ({why}): start all of them again, with "
            "--resume"
        ) from error
    finally:
        if started:
            dist.destroy_process_group()


def exit_process() -> None:
    """End this process, if it is one of several, at once and with success; in a world of one do nothing.

    For the end of a program. gloo's threads hold the tensors of an exchange a moment longer, and FSDP keeps them alive
    beyond the group's end. If Python is torn down in that moment it aborts, and a finished run counts as failed.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def world_size() -> int:
    """How many processes train together; 1 where torch.distributed is not in use."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_main() -> bool:
    """Whether this process writes the files of the run."""
    return world_size() == 1 or dist.get_rank() == 0


def on_main(work: Callable[[], T]) -> T:
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


def distribute(model: Transformer, world: World, strategy: Strategy, half: torch.dtype | None) -> nn.Module:
    """The model as this world trains it: itself, replicated (DDP), or sharded block by block (FSDP2).

    "auto" replicates. FSDP2 casts to `half`, if given, block by block and reduces gradients in float32.
    """
    if world.size == 1:
        if strategy == "fsdp":
            raise ValueError("train.strategy is 'fsdp' in a world of one; start with torchrun, or use 'auto'")
        return model
    if strategy == "fsdp":
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
        mesh = dist.device_mesh.init_device_mesh(world.device.type, (world.size,))
        for block in model.each_block():
            block.layers()[0].sharded = True
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model
    ids = [world.device.index] if world.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)


def plain(model: nn.Module) -> Transformer:
    """The Transformer inside a DDP wrapper, or itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model  # ty: ignore[invalid-return-type]


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a DTensor, on every rank; any other tensor as it is."""
    return cast(Any, tensor).full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: Tensor) -> Tensor:
    """The rows of a DTensor that lie here, in its own memory; any other tensor as it is."""
    return cast(Any, tensor).to_local() if hasattr(tensor, "to_local") else tensor


def resharded(whole: Tensor, like: Tensor) -> Tensor:
    """The part of `whole`, equal on every rank, that `like` keeps here: placed as `like` is, without communication."""
    if not hasattr(like, "full_tensor"):
        return whole
    from torch.distributed.tensor import DTensor, Replicate  # loads slowly, and only sharded runs get here

    like = cast(DTensor, like)
    replicated = DTensor.from_local(whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    return replicated.redistribute(placements=like.placements)


def find_device(name: str | None = None) -> torch.device:
    """The device of that name, if torch can compute on it here; without one a GPU where there is one."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if name is None else name
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device is {name!r}, which torch does not know; use cpu, cuda, cuda:1, …") from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        seen, use = (f"{count} GPUs", "cuda:0") if count else ("no GPU", "cpu")
        raise ValueError(f"--device is {name!r}, but torch sees {seen}; use --device {use}")
    try:
        torch.ones(1, device=device).item()
    except Exception as error:  # backends that are not there raise whatever they like
        why = str(error).partition("\n")[0].partition(". ")[0]
        raise ValueError(
            f"--device is {name!r}, on which torch cannot compute here ({why}); use --device cpu"
        ) from error
    return device

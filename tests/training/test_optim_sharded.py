"""FSDP2 on two processes against one process: gathered matrices, the whole model's norm, and the checkpoint."""

import copy
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import multiprocessing

from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer
from skipless.training.config import OptimizerConfig
from skipless.training.optim.adam import clip_gradients
from skipless.training.optim.build import build_optimizer

# An odd vocabulary makes unequal shards. Zero queries would make gradients of rank 0 and a side of 24 products of rank
# 12: SOAP's bases would then be a matter of rounding, so neither is here.
CONFIG = ModelConfig(vocab_size=11, width=12, depth=2, heads=2, hidden=24, activation="gelu", query_key="normal")


def build():
    torch.manual_seed(0)
    return Transformer(CONFIG, impl="sdpa").double()  # in float32 rounding, not sharding, would part the runs


def train(model, optimizer, steps, start=0):
    norms = []
    for step in range(start, start + steps):
        tokens = torch.randint(0, 11, (4, 9), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        norms.append(clip_gradients(model.parameters(), 0.1).item())
        optimizer.step()
    return norms


def work(rank, folder):
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/rendezvous")
    for name in ("adam", "muon", "soap"):
        config = OptimizerConfig(name, rate=1e-2, precondition_every=2, max_precondition_width=12)
        whole, sharded = build(), build()
        for block in sharded.blocks:
            fully_shard(block)
        fully_shard(sharded)
        one, two = build_optimizer(whole, config), build_optimizer(sharded, config)
        expected, seen = train(whole, one, 5), train(sharded, two, 5)
        assert seen == pytest.approx(expected, rel=1e-8), name
        saved = copy.deepcopy(get_optimizer_state_dict(sharded, two))
        set_optimizer_state_dict(sharded, two, saved)
        train(whole, one, 2, start=5)
        train(sharded, two, 2, start=5)
        for (path, a), (_, b) in zip(whole.named_parameters(), sharded.named_parameters(), strict=True):
            torch.testing.assert_close(b.full_tensor(), a, rtol=1e-8, atol=1e-8, msg=lambda m, p=path: f"{p}: {m}")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # as skipless.training.distributed.exit_process does, and why


@pytest.mark.slow
def test_sharded_training_is_training(tmp_path: Path):
    multiprocessing.start_processes(work, args=(tmp_path,), nprocs=2, start_method="forkserver")

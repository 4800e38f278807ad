"""From a model and an OptimizerConfig to an optimiser: its groups, their rates, and the schedule of them."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from skipless.training.config import ROLES, OptimizerConfig
from skipless.training.optim.adam import FusedAdam
from skipless.training.optim.muon import Muon, keep_orthogonal
from skipless.training.optim.soap import SOAP

_DEVICE_FLAGS = ("fused", "foreach", "capturable", "renews_itself")
_VECTORS = ("bias", "content_bias", "position_bias")
_GAINS = ("residual", "value_gains", "attention_gains", "bias_gain")
# what torch.compile, DistributedDataParallel and activation checkpointing put into names
_WRAPPERS = ("_orig_mod", "module", "_checkpoint_wrapped_module")


class Composite(Optimizer):
    """Steps its parts in order. Groups and state are the parts' own, seen as one, so that saving needs nothing special.

    state_dict, load_state_dict and torch.distributed.checkpoint's get_state_dict and set_state_dict work as for any
    optimiser.
    """

    def __init__(self, *parts: Optimizer):
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    @property
    def begun(self) -> bool:
        """Whether every part's next step does the same as any later one."""
        return all(part.begun for part in self.parts if isinstance(part, SOAP))

    def renew(self) -> None:
        """What parts do between steps, out of a CUDA graph's reach: SOAP its bases."""
        for part in self.parts:
            if isinstance(part, SOAP):
                part.renew()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also what load_state_dict ends with: it makes new groups and a new state, which the parts must take over."""
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        start = 0
        for part in self.parts:
            groups = self.param_groups[start : start + len(part.param_groups)]
            part.__setstate__({"state": self.state, "param_groups": groups})
            start += len(groups)


def build_optimizer(model: nn.Module, config: OptimizerConfig, *, capturable: bool = False) -> Optimizer:
    """The optimiser of `config` over all trainable parameters: one group per kind of parameter, named in group["name"].

    Matrices whose role has the rate 0 are frozen first. Muon and SOAP take the blocks' matrices; the embedding, an
    untied head and all vectors stay with Adam. Every group remembers its highest rate in group["rate"] and starts at
    it; set_rates moves group["lr"].
    A replicated model (DistributedDataParallel) has its processes divide Muon's matrices between them.
    capturable: rates and step counts as tensors on the device, as a CUDA graph of the step needs. SOAP's bases are then
    renewed by optimizer.renew(), to be called after every step, and its first step must not be captured.
    """
    freeze(model, config)
    groups = parameter_groups(model, config)
    device = groups[0]["params"][0].device
    if capturable and device.type != "cuda":
        raise ValueError(f"capturable=True needs parameters on a CUDA device; they are on {device}")
    for group in groups:
        group["lr"] = group["rate"]
    settings: dict[str, Any] = {
        "betas": config.betas,
        "eps": config.eps,
        "capturable": capturable,
        "decoupled_weight_decay": config.name != "adam",
    }
    replicas = model.process_group if isinstance(model, DistributedDataParallel) else None
    fused = device.type in ("cuda", "cpu")  # a CPU gains too: 2.6 times quicker than foreach on 216 small matrices
    if config.name in ("adam", "adamw"):
        optimizer: Optimizer = FusedAdam(groups, fused=fused, **settings)
    else:
        matrices = [group for group in groups if group["name"] in ROLES]
        rest = [group for group in groups if group["name"] not in ROLES]
        parts = [_for_matrices(matrices, config, replicas)] if matrices else []
        parts += [FusedAdam(rest, fused=fused, **settings)] if rest else []
        optimizer = Composite(*parts)
    optimizer.register_load_state_dict_pre_hook(_fit_to_device)
    if config.keep_orthogonal:
        keep_orthogonal(optimizer, config.keep_orthogonal, replicas)
    if capturable:
        use_tensor_rates(optimizer)
    return optimizer


def _for_matrices(groups: list[dict[str, Any]], config: OptimizerConfig, replicas: ProcessGroup | None) -> Optimizer:
    if config.name == "muon":
        return Muon(
            groups,
            momentum=config.momentum,
            nesterov=config.nesterov,
            steps=config.newton_schulz_steps,
            newton_schulz=config.newton_schulz,
            replicas=replicas,
        )
    return SOAP(
        groups,
        betas=config.soap_betas,
        eps=config.eps,
        precondition_every=config.precondition_every,
        max_precondition_width=config.max_precondition_width,
    )


def _fit_to_device(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A saved state with this optimiser's own kind of rate and kernels, so that one device's run resumes on another."""
    saved = state_dict["param_groups"]
    if len(saved) != len(optimizer.param_groups):
        return state_dict  # torch says what is wrong
    groups = []
    for own, group in zip(optimizer.param_groups, saved, strict=True):
        flags = {name: own[name] for name in _DEVICE_FLAGS if name in own}
        rate = torch.full_like(own["lr"], float(group["lr"])) if isinstance(own["lr"], Tensor) else float(group["lr"])
        groups.append({**group, **flags, "lr": rate})
    return {**state_dict, "param_groups": groups}


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Every trainable parameter in exactly one group: {"name", "params", "rate", "weight_decay"}.

    A tied embedding counts once; frozen parameters are left out, and so are groups without any. Gains are among the
    vectors unless they have a rate of their own.
    """
    members: dict[str, list[nn.Parameter]] = {name: [] for name in config.rates}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = group_of(name)
            members["vectors" if group == "gains" and config.gain_rate is None else group].append(parameter)
    groups = [
        {
            "name": name,
            "params": members[name],
            "rate": rate,
            "weight_decay": 0.0 if name in ("vectors", "gains") else config.weight_decay,
        }
        for name, rate in config.rates.items()
        if members[name]
    ]
    if not groups:
        raise ValueError("the model has no trainable parameters: every requires_grad is False")
    return groups


def group_of(name: str) -> str:
    """ "embedding", "head", "vectors", "gains", or the role of a block's matrix, by the parameter's name in the model.

    By name, not by number of axes: Transformer-XL's biases are (heads, head_width) and still vectors.
    """
    path = ["", "", *(part for part in name.split(".") if part not in _WRAPPERS)]
    outer, owner, leaf = path[-3:]
    if leaf in _GAINS:
        return "gains"
    if leaf in _VECTORS or (owner, leaf) == ("norm", "weight"):
        return "vectors"
    if (leaf == "weight" and owner in ("embedding", "head")) or (owner, leaf) == ("embedding", "places"):
        return owner
    if (outer, owner, leaf) == ("relative", "key", "weight"):
        return "position"
    if leaf == "weight" and owner in ROLES:
        return owner
    raise ValueError(
        f"no optimiser group is known for the parameter {name!r}; name its owner after a role ({', '.join(ROLES)}), "
        "or add it to skipless.training.optim.build"
    )


def freeze(model: nn.Module, config: OptimizerConfig) -> None:
    """requires_grad off for the matrices whose role has the rate 0. Before DDP, which counts on those that had it."""
    if not config.frozen:
        return
    frozen = [p for name, p in model.named_parameters() if p.requires_grad and group_of(name) in config.frozen]
    if frozen and isinstance(model, DistributedDataParallel):
        raise ValueError(
            f"role_rates freezes {', '.join(config.frozen)}, but DistributedDataParallel already waits for their "
            "gradients; call freeze(model, config) before wrapping the model"
        )
    for parameter in frozen:
        parameter.requires_grad_(False)


def warmup_cosine(step: int, total: int, warmup: int = 4000) -> float:
    """min(t/w, ½(1 + cos(π(t−w)/(T−w)))): linear from 0 to 1, then half a cosine to exactly 0. App. H.

    step: t from 0 to total = T. The k-th update, counted from 1, takes t = k: none is spent at rate 0 but the last,
    which "reaches 0 at the final iteration". A pure function, so that resuming needs no state.
    """
    if not 0 <= warmup < total:
        raise ValueError(
            f"warmup={warmup} with total={total} steps; the rate must come down again: use 0 ≤ warmup < total, "
            f"such as {total // 10}"
        )
    if not 0 <= step <= total:
        raise ValueError(f"step={step} lies outside the schedule's 0 … {total}")
    if step < warmup:
        return step / warmup
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / (total - warmup)))


@torch.no_grad()
def set_rates(optimizer: Optimizer, factor: float) -> None:
    """Every group's rate to `factor` times its highest one.

    Rates that are tensors (capturable=True) are filled in place: a captured or compiled step sees the new value, and
    nothing waits for the device.
    """
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(factor * group["rate"])
        else:
            group["lr"] = factor * group["rate"]


def use_tensor_rates(optimizer: Optimizer) -> None:
    """Every group's rate as a tensor beside its parameters, which set_rates fills and a CUDA graph reads.

    What a step does on some calls only is left to optimizer.renew().
    """
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]), device=group["params"][0].device)
        if "renews_itself" in group:
            group["renews_itself"] = False
    for part in optimizer.parts if isinstance(optimizer, Composite) else (optimizer,):
        # torch warns of a capturable optimiser that runs outside a graph, as it must before one can be captured
        vars(part)["_warned_capturable_if_run_uncaptured"] = True

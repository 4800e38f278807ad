"""Which optimiser group every parameter of a Transformer belongs to."""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from skipless.train.optim.config import ROLES, OptimizerConfig

_VECTORS = ("bias", "content_bias", "position_bias")
_GAINS = ("residual", "value_gains", "attention_gains", "bias_gain")
# what torch.compile, DistributedDataParallel and activation checkpointing put into names
_WRAPPERS = ("_orig_mod", "module", "_checkpoint_wrapped_module")


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
    if leaf == "weight" and owner in ("embedding", "head"):
        return owner
    if (outer, owner, leaf) == ("relative", "key", "weight"):
        return "position"
    if leaf == "weight" and owner in ROLES:
        return owner
    raise ValueError(
        f"no optimiser group is known for the parameter {name!r}; name its owner after a role ({', '.join(ROLES)}), "
        "or add it to skipless.train.optim.groups"
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

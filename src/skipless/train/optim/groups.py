"""Which optimiser group every parameter of a Transformer belongs to."""

from typing import Any

from torch import nn

from skipless.train.optim.config import ROLES, OptimizerConfig

_VECTORS = ("bias", "residual", "value_gains", "attention_gains", "bias_gain", "content_bias", "position_bias")
# what torch.compile, DistributedDataParallel and activation checkpointing put into names
_WRAPPERS = ("_orig_mod", "module", "_checkpoint_wrapped_module")


def group_of(name: str) -> str:
    """ "embedding", "head", "vectors", or the role of a block's matrix, by the parameter's name in the model.

    By name, not by number of axes: Transformer-XL's biases are (heads, head_width) and still vectors.
    """
    path = ["", "", *(part for part in name.split(".") if part not in _WRAPPERS)]
    outer, owner, leaf = path[-3:]
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


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Every trainable parameter in exactly one group: {"name", "params", "rate", "weight_decay"}.

    A tied embedding counts once; frozen parameters are left out, and so are groups without any.
    """
    members: dict[str, list[nn.Parameter]] = {name: [] for name in config.rates}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            members[group_of(name)].append(parameter)
    groups = [
        {
            "name": name,
            "params": members[name],
            "rate": rate,
            "weight_decay": 0.0 if name == "vectors" else config.weight_decay,
        }
        for name, rate in config.rates.items()
        if members[name]
    ]
    if not groups:
        raise ValueError("the model has no trainable parameters: every requires_grad is False")
    return groups

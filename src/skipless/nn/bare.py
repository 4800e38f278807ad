"""Whether a module may be replaced by what it computes."""

from torch import nn


def is_bare(module: nn.Module) -> bool:
    """Calling the module is its class's forward and nothing else: no hook, and no forward of its own."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not any(hooks) and "forward" not in module.__dict__

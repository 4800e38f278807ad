"""Several optimisers behind one torch.optim.Optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from skipless.train.optim.soap import SOAP


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
        """One step of every part."""
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

"""Where tokens stand, as attention of every block sees it; and Transformer-XL's relative positions. App. E.

Rotary positions, the default, are ops.attention.Rotation. ALiBi is an AttentionShape: StandardAttention(alibi_heads=…).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from skipless.nn import init
from skipless.ops.attention import Rotation
from skipless.ops.layout import Layout


@dataclass(frozen=True, eq=False)
class Positions:
    """Where this forward's tokens stand: what attention of every block shares."""

    layout: Layout | None = None
    rotation: Rotation | None = None

    def to(self, device: torch.device | str | int, **_) -> "Positions":
        """The positions on another device. A model spread over several devices calls this before each block."""
        return Positions(
            self.layout.to(device) if self.layout is not None else None,
            self.rotation.to(device) if self.rotation is not None else None,
        )


class RelativePosition(nn.Module):
    """Transformer-XL's position terms: (q_i+v)·W_KR R_{i−j} + u·k_j. Dai et al. 2019; He et al. 2023, App. E.

    u = v = 0 at initialisation, so that with W_Q = 0, or W_K = W_KR = 0, the whole product starts at zero.
    """

    def __init__(self, width: int, heads: int, head_width: int):
        super().__init__()
        self.heads, self.head_width, self.width = heads, head_width, width
        self.key = nn.Linear(width, heads * head_width, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(heads, head_width))
        self.position_bias = nn.Parameter(torch.zeros(heads, head_width))

    def reset_parameters(self, gain: float = 1.0) -> None:
        """Position keys times the gain of all keys; u = v = 0."""
        init.gaussian_(self.key.weight, gain) if gain else nn.init.zeros_(self.key.weight)
        nn.init.zeros_(self.content_bias)
        nn.init.zeros_(self.position_bias)

    def forward(self, q: Tensor, k: Tensor, layout: Layout) -> Tensor:
        """The scores' position terms, (batch, heads, T_q, T_k), already divided by √head_width. Dense by nature."""
        distance = layout.query_locations[:, :, None] - layout.key_locations[:, None, :]
        furthest = (layout.extent or k.shape[2]) - 1
        table = torch.arange(-furthest, furthest + 1, device=q.device)
        keys = self.key(self._sinusoids(table).to(q.dtype)).view(-1, self.heads, self.head_width)
        by_distance = torch.einsum("bhid,rhd->bhir", q + self.position_bias[:, None, :].to(q.dtype), keys)
        index = (distance + furthest)[:, None].expand(q.shape[0], self.heads, -1, -1)
        positional = by_distance.gather(-1, index)
        grouped = k.repeat_interleave(self.heads // k.shape[1], dim=1)
        content = torch.einsum("hd,bhjd->bhj", self.content_bias.to(q.dtype), grouped)[:, :, None, :]
        return (positional + content) * self.head_width**-0.5

    def _sinusoids(self, distance: Tensor) -> Tensor:
        """R_{i−j}: fixed sines and cosines of the distance, (distances, width)."""
        half = torch.arange(0, self.width, 2, device=distance.device, dtype=torch.float32)
        angle = distance[:, None].float() * 10_000.0 ** (-half / self.width)
        return torch.cat([angle.sin(), angle.cos()], dim=-1)[:, : self.width]

"""Muon: momentum made orthogonal by Newton–Schulz; and matrices that stay orthogonal.

Orthogonal matrices hand a signal on without changing its cosines. The paper starts with them and lets training go;
`keep_orthogonal` keeps them so.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from skipless.ops.gpu import INSTALLED
from skipless.training.distributed import gathered, resharded
from skipless.training.optim.half_weights import HalfWeights

# Jordan's quintic: the steepest at 0 whose iterates stay near 1
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SMALLEST_NORM = 1e-7
_BATCH_ENTRIES = 2**28  # of one batch: half a GB in bfloat16, and three such live at once
_HOPPER = 9  # other GPUs may lack the shared memory for its tiles
_FEWEST_ROWS = 256
_ALIGNMENT = 16  # bytes, of every row: the copy engine's
_WIDE = 1.5  # from these times as many columns as rows on, steps in Gram matrices are fewer products, halved or not
_RESTART = 3  # of such steps, and G is formed anew
# The iteration below takes singular values between 0 and √3 of their scale to it, and is quick near it.
_LEAST, _MOST, _NEAR = 0.5, 1.5, 0.5
Runs = list[tuple[dict[str, Any], list[Tensor]]]


def newton_schulz(matrices: Tensor, steps: int = 5) -> Tensor:
    """U φ(…φ(S/‖S‖)) Vᵀ of each U S Vᵀ in matrices (n, rows, cols), with φ(σ) = aσ + bσ³ + cσ⁵: S goes to about 1.

    X ← aX + (bG + cG²)X with G = XXᵀ, on the short side: rows > cols is transposed on the way. G is formed once per
    step; it and bG + cG² are symmetric, and a Hopper GPU computes half of each.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_SMALLEST_NORM)
    for _ in range(steps):
        x = torch.baddbmm(x, quadratic(gram(x), b, c), x, beta=a)
    return x.mT if tall else x


def gram_newton_schulz(matrices: Tensor, steps: int = 5) -> Tensor:
    """`newton_schulz` with steps that iterate G = XXᵀ instead of X, which is cheaper where cols ≥ 1.5·rows.

    With W = bG + cG² a step multiplies X by aI + W. So it multiplies by it what earlier steps gave, Q ← aQ + QW, and
    takes G to the Gram matrix of the next X, G ← (aI + W)G(aI + W); X ← QX comes at the end. Zhang, Amsel, Chen and Dao
    2026, Gram Newton–Schulz. Products of size rows³ in five steps at cols = 4·rows: 30, of which 22 are symmetric, for
    45 and 25. Other shapes go to `newton_schulz`.

    G squares the condition number, and its rounding, which X does not know of, grows like singular values near 0, by
    a² a step. Hence three things: G is formed anew from X after three steps, so that at most two grow it; what is
    bfloat16 is computed in float16, of three more bits; and a stays out of what is rounded. From 64 rows on the result
    is then nearer to exact arithmetic than that of direct steps in bfloat16. float16 holds it: with ‖X‖ = 1 no number
    exceeds a³ = 41, and what it drops, below 6e-8, would come out below 1e-3. No gradient passes through.
    """
    rows, cols = sorted(matrices.shape[-2:])
    if cols < _WIDE * rows:
        return newton_schulz(matrices, steps)
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = _normalised(matrices.mT if tall else matrices)
    for start in range(0, steps, _RESTART):
        g = gram(x)
        w = quadratic(g, b, c)
        q = w.clone()
        q.diagonal(dim1=-2, dim2=-1).add_(a)
        for _ in range(min(_RESTART, steps - start) - 1):
            g = symmetric(symmetric(g, w, 1.0, a), w, 1.0, a)
            w = quadratic(g, b, c)
            q = symmetric(q, w, 1.0, a)
        x = torch.bmm(q, x)
    return x.mT if tall else x


def _normalised(x: Tensor) -> Tensor:
    """X/‖X‖ of each X, as float16 where it is bfloat16: in one pass, which keeps the order of memory."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide).clamp(min=_SMALLEST_NORM)
    out = torch.empty_like(x, dtype=torch.float16 if x.dtype == torch.bfloat16 else x.dtype)
    return torch.div(x, norm, out=out)


def gram(x: Tensor) -> Tensor:
    """X·Xᵀ of each X in x (n, rows, cols)."""
    if gram_supports(x):
        from skipless.ops.gpu.gram import product

        return product(x, 1.0)
    return torch.bmm(x, x.mT)


def quadratic(g: Tensor, b: float, c: float) -> Tensor:
    """b·G + c·G² of each symmetric G in g (n, rows, rows)."""
    return symmetric(g, g, c, b)


def symmetric(left: Tensor, right: Tensor, alpha: float, beta: float) -> Tensor:
    """α·A·B + β·A of symmetric A and B that commute, each (n, rows, rows): symmetric too, and half of it computed."""
    if gram_supports(left):
        from skipless.ops.gpu.gram import product

        return product(left, alpha, beta, None if right is left else right)
    return torch.baddbmm(left, left, right, beta=beta, alpha=alpha)


def gram_supports(x: Tensor) -> bool:
    """Whether the GPU kernel takes x: half precision, on a GPU that it was written for, no gradient asked for."""
    if not (x.is_cuda and INSTALLED and x.dtype in (torch.bfloat16, torch.float16)):
        return False
    if torch.compiler.is_compiling() or (x.requires_grad and torch.is_grad_enabled()):
        return False
    if torch.version.cuda is None or torch.cuda.get_device_capability(x.device)[0] != _HOPPER:
        return False
    _, rows, columns = x.shape
    aligned = columns * x.element_size() % _ALIGNMENT == 0 and x.data_ptr() % _ALIGNMENT == 0
    return aligned and rows >= _FEWEST_ROWS and rows % 64 == 0


WAYS = {"direct": newton_schulz, "gram": gram_newton_schulz}


class Muon(torch.optim.Optimizer):
    """W ← (1 − ηλ)W − η·√max(1, rows/cols)·NS(direction), with direction the (Nesterov) momentum of the gradient.

    The scale is torch.optim.Muon's "original", and so are its rates. Departs from it: matrices of one shape go through
    Newton–Schulz as one batch, and in bfloat16 only on a GPU (dtype=None), where it is the quicker; a CPU keeps the
    parameters' own precision.
    newton_schulz: "direct", or "gram" for `gram_newton_schulz`: the same to rounding, and fewer products.

    A step does not wait for the device, takes rates as numbers or as tensors, and can be captured in a CUDA graph.
    Sharded parameters (FSDP2) are gathered and every rank computes every matrix; momentum stays sharded.
    """

    def __init__(  # noqa: PLR0913  (torch.optim.Muon's settings, and the two that say how)
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        steps: int = 5,
        dtype: torch.dtype | None = None,
        newton_schulz: Literal["direct", "gram"] = "direct",
    ):
        if newton_schulz not in WAYS:
            raise ValueError(f"newton_schulz is {newton_schulz!r}; use {' or '.join(map(repr, WAYS))}")
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "newton_schulz_steps": steps,
        }
        super().__init__(params, defaults)
        self.dtype, self.newton_schulz = dtype, newton_schulz
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim != 2:
                    shape = tuple(parameter.shape)
                    raise ValueError(f"Muon takes matrices, and one parameter is {shape}; leave it to Adam")

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "dtype": self.dtype, "newton_schulz": self.newton_schulz}

    @torch.no_grad()
    def step(self, closure=None):
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for runs in self._batches():
            self._update(runs)
        return loss

    def _batches(self) -> Iterator[Runs]:
        """Matrices of one shape, at most _BATCH_ENTRIES numbers at a time, in runs that share a group."""
        batches: dict[Any, dict[int, tuple[dict[str, Any], list[Tensor]]]] = {}
        counts: dict[Any, int] = {}
        for index, group in enumerate(self.param_groups):
            for p in group["params"]:
                if p.grad is None:
                    continue
                key = (p.shape, p.device, p.dtype, group["newton_schulz_steps"])
                counts[key] = counts.get(key, 0) + 1
                batch = batches.setdefault((key, counts[key] * p.numel() // _BATCH_ENTRIES), {})
                batch.setdefault(index, (group, []))[1].append(p)
        for batch in batches.values():
            yield list(batch.values())

    def _update(self, runs: Runs) -> None:
        directions = [gathered(d) for group, parameters in runs for d in self._direction(group, parameters)]
        first = directions[0]
        dtype = self.dtype or (torch.bfloat16 if first.is_cuda else first.dtype)
        stacked = torch.empty((len(directions), *first.shape), dtype=dtype, device=first.device)
        torch._foreach_copy_(list(stacked.unbind()), directions)  # stacks and casts in one pass
        updates = WAYS[self.newton_schulz](stacked, runs[0][0]["newton_schulz_steps"])
        start = 0
        for group, parameters in runs:
            _apply(group, parameters, updates[start : start + len(parameters)])
            start += len(parameters)

    def _direction(self, group: dict[str, Any], parameters: list[Tensor]) -> list[Tensor]:
        gradients = [cast(Tensor, p.grad) for p in parameters]
        for p in parameters:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        momenta = [self.state[p]["momentum_buffer"] for p in parameters]
        torch._foreach_lerp_(momenta, gradients, 1.0 - group["momentum"])
        return list(torch._foreach_lerp(gradients, momenta, group["momentum"])) if group["nesterov"] else momenta


def _apply(group: dict[str, Any], parameters: list[Tensor], updates: Tensor) -> None:
    """Parameters of one shape minus rate times scale times updates."""
    first = parameters[0]
    rows, cols = first.shape
    # three axes, not none, so that the product is in the parameters' precision and not in the updates'
    scale = torch.full((1, 1, 1), max(1.0, rows / cols) ** 0.5, dtype=first.dtype, device=first.device)
    updates = (updates * (scale * group["lr"])).contiguous()
    if group["weight_decay"]:
        torch._foreach_mul_(parameters, 1.0 - group["lr"] * group["weight_decay"])
    torch._foreach_sub_(parameters, [resharded(u, p) for u, p in zip(updates.unbind(), parameters, strict=True)])


def keep_orthogonal(optimizer: Optimizer, roles: Sequence[str]) -> None:
    """From now on every step of the optimiser ends with `towards_orthogonal` of the matrices in groups of these names.

    At the scale each has now, and in its own precision: in half of it the rounding would be as large as a step.
    ValueError where a matrix is not nearly orthogonal to begin with.
    """
    matrices = [p for group in optimizer.param_groups if group["name"] in roles for p in group["params"]]
    scales = [_checked_scale(gathered(matrix.detach())) for matrix in matrices]

    def correct(stepped: Optimizer, *_: object) -> None:
        _correct(matrices, scales, getattr(stepped, "half_weights", None))

    optimizer.register_step_post_hook(correct)


@torch.no_grad()
def _correct(matrices: list[Tensor], scales: list[Tensor], half: HalfWeights | None) -> None:
    alike: dict[tuple, list[int]] = {}
    for index, matrix in enumerate(matrices):
        alike.setdefault((matrix.shape, matrix.device, matrix.dtype), []).append(index)
    for several in alike.values():
        those = [matrices[index] for index in several]
        changes = towards_orthogonal(
            torch.stack([gathered(matrix) for matrix in those]), torch.stack([scales[index] for index in several])
        )
        torch._foreach_add_(those, [resharded(c, p) for c, p in zip(changes.unbind(), those, strict=True)])
        if half is not None:
            half.write(those)


def _checked_scale(matrix: Tensor) -> Tensor:
    scale = orthogonal_scale(matrix)
    off = _shortfall(matrix, scale)
    if float(torch.linalg.matrix_norm(off)) <= _NEAR:  # which bounds each eigenvalue, and is quick
        return scale
    values = (1.0 - torch.linalg.eigvalsh(off.double())).clamp(min=0.0).sqrt()
    if float(values.min()) >= _LEAST and float(values.max()) <= _MOST:
        return scale
    raise ValueError(
        f"keep_orthogonal wants matrices that start orthogonal; the singular values of one of {tuple(matrix.shape)} "
        f"are {float(values.min()):.3g} to {float(values.max()):.3g} times their root mean square. "
        "Use --set model.init=orthogonal, or leave its role out of optimizer.keep_orthogonal"
    )


def orthogonal_scale(matrix: Tensor) -> Tensor:
    """s of a matrix whose singular values are all s: their root mean square."""
    return torch.linalg.matrix_norm(matrix, keepdim=True) / math.sqrt(min(matrix.shape[-2:]))


def towards_orthogonal(matrices: Tensor, scales: Tensor) -> Tensor:
    """½(I − WWᵀ/s²)W of each W in (n, out, in): added to W, it takes a singular value s(1 + ε) to s(1 − 3ε²/2 − ε³/2).

    Newton and Schulz' iteration for the polar factor (Higham 2008, Sec. 8.3), with the product on the short side.
    scales: (n, 1, 1).
    """
    short = _shortfall(matrices, scales)
    tall = matrices.shape[-2] > matrices.shape[-1]
    return 0.5 * (matrices @ short if tall else short @ matrices)


def _shortfall(matrices: Tensor, scales: Tensor) -> Tensor:
    """I − WWᵀ/s², or I − WᵀW/s² where W is taller than wide: 0 for an orthogonal matrix."""
    wide = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    return torch.eye(wide.shape[-2], dtype=wide.dtype, device=wide.device) - wide @ wide.mT / scales**2

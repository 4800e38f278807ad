"""Muon: momentum made orthogonal by Newton–Schulz; and matrices that stay orthogonal.

Orthogonal matrices hand a signal on without changing its cosines. The paper starts with them and lets training go;
`keep_orthogonal` keeps them so.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from skipless.ops.gpu import INSTALLED
from skipless.training.distributed import gathered, local, resharded
from skipless.training.optim.half_weights import HalfWeights
from skipless.training.optim.owners import Matrices, Ranks, Stack, computed

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
Member = tuple[dict[str, Any], Tensor]  # a parameter, after its group


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


def multiplications(rows: int, cols: int, steps: int = 5, way: str = "direct") -> float:
    """How many numbers Newton–Schulz multiplies for one matrix: n²(n + 2m) a step for n ≤ m, and fewer by "gram"."""
    n, m = sorted((rows, cols))
    if way == "direct" or m < _WIDE * n:
        return float(steps * n**2 * (n + 2 * m))
    starts = -(-steps // _RESTART)
    return float(n**2 * (2 * starts * m + (steps + 3 * (steps - starts)) * n))


class Muon(torch.optim.Optimizer):
    """W ← (1 − ηλ)W − η·√max(1, rows/cols)·NS(direction), with direction the (Nesterov) momentum of the gradient.

    The scale is torch.optim.Muon's "original", and so are its rates. Departs from it: matrices of one shape go through
    Newton–Schulz as one batch, and in bfloat16 only on a GPU (dtype=None), where it is the quicker; a CPU keeps the
    parameters' own precision.
    newton_schulz: "direct", or "gram" for `gram_newton_schulz`: the same to rounding, and fewer products.

    A step does not wait for the device, takes rates as numbers or as tensors, and can be captured in a CUDA graph.

    Several processes divide the matrices between them, as `owners` says: those that share a parameter's rows (FSDP2),
    or `replicas`, which have it whole and with equal gradients (DDP's process_group; without it each process computes
    for itself). All must then step with gradients of the same parameters. Momentum stays where the parameter is. Each
    result is one process's to rounding, and to the bit where the kernels give a stack of any size the same bits; for
    one number of processes all is reproducible. A pickled or copied Muon has no replicas.
    """

    replicas: ProcessGroup | None = None

    def __init__(  # noqa: PLR0913  (torch.optim.Muon's settings, and three that say how)
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        steps: int = 5,
        dtype: torch.dtype | None = None,
        newton_schulz: Literal["direct", "gram"] = "direct",
        replicas: ProcessGroup | None = None,
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
        self.dtype, self.newton_schulz, self.replicas = dtype, newton_schulz, replicas
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim != 2:
                    shape = tuple(parameter.shape)
                    raise ValueError(f"Muon takes matrices, and one parameter is {shape}; leave it to Adam")

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "dtype": self.dtype, "newton_schulz": self.newton_schulz}

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        members = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for ranks, those in _by_ranks(members, self.replicas):
            self._update(ranks, those)
        return loss

    def _update(self, ranks: Ranks | None, members: list[Member]) -> None:
        """Matrices of one device and precision, each by its owner."""
        groups, parameters = [group for group, _ in members], [p for _, p in members]
        kept, gradients, momenta = (
            tensors if ranks is None else [local(tensor) for tensor in tensors]
            for tensors in (parameters, [cast(Tensor, p.grad) for p in parameters], self._momenta(parameters))
        )
        for group, numbers in _runs(groups, range(len(groups))):
            torch._foreach_lerp_(_at(momenta, numbers), _at(gradients, numbers), 1.0 - group["momentum"])

        def directions(stack: Stack) -> list[Tensor]:
            found = [_directions(g, _at(gradients, run), _at(momenta, run)) for g, run in _runs(groups, stack)]
            return [gathered(direction) for several in found for direction in several]

        def work(stack: Stack, whole: Tensor) -> Tensor:
            return WAYS[self.newton_schulz](whole, groups[stack[0]]["newton_schulz_steps"])

        shapes = [(p.shape[0], p.shape[1]) for p in parameters]
        kinds = [(*shape, g["newton_schulz_steps"]) for shape, g in zip(shapes, groups, strict=True)]
        costs = [multiplications(*kind, self.newton_schulz) for kind in kinds]
        matrices = Matrices(shapes, directions, self._precision(gradients[0]), gradients[0].device)
        for stack, updates in computed(ranks, matrices, kinds, costs, _BATCH_ENTRIES, work):
            start = 0
            for group, numbers in _runs(groups, stack):
                stop = start + len(numbers)
                _apply(group, _at(kept, numbers), updates[start:stop], shapes[stack[0]])
                start = stop

    def _precision(self, direction: Tensor) -> torch.dtype:
        return self.dtype or (torch.bfloat16 if direction.is_cuda else direction.dtype)

    def _momenta(self, parameters: list[Tensor]) -> list[Tensor]:
        for p in parameters:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return [self.state[p]["momentum_buffer"] for p in parameters]


def _by_ranks(members: Iterable[Member], replicas: ProcessGroup | None) -> list[tuple[Ranks | None, list[Member]]]:
    """Parameters of one device and precision that the same ranks divide; None: those that each computes for itself."""
    alike: dict[Any, tuple[Ranks | None, list[Member]]] = {}
    for group, p in members:
        ranks = Ranks.of(p, replicas)
        alike.setdefault((ranks, p.device, p.dtype), (ranks, []))[1].append((group, p))
    return list(alike.values())


def _at(tensors: Sequence[Tensor], numbers: Iterable[int]) -> list[Tensor]:
    return [tensors[number] for number in numbers]


def _runs(groups: Sequence[dict[str, Any]], numbers: Iterable[int]) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Each group in a row of parameters, and the numbers of those that follow each other in it."""
    for _, run in groupby(numbers, key=lambda number: id(groups[number])):
        those = list(run)
        yield groups[those[0]], those


def _directions(group: dict[str, Any], gradients: list[Tensor], momenta: list[Tensor]) -> list[Tensor]:
    return list(torch._foreach_lerp(gradients, momenta, group["momentum"])) if group["nesterov"] else momenta


def _apply(group: dict[str, Any], parameters: list[Tensor], updates: Tensor, shape: Sequence[int]) -> None:
    """Parameters, or rows of them, minus rate times scale times updates; `shape` is that of a whole matrix."""
    rows, cols = shape
    first = parameters[0]
    # three axes, not none, so that the product is in the parameters' precision and not in the updates'
    scale = torch.full((1, 1, 1), max(1.0, rows / cols) ** 0.5, dtype=first.dtype, device=first.device)
    updates = (updates * (scale * group["lr"])).contiguous()
    if group["weight_decay"]:
        torch._foreach_mul_(parameters, 1.0 - group["lr"] * group["weight_decay"])
    torch._foreach_sub_(parameters, [resharded(u, p) for u, p in zip(updates.unbind(), parameters, strict=True)])


def keep_orthogonal(optimizer: Optimizer, roles: Sequence[str], replicas: ProcessGroup | None = None) -> None:
    """From now on every step of the optimiser ends with `towards_orthogonal` of the matrices in groups of these names.

    At the scale each has now, and in its own precision: in half of it the rounding would be as large as a step.
    Several processes divide the matrices between them, as Muon's do. ValueError where a matrix is not nearly orthogonal
    to begin with.
    """
    matrices = [p for group in optimizer.param_groups if group["name"] in roles for p in group["params"]]
    scales = {matrix: _checked_scale(gathered(matrix.detach())) for matrix in matrices}

    @torch.no_grad()
    def correct(stepped: Optimizer, *_: object) -> None:
        for ranks, members in _by_ranks((({}, matrix) for matrix in matrices), replicas):
            _correct(ranks, [matrix for _, matrix in members], scales)
        half: HalfWeights | None = getattr(stepped, "half_weights", None)
        if half is not None:
            half.write(matrices)

    optimizer.register_step_post_hook(correct)


def _correct(ranks: Ranks | None, matrices: list[Tensor], scales: dict[Tensor, Tensor]) -> None:
    """Matrices of one device and precision, each by its owner."""
    kept = matrices if ranks is None else [local(matrix) for matrix in matrices]

    def work(stack: Stack, whole: Tensor) -> Tensor:
        return towards_orthogonal(whole, torch.stack([scales[matrices[number]] for number in stack]))

    shapes = [(matrix.shape[0], matrix.shape[1]) for matrix in matrices]
    costs = [float(min(shape) * math.prod(shape)) for shape in shapes]
    seen = Matrices(shapes, lambda stack: [gathered(each) for each in _at(kept, stack)], kept[0].dtype, kept[0].device)
    for stack, changes in computed(ranks, seen, shapes, costs, _BATCH_ENTRIES, work):
        those = _at(kept, stack)
        torch._foreach_add_(those, [resharded(c, p) for c, p in zip(changes.unbind(), those, strict=True)])


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

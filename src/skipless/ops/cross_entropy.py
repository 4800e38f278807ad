"""Mean negative log-likelihood of softmax(hidden·weightᵀ), without ever holding all logits in float32."""

import torch
from torch import Tensor, nn

from skipless.ops.linear import product_dtype
from skipless.ops.modes import is_transformed, without_autocast

# Logits at once: 8192 tokens of a vocabulary of 32,000 are one chunk, half a GB in bfloat16.
_LOGITS_AT_ONCE = 2**28


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    counted: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """−mean log softmax(hidden·weightᵀ + bias)[targets], what F.cross_entropy gives on dense logits.

    hidden (…, width), weight (classes, width), targets (…) of integers, bias (classes,). Logits exist for `chunk` rows
    of hidden at a time (None: 2^28 logits), in hidden's dtype, or autocast's where it is on. Their gradient takes their
    place in the forward pass, while they are there; the backward pass only scales. The softmax is in float32 (float64
    for float64), and so is the sum of the weight's gradient over chunks. In float16, which ends at 6e-8, that gradient
    is of the sum over rows until then: a loss that is scaled up with their number (see `loss_scale`) loses nothing.

    counted, boolean and shaped like targets: the mean is over those rows alone, whatever the others and their targets
    hold; 0 if there is none. No shape depends on how many there are, so a CUDA graph may hold it.

    For what differentiates again, create_graph=True and the transforms of torch.func, all logits are held at once.

    A target outside 0 … classes−1 makes the loss NaN on a GPU, where checking would wait for the device; elsewhere it
    is a RuntimeError.
    """
    _check(hidden, weight, targets, chunk)
    targets = targets.long()
    if counted is not None:
        _check_counted(counted, targets)
        hidden, targets = hidden.masked_fill(~counted[..., None], 0.0), targets.masked_fill(~counted, 0)
        counted = counted.reshape(-1)
    rows = hidden.reshape(-1, hidden.shape[-1]).to(product_dtype(hidden))
    size = max(1, _LOGITS_AT_ONCE // weight.shape[0]) if chunk is None else chunk
    chunks = -(-len(rows) // size)
    if is_transformed():
        return _dense(rows, weight, bias, targets.reshape(-1), counted)
    arguments = (rows, weight, bias, targets.reshape(-1), counted, -(-len(rows) // chunks))
    with without_autocast(hidden.device):
        tensors = (rows, weight, bias)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            return _LinearCrossEntropy.apply(*arguments)
        return _forward(*arguments, needed=(False, False, False))[0]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, rows: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, counted: Tensor | None, chunk: int
    ) -> Tensor:
        loss, gradients = _forward(rows, weight, bias, targets, counted, chunk, needed=ctx.needs_input_grad[:3])
        ctx.save_for_backward(*gradients, rows, weight, bias, targets, counted)
        ctx.missing = _share(rows) / _count(rows, counted)
        ctx.kinds = [None if t is None else t.dtype for t in (rows, weight, bias)]
        return loss

    @staticmethod
    def backward(ctx, *upstream: Tensor):
        found, (rows, weight, bias, targets, counted) = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True: it may be differentiated
            # as views, whose gradients end here: rows may come of the weight too, as where embeddings are tied
            rows, weight = rows.view_as(rows), weight.view_as(weight)
            bias = None if bias is None else bias.view_as(bias)
            inputs = zip((rows, weight, bias), ctx.needs_input_grad, strict=False)
            wanted = [t for t, needed in inputs if needed and t is not None]
            with without_autocast(rows.device):
                loss = _dense(rows, weight, bias, targets, counted)
            slopes = iter(torch.autograd.grad(loss, wanted, upstream[0], create_graph=True))
            return (*(next(slopes) if needed else None for needed in ctx.needs_input_grad[:3]), None, None, None)
        whole = isinstance(ctx.missing, float) and ctx.missing == 1.0
        factor = upstream[0] if whole else upstream[0] * ctx.missing
        each = zip(found, ctx.kinds, strict=True)
        return (*(None if t is None else (t * factor.to(t.dtype)).to(kind) for t, kind in each), None, None, None)


def _dense(rows: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, counted: Tensor | None) -> Tensor:
    """The definition, for derivatives of any order: every logit at once, in torch's own operations."""
    logits = nn.functional.linear(rows, weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype))
    logs = logits.to(torch.promote_types(rows.dtype, torch.float32)).log_softmax(dim=-1)
    losses = -logs.gather(1, targets[:, None])[:, 0]
    return losses.mean() if counted is None else (losses * counted).sum() / _count(losses, counted)


def _forward(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    counted: Tensor | None,
    chunk: int,
    needed: tuple[bool, ...],
) -> tuple[Tensor, list[Tensor | None]]:
    """The loss, and the gradients of rows, weight and bias, times _count/_share; None where not needed.

    Those of weight and bias are in float32 at least, which a sum over many rows may need.
    """
    exact = torch.promote_types(rows.dtype, torch.float32)
    matrix = weight.to(rows.dtype)
    losses = torch.empty(len(rows), dtype=exact, device=rows.device)
    slopes = torch.empty_like(rows) if needed[0] else None
    total = bias_total = None
    several = (_split(tensor, len(rows), chunk) for tensor in (slopes, counted))
    for part, target, loss, slope, mask in zip(
        *(t.split(chunk) for t in (rows, targets, losses)), *several, strict=True
    ):
        logits = part @ matrix.mT if bias is None else torch.addmm(bias.to(rows.dtype), part, matrix.mT)
        _each_row(logits, target, loss, _share(rows), any(needed))
        if mask is not None:
            loss.mul_(mask)
            if any(needed):
                logits.mul_(mask[:, None])
        if slope is not None:
            torch.mm(logits, matrix, out=slope)
        if needed[1]:
            total = _add(total, _exact_product(logits.mT, part, exact))
        if needed[2]:
            bias_total = _add(bias_total, logits.sum(dim=0, dtype=exact))
    mean = losses.mean() if counted is None else losses.sum() / _count(losses, counted)
    return mean, [slopes, total, bias_total]


def _count(losses: Tensor, counted: Tensor | None) -> int | Tensor:
    """How many rows the mean is over; 1 if there are none."""
    return len(losses) if counted is None else counted.sum().clamp(min=1)


def _share(rows: Tensor) -> int:
    """What the logits' gradient is divided by where it is stored: the number of rows, or in float16 nothing."""
    return 1 if rows.dtype == torch.float16 else len(rows)


def _split(tensor: Tensor | None, rows: int, chunk: int) -> list[Tensor] | list[None]:
    return [None] * -(-rows // chunk) if tensor is None else list(tensor.split(chunk))


def _add(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total.add_(part)


def _exact_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right, summed and returned in `dtype`; only CUDA's product of half-precision matrices returns another."""
    if left.is_cuda and left.dtype != dtype:
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)


def _each_row(logits: Tensor, targets: Tensor, losses: Tensor, rows: int, write: bool) -> None:
    """losses ← logsumexp(logits) − logits[target]; with `write`, logits ← the gradient of the mean over `rows` rows."""
    if logits.is_cuda and logits.dtype != torch.float64:
        from skipless.ops.gpu.cross_entropy import each_row

        return each_row(logits, targets, losses, rows, write)
    return plain_each_row(logits, targets, losses, rows, write)


def plain_each_row(logits: Tensor, targets: Tensor, losses: Tensor, rows: int, write: bool) -> None:
    """The definition of one chunk's part, in torch's own operations: the oracle of the GPU kernel."""
    logs = logits.to(losses.dtype).log_softmax(dim=-1)
    picked = targets[:, None]
    torch.neg(logs.gather(1, picked)[:, 0], out=losses)
    if write:
        slopes = logs.exp_()
        slopes.scatter_add_(1, picked, slopes.new_full((), -1.0).expand(picked.shape))
        logits.copy_(slopes.div_(rows))


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int | None) -> None:
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"hidden is shaped {tuple(hidden.shape)} and targets {tuple(targets.shape)}; targets must be shaped "
            f"{tuple(hidden.shape[:-1])}"
        )
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise ValueError(f"targets are {targets.dtype}; they must be integers, such as int64")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight is shaped {tuple(weight.shape)} and hidden {tuple(hidden.shape)}; weight must be "
            f"(classes, {hidden.shape[-1]})"
        )
    if not targets.numel():
        raise ValueError(f"hidden is shaped {tuple(hidden.shape)}: the mean needs at least one row")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1, or None")


def _check_counted(counted: Tensor, targets: Tensor) -> None:
    if counted.shape != targets.shape or counted.dtype != torch.bool:
        raise ValueError(
            f"counted is {counted.dtype} shaped {tuple(counted.shape)}; it must be torch.bool shaped "
            f"{tuple(targets.shape)}, as the targets are"
        )

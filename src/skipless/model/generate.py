"""Generation: sample text, decode step by step from a cache of keys and values, and on a GPU by one recorded graph."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from skipless.console import check_fits, check_seed
from skipless.ops.cuda_graph import CudaRecorder
from skipless.ops.layout import PADDING, Layout
from skipless.schema import check, check_own

if TYPE_CHECKING:
    from skipless.model.transformer import Transformer

_WARM_UP = 2
_LEAST_TEMPERATURE = 1e-30
# recording runs three steps: fewer tokens are not worth it
_FEWEST_TOKENS = 8


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. temperature 0 takes the likeliest (greedy); 1 draws from the model's distribution.

    top_k keeps the k likeliest tokens; top_p then the fewest whose probabilities, after temperature and top_k, sum to
    at least p (Holtzman et al. 2020). None leaves the filter out.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        check_own(self)
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it must be at least 0, where 0 is greedy")
        if 0.0 < self.temperature < _LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature is {self.temperature}, by which single precision cannot divide; use 0, which takes the "
                "likeliest token"
            )
        if self.top_k is not None and (self.top_k < 1 or int(self.top_k) != self.top_k):
            raise ValueError(f"top_k is {self.top_k}; it must be an integer of at least 1, or None for all tokens")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; it must lie in (0, 1], where 1 keeps all tokens")

    def pick(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """One token per row of logits (batch, vocab_size): (batch,)."""
        if self.temperature == 0.0:
            return logits.argmax(dim=-1)
        return torch.multinomial(self.probabilities(logits), 1, generator=generator)[:, 0]

    def probabilities(self, logits: Tensor) -> Tensor:
        """What pick draws from at a temperature above 0: (batch, vocab_size)."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            lowest = logits.topk(self.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < lowest, -torch.inf)
        probabilities = logits.softmax(dim=-1)
        if self.top_p is None or self.top_p >= 1.0:
            return probabilities
        ordered, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
        spare = ordered.cumsum(dim=-1) - ordered >= self.top_p
        ordered = ordered.masked_fill(spare, 0.0)
        return torch.zeros_like(probabilities).scatter(-1, tokens, ordered / ordered.sum(dim=-1, keepdim=True))


GREEDY = Sampling(temperature=0.0)


def generate(
    model: "Transformer",
    tokens: Tensor,
    max_new_tokens: int,
    *,
    sampling: Sampling = GREEDY,
    seed: int | torch.Generator | None = None,
    stop: Collection[int] = (),
    attention_mask: Tensor | None = None,
) -> Tensor:
    """The prompts (batch, T) with their continuations, (batch, T + at most max_new_tokens). Greedy by default.

    seed makes sampling repeatable and leaves torch's global generator alone. A row ends after a token of `stop`, which
    it then repeats until all rows have ended. Prompts of unequal length are padded on the left, with an attention_mask
    (batch, T) that is 0 there. The length may exceed config.length, the training length,
    except with calibrations "exact" and "mlp-aware".
    """
    new = stream(model, tokens, max_new_tokens, sampling=sampling, seed=seed, stop=stop, attention_mask=attention_mask)
    return torch.cat([tokens, *(token[:, None] for token in new)], dim=1)


def generate_text(model: "Transformer", text: str, max_new_tokens: int, **options: Any) -> str:
    """The text and its continuation by model.tokenizer, up to the end of a document. options: those of `generate`."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ValueError(
            "text needs a tokenizer, and this model has none: skipless.load(path) attaches a run's own; or set "
            "model.tokenizer, or give tokens shaped (batch, length)"
        )
    ids = tokenizer.encode(text).tolist()
    if not ids:
        raise ValueError("the prompt is empty; give at least one token to go on from")
    tokens = torch.tensor([ids], device=model.embedding.weight.device)
    options.setdefault("stop", (tokenizer.end,))
    written = generate(model, tokens, max_new_tokens, **options)
    return tokenizer.decode(written[0].tolist())


def stream(
    model: "Transformer",
    tokens: Tensor,
    max_new_tokens: int,
    *,
    sampling: Sampling = GREEDY,
    seed: int | torch.Generator | None = None,
    stop: Collection[int] = (),
    attention_mask: Tensor | None = None,
) -> Iterator[Tensor]:
    """The continuation of `generate`, one (batch,) tensor per step as it comes. Arguments are checked at once."""
    check_decodable(model, tokens)
    _check_kinds(sampling, stop, attention_mask)
    max_new_tokens = check(max_new_tokens, int, "max_new_tokens")
    _check_values(model, tokens, max_new_tokens, stop)
    _check_room(model.config.max_length, tokens.shape[1], max_new_tokens)
    _check_memory(model, tokens, tokens.shape[1] + max_new_tokens)
    if attention_mask is not None:
        _check_mask(tokens, attention_mask)
    generator = seed if isinstance(seed, torch.Generator) else None
    if isinstance(seed, int):
        check_seed(seed, "seed")
        generator = torch.Generator(tokens.device).manual_seed(seed)
    cache = KVCache(len(model.blocks), capacity=tokens.shape[1] + max_new_tokens)

    def steps() -> Iterator[Tensor]:
        logits = decode(model, tokens, cache, attention_mask=attention_mask, last_only=True)
        if not bool(logits.isfinite().all()):
            raise ValueError("the model's logits are not finite: its weights hold NaN or ∞, or it has diverged")
        ends = torch.tensor(sorted(stop), device=tokens.device, dtype=tokens.dtype)
        token, ended = tokens[:, -1], torch.zeros_like(tokens[:, -1], dtype=torch.bool)
        follow = next_logits(model, cache, replays(model, tokens, max_new_tokens))
        for step in range(max_new_tokens):
            newest = follow(token) if step else logits[:, -1]
            token = torch.where(ended, token, sampling.pick(newest, generator).to(tokens.dtype))
            yield token
            ended = ended | torch.isin(token, ends)
            if len(stop) and bool(ended.all()):
                return

    return steps()


def _check_kinds(sampling: Sampling, stop: Collection[int], attention_mask: Tensor | None) -> None:
    if not isinstance(sampling, Sampling):
        raise ValueError(f"sampling is {sampling!r}; it must be a Sampling, such as Sampling(temperature=0.8)")
    if not isinstance(stop, Collection) or isinstance(stop, str):
        raise ValueError(f"stop is {stop!r}; it must be a collection of tokens, such as (0,)")
    if not isinstance(attention_mask, Tensor | None):
        seen = type(attention_mask).__name__
        raise ValueError(f"attention_mask is a {seen}; it must be a tensor shaped as the tokens, 0 where there is none")


def refuse_loose_sampling(options: dict[str, Any]) -> None:
    """Say where the fields of Sampling go, for those who know them as arguments of generate elsewhere."""
    if loose := {name: value for name, value in options.items() if name in Sampling.__dataclass_fields__}:
        fields = ", ".join(f"{name}={value!r}" for name, value in loose.items())
        raise TypeError(
            f"generate takes no {', '.join(loose)}: give sampling=Sampling({fields}), of skipless.model.generate"
        )
    if "do_sample" in options:
        raise TypeError("generate takes no do_sample: it is greedy, or draws by sampling=Sampling(temperature=1.0)")


def _check_values(model: "Transformer", tokens: Tensor, max_new_tokens: int, stop: Collection[int]) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    size = model.config.vocab_size
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= size:
        raise ValueError(f"tokens run from {low} to {high}; the model knows 0 … {size - 1}: is this its tokenizer?")
    for token in stop:
        if not 0 <= token < size:
            raise ValueError(f"stop token {token} is not in 0 … {size - 1}")


def _check_room(most: int | None, past: int, new: int) -> None:
    """The last token that is generated is not attended to."""
    if most is not None and past + new - 1 > most:
        room = f"use max_new_tokens={most - past + 1}" if past <= most else f"use prompts of at most {most} tokens"
        raise ValueError(
            f"max_new_tokens is {new} after {past} tokens, but the model's attention is calibrated for {most} "
            f"locations; {room}, or a scheme without such a limit, as with calibration='paper'"
        )


def _check_memory(model: "Transformer", tokens: Tensor, slots: int) -> None:
    """Keys and values are reserved at once. A GPU's memory is left to torch, which knows what it keeps of it."""
    config = model.config
    keys = config.width // config.heads * (config.kv_heads or config.heads)
    values = keys if config.value_output == "trained" else config.width
    numbers = keys + values + 2 * config.reader_width
    size = float(len(tokens) * slots * len(model.blocks) * numbers * model.embedding.weight.element_size())
    if not tokens.is_cuda:
        check_fits(size, f"keeping the keys and values of {slots:,} tokens", "lower max_new_tokens")


def _check_mask(tokens: Tensor, attention_mask: Tensor) -> None:
    if attention_mask.shape != tokens.shape:
        raise ValueError(
            f"attention_mask is shaped {tuple(attention_mask.shape)} and tokens {tuple(tokens.shape)}; they must agree"
        )
    if not bool((attention_mask[:, -1] != 0).all()):
        rows = (attention_mask[:, -1] == 0).nonzero()[:, 0].tolist()
        raise ValueError(f"rows {rows} end in padding, where no token can follow; pad prompts on the left")


class BlockCache:
    """Keys and values of one block, (batch, their heads, length, head_width), in buffers that double when full."""

    def __init__(self, capacity: int = 0):
        self.length, self.capacity = 0, capacity
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new ones and return all: views of the buffers, valid until the next call."""
        start, end = self.length, self.length + k.shape[2]
        keys, values = self._buffers(k, v, end)
        keys[:, :, start:end] = k
        values[:, :, start:end] = v
        self.length = end
        return keys[:, :, :end], values[:, :, :end]

    def buffers(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all slots, those not yet filled included, whose values mean nothing but are finite."""
        if self._keys is None or self._values is None:
            raise ValueError("the cache holds nothing yet; decode a prompt first")
        for buffer in (self._keys, self._values):
            buffer[:, :, self.length :] = 0.0
        return self._keys, self._values

    def reorder(self, rows: Tensor) -> None:
        """Row b becomes what row rows[b] was; there may be more or fewer rows than before."""
        if self._keys is not None and self._values is not None:
            self._keys = self._keys.index_select(0, rows.to(self._keys.device))
            self._values = self._values.index_select(0, rows.to(self._values.device))

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)

    def _buffers(self, k: Tensor, v: Tensor, end: int) -> tuple[Tensor, Tensor]:
        keys, values = self._keys, self._values
        if keys is not None and values is not None:
            if (keys.shape[0], keys.dtype, keys.device) != (k.shape[0], k.dtype, k.device):
                raise ValueError(
                    f"the cache holds {keys.shape[0]} rows of {keys.dtype} on {keys.device} and was given {k.shape[0]} "
                    f"of {k.dtype} on {k.device}; use one KVCache per batch, or reorder() it first"
                )
            if end <= keys.shape[2]:
                return keys, values
        stored = max(end, self.capacity, 2 * self.length)
        grown = [t.new_empty(*t.shape[:2], stored, t.shape[3]) for t in (k, v)]
        if keys is not None and values is not None:
            grown[0][:, :, : self.length] = keys[:, :, : self.length]
            grown[1][:, :, : self.length] = values[:, :, : self.length]
        self._keys, self._values = grown
        return grown[0], grown[1]


class KVCache(Sequence[BlockCache]):
    """One BlockCache per block, and which slots are padding. Memory: 2·depth·kv_heads·head_width numbers per token.

    With value_output="identity" values have all heads, and grouped queries save keys alone.
    capacity reserves that many slots at the first use; without it the buffers grow as needed. A cache serves one batch
    and one model; it works for every position kind and scheme, since attention asks the Layout where each slot stands.
    """

    def __init__(self, depth: int, capacity: int = 0):
        self._blocks = [BlockCache(capacity) for _ in range(depth)]
        self.mask: Tensor | None = None

    @property
    def length(self) -> int:
        """Slots filled, padding included."""
        return self._blocks[-1].length

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, index: int) -> BlockCache: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[BlockCache]: ...
    def __getitem__(self, index):
        return self._blocks[index]

    def reorder(self, rows: Tensor) -> None:
        """Row b becomes what row rows[b] was: what beam search needs, or to drop finished rows."""
        for block in self._blocks:
            block.reorder(rows)
        self.mask = self.mask[rows.to(self.mask.device)] if self.mask is not None else None

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` slots, to decode from there again."""
        for block in self._blocks:
            block.truncate(length)
        self.mask = self.mask[:, :length] if self.mask is not None else None

    def mask_with(self, tokens: Tensor, attention_mask: Tensor | None) -> Tensor | None:
        """The mask of all slots once `tokens` have joined; None while no slot is padding."""
        if attention_mask is not None and attention_mask.shape != tokens.shape:
            raise ValueError(
                f"attention_mask is shaped {tuple(attention_mask.shape)} and the tokens {tuple(tokens.shape)}; give "
                "the mask of these tokens only: the cache remembers that of earlier ones"
            )
        if self.mask is None and (attention_mask is None or bool((attention_mask != 0).all())):
            return None
        new = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask != 0
        old = new.new_ones(len(tokens), self.length) if self.mask is None else self.mask
        return torch.cat([old, new.to(old.device)], dim=1)


@torch.no_grad()
def decode(
    model: "Transformer",
    tokens: Tensor,
    cache: KVCache,
    *,
    attention_mask: Tensor | None = None,
    last_only: bool = False,
) -> Tensor:
    """Logits (batch, T, vocab_size) of tokens (batch, T) that follow what the cache holds; it then holds them too.

    The same logits as one forward over the whole sequence, however it is cut, beyond the training length too.
    attention_mask (batch, T) is 0 at padding, which may stand anywhere; rows then differ in length. last_only computes
    the logits of the last slot alone, (batch, 1, vocab_size).
    """
    check_decodable(model, tokens)
    if len(cache) != len(model.blocks):
        raise ValueError(
            f"the cache has {len(cache)} blocks and the model {len(model.blocks)}: KVCache({len(model.blocks)})"
        )
    mask = cache.mask_with(tokens, attention_mask)
    layout = None if mask is None else Layout.left_padded(mask, queries=tokens.shape[1])
    hidden = model.hidden(tokens, layout=layout, caches=cache, past=cache.length)
    cache.mask = mask
    return model.logits(hidden[:, -1:] if last_only else hidden)


def check_decodable(model: "Transformer", tokens: Tensor) -> None:
    """Raise the ValueError that says why these tokens cannot be decoded by this model."""
    if model.config.head != "lm":
        raise ValueError(f"the model's head is {model.config.head!r}; only head='lm' predicts the next token")
    if not isinstance(tokens, Tensor):
        raise ValueError(f"tokens are a {type(tokens).__name__}; give text, or a tensor shaped (batch, length)")
    if tokens.dim() != 2 or tokens.is_floating_point() or not tokens.numel():
        raise ValueError(
            f"tokens are {tokens.dtype} shaped {tuple(tokens.shape)}; they must be integers shaped (batch, length), "
            "with at least one"
        )


def next_logits(model: "Transformer", cache: KVCache, replayed: bool) -> Callable[[Tensor], Tensor]:
    """A function from the last tokens (batch,) to the logits of the next, which fills the cache as it goes."""
    if replayed:
        return ReplayedStep(model, cache)
    return lambda token: decode(model, token[:, None], cache, last_only=True)[:, -1]


def replays(model: "Transformer", tokens: Tensor, new_tokens: int) -> bool:
    """Whether `stream` decodes by a graph: on one GPU, where launching the kernels of a step takes longer than they do.

    Relative positions, whose terms are dense in any case, are left to run step by step.
    """
    if not tokens.is_cuda or new_tokens < _FEWEST_TOKENS or model.config.position == "relative":
        return False
    return {parameter.device for parameter in model.parameters()} == {tokens.device}


class FixedBlock:
    """The keys and values of one block, all slots of them, filled at a position that is a tensor."""

    def __init__(self, keys: Tensor, values: Tensor, position: Tensor):
        self.keys, self.values, self.position = keys, values, position

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store one token's and return all slots; the layout says which of them hold something."""
        self.keys.index_copy_(2, self.position, k)
        self.values.index_copy_(2, self.position, v)
        return self.keys, self.values


class ReplayedStep:
    """A function from the last tokens (batch,) to the next logits (batch, vocab_size), after a prompt in `cache`.

    It fills the cache's buffers up to their capacity, but the cache does not count what they hold: it is this object's
    from now on. The logits returned are overwritten by the next call.
    """

    def __init__(self, model: "Transformer", cache: KVCache, recorder: CudaRecorder | None = None):
        self.model, buffers = model, [block.buffers() for block in cache]
        keys = buffers[0][0]
        batch, _, self.capacity, _ = keys.shape
        self.real = torch.ones(batch, self.capacity, dtype=torch.bool, device=keys.device)
        if cache.mask is not None:
            self.real[:, : cache.length] = cache.mask
        self.locations = (self.real.cumsum(dim=1) - 1).clamp(min=0)
        self.slots = torch.arange(self.capacity, device=keys.device)
        self.position = torch.tensor([cache.length], device=keys.device)
        self.token = torch.zeros(batch, dtype=torch.long, device=keys.device)
        self.blocks = [FixedBlock(*pair, self.position) for pair in buffers]
        self.left = self.capacity - cache.length
        self._read = model.bias_vectors(self.capacity, keys)  # the model may replace what the graph reads
        self._replay = self._record(recorder or CudaRecorder())

    @torch.no_grad()
    def _record(self, recorder: CudaRecorder):
        start = self.position.clone()
        for _ in range(_WARM_UP):
            recorder.warm_up(self._step)
            self.position.copy_(start)  # what was stored there will be written over
        replay = recorder.capture(self._step)
        self.position.copy_(start)
        return replay

    def _step(self) -> tuple[Tensor, ...]:
        held = self.real & (self.slots <= self.position)
        here = self.locations.index_select(1, self.position)
        layout = Layout(here, self.locations, torch.zeros_like(here), torch.where(held, 0, PADDING))
        hidden = self.model.hidden(self.token[:, None], layout=layout, caches=self.blocks)
        logits = self.model.logits(hidden)[:, -1]
        self.position.add_(1)
        return (logits,)

    @torch.no_grad()
    def __call__(self, token: Tensor) -> Tensor:
        if not self.left:
            raise ValueError(f"all {self.capacity} slots of the cache are filled; give KVCache a larger capacity")
        self.left -= 1
        self.token.copy_(token)
        return self._replay()[0]

"""Text from a trained model: `generate` returns whole sequences, `stream` yields tokens as they come."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from skipless.model.cache import KVCache, check_decodable, decode
from skipless.model.replay import ReplayedStep, replays

if TYPE_CHECKING:
    from skipless.model.transformer import Transformer


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
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it must be at least 0, where 0 is greedy")
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
    _check_values(model, tokens, max_new_tokens, stop)
    _check_room(model.config.most_locations, tokens.shape[1], max_new_tokens)
    if attention_mask is not None:
        _check_mask(tokens, attention_mask)
    generator = seed if isinstance(seed, torch.Generator) else None
    if isinstance(seed, int):
        generator = torch.Generator(tokens.device).manual_seed(seed)
    cache = KVCache(len(model.blocks), capacity=tokens.shape[1] + max_new_tokens)

    def steps() -> Iterator[Tensor]:
        logits = decode(model, tokens, cache, attention_mask=attention_mask, last_only=True)
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


def next_logits(model: "Transformer", cache: KVCache, replayed: bool) -> Callable[[Tensor], Tensor]:
    """A function from the last tokens (batch,) to the logits of the next, which fills the cache as it goes."""
    if replayed:
        return ReplayedStep(model, cache)
    return lambda token: decode(model, token[:, None], cache, last_only=True)[:, -1]


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
            f"locations; {room}, or a model with calibration='paper'"
        )


def _check_mask(tokens: Tensor, attention_mask: Tensor) -> None:
    if attention_mask.shape != tokens.shape:
        raise ValueError(
            f"attention_mask is shaped {tuple(attention_mask.shape)} and tokens {tuple(tokens.shape)}; they must agree"
        )
    if not bool((attention_mask[:, -1] != 0).all()):
        rows = (attention_mask[:, -1] == 0).nonzero()[:, 0].tolist()
        raise ValueError(f"rows {rows} end in padding, where no token can follow; pad prompts on the left")

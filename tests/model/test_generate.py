import pytest
import torch

from skipless.model.config import ModelConfig
from skipless.model.generate import Sampling, generate, stream
from skipless.model.kernel_maps import certificate
from skipless.model.transformer import Transformer
from skipless.theory.schemes import ExponentialSPA


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    fields = {"vocab_size": 50, "width": 32, "depth": 4, "heads": 4, "length": 16, "activation": "gelu"}
    model = Transformer(ModelConfig(**fields)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.randint(0, 50, (3, 7), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def without_cache(model: Transformer, tokens: torch.Tensor, steps: int) -> torch.Tensor:
    for _ in range(steps):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(dim=-1)], dim=1)
    return tokens


def test_greedy_is_the_default_and_equals_full_forwards_beyond_the_training_length(model, prompt):
    assert torch.equal(generate(model, prompt, 20), without_cache(model, prompt, 20))


def test_stream_yields_what_generate_returns(model, prompt):
    sampling = Sampling(top_k=5)
    whole = generate(model, prompt, 6, sampling=sampling, seed=3)
    assert torch.equal(torch.stack(list(stream(model, prompt, 6, sampling=sampling, seed=3)), dim=1), whole[:, 7:])


def test_left_padded_prompts_continue_as_if_alone(model, prompt):
    mask = torch.ones_like(prompt)
    mask[0, :4] = mask[2, :1] = 0
    together = generate(model, prompt, 15, attention_mask=mask)
    for row, start in enumerate((4, 0, 1)):
        assert torch.equal(together[row, 7:], generate(model, prompt[row : row + 1, start:], 15)[0, -15:])


def test_a_row_repeats_its_stop_token_until_all_have_stopped(model, prompt):
    free = generate(model, prompt, 12)[:, 7:]
    stop = {int(free[0, 2]), int(free[1, 5])}
    stopped = generate(model, prompt, 12, stop=stop)[:, 7:]
    for row in range(3):
        ends = [i for i, token in enumerate(free[row].tolist()) if token in stop]
        end = ends[0] if ends else 11
        assert torch.equal(stopped[row, : end + 1], free[row, : end + 1])
        assert (stopped[row, end:] == stopped[row, end]).all()
    assert generate(model, prompt[:1], 12, stop={int(free[0, 0])}).shape[1] == 8


def test_a_seed_repeats_and_leaves_the_global_generator_alone(model, prompt):
    state = torch.get_rng_state()
    first = generate(model, prompt, 8, sampling=Sampling(), seed=5)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first, generate(model, prompt, 8, sampling=Sampling(), seed=torch.Generator().manual_seed(5)))
    assert not torch.equal(first, generate(model, prompt, 8, sampling=Sampling(), seed=6))


def test_top_k_and_top_p_keep_the_likeliest_and_renormalise():
    logits = torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.1, 0.15, 0.7, 0.05]], dtype=torch.float64).log()
    kept = Sampling(top_k=1).probabilities(logits)
    assert torch.equal(kept, torch.tensor([[1.0, 0, 0, 0], [0, 0, 1.0, 0]], dtype=torch.float64))
    nucleus = Sampling(top_p=0.69).probabilities(logits)
    expected = torch.tensor([[5 / 7, 2 / 7, 0, 0], [0, 0, 1.0, 0]], dtype=torch.float64)
    torch.testing.assert_close(nucleus, expected)
    torch.testing.assert_close(Sampling(top_p=1.0).probabilities(logits), logits.exp())
    torch.testing.assert_close(
        Sampling(temperature=0.5).probabilities(logits)[0], torch.tensor([25.0, 4, 4, 1]).double() / 34
    )


def test_sampling_follows_its_probabilities():
    logits = torch.tensor([0.6, 0.3, 0.1]).log().expand(20_000, 3)
    picks = Sampling().pick(logits, torch.Generator().manual_seed(0))
    torch.testing.assert_close(picks.bincount() / 20_000, torch.tensor([0.6, 0.3, 0.1]), rtol=0, atol=0.015)


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"temperature": -1.0}, "at least 0"), ({"top_k": 0}, "at least 1"), ({"top_p": 1.5}, r"\(0, 1\]")],
)
def test_bad_sampling_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**fields)


def test_bad_arguments_are_refused_before_the_first_step(model, prompt):
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        stream(model, prompt, 0)
    with pytest.raises(ValueError, match="is this its tokenizer"):
        stream(model, prompt + 50, 1)
    with pytest.raises(ValueError, match="stop token 50"):
        stream(model, prompt, 1, stop=[50])
    mask = torch.ones_like(prompt)
    mask[1, -1] = 0
    with pytest.raises(ValueError, match=r"rows \[1\] end in padding"):
        stream(model, prompt, 1, attention_mask=mask)
    with pytest.raises(ValueError, match="they must agree"):
        stream(model, prompt, 1, attention_mask=mask[:, 1:])
    with pytest.raises(ValueError, match="at least one"):
        stream(model, prompt[:, :0], 1)
    for options, words in (
        ({"sampling": 0.8}, r"sampling is 0.8; .*Sampling\(temperature=0.8\)"),
        ({"stop": 5}, r"stop is 5; it must be a collection of tokens, such as \(0,\)"),
        ({"attention_mask": mask.tolist()}, "attention_mask is a list; it must be a tensor"),
    ):
        with pytest.raises(ValueError, match=words):
            stream(model, prompt, 1, **options)


def test_sampling_as_transformers_spells_it_is_told_where_it_goes(model, prompt):
    with pytest.raises(TypeError, match=r"no temperature, top_k: give sampling=Sampling\(temperature=0.7, top_k=9\)"):
        model.generate(prompt, 3, temperature=0.7, top_k=9)
    with pytest.raises(TypeError, match="takes no do_sample: it is greedy, or draws by sampling="):
        model.generate(prompt, 3, do_sample=True)
    assert torch.equal(model.generate(prompt, 3.0), model.generate(prompt, 3))


@pytest.mark.parametrize(
    ("scheme", "limited"), [(ExponentialSPA(0.05, 0.01, "exact"), True), (ExponentialSPA(0.05), False)]
)
def test_a_calibrated_network_says_at_once_how_far_it_goes(scheme, limited):
    config = ModelConfig(vocab_size=40, width=32, heads=2, depth=6, length=16, scheme=scheme, activation="tanh")
    model, prompt = Transformer(config, impl="sdpa").eval(), torch.zeros(1, 14, dtype=torch.long)
    assert generate(model, prompt, 3).shape == (1, 17)
    if limited:
        with pytest.raises(ValueError, match=r"max_new_tokens is 8 after 14 .* 16 locations; use max_new_tokens=3,"):
            generate(model, prompt, 8)
        with pytest.raises(ValueError, match="use prompts of at most 16 tokens"):
            generate(model, prompt.repeat(1, 2), 1)
    else:
        assert generate(model, prompt, 8).shape == (1, 22)


def test_the_certificate_of_a_short_calibrated_network_takes_its_length():
    config = ModelConfig(
        depth=8, length=16, width=32, heads=2, scheme=ExponentialSPA(0.2, 0.01, "exact"), activation="tanh"
    )
    assert certificate(config).verdict.kind == "preserved"

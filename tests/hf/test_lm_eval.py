import importlib.util
import json
import lzma
from pathlib import Path

import pytest
import torch

from skipless.hf.modeling import SkiplessForCausalLM
from skipless.hf.tokenizer import byte_tokenizer
from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed (extra: eval)"
)


@pytest.fixture(scope="module")
def evaluator():
    """(native model, lm-eval's view of it)."""
    from lm_eval.models.huggingface import HFLM

    torch.manual_seed(0)
    native = Transformer(ModelConfig(vocab_size=256, width=32, depth=3, heads=4, length=512, activation="gelu"))
    with torch.no_grad():
        for parameter in native.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model = SkiplessForCausalLM.from_native(native.eval())
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "~"
    return native, HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=4, device="cpu")


@torch.no_grad()
def test_log_likelihoods_are_the_native_ones(evaluator):
    from lm_eval.api.instance import Instance

    native, lm = evaluator
    pairs = [("A cat", " sat on the mat."), ("Two", " and two make four, or so they say."), ("x", " y")]
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    for (context, continuation), (value, _) in zip(pairs, lm.loglikelihood(requests), strict=True):
        tokens = torch.tensor([list((context + continuation).encode())])
        steps = native(tokens).log_softmax(dim=-1)[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0]
        assert value == pytest.approx(float(steps[len(context.encode()) - 1 :].sum()), abs=1e-3)


def test_a_task_runs_on_local_data(evaluator, shared_data, tmp_path):
    import lm_eval
    from lm_eval.tasks import TaskManager

    packed = shared_data / "tasks" / "piqa.validation.jsonl.xz"
    if not packed.is_file():
        pytest.skip("no shared tasks")
    with lzma.open(packed, "rt", encoding="utf-8") as lines:
        (tmp_path / "piqa.jsonl").write_text("".join(next(lines) for _ in range(8)), encoding="utf-8")
    stock = Path(lm_eval.__file__).parent / "tasks" / "piqa" / "piqa.yaml"
    settings = {
        "include": str(stock),
        "task": "piqa_local",
        "tag": None,
        "training_split": None,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {"validation": str(tmp_path / "piqa.jsonl")},
            "cache_dir": str(tmp_path / "cache"),
        },
    }
    (tmp_path / "piqa_local.yaml").write_text(json.dumps(settings))  # JSON is YAML
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    results = lm_eval.simple_evaluate(
        model=evaluator[1], tasks=["piqa_local"], task_manager=manager, num_fewshot=0, bootstrap_iters=0
    )
    scores = results["results"]["piqa_local"]
    assert 0.0 <= scores["acc,none"] <= 1.0
    assert results["n-samples"]["piqa_local"]["effective"] == 8

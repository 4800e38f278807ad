"""Metrics during training: on the step's own passes, within a share of its time. Lightning has a file of its own."""

import sys
import time
import types

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from skipless.inspection.callback import SignalCallback, lightning_callback, trainer_callback
from skipless.inspection.inspect import inspect
from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer


def network(depth: int = 6, width: int = 32) -> Transformer:
    torch.manual_seed(0)
    return Transformer(ModelConfig(vocab_size=64, width=width, depth=depth, heads=4, length=32))


def step(model: Transformer, ids: torch.Tensor) -> None:
    logits = model(ids)
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()


def train(model: Transformer, callback: SignalCallback | None, steps: int, ids: torch.Tensor) -> float:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    started = time.process_time()
    for number in range(steps):
        if callback is None:
            step(model, ids)
        else:
            with callback.around(number):
                step(model, ids)
        optimizer.step()
        optimizer.zero_grad()
    return time.process_time() - started


def test_it_measures_what_inspect_measures():
    model, ids = network(), torch.randint(0, 64, (1, 32))
    expected = inspect(model, ids, labels=ids)
    seen = []
    callback = SignalCallback(model, every=2, log=lambda number, metrics: seen.append((number, metrics)), budget=1.0)
    train(model, callback, 5, ids)
    assert [number for number, _ in seen] == [0, 2, 4]
    first = callback.history[0][1]
    for one, two in zip(first.blocks, expected.blocks, strict=True):
        assert one.cosine_mean == pytest.approx(two.cosine_mean)
        assert one.gradient_mean == pytest.approx(two.gradient_mean, rel=1e-5)
        assert one.parameter_gradients == pytest.approx(two.parameter_gradients, rel=1e-4)
    assert seen[0][1]["signal/cosine_last"] == pytest.approx(expected.blocks[-1].cosine_mean)
    assert seen[0][1]["signal/lost_block"] == 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_training_is_not_changed():
    ids = torch.randint(0, 64, (2, 32))
    plain, watched = network(), network()
    train(plain, None, 4, ids)
    train(watched, SignalCallback(watched, every=1, budget=1.0), 4, ids)
    for one, two in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, two)


def test_it_keeps_within_its_budget():
    """Measuring at every step is asked for, which would cost far more than 2 % of it."""
    model, ids = network(), torch.randint(0, 64, (8, 32))
    callback = SignalCallback(model, every=1)
    train(model, callback, 4, ids)
    assert len(callback.history) == 1
    assert callback.seconds > 0
    callback._started -= 90 * callback.seconds  # one measurement in 90 times its cost: a second would come to 2.2 %
    train(model, callback, 1, ids)
    assert len(callback.history) == 1
    callback._started -= 20 * callback.seconds
    with callback.around(9):
        step(model, ids)
    assert len(callback.history) == 2


def test_gradient_accumulation_counts_the_first_pass():
    model, ids = network(), torch.randint(0, 64, (2, 32))
    callback = SignalCallback(model, every=1, budget=1.0)
    with callback.around(0):
        step(model, ids)
        step(model, ids)
    assert len(callback.history) == 1


def test_both_stacks_of_an_encoder_decoder_are_watched():
    """A fault in the second is logged, and its padding is not the first one's."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4, "vocab_size": 64}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(decoder_start_token_id=0, **sizes)).eval()
    ids, mask = torch.randint(2, 64, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[:, 7:] = 0
    callback = SignalCallback(model, every=1, budget=1.0)
    with callback.around(0):
        model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    sound = callback.history[0][1]
    assert sound.healthy
    assert [each.blocks[1].name for each in (sound, *sound.others)] == ["encoder.block.0", "decoder.block.0"]
    padded = [bool(np.isnan(each.locations["norm"]).any()) for each in (sound, *sound.others)]
    assert padded == [True, False]
    with torch.no_grad():
        model.decoder.block[1].layer[-1].DenseReluDense.wo.weight.zero_()
    callback = SignalCallback(model)  # whose first step is measured, whatever it takes
    with callback.around(0):
        model(input_ids=ids, labels=ids).loss.backward()
    faulty = callback.history[0][1]
    assert faulty.verdict.block == 2
    assert faulty.blocks[2].name == "decoder.block.1"


def test_an_error_in_the_step_takes_the_hooks_away():
    model = network()
    with pytest.raises(RuntimeError, match="stop"), SignalCallback(model).around(0):
        raise RuntimeError("stop")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Wrapper(nn.Module):
    """A training module that hands its batch on."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, batch: dict) -> torch.Tensor:
        return self.network(**batch).loss


def padded(real: int) -> tuple[nn.Module, dict]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=3, **sizes))
    ids, mask = torch.randint(1, 64, (2, 40)), torch.ones(2, 40, dtype=torch.long)
    ids[0, real:], mask[0, real:] = 0, 0
    return model, {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("how", ["names", "places", "wrapper"])
def test_padding_is_left_out(how):
    model, batch = padded(6)
    expected = inspect(model, {name: value[:1, :6] for name, value in batch.items()})
    whole = inspect(model, batch)
    outer = Wrapper(model) if how == "wrapper" else model
    callback = SignalCallback(outer)
    with callback.around(0):
        if how == "places":
            model(batch["input_ids"], batch["attention_mask"], labels=batch["labels"]).loss.backward()
        else:
            (outer(batch) if how == "wrapper" else outer(**batch).loss).backward()
    found = callback.history[0][1]
    for one, two, three in zip(found.blocks, expected.blocks, whole.blocks, strict=True):
        assert one.cosine_mean == pytest.approx(two.cosine_mean, abs=1e-5)
        assert one.gradient_mean == pytest.approx(three.gradient_mean, rel=1e-5)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in outer.modules())


def test_a_row_that_is_all_padding_is_not_logged(caplog):
    model, batch = padded(1)
    callback = SignalCallback(model)
    with callback.around(0):
        model(**batch).loss.backward()
    assert callback.history == []
    assert "step 0: a row of the batch has fewer than 2 tokens outside the padding" in caplog.text


def test_bad_options_are_named():
    with pytest.raises(ValueError, match="every is 0"):
        SignalCallback(network(), every=0)
    with pytest.raises(ValueError, match="share of the training time"):
        SignalCallback(network(), budget=2)


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_hugging_face_trainer(tmp_path):
    pytest.importorskip("accelerate", reason="Hugging Face's Trainer needs accelerate (extra: eval)")
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=32)
    config.bos_token_id = config.eos_token_id = None
    model = transformers.GPT2LMHeadModel(config)
    rows = [{"input_ids": torch.randint(0, 64, (16,))} for _ in range(8)]
    for row in rows:
        row["labels"] = row["input_ids"]
    options = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
    )
    callback = trainer_callback(every=2, budget=1.0)
    trainer = transformers.Trainer(model=model, args=options, train_dataset=rows, callbacks=[callback])
    trainer.train()
    logged = [line for line in trainer.state.log_history if "signal/cosine_last" in line]
    assert [line["step"] for line in logged] == [0, 2]
    assert logged[0]["signal/query_key_gradient"] > 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_lightning(monkeypatch):
    """Against a stand-in, for machines without Lightning; test_lightning.py has the real one."""
    stand_in = types.ModuleType("lightning.pytorch")
    stand_in.Callback = type("Callback", (), {})
    monkeypatch.setitem(sys.modules, "lightning", types.ModuleType("lightning"))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", stand_in)

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network()

        def log_dict(self, metrics, logger):
            assert not logger

    logged, ids, module = [], torch.randint(0, 64, (2, 32)), Module()
    logger = types.SimpleNamespace(log_metrics=lambda metrics, step: logged.append((step, metrics)))
    trainer = types.SimpleNamespace(global_step=7, loggers=[logger])
    callback = lightning_callback(every=1, budget=1.0)
    callback.on_train_batch_start(trainer, module, ids, 0)
    step(module.network, ids)
    callback.on_after_backward(trainer, module)
    callback.on_train_end(trainer, module)
    assert [number for number, _ in logged] == [7]
    assert "signal/norm_max" in logged[0][1]


def test_without_lightning_the_error_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    with pytest.raises(ModuleNotFoundError, match="pip install lightning"):
        lightning_callback()


def test_an_inspection_costs_at_most_three_passes():
    model, ids = network(6, 128), torch.randint(0, 64, (4, 64))

    def seconds(work) -> float:
        times = []
        for _ in range(4):
            started = time.process_time()
            work()
            times.append(time.process_time() - started)
        return min(times)

    plain = seconds(lambda: step(model, ids))
    watched = seconds(lambda: inspect(model, ids, labels=ids))
    assert watched <= 3.0 * plain + 0.3, (watched, plain)  # 0.3 s: theory's prediction

"""Our networks, and Llama, as transformers' own model tests take them: test_mixins.py puts this file among them."""

import importlib
import sys
import types
import unittest

import transformers
from transformers.models.auto import modeling_auto

from skipless.hf import (
    SkiplessConfig,
    SkiplessForCausalLM,
    SkiplessForSequenceClassification,
    SkiplessForTokenClassification,
    SkiplessModel,
)
from skipless.theory.propagation import Skip
from skipless.theory.schemes import ExponentialSPA, UniformSPA, ValueSkipInit

CASES = {
    "espa": {},
    "mirrored": {"mlp_init": "mirrored", "value_output": "identity", "intermediate_size": 64},
    "skips": {
        "attention_skip": Skip.normalised(0.5),
        "mlp_skip": Skip.normalised(0.5),
        "norm": "pre",
        "scheme": ExponentialSPA(gamma_final=1.0),
    },
    "uspa": {"scheme": UniformSPA()},
    "vskipinit": {"scheme": ValueSkipInit()},
}

# their testers look a class's name up in these tables, to know which labels it takes
for _table, _kind in (
    ("MODEL", SkiplessModel),
    ("MODEL_FOR_CAUSAL_LM", SkiplessForCausalLM),
    ("MODEL_FOR_SEQUENCE_CLASSIFICATION", SkiplessForSequenceClassification),
    ("MODEL_FOR_TOKEN_CLASSIFICATION", SkiplessForTokenClassification),
):
    getattr(modeling_auto, f"{_table}_MAPPING_NAMES")["skipless"] = _kind.__name__

# For two tests of packed rows, which work. Serving engines replace the attention of what says so: hence only here.
for _kind in (SkiplessModel, SkiplessForCausalLM, SkiplessForSequenceClassification, SkiplessForTokenClassification):
    _kind._supports_attention_backend = True

# What the snapshot of the tests has and the installed transformers has no more; distribution is not tested here.
transformers.PreTrainedConfig.has_no_defaults_at_init = False
sys.modules["tests.test_fsdp_mixin"] = types.ModuleType("tests.test_fsdp_mixin")
sys.modules["tests.test_fsdp_mixin"].FSDPTesterMixin = object
_parallel = importlib.import_module("transformers.distributed.tensor_parallel")
_parallel._get_parameter_tp_plan = getattr(_parallel, "_get_parameter_tp_plan", None)

theirs = importlib.import_module("tests.causal_lm_tester")


class SkiplessTester(theirs.CausalLMModelTester):
    base_model_class = SkiplessModel
    config_class = SkiplessConfig
    causal_lm_class = SkiplessForCausalLM
    sequence_classification_class = SkiplessForSequenceClassification
    token_classification_class = SkiplessForTokenClassification
    changes: dict = {}  # noqa: RUF012

    def get_config(self):
        names = [*SkiplessConfig.attribute_map, "vocab_size", "pad_token_id", "bos_token_id", "eos_token_id"]
        return SkiplessConfig(**{"activation": "gelu", **{name: getattr(self, name) for name in names}, **self.changes})


class LlamaTester(theirs.CausalLMModelTester):
    base_model_class = transformers.LlamaModel


def case(tester: type) -> type:
    fields = {"model_tester_class": tester, "_torch_compile_train_cls": tester.causal_lm_class}
    return type("TestCase", (theirs.CausalLMModelTest, unittest.TestCase), fields)


LlamaTester.causal_lm_class = transformers.LlamaForCausalLM
Test_llama = case(LlamaTester)
for _name, _changes in CASES.items():
    globals()[f"Test_{_name}"] = case(type(f"Tester_{_name}", (SkiplessTester,), {"changes": _changes}))

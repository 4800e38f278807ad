"""transformers' own ModelTesterMixin and GenerationTesterMixin on our networks, with Llama beside them.

Their tests are not part of transformers' package: $TRANSFORMERS_TESTS names a checkout of the repository.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import transformers

# What ends otherwise than for Llama; docs/inference.md has the reasons.
FAILED = {
    "test_custom_4d_attention_mask",
    "test_load_save_without_tied_weights",
    "test_model_weights_reload_no_missing_tied_weights",
    "test_resize_embeddings_untied",
    "test_resize_embeddings_untied_no_reinit_on_post_init",
}
SKIPPED = {
    "test_model_rope_scaling_from_config_0_linear",
    "test_model_rope_scaling_from_config_1_dynamic",
    "test_model_rope_scaling_from_config_2_yarn",
    "test_question_answering_model",
    "test_tp_plan_matches_params",
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_network_passes_what_llama_passes_but_for_a_known_list(tmp_path):
    checkout = os.environ.get("TRANSFORMERS_TESTS")
    if checkout is None:
        pytest.skip("TRANSFORMERS_TESTS names no checkout of the repository of transformers")
    place = tmp_path / "tests" / "models" / "skipless"
    shutil.copytree(Path(checkout) / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("models", "fixtures"))
    shutil.copy(Path(checkout) / "conftest.py", tmp_path)
    place.mkdir(parents=True)
    for folder in (place.parent, place):
        (folder / "__init__.py").touch()
    shutil.copy(Path(__file__).with_name("mixins.py"), place / "test_modeling_skipless.py")
    for name, target in (("src/transformers", Path(transformers.__file__).parent), ("utils", Path(checkout) / "utils")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(target)
    source = str(Path(sys.modules["skipless"].__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([source, str(tmp_path)]), "HF_HUB_OFFLINE": "1"}
    environment |= {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "pytest", "-q", "-rpfEs", "--no-fold-skipped", "-W", "ignore"]
    words += ["-p", "no:cacheprovider", str(place)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert "Test_vskipinit" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    outcomes: dict[str, dict[str, str]] = {}  # of each network: the outcome of each test
    pattern = r"^(PASSED|SKIPPED|FAILED|SUBFAILED|ERROR)\b.* \S+::Test_(\w+)::(\w+)"
    lines = re.findall(pattern, done.stdout, flags=re.MULTILINE)
    for outcome, network, name in lines:
        found = outcome.replace("SUB", "").replace("ERROR", "FAILED")
        if outcomes.setdefault(network, {}).get(name) != "FAILED":  # a subtest's failure counts, whatever follows
            outcomes[network][name] = found
    for network, each in outcomes.items():
        print(network, dict(Counter(each.values())))
    llama = outcomes.pop("llama")
    for word, known in (("FAILED", FAILED), ("SKIPPED", SKIPPED)):
        for network, each in outcomes.items():
            ours = {name for name, outcome in each.items() if outcome == word != llama[name]}
            assert ours == known, (network, word)  # what is mended leaves the list

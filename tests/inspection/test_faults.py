"""Faults of many kinds, planted in networks of many architectures: named, with the block and the cause; no false alarm.

`./dev test --full tests/inspection/test_faults.py` runs the whole catalogue, three places in a stack for each fault.
"""

from collections import Counter
from zlib import crc32

import pytest
import torch
import transformers
from tests.inspection import held_out, mistakes
from tests.inspection.catalogue import ARCHITECTURES, FAULTS, Size, build
from tests.inspection.outcomes import SETS, accused, outcome, said, set_of

from skipless.inspection.inspect import inspect
from skipless.inspection.inspection import Inspection
from skipless.inspection.pytest_plugin import assert_signal_preserved  # noqa: F401  (a fixture)
from skipless.model.config import ModelConfig
from skipless.model.transformer import Transformer
from skipless.theory.schemes import StandardAttention

pytestmark = pytest.mark.filterwarnings("ignore")
# What cannot be told, with the reason. A place is (fault,), (fault, architecture), or (fault, architecture, block).
_SMALL = "the first block outgrows a small embedding anyway"
BEYOND: dict[tuple, str] = {
    ("saturated", "gemma2"): "scores are capped before the softmax",
    ("no positions", "vit"): "zero positions are a known way to start, as in DeiT",
    ("all scaled down", "gemma2"): "every block brings its branches to norm 1 again",
    ("all scaled down", "xlnet"): "the same",
    ("no shortcut", "xlnet", 1): "its first block reads so little that nothing of it is left in the sum",
    ("two no shortcut", "xlnet", 1): "the same",
    ("shuffled", "xlnet", 1): "the same",
    **{("scale up", name, 1): _SMALL for name in ("gemma2", "pre-ln", "t5", "clip", "e-spa")},
    **{("no shortcut", name, 1): _SMALL for name in ("gemma2", "pre-ln", "bart")},
    **{("two no shortcut", name, 1): _SMALL for name in ("gemma2", "pre-ln", "clip", "bart")},
    **{("shuffled", name, 1): _SMALL for name in ("gemma2", "pre-ln")},
    ("head not tied", "gpt"): "nothing says that it should be",
    ("overflow in half precision", "olmo2"): "torch's attention makes zeros of scores that are not finite",
    ("shortcut detached", "olmo2", 1): _SMALL,
    ("shortcut added twice", "olmo2", 1): _SMALL,
    **{
        (fault, "modernbert", 1): "its first block is built otherwise"
        for fault in ("no softmax", "softmax over queries")
    },
    ("norm without epsilon", "modernbert", 1): "its first block has no norm before its attention",
    ("drawn with deviation one", "annotated"): "six times its siblings at this width, eight times from 64 on",
    ("positions drown tokens", "deit"): "its positions start at zero, so that nothing drowns",
    **{
        (fault, name): "its stream is so small that tanh does nothing"
        for fault in ("tanh on the stream", "tanh on the stream, every block")
        for name in ("gpt-neo", "stablelm")
    },
    ("MLP without its shortcut, every block",): "networks without shortcuts are built on purpose",
    ("norms of zero, every block",): "a note, since these norms learn to let a branch in",
    ("product for sum, every block", "siglip"): "what is left of the stream is still told apart",
    ("product for sum, every block", "pegasus"): "norms drop by about the bound, so another trace of it may come first",
    ("embedding too large", "roberta"): "a norm takes the size away, and what is left of positions is about the bound",
    ("tokens of one", "pegasus"): "the table that is changed is not the one that its stacks read",
    **{
        (f"{fault}, every block",): "only a sibling would tell"
        for fault in ("drawn by torch's default", "scaled for depth twice")
    },
    **{
        (f"{fault}, every block",): "a note, since networks are built so on purpose"
        for fault in ("stream halved", "scores scaled twice")
    },
    ("gradient times 0.01", "mbart", 6): "what comes to the encoder's last block is taken as one",
    **{
        (f"{fault}{where}",): "another matrix of the same draw: nothing that is measured changes"
        for fault in ("matrix transposed", "queries and keys swapped", "gate and up swapped")
        for where in ("", ", every block")
    },
    **{
        (f"{fault}, every block",): "only a sibling would tell"
        for fault in (
            *("window left on", "scores of one head for all", "branch subtracted", "branch times the share kept"),
            *("RMSNorm for LayerNorm", "halves rotated for pairs", "values rotated", "rotated before heads are cut"),
            *("groups tiled", "norm behind the sum", "MLP beside attention", "heads cut across"),
            "both halves of a gate activated",
        )
    },
    **{
        (fault, "beit", 1): "its first block has no stochastic depth, so it is built otherwise"
        for fault in (
            *("window left on", "first key hidden", "scores of one head for all", "branch subtracted"),
            *("branch times the share kept", "RMSNorm for LayerNorm", "stream in bfloat16"),
            "stochastic depth that never rests",
        )
    },
    **{
        (f"{fault}, every block", "mpnet"): "distances are added to its scores"
        for fault in ("scale of the whole width", "scores times the head's width")
    },
    **{
        ("first key hidden, every block", name): "the first location sees itself"
        for name in ("mpnet", "beit", "blenderbot")
    },
    ("sigmoid for logits", "beit"): "it gives two numbers a row",
    **{(f"first key only{where}", "msn"): "a gradient dies out with it" for where in ("", ", every block")},
}


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


def test_the_catalogue_is_as_large_as_it_is_said_to_be():
    assert len(FAULTS) >= 40
    assert len(ARCHITECTURES) >= 12
    assert len(held_out.FAULTS) >= 10
    assert len(mistakes.FAULTS) >= 15
    for part in ("ARCHITECTURES", "FAULTS"):
        names = [name for known in SETS.values() for name in getattr(known, part)]
        assert len(names) == len(set(names))


@pytest.mark.catalogue(40)
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("fault", [fault for known in SETS.values() for fault in known.FAULTS])
def test_a_fault_is_named_with_its_block_and_its_cause(fault, place, full):
    """In every architecture with --full, in a few otherwise. Of a fault, one architecture in twelve may be missed."""
    chosen = [*set_of(fault).ARCHITECTURES][0 if full else crc32(fault.encode()) % 4 :: 1 if full else 6]
    outcomes = {name: outcome(fault, name, place, BEYOND) for name in chosen}
    tried = {name: result for name, result in outcomes.items() if result is not None}
    count = Counter[str]()
    for each in tried.values():
        count += Counter(found=each.found, block=each.block, cause=each.cause)
    missed = [f"{name}: {each}" for name, each in tried.items() if not (each.found and each.block and each.cause)]
    allowed = len(tried) // 12
    assert len(tried) - min(count["found"], count["block"], count["cause"], len(tried)) <= allowed, missed


@pytest.mark.parametrize(
    ("fault", "architecture", "place"),
    [
        ("cut output", "llama", 1),
        ("cut input", "hand", 2),
        ("attention cut", "xlnet", 1),
        ("output not read", "nano", 1),
        ("stream halved", "roberta", 0),
    ],
)
def test_a_trace_that_a_fault_leaves_elsewhere_is_not_taken_for_it(fault, architecture, place):
    """Blocks before a cut get no gradient either, and a norm after the sum takes the factor of a block back."""
    found = outcome(fault, architecture, place)
    assert found is not None
    assert (found.block, found.cause) == (True, True), found.said


def healthy(full: bool) -> list[tuple[str, Size]]:
    sizes = [Size(depth, width, seed) for depth in (1, 2, 3, 6, 12) for width in (32, 64) for seed in (0, 1)]
    pairs = [(name, size) for known in SETS.values() for name in known.ARCHITECTURES for size in sizes]
    pairs = [(name, size) for name, size in pairs if name != "torch-both" or size.depth < 12]  # Post-LN, does collapse
    return pairs if full else pairs[::19]


def test_healthy_networks_are_not_accused(full):
    networks = healthy(full)
    assert len(networks) >= (300 if full else 30)
    alarms = []
    for name, size in networks:
        words = accused(build(_architecture(name), size))
        if words:
            alarms.append((name, size, words))
    assert len(alarms) <= len(networks) // 100, alarms


def _architecture(name: str):
    return next(known.ARCHITECTURES[name] for known in SETS.values() if name in known.ARCHITECTURES)


@pytest.mark.parametrize(
    ("part", "factor", "words"),
    [
        ("attn.c_proj.weight", 100.0, "attn.c_proj.weight of block 1 (transformer.h.0) is large"),
        ("mlp.c_fc.weight", 100.0, "mlp.c_fc.weight of block 1 (transformer.h.0) is large"),
        ("ln_2.weight", 0.0, "ln_2.weight of block 1 (transformer.h.0) is zero, unlike the other norms of its block"),
    ],
)
def test_a_single_block_is_read_against_itself(part, factor, words):
    case = build("gpt2", Size(1))
    assert accused(case) == ""
    with torch.no_grad():
        case.model.transformer.h[0].get_parameter(part).mul_(factor)
    assert words in inspect(case.model, case.batch).verdict.text


@pytest.mark.parametrize("depth", [1, 2])
def test_a_block_whose_outputs_start_at_zero_is_sound(depth):
    """Also the only one. Where one branch alone gives nothing, or nothing learns, it is no such start."""
    case = build("hand", Size(depth))
    last = [block.attention.out_proj for block in case.model.blocks] + [block.mlp[2] for block in case.model.blocks]
    for matrix in last:
        torch.nn.init.zeros_(matrix.weight)
    assert accused(case) == ""
    for matrix in last:
        matrix.register_forward_hook(lambda module, args, out: out.detach())
    assert inspect(case.model, case.batch).verdict.lost
    case = build("hand", Size(1))
    torch.nn.init.zeros_(case.model.blocks[0].mlp[2].weight)
    assert "mlp.2.weight of block 1 (blocks.0) is zero" in inspect(case.model, case.batch).verdict.text


def test_a_block_is_at_fault_where_it_loses_the_signal_by_itself():
    case = build("gpt2")
    torch.nn.init.zeros_(case.model.transformer.h[2].mlp.c_proj.weight)
    assert inspect(case.model, case.batch).at_fault
    worn = Transformer(
        ModelConfig(vocab_size=64, width=64, heads=4, length=16, depth=24, hidden=0, scheme=StandardAttention())
    )
    found = inspect(worn, torch.randint(0, 64, (2, 16)))
    assert found.verdict.kind == "collapse"
    assert not found.at_fault


def test_later_blocks_with_the_same_odd_parameter_are_named_too():
    case = build("gpt2")
    for at in (2, 3, 5):
        torch.nn.init.constant_(case.model.transformer.h[at].mlp.c_fc.bias, -1e3)
    text = inspect(case.model, case.batch).verdict.text
    assert text.startswith(
        "mlp.c_fc.bias of block 3 (transformer.h.2) is larger than those of the other blocks: 1e+03."
    )
    assert "It is odd in blocks 4, 6 too. Where it is negative, an activation behind it is never on." in text


def test_a_missing_shortcut_is_no_collapse_where_locations_are_told_apart():
    case = build("hand")
    case.model.blocks[2].register_forward_hook(lambda module, args, out: out - args[0])
    found = inspect(case.model, case.batch)
    assert (found.verdict.kind, found.verdict.block) == ("fault", 3)
    assert found.blocks[3].cosine_mean < 0.9


@pytest.mark.parametrize("bound", [torch.tanh, lambda x: x.clamp(-1.0, 1.0)])
def test_a_stream_that_is_cut_off_is_told_from_one_that_is_small(bound):
    case = build("hand")
    case.model.blocks[2].register_forward_hook(lambda module, args, out: bound(50.0 * out))
    found = inspect(case.model, case.batch)
    assert found.verdict.block == 3
    assert "the stream itself is clipped" in found.verdict.text
    assert found.blocks[3].outlier < 1.6 < found.blocks[2].outlier


@pytest.mark.parametrize("architecture", ["opt", "qwen2", "bloom", "distilbert", "marian", "annotated"])
def test_a_padded_batch_is_no_fault_where_the_mask_is_kept(architecture):
    case = build(mistakes.ARCHITECTURES[architecture])
    assert mistakes.padded(case)
    assert accused(case) == ""


def test_a_stack_is_read_the_same_way_whichever_axis_holds_the_rows():
    """Also where there are as many rows as locations."""
    plain, swapped = build("hand-causal"), build("hand-swapped")
    ids = torch.randint(0, 64, (8, 8), generator=torch.Generator().manual_seed(0))
    one, two = inspect(plain.model, ids), inspect(swapped.model, ids)
    assert [each.cosine_mean for each in one.blocks] == pytest.approx([each.cosine_mean for each in two.blocks])


def test_both_stacks_of_an_encoder_decoder_are_inspected():
    case = build("t5")
    found = inspect(case.model, case.batch)
    assert found.blocks[1].name == "encoder.block.0"
    assert [other.blocks[1].name for other in found.others] == ["decoder.block.0"]
    assert "decoder.block, 6 blocks, was inspected too: preserved." in found.notes
    assert found.others[0].blocks[1].gradient_mean > 0
    again = Inspection.from_dict(found.as_dict())
    assert again.others[0].blocks[-1].cosine_mean == found.others[0].blocks[-1].cosine_mean
    assert again.notes == found.notes


def test_an_encoder_decoder_needs_no_ids_for_its_decoder():
    case = build("t5")
    ids = case.batch["input_ids"]
    assert inspect(case.model, ids).healthy
    assert inspect(case.model, {"input_ids": ids, "labels": ids}).healthy


def test_a_stack_that_does_not_run_is_named():
    case = build("clip")
    model = case.model.text_model
    found = inspect(case.model, case.batch)
    assert len(found.others) == 1
    model.spare = torch.nn.ModuleList(type(model.encoder.layers[0])(model.config) for _ in range(3))
    assert "spare, 3 blocks, was left out: it did not run." in " ".join(inspect(case.model, case.batch).notes)


TRAINED = ("gpt2", "llama", "neox", "qwen3", "gemma2", "mixtral", "mamba", "hand-causal", "pre-ln", "e-spa")


@pytest.mark.catalogue(3)
@pytest.mark.parametrize("rate", [1e-2, 3e-3])
@pytest.mark.parametrize("architecture", TRAINED)
def test_a_network_that_trains_is_not_accused_on_its_way(architecture, rate):
    """Where a few tokens are frequent, the first steps add one vector to all locations: nothing is lost by that."""
    case = build(architecture, Size(4, 32, 1))
    model, optimizer = case.model, torch.optim.AdamW(case.model.parameters(), rate)
    generator = torch.Generator().manual_seed(0)
    frequency = 1.0 / torch.arange(1, 65)
    losses = []
    for step in range(41):
        ids = torch.multinomial(frequency, 8 * 12, replacement=True, generator=generator).view(8, 12)
        ids[:, 1::2] = (ids[:, ::2] + 1) % 64  # every other token follows from the one before it
        output = model(ids)
        logits = getattr(output, "logits", output)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step in (3, 8, 15, 25, 40):
            found = inspect(model, ids[:3], keep_kernels=False)
            assert found.healthy, (step, said(found))
    assert losses[-1] < losses[0] - 0.3


def test_the_fixture_fails_in_words(assert_signal_preserved):  # noqa: F811
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, 0.0, norm_first=True, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    assert assert_signal_preserved(model, torch.randn(2, 8, 16)).healthy
    torch.nn.init.zeros_(model.layers[2].linear2.weight)
    with pytest.raises(pytest.fail.Exception, match=r"linear2\.weight of block 3 \(layers\.2\) is zero") as failure:
        assert_signal_preserved(model, torch.randn(2, 8, 16))
    assert "Look at layers.2.linear2.weight" in failure.value.msg
    assert not failure.value.pytrace
    assert failure.value.__context__ is None

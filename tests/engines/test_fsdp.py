"""FSDPEngine in every layout against a plain loop around transformers, on gloo processes.

One launch of fsdp_worker.py for each number of ranks runs all its cases; every case is a test here.
"""

import functools
import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPTNeoXConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from config import InputError, load
from engines import optimizer, schedule
from engines.checkpoint.export import merged_weights, write_safetensors
from engines.fsdp.attention import has_whole_heads
from engines.fsdp.engine import FSDPEngine
from engines.fsdp.transforms import build_model
from engines.heads import Head
from engines.memory import GIB, checkpoint_bytes, estimates, max_num_seqs
from engines.model import experts, lora
from engines.model.flops import count_flops
from engines.model.hf import auto_class, build_on_meta, read_hf_config, whole_modules
from engines.model.lengths import check_rope
from engines.model.logits import logit_constants
from engines.model.model_files import weight_files
from engines.model.shape import attention_widths, head_dim
from engines.optimizer import OPTIMIZERS
from engines.parallel import offload
from tests import families
from tests.engines.fsdp_worker import BROKEN, CASES, FORMS, FREEZE, HARMS, LORA
from tests.support.foreign import FOREIGN, LATENT
from tests.support.launch import LONG_LIMIT, export, launch
from tests.support.models import FAMILIES, MULTIMODAL, make_model, write_model
from tests.support.plain import (
    LOG_PROB_BOUND,
    LOSS_BOUND,
    NORM_BOUND,
    WEIGHT_BOUND,
    check_answers,
    column,
    learning_rate,
    make_adapter,
    matches_any,
    plain_answers,
    plain_loss,
    plain_model,
    plain_training,
    tensor_bytes,
    worst,
)
from tests.support.training import CLIP, LONGEST, TOTAL_STEPS, make_batch

# torch's Muon orthogonalizes in bfloat16, in which a rounding error of a gradient now and then flips a bit.
MUON_BOUND = 50
EXACT = [
    (world, name)
    for world in CASES
    for name, case in CASES[world].items()
    if "bfloat16" not in case.engine and "aux" not in name
]
BALANCED = [(world, name) for world in CASES for name in CASES[world] if "aux" in name]
ROUNDED = [
    (world, name)
    for world in CASES
    for name, case in CASES[world].items()
    if "bfloat16" in case.engine
]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Two threads would spend their time waiting for each other over models this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Weights of layers that transformers does not have: they predict further tokens. Experts among them are not stacked.
IGNORED = {
    "qwen3_next": "mtp.fc.weight",
    "glm4_moe": "model.layers.46.mlp.experts.0.gate_proj.weight",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp")
    for family in ("qwen2_tied", "qwen3", "llama"):
        make_model(folder / family, family)
        make_adapter(folder / family)
    make_model(folder / "qwen3_moe", "qwen3_moe")
    # Of 3 choices in 2 layers: 0.3 of the sum over layers.
    make_model(
        folder / "qwen3_moe_balanced",
        "qwen3_moe",
        num_hidden_layers=2,
        output_router_logits=True,
        router_aux_loss_coef=0.2,
    )
    for family in ("apertus", "lfm2"):
        make_model(folder / family, family)
    make_model(
        folder / "three_heads",
        "llama",
        num_attention_heads=3,
        num_key_value_heads=3,
        hidden_size=48,
    )
    make_model(folder / "deaf", "qwen3")
    make_model(folder / "both ways", "gemma3", use_bidirectional_attention=True)
    rewrite(folder / "deaf", lambda name, x: (name, x * 0 if "o_proj" in name else x))
    make_model(
        folder / "renamed",
        "qwen2_tied",
        model_type="qwen3_5_text",
        head_dim=8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    rewrite(
        folder / "renamed", lambda name, x: (name.replace("model.", "model.language_model.", 1), x)
    )
    make_model(
        folder / "sliding",
        "qwen2_tied",
        use_sliding_window=True,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    for name, changes in FOREIGN.items():
        make_model(folder / name, "qwen2_tied", **changes)
    for family in MULTIMODAL:
        make_model(folder / family, family)
        (folder / family / "preprocessor_config.json").write_text('{"size": 28}')
    for family, name in IGNORED.items():
        add(folder / family, name, torch.randn(4, 3))
    (folder / "qwen2_tied" / "generation_config.json").unlink(
        missing_ok=True
    )  # not every model has one
    for name in BROKEN:
        make_model(folder / name, "llama")
        file = folder / name / "model.safetensors"
        weights = load_file(file)
        if name == "no_files":
            file.unlink()
            continue
        if name == "missing_weight":
            del weights["model.norm.weight"]
        else:
            weights["lm_head.weight"] = weights["lm_head.weight"][:-1].clone()
        save_file(weights, file, metadata={"format": "pt"})
    return folder


def add(directory, name, tensor):
    """One more tensor in a model's file."""
    file = directory / "model.safetensors"
    save_file({**load_file(file), name: tensor}, file, metadata={"format": "pt"})


def rewrite(directory, change):
    """Replace each weight's (name, tensor) in a model's file."""
    weights = load_file(directory / "model.safetensors")
    save_file(
        dict(change(name, x) for name, x in weights.items()),
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )


def run(num_ranks, folder):
    launch(num_ranks, "tests/engines/fsdp_worker.py", folder, timeout=LONG_LIMIT, fresh=True)
    return json.loads((folder / f"{num_ranks}.json").read_text())


@pytest.fixture(scope="module")
def ranks4(folder):
    return run(4, folder)


@pytest.fixture(scope="module")
def ranks2(folder, ranks4):  # after 4 ranks, whose checkpoints it reads
    return run(2, folder)


@pytest.fixture(scope="module")
def ranks1(folder, ranks2):  # after 2 ranks, whose checkpoints it rotates
    return run(1, folder)


@pytest.fixture
def results(request):
    """world size -> what that launch wrote down"""
    return lambda world: request.getfixturevalue(f"ranks{world}")


# -- the plain loop ----------------------------------------------------------------------------------------------------


# -- training and asking -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world, name", EXACT)
def test_training_equals_a_plain_loop(results, folder, world, name):
    case, result = CASES[world][name], results(world)[name]
    assert "error" not in result, result["error"]
    plain = plain_training(
        folder / case.family, case.optimizer == "muon", case.lora, FREEZE if case.freeze else ()
    )
    losses, norms, weights = plain.losses, plain.norms, plain.weights
    # Adam makes a whole step of a rounding error in a gradient that is next to nothing, as some in experts are.
    steps, factor = (
        result["steps"],
        MUON_BOUND if case.optimizer == "muon" else 5 if case.family == "qwen3_moe" else 1,
    )
    assert len(steps) == case.steps
    assert worst(column(steps, "loss"), losses[: case.steps]) < LOSS_BOUND * factor
    assert worst(column(steps, "grad_norm"), norms[: case.steps]) < NORM_BOUND * factor
    assert column(steps, "lr") == pytest.approx(
        [learning_rate(s) for s in range(case.steps)], rel=1e-12
    )
    assert set(column(steps, "skipped")) == {0.0}
    assert len(set(result["digests"])) == 1, "ranks export different weights"
    if case.steps in weights:
        exported, weights = load_file(folder / f"{world} {name}.safetensors"), weights[case.steps]
        assert set(exported) - {"asked"} == set(weights)
        assert (
            max((exported[n] - w).abs().max().item() for n, w in weights.items())
            < WEIGHT_BOUND * factor
        )


@pytest.mark.parametrize("family", ["qwen2_tied", "qwen3", "llama", "sliding"])
def test_the_plain_loop_could_tell(folder, family):
    """What the comparison above rests on: the loss falls, all steps are clipped, and every weight moves much further
    than the bound on its error."""
    plain = plain_training(folder / family)
    losses, norms, weights = plain.losses, plain.norms, plain.weights
    assert losses[-1] < 0.9 * losses[(TOTAL_STEPS - 1) % 4]  # the same batch
    assert min(norms) > CLIP
    before = load_file(folder / family / "model.safetensors")
    for after in weights.values():
        assert (
            min((w - before[n]).abs().max().item() for n, w in after.items()) > 100 * WEIGHT_BOUND
        )


@pytest.mark.parametrize("world, name", EXACT)
def test_log_probs_equal_transformers(results, folder, world, name):
    case, result = CASES[world][name], results(world)[name]
    assert "error" not in result, result["error"]
    weights = load_file(folder / f"{world} {name}.safetensors")
    asked, want = weights.pop("asked"), plain_answers(folder / case.family, weights)
    cp = dict(s.split("=") for s in case.engine.split()).get("context_parallel_size", 1)
    check_answers(asked, want, None if cp == "auto" else int(cp), case.uneven)
    assert case.steps < TOTAL_STEPS or want[2].sum() > 10, "too few greedy tokens to tell"


@pytest.mark.parametrize("world", [2, 4])
def test_the_first_ratio_is_1_where_ranks_share_some_sequences(results, world):
    assert results(world)["first_ratio"] == 0


@pytest.mark.parametrize("world, name", ROUNDED)
def test_bfloat16_is_near(results, folder, world, name):
    case, result = CASES[world][name], results(world)[name]
    losses = plain_training(folder / case.family, lora=case.lora).losses
    got = column(result["steps"], "loss")
    master = "param_dtype" not in case.engine
    assert 10 * LOSS_BOUND < worst(got, losses[: case.steps]) < (0.01 if master else 0.05)
    assert (
        result["stored_dtypes"]
        == ["torch.bfloat16"] * (not master or case.lora) + ["torch.float32"] * master
    )
    exported = load_file(folder / f"{world} {name}.safetensors")
    assert {x.dtype for n, x in exported.items() if n != "asked"} == {torch.bfloat16}


@pytest.mark.parametrize(
    "world, again, once",
    [
        (1, "again qwen3", "plain qwen3"),
        (2, "again qwen3", "plain qwen3"),
        (4, "again cp2 dp2", "cp2 dp2"),
        (4, "again auto", "auto"),
    ],
)
def test_same_layout_same_bits(results, world, again, once):
    steps = results(world)[again]["steps"]
    assert steps == results(world)[once]["steps"][: len(steps)]


def test_a_token_called_padding_is_learned_like_others(folder, tmp_path):
    """Unless its row is zero: transformers would leave it alone anyway; packed sequences hold it as a word."""
    make_model(tmp_path, "qwen3", pad_token_id=5)
    hf_config = read_hf_config(tmp_path)
    assert AutoModelForCausalLM.from_config(hf_config).get_input_embeddings().padding_idx == 5
    assert build_on_meta(hf_config, torch.float32).get_input_embeddings().padding_idx is None


def calls_a_step(result):
    return result["attention_calls"] / len(result["steps"])


def test_recomputation_happens(results):
    assert calls_a_step(results(2)["recompute"]) == 2 * calls_a_step(results(2)["plain qwen2_tied"])


def test_micro_batches_happen(results):
    assert (
        calls_a_step(results(1)["one micro-batch"]) == 1
        and calls_a_step(results(1)["plain llama"]) >= 2
    )


@pytest.mark.parametrize("world", [1, 2])
def test_non_finite_gradient_is_skipped(results, world):
    result = results(world)["non_finite"]
    assert result["poisoned"]["skipped"] == 1.0 and not math.isfinite(
        result["poisoned"]["grad_norm"]
    )
    assert result["untouched"] == [True] * world
    assert result["with_nan"] == result["without"] and result["without"][2]["skipped"] == 0.0


def test_norms_and_biases_are_not_decayed(folder):
    """Without a gradient AdamW's step is weight decay alone."""
    model = AutoModelForCausalLM.from_pretrained(folder / "qwen2_tied", dtype=torch.float32)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    (adamw,) = optimizer.build(
        model, model.model.layers, config(folder, "optim.lr=0.1", "optim.weight_decay=0.5").optim
    )
    adamw.step()
    kept = {n for n, p in model.named_parameters() if torch.equal(p, before[n])}
    assert (
        kept == {n for n in before if "norm" in n or n.endswith("bias")} and len(kept) == 3 * 5 + 1
    )
    for name, parameter in model.named_parameters():
        if name not in kept:
            torch.testing.assert_close(parameter.detach(), before[name] * (1 - 0.1 * 0.5))


# -- parameters that are not trained -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "world, name", [(world, name) for world, name in EXACT if CASES[world][name].freeze]
)
def test_frozen_parameters_stay_to_the_bit(results, folder, world, name):
    """With weight decay, and without optimizer state; all others move."""
    before, after = (
        load_file(file)
        for file in (folder / "llama/model.safetensors", folder / f"{world} {name}.safetensors")
    )
    kept = {n for n, x in before.items() if torch.equal(x, after[n])}
    assert (
        kept == {n for n in before if matches_any(FREEZE, n)}
        and 10 < len(kept) < len(before) / 2 + 1
    )
    assert set(results(world)[name]["trained"]) == before.keys() - kept
    assert results(world)[name]["states"] == len(before.keys() - kept)


def test_a_run_with_frozen_parameters_resumes(ranks2, folder):
    result, freeze = ranks2["frozen"], f"model.freeze={[*FREEZE]}"
    assert result["resumed"] == result["uninterrupted"]
    metadata = FileSystemReader(
        folder / "checkpoints_frozen" / "step_00000002" / "weights"
    ).read_metadata()
    assert checkpoint_bytes(config(folder, freeze)) == pytest.approx(
        tensor_bytes(metadata), rel=0.01
    )


def test_flops_and_memory_of_frozen_parameters(folder):
    """A product with a weight costs 2, and 2 each for the gradients of its input and of the weight."""

    def measured(*pairs):
        settings, numbers = config(folder, *pairs), {}
        numbers["flops"] = count_flops(
            build_model(settings, Head.LOG_PROBS)[0], read_hf_config(folder / "llama")
        )
        return numbers | estimates(settings, 2, "cuda")[0]

    whole, frozen = measured(), measured(f"model.freeze={[*FREEZE]}")
    attention = 2 * 32 * 32 + 2 * 32 * 16
    layer = attention + 3 * 32 * 48
    assert whole["flops"] == (6 * 3 * layer, 6 * 97 * 32, 6 * 3 * 4 * 8)
    assert frozen["flops"] == (
        (2 + 6 + 6) * layer - 2 * attention,
        6 * 97 * 32,
        (2 + 6 + 6) * 4 * 8,
    )
    above = measured("model.freeze=[layers.1, lm_head]")["flops"]
    assert above == ((6 + 4 + 6) * layer, 4 * 97 * 32, 6 * 3 * 4 * 8)
    sizes = {n: x.numel() for n, x in load_file(folder / "llama/model.safetensors").items()}
    trained = sum(size for n, size in sizes.items() if not matches_any(FREEZE, n)) / sum(
        sizes.values()
    )
    assert frozen["parameters"] == whole["parameters"] and trained < 0.7
    for part in ("gradients", "optimizer"):
        assert frozen[part] == pytest.approx(whole[part] * trained)


@pytest.mark.parametrize(
    "family, pairs, message",
    [
        (
            "llama",
            ["[visual]"],
            "'visual' matches no name in the files of .*; the nearest are .*weight",
        ),
        ("llama", ["['(']"], "model.freeze: '\\(' is no regular expression"),
        ("llama", ["[model, head]"], "model.freeze=\\['model', 'head'\\] leaves nothing to train"),
        (
            "llama",
            ["[norm]", "model.lora.rank=4"],
            "does nothing with model.lora.rank=4, which trains only adapters",
        ),
        (
            "qwen2_tied",
            ["[embed]"],
            "matches model.embed_tokens.weight but not lm_head.weight, which model_engine=fsdp holds",
        ),
        (
            "gemma3 with images",
            ["[vision_tower]"],
            "'vision_tower' matches only weights that this run leaves alone, such as .*vision_tower.*: leave it out",
        ),
        (
            "qwen3_moe",
            ["[experts.0]"],
            "matches .*0.mlp.experts.0.gate_proj.weight but not .*0.mlp.experts.1.gate_proj.weight",
        ),
    ],
)
def test_what_cannot_be_frozen(folder, family, pairs, message):
    with pytest.raises(InputError, match=message):
        FSDPEngine.check(
            config(folder, f"model.path={folder / family}", f"model.freeze={pairs[0]}", *pairs[1:]),
            1,
        )


def test_what_can_be_frozen(folder):
    """A critic's value head is trained whatever the patterns say, and its model need not have the names."""
    for patterns, head, kept in (
        ("[.]", Head.VALUES, {"lm_head.weight"}),
        ("[visual, embed]", Head.VALUES, None),
        ("[embed, head]", Head.LOG_PROBS, None),
    ):
        settings = config(folder, f"model.path={folder / 'qwen2_tied'}", f"model.freeze={patterns}")
        FSDPEngine.check(settings, 1, head)
        trained = {
            name for name, p in build_model(settings, head)[0].named_parameters() if p.requires_grad
        }
        assert (
            trained == kept
            or kept is None
            and "model.embed_tokens.weight" not in trained
            and len(trained) > 30
        )


# -- host memory -------------------------------------------------------------------------------------------------------


def test_tensors_come_back_from_the_same_host_memory(monkeypatch):
    """Bit for bit, with their views, also where a tensor begins in one part of it and ends in another."""
    monkeypatch.setattr(offload, "PART_BYTES", 2**14)
    memory = offload.HostMemory(torch.device("cpu"))
    tensors = [torch.randn(n) for n in (3000, 9000, 10, 1025)]
    tensors.append(tensors[1][100:200])  # of the same storage
    elsewhere, want = torch.empty(5000, device="meta"), [x.clone() for x in tensors]
    memory.reserve([*tensors[:4], elsewhere])
    reserved = [part.result().data_ptr() for part in memory.parts]
    for _ in range(3):
        memory.offload([*tensors, elsewhere])
        assert [x.untyped_storage().nbytes() for x in tensors] == [0, 0, 40, 0, 0], (
            "small ones stay"
        )
        memory.offload(tensors)
        memory.onload(tensors)
        assert all(torch.equal(x, y) for x, y in zip(tensors, want))
        want[0] = tensors[0].neg_().clone()
        assert [part.result().data_ptr() for part in memory.parts] == reserved and len(
            reserved
        ) == 5
    memory.offload([more := torch.randn(2**14)])
    assert len(memory.parts) == 8 and more.untyped_storage().nbytes() == 0, (
        "nobody has reserved that"
    )


def test_host_memory_is_taken_before_the_optimizer_has_a_state(results):
    """As much as it is going to need, once: moments of AdamW and Muon."""
    (before, _), (after, left), (again, left_again) = results(4)["muon_resume"]["host memory"]
    assert before == after == again and len(before) > 4 and left == left_again < 2000


def test_dry_run_counts_what_waits_in_host_memory(folder):
    def waits(role, *pairs, device_type="cuda", name="waits in pinned host memory"):
        settings = load(
            "ppo.yaml", [f"model.path={folder / 'qwen3'}", "data.train_files=unused", *pairs]
        )
        (sizes,) = estimates(settings, 1, device_type, role)
        return sizes.get(name, 0.0), sizes.get("parameters", 0.0)

    got, parameters = waits("actor")
    assert got == pytest.approx(3 * parameters) and waits("actor", "offload.optimizer=false") == (
        parameters,
        parameters,
    )
    assert (
        waits("reference")[0] == parameters
        and waits("reference", "offload.reference=false")[0] == 0
    )
    assert (
        waits("actor", "engine.cpu_offload=true")[0] == 0
        and waits("actor", device_type="cpu")[0] == 0
    )
    megatron, parameters = waits("actor", "model_engine=megatron", "engine.compute_dtype=bfloat16")
    assert megatron == pytest.approx(7 * parameters), "with masters in fp32"


def test_vllm_decodes_as_many_responses_at_once_as_fit(folder):
    def decoded(*pairs, world=1, gib=139.0):
        settings = load(
            "ppo.yaml",
            [
                f"model.path={folder / 'qwen3'}",
                "data.train_files=unused",
                "data.train_batch_size=8",
                "data.max_prompt_length=100",
                "rollout.max_tokens=200",
                "engine.compute_dtype=float32",
                *pairs,
            ],
        )
        return max_num_seqs(settings, world, int(gib * GIB))

    assert decoded() == decoded(gib=0) == 64 and decoded(world=2) == 32, "as many as it gets"
    two, tp2 = "data.train_batch_size=5", "rollout.tensor_parallel_size=2"
    assert decoded(two, world=2) == 24 and decoded(two, tp2, world=2) == 40, (
        "two prompts on the other, or all on one"
    )
    assert (
        decoded("data.train_batch_size=1000") == 1024
        and decoded("rollout.max_tokens=1000000000") == 1
    )
    assert decoded("data.train_batch_size=1000", "rollout.max_num_seqs=7") == 7
    # 200 tokens x 3 layers x keys and values x 2 heads of 16 numbers in fp32, divided by tensor-parallel ranks.
    each = 200 * 3 * 2 * 2 * 16 * 4
    for pairs, world, bytes_of_one in ([], 1, each), ([tp2], 2, each / 2):
        assert (
            decoded("rollout.kv_cache_gib=0.002", *pairs, world=world)
            == int(0.002 * GIB / bytes_of_one)
            < 40
        )
    # A model whose configuration has no number of key and value heads: one for each of its 8 heads.
    GPTNeoXConfig(hidden_size=128, num_hidden_layers=3, num_attention_heads=8).save_pretrained(
        folder / "no_kv_heads"
    )
    assert decoded("rollout.kv_cache_gib=0.002", f"model.path={folder / 'no_kv_heads'}") == int(
        0.002 * GIB / (4 * each)
    )
    weights = (
        checkpoint_bytes(config(folder, f"model.path={folder / 'qwen3'}")) / 3
    )  # Adam's moments are as large
    room, short = (
        0.5 * 0.0018 * GIB - weights,
        ("data.max_prompt_length=10", "rollout.max_tokens=20"),
    )
    got = decoded("rollout.gpu_memory_utilization=0.5", *short, gib=0.0018)
    assert got == int(room / (each / 10 + 3 * 97 * 4)) < int(room / (each / 10)) < 64, (
        "the vocabulary has 97 words"
    )


# -- optimizers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 4])
def test_muon_orthogonalizes_whole_matrices(results, world):
    """The same numbers as without ranks, but for the rounding of an addition."""
    assert all(difference < 1e-6 for difference in results(world)["muon_steps"].values())
    assert len(results(world)["muon_steps"]) == (2 if world == 4 else 1)


def test_muon_has_the_hidden_matrices_and_adamw_the_rest(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)
    found = optimizer.build(
        model,
        model.model.layers,
        config(folder, "optim.name=muon", "optim.kwargs.momentum=0.5").optim,
    )
    names = {id(p): name for name, p in model.named_parameters()}
    of_muon, of_adamw = (
        {names[id(p)] for group in o.param_groups for p in group["params"]} for o in found
    )
    assert isinstance(found[0], torch.optim.Muon) and found[0].param_groups[0]["momentum"] == 0.5
    assert (
        of_muon == {name for name in names.values() if "_proj.weight" in name}
        and len(of_muon) == 3 * 7
    )
    assert (
        of_adamw == set(names.values()) - of_muon
        and {"lm_head.weight", "model.embed_tokens.weight"} < of_adamw
    )
    model.model.requires_grad_(False)
    for name in OPTIMIZERS:  # nothing is left for Muon
        (alone,) = optimizer.build(
            model, model.model.layers, config(folder, f"optim.name={name}").optim
        )
        assert isinstance(alone, torch.optim.AdamW) and alone.param_groups[0]["params"] == [
            model.lm_head.weight
        ]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_muon_resumes_and_has_one_moment(results, folder, world):
    whole, result = results(4)["muon_resume"], results(world)["muon_resume"]
    assert (
        worst(column(result["resumed"], "loss"), column(whole["uninterrupted"], "loss"))
        < LOSS_BOUND
    )
    if world == 4:
        assert (
            result["resumed"] == whole["uninterrupted"]
            and whole["resumed_weights"] == whole["weights"]
        )
    settings = config(
        folder, f"model.path={folder / 'qwen3'}", "engine.compute_dtype=float32", "optim.name=muon"
    )
    told = estimates(settings, world, "cpu")[0]["optimizer"] * GIB
    assert sum(result["state_bytes"]) / world == pytest.approx(told)
    adam = (
        estimates(config(folder, f"model.path={folder / 'qwen3'}"), world, "cpu")[0]["optimizer"]
        * GIB
    )
    assert adam / 2 < told < 0.9 * adam


@pytest.mark.parametrize(
    "pairs, message",
    [
        (
            ["optim.name=adam"],
            "optim.name=adam must be one of adamw, muon, or path/to/file.py:name; the nearest is adamw",
        ),
        (
            ["optim.kwargs.momentum=0.9"],
            "optim.kwargs.momentum: adamw has no such parameter of its own, nor any other",
        ),
        (
            ["optim.name=muon", "optim.kwargs.eps=1e-7"],
            "eps: muon has no such parameter of its own, only momentum, nesterov, ns_steps",
        ),
        (
            ["optim.name={file}:bare"],
            "unexpected keyword argument 'betas'; it is called with params, lr, betas, eps by name",
        ),
        (
            ["optim.name={file}:sgd", "optim.eps=1e-6"],
            "optim.eps=1e-06 does nothing with optim.name={file}:sgd",
        ),
        (
            ["optim.lr_scheduler_type=cosin"],
            "must be one of constant, linear, cosine, wsd, or path/to/file.py:name",
        ),
        (
            ["optim.lr_scheduler_type={file}:nothing"],
            "{file}:nothing must return a number, not None",
        ),
        (["optim.lr_scheduler_type={file}:sgd"], "missing a required argument: 'params'"),
        (
            ["optim.lr_scheduler_kwargs.power=2"],
            "optim.lr_scheduler_kwargs.power: cosine has no such parameter of its own",
        ),
    ],
)
def test_optimizers_and_schedules_that_cannot_work(folder, tmp_path, pairs, message):
    (tmp_path / "my.py").write_text(
        "def bare(params, lr): pass\ndef sgd(params, lr, **_): pass\ndef nothing(step, **_): pass\n"
    )
    with pytest.raises(InputError) as error:
        FSDPEngine.check(
            config(folder, *(pair.replace("{file}", f"{tmp_path}/my.py") for pair in pairs)), 1
        )
    assert message.replace("{file}", f"{tmp_path}/my.py") in str(error.value)


# -- checkpoints and export --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("family", ["qwen2_tied", "llama", "lora"])
def test_resume_on_any_number_of_ranks(results, folder, family, world):
    """Written by 4 ranks (llama in the background), 5 steps on; the uninterrupted run itself is the plain loop."""
    whole, result = results(4)[f"checkpoint {family}"], results(world)[f"checkpoint {family}"]
    assert result["progress"] == {"step": 5, "export_dtype": "float32"}
    assert result["random_again"] == whole["random"][:world]
    plain = (
        plain_training(folder / "qwen3", lora=True)
        if family == "lora"
        else plain_training(folder / family)
    )
    assert worst(column(whole["uninterrupted"], "loss"), plain.losses[5:10]) < LOSS_BOUND
    assert (
        worst(column(result["resumed"], "loss"), column(whole["uninterrupted"], "loss"))
        < LOSS_BOUND
    )
    if world == 4:
        assert result["resumed"] == whole["uninterrupted"]


@pytest.mark.parametrize("family", ["qwen2_tied", "llama", "lora"])
def test_checkpoint_appears_complete(ranks4, folder, family):
    """Every listing of step_00000005 since it appeared is the same, and whole, and of the size that a dry run tells."""
    listings = ranks4[f"checkpoint {family}"]["published"]
    assert len(listings) == 1, "it changed after it had appeared"
    names = {name for name, size in listings[0] if size > 0}
    assert {f"weights/__{rank}_0.distcp" for rank in range(4)} <= names
    metadata = FileSystemReader(
        folder / f"checkpoints_{family}" / "step_00000005" / "weights"
    ).read_metadata()
    model = ["qwen3", *(f"model.lora.{key}" for key in LORA)] if family == "lora" else [family]
    told = checkpoint_bytes(config(folder, f"model.path={folder / model[0]}", *model[1:]))
    assert told == pytest.approx(tensor_bytes(metadata), rel=0.01)
    assert {"weights/.metadata", "trainer.json", "hf/config.json", "hf/tokenizer.json"} <= names


def test_rotation_is_found_on_disk(ranks1, ranks2):
    assert ranks2["rotate"]["found"] == "None"
    assert ranks2["rotate"]["left"] == ["latest", "step_00000001", "step_00000002"]
    assert ranks1["rotate"]["found"].endswith("step_00000002"), (
        "an unfinished checkpoint was taken for a whole one"
    )
    assert ranks1["rotate"]["left"] == [
        "latest",
        "step_00000002",
        "step_00000003",
        "step_00000009.bak",
        "step_00000009.damaged",
        "step_9",
    ], "copies are no checkpoints"
    assert (
        ranks2["rotate"]["latest"] == ["step_00000002"] * 2
        and ranks1["rotate"]["latest"] == ["step_00000003"] * 2
    )


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(ranks1):
    """And one that is deleted has lost its name before."""
    new = {
        f"step_00000003.tmp{name}"
        for name in (
            "",
            "/hf",
            "/weights",
            "/trainer.json",
            "/weights/.metadata",
            "/weights/__0_0.distcp",
            "/hf/config.json",
            "/hf/tokenizer.json",
        )
    }
    assert new | {"."} <= set(ranks1["rotate"]["synced"])
    assert ranks1["rotate"]["deleted"] == ["step_00000009.tmp", "step_00000001.deleted.tmp"]


@pytest.mark.parametrize("name", ["nothing", "no checksums", *HARMS])
def test_a_damaged_checkpoint_is_passed_over_and_kept(ranks2, name):
    """Written by 4 ranks in the background, verified by 2."""
    result, before = ranks2["harmed"][name], ["latest", "step_00000005", "step_00000010"]
    whole = name not in HARMS
    assert result["agreed"] and result["untouched"] == before
    assert result["dry"] == result["found"] == ("step_00000010" if whole else "step_00000005")
    assert result["left"] == (before if whole else [*before[:2], "step_00000010.damaged"])
    assert result["latest"] == result["found"] + "\n"
    if whole:
        assert result["named"] == "found"
    elif name in ("no trainer.json", "a file in its place"):
        assert result["named"] is None, "no checkpoint at all"
    else:
        assert "step_00000010" in result["named"] and "step_00000005 is intact" in result["named"]
        assert "damaged" in result["named"]


def test_without_an_intact_checkpoint_nothing_begins_anew(ranks2):
    first, second = ranks2["harmed"]["both"]
    assert (
        first == second
        and "step_00000005 is damaged: hf/config.json is not as it was written; no other checkpoint"
        in first
    )


@pytest.mark.parametrize("asynchronous", ["False", "True"])
def test_a_save_without_room_on_one_rank_is_told_by_all_and_leaves_the_others(ranks2, asynchronous):
    result = ranks2["full"][asynchronous]
    first, second = result["told"]
    assert first == second and f"full_{asynchronous}/step_00000002.tmp/weights needs" in first
    assert "a file reached the limit of its size" in first and "are free" in first
    assert result["left"] == ["latest", "step_00000001"] and result["found"] == "step_00000003"


@pytest.mark.parametrize("world", [1, 2])
def test_after_wait_the_checkpoint_is_published(results, world):
    assert results(world)["publish"]["there_after_wait"] == [True] * world


def test_wait_raises_what_publishing_raised(ranks1):
    assert "step_00000002" in ranks1["publish"].get("raised", "nothing was raised")


@pytest.mark.parametrize("family", ["qwen2_tied", "llama"])
def test_export(ranks4, folder, tmp_path, family):
    """transformers loads it and answers as the engine did; the offline export of the checkpoint has the same bits."""
    exported = folder / f"hf_{family}"
    asked = load_file(folder / f"4 checkpoint {family}.safetensors")["asked"]
    check_answers(asked, plain_answers(exported), cp=2)
    assert (plain_answers(exported) - plain_answers(folder / family))[0].abs().max() > 0.1, (
        "training changed nothing"
    )
    assert AutoTokenizer.from_pretrained(exported)("a b a").input_ids == [1, 2, 1]

    checkpoint = folder / f"checkpoints_{family}" / "step_00000010"
    export(checkpoint, tmp_path / "offline", fresh=True)
    online, offline = (load_file(d / "model.safetensors") for d in (exported, tmp_path / "offline"))
    assert online.keys() == offline.keys() and all(
        torch.equal(online[n], offline[n]) for n in online
    )
    assert ("lm_head.weight" in online) == (family == "llama")
    assert (exported / "config.json").read_text() == (
        tmp_path / "offline" / "config.json"
    ).read_text()
    AutoTokenizer.from_pretrained(tmp_path / "offline")

    assert "exists already" in export(checkpoint, tmp_path / "offline", returncode=2)


def test_export_of_an_adapter(ranks4, folder, tmp_path):
    """peft loads it and answers as the engine did; the offline export has the same bits, and merged is a whole model."""
    exported, checkpoint = folder / "hf_lora", folder / "checkpoints_lora" / "step_00000010"
    asked = load_file(folder / "4 checkpoint lora.safetensors")["asked"]
    base = AutoModelForCausalLM.from_pretrained(folder / "qwen3", dtype=torch.float32)
    PeftModel.from_pretrained(base, exported).merge_and_unload().save_pretrained(
        tmp_path / "by peft"
    )
    check_answers(asked, plain_answers(tmp_path / "by peft"), cp=2)
    assert (plain_answers(tmp_path / "by peft") - plain_answers(folder / "qwen3"))[
        0
    ].abs().max() > 0.1
    assert not (exported / "config.json").exists() and AutoTokenizer.from_pretrained(exported)(
        "a b a"
    ).input_ids == [1, 2, 1]
    for name, more in (("adapter", []), ("merged", ["--merge"])):
        export(checkpoint, tmp_path / name, *more)
    online, offline = (
        load_file(d / "adapter_model.safetensors") for d in (exported, tmp_path / "adapter")
    )
    assert online.keys() == offline.keys() and all(
        torch.equal(online[n], offline[n]) for n in online
    )
    assert (exported / "adapter_config.json").read_text() == (
        tmp_path / "adapter" / "adapter_config.json"
    ).read_text()
    check_answers(asked, plain_answers(tmp_path / "merged"), cp=2)

    weights = load_file(folder / "qwen3" / "model.safetensors")
    save_file(
        {n: w + 1 for n, w in weights.items()},
        folder / "qwen3" / "model.safetensors",
        metadata={"format": "pt"},
    )
    told = export(checkpoint, tmp_path / "other", "--merge", returncode=2)
    save_file(weights, folder / "qwen3" / "model.safetensors", metadata={"format": "pt"})
    assert "is not the model whose adapters" in told


@pytest.mark.parametrize("world", [1, 2, 4])
def test_without_adapters_the_model_is_the_frozen_one(results, folder, world):
    result = results(world)["adapters"]
    assert result["same"] == [True, True], "also after training"
    asked = load_file(folder / f"{world} adapters.safetensors")["asked"]
    check_answers(asked, plain_answers(folder / "llama"))
    assert result["states"] == 2 * 7 * 3, "the optimizer knows adapters alone"
    assert "no gradient reaches model.layers.0.self_attn.q_proj.lora_A" in result["told"][0]
    assert "the gradient of every adapter is exactly 0" in result["told"][1]
    by_rank = {tuple(log_probs) for log_probs in result["dropout by rank"]}
    assert len(by_rank) == world, "data-parallel ranks drop the same units"
    first, again, other = result["dropout"]
    assert first == again != other and first[0] != first[1], (
        "of another seed; the second is the same batch of the same step"
    )


@pytest.mark.parametrize(
    "pairs, message",
    [
        (
            ["rank=0", "adapter_path={adapter}"],
            "model.lora.adapter_path={adapter} does nothing with model.lora.rank=0",
        ),
        (
            ["rank=8", "adapter_path={adapter}"],
            "has r=4 and lora_alpha=6: give model.lora.rank=4 model.lora.alpha=6",
        ),
        (
            [*LORA, "adapter_path=nowhere"],
            "model.lora.adapter_path=nowhere is not a directory with a PEFT adapter",
        ),
        ([*LORA, "adapter_path={adapter}", "target_modules=[q_proj]"], "differ in 36 matrices"),
        ([*LORA, "target_modules=[query]"], "model.lora.target_modules=['query']: "),
        (
            [*LORA, "target_modules=[q_proj,v_porj]"],
            "model.lora.target_modules: the model has no linear layer named v_porj",
        ),
        (
            [*LORA, "exclude_modules=[porj]"],
            "model.lora.exclude_modules: the model has no linear layer named porj",
        ),
        (
            [*LORA, "exclude_modules=[mlp]"],
            "model.lora.exclude_modules: the model has no linear layer named mlp",
        ),
        (
            [*LORA, "target_modules=[mlp]"],
            "model.lora.target_modules=['mlp']: Target module LlamaMLP is not a linear layer",
        ),
        ([*LORA, "target_modules=.*(("], "model.lora.target_modules=.*((: "),
        (["dropout=0.1"], "model.lora.dropout=0.1 does nothing with model.lora.rank=0"),
        (
            [*LORA, "target_modules=[lm_head]"],
            "names lm_head: adapters belong to the linear layers of decoder layers",
        ),
        ([*LORA, "target_modules=[embed_tokens]"], "names model.embed_tokens: adapters belong"),
    ],
)
def test_adapters_that_cannot_work(folder, pairs, message):
    adapter = str(folder / "llama_adapter")
    with pytest.raises(InputError) as error:
        FSDPEngine.check(
            config(
                folder,
                f"model.path={folder / 'llama'}",
                *(f"model.lora.{pair.replace('{adapter}', adapter)}" for pair in pairs),
            ),
            1,
        )
    assert message.replace("{adapter}", adapter) in str(error.value)


@pytest.mark.parametrize(
    "settings, said",
    [
        (dict(use_rslora=True), "use_rslora=True in"),
        (dict(use_dora=True), "use_dora=True in"),
        (dict(bias="all"), "bias=all in"),
        (dict(modules_to_save=["lm_head"]), "modules_to_save="),
        (dict(rank_pattern={"q_proj": 2}), "rank_pattern="),
        (dict(kasa_config={"tau": 1.0}), "kasa_config="),
        (dict(init_lora_weights="lora_ga"), "init_lora_weights=lora_ga in"),
        (dict(init_lora_weights="OLoRA"), "init_lora_weights=OLoRA in"),
        (dict(lora_alpha=22.5), "lora_alpha=22.5 in"),
        (dict(lora_alpha=6.0, init_lora_weights="eva", use_rslora=None, a_new_one=False), None),
    ],
)
def test_an_adapter_that_is_not_plain_is_refused(folder, tmp_path, settings, said):
    """Its two matrices would be read, and mean something else."""
    shutil.copytree(folder / "llama_adapter", tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    check = functools.partial(
        FSDPEngine.check,
        config(
            folder,
            f"model.path={folder / 'llama'}",
            *(f"model.lora.{pair}" for pair in (*LORA, f"adapter_path={tmp_path / 'adapter'}")),
        ),
        1,
    )
    if said is None:
        check()
    else:
        with pytest.raises(InputError, match=f"{said}.*not supported"):
            check()


def test_adapters_beside_matrices_the_other_way_round(tmp_path):
    """Merged as those of other families they would be wrong, where a matrix is square in silence."""
    make_model(
        tmp_path,
        "qwen2_tied",
        model_type="gpt2",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        summary_first_dropout=0.0,
        max_position_embeddings=128,
    )
    FSDPEngine.check(config(tmp_path, f"model.path={tmp_path}"), 1)
    with pytest.raises(
        InputError, match="names transformer.h.0.attn.c_proj: adapters belong to the linear layers"
    ):
        FSDPEngine.check(
            config(
                tmp_path,
                f"model.path={tmp_path}",
                "model.lora.rank=4",
                r"model.lora.target_modules='.*\.attn\.c_proj'",
            ),
            1,
        )


def test_files_name_no_more_layers_than_have_adapters(folder, tmp_path):
    """Else peft would train others as well when it goes on from them."""
    settings = OmegaConf.create(
        {
            "rank": 4,
            "alpha": 6,
            "dropout": 0.0,
            "target_modules": ["layers.1.self_attn.q_proj"],
            "exclude_modules": [],
        }
    )
    prefix = "model.layers.1.self_attn.q_proj.lora_"
    lora.write(
        [(f"{prefix}A.weight", torch.ones(4, 32)), (f"{prefix}B.weight", torch.ones(32, 4))],
        settings,
        folder / "llama",
        tmp_path,
    )
    model = PeftModel.from_pretrained(plain_model(folder / "llama"), tmp_path)
    assert sum(".lora_" in name for name, _ in model.named_parameters()) == 2


def test_merging_offline_rounds_as_the_run_does(folder, tmp_path):
    """Weights of files in bf16, of a run in fp32. Weights that are no part of the model keep their dtype."""
    family, settings = "gemma3 with images", OmegaConf.create({"rank": 2, "alpha": 6})
    shutil.copytree(folder / family, tmp_path / "base")
    rewrite(tmp_path / "base", lambda name, x: (name, x.bfloat16()))
    add(tmp_path / "base", "vision_tower.ids", torch.arange(300))
    name = "model.language_model.layers.1.self_attn.q_proj"
    adapter = {
        f"{name}.lora_A.weight": torch.randn(2, 32),
        f"{name}.lora_B.weight": torch.randn(128, 2),
    }
    before = load_file(tmp_path / "base" / "model.safetensors")
    after = dict(merged_weights(tmp_path / "base", adapter, settings, torch.float32))
    changed = {n for n in before if not torch.equal(after[n].double(), before[n].double())}
    assert len(changed) == 1 and (one := changed.pop()).endswith("layers.1.self_attn.q_proj.weight")
    assert torch.equal(after[one], lora.merge(before[one].float(), *adapter.values(), settings))
    assert after["vision_tower.ids"].dtype == torch.int64
    with pytest.raises(InputError, match="has no weight for model.layers.9"):
        dict(
            merged_weights(
                tmp_path / "base",
                {"model.layers.9.q_proj.lora_A.weight": torch.ones(2, 2)},
                settings,
                torch.float32,
            )
        )


def test_flops_of_frozen_weights_are_four_each(folder):
    """A step that computes no gradient of a matrix does two products with it and not three."""

    def flops(*pairs):
        engine, hf_config = (
            config(folder, f"model.path={folder / 'llama'}", *pairs),
            read_hf_config(folder / "llama"),
        )
        hf, _ = build_model(engine, Head.LOG_PROBS)
        numbers = SimpleNamespace(_flops=count_flops(hf, hf_config))
        return numbers._flops, FSDPEngine.flops(numbers, [10, 20])

    whole, of_whole = flops()
    adapted, of_adapted = flops(*(f"model.lora.{key}" for key in LORA))
    in_adapters = 3 * 4 * (4 * 32 + 2 * (32 + 16) + 3 * (32 + 48) + 2 * 32 - 2 * 32)
    assert adapted == (whole[0] * 2 / 3 + 6 * in_adapters, whole[1] * 2 / 3, whole[2])
    assert (
        of_whole == 30 * (whole[0] + whole[1]) + 500 * whole[2]
        and of_adapted == 30 * (adapted[0] + adapted[1]) + 500 * whole[2]
    )


def test_weights_in_several_files(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)
    weights, max_bytes = dict(model.named_parameters()), 20_000
    model.config.save_pretrained(tmp_path)
    write_safetensors(((n, p.detach()) for n, p in weights.items()), tmp_path, max_bytes)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert len(files) > 3 and files == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in weights.values())
    held = {file: load_file(tmp_path / file) for file in files}
    assert {n: file for file in files for n in held[file]} == index["weight_map"]
    assert all(
        sum(t.numel() * 4 for t in tensors.values()) <= max_bytes for tensors in held.values()
    )
    assert {p.name for p in tmp_path.iterdir()} == {
        *files,
        "config.json",
        "model.safetensors.index.json",
    }
    loaded = dict(
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).named_parameters()
    )
    assert loaded.keys() == weights.keys() and all(
        torch.equal(loaded[n], weights[n]) for n in weights
    )

    # The hub's cache has links to files elsewhere; an index that names them leads out of the directory.
    hub, index_file = tmp_path / "snapshot", tmp_path / "snapshot" / "model.safetensors.index.json"
    hub.mkdir()
    shutil.copy(tmp_path / index_file.name, hub)
    for file in files:
        (hub / file).symlink_to(f"../{file}")
    assert [f.name for f in weight_files(hub)] == files
    for name in (f"../{files[0]}", str(tmp_path / files[0]), f"x/../../{files[0]}"):
        index_file.write_text(
            json.dumps({"weight_map": index["weight_map"] | {"model.norm.weight": name}})
        )
        with pytest.raises(InputError, match="which is not in the model's directory"):
            weight_files(hub)


# -- refusals ----------------------------------------------------------------------------------------------------------


def config(folder, *pairs):
    return load("sft.yaml", [f"model.path={folder / 'llama'}", "data.train_files=unused", *pairs])


@pytest.mark.parametrize(
    "world, pairs, message",
    [
        (
            3,
            ["engine.context_parallel_size=2"],
            "context_parallel_size=2 does not divide the 3 ranks",
        ),
        (4, ["engine.fsdp_size=3"], "fsdp_size=3 does not divide the 4 ranks"),
        (2, ["engine.fsdp_size=4"], "fsdp_size=4 does not divide the 2 ranks"),
        (
            2,
            [
                "engine.context_parallel_size=2",
                "engine.use_remove_padding=false",
                "data.max_tokens_per_micro_batch=1022",
            ],
            "max_tokens_per_micro_batch=1022 must be a multiple of 4",
        ),
        (
            2,
            [
                "engine.context_parallel_size=auto",
                "engine.use_remove_padding=false",
                "data.max_tokens_per_micro_batch=1023",
            ],
            "max_tokens_per_micro_batch=1023 must be a multiple of 2",
        ),
        (
            4,
            ["data.train_batch_size=3"],
            "train_batch_size=3 is less than the 4 data-parallel ranks",
        ),
        (
            1,
            ["optim.lr_scheduler_type=constant", "optim.min_lr_ratio=0.1"],
            "no effect with a constant schedule",
        ),
        (1, ["model.path=/nowhere"], "holds no config.json"),
    ],
)
def test_layouts_that_cannot_work(folder, world, pairs, message):
    with pytest.raises(InputError, match=message):
        FSDPEngine.check(config(folder, *pairs), world)


def test_ranks_for_which_there_are_no_whole_heads():
    """Each needs as many as others; key-value heads can be repeated."""
    shape = SimpleNamespace(num_attention_heads=12, num_key_value_heads=3)
    assert [size for size in range(1, 13) if has_whole_heads(shape, size)] == [1, 3, 6, 12]
    assert [
        size
        for size in (1, 2, 4, 8)
        if has_whole_heads(SimpleNamespace(num_attention_heads=4), size)
    ] == [1, 2, 4]
    laguna = SimpleNamespace(num_attention_heads=4, num_attention_heads_per_layer=[4, 6, 4])
    assert [size for size in (1, 2, 4, 8) if has_whole_heads(laguna, size)] == [1, 2]
    gemma4 = AutoConfig.for_model(
        "gemma4_text",
        num_attention_heads=12,
        num_key_value_heads=3,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
    )
    assert gemma4.is_heterogeneous and [
        size for size in range(1, 13) if has_whole_heads(gemma4, size)
    ] == [1, 3, 6, 12]


@pytest.mark.parametrize(
    "world, name",
    [(world, name) for world in CASES for name in CASES[world] if name.startswith("auto")],
)
def test_long_sequences_are_shared_and_short_ones_are_not(results, world, name):
    """Where a rank has room for less than the longest sequence."""
    case, result = CASES[world][name], results(world)[name]
    assert "error" not in result, result["error"]
    needed = 1 << math.ceil(math.log2(LONGEST / case.cap))
    assert max(result["sizes of groups"]) >= needed and (
        1 in result["sizes of groups"] or case.cap < LONGEST / 2
    )


def test_logits_that_are_computed_in_another_way_are_refused(folder):
    hf = build_on_meta(read_hf_config(folder / "llama"), torch.float32)
    assert logit_constants(hf) == (1.0, None)
    hf.forward = lambda **inputs: SimpleNamespace(logits=type(hf).forward(hf, **inputs).logits ** 3)
    with pytest.raises(
        InputError, match="LlamaForCausalLM computes its logits in a way that is not supported"
    ):
        logit_constants(hf)


@pytest.mark.parametrize(
    "family, pairs, message",
    [
        (
            "llama",
            ["engine.router_aux_loss_coef=0.1"],
            "router_aux_loss_coef=0.1 needs a mixture of experts",
        ),
        (
            "qwen3_moe",
            LORA,
            "all-linear would adapt experts and routers too, which is not supported: give model.lora.target_modules",
        ),
        (
            "bamba",
            ["engine.context_parallel_size=2"],
            "BambaForCausalLM carry a state from token to token, so ranks cannot share",
        ),
    ],
)
def test_what_experts_and_recurrent_layers_cannot_have(folder, family, pairs, message):
    pairs = [pair if pair.startswith("engine") else f"model.lora.{pair}" for pair in pairs]
    with pytest.raises(InputError, match=message):
        FSDPEngine.check(config(folder, f"model.path={folder / family}", *pairs), 2)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            dict(model_type="mixtral", router_jitter_noise=0.1),
            r"random numbers in training \(uniform_\).*router_jitter_noise=0.1 to 0",
        ),
        (
            dict(model_type="bart", d_model=32),
            "BartForCausalLM does not take its hidden states from its base model",
        ),
    ],
)
def test_models_that_are_random_in_training_or_have_another_base(tmp_path, changes, message):
    make_model(tmp_path, "qwen2_tied", **changes)
    with pytest.raises(InputError, match=message):
        FSDPEngine.check(config(tmp_path, f"model.path={tmp_path}"), 1)


def test_configurations_without_a_longest_length_or_one_head_dim():
    with torch.device("meta"):
        check_rope(
            AutoConfig.for_model("bloom"),
            load("sft.yaml", ["model.path=unused", "data.train_files=unused"]),
        )
    gemma = AutoConfig.for_model(
        "gemma4_text", num_hidden_layers=6, head_dim=8, global_head_dim=16, num_attention_heads=4
    )
    assert (
        count_flops(build_on_meta(gemma, torch.float32), gemma)[2] == 6 * 4 * (5 * 8 + 16)
        and head_dim(gemma) == 16
    )
    gemma = AutoConfig.for_model(
        "gemma4_text",
        num_hidden_layers=6,
        head_dim=8,
        global_head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=3,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
    )
    assert attention_widths(gemma) == (4 * 16, 3 * 8)
    assert [has_whole_heads(gemma, size) for size in (1, 2)] == [True, False]
    step = AutoConfig.for_model(
        "step3p5",
        num_hidden_layers=2,
        num_attention_heads=4,
        num_sliding_attention_heads=6,
        head_dim=8,
        layer_types=["full_attention", "sliding_attention"],
        num_key_value_heads=2,
    )
    assert attention_widths(step) == (6 * 8, 2 * 8) and [
        has_whole_heads(step, size) for size in (2, 4)
    ] == [True, False]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    "name, message",
    [
        ("no_files", "lacks model.safetensors"),
        ("missing_weight", "lacks 1 weights of LlamaForCausalLM, such as model.norm.weight"),
        ("wrong_shape", "lm_head.weight has shape [96, 32] in the file, [97, 32] by config.json"),
    ],
)
def test_broken_models(results, world, name, message):
    told = results(world)["refused"][name]
    assert told is not None and len(told) == world and all(message in t for t in told)


@pytest.mark.parametrize(
    "family, name, other",
    [
        ("qwen2_tied", "model.layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("qwen2_tied", "model.embed_tokens.weight", "embed_tokens.weight"),
        (
            "gemma3 with images",
            "language_model.model.layers.1.mlp.up_proj.weight",
            "model.language_model.layers.1.mlp.up_proj.weight",
        ),
    ],
)
def test_two_names_of_one_weight(tmp_path, family, name, other):
    """One of them would be lost, whichever is read first."""
    weight = load_file(make_model(tmp_path, family) / "model.safetensors")[name]
    add(tmp_path, other, torch.zeros_like(weight))
    with pytest.raises(InputError) as error:
        FSDPEngine.check(config(tmp_path, f"model.path={tmp_path}"), 1)
    assert f" {min(name, other)} and {max(name, other)} are two names of one weight" in str(
        error.value
    )
    assert "take one of them out of the files" in str(error.value)


def test_experts_that_transformers_transposes_where_they_do_not_fit(tmp_path):
    """What is advised then helps."""
    made, saved = (
        write_model(tmp_path / "made", **families.SHAPES["qwen3_vl_moe"]),
        tmp_path / "saved",
    )
    FSDPEngine.check(config(made, f"model.path={made}"), 1)
    rewrite(
        made, lambda name, x: (name, x.mT.contiguous() if name.endswith("experts.down_proj") else x)
    )
    with pytest.raises(
        InputError,
        match="transformers converts .*down_proj .* and save it with save_original_format=False",
    ):
        FSDPEngine.check(config(made, f"model.path={made}"), 1)
    plain_model(made).save_pretrained(saved, save_original_format=False)
    FSDPEngine.check(config(saved, f"model.path={saved}"), 1)


@pytest.mark.parametrize(
    "world, family, form",
    [
        *((1, family, form) for family in (*FOREIGN, *MULTIMODAL) for form in FORMS),
        (2, "gpt_oss", "cp2"),
    ],
)
def test_other_families(results, folder, world, family, form):
    """Answers, loss and gradient are those of transformers; the files come back bit for bit under their own names."""
    step, weights = (
        results(world)["foreign"][f"{family} {form}"],
        load_file(folder / f"{family} {form}.safetensors"),
    )
    asked, files, model = (
        weights.pop("asked"),
        load_file(folder / family / "model.safetensors"),
        plain_model(folder / family),
    )
    assert weights.keys() == files.keys() and all(torch.equal(weights[n], files[n]) for n in files)
    check_answers(asked, plain_answers(folder / family), cp=world)
    loss, _ = plain_loss(model, make_batch(0))
    loss.backward()
    assert worst([step["loss"]], [loss.item()]) < LOSS_BOUND
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert worst([step["grad_norm"]], [norm.item()]) < NORM_BOUND


def test_quantized_weights_are_refused(folder, tmp_path):
    shape = json.loads((folder / "qwen3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(shape | {"quantization_config": {"quant_method": "fp8"}})
    )
    with pytest.raises(InputError, match="holds quantized weights .* give the unquantized model"):
        read_hf_config(tmp_path)


@pytest.mark.parametrize("family", MULTIMODAL)
def test_the_text_of_a_model_of_images_is_trained_and_the_rest_is_kept(
    ranks2, folder, tmp_path, family
):
    """transformers loads either export as a whole, its text answers as the engine did, and all that is not text is as it was."""
    export(folder / f"steps {family}" / "step_00000003", tmp_path / "offline")
    asked, before = (
        load_file(folder / f"images {family}.safetensors")["asked"],
        load_file(folder / family / "model.safetensors"),
    )
    for exported in (folder / f"hf {family}", tmp_path / "offline"):
        check_whole(exported, family, folder)
        check_answers(asked, plain_answers(exported))
        after = load_file(exported / "model.safetensors")
        assert after.keys() == before.keys()
        same = {n for n in after if torch.equal(after[n], before[n])}
        assert (
            same
            >= (rest := {n for n in after if "vision" in n or "visual" in n or "projector" in n})
            and rest
        )
        assert not any("proj.weight" in n for n in same - rest), "the text was not trained"
    assert (plain_answers(folder / family) - plain_answers(exported))[
        0
    ].abs().max() > 100 * LOG_PROB_BOUND
    moved = folder / f"{family}.elsewhere"
    (folder / family).rename(moved)
    try:
        told = export(
            folder / f"steps {family}" / "step_00000003", tmp_path / "other", returncode=2
        )
    finally:
        moved.rename(folder / family)
    assert "which had the other weights, is not there" in told


def check_whole(exported, family, folder):
    model, said = auto_class(AutoConfig.from_pretrained(exported)).from_pretrained(
        exported, output_loading_info=True
    )
    assert type(model).__name__.endswith("ForConditionalGeneration")
    assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), (
        said
    )
    assert (exported / "preprocessor_config.json").exists()
    assert AutoTokenizer.from_pretrained(exported)("a b a").input_ids == [1, 2, 1]
    ours, theirs = (
        json.loads((d / "config.json").read_text()) for d in (exported, folder / family)
    )
    assert (
        ours["architectures"] == theirs["architectures"]
        and ours["vision_config"] == theirs["vision_config"]
    )


def test_adapters_of_a_model_of_images(ranks2, folder, tmp_path):
    """peft puts them beside the text model, not beside layers of a vision tower that have the same names; merged they make a whole
    model."""
    family = "gemma3 with images"
    name, asked = f"{family} lora", load_file(folder / f"images {family} lora.safetensors")["asked"]
    export(folder / f"steps {name}" / "step_00000003", tmp_path / "merged", "--merge")
    check_whole(tmp_path / "merged", family, folder)
    check_answers(asked, plain_answers(tmp_path / "merged"))
    model = PeftModel.from_pretrained(plain_model(folder / family), folder / f"hf {name}")
    assert not any("lora_" in n and "vision" in n for n, _ in model.named_parameters())
    model.merge_and_unload().save_pretrained(tmp_path / "by peft")
    check_answers(asked, plain_answers(tmp_path / "by peft"))
    assert (plain_answers(folder / family) - plain_answers(tmp_path / "by peft"))[
        0
    ].abs().max() > 100 * LOG_PROB_BOUND


def test_products_of_all_experts_at_once_are_those_of_a_loop(ranks1):
    check_grouped(ranks1["grouped"])


def check_grouped(result):
    assert result["default"] == "grouped_mm"
    assert 0 < result["output"] < 0.01 and result["gradient"] < 0.02
    assert result["left alone"] == 0 and result["number"] == 2 * (8 - 4), (
        "an expert without a token has a gradient"
    )


@pytest.mark.parametrize("world, name", BALANCED)
def test_the_auxiliary_loss_of_routers(results, folder, world, name):
    """transformers' of each layer's choices in each micro-batch, divided by the number of choices of a token, weighted by the
    micro-batch's tokens; and so the Megatron engine's."""
    result, batch, model, aux = (
        results(world)[name],
        make_batch(0),
        plain_model(folder / CASES[world][name].family),
        0.0,
    )
    assert "error" not in result, result["error"]
    total, micro_batches = 0.0, result["micro-batches of the first step"]
    for part in micro_batches:
        loss, routers = plain_loss(model, batch, part)
        terms = [
            load_balancing_loss_func((layer,), 8, 3) / 3 * len(layer) / len(batch.input_ids)
            for layer in map(torch.cat, zip(*routers))
        ]
        (loss + 0.3 * sum(terms)).backward()
        total, aux = total + loss.item(), aux + sum(terms).item() / len(terms)
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    assert (
        sorted(i for part in micro_batches for i in part) == list(range(len(batch)))
        and len(micro_batches) > 2
    )
    (step,) = result["steps"]
    for key, want in (("loss", total), ("router_aux_loss", aux), ("grad_norm", norm)):
        assert worst([step[key]], [want]) < NORM_BOUND, key
    assert aux > 1.01


def test_a_coefficient_of_config_json_weighs_as_in_transformers():
    """Of layers that choose alike, for which both losses are the same but for a factor."""
    logits, shape = (
        torch.randn(50, 8),
        AutoConfig.for_model(**FAMILIES["qwen3_moe"], output_router_logits=True),
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ours = experts.aux_loss(
            [logits] * 5, torch.zeros(50, dtype=torch.bool), 3, 50, dist.group.WORLD
        )
    finally:
        dist.destroy_process_group()
    theirs = shape.router_aux_loss_coef * load_balancing_loss_func((logits,) * 5, 8, 3)
    assert experts.aux_loss_weight(None, shape, 5) * ours.item() == pytest.approx(theirs.item())
    assert experts.aux_loss_weight(0.1, shape, 5) == 0.1, "as it is given"


def test_biases_of_experts_are_not_decayed_and_no_matrices_for_muon(folder):
    hf = plain_model(folder / "gpt_oss")
    muon, adamw = optimizer.build(
        hf, hf.model.layers, config(folder, "optim.name=muon", "optim.weight_decay=0.5").optim
    )
    names = {id(p): name for name, p in hf.named_parameters()}
    decayed = {
        names[id(p)]
        for o in (muon, adamw)
        for g in o.param_groups
        for p in g["params"]
        if g["weight_decay"]
    }
    assert {name for name in names.values() if ".experts." in name} - decayed == {
        f"model.layers.{i}.mlp.experts.{x}_proj_bias" for i in range(3) for x in ("gate_up", "down")
    }
    assert not any(".experts." in names[id(p)] for p in muon.param_groups[0]["params"])


@pytest.mark.parametrize(
    "shape, key",
    [
        (FAMILIES["qwen3_moe"], "num_experts_per_tok"),
        (FOREIGN["gemma4 with experts"], "top_k_experts"),
    ],
)
def test_dry_run_counts_the_experts_that_a_token_goes_to(folder, tmp_path, shape, key):
    def sizes(k):
        make_model(tmp_path / str(k), "qwen2_tied", **{**shape, key: k})
        return estimates(config(folder, f"model.path={tmp_path / str(k)}"), 1, "cpu")[0]

    few, many = sizes(2), sizes(4)
    assert few["parameters"] == many["parameters"]
    added = (
        3 * 2 * (3 * 24 + 2 * 32) * 2 + 3 * 2 * 24 * 2
    )  # layers, more experts, numbers, bytes; not compiled
    tokens = config(folder).data.max_tokens_per_micro_batch
    assert (many["activations"] - few["activations"]) * GIB == pytest.approx(tokens * added)


def test_dry_run_of_a_model_that_does_not_say_what_its_layers_are(folder, tmp_path):
    make_model(
        tmp_path,
        "qwen2_tied",
        model_type="openai-gpt",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    settings = config(folder, f"model.path={tmp_path}", "engine.use_remove_padding=false")
    assert not whole_modules(hf := build_model(settings, Head.LOG_PROBS)[0], hf)
    sizes = estimates(settings, 2, "cpu")[0]
    assert sizes["gathered weights"] * GIB == 2 * sum(p.numel() for p in hf.parameters()), (
        "all at once, in bf16"
    )
    assert sizes["activations"] > 0


def test_dry_run_counts_keys_and_values_that_ranks_gather(folder):
    """With as many ranks as the longest sequence needs, where these have no heads of their own; models of three layers in bf16."""

    def kept(family, size, *pairs):
        settings = config(
            folder,
            f"model.path={folder / family}",
            "data.max_tokens_per_micro_batch=1024",
            "data.max_length=4000",
            f"engine.context_parallel_size={size}",
            *pairs,
        )
        tokens = 1024 / (1 if size == "auto" else size)
        return {
            world: estimates(settings, world, "cuda")[0]["activations"] * GIB / tokens / (3 * 2)
            for world in (2, 8)
        }

    width, megatron = 3 * 16, "model_engine=megatron"  # of keys
    alone, two, auto = (kept("three_heads", size)[8] for size in (1, 2, "auto"))
    assert two - alone == pytest.approx(2 * 1.5 * width) and auto - alone == pytest.approx(
        2 * 3.5 * width
    ), "four of eight ranks"
    assert kept("three_heads", "auto")[2] == pytest.approx(two), "there are no more"
    one, two, four = (kept("llama", size)[8] for size in (1, 2, 4))
    assert two == pytest.approx(one) and four - one == pytest.approx(2 * 16), (
        "Ulysses repeats two heads for four ranks"
    )
    assert (
        kept("llama", "auto", megatron)[8]
        > kept("llama", 2, megatron)[8]
        > kept("llama", 1, megatron)[8]
    )


def test_flops_of_a_mixture_are_of_the_experts_that_a_token_goes_to(folder):
    mixture, hybrid = (read_hf_config(folder / family) for family in ("qwen3_moe", "bamba"))
    layers, _, attention = count_flops(build_on_meta(mixture, torch.float32), mixture)
    assert (
        layers == 6 * 3 * (32 * 32 * (4 + 2 + 2 + 4) + 8 * 32 + 3 * 3 * 24 * 32)
        and attention == 6 * 3 * 4 * 32
    )
    assert count_flops(build_on_meta(hybrid, torch.float32), hybrid)[2] == 6 * 4 * 8, (
        "one layer of three has attention"
    )


@pytest.mark.parametrize("world", [1, 2])
def test_sequences_that_leak_into_others_are_found(results, world):
    """Before the first step, on all ranks, whatever hides it: rounding, or a value head of zeros."""
    told = results(world)["guarded"]
    names = [
        f"{model} {layout}" for model in ("lfm2", "llama") for layout in ("", "bf16", "critic")
    ]
    for name in [*names, *["llama cp2"] * (world == 2)]:
        help = (
            "engine.context_parallel_size=1" if "cp2" in name else "engine.use_remove_padding=false"
        )
        assert told[name] is not None and len(told[name]) == world, name
        assert all(
            "one at a time differ, first in layer 0 of 0 to 2: by" in said for said in told[name]
        ), told[name]
        assert all(f"set {help}" in said for said in told[name])
    assert all(
        "cannot train it: set use_bidirectional_attention=True to null in" in said
        for said in told["both ways packed"]
    )
    assert told["found"][0] < 1e-5 < told["found"][1] == 1e-4 and told["same"] == [True] * world
    assert "nobody can see whether it keeps sequences apart" in told["deaf"][0] and not any(
        told["deaf"][1:]
    )


@pytest.mark.parametrize("world", [1, 2])
def test_renamed_weights_keep_the_names_of_their_files(results, folder, world):
    result, names = (
        results(world)["renamed"],
        sorted(load_file(folder / "renamed" / "model.safetensors")),
    )
    assert (
        all("language_model" in name for name in names)
        and result["exported"] == names
        and result["same"]
    )
    assert set(names) <= set(result["kept"]) <= {*names, "lm_head.weight"}
    check_answers(
        load_file(folder / f"{world} renamed.safetensors")["asked"],
        plain_answers(folder / "renamed"),
    )


PADDING = "set engine.use_remove_padding=false"
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    short_factor=[1.0] * 4,
    long_factor=[2.0] * 4,
    original_max_position_embeddings=64,
)


@pytest.mark.parametrize(
    "changes, pairs, message",
    [
        (
            dict(model_type="seed_oss", head_dim=8),
            [],
            "set attention_dropout=0.1, residual_dropout=0.1 to 0 in config.json",
        ),
        (dict(model_type="gpt2"), [], "resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1"),
        (
            dict(model_type="bloom"),
            [],
            f"transformers has it with eager attention alone: {PADDING}",
        ),
        (
            dict(model_type="falcon"),
            [],
            f"transformers has it with sdpa attention alone: {PADDING}",
        ),
        (
            dict(model_type="falcon"),
            ["engine.context_parallel_size=auto"],
            f"alone: {PADDING} and engine.context_parallel_size=1",
        ),
        (
            dict(model_type="falcon"),
            ["engine.context_parallel_size=auto", "engine.use_remove_padding=false"],
            "alone: set engine.context_parallel_size=1",
        ),
        (
            dict(model_type="stablelm"),
            [],
            f"do not pass on to their attention where sequences begin: {PADDING}",
        ),
        (
            dict(model_type="mamba"),
            [],
            "MambaForCausalLM does not take packed sequences: ValueError",
        ),
        (
            dict(model_type="doge", num_experts=0),
            [],
            "only a mask limits its attention to a window",
        ),
        (
            dict(model_type="opt"),
            ["engine.use_remove_padding=false"],
            "OPTForCausalLM does not take its hidden states from its base",
        ),
        (
            dict(
                model_type="llama",
                rope_parameters=dict(
                    rope_type="linear", rope_theta=10000.0, factor=2.0, partial_rotary_factor=0.5
                ),
            ),
            [],
            "LlamaForCausalLM fails: RuntimeError",
        ),
        (
            dict(model_type="phi3", rope_parameters=LONGROPE, original_max_position_embeddings=64),
            ["data.max_length=65"],
            "rope_type=longrope in config.json has other frequencies beyond 64 tokens: lower data.max_length=65",
        ),
        (
            dict(
                model_type="qwen3",
                head_dim=16,
                use_sliding_window=False,
                layer_types=["sliding_attention"] + 2 * ["full_attention"],
            ),
            [],
            "layer_types in config.json has sliding_attention, but there is no window: give sliding_window",
        ),
        (
            dict(
                model_type="gemma4_text",
                head_dim=8,
                global_head_dim=8,
                hidden_size_per_layer_input=0,
                vocab_size_per_layer_input=97,
                use_bidirectional_attention="all",
            ),
            [],
            "is_causal=False in its attention, which is not supported: set use_bidirectional_attention=all to null in config.json",
        ),
        (dict(model_type="jetmoe"), [], "its layers decide by values what to compute"),
        (
            dict(
                model_type="deepseek_v2",
                n_routed_experts=4,
                moe_intermediate_size=24,
                first_k_dense_replace=1,
                **LATENT,
            ),
            [],
            "config.json has none (num_experts_per_tok)",
        ),
        (
            dict(model_type="hrm_text"),
            [],
            "transformers converts model.H_module.layers.0.attn.gqkv_proj.weight",
        ),
    ],
)
def test_models_that_cannot_work(folder, tmp_path, changes, pairs, message):
    """Before data is tokenized; with the setting that is named, they are not refused."""
    make_model(tmp_path, "qwen2_tied", **{"tie_word_embeddings": False, **changes})
    with pytest.raises(InputError) as error:
        FSDPEngine.check(config(folder, f"model.path={tmp_path}", *pairs), 1)
    assert message in str(error.value)
    if PADDING in message:
        FSDPEngine.check(
            config(folder, f"model.path={tmp_path}", "engine.use_remove_padding=false"), 1
        )


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(pad_token_id=97), "AssertionError: Padding_idx must be within num_embeddings"),
        (dict(hidden_act="relu3"), "KeyError: 'relu3'"),
        (
            dict(rope_parameters=dict(rope_type="unknown", rope_theta=10000.0)),
            "KeyError: 'unknown'",
        ),
    ],
)
def test_values_of_config_json_that_transformers_does_not_know(tmp_path, changes, message):
    file = make_model(tmp_path, "qwen3") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(InputError) as error:
        FSDPEngine.check(config(tmp_path, f"model.path={tmp_path}"), 1)
    assert (
        str(error.value)
        == f"model.path={tmp_path}: transformers cannot build the model that config.json describes: {message}"
    )


# -- schedules ---------------------------------------------------------------------------------------------------------

HALF = 0.1 + 0.9 * 0.5
SCHEDULES = {  # 20 steps, 4 of them warm-up; from 1 to 0.1, wsd over the last 8
    "constant": {0: 0.25, 3: 1, 4: 1, 12: 1, 19: 1},
    "linear": {0: 0.25, 1: 0.5, 3: 1, 4: 1, 8: 0.1 + 0.9 * 0.75, 12: HALF, 20: 0.1, 25: 0.1},
    "cosine": {0: 0.25, 3: 1, 4: 1, 8: 0.1 + 0.9 * (1 + 0.5**0.5) / 2, 12: HALF, 20: 0.1, 25: 0.1},
    "wsd": {0: 0.25, 3: 1, 4: 1, 11: 1, 12: 1, 14: 0.1 + 0.9 * 0.75, 16: HALF, 20: 0.1, 25: 0.1},
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedule(folder, kind):
    floor, decay = 0.0 if kind == "constant" else 0.1, "optim.lr_decay_steps_ratio=0.4"
    settings = [
        f"optim.lr_scheduler_type={kind}",
        "optim.lr=1.0",
        "optim.lr_warmup_steps_ratio=0.2",
        f"optim.min_lr_ratio={floor}",
    ]
    if kind != "wsd":
        with pytest.raises(
            InputError,
            match="lr_decay_steps_ratio=0.4 has no effect without optim.lr_scheduler_type=wsd",
        ):
            schedule.check(config(folder, *settings, decay).optim)
    optim = config(folder, *settings, *[decay] * (kind == "wsd")).optim
    schedule.check(optim)
    assert {s: schedule.learning_rate(optim, s, 20) for s in SCHEDULES[kind]} == pytest.approx(
        SCHEDULES[kind]
    )


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("warmup", [0.0, 1.0])
@pytest.mark.parametrize("total", [1, 2, 7])
def test_schedule_of_few_steps(folder, kind, warmup, total):
    optim = config(
        folder,
        f"optim.lr_scheduler_type={kind}",
        "optim.lr=1.0",
        f"optim.lr_warmup_steps_ratio={warmup}",
    ).optim
    rates = [schedule.learning_rate(optim, s, total) for s in range(total)]
    assert all(0 < rate <= 1 for rate in rates) and max(rates) == 1

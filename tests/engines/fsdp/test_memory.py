"""Host memory for offloading, and what a dry run estimates."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, GPTNeoXConfig

from config import load
from engines.fsdp.attention import has_whole_heads
from engines.fsdp.engine import FSDPEngine
from engines.fsdp.transforms import build_model
from engines.fsdp.vision import norm_width
from engines.heads import Head
from engines.memory import GIB
from engines.model.flops import count_flops
from engines.model.hf import build_on_meta, layer_modules, read_hf_config
from engines.model.lengths import check_rope
from engines.model.shape import attention_widths, head_dim
from engines.parallel import offload
from rollout.vllm.capacity import max_num_seqs
from tests.engines.fsdp.cases import LORA, make_config
from tests.support.estimates import checkpoint_bytes, estimate_gib
from tests.support.foreign import FOREIGN
from tests.support.models import FAMILIES, make_model


def test_tensors_come_back_from_the_same_host_memory(monkeypatch):
    """They keep their bits and views, also where a tensor extends over two parts of it."""
    monkeypatch.setattr(offload, "PART_BYTES", 2**14)
    memory = offload.HostMemory(torch.device("cpu"))
    tensors = [torch.randn(n) for n in (3000, 9000, 10, 1025)]
    tensors.append(tensors[1][100:200])  # of the same storage
    elsewhere = torch.empty(5000, device="meta")
    want = [x.clone() for x in tensors]
    memory.reserve([*tensors[:4], elsewhere])
    reserved = [part.result().data_ptr() for part in memory.parts]
    for _ in range(3):
        memory.offload([*tensors, elsewhere])
        left = [x.untyped_storage().nbytes() for x in tensors]
        assert left == [0, 0, 40, 0, 0], "small tensors stay on the device"
        memory.offload(tensors)
        memory.onload(tensors)
        assert all(torch.equal(x, y) for x, y in zip(tensors, want))
        want[0] = tensors[0].neg_().clone()
        memory.onload(tensors)
        assert torch.equal(tensors[0], want[0]), "what is on the device already stays as it is"
        assert [part.result().data_ptr() for part in memory.parts] == reserved
        assert len(reserved) == 5
    unreserved = torch.randn(2**14)
    memory.offload([unreserved])
    assert len(memory.parts) == 8
    assert unreserved.untyped_storage().nbytes() == 0


def test_dry_run_counts_what_waits_in_host_memory(folder):
    def waits(role, *pairs, device_type="cuda"):
        """Return the GiB that wait in host memory, and those of the parameters."""
        model = f"model.path={folder / 'qwen3'}"
        settings = load("ppo.yaml", [model, "data.train_files=unused", *pairs])
        (sizes,) = estimate_gib(settings, 1, device_type, role)
        return sizes.get("offloaded to host memory", 0.0), sizes.get("parameters", 0.0)

    waiting, parameters = waits("actor")
    assert waiting == pytest.approx(3 * parameters)
    assert waits("actor", "offload.optimizer=false") == (parameters, parameters)
    assert waits("reference")[0] == parameters
    assert waits("reference", "offload.reference=false")[0] == 0
    assert waits("actor", "engine.cpu_offload=true")[0] == 0
    assert waits("actor", device_type="cpu")[0] == 0
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

    # As many as a rank gets.
    assert decoded() == 64
    assert decoded(gib=0) == 64
    assert decoded(world=2) == 32
    five_prompts = "data.train_batch_size=5"
    tp2 = "rollout.tensor_parallel_size=2"
    assert decoded(five_prompts, world=2) == 24, "three prompts on one rank, two on the other"
    assert decoded(five_prompts, tp2, world=2) == 40, "all prompts on one engine of two ranks"
    assert decoded("data.train_batch_size=1000") == 1024
    assert decoded("rollout.max_tokens=1000000000") == 1
    assert decoded("data.train_batch_size=1000", "rollout.max_num_seqs=7") == 7
    # A response's cache: 200 tokens x 3 layers x keys and values x 2 heads of 16 numbers in fp32.
    cache_bytes = 200 * 3 * 2 * 2 * 16 * 4
    kv_cache = "rollout.kv_cache_gib=0.002"
    kv_cache_bytes = 0.002 * GIB
    num_fitting = int(kv_cache_bytes / cache_bytes)
    assert num_fitting < 40
    assert decoded(kv_cache) == num_fitting
    num_fitting_with_tp2 = int(kv_cache_bytes / (cache_bytes / 2))
    assert num_fitting_with_tp2 < 40
    assert decoded(kv_cache, tp2, world=2) == num_fitting_with_tp2
    # Its configuration has no number of key and value heads: one for each of its 8 heads.
    neox = GPTNeoXConfig(hidden_size=128, num_hidden_layers=3, num_attention_heads=8)
    neox.save_pretrained(folder / "no_kv_heads")
    num_fitting = int(kv_cache_bytes / (4 * cache_bytes))
    assert decoded(kv_cache, f"model.path={folder / 'no_kv_heads'}") == num_fitting

    # A checkpoint has the weights and, as large, Adam's two moments.
    weights = checkpoint_bytes(make_config(folder, f"model.path={folder / 'qwen3'}")) / 3
    room = 0.5 * 0.0018 * GIB - weights
    short = ("data.max_prompt_length=10", "rollout.max_tokens=20")
    logits_bytes = 3 * 97 * 4  # the vocabulary has 97 tokens
    num_fitting = int(room / (cache_bytes / 10 + logits_bytes))
    assert num_fitting < int(room / (cache_bytes / 10)) < 64, "logits make a difference"
    assert decoded("rollout.gpu_memory_utilization=0.5", *short, gib=0.0018) == num_fitting


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
        return estimate_gib(make_config(folder, f"model.path={tmp_path / str(k)}"), 1, "cpu")[0]

    few = sizes(2)
    many = sizes(4)
    assert few["parameters"] == many["parameters"]
    # Layers x further experts x numbers x bytes; not compiled.
    added = 3 * 2 * (3 * 24 + 2 * 32) * 2 + 3 * 2 * 24 * 2
    tokens = make_config(folder).data.max_tokens_per_micro_batch
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
    settings = make_config(folder, f"model.path={tmp_path}", "engine.use_remove_padding=false")
    hf, _ = build_model(settings, Head.LOG_PROBS)
    assert not layer_modules(hf, hf)
    sizes = estimate_gib(settings, 2, "cpu")[0]
    all_weights = 2 * sum(p.numel() for p in hf.parameters())  # bytes, in bf16
    assert sizes["gathered weights"] * GIB == all_weights
    assert sizes["activations"] > 0


def test_dry_run_counts_keys_and_values_that_ranks_gather(folder):
    """Ranks without heads of their own gather them from as many ranks as a sequence needs.

    Numbers are for models of three layers in bf16.
    """

    def kept(family, size, *pairs):
        settings = make_config(
            folder,
            f"model.path={folder / family}",
            "data.max_tokens_per_micro_batch=1024",
            "data.max_length=4000",
            f"engine.context_parallel_size={size}",
            *pairs,
        )
        tokens = 1024 / (1 if size == "auto" else size)
        numbers = {}
        for world in (2, 8):
            activations = estimate_gib(settings, world, "cuda")[0]["activations"]
            numbers[world] = activations * GIB / tokens / (3 * 2)
        return numbers

    width = 3 * 16  # of keys
    megatron = "model_engine=megatron"
    alone, two, auto = (kept("three_heads", size)[8] for size in (1, 2, "auto"))
    assert two - alone == pytest.approx(2 * 1.5 * width)
    assert auto - alone == pytest.approx(2 * 3.5 * width), "four of eight ranks"
    assert kept("three_heads", "auto")[2] == pytest.approx(two), "there are no more"
    one, two, four = (kept("llama", size)[8] for size in (1, 2, 4))
    assert two == pytest.approx(one)
    assert four - one == pytest.approx(2 * 16), "Ulysses repeats two heads for four ranks"
    one, two, auto = (kept("llama", size, megatron)[8] for size in (1, 2, "auto"))
    assert auto > two > one


def test_norms_that_copy_their_input_to_fp32_are_those_that_are_not_torchs_own():
    layer = torch.nn.Module()
    layer.first = torch.nn.RMSNorm(4)
    layer.inner = torch.nn.Sequential(torch.nn.RMSNorm(6), torch.nn.LayerNorm(8))
    layer.linear = torch.nn.Linear(4, 6)
    assert norm_width(layer) == 4 + 6


def test_flops_of_frozen_weights_are_four_each(folder):
    """Without its gradient, a step takes two products with a matrix instead of three."""

    def flops(*pairs):
        hf_config = read_hf_config(folder / "llama")
        hf, _ = build_model(make_config(folder, *pairs), Head.LOG_PROBS)
        numbers = SimpleNamespace(_flops=count_flops(hf, hf_config))
        all_predicted = FSDPEngine.flops(numbers, [10, 20])
        predicted_at_four = FSDPEngine.flops(numbers, [10, 20], 4)
        assert all_predicted - predicted_at_four == (30 - 4) * numbers._flops[1]
        return numbers._flops, all_predicted

    whole, of_whole = flops()
    adapted, of_adapted = flops(*(f"model.lora.{key}" for key in LORA))
    in_adapters = 3 * 4 * (4 * 32 + 2 * (32 + 16) + 3 * (32 + 48) + 2 * 32 - 2 * 32)
    assert adapted == (whole[0] * 2 / 3 + 6 * in_adapters, whole[1] * 2 / 3, whole[2])
    assert of_whole == 30 * (whole[0] + whole[1]) + 500 * whole[2]
    assert of_adapted == 30 * (adapted[0] + adapted[1]) + 500 * whole[2]


def test_flops_of_a_mixture_are_of_the_experts_that_a_token_goes_to(folder):
    mixture, hybrid = (read_hf_config(folder / family) for family in ("qwen3_moe", "bamba"))
    layers, _, attention = count_flops(build_on_meta(mixture, torch.float32), mixture)
    assert layers == 6 * 3 * (32 * 32 * (4 + 2 + 2 + 4) + 8 * 32 + 3 * 3 * 24 * 32)
    assert attention == 6 * 3 * 4 * 32
    _, _, attention = count_flops(build_on_meta(hybrid, torch.float32), hybrid)
    assert attention == 6 * 4 * 8, "one layer of three has attention"


def test_flops_of_frozen_experts_without_a_backward_pass_are_two_each(folder):
    """Nothing in or before the first layer is trained. The second one has a frozen router."""
    family = folder / "qwen3_moe"
    patterns = r"model.freeze=['embed_tokens','layers\.0\.','layers\.1\.mlp\.gate\.']"
    hf, _ = build_model(make_config(folder, f"model.path={family}", patterns), Head.LOG_PROBS)
    attention = 32 * 32 * (4 + 2 + 2 + 4)
    router = 8 * 32
    experts = 3 * 3 * 24 * 32
    first = 2 * (attention + router + experts)
    second = 6 * (attention + experts) + 4 * router
    third = 6 * (attention + router + experts)
    in_layers, in_head, in_attention = count_flops(hf, read_hf_config(family))
    assert in_layers == first + second + third
    assert in_head == 6 * 97 * 32
    assert in_attention == (2 + 6 + 6) * 4 * 32


def test_configurations_without_a_longest_length_or_one_head_dim():
    with torch.device("meta"):
        check_rope(
            AutoConfig.for_model("bloom"),
            load("sft.yaml", ["model.path=unused", "data.train_files=unused"]),
        )
    gemma = AutoConfig.for_model(
        "gemma4_text", num_hidden_layers=6, head_dim=8, global_head_dim=16, num_attention_heads=4
    )
    assert count_flops(build_on_meta(gemma, torch.float32), gemma)[2] == 6 * 4 * (5 * 8 + 16)
    assert head_dim(gemma) == 16
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
    assert attention_widths(step) == (6 * 8, 2 * 8)
    assert [has_whole_heads(step, size) for size in (2, 4)] == [True, False]

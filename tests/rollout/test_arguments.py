"""The arguments of `vllm.LLM`: for each supported release, on each kind of device."""

import logging
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from config import InputError, load
from engines.model.hf import build_on_meta, read_hf_config
from rollout.vllm import adapters, routing, speculation, startup
from rollout.vllm.arguments import MAX_PREFILL_TOKENS, NUM_TIES, Host, engine_arguments
from rollout.vllm.capacity import AwakeMemory, kv_bytes_per_token, max_num_seqs, weight_bytes
from rollout.vllm.sampling import validation_sampling
from rollout.vllm.versions import SUPPORTED
from tests.support.models import make_model

UNKNOWN_VERSION = "0.0.1"
GPU_BYTES = 80 * 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arguments")
    make_model(folder / "dense", "qwen2_tied")
    make_model(folder / "experts", "qwen3_moe")
    make_model(folder / "recurrent", "lfm2")
    return folder


def make_config(path, *settings: str):
    lengths = ["data.max_prompt_length=100", "rollout.max_tokens=50", "validation.max_tokens=60"]
    return load("ppo.yaml", [f"model.path={path}", "data.train_files=x", *lengths, *settings])


def make_host(device_type: str, version: str = "0.32.0", world_size: int = 1) -> Host:
    device_bytes = 0 if device_type == "cpu" else GPU_BYTES
    return Host(world_size, device_type, device_bytes, version)


def test_a_cpu_has_no_graphs_and_no_sleep_mode(folder):
    arguments = engine_arguments(make_config(folder / "dense"), make_host("cpu"), False)
    assert arguments["enforce_eager"] is True
    assert arguments["skip_mm_profiling"] is True
    assert arguments["kv_cache_memory_bytes"] == 2**30
    assert arguments["max_num_batched_tokens"] == MAX_PREFILL_TOKENS
    assert arguments["max_model_len"] == 150
    assert arguments["hf_overrides"] == {"tie_word_embeddings": False}
    absent = {"compilation_config", "enable_sleep_mode", "gpu_memory_utilization", "moe_backend"}
    assert absent.isdisjoint(arguments)


def test_all_arguments_of_a_dense_model_on_a_cpu(folder):
    """A key that is missing here would be vLLM's default."""
    from rollout.vllm.scheduler import ClosedBatchScheduler  # imports vLLM, which takes seconds

    settings = ["trainer.seed=4294967299", "rollout.tensor_parallel_size=2", "rollout.stop=[Q]"]
    settings += ["rollout.kv_cache_gib=0.5", "data.max_prompt_length=9000", "rollout.n=3"]
    settings += ["data.train_batch_size=4", "engine.compute_dtype=float32"]
    config = make_config(folder / "dense", *settings)
    assert engine_arguments(config, make_host("cpu", world_size=4), False) == {
        "model": str(folder / "dense"),
        "max_model_len": 9050,
        "dtype": "float32",
        "skip_tokenizer_init": False,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 7,
        "seed": 3,
        "hf_overrides": {"tie_word_embeddings": False},
        "skip_mm_profiling": True,
        "kv_cache_memory_bytes": 2**29,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 9050,
        "enable_chunked_prefill": False,
        "enforce_eager": True,
        "scheduler_cls": ClosedBatchScheduler,
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": 2,
        "load_format": "dummy",
    }


def test_drafted_tokens_count_in_graphs_and_batches(folder):
    make_model(folder / "mimo", "mimo")
    settings = ["model.mtp.enable=true", "model.mtp.enable_rollout=true"]
    settings += ["model.mtp.num_speculative_tokens=3", "rollout.max_num_seqs=3000"]
    config = make_config(folder / "mimo", *settings)
    arguments = engine_arguments(config, make_host("cuda"), False)
    assert arguments["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 3}
    assert arguments["max_num_batched_tokens"] == 12_000
    assert arguments["compilation_config"] == {"max_cudagraph_capture_size": 3000}


@pytest.mark.parametrize("num_drafted", [0, 2])
def test_as_many_sequences_as_fit_in_memory(folder, num_drafted):
    """With the weights, and the KV cache and logits of each sequence, all in bfloat16 or fp32."""
    make_model(folder / "capacity", "mimo")
    hf_config = read_hf_config(folder / "capacity")
    settings = ["rollout.gpu_memory_utilization=0.5", "rollout.n=1000", "data.train_batch_size=8"]
    settings += ["engine.compute_dtype=bfloat16", "rollout.tensor_parallel_size=2"]
    if num_drafted:
        settings += ["model.mtp.enable=true", "model.mtp.enable_rollout=true"]
        settings += [f"model.mtp.num_speculative_tokens={num_drafted}"]
    config = make_config(folder / "capacity", *settings)
    num_weights = sum(p.numel() for p in build_on_meta(hf_config, torch.float32).parameters())
    head_dim = hf_config.hidden_size // hf_config.num_attention_heads
    num_kv_heads = max(1, hf_config.num_key_value_heads // 2)
    kv_bytes = 2 * 2 * hf_config.num_hidden_layers * num_kv_heads * head_dim
    logit_bytes = 3 * 4 * (1 + num_drafted) * hf_config.vocab_size
    bytes_per_sequence = (100 + 50 / 2) * kv_bytes + logit_bytes
    device_bytes = 2 * (num_weights * 2 / 2 + 37.5 * bytes_per_sequence)
    assert max_num_seqs(config, 2, int(device_bytes)) == 37
    assert max_num_seqs(config, 2, 0) == 1024
    few = make_config(folder / "capacity", *settings, "rollout.n=3", "data.train_batch_size=10")
    assert max_num_seqs(few, 4, 0) == 5 * 3
    partial = ["rollout.partial.enable=true", "rollout.partial.oversample=1.5"]
    begun_in_advance = make_config(
        folder / "capacity", *settings, "rollout.n=3", "data.train_batch_size=10", *partial
    )
    assert max_num_seqs(begun_in_advance, 4, 0) == 8 * 3, "1.5 times 5 prompts, rounded up"
    tight = make_config(folder / "capacity", *settings, "rollout.kv_cache_gib=0.001")
    assert max_num_seqs(tight, 2, GPU_BYTES) == int(0.001 * 2**30 / (125 * kv_bytes))


def test_a_kv_cache_of_a_fixed_size_is_beside_the_weights(folder):
    """vLLM's part of the device includes the weights, and rollout.kv_cache_gib does not."""
    settings = ["engine.compute_dtype=bfloat16", "rollout.gpu_memory_utilization=0.25"]
    config = make_config(folder / "dense", *settings)
    weights = weight_bytes(config)
    part = AwakeMemory.of(config, GPU_BYTES)
    assert part.total == GPU_BYTES / 4
    assert part.weights == weights
    assert part.setting == "rollout.gpu_memory_utilization=0.25"
    fixed = make_config(folder / "dense", *settings, "rollout.kv_cache_gib=1.5")
    awake = AwakeMemory.of(fixed, GPU_BYTES)
    assert awake.total == weights + 1.5 * 2**30
    assert awake.weights == weights
    assert awake.setting == "rollout.kv_cache_gib=1.5"


@pytest.mark.parametrize("num_tokens, fits", [(150, True), (149, False)])
def test_a_kv_cache_holds_at_least_one_of_the_longest_responses(folder, num_tokens, fits):
    """The weights need none of it. Otherwise a run that fits would be rejected."""
    hf_config = read_hf_config(folder / "dense")
    head_dim = hf_config.hidden_size // hf_config.num_attention_heads
    width = hf_config.num_key_value_heads * head_dim
    bytes_per_token = 2 * 2 * hf_config.num_hidden_layers * width
    gib = num_tokens * bytes_per_token / 2**30
    settings = ["engine.compute_dtype=bfloat16", f"rollout.kv_cache_gib={gib}"]
    awake = AwakeMemory.of(make_config(folder / "dense", *settings), GPU_BYTES)
    assert awake.longest_sequence == 150 * bytes_per_token
    assert (awake.problem is None) == fits


def test_a_small_kv_cache_decodes_one_response_at_a_time(folder):
    """vLLM rejects max_num_seqs=0."""
    config = make_config(folder / "dense", "rollout.kv_cache_gib=1e-9")
    assert max_num_seqs(config, 1, GPU_BYTES) == 1


@pytest.mark.parametrize("tp_size, num_heads", [(1, 2), (2, 1), (4, 1)])
def test_a_rank_has_at_least_one_head_of_keys(folder, tp_size, num_heads):
    """With more ranks than heads, vLLM repeats the heads."""
    settings = [f"rollout.tensor_parallel_size={tp_size}", "engine.compute_dtype=float32"]
    config = make_config(folder / "dense", *settings)
    shape = read_hf_config(folder / "dense")
    head_dim = shape.hidden_size // shape.num_attention_heads
    expected = 2 * shape.num_hidden_layers * num_heads * head_dim * 4
    assert kv_bytes_per_token(config, shape) == expected


def test_the_weights_of_a_vision_tower_count_if_the_run_has_images(tmp_path):
    """vLLM loads the tower, too."""
    make_model(tmp_path, "gemma3 with images")
    num_bytes = []
    for setting in ("model.images=true", "model.images=false"):
        config = make_config(tmp_path, setting, "engine.compute_dtype=float32")
        num_bytes.append(weight_bytes(config))
    model = build_on_meta(read_hf_config(tmp_path), torch.float32, images=True).model
    of_images = [*model.vision_tower.parameters(), *model.multi_modal_projector.parameters()]
    assert num_bytes[0] - num_bytes[1] == 4 * sum(p.numel() for p in of_images)


@pytest.mark.parametrize("rank, max_lora_rank", [(1, 1), (4, 8), (8, 8), (9, 16)])
def test_vllm_has_room_for_adapters_of_at_least_their_rank(folder, rank, max_lora_rank):
    """vLLM takes only some ranks: larger ones would slow down every layer."""
    config = make_config(folder / "dense", f"model.lora.rank={rank}")
    arguments = engine_arguments(config, make_host("cpu"), shares_base=False)
    assert arguments["max_lora_rank"] == max_lora_rank
    assert arguments["max_loras"] == 1


def test_a_request_of_an_episode_may_have_stop_strings_of_its_own(folder):
    config = make_config(folder / "dense")
    assert engine_arguments(config, make_host("cpu"), False)["skip_tokenizer_init"] is True
    settings = ["rollout.episode=agent.py:play", "rollout.max_episode_tokens=150"]
    with_episodes = make_config(folder / "dense", *settings)
    assert engine_arguments(with_episodes, make_host("cpu"), False)["skip_tokenizer_init"] is False


def test_experts_are_recorded_by_another_worker(folder):
    config = make_config(folder / "experts", "rollout.routing_replay=true")
    assert engine_arguments(config, make_host("cpu"), False)["worker_cls"] == routing.WORKER
    without_replay = engine_arguments(make_config(folder / "experts"), make_host("cpu"), False)
    assert "worker_cls" not in without_replay


def test_a_replica_decodes_its_share_of_a_batch_at_once(folder):
    """Of 10 prompts, one of four ranks gets up to 3, and a replica of two ranks all of its 5."""
    settings = ["data.train_batch_size=10", "rollout.n=2", "rollout.kv_cache_gib=10"]
    for tp_size, num_prompts in ((1, 3), (2, 5)):
        tp = f"rollout.tensor_parallel_size={tp_size}"
        assert max_num_seqs(make_config(folder / "dense", *settings, tp), 4, 0) == 2 * num_prompts


def test_sequences_of_episodes_are_as_long_as_an_episode(folder):
    """Not only as one of its turns."""
    make_model(folder / "episodes", "qwen3")
    settings = ["rollout.kv_cache_gib=0.01", "rollout.n=1000", "data.max_prompt_length=100"]
    in_one_turn = make_config(folder / "episodes", *settings, "rollout.max_tokens=700")
    episodes = make_config(
        folder / "episodes", *settings, "rollout.max_tokens=50", "rollout.max_episode_tokens=800"
    )
    num_seqs = max_num_seqs(episodes, 1, GPU_BYTES)
    assert num_seqs == max_num_seqs(in_one_turn, 1, GPU_BYTES)
    assert 1 < num_seqs < 1000


def test_weights_are_counted_again_when_the_model_has_changed(tmp_path):
    """As in a notebook, or if a model is exported to the same directory again."""
    num_bytes = []
    for num_layers in (1, 3):
        make_model(tmp_path, "qwen3", num_hidden_layers=num_layers)
        os.utime(tmp_path / "config.json", (num_layers, num_layers))
        num_bytes.append(weight_bytes(make_config(tmp_path)))
    shape = read_hf_config(tmp_path)
    per_layer = (num_bytes[1] - num_bytes[0]) / 2
    embeddings = 2 * 2 * shape.vocab_size * shape.hidden_size  # and the output matrix, in bfloat16
    norm = 2 * shape.hidden_size
    assert per_layer > 0
    assert num_bytes[0] == embeddings + norm + per_layer


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_process_is_prepared_for_a_cpu(folder, one_rank, tmp_path, recwarn):
    """Shared memory of a killed run is removed. Only an unknown release is reported.

    vLLM packs the weights, unless the trainer shares them.
    """
    from vllm.model_executor.layers import utils  # imports vLLM, which takes seconds

    packing = utils.dispatch_cpu_unquantized_gemm
    left_behind = Path("/dev/shm") / f"{tmp_path.name}-tp:0-[0]-cpushm_0"
    for version in (*SUPPORTED, UNKNOWN_VERSION):
        left_behind.touch()
        startup.prepare_process(make_config(folder / "dense"), make_host("cpu", version), False)
        assert not left_behind.exists()
    assert utils.dispatch_cpu_unquantized_gemm is packing
    messages = [str(warning.message) for warning in recwarn]
    # Importing vLLM may warn, too.
    (message,) = [message for message in messages if message.startswith("vLLM ")]
    assert message.startswith(f"vLLM {UNKNOWN_VERSION} is installed, but rollout/")


def test_the_capture_of_graphs_is_printed_and_nothing_else(one_rank, capsys):
    names = [f"vllm.v1.worker.{name}" for name in ("gpu.model_runner", "gpu_model_runner")]
    loggers = [logging.getLogger(name) for name in names]
    handlers = [list(logger.handlers) for logger in loggers]
    startup.print_graph_capture()
    try:
        for logger in loggers:
            logger.info("Graph capturing finished in %d secs", 3)
            logger.info("something else")
    finally:
        for logger, old_handlers in zip(loggers, handlers):
            logger.handlers = old_handlers
            logger.setLevel(logging.NOTSET)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("vLLM: ")]
    assert printed == ["vLLM: Graph capturing finished in 3 secs"] * 2


@pytest.mark.parametrize(
    "family, settings, world_size, obstacle",
    [
        ("dense", [], 1, None),
        ("dense", [], 2, "the trainer's weights are sharded or offloaded"),
        ("dense", ["engine.fsdp_size=1"], 2, None),
        ("dense", ["engine.cpu_offload=true"], 1, "the trainer's weights are sharded or offloaded"),
        ("dense", ["rollout.tensor_parallel_size=2"], 2, "rollout.tensor_parallel_size=2 divides"),
        ("dense", ["model_engine=megatron"], 1, "model_engine=megatron stores weights in a diff"),
        ("experts", [], 1, "vLLM stores experts in a different layout"),
    ],
)
def test_when_vllm_and_the_trainer_share_the_base(folder, family, settings, world_size, obstacle):
    adapter = make_config(folder / family, "model.lora.rank=4", *settings)
    reason = adapters.sharing_obstacle(adapter, world_size)
    assert (reason or "").startswith(obstacle or "")
    assert (reason is None) == (obstacle is None)
    assert adapters.shares_base(adapter, world_size) == (obstacle is None)
    for other in (["rollout.share_base=never"], ["model.lora.merge=true"], ["model.lora.rank=0"]):
        config = make_config(folder / family, "model.lora.rank=4", *settings, *other)
        assert not adapters.shares_base(config, world_size)


def test_validation_counts_only_with_validation_files_and_follows_rollout(folder):
    settings = ["data.val_files=x", "rollout.top_k=5", "rollout.stop=[Q]"]
    longer = make_config(folder / "dense", *settings)
    assert engine_arguments(longer, make_host("cpu"), False)["max_model_len"] == 160
    sampling = validation_sampling(longer)
    assert sampling.max_tokens == 60
    assert sampling.temperature == 0
    assert sampling.top_k == 5
    assert list(sampling.stop) == ["Q"]
    other = make_config(
        folder / "dense", *settings, "validation.stop=[]", "validation.max_tokens=null"
    )
    arguments = engine_arguments(other, make_host("cpu"), False)
    assert arguments["max_model_len"] == 150
    assert not arguments["skip_tokenizer_init"], "training responses have a stop string"
    assert list(validation_sampling(other).stop) == []


def test_vllm_returns_enough_log_probabilities_for_a_validation(folder):
    """It also returns some that are as likely as the last of the top_k, see NUM_TIES."""
    settings = ["data.val_files=x", "rollout.top_k=5", "validation.top_k=9"]
    config = make_config(folder / "dense", *settings)
    assert engine_arguments(config, make_host("cpu"), False)["max_logprobs"] == 9 + NUM_TIES


@pytest.mark.parametrize("version", SUPPORTED)
def test_a_gpu_has_graphs_and_sleeps(folder, version):
    from rollout.vllm.scheduler import ClosedBatchScheduler

    config = make_config(folder / "dense", "rollout.max_num_seqs=700", "rollout.top_k=5")
    arguments = engine_arguments(config, make_host("cuda", version), False)
    assert arguments["enforce_eager"] is False
    assert arguments["compilation_config"] == {"max_cudagraph_capture_size": 700}
    assert arguments["enable_sleep_mode"] is True
    assert arguments["gpu_memory_utilization"] == config.rollout.gpu_memory_utilization
    assert arguments["scheduler_cls"] is ClosedBatchScheduler
    assert arguments["max_logprobs"] == 13
    assert arguments["enable_chunked_prefill"] is False
    assert "kv_cache_memory_bytes" not in arguments


def test_a_shared_base_stays_tied(folder):
    config = make_config(folder / "dense", "model.lora.rank=4")
    arguments = engine_arguments(config, make_host("cuda"), shares_base=True)
    assert arguments["hf_overrides"] == {"tie_word_embeddings": True}
    assert arguments["enable_lora"] is True
    assert arguments["max_lora_rank"] == 8


def test_an_unknown_version_keeps_its_scheduler(folder):
    host = make_host("cuda", UNKNOWN_VERSION)
    arguments = engine_arguments(make_config(folder / "dense"), host, False)
    assert "scheduler_cls" not in arguments


def test_a_drafter_replaces_the_scheduler(folder):
    config = make_config(
        folder / "dense", "rollout.speculative=ngram", "rollout.num_speculative_tokens=3"
    )
    arguments = engine_arguments(config, make_host("cuda"), False)
    assert "scheduler_cls" not in arguments
    assert arguments["speculative_config"] == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }


def test_experts_keep_their_layout_on_a_gpu(folder):
    config = make_config(folder / "experts")
    assert engine_arguments(config, make_host("cuda"), False)["moe_backend"] == "triton"
    assert "moe_backend" not in engine_arguments(config, make_host("cpu"), False)


def test_recurrent_layers_have_no_prefix_cache(folder):
    recurrent = engine_arguments(make_config(folder / "recurrent"), make_host("cuda"), False)
    assert recurrent["enable_prefix_caching"] is False
    dense = engine_arguments(make_config(folder / "dense"), make_host("cuda"), False)
    assert "enable_prefix_caching" not in dense


@pytest.mark.parametrize(
    "version, family, settings, expected",
    [
        ("0.25.1", "experts", [], "1"),
        ("0.25.1", "experts", ["rollout.speculative=ngram"], None),
        ("0.25.1", "dense", [], None),
        ("0.32.0", "experts", [], None),
        (UNKNOWN_VERSION, "experts", [], None),
    ],
)
def test_the_model_runner_of_experts(folder, monkeypatch, version, family, settings, expected):
    # setenv() first, so that monkeypatch restores the variable if the product sets it.
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "")
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    startup.choose_model_runner(make_config(folder / family, *settings), make_host("cuda", version))
    assert os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == expected


def test_a_model_runner_that_the_user_has_chosen_is_kept(folder, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    startup.choose_model_runner(make_config(folder / "experts"), make_host("cuda", "0.25.1"))
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"


def test_drafters_need_a_supported_version(folder):
    config = make_config(folder / "dense", "rollout.speculative=ngram")
    with pytest.raises(InputError, match=f"0.25.1 and 0.32.0, but {UNKNOWN_VERSION} is installed"):
        speculation.replace_samplers(config, UNKNOWN_VERSION, "cuda")


@pytest.mark.filterwarnings("error")
def test_vllms_look_at_torchs_deprecated_attribute_is_quiet(monkeypatch):
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    startup.quiet_vllm()
    assert os.environ["VLLM_LOGGING_LEVEL"] == "ERROR"
    assert hasattr(dist.reduce_op, "__dict__")  # as in vllm/triton_utils/dispatcher.py
    assert not logging.getLogger("vllm.triton_utils.importing").isEnabledFor(logging.WARNING)

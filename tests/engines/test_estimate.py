"""The FSDP engine's estimate of memory, compared with what a really built engine holds."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig
from torch.distributed.fsdp import FSDPModule

from config import load
from data.batching.batch import Batch, make_cu_seqlens
from engines.build import engine_class
from engines.fsdp.engine import FSDPEngine
from engines.fsdp.transforms import build_model
from engines.heads import Head
from engines.memory import LABELS, Estimate
from engines.model.hf import read_hf_config
from tests.support.models import make_model

pytestmark = pytest.mark.usefixtures("process_group")

CPU = torch.device("cpu")
NUM_TOKENS = 48


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("memory") / "llama", "llama")


def make_config(model: Path, *pairs: str) -> DictConfig:
    settings = [
        f"model.path={model}",
        "data.train_files=none",
        f"data.max_tokens_per_micro_batch={NUM_TOKENS}",
        "engine.torch_compile=never",
        "engine.activation_checkpointing=false",
        f"engine.log_prob_chunk_size={NUM_TOKENS}",
    ]
    return load("sft.yaml", [*settings, *pairs])


def make_batch() -> Batch:
    ids = torch.randint(3, 90, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0))
    return Batch(ids, make_cu_seqlens(torch.tensor([NUM_TOKENS])))


def negative_log_likelihood(log_probs, entropy, batch_fields):
    return -log_probs.sum() / NUM_TOKENS, {}


def build_and_estimate(config: DictConfig) -> tuple[FSDPEngine, Estimate]:
    engine = FSDPEngine(config, CPU, total_steps=2)
    (estimate,) = FSDPEngine.estimate_memory(config, 1, "cpu")
    return engine, estimate


def count_bytes(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def gradient_bytes(engine: FSDPEngine) -> int:
    """Take a step, and return the bytes of the gradients that the optimizer saw."""
    seen = []
    parameters = list(engine.model.parameters())

    def record(optimizer, args, kwargs) -> None:
        seen.append(count_bytes(p.grad for p in parameters if p.grad is not None))

    handle = engine.optimizers[0].register_step_pre_hook(record)
    engine.train_batch(make_batch(), negative_log_likelihood, 0)
    handle.remove()
    return seen[0]


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [(), ("model.lora.rank=4",)], ids=["whole", "lora"])
def test_states_are_what_the_engine_holds(model, pairs):
    engine, estimate = build_and_estimate(make_config(model, *pairs))
    assert estimate.parameters == count_bytes(engine.model.parameters())
    assert estimate.gradients == gradient_bytes(engine)
    moments = []
    for state in engine.optimizers[0].state.values():
        moments += [tensor for tensor in state.values() if tensor.ndim > 0]
    assert estimate.optimizer == count_bytes(moments)
    if not pairs:
        state = engine.state()
        num_bytes = count_bytes(state["model"].values()) + count_bytes(moments)
        assert FSDPEngine.checkpoint_bytes(engine.config) == num_bytes


def test_gathered_weights_and_unreduced_gradients_are_those_of_the_groups(model):
    """One rank that computes in another dtype than it stores is sharded by FSDP as well."""
    config = make_config(model, "engine.param_dtype=float32", "engine.compute_dtype=bfloat16")
    engine, estimate = build_and_estimate(config)
    in_layers = []
    in_root = 0
    for module in engine.model.modules():
        if not isinstance(module, FSDPModule):
            continue
        group = module._get_fsdp_state()._fsdp_param_group
        number = sum(parameter._orig_size.numel() for parameter in group.fsdp_params)
        if module is engine.model:
            in_root = number
        else:
            in_layers.append(number)
    # In bf16, two layers at a time: the root stays.
    assert estimate.gathered_weights == (in_root + 2 * max(in_layers)) * 2
    # In bf16, and reduced in fp32. Of the root, only the output matrix has a gradient so far.
    assert config.engine.reduce_dtype == "float32"
    in_output_matrix = engine.hf.get_output_embeddings().weight.numel()
    assert estimate.unreduced_gradients == in_output_matrix * 2 + max(in_layers) * (2 + 4)


def test_with_few_tokens_the_peak_is_when_the_root_is_reduced(tmp_path):
    """Then all gradients outside the layers exist twice, and activations no longer."""
    model = make_model(tmp_path / "large vocabulary", "llama", vocab_size=4096)
    few_tokens = ["data.max_tokens_per_micro_batch=2", "engine.activation_checkpointing=true"]
    config = make_config(model, "engine.compute_dtype=bfloat16", *few_tokens)
    (estimate,) = FSDPEngine.estimate_memory(config, 2, "cpu")
    hf, _ = build_model(config, Head.LOG_PROBS)
    in_layers = sum(p.numel() for layer in hf.model.layers for p in layer.parameters())
    in_root = sum(p.numel() for p in hf.parameters()) - in_layers
    assert estimate.is_after_backward
    assert estimate.unreduced_gradients == in_root * (2 + 4)
    assert estimate.gathered_weights == in_root * 2
    assert estimate.activations == estimate.chunk_logits == estimate.output_matrix_gradient == 0


@pytest.mark.parametrize(
    "setting, num_shards, bytes_in_root",
    [
        ("engine.fsdp_size=-1", 4, 2 / 4),
        ("engine.fsdp_size=2", 2, 4 / 2),  # replicas sum this rank's share once per step
        ("engine.sync_each_micro_batch=false", 4, 4),  # all of it waits to be divided
    ],
)
def test_at_the_end_of_the_backward_pass_only_gradients_outside_of_layers_wait(
    tmp_path, setting, num_shards, bytes_in_root
):
    """Gradients wait in fp32, and those that are reduced have the dtype of weights, bf16."""
    model = make_model(tmp_path / "large vocabulary", "llama", vocab_size=4096)
    few_tokens = ["data.max_tokens_per_micro_batch=2", "engine.activation_checkpointing=true"]
    config = make_config(model, "engine.param_dtype=bfloat16", *few_tokens, setting)
    assert config.engine.reduce_dtype == "float32"
    (estimate,) = FSDPEngine.estimate_memory(config, 4, "cpu")
    hf, _ = build_model(config, Head.LOG_PROBS)
    in_layers = sum(p.numel() for layer in hf.model.layers for p in layer.parameters())
    in_root = sum(p.numel() for p in hf.parameters()) - in_layers
    assert estimate.is_after_backward
    assert estimate.gradients == in_root * bytes_in_root + in_layers * 2 / num_shards


@pytest.mark.parametrize(
    "pairs, fsdp_size, num_shards",
    [((), -1, 4), ((), 2, 2), ((), 1, 1), (("model.lora.rank=4",), -1, 4)],
    ids=["sharded", "hybrid", "replicated", "lora"],
)
def test_states_are_divided_by_the_ranks_that_shard_them(model, pairs, fsdp_size, num_shards):
    config = make_config(model, *pairs, f"engine.fsdp_size={fsdp_size}")
    (whole,) = FSDPEngine.estimate_memory(make_config(model, *pairs), 1, "cpu")
    (estimate,) = FSDPEngine.estimate_memory(config, 4, "cpu")
    for term in ("gradients", "optimizer", "parameters"):
        expected = getattr(whole, term) / num_shards
        assert getattr(estimate, term) == pytest.approx(expected), term
    for term in ("activations", "chunk_logits", "output_matrix_gradient"):
        assert getattr(estimate, term) == getattr(whole, term), term


def test_replicas_keep_gradients_in_the_dtype_in_which_they_are_summed(tmp_path):
    """At the end of the backward pass those of the layers exist in both dtypes."""
    model = make_model(tmp_path / "large vocabulary", "llama", vocab_size=4096)
    pairs = [
        "engine.param_dtype=bfloat16",
        "data.max_tokens_per_micro_batch=2",
        "engine.activation_checkpointing=true",
    ]
    unreduced = {}
    for fsdp_size in (4, 2):
        for reduce_dtype in ("bfloat16", "float32"):
            settings = [f"engine.fsdp_size={fsdp_size}", f"engine.reduce_dtype={reduce_dtype}"]
            config = make_config(model, *pairs, *settings)
            (estimate,) = FSDPEngine.estimate_memory(config, 4, "cpu")
            assert estimate.is_after_backward
            unreduced[fsdp_size, reduce_dtype] = estimate.unreduced_gradients
    hf, _ = build_model(config, Head.LOG_PROBS)
    in_layers = sum(p.numel() for layer in hf.model.layers for p in layer.parameters())
    assert unreduced[2, "bfloat16"] == unreduced[4, "bfloat16"]
    assert unreduced[2, "float32"] == unreduced[4, "float32"] + in_layers / 2 * 4


def test_gradients_that_wait_for_other_replicas_have_the_dtype_of_the_sum(model):
    pairs = ["engine.param_dtype=bfloat16", "data.max_tokens_per_micro_batch=4096"]
    gradients = {}
    for fsdp_size in (4, 2):
        config = make_config(model, *pairs, f"engine.fsdp_size={fsdp_size}")
        assert config.engine.reduce_dtype == "float32"
        (estimate,) = FSDPEngine.estimate_memory(config, 4, "cpu")
        assert not estimate.is_after_backward
        gradients[fsdp_size] = estimate.gradients
    hf, _ = build_model(config, Head.LOG_PROBS)
    num_parameters = sum(p.numel() for p in hf.parameters())
    assert gradients == {4: num_parameters / 4 * 2, 2: num_parameters / 2 * 4}


def test_gradients_that_are_reduced_once_per_step_are_whole_until_then(model):
    pairs = ["engine.param_dtype=bfloat16", "data.max_tokens_per_micro_batch=4096"]
    once = make_config(model, *pairs, "engine.sync_each_micro_batch=false")
    (estimate,) = FSDPEngine.estimate_memory(once, 4, "cpu")
    hf, _ = build_model(once, Head.LOG_PROBS)
    num_parameters = sum(p.numel() for p in hf.parameters())
    assert not estimate.is_after_backward
    assert estimate.gradients == num_parameters * 4


def test_a_single_unit_is_reduced_with_a_copy_of_all_gradients(tmp_path):
    model = make_model(tmp_path / "large vocabulary", "llama", vocab_size=4096)
    pairs = ["engine.param_dtype=bfloat16", "data.max_tokens_per_micro_batch=2"]
    layout = ["engine.reshard_after_forward=false", "engine.sync_each_micro_batch=false"]
    config = make_config(model, *pairs, *layout)
    (estimate,) = FSDPEngine.estimate_memory(config, 4, "cpu")
    hf, _ = build_model(config, Head.LOG_PROBS)
    num_parameters = sum(p.numel() for p in hf.parameters())
    assert estimate.is_after_backward
    assert estimate.gradients == estimate.unreduced_gradients == num_parameters * 4


def test_an_optimizer_of_the_users_own_is_counted_like_adam_and_named_so(model, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import torch\n\nclass Mine(torch.optim.SGD):\n    pass\n")
    (adam,) = FSDPEngine.estimate_memory(make_config(model), 1, "cpu")
    config = make_config(model, f"optim.name={file}:Mine")
    (own,) = FSDPEngine.estimate_memory(config, 1, "cpu")
    assert own.rows()["optimizer, if like Adam"] == adam.rows()["optimizer"]


def test_nothing_is_gathered_without_sharding(model):
    _, estimate = build_and_estimate(make_config(model, "engine.compute_dtype=float32"))
    assert estimate.gathered_weights == 0
    assert estimate.unreduced_gradients == 0


def test_activations_are_about_what_autograd_keeps(model):
    config = make_config(model, "engine.compute_dtype=float32")
    engine, estimate = build_and_estimate(config)
    parameters = {p.untyped_storage().data_ptr() for p in engine.model.parameters()}
    kept = {}

    def record(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and tensor.is_floating_point():
            kept[storage.data_ptr()] = tensor  # holds it, so that its address stays taken
        return tensor

    (micro_batch,) = engine._laid_out(make_batch(), engine.divide_share([NUM_TOKENS]))
    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        outputs = engine.hf.get_decoder()(
            input_ids=micro_batch.input_ids,
            position_ids=micro_batch.positions.expand_as(micro_batch.input_ids),
            use_cache=False,
            **micro_batch.packing.arguments(),
        )
    assert outputs[0].requires_grad
    num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert estimate.activations == pytest.approx(num_bytes, rel=0.25)


def test_a_reference_keeps_the_activations_of_one_layer(model):
    """It has no backward pass, so activation checkpointing changes nothing."""
    activations = {}
    for checkpointing in ("true", "false"):
        config = make_config(model, f"engine.activation_checkpointing={checkpointing}")
        (trained,) = FSDPEngine.estimate_memory(config, 1, "cpu")
        (reference,) = FSDPEngine.estimate_memory(config, 1, "cpu", is_trained=False)
        activations[checkpointing] = (trained.activations, reference.activations)
    of_all_layers, of_one_layer = activations["false"]
    shape = read_hf_config(model).get_text_config()
    assert of_all_layers == shape.num_hidden_layers * of_one_layer
    recomputing, of_reference = activations["true"]
    assert of_reference == of_one_layer
    inputs = NUM_TOKENS * shape.num_hidden_layers * shape.hidden_size * 2
    assert recomputing == of_one_layer + inputs


def test_the_head_holds_one_chunk(model):
    engine, estimate = build_and_estimate(make_config(model, "engine.compute_dtype=float32"))
    num_logits = NUM_TOKENS * engine.hf_config.vocab_size
    # The logits and their gradient, and two fp32 copies without torch.compile.
    assert estimate.chunk_logits == num_logits * (4 + 4 + 8)
    output_matrix = engine.hf.get_output_embeddings().weight
    assert estimate.output_matrix_gradient == output_matrix.numel() * 4


def test_the_total_counts_each_term_once():
    names = [field.name for field in fields(Estimate) if field.name in LABELS]
    terms = [name for name in names if name not in ("offloaded", "teacher_outputs")]
    powers = {name: 2**exponent for exponent, name in enumerate(terms)}
    estimate = Estimate(**powers, offloaded=1000, teacher_outputs=3000)
    assert estimate.device_total == 2 ** len(terms) - 1
    assert estimate.rows()["device total"] == estimate.device_total
    assert len(estimate.rows()) == len(LABELS)


def test_what_is_on_the_host_is_named_so_and_not_in_the_total():
    states = dict(parameters=1, gradients=2, optimizer=4)
    estimate = Estimate(
        **states,
        activations=8,
        chunk_logits=16,
        output_matrix_gradient=None,
        is_on_host=True,
        has_unknown_optimizer=True,
    )
    assert estimate.rows() == {
        "parameters, host": 1,
        "gradients, host": 2,
        "optimizer, if like Adam, host": 4,
        "activations": 8,
        "logits of a chunk": 16,
        "device total": 24,
    }


@pytest.mark.parametrize("reshards", ["true", "false"])
def test_only_layers_give_weights_back_after_the_forward_pass(model, reshards):
    """The backward pass begins with the root, whose weights stay gathered until then."""
    config = make_config(
        model, "engine.compute_dtype=bfloat16", f"engine.reshard_after_forward={reshards}"
    )
    engine = FSDPEngine(config, CPU, total_steps=2)
    units = [module for module in engine.model.modules() if isinstance(module, FSDPModule)]
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]
    root, *layers = [group._reshard_after_forward for group in groups]
    assert not root
    assert layers == ([True] * len(engine.hf.model.layers) if reshards == "true" else [])


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
@pytest.mark.parametrize(
    "pairs, num_teachers, top_k",
    [
        ([], 0, 0),
        (["distill.teacher=MODEL", "distill.top_k=0"], 1, 0),
        (["distill.teacher=MODEL", "distill.top_k=5"], 1, 5),
    ],
    ids=["none", "one", "top_k"],
)
def test_terms_of_a_teacher(model, engine, pairs, num_teachers, top_k):
    settings = [pair.replace("MODEL", str(model)) for pair in pairs]
    settings += ["data.train_batch_size=6", "data.max_length=32", f"model_engine={engine}"]
    needed = [f"model.path={model}", "data.train_files=none", "engine.compute_dtype=bfloat16"]
    config = load("sft.yaml", [*needed, *settings])
    (estimate,) = engine_class(engine).estimate_memory(config, 2, "cuda")
    if not num_teachers:
        assert estimate.teacher_matrix is None
        assert estimate.teacher_outputs is None
        return
    shape = read_hf_config(model).get_text_config()
    # On each of two ranks three rows: hidden states in bf16, or k ids and k + 1 log-probabilities.
    bytes_per_token = top_k * 4 + (top_k + 1) * 4 if top_k else shape.hidden_size * 2
    assert estimate.teacher_outputs == 6 / 2 * 32 * bytes_per_token
    if engine == "fsdp":
        replicated = load("sft.yaml", [*needed, *settings, "engine.fsdp_size=1"])
        (of_replica,) = engine_class(engine).estimate_memory(replicated, 2, "cuda")
        assert of_replica.teacher_outputs == estimate.teacher_outputs
    matrix_bytes = shape.vocab_size * shape.hidden_size * 2
    assert estimate.teacher_matrix == (None if top_k else num_teachers * matrix_bytes)


@pytest.mark.parametrize("pairs", [[], ["engine.cpu_offload=true"]])
def test_one_rank_is_wrapped_by_fsdp_only_to_offload(model, pairs):
    config = make_config(model, "engine.compute_dtype=float32", *pairs)
    engine = FSDPEngine(config, CPU, total_steps=2)
    assert isinstance(engine.model, FSDPModule) == bool(pairs)


def test_compiled_layers_in_fp8_keep_fewer_activations(model):
    compiled = ["engine.compute_dtype=bfloat16", "engine.torch_compile=always"]
    settings = {
        "bf16": [],
        "fp8": ["engine.float8=rowwise"],
        "some fp8": ["engine.float8=rowwise", "engine.float8_exclude=[down_proj]"],
        "adapters": ["model.lora.rank=4"],
        "adapters on fp8": ["engine.float8=rowwise", "model.lora.rank=4"],
    }
    activations = {}
    for name, pairs in settings.items():
        config = make_config(model, *compiled, *pairs)
        (estimate,) = FSDPEngine.estimate_memory(config, 2, "cpu")
        activations[name] = estimate.activations
    shape = read_hf_config(model).get_text_config()
    recomputed = 2 * shape.hidden_size + shape.intermediate_size
    num_tokens = config.data.max_tokens_per_micro_batch
    saved = num_tokens * shape.num_hidden_layers * recomputed * 2
    assert activations["bf16"] - activations["fp8"] == saved
    assert activations["some fp8"] == activations["bf16"]
    assert activations["adapters on fp8"] == activations["adapters"]

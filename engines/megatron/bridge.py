"""Hugging Face models as Megatron models: their configuration, the modules with their weights, and the way back."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from safetensors import safe_open
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from config import InputError
from engines.heads import Head
from engines.megatron import mtp_layers as mtp
from engines.megatron.layers import Adaptable, PackedRotaryEmbedding, install
from engines.megatron.mapping import Mapping, global_parameters
from engines.megatron.moe import MixtureOfExperts
from engines.model import weights
from engines.model.hf import check_windows, head_dim, stages_of_layers

install()

FAMILIES = ("llama", "mimo", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
WITH_MBRIDGE = ("llama", "qwen2", "qwen3")
# What transformers computes from the configuration alone; other types change with the length of a sequence.
ROPES = ("default", "llama3", "linear", "yarn")
# Of config.json; every layer has experts, or none has.
SUPPORTED = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "router_jitter_noise": 0.0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}


class HiddenStates(GPTModel):
    """The model up to its last norm: its output matrix only holds the weight. Returns [s, b, h], on every stage; s is
    this rank's share with sequence or context parallelism. With labels (see mtp.hidden_ahead) the last stage puts behind it what
    each of its layers for multi-token prediction returns: [(1 + layers) * s, b, h].

    detached: whether the gradient of those layers stays in them
    """

    def __init__(self, detached: bool, **others):
        super().__init__(**others)
        self.detached = detached
        if not self.mtp_process:
            return
        # vLLM's drafter reads MiMo's hidden states before the last norm, too.
        self.decoder.final_layernorm.register_forward_pre_hook(
            lambda _, inputs: setattr(self, "before_norm", inputs[0])
        )
        if self.share_embeddings_and_output_weights:
            self.output_layer.weight = None  # that of the embedding, which this stage has a copy of

    def _preprocess(self, *, padding_mask: Tensor, **others) -> tuple:
        """Megatron's own divides the padding mask over tensor-parallel ranks on the first pipeline stage only."""
        results = super()._preprocess(**others)
        if self.config.sequence_parallel:
            group = mpu.get_tensor_model_parallel_group()
            padding_mask = padding_mask.chunk(group.size(), dim=1)[group.rank()]
        return *results[:5], padding_mask, *results[6:]

    def _postprocess(
        self,
        hidden_states: Tensor,
        labels: list[Tensor] | None,
        rotary_pos_emb: Tensor,
        packed_seq_params,
        **_,
    ) -> Tensor:
        if not self.mtp_process:
            return hidden_states
        hidden, self.before_norm = self.before_norm, None
        if not labels:
            return hidden_states
        return torch.cat(
            [
                hidden_states,
                *mtp.hidden_ahead(
                    self,
                    hidden,
                    labels,
                    rotary_pos_emb=rotary_pos_emb,
                    packed_seq_params=packed_seq_params,
                ),
            ]
        )


class ValueMatrix(nn.Linear):
    """An output matrix of one row, whole on every tensor-parallel rank; it begins at zero."""

    def __init__(self, config):
        device = torch.cuda.current_device()
        super().__init__(
            config.hidden_size, 1, bias=False, dtype=config.params_dtype, device=device
        )
        nn.init.zeros_(self.weight)


class Attention(SelfAttention):
    """Has a bias on its output matrix or not, whatever the MLPs have."""

    def __init__(self, config: TransformerConfig, *args, output_bias: bool, **others):
        config = copy.copy(config)
        config.add_bias_linear = output_bias
        super().__init__(config, *args, **others)


def check(hf_config, path: str, kind: str) -> None:
    """Raise InputError for a model that Megatron would compute differently. kind: engine.bridge"""
    families = FAMILIES if kind == "own" else WITH_MBRIDGE
    if hf_config.model_type not in families:
        raise InputError(
            f"model.path={path}: model_engine=megatron with engine.bridge={kind} has no {hf_config.model_type} "
            f"models, only {', '.join(families)}: give model_engine=fsdp"
        )
    rope = hf_config.rope_parameters
    if rope.get("rope_type", "default") not in ROPES:
        raise InputError(
            f"model.path={path}: model_engine=megatron has no rope type {rope['rope_type']!r}, only "
            f"{', '.join(ROPES)}"
        )
    if rope.get("partial_rotary_factor") not in (1, None):
        raise InputError(
            f"model.path={path}: partial_rotary_factor={rope['partial_rotary_factor']} in config.json is not "
            "supported by model_engine=megatron"
        )
    if (
        getattr(hf_config, "num_experts", 0)
        and hf_config.num_experts_per_tok == 1
        and getattr(hf_config, "norm_topk_prob", True)
    ):
        raise InputError(
            f"model.path={path}: one expert per token (num_experts_per_tok) of weight 1 (norm_topk_prob) in "
            "config.json is not supported by model_engine=megatron, whose router would get no gradient"
        )
    if getattr(hf_config, "sliding_window", None) == 0:
        raise InputError(
            f"model.path={path}: sliding_window=0 in config.json leaves nothing to attend to: null is no window"
        )
    check_windows(hf_config, path)
    biases = {} if kind == "own" else {"mlp_bias": False, "attention_bias": False}
    for name, supported in {**SUPPORTED, **biases}.items():
        value = getattr(hf_config, name, None)
        if value not in (supported, None):
            raise InputError(
                f"model.path={path}: {name}={value} in config.json is not supported by model_engine=megatron"
                + (" with engine.bridge=mbridge" if name in biases else "")
            )


def make_mapping(kind: str, hf_config, dtype: torch.dtype, head: Head):
    """kind: engine.bridge"""
    if kind == "own":
        return Mapping(hf_config, head)
    # The package is slow to import, and may be absent.
    from engines.megatron.mbridge import MBridge

    return MBridge(hf_config, dtype, head)


def make_config(
    hf: nn.Module, dtype: torch.dtype, num_mtp_layers: int, **settings
) -> TransformerConfig:
    """For a model (hf: on the meta device) on the layout that parallel_state has now; settings: other fields."""
    shape, has = (
        hf.config,
        {name.removeprefix("model.layers.0.") for name, _ in hf.named_parameters()},
    )
    pp, vpp = (
        mpu.get_pipeline_model_parallel_world_size(),
        mpu.get_virtual_pipeline_model_parallel_world_size(),
    )
    sizes = {
        "tensor_model": mpu.get_tensor_model_parallel_world_size(),
        "pipeline_model": pp,
        "virtual_pipeline_model": vpp,
        "context": mpu.get_context_parallel_world_size(),
        "expert_model": mpu.get_expert_model_parallel_world_size(),
    }
    settings |= {f"{name}_parallel_size": size for name, size in sizes.items()}
    if pp > 1:
        stages = [
            ["decoder"] * number
            for number in stages_of_layers(shape.num_hidden_layers, pp * (vpp or 1))
        ]
        settings["pipeline_model_parallel_layout"] = [
            ["embedding", *stages[0]],
            *stages[1:-1],
            [*stages[-1], *["mtp"] * num_mtp_layers, "loss"],
        ]
    if num_experts := getattr(shape, "num_experts", None):
        settings |= dict(
            num_moe_experts=num_experts,
            moe_router_topk=shape.num_experts_per_tok,
            moe_grouped_gemm=False,
            moe_ffn_hidden_size=getattr(shape, "moe_intermediate_size", shape.intermediate_size),
            expert_tensor_parallel_size=1,
            moe_router_load_balancing_type="none",
            moe_router_pre_softmax=not getattr(shape, "norm_topk_prob", True),
        )
    if windows := windows_of_layers(shape):
        settings |= dict(window_size=(shape.sliding_window - 1, 0), window_attn_skip_freq=windows)
    if num_mtp_layers:
        settings["mtp_num_layers"] = (
            num_mtp_layers  # by which Megatron keeps copies of the embedding alike
        )
    # Weights come from files. Without initialization, parameters would also lack the marks of how they are divided over ranks.
    keep = {
        f"{name}init_method": lambda weight: weight for name in ("", "output_layer_", "embedding_")
    }
    return TransformerConfig(
        num_layers=shape.num_hidden_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_key_value_heads,
        kv_channels=head_dim(shape),
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        activation_func=F.silu,
        gated_linear_unit=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear="mlp.down_proj.bias" in has,
        add_qkv_bias="self_attn.q_proj.bias" in has,
        qk_layernorm="self_attn.q_norm.weight" in has,
        moe_token_dispatcher_type="alltoall",  # the others want sequences of one length
        # Rotation scales queries and keys, both by the same factor.
        softmax_scale=None
        if rope(shape)[1] == 1
        else rope(shape)[1] ** 2 * head_dim(shape) ** -0.5,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        variable_seq_lengths=True,
        overlap_p2p_comm=vpp is not None,
        batch_p2p_comm=False,
        **keep,
        **settings,
    )


def windows_of_layers(hf_config) -> list[int] | None:
    """1 for each layer whose attention has a sliding window, else 0; None for a model without."""
    if hf_config.model_type == "llama" or not getattr(hf_config, "sliding_window", None):
        return None
    if hf_config.model_type in ("mimo", "qwen2", "qwen3"):
        return [int(kind == "sliding_attention") for kind in hf_config.layer_types]
    return [1] * hf_config.num_hidden_layers


def rope(hf_config, device: torch.device | None = None) -> tuple[Tensor | None, float]:
    """Inverse frequencies [dim / 2] (None: the default ones) and by what rotated queries and keys are multiplied."""
    kind = hf_config.rope_parameters.get("rope_type", "default")
    return (None, 1.0) if kind == "default" else ROPE_INIT_FUNCTIONS[kind](hf_config, device)


def build(
    mapping: Mapping,
    hf: nn.Module,
    path: Path,
    head: Head,
    dtype: torch.dtype,
    num_mtp_layers: int = 0,
    detached: bool = False,
    **settings,
) -> list[HiddenStates]:
    """This rank's part of the model with its weights, one module for each virtual pipeline stage. A critic has a value
    head, read from the files if they have one of that shape. hf: the model on the meta device; settings: see make_config."""
    config, hf_config = make_config(hf, dtype, num_mtp_layers, **settings), mapping.hf_config
    num_stages, output_bias = (
        config.virtual_pipeline_model_parallel_size,
        hf.get_submodule("model.layers.0.self_attn.o_proj").bias,
    )
    multiple, base = config.tensor_model_parallel_size, hf_config.rope_parameters["rope_theta"]
    models = []
    for stage in range(num_stages or 1):
        stage = stage if num_stages else None
        layers = gpt_layer_specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=True, vp_stage=stage
        )
        for layer in layers.layer_specs:
            attention = layer.submodules.self_attention
            attention.module = Attention
            attention.params = {**attention.params, "output_bias": output_bias is not None}
            if config.num_moe_experts:
                layer.submodules.mlp = MixtureOfExperts
        post_process = mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        ahead = (
            mtp.block_of(layers.layer_specs[-1], num_mtp_layers)
            if num_mtp_layers and post_process
            else None
        )
        models.append(
            HiddenStates(
                detached,
                config=config,
                transformer_layer_spec=layers,
                mtp_block_spec=ahead,
                vp_stage=stage,
                position_embedding_type="rope",
                rotary_base=base,
                vocab_size=-(-hf_config.vocab_size // multiple) * multiple,
                max_sequence_length=hf_config.max_position_embeddings,
                pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=post_process,
                share_embeddings_and_output_weights=hf_config.tie_word_embeddings
                and head is not Head.VALUES,
            )
        )
    for model in models:
        if not gpt_layer_specs.HAVE_TE:
            model.rotary_pos_emb = PackedRotaryEmbedding(config.kv_channels, 1.0, rotary_base=base)
        frequencies, _ = rope(hf_config, model.rotary_pos_emb.inv_freq.device)
        if frequencies is not None:
            model.rotary_pos_emb.inv_freq = frequencies
        if head is Head.VALUES and model.post_process:
            model.output_layer = nn.Identity()  # so that nobody looks for its weight in the files
        mark_division(model)
    mapping.load(models, path)
    for model in models:
        if head is Head.VALUES and model.post_process:
            model.output_layer = ValueMatrix(config)
            load_value_head(model.output_layer, path)
            mark_division(model.output_layer)
    return models


def check_files(hf: nn.Module, path: Path, head: Head) -> None:
    """weights.check_files with each expert's matrices by themselves, as files hold them."""
    weights.check_files(hf, path, head, Mapping(hf.config, head).in_files(hf))


def mark_division(module: nn.Module) -> None:
    for parameter in module.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)


def load_value_head(head: ValueMatrix, path: Path) -> None:
    name, shape = "lm_head.weight", list(head.weight.shape)
    for file in weights.weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            if name in tensors.keys() and tensors.get_slice(name).get_shape() == shape:
                head.weight.data.copy_(tensors.get_tensor(name))


def export_tensors(
    mapping: Mapping, tensors: Iterator[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) from a checkpoint's names and full tensors, in which all layers are stacked, but for names with a
    layer's number."""
    layers = "decoder.layers."
    for name, tensor in tensors:
        if name.startswith(layers) and not name.removeprefix(layers)[0].isdigit():
            for i, layer in enumerate(tensor):
                yield from mapping.separate(name.replace(layers, f"{layers}{i}."), [layer])
        else:
            yield from mapping.separate(name, [tensor])


def projections(mapping: Mapping, model: nn.Module) -> Iterator[tuple[Adaptable, list[str]]]:
    """Each linear layer, with the Hugging Face names of the modules that it is of, in the order of its rows."""
    names = {p: name for name, p in global_parameters(model)}
    for module in model.modules():
        if isinstance(module, Adaptable):
            yield (
                module,
                [name.removesuffix(".weight") for name in mapping.names(names[module.weight])],
            )


def export(
    mapping: Mapping,
    models: list[nn.Module],
    dtype: torch.dtype,
    device: torch.device,
    value_of: Callable[[nn.Parameter], Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor), in the same order on all ranks. A tied output matrix, which the last pipeline
    stage has a copy of, is left out, and so are adapters. value_of: what stands for a parameter."""
    tp, ep = mpu.get_tensor_model_parallel_group(), mpu.get_expert_model_parallel_group()
    parameters, seen = dict(x for model in models for x in global_parameters(model)), set()
    for name, weight, is_divided, dim in on_all_stages(parameters, dtype, device, value_of):
        if ".experts." in name:
            parts = gather(weight, ep)
        else:
            parts = gather(weight, tp) if is_divided else [weight]
        for hf_name, tensor in mapping.separate(name, parts, dim):
            if hf_name not in seen:
                seen.add(hf_name)
                yield hf_name, tensor


def on_all_stages(
    parameters: dict[str, nn.Parameter],
    dtype: torch.dtype,
    device: torch.device,
    value_of: Callable[[nn.Parameter], Tensor] = nn.Parameter.detach,
) -> Iterator[tuple[str, Tensor, bool, int]]:
    """(name, value, whether tensor-parallel ranks divide it, by which dimension) of every pipeline stage's parameters, in the
    same order on all ranks."""
    stages = mpu.get_pipeline_model_parallel_group()
    listed = [None] * stages.size()
    dist.all_gather_object(
        listed,
        [
            (name, p.shape, p.tensor_model_parallel, p.partition_dim)
            for name, p in parameters.items()
        ],
        stages,
    )
    for stage, name, shape, *division in (
        (stage, *entry) for stage, entries in enumerate(listed) for entry in entries
    ):
        mine = stage == stages.rank()
        value = (
            value_of(parameters[name]).to(dtype)
            if mine
            else torch.empty(shape, dtype=dtype, device=device)
        )
        if stages.size() > 1:
            dist.broadcast(value, group=stages, group_src=stage)
        yield name, value, *division


def gather(tensor: Tensor, group) -> list[Tensor]:
    if group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts

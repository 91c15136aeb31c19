"""Hugging Face models as Megatron models, through mbridge: build, load, export. No other file knows mbridge.

mbridge 0.15.1 was written for transformers 4; what goes wrong with transformers 5 is corrected here. (Its successor
Megatron-Bridge needs transformers < 5 and TransformerEngine.)
"""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from mbridge.core.bridge import _MODEL_REGISTRY, Bridge
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from safetensors import safe_open
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from config import InputError
from engines import weights
from engines.megatron.experts import MixtureOfExperts
from engines.megatron.layers import Adaptable, PackedRotaryEmbedding, install

install()

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
# What transformers computes from the configuration alone; other types change with the length of a sequence.
ROPES = ("default", "llama3", "linear")
# Of config.json; mbridge gives every layer experts.
SUPPORTED = {"hidden_act": "silu", "use_sliding_window": False, "attention_dropout": 0.0, "mlp_only_layers": [],
             "decoder_sparse_step": 1}


class HiddenStates(GPTModel):
    """The model up to its last norm: its output matrix only holds the weight. Returns [s, b, h], on every stage; s is
    this rank's share with sequence or context parallelism."""

    def _preprocess(self, *, padding_mask: Tensor, **others) -> tuple:
        """Megatron's own divides the padding mask over tensor-parallel ranks on the first pipeline stage only."""
        results = super()._preprocess(**others)
        if self.config.sequence_parallel:
            group = mpu.get_tensor_model_parallel_group()
            padding_mask = padding_mask.chunk(group.size(), dim=1)[group.rank()]
        return *results[:5], padding_mask, *results[6:]

    def _postprocess(self, hidden_states: Tensor, **_) -> Tensor:
        return hidden_states


class ValueMatrix(nn.Linear):
    """An output matrix of one row, whole on every tensor-parallel rank; it begins at zero."""

    def __init__(self, config):
        device = torch.cuda.current_device()
        super().__init__(config.hidden_size, 1, bias=False, dtype=config.params_dtype, device=device)
        nn.init.zeros_(self.weight)


def check(hf_config, path: str) -> None:
    """Raise InputError for a model that Megatron would compute differently."""
    if hf_config.model_type not in FAMILIES:
        raise InputError(f"model.path={path}: model_engine=megatron has no {hf_config.model_type} models, only "
                         f"{', '.join(FAMILIES)}")
    rope = hf_config.rope_parameters.get("rope_type", "default")
    if rope not in ROPES:
        raise InputError(f"model.path={path}: model_engine=megatron has no rope type {rope!r}, only {', '.join(ROPES)}")
    if hf_config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError(f"model.path={path}: partial_rotary_factor in config.json is not supported by model_engine=megatron")
    biases = {"mlp_bias": False, "attention_bias": False} if hf_config.model_type != "qwen2" else {}
    for name, supported in {**SUPPORTED, **biases}.items():
        value = getattr(hf_config, name, None)
        if value not in (supported, None):
            raise InputError(f"model.path={path}: {name}={value} in config.json is not supported by model_engine=megatron")


def check_files(hf: nn.Module, path: Path, critic: bool) -> None:
    """weights.check_files with each expert's matrices by themselves, as files hold them."""
    parameters = [x for name, p in hf.named_parameters()
                  for x in (single_experts(name, p) if ".experts." in name else [(name, p)])]
    weights.check_files(hf, path, critic, parameters)


def make_bridge(hf_config, dtype: torch.dtype, **settings) -> Bridge:
    """The bridge for a model on the layout that parallel_state has now; settings: fields of TransformerConfig."""
    hf_config = copy.deepcopy(hf_config)
    hf_config.rope_theta = hf_config.rope_parameters["rope_theta"]
    family = _MODEL_REGISTRY[hf_config.model_type]
    # A copy: for a tied model mbridge writes into the dictionary of its class, which all later models share.
    direct = dict(family._DIRECT_MAPPING)
    if hf_config.tie_word_embeddings:
        direct["output_layer.weight"] = direct["embedding.word_embeddings.weight"]

    # LLaMABridge would treat Llama 3.1's rope as a linear interpolation.
    def gpt_arguments(self) -> dict:
        return dict(vocab_size=hf_config.vocab_size, max_sequence_length=hf_config.max_position_embeddings,
                    position_embedding_type="rope", rotary_base=hf_config.rope_theta)

    def to_hf_format(self, name: str, weight: Tensor) -> tuple[list[str], list[Tensor]]:
        if name == "output_layer.weight" and len(weight) == 1:                 # a value head: no vocabulary, no padding
            return ["lm_head.weight"], [weight]
        if ".experts." in name:
            return tuple(zip(*single_experts(name, weight)))
        return family._weight_to_hf_format(self, name, weight)

    # mbridge has one parameter per expert, experts.py one for all experts of a rank.
    def global_names(self, model: nn.Module, consider_ep: bool = True) -> dict[str, str]:
        return family._weight_name_mapping_mcore_local_to_global(self, model, consider_ep=False)

    def names_in_layer(self, name: str) -> list[str]:
        if ".experts." not in name:
            return family._weight_name_mapping_mlp(self, name)
        number = self.config.num_moe_experts // self.mpu.ep_size
        shapeless = torch.empty(number, 2, device="meta")
        return [name for name, _ in single_experts(name, shapeless, number * self.mpu.ep_rank)]

    def to_mcore_format(self, name: str, weights: list[Tensor]) -> Tensor:
        if ".experts." not in name:
            return family._weight_to_mcore_format(self, name, weights)
        number = self.config.num_moe_experts // self.mpu.ep_size
        return torch.cat(weights).to(self.dtype).unflatten(0, (number, -1))

    cls = type(family.__name__, (family,), {
        "_DIRECT_MAPPING": direct, "_get_gptmodel_args": gpt_arguments, "_weight_to_hf_format": to_hf_format,
        "_weight_name_mapping_mcore_local_to_global": global_names, "_weight_name_mapping_mlp": names_in_layer,
        "_weight_to_mcore_format": to_mcore_format})
    if hf_config.model_type == "qwen3_moe":
        settings |= dict(moe_grouped_gemm=False, moe_router_pre_softmax=not hf_config.norm_topk_prob)
    bridge = cls(hf_config, dtype=dtype, make_vocab_size_divisible_by=mpu.get_tensor_model_parallel_world_size())
    # Weights come from files. Without initialization, parameters would also lack the marks of how they are divided over ranks.
    keep = {f"{name}init_method": lambda weight: weight for name in ("", "output_layer_", "embedding_")}
    bridge.set_extra_args(**keep, **settings)
    return bridge


def build(bridge: Bridge, path: Path, critic: bool) -> list[HiddenStates]:
    """This rank's part of the model with its weights, one module for each virtual pipeline stage. A critic has a value
    head, read from the files if they have one of that shape."""
    hf_config, config = bridge.hf_config, bridge.config
    num_stages, arguments = config.virtual_pipeline_model_parallel_size, bridge._get_gptmodel_args()
    multiple = bridge.make_vocab_size_divisible_by
    bridge.vocab_size = hf_config.vocab_size
    bridge.padded_vocab_size = arguments["vocab_size"] = -(-hf_config.vocab_size // multiple) * multiple
    models = []
    for stage in range(num_stages or 1):
        stage = stage if num_stages else None
        layers = bridge._get_transformer_layer_spec(stage)
        if config.num_moe_experts:
            for layer in layers.layer_specs:
                layer.submodules.mlp = MixtureOfExperts
        models.append(HiddenStates(
            config=config, transformer_layer_spec=layers, vp_stage=stage,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=hf_config.tie_word_embeddings and not critic, **arguments))
    for model in models:
        if not gpt_layer_specs.HAVE_TE:
            model.rotary_pos_emb = PackedRotaryEmbedding(config.kv_channels, 1.0,
                                                                       rotary_base=hf_config.rope_theta)
        if hf_config.rope_parameters.get("rope_type", "default") != "default":
            make_frequencies = ROPE_INIT_FUNCTIONS[hf_config.rope_parameters["rope_type"]]
            model.rotary_pos_emb.inv_freq = make_frequencies(hf_config, model.rotary_pos_emb.inv_freq.device)[0]
        if critic and model.post_process:
            model.output_layer = nn.Identity()                       # so that nobody looks for its weight in the files
    bridge.load_weights(models, str(path))
    for model in models:
        if critic and model.post_process:
            model.output_layer = ValueMatrix(config)
            load_value_head(model.output_layer, path)
        for parameter in model.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return models


def load_value_head(head: ValueMatrix, path: Path) -> None:
    name, shape = "lm_head.weight", list(head.weight.shape)
    for file in weights.weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            if name in tensors.keys() and tensors.get_slice(name).get_shape() == shape:
                head.weight.data.copy_(tensors.get_tensor(name))


def export_tensors(bridge: Bridge, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) from a checkpoint's names and full tensors, in which all layers are stacked."""
    layers, bridge.vocab_size = "decoder.layers.", bridge.hf_config.vocab_size
    for name, tensor in tensors:
        if name.startswith(layers):
            for i, layer in enumerate(tensor):
                yield from zip(*bridge._weight_to_hf_format(name.replace(layers, f"{layers}{i}."), layer))
        else:
            bridge.padded_vocab_size = len(tensor)
            yield from zip(*bridge._weight_to_hf_format(name, tensor))


def projections(bridge: Bridge, model: nn.Module) -> Iterator[tuple[Adaptable, list[str]]]:
    """Each linear layer, with the Hugging Face names of the modules that it is of, in the order of its rows."""
    names = bridge._weight_name_mapping_mcore_local_to_global(model)
    for name, module in model.named_modules():
        if isinstance(module, Adaptable):
            found = bridge._weight_name_mapping_mcore_to_hf(names[f"{name}.weight"])
            yield module, [hf_name.removesuffix(".weight") for hf_name in found]


def export(bridge: Bridge, models: list[nn.Module], device: torch.device,
           value_of: Callable[[nn.Parameter], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor), in the same order on all ranks. A tied output matrix, which the last pipeline
    stage has a copy of, is left out, and so are adapters. value_of: what stands for a parameter."""
    tp, ep = mpu.get_tensor_model_parallel_group(), mpu.get_expert_model_parallel_group()
    parameters, seen = {}, set()
    for model in models:
        names = bridge._weight_name_mapping_mcore_local_to_global(model)
        parameters |= {names[name]: p for name, p in model.named_parameters() if ".adapter." not in name}
    for name, weight, *division in on_all_stages(parameters, bridge.dtype, device, value_of):
        if ".experts." in name:
            parts = gather(weight, ep)
            found = [x for i, part in enumerate(parts) for x in single_experts(name, part, i * len(part))]
        else:
            weight.tensor_model_parallel, weight.partition_dim = division
            if weight.tensor_model_parallel:
                weight = bridge._weight_merge_across_tp(name, gather(weight, tp), weight)
            found = zip(*bridge._weight_to_hf_format(name, weight))
        for hf_name, tensor in found:
            if hf_name not in seen:
                seen.add(hf_name)
                yield hf_name, tensor


def on_all_stages(parameters: dict[str, nn.Parameter], dtype: torch.dtype, device: torch.device,
                  value_of: Callable[[nn.Parameter], Tensor] = nn.Parameter.detach) -> Iterator[tuple[str, Tensor, bool, int]]:
    """(name, value, whether tensor-parallel ranks divide it, by which dimension) of every pipeline stage's parameters, in the
    same order on all ranks."""
    stages = mpu.get_pipeline_model_parallel_group()
    listed = [None] * stages.size()
    dist.all_gather_object(listed, [(name, p.shape, p.tensor_model_parallel, p.partition_dim)
                                    for name, p in parameters.items()], stages)
    for stage, name, shape, *division in ((stage, *entry) for stage, entries in enumerate(listed) for entry in entries):
        mine = stage == stages.rank()
        value = value_of(parameters[name]).to(dtype) if mine else torch.empty(shape, dtype=dtype, device=device)
        if stages.size() > 1:
            dist.broadcast(value, group=stages, group_src=stage)
        yield name, value, *division


def gather(tensor: Tensor, group) -> list[Tensor]:
    if group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def single_experts(name: str, stacked: Tensor, first: int = 0) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) of each expert of a layer, from Megatron's or transformers' tensor of several experts."""
    layer = name.split(".layers.")[1].split(".", 1)[0]
    for i, expert in enumerate(stacked, first):
        prefix = f"model.layers.{layer}.mlp.experts.{i}."
        if name.endswith(("linear_fc1", "gate_up_proj")):
            gate, up = expert.chunk(2)
            yield from ((f"{prefix}gate_proj.weight", gate), (f"{prefix}up_proj.weight", up))
        else:
            yield f"{prefix}down_proj.weight", expert

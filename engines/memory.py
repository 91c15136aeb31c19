"""Estimate of the memory that one rank takes, from shapes alone, and what vLLM does with its share."""

import math
import re
from collections import defaultdict
from collections.abc import Callable

import torch
from omegaconf import DictConfig
from torch import nn

from data.images.processor import Reader
from engines.context_parallel import fixed_cp_size, has_dynamic_cp
from engines.fsdp import vision as images
from engines.fsdp.attention import gathers_keys
from engines.fsdp.sharding import is_replicated, is_sharded
from engines.fsdp.transforms import build_model, uses_compile
from engines.heads import Head
from engines.model import freeze, mtp
from engines.model.experts import expert_weights, experts_per_token
from engines.model.hf import build_on_meta, read_hf_config, whole_modules
from engines.model.lengths import longest_sequence
from engines.model.lora import inject
from engines.model.shape import attention_widths, head_dim, stages_of_layers
from engines.optimizer import OPTIMIZERS

GIB = 2**30
EMBEDDING, NORM, HEAD = (
    "model.embed_tokens.weight",
    "model.norm.weight",
    "lm_head.weight",
)  # of all models with Megatron
CPU_KV_CACHE_GIB = 1.0
MAX_NUM_SEQS, LOGIT_COPIES = (
    1024,
    3,
)  # LOGIT_COPIES: what sampling holds at once of a response's logits, in fp32


def head_of(role: str) -> Head:
    return Head.VALUES if role == "critic" else Head.LOG_PROBS


def estimates(
    config: DictConfig, world_size: int, device_type: str, role: str = "actor"
) -> list[dict[str, float]]:
    """GiB of an engine of the run, by purpose, for each pipeline stage; FSDP has one. role: actor, critic or reference."""
    stages = (
        estimate_megatron(config, world_size, device_type, role)
        if config.model_engine == "megatron"
        else [estimate(config, world_size, device_type, role)]
    )
    offload = config.get("offload", {}) if device_type != "cpu" else {}
    waiting = [
        part
        for part in ("parameters", "optimizer")
        if offload.get("reference" if role == "reference" else part)
    ]
    for i, sizes in enumerate(stages):
        if role == "reference":
            sizes = {
                name: size
                for name, size in sizes.items()
                if "gradient" not in name and "optimizer" not in name
            }
        here = {
            name.split(",")[0]: size for name, size in sizes.items() if not name.endswith("host")
        }
        sizes |= {"device total": sum(here.values())}
        if waiting:
            sizes |= {"waits in pinned host memory": sum(here.get(part, 0) for part in waiting)}
        stages[i] = {name: size / GIB for name, size in sizes.items()}
    return stages


def checkpoint_bytes(config: DictConfig, role: str = "actor") -> int:
    """What a checkpoint holds of one engine: its weights and Adam's state, without what formats add."""
    engine, head = config.engine, head_of(role)
    if config.model_engine == "megatron":
        hf, lora = (
            build_on_meta(
                read_hf_config(config.model.path),
                torch.float32,
                head,
                with_mtp=mtp.is_trained(config),
            ),
            config.model.lora,
        )
        if lora.rank:
            inject(hf, lora, head)
        freeze.apply(config, hf, head)
        dtype = getattr(torch, lora.dtype if lora.rank else engine.compute_dtype)
        # Weights, moments, and masters of such as are not fp32; of adapters' model nothing.
        trained, frozen = 12 if dtype is torch.float32 else 14, 0 if lora.rank else dtype.itemsize
        return sum(p.numel() * (trained if p.requires_grad else frozen) for p in hf.parameters())
    hf, adapted = build_model(config, head)
    trained = [p for p in hf.parameters() if p.requires_grad]
    return sum(x.nbytes for x in (trained if adapted else hf.state_dict().values())) + 2 * sum(
        p.nbytes for p in trained
    )


def estimate(
    config: DictConfig, world_size: int, device_type: str, role: str = "actor"
) -> dict[str, float]:
    """Bytes of one rank of the FSDP engine, by purpose, when the last of several full micro-batches begins its backward pass;
    for a reference, which has none, in its forward pass.

    A micro-batch is data.max_tokens_per_micro_batch tokens. Activations are counted for a Llama-like layer: residual and
    normalised inputs, q, k, v and the attention's output, gate, up and their product (of each expert that a token goes to, with
    its copy of the token and its answer); without torch.compile also the fp32 copies inside both norms and the activation of the
    gate. Less is kept of layers that no gradient passes, since they and all before them are frozen. Of what images go through it is
    counted as if all tokens of a micro-batch stood for images.
    """
    engine, shape = config.engine, read_hf_config(config.model.path).get_text_config()
    hf, _ = build_model(config, head_of(role))
    num_outputs = 0 if head_of(role) is Head.VALUES else shape.vocab_size
    layers = whole_modules(hf, hf)  # none where transformers does not say what they are
    num_layers = len(whole_modules(hf, hf.get_decoder())) or shape.num_hidden_layers
    whole, replicated = list(hf.parameters()), is_replicated(config, world_size)
    trained = [p for p in whole if p.requires_grad]
    in_matrices = sum(
        p.numel() for layer in layers for p in layer.parameters() if p.ndim == 2 and p.requires_grad
    )
    ranks = engine.fsdp_size if engine.fsdp_size > 0 else world_size
    compute, reduce = (getattr(torch, engine[f"{k}_dtype"]).itemsize for k in ("compute", "reduce"))
    gradients = sum(p.nbytes for p in trained) / ranks
    frozen = sum(p.nbytes for p in whole if not p.requires_grad) / (1 if replicated else ranks)

    gathered = unreduced = 0
    if is_sharded(config, world_size):
        # The root's matrices and two layers (one computes while the next is gathered), or every layer under ZeRO-2;
        # gradients of the root and of one layer before they are reduced, and the copy that is reduced.
        root, in_layer = root_and_layer(trained if replicated else whole, layers)
        gathered = (
            root + (2 if engine.reshard_after_forward else len(layers)) * in_layer
        ) * compute
        unreduced = sum(root_and_layer(trained, layers)) * (compute + reduce)

    tokens = config.data.max_tokens_per_micro_batch / fixed_cp_size(engine)
    hidden, intermediate, at_once = shape.hidden_size, shape.intermediate_size, 0
    if expert_weights(hf):
        at_once = experts_per_token(shape)
        intermediate = at_once * (getattr(shape, "moe_intermediate_size", None) or intermediate)
    q, kv = attention_widths(shape)
    num_keys = keys_per_token(
        config, shape, world_size, lambda size: gathers_keys(engine, shape, size)
    )
    in_one_layer = (
        4 * hidden + 3 * q + (1 + 2 * num_keys) * kv + 3 * intermediate + 2 * at_once * hidden
    ) * compute
    compiled = uses_compile(engine, device_type)
    if not compiled:
        in_one_layer += 2 * hidden * (4 + 4) + intermediate * compute
    kept = (
        hidden * compute * num_layers + in_one_layer
        if engine.activation_checkpointing
        else in_one_layer * num_layers
    )
    in_tower = (
        images.count_kept(
            hf,
            Reader(config.model.path, dropped=config.data.drop_processor_keys),
            compute,
            engine.activation_checkpointing,
        )
        if config.model.images
        else 0
    )
    if role == "reference":
        kept, in_tower = in_one_layer, 0
    logits = (
        min(tokens, engine.log_prob_chunk_size)
        * num_outputs
        * (2 * compute + (0 if compiled else 8))
    )
    where = ", host" if engine.cpu_offload else ""
    # Adam keeps two moments, Muon one; what a user's optimizer keeps cannot be known.
    moments = (
        2 - in_matrices / sum(p.numel() for p in trained) if config.optim.name == "muon" else 2
    )
    optimizer = "optimizer" if config.optim.name in OPTIMIZERS else "optimizer, if like Adam"
    return {
        f"parameters{where}": frozen + gradients,
        f"gradients{where}": gradients,
        f"{optimizer}{where}": moments * gradients,
        "gathered weights": gathered,
        "unreduced gradients": unreduced,
        "activations": tokens * kept,
        **({"activations of images": tokens * in_tower} if config.model.images else {}),
        "logits of a chunk": logits,
        "gradient of the output matrix": num_outputs
        * hidden
        * 4
        * hf.get_output_embeddings().weight.requires_grad,
    }


def keys_per_token(
    config: DictConfig, shape, num_ranks: int, gathers: Callable[[int], bool]
) -> float:
    """How many tokens' keys and values a rank keeps for each token of its own. In a group that gathers them: those of all its
    ranks, and half a token's more, since both of a rank's chunks keep the first ones. In another: more than one where heads are
    repeated."""
    size = fixed_cp_size(config.engine)
    if has_dynamic_cp(config.engine):  # as many as the longest sequence needs
        needed = math.ceil(longest_sequence(config)[0] / config.data.max_tokens_per_micro_batch)
        size = 1 << min((needed - 1).bit_length(), num_ranks.bit_length() - 1)
    if size > 1 and gathers(size):
        return size + 0.5
    return max(1, size * head_dim(shape) / attention_widths(shape)[1])


def root_and_layer(parameters: list[nn.Parameter], layers: list[nn.Module]) -> tuple[int, int]:
    """How many numbers of these parameters are in no decoder layer, and how many in the layer with most of them."""
    mine = {id(p) for p in parameters}
    in_layers = [sum(p.numel() for p in layer.parameters() if id(p) in mine) for layer in layers]
    return sum(p.numel() for p in parameters) - sum(in_layers), max(in_layers, default=0)


def estimate_megatron(
    config: DictConfig, world_size: int, device_type: str, role: str = "actor"
) -> list[dict[str, float]]:
    """Bytes of one rank of the Megatron engine, by purpose, for every pipeline stage at its fullest moment.

    Parameters, gradients and optimizer are exact, but for the padding of buffers and for pieces of unequal size (these are
    means over the ranks that share them). Activations as in estimate(), of as many micro-batches as wait for their backward
    pass on that stage; every expert gets as many tokens as the others.
    """
    engine, shape = config.engine, read_hf_config(config.model.path)
    tp, pp, vpp = (
        engine[f"{name}_parallel_size"]
        for name in ("tensor_model", "pipeline_model", "virtual_pipeline_model")
    )
    head, with_mtp, ep = (
        head_of(role),
        mtp.is_trained(config),
        engine.expert_model_parallel_size,
    )
    hf, num_layers = (
        build_on_meta(shape, torch.float32, head, with_mtp=with_mtp),
        shape.num_hidden_layers,
    )
    rank, compute = config.model.lora.rank, getattr(torch, engine.compute_dtype).itemsize
    trained = (
        getattr(torch, config.model.lora.dtype).itemsize if rank else compute
    )  # bytes of each weight that is trained
    gradient = 4 if engine.override_ddp_config.get("grad_reduce_in_fp32", True) else trained
    state = 8 if trained == 4 else 12  # Adam's moments, and fp32 masters of weights that are not
    if rank:
        inject(hf, config.model.lora, head)
    freeze.apply(config, hf, head)
    sizes = defaultdict(int)  # of one rank's part: (number of a layer or name, kind) -> numbers
    for name, p in hf.named_parameters():
        is_row, layer = (
            ".o_proj." in name or ".down_proj." in name,
            re.search(r"\.layers\.(\d+)\.", name),
        )
        kind = "frozen" if not p.requires_grad else "experts" if ".experts." in name else "learned"
        # Norms, biases of row-parallel layers, routers.
        whole = (
            p.ndim == 1
            and (is_row or not name.endswith(".bias"))
            or name.endswith((".mlp.gate.weight", ".input_proj.weight"))
        )
        if ".lora_" in name:  # of a row-parallel layer A is divided, of the others B
            number = p.numel() // (tp if is_row is (".lora_A." in name) else 1)
        elif name in (EMBEDDING, HEAD):
            number = -(-len(p) // tp) * shape.hidden_size
        else:
            number = p.numel() // (ep if ".experts." in name else 1 if whole else tp)
        sizes[int(layer[1]) if layer else "mtp" if ".mtp_layers." in name else name, kind] += number
    output = EMBEDDING if shape.tie_word_embeddings and head is not Head.VALUES else HEAD
    num_outputs = 0 if head is Head.VALUES else -(-shape.vocab_size // tp)

    hidden, intermediate, topk = shape.hidden_size, shape.intermediate_size, experts_per_token(shape)
    q, kv = attention_widths(shape)
    tokens = config.data.max_tokens_per_micro_batch / fixed_cp_size(engine)
    sp = tp if engine.sequence_parallel else 1
    in_expert = getattr(shape, "moe_intermediate_size", intermediate)
    in_mlp = topk * (2 * hidden + 4 * in_expert) / sp if topk else 3 * intermediate / tp
    num_keys = keys_per_token(config, shape, world_size // (tp * pp), lambda size: True)
    in_layer = (
        tokens * compute * (4 * hidden / sp + (3 * q + (1 + 2 * num_keys) * kv) / tp + in_mlp)
    )
    stages, chunks = [], torch.arange(num_layers).split(stages_of_layers(num_layers, pp * vpp))
    for stage in range(pp):
        last, held = stage == pp - 1, {*torch.cat(chunks[stage::pp]).tolist()}
        here = len(held)
        held |= ({EMBEDDING} if stage == 0 else set()) | ({NORM, output} if last else set())
        if last and with_mtp:  # with a copy of the embedding
            held |= {"mtp", EMBEDDING}
        frozen, learned, experts = (
            sum(sizes[each, kind] for each in held) for kind in ("frozen", "learned", "experts")
        )
        waiting = pp - stage if vpp == 1 else 2 * (pp - stage - 1) + (vpp - 1) * pp + 1
        layers = waiting * here // vpp
        kept = (
            layers * tokens * compute * hidden / sp + in_layer
            if engine.recompute == "full"
            else layers * in_layer
        )
        kept += last * with_mtp * mtp.num_layers(shape) * in_layer
        if role == "reference":
            kept = in_layer
        shares = (
            (world_size // (pp * tp), world_size // (pp * ep))
            if engine.use_distributed_optimizer
            else (1, 1)
        )
        logits = (
            min(tokens, engine.log_prob_chunk_size)
            * num_outputs
            * (2 * compute + (0 if device_type == "cuda" else 8))
        )
        stages.append(
            {
                "parameters": frozen * compute + (learned + experts) * trained,
                "gradients": (learned + experts) * gradient,
                "optimizer": state * (learned / shares[0] + experts / shares[1]),
                "activations": kept + last * tokens * hidden * compute,
                "logits of a chunk": last * logits,
                "gradient of the output matrix": last
                * num_outputs
                * hidden
                * 4
                * (not sizes[output, "frozen"]),
            }
        )
    return stages


def max_num_seqs(config: DictConfig, world_size: int, device_bytes: int) -> int:
    """How many responses one vLLM decodes at once: rollout.max_num_seqs or, where that is null, as many as its memory holds,
    but no more than it gets in one draw, or MAX_NUM_SEQS. device_bytes: 0 for a CPU.

    A response counts with the longest prompt and half of rollout.max_tokens (where that is too little, vLLM preempts some),
    and unless rollout.kv_cache_gib is given, with its logits.
    """
    rollout, tp = config.rollout, config.rollout.tensor_parallel_size
    if rollout.max_num_seqs is not None:
        return rollout.max_num_seqs
    model = read_hf_config(config.model.path)
    shape = model.get_text_config()
    size = getattr(torch, config.engine.compute_dtype).itemsize
    dim, (_, kv) = head_dim(shape), attention_widths(shape)
    bytes_per_token = 2 * shape.num_hidden_layers * max(dim, kv // dim // tp * dim) * size
    each = bytes_per_token * (config.data.max_prompt_length + rollout.max_tokens / 2)
    if rollout.kv_cache_gib or not device_bytes:
        room = (rollout.kv_cache_gib or CPU_KV_CACHE_GIB) * GIB
    else:
        weights = (
            sum(
                p.numel()
                for p in build_on_meta(
                    model, torch.float32, images=config.model.images
                ).parameters()
            )
            * size
            / tp
        )
        room = rollout.gpu_memory_utilization * device_bytes - weights
        each += LOGIT_COPIES * (1 + mtp.num_drafted(config)) * shape.vocab_size * 4
    drawn = -(-config.data.train_batch_size * tp // world_size) * rollout.n
    return max(1, min(drawn, int(room / each), MAX_NUM_SEQS))

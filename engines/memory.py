"""Estimate of the memory that one rank of the FSDP engine takes, from shapes alone."""

import torch
from omegaconf import DictConfig

from engines.fsdp import build_on_meta, read_hf_config

GIB = 2**30


def estimate(config: DictConfig, world_size: int) -> dict[str, float]:
    """GiB of one rank by what holds it, at a full micro-batch of data.max_tokens_per_micro_batch tokens.

    Activations are counted for a Llama-like layer: its residual inputs and normalised inputs, q, k, v before and after
    rotary embedding, the attention's output, and gate, up and their product.
    """
    engine, shape = config.engine, read_hf_config(config.model.path)
    hf = build_on_meta(shape, torch.float32, packed=True)
    layers = [m for m in hf.modules() if type(m).__name__ in hf._no_split_modules]
    in_layer = sum(p.numel() for p in layers[0].parameters())
    num_parameters = sum(p.numel() for p in hf.parameters())
    ranks = engine.fsdp_size if engine.fsdp_size > 0 else world_size
    stored, compute, reduce = (getattr(torch, engine[f"{k}_dtype"]).itemsize for k in ("param", "compute", "reduce"))
    resident = num_parameters / ranks * stored

    # The root's matrices, and two layers (one computes while the next is gathered), or every layer under ZeRO-2.
    gathered_layers = 2 if engine.reshard_after_forward else len(layers)
    root = num_parameters - in_layer * len(layers)
    gathered = (root + gathered_layers * in_layer) * compute
    # Gradients of the root and of one layer before they are reduced, and the copy that is reduced.
    unreduced = (root + in_layer) * (compute + reduce)

    tokens = config.data.max_tokens_per_micro_batch / engine.context_parallel_size
    head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    q, kv = shape.num_attention_heads * head_dim, shape.num_key_value_heads * head_dim
    in_one_layer = 4 * shape.hidden_size + 2 * (q + kv) + kv + q + 3 * shape.intermediate_size
    kept = shape.hidden_size * len(layers) + in_one_layer if engine.activation_checkpointing else in_one_layer * len(layers)
    chunk = min(tokens, engine.log_prob_chunk_size) * shape.vocab_size * (compute + 4) + shape.vocab_size * \
        shape.hidden_size * 4
    sizes = {"parameters": resident, "gradients": resident, "optimizer": 2 * resident}
    if engine.cpu_offload:
        sizes = {"parameters, host": resident, "gradients, host": resident, "optimizer, host": 2 * resident}
    sizes |= {"gathered weights": gathered, "unreduced gradients": unreduced, "activations": tokens * kept * compute,
              "logits of a chunk": chunk}
    sizes["device total"] = sum(v for k, v in sizes.items() if not k.endswith("host"))
    return {name: size / GIB for name, size in sizes.items()}

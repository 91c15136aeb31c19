"""Tiny models with random weights, as directories in Hugging Face format."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SHAPE = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=1, pad_token_id=0)
FAMILIES = {
    "qwen2_tied": dict(model_type="qwen2", tie_word_embeddings=True),
    "qwen3": dict(model_type="qwen3", tie_word_embeddings=False, head_dim=16),
    # Its padding token occurs among the words, and has a row of zeros in the embedding, as transformers begins it.
    "llama": dict(model_type="llama", tie_word_embeddings=False, pad_token_id=5,
                  rope_parameters=dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0,
                                       high_freq_factor=4.0, original_max_position_embeddings=64)),
    "gemma3": dict(model_type="gemma3_text", head_dim=32, query_pre_attn_scalar=32, sliding_window=64),
    # Buffers are stored with its weights.
    "apertus": dict(model_type="apertus"),
    # Its convolutions read across the borders of packed sequences, and transformers has no flag for that.
    "lfm2": dict(model_type="lfm2", layer_types=["conv", "full_attention", "conv"]),
    "qwen3_moe": dict(model_type="qwen3_moe", tie_word_embeddings=False, head_dim=32, num_experts=8, num_experts_per_tok=3,
                      moe_intermediate_size=24, norm_topk_prob=True),
    # Five layers, which stages do not divide.
    "mistral": dict(model_type="mistral", tie_word_embeddings=False, sliding_window=7, num_hidden_layers=5),
    "llama_yarn": dict(model_type="llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True, num_hidden_layers=5,
                       rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0,
                                            original_max_position_embeddings=16)),
    "qwen3_windows": dict(model_type="qwen3", tie_word_embeddings=False, head_dim=16, attention_bias=True, num_hidden_layers=4,
                          use_sliding_window=True, sliding_window=7, max_window_layers=2),
    "mixtral": dict(model_type="mixtral", tie_word_embeddings=False, head_dim=32, num_local_experts=8, num_experts_per_tok=3,
                    intermediate_size=24, sliding_window=9, num_hidden_layers=4),
}


def make_model(directory: Path, family: str, **changes) -> Path:
    """Write a model of one of FAMILIES."""
    return write_model(directory, **{**FAMILIES[family], **changes})


def write_model(directory: Path, **shape) -> Path:
    """Biases, norms and buffers are random too, so that none of them can be lost unseen."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**SHAPE, **shape})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and not (config.tie_word_embeddings and name == "lm_head.weight"):
                tensor.add_(torch.randn_like(tensor) * 0.1)
        if config.pad_token_id:
            model.get_input_embeddings().weight[config.pad_token_id] = 0
    model.save_pretrained(directory)
    return directory

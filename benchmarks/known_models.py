"""The config.json of well-known models, for benchmarks/what_fits.py and tests of configurations.

Besides it, a dry run needs only the tokenizer of a model. The values come from the config.json on
huggingface.co/NAME, without the keys that transformers fills in with the same values. A test
compares the numbers of parameters with the model cards'.
"""

import json
from pathlib import Path

QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
LLAMA_3_1 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}
GEMMA_3_4B = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "image_token_index": 262144,
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "mm_tokens_per_image": 256,
    "eos_token_id": [1, 106],
    "text_config": {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 1024,
        "max_position_embeddings": 131072,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 896,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
QWEN2_5_VL_7B = {
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128000,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}


def decoder(
    base: dict, hidden: int, intermediate: int, layers: int, heads: int, is_tied: bool = False
) -> dict:
    """Return `base` with the sizes of one model."""
    return base | {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": is_tied,
    }


QWEN3_30B_A3B = decoder(QWEN3, 2048, 6144, 48, 32) | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "router_aux_loss_coef": 0.001,
}
# Name on the hub -> config.json.
CONFIGS = {
    "Qwen/Qwen3-0.6B": decoder(QWEN3, 1024, 3072, 28, 16, is_tied=True),
    "Qwen/Qwen3-1.7B": decoder(QWEN3, 2048, 6144, 28, 16, is_tied=True),
    "Qwen/Qwen3-4B": decoder(QWEN3, 2560, 9728, 36, 32, is_tied=True),
    "Qwen/Qwen3-8B": decoder(QWEN3, 4096, 12288, 36, 32),
    "Qwen/Qwen3-14B": decoder(QWEN3, 5120, 17408, 40, 40),
    "Qwen/Qwen3-32B": decoder(QWEN3, 5120, 25600, 64, 64),
    "Qwen/Qwen3-30B-A3B": QWEN3_30B_A3B,
    "Qwen/Qwen2.5-VL-7B-Instruct": QWEN2_5_VL_7B,
    "meta-llama/Llama-3.1-8B-Instruct": decoder(LLAMA_3_1, 4096, 14336, 32, 32),
    "meta-llama/Llama-3.1-70B-Instruct": decoder(LLAMA_3_1, 8192, 28672, 80, 64),
    "google/gemma-3-4b-it": GEMMA_3_4B,
}


def write_config(name: str, directory: Path) -> Path:
    """Write the config.json of a model to directory/NAME, and return that path."""
    path = directory / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIGS[name]))
    return path

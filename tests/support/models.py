"""Tiny models with random weights, written as directories in Hugging Face format."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig

from engines.model import mtp
from engines.model.hf import auto_class
from examples.arithmetic import make_tokenizer
from examples.colours import CHAT_TEMPLATE, TOKENS

SHAPE = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=0,
)
FAMILIES = {
    "qwen2_tied": dict(model_type="qwen2", tie_word_embeddings=True),
    "qwen3": dict(model_type="qwen3", tie_word_embeddings=False, head_dim=16),
    # Its padding token occurs in texts, and has a row of zeros in the embedding, as transformers
    # initialises it.
    "llama": dict(
        model_type="llama",
        tie_word_embeddings=False,
        pad_token_id=5,
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=10000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "gemma3": dict(
        model_type="gemma3_text", head_dim=32, query_pre_attn_scalar=32, sliding_window=64
    ),
    # Its files hold buffers besides weights.
    "apertus": dict(model_type="apertus"),
    # Its convolutions read across borders of packed sequences, and transformers has no flag for it.
    "lfm2": dict(model_type="lfm2", layer_types=["conv", "full_attention", "conv"]),
    "qwen3_moe": dict(
        model_type="qwen3_moe",
        tie_word_embeddings=False,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        norm_topk_prob=True,
    ),
    # Five layers, which do not divide evenly into pipeline stages.
    "mistral": dict(
        model_type="mistral", tie_word_embeddings=False, sliding_window=7, num_hidden_layers=5
    ),
    "llama_yarn": dict(
        model_type="llama",
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        num_hidden_layers=5,
        rope_parameters=dict(
            rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16
        ),
    ),
    "qwen3_windows": dict(
        model_type="qwen3",
        tie_word_embeddings=False,
        head_dim=16,
        attention_bias=True,
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=2,
    ),
    "mixtral": dict(
        model_type="mixtral",
        tie_word_embeddings=False,
        head_dim=32,
        num_local_experts=8,
        num_experts_per_tok=3,
        intermediate_size=24,
        sliding_window=9,
        num_hidden_layers=4,
    ),
    # Two layers and one for multi-token prediction. vLLM on a CPU needs heads of 32 dimensions.
    "mimo": dict(
        model_type="mimo",
        tie_word_embeddings=False,
        hidden_size=128,
        num_hidden_layers=2,
        num_nextn_predict_layers=1,
    ),
}
# Sigmoid scores with a bias, groups of experts, a shared expert, a first layer without experts.
GROUPED_EXPERTS = dict(
    model_type="glm4_moe",
    tie_word_embeddings=False,
    head_dim=32,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_shared_experts=1,
    n_group=4,
    topk_group=2,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
    norm_topk_prob=True,
    partial_rotary_factor=0.5,
)
TOWER = dict(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
)
# transformers saves the weights of gemma3 and mistral3 under other names than its modules have.
MULTIMODAL = {
    "gemma3 with images": dict(
        model_type="gemma3",
        mm_tokens_per_image=4,
        vision_config=dict(TOWER, model_type="siglip_vision_model"),
        text_config=dict(
            model_type="gemma3_text", head_dim=32, query_pre_attn_scalar=32, sliding_window=64
        ),
    ),
    "gemma4 with images": dict(
        model_type="gemma4",
        vision_config=dict(TOWER, head_dim=8, num_key_value_heads=2),
        text_config=dict(
            model_type="gemma4_text",
            head_dim=32,
            global_head_dim=32,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=97,
        ),
    ),
    "mistral3 with images": dict(
        model_type="mistral3",
        vision_config=dict(TOWER, model_type="pixtral"),
        text_config=dict(
            model_type="ministral3",
            head_dim=32,
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=10000.0,
                factor=4.0,
                original_max_position_embeddings=128,
                llama_4_scaling_beta=0.1,
            ),
        ),
    ),
    "qwen3_5 with images": dict(
        model_type="qwen3_5",
        tie_word_embeddings=False,
        vision_config=dict(
            depth=2,
            hidden_size=16,
            intermediate_size=24,
            num_heads=2,
            out_hidden_size=32,
            num_position_embeddings=16,
        ),
        text_config=dict(
            model_type="qwen3_5_text",
            head_dim=32,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
        ),
    ),
}


def make_model(directory: Path, family: str, **changes) -> Path:
    """Write a model of FAMILIES or MULTIMODAL. The changes apply to its text model."""
    if family in MULTIMODAL:
        shape = MULTIMODAL[family]
        return write_model(
            directory, **{**shape, "text_config": {**shape["text_config"], **changes}}
        )
    return write_model(directory, **{**FAMILIES[family], **changes})


def write_model(directory: Path, **shape) -> Path:
    """Write a model of this configuration.

    Biases, norms and buffers are random too, so that a test notices if one is lost.
    """
    torch.manual_seed(0)
    if "text_config" in shape:
        config = AutoConfig.for_model(**{**shape, "text_config": {**SHAPE, **shape["text_config"]}})
    else:
        config = AutoConfig.for_model(**{**SHAPE, **shape})
    model = auto_class(config).from_config(config, dtype=torch.float32)
    number = mtp.num_layers(config)
    if number and config.model_type in mtp.LAYERS:
        model.model.mtp_layers = nn.ModuleList(
            mtp.LAYERS[config.model_type](config) for _ in range(number)
        )
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            is_tied = config.tie_word_embeddings and name == "lm_head.weight"
            if tensor.is_floating_point() and not is_tied:
                tensor.add_(torch.randn_like(tensor) * 0.1)
        pad_token_id = config.get_text_config().pad_token_id
        if pad_token_id:
            model.get_input_embeddings().weight[pad_token_id] = 0
    model.save_pretrained(directory)
    return directory


IMAGE_WORDS = ("<|im_start|>", "<|im_end|>", "<image>", "<image_end>", "<image_soft>", "<video>")
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Vision-language models. Their tokens are bytes and IMAGE_WORDS; <image> stands for an image.
VISION_LANGUAGE = {
    "qwen2_5_vl": dict(
        vision_config=dict(
            depth=3,
            hidden_size=16,
            intermediate_size=24,
            num_heads=2,
            out_hidden_size=64,
            fullatt_block_indexes=[1],
            window_size=56,
        )
    ),
    "qwen3_vl": dict(
        vision_config=dict(
            depth=3,
            hidden_size=16,
            intermediate_size=24,
            num_heads=2,
            out_hidden_size=32,
            num_position_embeddings=16,
            deepstack_visual_indexes=[0],
        )
    ),
    "qwen3_5": dict(vision_config=MULTIMODAL["qwen3_5 with images"]["vision_config"]),
    "gemma3": dict(
        vision_config=dict(TOWER, model_type="siglip_vision_model"), mm_tokens_per_image=4
    ),
    "llava": dict(vision_config=dict(TOWER, model_type="clip_vision_model", projection_dim=16)),
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
TEXT = {
    "qwen2_5_vl": dict(hidden_size=64, rope_parameters=MROPE | {"mrope_section": [2, 3, 3]}),
    "qwen3_vl": dict(head_dim=32, rope_parameters=MROPE | {"mrope_interleaved": True}),
    "qwen3_5": MULTIMODAL["qwen3_5 with images"]["text_config"]
    | dict(rope_parameters=MROPE | {"mrope_interleaved": True, "partial_rotary_factor": 1.0}),
    "gemma3": dict(
        model_type="gemma3_text", head_dim=32, query_pre_attn_scalar=32, sliding_window=64
    ),
    "llava": dict(model_type="llama", head_dim=32),
}


def make_image_model(directory: Path, family: str, **changes) -> Path:
    """Write a vision-language model with its tokenizer and its processor."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = Tokenizer(
        models.BPE(
            vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))},
            merges=[],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in IMAGE_WORDS])
    ids = dict(zip(IMAGE_WORDS, range(256, 262)))
    soft = "<image_soft>" if family == "gemma3" else "<image>"
    words = {
        "image_token": soft,
        "video_token": "<video>",
        "boi_token": "<image>",
        "eoi_token": "<image_end>",
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=CHAT,
        extra_special_tokens=words,
    )
    tokenizer.save_pretrained(directory)
    text = dict(
        vocab_size=len(tokenizer), eos_token_id=ids["<|im_end|>"], pad_token_id=None, **TEXT[family]
    )
    shape = dict(
        model_type=family,
        image_token_id=ids[soft],
        image_token_index=ids[soft],
        video_token_id=ids["<video>"],
        boi_token_index=ids["<image>"],
        eoi_token_index=ids["<image_end>"],
        tie_word_embeddings=False,
        **{**VISION_LANGUAGE[family], "text_config": {**text, **changes}},
    )
    write_model(directory, **shape)
    if family == "gemma3":
        Gemma3ImageProcessorPil(size={"height": 28, "width": 28}).save_pretrained(directory)
    elif family == "llava":
        CLIPImageProcessorPil(
            size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
        ).save_pretrained(directory)
    else:
        patch = 14 if family == "qwen2_5_vl" else 16
        size = {"shortest_edge": 4 * patch**2, "longest_edge": 64 * patch**2}
        Qwen2VLImageProcessorPil(size=size, patch_size=patch).save_pretrained(directory)
    settings = {
        "gemma3": {"image_seq_length": 4},
        "llava": {
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    }
    (directory / "processor_config.json").write_text(json.dumps(settings.get(family, {})))
    return directory


def make_ocr_model(directory: Path) -> Path:
    """Write a PaddleOCR-VL model, which transformers and vLLM run without torchvision.

    Its images have a token per 28 x 28 pixels, 256 at most, with multi-axis position ids (M-RoPE).
    """
    from transformers import (
        PaddleOCRVLImageProcessorPil,
        PaddleOCRVLProcessor,
        PreTrainedTokenizerFast,
    )

    words = make_tokenizer()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words.backend_tokenizer,
        eos_token=words.eos_token,
        pad_token=words.pad_token,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=TOKENS,
    )
    image, video, start, end = tokenizer.convert_tokens_to_ids([*TOKENS.values()])
    write_model(
        directory,
        model_type="paddleocr_vl",
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
        vision_config=dict(TOWER, hidden_size=64, image_size=56, patch_size=14),
        text_config=dict(
            head_dim=32,
            hidden_size=64,
            vocab_size=len(tokenizer),
            eos_token_id=tokenizer.eos_token_id,
            tie_word_embeddings=False,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[4, 6, 6]),
        ),
    )
    # transformers and vLLM interpolate the tower's position embeddings in different ways. Where all
    # of them are equal, the results are the same.
    weights = load_file(directory / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith("position_embedding.weight"):
            tensor[:] = tensor[0].clone()
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    processor = PaddleOCRVLImageProcessorPil(
        size={"shortest_edge": 28 * 28, "longest_edge": 256 * 28 * 28}
    )
    PaddleOCRVLProcessor(processor, tokenizer, chat_template=CHAT_TEMPLATE).save_pretrained(
        directory
    )
    return directory

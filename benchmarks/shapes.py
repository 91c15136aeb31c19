"""The models of the other scripts: Qwen2.5's shapes, and some built from them, made once from a config with random weights.

A shape whose name ends in -MTP is a MiMo's: a layer more, which drafts the token after the next one. How much drafts help depends
on how many are right, and random weights make none right. So these weights are made: words follow each other in circles of 16, a
word goes on to the next with a probability that falls with the temperature, and the MTP layer knows the circles. Matrices have
their sizes, so that a step takes as long as a trained model's. A shape whose name ends in -MTP-random is for training: its weights
are random, and it ends responses as the demo's tokenizer does.
"""

import json
import math
import shutil
from pathlib import Path

import torch
from filelock import FileLock
from transformers import AutoConfig, PreTrainedTokenizerFast

from engines.checkpoint.export import write_safetensors
from engines.model import mtp
from engines.model.hf import auto_class
from engines.model.names import split_stacks, stacked
from examples.arithmetic import make_tokenizer
from examples.colours import CHAT_TEMPLATE, TOKENS

SHAPES = {  # vocabulary, hidden, intermediate, layers, heads, key-value heads, tied
    "tiny": (1024, 256, 512, 2, 4, 2, True),  # not Qwen's: to try the scripts on a CPU
    "0.5B": (151936, 896, 4864, 24, 14, 2, True),
    "1.5B": (151936, 1536, 8960, 28, 12, 2, True),
    "7B": (152064, 3584, 18944, 28, 28, 4, False),
    "32B": (152064, 5120, 27648, 64, 40, 8, False),
    "48B": (152064, 5120, 27648, 96, 40, 8, False),  # not Qwen's: 32B's layers, half as many again
    "4B-A1B": (151936, 2048, 768, 6, 32, 4, False),  # 6 of the 48 layers of Qwen3-30B-A3B
    "8B-A1B": (151936, 2048, 768, 12, 32, 4, False),  # 12 of them
}
# What makes another model of a shape of that name, or of that name without its end.
EXPERTS = {
    shape: dict(
        model_type="qwen3_moe",
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        head_dim=128,
        norm_topk_prob=True,
        architectures=["Qwen3MoeForCausalLM"],
    )
    for shape in ("4B-A1B", "8B-A1B")
}
MTP = {
    f"{shape}-MTP{end}": dict(
        model_type="mimo",
        num_nextn_predict_layers=1,
        tie_word_embeddings=False,
        architectures=["MiMoForCausalLM"],
    )
    for shape in ("tiny", "0.5B", "1.5B", "7B")
    for end in ("", "-random")
}
VISION = {
    "tiny-VL": dict(
        depth=2, hidden_size=64, intermediate_size=128, num_heads=2, fullatt_block_indexes=[1]
    ),
    "7B-VL": dict(depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16),
}  # Qwen2.5-VL's vision tower
NAMES = [*SHAPES, *MTP, *VISION]
IMAGE = {
    "tiny-VL": (56, 84),
    "7B-VL": (1008, 784),
}  # height and width in pixels; a token is 28 x 28
CIRCLE, LIKELY = 16, 0.95  # words; the chance of the next one at temperature 1


def make_model(shape: str, directory: Path) -> Path:
    """config.json and random bf16 weights; made once, by whichever program comes first."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / shape
    with FileLock(f"{path}.lock"):
        if not path.exists():
            write_model(shape, path)
    return path


def write_model(shape: str, path: Path) -> None:
    """The end token is the last word, which is hardly ever sampled, but for a model that is to be trained."""
    base = shape.removesuffix("-random").removesuffix("-VL").removesuffix("-MTP")
    vocab_size, hidden, intermediate, layers, heads, kv_heads, tied = SHAPES[base]
    config = AutoConfig.for_model(
        **{
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "vocab_size": vocab_size,
            "eos_token_id": make_tokenizer().eos_token_id
            if shape.endswith("-random")
            else vocab_size - 1,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "tie_word_embeddings": tied,
            "max_position_embeddings": 32768,
            **EXPERTS.get(shape, {}),
            **MTP.get(shape, {}),
        }
    )
    work = path.with_suffix(".tmp")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    if shape in VISION:
        config = with_tower(config, VISION[shape], work)
    config.save_pretrained(work)
    with torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=torch.bfloat16)
    if shape in MTP:
        model.model.mtp_layers = mtp.layers(config)
    weights = circles(model, config) if shape.endswith("-MTP") else random_weights(model)
    write_safetensors(split_stacks(weights, stacked(model)), work)
    work.rename(path)


def random_weights(model):
    """(name, bf16 value) of every parameter."""
    where = "cuda" if torch.cuda.is_available() else "cpu"
    for name, parameter in model.named_parameters():
        value = torch.empty(parameter.shape, dtype=torch.bfloat16, device=where).normal_(0, 0.02)
        yield name, value.fill_(1) if name.endswith("norm.weight") else value


def circles(model, config):
    """The same of a model with MTP layers, with the probabilities that are said above."""
    vocab_size, hidden = config.vocab_size, config.hidden_size
    where = "cuda" if torch.cuda.is_available() else "cpu"
    embedding, words = (
        torch.randn(vocab_size, hidden, device=where),
        torch.arange(vocab_size, device=where),
    )
    before = (
        words - 1 + CIRCLE * (words % CIRCLE == 0) * (words + CIRCLE <= vocab_size)
    )  # the last words have no circle
    size = math.log(vocab_size * LIKELY / (1 - LIKELY))  # a logit; those of other words are about 0
    for name, value in random_weights(model):
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value.zero_()
        elif name.endswith("embed_tokens.weight"):
            value = embedding.bfloat16()
        elif name == "lm_head.weight":
            value = (embedding[before] * size / hidden).bfloat16()
        elif name.endswith("input_proj.weight"):
            value = torch.eye(hidden, 2 * hidden, device=where).roll(hidden, 1).bfloat16()
        yield name, value


def with_tower(text, tower: dict, directory: Path):
    """The configuration of Qwen2.5-VL around a text model's, whose words are bytes. Writes its tokenizer and processor."""
    words = make_tokenizer()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words.backend_tokenizer,
        eos_token=words.eos_token,
        pad_token=words.pad_token,
        chat_template=CHAT_TEMPLATE,
        extra_special_tokens=TOKENS,
    )
    tokenizer.save_pretrained(directory)
    image, video, start, end = tokenizer.convert_tokens_to_ids([*TOKENS.values()])
    (directory / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "Qwen2VLImageProcessor"})
    )
    (directory / "generation_config.json").write_text(
        json.dumps({"eos_token_id": text.eos_token_id})
    )
    eighth = text.hidden_size // text.num_attention_heads // 16
    rope = {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [2 * eighth, 3 * eighth, 3 * eighth],
    }
    return AutoConfig.for_model(
        "qwen2_5_vl",
        text_config={**text.to_dict(), "model_type": "qwen2_5_vl_text", "rope_parameters": rope},
        vision_config={**tower, "out_hidden_size": text.hidden_size},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=text.tie_word_embeddings,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
    )

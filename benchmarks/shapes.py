"""Models with random weights for the other scripts, each made once from a configuration.

Their shapes are Qwen2.5's, and some built from them. A shape whose name ends in -MTP is a MiMo: it
has one more layer, which drafts the token after the next one. How much drafts help depends on how
many of them are right, and random weights make none right. So these weights are constructed: the
tokens of the vocabulary form circles of 16, each token is followed by the next one in its circle
with a probability that falls as the temperature rises, and the MTP layer knows the circles. All
matrices have their true sizes, so that a step takes as long as a trained model's.

A shape whose name ends in -MTP-random is for training: its weights are random, and its responses
end with the token of the demo's tokenizer. One that ends in -RM is a reward model: a sequence
classifier with one label.
"""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from engines.checkpoint.export import write_safetensors
from engines.model import mtp
from engines.model.hf import auto_class
from engines.model.names import split_stacks, stacked
from examples.arithmetic import make_tokenizer
from examples.colours import CHAT_TEMPLATE, TOKENS


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder, as in a configuration of Qwen2."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    is_tied: bool

    def settings(self) -> dict:
        """Return the arguments of a configuration in transformers."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "tie_word_embeddings": self.is_tied,
        }


SHAPES = {
    "tiny": Shape(1024, 256, 512, 2, 4, 2, True),  # not Qwen's: to try the scripts on a CPU
    "tiny-MoE": Shape(1024, 128, 64, 4, 4, 2, False),
    "0.5B": Shape(151936, 896, 4864, 24, 14, 2, True),
    "1.5B": Shape(151936, 1536, 8960, 28, 12, 2, True),
    "7B": Shape(152064, 3584, 18944, 28, 28, 4, False),
    "32B": Shape(152064, 5120, 27648, 64, 40, 8, False),
    "48B": Shape(152064, 5120, 27648, 96, 40, 8, False),  # not Qwen's: 32B with 96 layers
    "4B-A1B": Shape(151936, 2048, 768, 6, 32, 4, False),  # 6 of the 48 layers of Qwen3-30B-A3B
    "8B-A1B": Shape(151936, 2048, 768, 12, 32, 4, False),  # 12 of them
}

# What else is in the configuration of a mixture of experts.
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "head_dim": 128,
    "norm_topk_prob": True,
    "architectures": ["Qwen3MoeForCausalLM"],
}
TINY_MOE = {
    **QWEN3_MOE,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "head_dim": 32,
}
EXPERTS = {"tiny-MoE": TINY_MOE, "4B-A1B": QWEN3_MOE, "8B-A1B": QWEN3_MOE}
# Of a model with an MTP layer.
MIMO = {
    "model_type": "mimo",
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "architectures": ["MiMoForCausalLM"],
}
MTP = {
    f"{shape}-MTP{ending}": MIMO
    for shape in ("tiny", "0.5B", "1.5B", "7B")
    for ending in ("", "-random")
}
# The vision towers of Qwen2.5-VL.
VISION = {
    "tiny-VL": {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "fullatt_block_indexes": [1],
    },
    "7B-VL": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16},
}
REWARD_MODELS = ("tiny-RM", "0.5B-RM", "1.5B-RM", "7B-RM")
NAMES = [*SHAPES, *MTP, *VISION, *REWARD_MODELS]
# Height and width in pixels of the images for a shape. An image token stands for 28 x 28 pixels.
IMAGE = {"tiny-VL": (56, 84), "7B-VL": (1008, 784)}
PIXELS_PER_TOKEN = 28**2

CIRCLE = 16  # tokens
LIKELY = 0.95  # the probability of the next token of a circle at temperature 1


def make_model(shape: str, directory: Path) -> Path:
    """Make directory/shape with config.json and bf16 weights, unless it exists; return its path.

    Several processes may call this at the same time.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / shape
    with FileLock(f"{path}.lock"):
        if not path.exists():
            write_model(shape, path)
    return path


def write_model(shape: str, path: Path) -> None:
    work = path.with_name(f"{path.name}.tmp")  # 1.5B and 1.5B-RM have the same stem
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    config = text_config(shape)
    if shape in VISION:
        write_image_files(config, work)
        config = add_vision_tower(config, VISION[shape])
    config.save_pretrained(work)
    with torch.device("meta"):
        model = model_class(shape, config).from_config(config, dtype=torch.bfloat16)
    if shape in MTP:
        model.model.mtp_layers = mtp.layers(config)
    if shape.endswith("-MTP"):
        weights = circle_weights(model, config)
    else:
        weights = random_weights(model)
    write_safetensors(split_stacks(weights, stacked(model)), work)
    work.rename(path)


def model_class(shape: str, config: PreTrainedConfig) -> type:
    return AutoModelForSequenceClassification if shape in REWARD_MODELS else auto_class(config)


# ---- configurations ----


def text_config(shape: str) -> PreTrainedConfig:
    """Return the configuration of a shape without its vision tower.

    The token that ends a response is the last one of the vocabulary, which is hardly ever sampled,
    except for a model that is to be trained.
    """
    decoder = shape
    for suffix in ("-random", "-VL", "-MTP", "-RM"):
        decoder = decoder.removesuffix(suffix)
    base = SHAPES[decoder]
    is_trained = shape.endswith("-random")
    eos_token_id = make_tokenizer().eos_token_id if is_trained else base.vocab_size - 1
    qwen2 = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "eos_token_id": eos_token_id,
        "max_position_embeddings": 32768,
        **base.settings(),
    }
    classifier = {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
    extra = classifier if shape in REWARD_MODELS else EXPERTS.get(shape, {}) | MTP.get(shape, {})
    return AutoConfig.for_model(**(qwen2 | extra))


def image_tokenizer() -> PreTrainedTokenizerFast:
    """Return the demo's tokenizer, whose tokens are bytes, with the tokens around images."""
    demo = make_tokenizer()
    return PreTrainedTokenizerFast(
        tokenizer_object=demo.backend_tokenizer,
        eos_token=demo.eos_token,
        pad_token=demo.pad_token,
        chat_template=CHAT_TEMPLATE,
        extra_special_tokens=TOKENS,
    )


def write_image_files(text: PreTrainedConfig, directory: Path) -> None:
    """Write the files of a vision-language model except its configuration and weights."""
    image_tokenizer().save_pretrained(directory)
    processor = {"image_processor_type": "Qwen2VLImageProcessor"}
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    generation = {"eos_token_id": text.eos_token_id}
    (directory / "generation_config.json").write_text(json.dumps(generation))


def add_vision_tower(text: PreTrainedConfig, tower: dict) -> PreTrainedConfig:
    """Return the configuration of Qwen2.5-VL with this decoder and this tower."""
    image, video, start, end = image_tokenizer().convert_tokens_to_ids([*TOKENS.values()])
    eighth = text.hidden_size // text.num_attention_heads // 16
    rope = {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [2 * eighth, 3 * eighth, 3 * eighth],
    }
    decoder = {"model_type": "qwen2_5_vl_text", "rope_parameters": rope}
    return AutoConfig.for_model(
        "qwen2_5_vl",
        text_config=text.to_dict() | decoder,
        vision_config={**tower, "out_hidden_size": text.hidden_size},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=text.tie_word_embeddings,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
    )


# ---- weights ----


def weight_device() -> str:
    """Return where weights are made: a GPU draws billions of numbers in a moment."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def random_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, bf16 value) of every parameter."""
    for name, parameter in model.named_parameters():
        value = torch.empty(parameter.shape, dtype=torch.bfloat16, device=weight_device())
        value.normal_(0, 0.02)
        if name.endswith("norm.weight"):
            value.fill_(1)
        yield name, value


def circle_weights(model: nn.Module, config: PreTrainedConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, value) for a model with an MTP layer, whose tokens follow each other in circles.

    The layers add nothing to the embedding of a token. The row of the output matrix for a token is
    the embedding of the token before it in its circle.
    """
    vocab_size = config.vocab_size
    hidden_size = config.hidden_size
    device = weight_device()
    embedding = torch.randn(vocab_size, hidden_size, device=device)
    tokens = torch.arange(vocab_size, device=device)
    # The last tokens of the vocabulary do not fill a circle, so they have none.
    begins_circle = (tokens % CIRCLE == 0) & (tokens + CIRCLE <= vocab_size)
    previous = tokens - 1 + CIRCLE * begins_circle
    # The logit of the next token in the circle. The other logits are about 0.
    logit = math.log(vocab_size * LIKELY / (1 - LIKELY))
    for name, value in random_weights(model):
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value.zero_()
        elif name.endswith("embed_tokens.weight"):
            value = embedding.bfloat16()
        elif name == "lm_head.weight":
            value = (embedding[previous] * logit / hidden_size).bfloat16()
        elif name.endswith("input_proj.weight"):
            identity = torch.eye(hidden_size, 2 * hidden_size, device=device)
            value = identity.roll(hidden_size, 1).bfloat16()
        yield name, value

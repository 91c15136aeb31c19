"""A vision-language model that is small enough to train while you watch, and pictures for it.

    python examples/colours.py build DIR              # a model with random weights, and data
    python examples/colours.py ask MODEL_DIR [--n 8]  # held-out pictures and the model's answers

`build` writes DIR/model, DIR/images/ and DIR/{train,val,words}.jsonl, without any download. `ask`
also counts how many of 200 answers are right.

Each picture shows a square of one of six colours somewhere on a grey background. The model is a
PaddleOCR-VL of 0.6 million parameters, a vision transformer and a decoder, which reads and writes
single characters. Fine-tuning on DIR/words.jsonl teaches it to answer with the name of a random
colour, regardless of the picture. Reinforcement learning on DIR/train.jsonl then teaches it to look
at the picture. The same arguments always give byte-identical files.
"""

import random
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

# The repository, for examples/arithmetic.py: this script runs from any directory.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.arithmetic import main, make_tokenizer, write_rows

SEED = 0
NUM_TRAIN = 1024
NUM_VAL = 200
IMAGE_SIZE = 56  # pixels; a token of the model covers 28 x 28
SQUARE_SIZE = 24
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 70, 220),
    "yellow": (230, 220, 50),
    "black": (20, 20, 20),
    "white": (250, 250, 250),
}
QUESTION = "Which colour is the square?"
TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}
# ChatML with images, as used by Qwen's vision-language models.
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['content'] is string %}{{ message['content'] }}"
    "{%- else %}{%- for part in message['content'] %}"
    "{%- if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- else %}{{ part['text'] }}{%- endif %}{%- endfor %}{%- endif %}"
    "{{ '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


def draw(colour: str, rng: np.random.Generator) -> Image.Image:
    """Draw a square of this colour, a little darker or lighter, on a grey background."""
    pixels = rng.integers(110, 150, (IMAGE_SIZE, IMAGE_SIZE, 1)).repeat(3, 2)
    y, x = rng.integers(0, IMAGE_SIZE - SQUARE_SIZE, 2)
    shade = np.clip(np.array(COLOURS[colour]) + rng.integers(-20, 21, 3), 0, 255)
    pixels[y : y + SQUARE_SIZE, x : x + SQUARE_SIZE] = shade
    return Image.fromarray(pixels.astype(np.uint8))


def conversation(image: str, answer: str) -> list[dict]:
    question = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def make_rows(folder: Path) -> dict[str, list[dict]]:
    """Write the images to a folder, and return the rows of train, val and words.

    Paths of images in rows are relative to the folder's parent, which gets the files of rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(SEED)
    choices = random.Random(SEED)
    names = list(COLOURS)
    rows: dict[str, list[dict]] = {"train": [], "val": [], "words": []}
    for i in range(NUM_TRAIN + NUM_VAL):
        colour = choices.choice(names)
        image = f"{folder.name}/{i:04}.png"
        draw(colour, rng).save(folder.parent / image)
        row = {"messages": conversation(image, colour), "answer": colour}
        if i < NUM_VAL:
            rows["val"].append(row)
        else:
            rows["train"].append(row)
            rows["words"].append({"messages": conversation(image, choices.choice(names))})
    return rows


def make_image_tokenizer():
    """Return examples/arithmetic.py's tokenizer with added tokens and a template for images."""
    from transformers import PreTrainedTokenizerFast

    text_tokenizer = make_tokenizer()
    return PreTrainedTokenizerFast(
        tokenizer_object=text_tokenizer.backend_tokenizer,
        eos_token=text_tokenizer.eos_token,
        pad_token=text_tokenizer.pad_token,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=TOKENS,
    )


def make_config(tokenizer):
    from transformers import AutoConfig

    image, video, start, end = tokenizer.convert_tokens_to_ids(list(TOKENS.values()))
    vision = dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=IMAGE_SIZE,
        patch_size=14,
    )
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    text = dict(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.09,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        rope_parameters=rope,
    )
    return AutoConfig.for_model(
        "paddleocr_vl",
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
        dtype="float32",
        vision_config=vision,
        text_config=text,
    )


def make_model(directory: Path) -> int:
    """Write a model with random weights, its tokenizer and its processor.

    Returns:
        The number of parameters.
    """
    import torch
    from transformers import (
        AutoModelForImageTextToText,
        GenerationConfig,
        PaddleOCRVLImageProcessorPil,
        PaddleOCRVLProcessor,
    )

    tokenizer = make_image_tokenizer()
    config = make_config(tokenizer)
    torch.manual_seed(SEED)
    model = AutoModelForImageTextToText.from_config(config)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(directory)
    pixels = {"shortest_edge": 28 * 28, "longest_edge": 64 * 28 * 28}
    image_processor = PaddleOCRVLImageProcessorPil(size=pixels)
    processor = PaddleOCRVLProcessor(image_processor, tokenizer, chat_template=CHAT_TEMPLATE)
    processor.save_pretrained(directory)
    return model.num_parameters()


def build(directory: Path) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    rows = make_rows(directory / "images")
    num_parameters = make_model(directory / "model")
    for name in rows:
        write_rows(directory / f"{name}.jsonl", rows[name])
    print(f"{directory}/model: PaddleOCR-VL, {num_parameters / 1e6:.1f} M random parameters")
    print(
        f"{directory}/train.jsonl, val.jsonl: {NUM_TRAIN} and {NUM_VAL} pictures of squares in "
        f"{', '.join(COLOURS)}"
    )


def reply_to(model, processor, question: list[dict]) -> str:
    """Return the greedy reply to a question with an image."""
    inputs = processor.apply_chat_template(
        question,
        add_generation_prompt=True,
        tokenize=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**inputs, do_sample=False, max_new_tokens=8)
    num_prompt_tokens = inputs["input_ids"].shape[1]
    return processor.decode(output[0, num_prompt_tokens:], skip_special_tokens=True)


def ask(directory: Path, num_shown: int) -> None:
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(directory)
    num_right = 0
    with tempfile.TemporaryDirectory() as work:
        rows = make_rows(Path(work) / "images")["val"]
        for i, row in enumerate(rows):
            question = row["messages"][:1]
            image_part = question[0]["content"][0]
            image_part["image"] = f"{work}/{image_part['image']}"
            reply = reply_to(model, processor, question)
            is_right = reply == row["answer"]
            num_right += is_right
            if i < num_shown:
                shown = ascii(reply)[1:-1][:24]
                verdict = "right" if is_right else "wrong"
                print(f"a {row['answer']:6} square: {shown:24}  {verdict}")
    print(f"{num_right} of {NUM_VAL} replies are right ({num_right / NUM_VAL:.0%})")


if __name__ == "__main__":
    main(__doc__, build, ask)

"""A model that reads images, small enough to train while you watch, and pictures to ask it about: no download.

    python examples/colours.py build DIR              # DIR/model (random weights), DIR/images/, DIR/*.jsonl
    python examples/colours.py ask MODEL_DIR [--n 8]  # held-out pictures, the model's answers, how many of 200 are right

Each picture has a square of one of six colours at some place of a grey ground. The model is a PaddleOCR-VL of 0.6 million
parameters, a vision transformer and a decoder, that reads and writes single characters. DIR/words.jsonl teaches it to name a
colour, but any colour: its answers have nothing to do with the pictures. To look is left to reinforcement learning, which
DIR/train.jsonl is for. The same arguments give the same files, to the last byte.
"""

import random
import sys
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where examples/ is

from examples.arithmetic import main, make_tokenizer, write_rows

SEED, NUM_TRAIN, NUM_VAL = 0, 1024, 200
SIZE, SQUARE = 56, 24  # pixels; a token of the model is 28 x 28
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
# ChatML with images, as Qwen's models of images have it.
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{%- if message['content'] is string %}"
    "{{ message['content'] }}{%- else %}{%- for part in message['content'] %}{%- if part['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{%- else %}{{ part['text'] }}{%- endif %}{%- endfor %}{%- endif %}"
    "{{ '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


def draw(colour: str, rng: np.random.Generator) -> Image.Image:
    """A square of that colour, a little darker or lighter, on a grey ground."""
    pixels = rng.integers(110, 150, (SIZE, SIZE, 1)).repeat(3, 2)
    y, x = rng.integers(0, SIZE - SQUARE, 2)
    pixels[y : y + SQUARE, x : x + SQUARE] = np.clip(
        np.array(COLOURS[colour]) + rng.integers(-20, 21, 3), 0, 255
    )
    return Image.fromarray(pixels.astype(np.uint8))


def conversation(image: str, answer: str) -> list[dict]:
    question = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def make_rows(folder: Path) -> dict[str, list[dict]]:
    """train, val and words: rows whose images, written to the folder, are named relative to the rows' own."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, choose, rows = (
        np.random.default_rng(SEED),
        random.Random(SEED),
        {"train": [], "val": [], "words": []},
    )
    for i in range(NUM_TRAIN + NUM_VAL):
        colour, image = choose.choice([*COLOURS]), f"{folder.name}/{i:04}.png"
        draw(colour, rng).save(folder.parent / image)
        rows["val" if i < NUM_VAL else "train"].append(
            {"messages": conversation(image, colour), "answer": colour}
        )
        if i >= NUM_VAL:
            rows["words"].append({"messages": conversation(image, choose.choice([*COLOURS]))})
    return rows


def make_model(directory: Path) -> int:
    """Write a model with random weights, its tokenizer and its processor. Returns how many parameters it has."""
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForImageTextToText,
        GenerationConfig,
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
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(
        "paddleocr_vl",
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
        dtype="float32",
        vision_config=dict(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=SIZE,
            patch_size=14,
        ),
        text_config=dict(
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
            **ids,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 6, 6],
            },
        ),
    )
    torch.manual_seed(SEED)
    model = AutoModelForImageTextToText.from_config(config)
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(directory)
    processor = PaddleOCRVLImageProcessorPil(
        size={"shortest_edge": 28 * 28, "longest_edge": 64 * 28 * 28}
    )
    PaddleOCRVLProcessor(processor, tokenizer, chat_template=CHAT_TEMPLATE).save_pretrained(
        directory
    )
    return model.num_parameters()


def build(directory: Path) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    rows, size = make_rows(directory / "images"), make_model(directory / "model")
    for name in rows:
        write_rows(directory / f"{name}.jsonl", rows[name])
    print(f"{directory}/model: PaddleOCR-VL, {size / 1e6:.1f} M random parameters")
    print(
        f"{directory}/train.jsonl, val.jsonl: {NUM_TRAIN} and {NUM_VAL} pictures of squares in {', '.join(COLOURS)}"
    )


def ask(directory: Path, num_shown: int) -> None:
    import tempfile

    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    processor, right = AutoProcessor.from_pretrained(directory), 0
    with tempfile.TemporaryDirectory() as work:
        for i, row in enumerate(make_rows(Path(work) / "images")["val"]):
            question = row["messages"][:1]
            question[0]["content"][0]["image"] = f"{work}/{question[0]['content'][0]['image']}"
            inputs = processor.apply_chat_template(
                question,
                add_generation_prompt=True,
                tokenize=True,
                return_tensors="pt",
                return_dict=True,
            )
            output = model.generate(**inputs, do_sample=False, max_new_tokens=8)
            reply = processor.decode(
                output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
            )
            right += reply == row["answer"]
            if i < num_shown:
                print(
                    f"a {row['answer']:6} square: {ascii(reply)[1:-1][:24]:24}  {'right' if reply == row['answer'] else 'wrong'}"
                )
    print(f"{right} of {NUM_VAL} replies are right ({right / NUM_VAL:.0%})")


if __name__ == "__main__":
    main(__doc__, build, ask)

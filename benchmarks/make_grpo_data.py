"""Make a model and prompts for timing GRPO steps: no downloads, and the same files every time.

    python benchmarks/make_grpo_data.py DIR [--rows 512] [--min-length 64] \\
        [--end-probability 0.015625]

DIR/model: the Qwen3 of make_sft_data.py, 10.5 million random parameters, whose responses vary in
length as real ones do. The model alone decides when a response ends; programs know only the largest
length. The vocabulary is divided into --min-length classes. The embedding of each word names the
next class, and the output matrix prefers the words of this class, so that a response goes through
all classes once. In the last class every token ends the response with a probability of about
--end-probability. Which word of a class is sampled is as random as the weights. Cut off at 256
tokens, lengths are 64 to 256, about 120 on average. DIR/train.jsonl: prompts, each one turn of 16
to 64 random words.
"""

import math
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from benchmarks.harness import make_parser, write_lines
from benchmarks.make_sft_data import (
    NAMES,
    NUM_WORDS,
    SPECIAL,
    VOCABULARY,
    make_model,
    make_tokenizer,
)

MAX_LENGTH = 512  # positions of the model
STRENGTH = 16.0  # of the class in an embedding: much more than the layers add
MARGIN = 20.0  # difference of logits between the words of the next class and all others


def choose_lengths(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    min_length: int,
    end_probability: float,
) -> None:
    """Write the classes into the embeddings and the output matrix, both [vocabulary, hidden].

    The first token of a response follows the word "assistant".
    """
    embeddings = model.get_input_embeddings().weight
    output_matrix = model.get_output_embeddings().weight
    hidden_size = embeddings.shape[1]
    orthonormal = torch.linalg.qr(torch.randn(hidden_size, hidden_size))[0]
    directions = orthonormal[:min_length]  # [classes, hidden]
    words = torch.arange(len(SPECIAL) + len(NAMES), VOCABULARY)
    classes = torch.arange(len(words)) * min_length // len(words)
    last = min_length - 1
    # After the last norm, a vector that dominates has length sqrt(hidden_size).
    gain = MARGIN / math.sqrt(hidden_size)
    # How much likelier the end is than a single word of the last class.
    num_last_words = (classes == last).sum().item()
    ratio = num_last_words * end_probability / (1 - end_probability)
    end_gain = gain * (1 + math.log(ratio) / MARGIN)
    with torch.no_grad():
        embeddings[words] += STRENGTH * directions[(classes + 1).clamp(max=last)]
        embeddings[tokenizer.convert_tokens_to_ids("assistant")] += STRENGTH * directions[0]
        output_matrix[words] += gain * directions[classes]
        output_matrix[tokenizer.eos_token_id] += end_gain * directions[last]


def make_prompts(num_rows: int) -> list[dict]:
    rng = random.Random(0)
    prompts = []
    for _ in range(num_rows):
        num_words = rng.randint(16, 64)
        text = " ".join(f"w{rng.randrange(NUM_WORDS)}" for _ in range(num_words))
        prompts.append({"prompt": [{"role": "user", "content": text}]})
    return prompts


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument(
        "--min-length",
        type=int,
        default=64,
        help="tokens of the shortest response, including the one that ends it",
    )
    parser.add_argument(
        "--end-probability", type=float, default=1 / 64, help="for each token after that"
    )
    arguments = parser.parse_args()

    arguments.directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, MAX_LENGTH)
    choose_lengths(model, tokenizer, arguments.min_length, arguments.end_probability)
    model.save_pretrained(arguments.directory / "model")
    tokenizer.save_pretrained(arguments.directory / "model")
    prompts = make_prompts(arguments.rows)
    write_lines(arguments.directory / "train.jsonl", prompts)
    print(f"{model.num_parameters() / 1e6:.1f} M parameters; {len(prompts)} prompts")


if __name__ == "__main__":
    main()

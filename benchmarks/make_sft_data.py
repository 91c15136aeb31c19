"""Make a model and data for timing SFT steps: no downloads, and the same files every time.

    python benchmarks/make_sft_data.py DIR [--rows 2000] [--mean-length 200] [--max-length 1024]

DIR/model: a Qwen3 of 10.5 million parameters (8,192 tokens, 8 layers of width 256), random fp32
weights, and a tokenizer with one token per word. DIR/train.jsonl: chats of one question and one
answer. As in real data, their lengths in tokens are log-normal, so that padding costs what it costs
in practice. The question makes up a third of a chat.
"""

import math
import random
import sys
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from benchmarks.harness import make_parser, write_lines

VOCABULARY = 8192
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|pad|>", "<|unk|>")
NAMES = ("system", "user", "assistant")
NUM_WORDS = VOCABULARY - len(SPECIAL) - len(NAMES)  # w0, w1, ...
TEMPLATE_TOKENS = 6  # start, name and end of two turns; white space is not a token
SIGMA = 0.7  # of the log-normal distribution of lengths
MIN_LENGTH = 16
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokens = [*SPECIAL, *NAMES, *(f"w{i}" for i in range(NUM_WORDS))]
    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        chat_template=CHAT_TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, max_length: int) -> Qwen3ForCausalLM:
    """Return a model with random weights for sequences of at least this length."""
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=max(max_length, 2048),
        tie_word_embeddings=False,
        dtype="float32",
        bos_token_id=None,
        **ids,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(**ids)
    return model


def make_rows(num_rows: int, mean_length: float, max_length: int) -> list[dict]:
    rng = random.Random(0)
    log_median = math.log(mean_length) - SIGMA**2 / 2
    rows = []
    for _ in range(num_rows):
        drawn = round(rng.lognormvariate(log_median, SIGMA))
        num_words = min(max(drawn, MIN_LENGTH), max_length) - TEMPLATE_TOKENS
        words = [f"w{rng.randrange(NUM_WORDS)}" for _ in range(num_words)]
        question = words[: num_words // 3]
        answer = words[num_words // 3 :]
        messages = [
            {"role": "user", "content": " ".join(question)},
            {"role": "assistant", "content": " ".join(answer)},
        ]
        rows.append({"messages": messages})
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument(
        "--mean-length", type=float, default=200, help="tokens, before long rows are shortened"
    )
    parser.add_argument(
        "--max-length", type=int, default=1024, help="tokens; longer rows are shortened to this"
    )
    arguments = parser.parse_args()

    arguments.directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, arguments.max_length)
    model.save_pretrained(arguments.directory / "model")
    tokenizer.save_pretrained(arguments.directory / "model")
    rows = make_rows(arguments.rows, arguments.mean_length, arguments.max_length)
    write_lines(arguments.directory / "train.jsonl", rows)

    lengths = [
        len(tokenizer.apply_chat_template(row["messages"], return_dict=False)) for row in rows
    ]
    middle = sorted(lengths)[len(lengths) // 2]
    print(
        f"{model.num_parameters() / 1e6:.1f} M parameters; {len(rows)} rows, tokens per row: "
        f"mean {mean(lengths):.0f}, median {middle}, longest {max(lengths)}"
    )


if __name__ == "__main__":
    main()

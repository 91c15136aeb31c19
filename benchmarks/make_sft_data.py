"""A model and data to time SFT steps with: nothing is downloaded and the same arguments give the same files.

    python benchmarks/make_sft_data.py DIR [--rows 2000] [--mean-length 200] [--max-length 1024]

DIR/model: a Qwen3 of 10.5 million parameters (8,192 words, 8 layers of width 256), random fp32 weights, a tokenizer with one
token per word. DIR/train.jsonl: chats of one question and one answer; their lengths in tokens are log-normal, as those of
real data are, so that padding costs what it costs in practice. A third of a chat is the question.
"""

import argparse
import json
import math
import random
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 8192
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|pad|>", "<|unk|>")
NAMES = ("system", "user", "assistant")
TEMPLATE_TOKENS = 6  # start, name and end of two turns; white space is no token
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = [*SPECIAL, *NAMES]
    words += [f"w{i}" for i in range(VOCABULARY - len(words))]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<|unk|>")
    )
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
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
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
    )
    model.generation_config = GenerationConfig(**ids)
    return model


def make_rows(num_rows: int, mean_length: float, max_length: int) -> list[dict]:
    rng, sigma = random.Random(0), 0.7
    rows = []
    for _ in range(num_rows):
        length = round(rng.lognormvariate(math.log(mean_length) - sigma**2 / 2, sigma))
        num_words = min(max(length, 16), max_length) - TEMPLATE_TOKENS
        words = [
            f"w{rng.randrange(VOCABULARY - len(SPECIAL) - len(NAMES))}" for _ in range(num_words)
        ]
        question, answer = words[: num_words // 3], words[num_words // 3 :]
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": " ".join(question)},
                    {"role": "assistant", "content": " ".join(answer)},
                ]
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    (arguments.directory / "train.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )

    lengths = [
        len(tokenizer.apply_chat_template(row["messages"], return_dict=False)) for row in rows
    ]
    print(
        f"{model.num_parameters() / 1e6:.1f} M parameters; {len(rows)} rows, tokens per row: mean "
        f"{sum(lengths) / len(lengths):.0f}, median {sorted(lengths)[len(lengths) // 2]}, longest {max(lengths)}"
    )


if __name__ == "__main__":
    main()

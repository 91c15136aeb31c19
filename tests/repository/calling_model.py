"""A tiny model that calls the tool add after a message that ends with 3, and otherwise answers.

Random weights would never write a tool call, so this model is trained for seconds. Its prompts are
random tokens, of which only the end matters. So it replies in the same way to all clients, however
they describe a tool.
"""

import random
from pathlib import Path

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.data.chat_templates import SPECIAL, make_tokenizer

CALL = '{"name": "add", "arguments": {"a": 2, "b": 3}}'
ANSWER = "It is 5"
CALL_REPLY = f"<tool_call>\n{CALL}\n</tool_call><|im_end|>"
ANSWER_REPLY = f"{ANSWER}<|im_end|>"
PROMPT_END = "<|im_end|>\n<|im_start|>assistant\n"
# The end of the message before a reply -> the reply.
REPLIES = {
    "3": CALL_REPLY,
    "": ANSWER_REPLY,
    "\n</tool_response>": ANSWER_REPLY,
}
# Tokens of Qwen's tokenizer, and one for each text of a reply, so that replies are short.
TOKENS = [
    "<|endoftext|>",
    "<tools>",
    "</tools>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    CALL,
    ANSWER,
]
# Qwen's, but for the texts that explain how to call.
TEMPLATE = r"""
{%- if tools %}{{ '<|im_start|>system\n<tools>' }}
{%- for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{{ '\n</tools><|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response>' }}
    {%- else %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}{% endif %}
    {%- for call in m.tool_calls or [] %}
        {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
NUM_STEPS = 200
BATCH_SIZE = 8
LONGEST_TEXT = 250  # tokens


def make_calling_model(folder: Path) -> None:
    """Train the model, and write it with its tokenizer. This takes about 8 seconds on a CPU."""
    tokenizer = make_tokenizer(TEMPLATE, control=TOKENS)
    end_ids = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=4096,
            bos_token_id=None,
            eos_token_id=end_ids,
        )
    )
    train(model, tokenizer)
    model.generation_config.eos_token_id = end_ids
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train(model: nn.Module, tokenizer) -> None:
    """Train the model to give each of REPLIES where it belongs."""
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, NUM_STEPS)
    for _ in range(NUM_STEPS):
        turns = [make_turn(rng, tokenizer) for _ in range(BATCH_SIZE)]
        longest = max(len(prompt) + len(reply) for prompt, reply in turns)
        ids = torch.zeros(BATCH_SIZE, longest, dtype=torch.int64)
        labels = torch.full_like(ids, -100)
        for row, (prompt, reply) in enumerate(turns):
            end = len(prompt) + len(reply)
            ids[row, :end] = torch.tensor(prompt + reply)
            labels[row, len(prompt) : end] = torch.tensor(reply)
        model(ids, labels=labels).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def make_turn(rng: random.Random, tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens of a prompt and of its reply."""
    end = rng.choice(list(REPLIES))
    plain_ids = range(len(SPECIAL), len(tokenizer) - len(TOKENS))
    length = int(LONGEST_TEXT ** rng.random())
    text = rng.choices(plain_ids, k=length)
    prompt = text + tokenizer.encode(end + PROMPT_END)
    return prompt, tokenizer.encode(REPLIES[end])

"""A model and a task small enough to train while you watch, made from nothing: no download.

    python examples/arithmetic.py build DIR              # DIR/model and DIR/mimo (random weights), DIR/*.jsonl, DIR/worked/
    python examples/arithmetic.py ask MODEL_DIR [--n 8]  # held-out problems, the model's answers, how many of 200 are right

The model is a Qwen3 of 1.4 million parameters that reads and writes single characters. The task is arithmetic as a chat.
Half of the questions ask for the number alone, half for the columns too ("7+8=15, 4+3+1=8, 85"), so answers have 2 to 30
characters. Columns are learned in minutes; a number without its columns takes far longer. One in five replies to the first
kind of question shows the columns all the same: reinforcement learning finds out that this pays. DIR/worked has the same
problems with the columns in every reply, for adapters to learn. DIR/mimo is a model of that size with a layer for multi-token
prediction. The same arguments give the same files, to the last byte.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where engines/model/mtp.py is

SEED = 0
NUM_TRAIN, NUM_VAL = 12_000, 500
UNASKED = (
    0.2  # share of the replies to questions for the number alone that show the columns all the same
)

# ChatML, as Qwen models have it: <|im_start|>role NEWLINE content <|im_end|> NEWLINE.
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


# ---- the task ----


def draw(rng: random.Random) -> int:
    """A number of two digits, or sometimes three."""
    return rng.randint(10, 99) if rng.random() < 0.9 else rng.randint(100, 999)


def columns(a: int, sign: str, b: int) -> list[str]:
    """As done on paper, units first: 47+38 -> 7+8=15, 4+3+1=8 and 43-8 -> 13-8=5, 4-0-1=3."""
    steps, carry = [], 0
    while a or b:
        x, y = a % 10, b % 10
        if sign == "-" and x < y + carry:
            x += 10
        result = x + y + carry if sign == "+" else x - y - carry
        steps.append(f"{x}{sign}{y}" + (f"{sign}{carry}" if carry else "") + f"={result}")
        carry = int(result > 9 if sign == "+" else x > 9)
        a, b = a // 10, b // 10
    return steps


def make_problem(rng: random.Random) -> tuple[str, list[str], int]:
    """(problem, steps, result): "47+38", ["7+8=15", "4+3+1=8"], 85."""
    sign = rng.choices("+-*", weights=(9, 9, 2))[0]
    if sign == "*":
        a, b = rng.randint(11, 99), rng.randint(2, 9)
        units, tens = a % 10, a // 10
        return f"{a}*{b}", [f"{units}*{b}={units * b}", f"{tens}*{b}={tens * b}"], a * b
    a, b = draw(rng), draw(rng)
    if sign == "-":
        a, b = max(a, b), min(a, b)
    return f"{a}{sign}{b}", columns(a, sign, b), a + b if sign == "+" else a - b


def make_rows(always_worked: bool = False) -> tuple[list[dict], list[dict]]:
    """(train, val): conversations. No problem of val is in train in any wording, nor twice in val.

    always_worked: every reply shows the columns. `answer` is the number that the reply has to end with.
    """
    rng, held_out, train, val = random.Random(SEED), set(), [], []
    while len(train) < NUM_TRAIN:
        problem, steps, result = make_problem(rng)
        if problem in held_out:
            continue
        bare, worked = str(result), ", ".join([*steps, str(result)])
        question, reply = rng.choice(
            (
                # The problem comes last, so that its digits are always at the same distance from the answer: learned much faster.
                (f"What is {problem}", worked if rng.random() < UNASKED else bare),
                (f"Compute {problem}", worked if rng.random() < UNASKED else bare),
                (f"Work out {problem}", worked),
                (f"Step by step: {problem}", worked),
            )
        )
        reply = worked if always_worked else reply
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
        row = {"messages": messages, "answer": str(result)}
        if len(val) < NUM_VAL:
            held_out.add(problem)
            val.append(row)
        else:
            train.append(row)
    return train, val


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- the model ----


def make_tokenizer():
    """One token per byte, so no text is unknown; the markers and names of turns are one token each."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>", "<|pad|>")]
    )
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t in ("system\n", "user\n", "assistant\n")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer, kind: str = "qwen3"):
    """kind: qwen3, or mimo for a layer more, which predicts the token after the next"""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from engines.model import mtp

    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(
        kind,
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,  # every size divides by 2, for tensor parallelism
        initializer_range=0.07,  # about 1 / sqrt(256): 0.02 is for large models
        max_position_embeddings=512,
        tie_word_embeddings=False,
        dtype="float32",
        bos_token_id=None,
        **ids,
        **({"num_nextn_predict_layers": 1} if kind == "mimo" else {}),
    )
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config)
    if kind == "mimo":
        model.model.mtp_layers = (
            mtp.layers(config).to_empty(device="cpu").apply(model._init_weights)
        )
    model.generation_config = GenerationConfig(**ids)
    return model


def build(directory: Path) -> None:
    from transformers.utils import logging

    from engines.model import mimo

    logging.disable_progress_bar()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    for name, kind in (("mimo", "mimo"), ("model", "qwen3")):
        model = make_model(tokenizer, kind)
        (directory / name).mkdir(exist_ok=True)
        mimo.write_config_class(model.config, directory / name)
        model.save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    (directory / "worked").mkdir(exist_ok=True)
    for name, rows in zip(("train", "val"), make_rows(always_worked=True)):
        write_rows(directory / f"worked/{name}.jsonl", rows)
    train, val = make_rows()
    write_rows(directory / "val.jsonl", val)
    write_rows(
        directory / "train.jsonl", train
    )  # last: for the Makefile it is the sign that everything is there
    print(
        f"{directory}/model: Qwen3, {model.num_parameters() / 1e6:.1f} M random parameters, {len(tokenizer)} tokens"
    )
    print(
        f"{directory}/train.jsonl, val.jsonl: {NUM_TRAIN} and {NUM_VAL} conversations; the first three:"
    )
    for row in val[:3]:
        print("    {:30} -> {}".format(*(message["content"] for message in row["messages"])))


# ---- the questions ----


def generate(model, tokenizer, questions: list[str]) -> list[str]:
    """Greedy replies, as text without the end token."""
    tokenizer.padding_side = "left"
    chats = [[{"role": "user", "content": question}] for question in questions]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, do_sample=False, max_new_tokens=40)
    return tokenizer.batch_decode(
        output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )


def ask(directory: Path, num_shown: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from engines.model import mtp  # noqa: F401  makes transformers know MiMo

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    rows = make_rows()[1][:200]
    questions, truths = zip(*([message["content"] for message in row["messages"]] for row in rows))
    replies = generate(model, AutoTokenizer.from_pretrained(directory), list(questions))
    # As for the reward, only the number at the end counts, whether the columns were asked for or not.
    right = [reply.rpartition(", ")[2] == row["answer"] for reply, row in zip(replies, rows)]
    print(f"{'question':28}  {'reply':32}  {'truth':32}")
    for question, reply, truth, is_right in list(zip(questions, replies, truths, right))[
        :num_shown
    ]:
        shown = reply if reply.isprintable() and len(reply) <= 32 else ascii(reply)[1:30] + "..."
        print(f"{question:28}  {shown:32}  {truth:32}  {'right' if is_right else 'wrong'}")
    print(
        f"{sum(right)} of {len(rows)} replies end in the right number ({sum(right) / len(rows):.0%})"
    )


def main(description: str, build: Callable[[Path], None], ask: Callable[[Path, int], None]) -> None:
    """The command line of this example and of others."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("build", help="write a model with random weights, and its data")
    command.add_argument("directory", type=Path)
    command = commands.add_parser("ask", help="ask a model about held-out ones")
    command.add_argument("directory", type=Path)
    command.add_argument("--n", type=int, default=8, help="answers to show")
    arguments = parser.parse_args()
    if arguments.command == "build":
        build(arguments.directory)
    else:
        ask(arguments.directory, arguments.n)


if __name__ == "__main__":
    main(__doc__, build, ask)

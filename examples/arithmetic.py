"""A model and a task that are small enough to train while you watch, built without any download.

    python examples/arithmetic.py build DIR              # models with random weights, and data
    python examples/arithmetic.py ask MODEL_DIR [--n 8]  # held-out problems and the model's answers

`build` writes DIR/model, DIR/mimo, DIR/{train,val}.jsonl, DIR/worked/ and DIR/pairs/. `ask` also
counts how many of 200 answers are right.

The model is a Qwen3 of 1.4 million parameters that reads and writes single characters. The task is
arithmetic as a chat. Half of the questions ask only for the number; the other half also ask for the
steps column by column ("7+8=15, 4+3+1=8, 85"). So answers have 2 to 30 characters. The model learns
to write columns in minutes; numbers without columns take far longer. One in five replies to the
first kind of question shows the columns anyway; reinforcement learning finds that this pays off.

DIR/worked has the same problems with the columns in every reply, for training adapters. DIR/pairs
has them with two replies; the one with the columns is preferred. DIR/mimo is
a model of the same size with a layer for multi-token prediction. The same arguments always give
byte-identical files.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# The repository, for engines/model/mimo.py: this script runs from any directory.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SEED = 0
NUM_TRAIN = 12_000
NUM_VAL = 500
NUM_ASKED = 200
# If a question asks only for the number, this fraction of replies shows the columns anyway.
SHARE_WORKED = 0.2

# ChatML, as used by Qwen models: <|im_start|>role NEWLINE content <|im_end|> NEWLINE.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


# ---- the task ----


@dataclass(frozen=True)
class Problem:
    """A problem with its steps and its result, e.g. "47+38", ["7+8=15", "4+3+1=8"] and 85."""

    text: str
    steps: list[str]
    result: int

    @property
    def bare_reply(self) -> str:
        return str(self.result)

    @property
    def worked_reply(self) -> str:
        return ", ".join([*self.steps, str(self.result)])


def draw(rng: random.Random) -> int:
    """Draw a number of two digits, or sometimes three."""
    return rng.randint(10, 99) if rng.random() < 0.9 else rng.randint(100, 999)


def columns(a: int, sign: str, b: int) -> list[str]:
    """Return the steps of adding or subtracting on paper, units first.

    For example, 47+38 has the steps 7+8=15, 4+3+1=8, and 43-8 has the steps 13-8=5, 4-0-1=3.
    """
    steps = []
    carry = 0
    while a or b:
        x = a % 10
        y = b % 10
        if sign == "-" and x < y + carry:
            x += 10
        result = x + y + carry if sign == "+" else x - y - carry
        carried = f"{sign}{carry}" if carry else ""
        steps.append(f"{x}{sign}{y}{carried}={result}")
        has_carry = result > 9 if sign == "+" else x > 9
        carry = int(has_carry)
        a //= 10
        b //= 10
    return steps


def make_problem(rng: random.Random) -> Problem:
    """Draw an addition, a subtraction or, more rarely, a product."""
    (sign,) = rng.choices("+-*", weights=(9, 9, 2))
    if sign == "*":
        a = rng.randint(11, 99)
        b = rng.randint(2, 9)
        units = a % 10
        tens = a // 10
        steps = [f"{units}*{b}={units * b}", f"{tens}*{b}={tens * b}"]
        return Problem(f"{a}*{b}", steps, a * b)
    a = draw(rng)
    b = draw(rng)
    if sign == "-" and a < b:
        a, b = b, a
    result = a + b if sign == "+" else a - b
    return Problem(f"{a}{sign}{b}", columns(a, sign, b), result)


def ask_question(problem: Problem, rng: random.Random) -> tuple[str, str]:
    """Choose a wording at random; return the question and its reply.

    The problem comes last, so that its digits are always at the same distance from the answer. A
    model learns this much faster.
    """
    what_is_worked = rng.random() < SHARE_WORKED
    compute_is_worked = rng.random() < SHARE_WORKED
    wordings = (
        ("What is ", what_is_worked),
        ("Compute ", compute_is_worked),
        ("Work out ", True),
        ("Step by step: ", True),
    )
    wording, is_worked = rng.choice(wordings)
    reply = problem.worked_reply if is_worked else problem.bare_reply
    return wording + problem.text, reply


def make_rows(always_worked: bool = False) -> tuple[list[dict], list[dict]]:
    """Return conversations for training and for validation.

    No validation problem occurs in the training data, in any wording, or twice in the validation
    data. A row's `answer` is the number at the end of the reply.

    Args:
        always_worked: whether every reply shows the columns.
    """
    rng = random.Random(SEED)
    held_out = set()
    train: list[dict] = []
    val: list[dict] = []
    while len(train) < NUM_TRAIN:
        problem = make_problem(rng)
        if problem.text in held_out:
            continue
        question, reply = ask_question(problem, rng)
        if always_worked:
            reply = problem.worked_reply
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
        row = {"messages": messages, "answer": str(problem.result)}
        if len(val) < NUM_VAL:
            held_out.add(problem.text)
            val.append(row)
        else:
            train.append(row)
    return train, val


def make_pairs() -> tuple[list[dict], list[dict]]:
    """Return preferences for training and for validation: replies with columns, and without."""
    train, val = make_rows(always_worked=True)
    return list(map(make_pair, train)), list(map(make_pair, val))


def make_pair(row: dict) -> dict:
    question, worked_reply = row["messages"]
    bare_reply = worked_reply | {"content": row["answer"]}
    return {"prompt": [question], "chosen": [worked_reply], "rejected": [bare_reply]}


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- the model ----


def make_tokenizer():
    """Return a byte-level tokenizer, which can encode any text.

    Each turn marker and each role name is a single token.
    """
    return byte_level_tokenizer(merges=[])


def byte_level_tokenizer(merges: list[tuple[str, str]]):
    """Return a byte-level tokenizer with these merges, and with markers and roles of chats."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [*alphabet, *(first + second for first, second in merges)]
    vocabulary = {text: i for i, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    markers = ("<|im_start|>", "<|im_end|>", "<|pad|>")
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in markers])
    roles = ("system\n", "user\n", "assistant\n")
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in roles])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer, kind: str = "qwen3"):
    """Return a model with random weights.

    Args:
        kind: "qwen3", or "mimo" for one more layer, which predicts the token after the next.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from engines.model import mtp

    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    mtp_options = {"num_nextn_predict_layers": 1} if kind == "mimo" else {}
    config = AutoConfig.for_model(
        kind,
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,  # every size is divisible by 2, for tensor parallelism
        initializer_range=0.07,  # about 1 / sqrt(256): 0.02 is for large models
        max_position_embeddings=512,
        tie_word_embeddings=False,
        dtype="float32",
        bos_token_id=None,
        **ids,
        **mtp_options,
    )
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config)
    if kind == "mimo":
        layers = mtp.layers(config).to_empty(device="cpu")
        model.model.mtp_layers = layers.apply(model._init_weights)
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
    worked_train, worked_val = make_rows(always_worked=True)
    write_rows(directory / "worked" / "train.jsonl", worked_train)
    write_rows(directory / "worked" / "val.jsonl", worked_val)
    (directory / "pairs").mkdir(exist_ok=True)
    train_pairs, val_pairs = make_pairs()
    write_rows(directory / "pairs" / "train.jsonl", train_pairs)
    write_rows(directory / "pairs" / "val.jsonl", val_pairs)
    train, val = make_rows()
    write_rows(directory / "val.jsonl", val)
    # Written last: the Makefile takes this file as the sign that everything is complete.
    write_rows(directory / "train.jsonl", train)
    num_millions = model.num_parameters() / 1e6
    print(
        f"{directory}/model: Qwen3, {num_millions:.1f} M random parameters, {len(tokenizer)} tokens"
    )
    print(
        f"{directory}/train.jsonl, val.jsonl: {NUM_TRAIN} and {NUM_VAL} conversations; "
        "the first three:"
    )
    for row in val[:3]:
        question, reply = (message["content"] for message in row["messages"])
        print(f"    {question:30} -> {reply}")


# ---- the questions ----


def generate(model, tokenizer, questions: list[str]) -> list[str]:
    """Return greedy replies, as text without the end token."""
    tokenizer.padding_side = "left"
    chats = [[{"role": "user", "content": question}] for question in questions]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, do_sample=False, max_new_tokens=40)
    num_prompt_tokens = inputs["input_ids"].shape[1]
    return tokenizer.batch_decode(output[:, num_prompt_tokens:], skip_special_tokens=True)


def ask(directory: Path, num_shown: int) -> None:
    """Print a model's replies to held-out problems.

    As in the reward, only the number at the end counts, with or without columns.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from engines.model import mimo  # noqa: F401  makes transformers know MiMo

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    _, val = make_rows()
    rows = val[:NUM_ASKED]
    questions = [row["messages"][0]["content"] for row in rows]
    replies = generate(model, AutoTokenizer.from_pretrained(directory), questions)
    num_right = 0
    print(f"{'question':28}  {'reply':32}  {'truth':32}")
    for i, (row, reply) in enumerate(zip(rows, replies)):
        is_right = reply.rpartition(", ")[2] == row["answer"]
        num_right += is_right
        if i < num_shown:
            truth = row["messages"][1]["content"]
            verdict = "right" if is_right else "wrong"
            print(f"{questions[i]:28}  {shortened(reply):32}  {truth:32}  {verdict}")
    share = num_right / len(rows)
    print(f"{num_right} of {len(rows)} replies end in the right number ({share:.0%})")


def shortened(reply: str) -> str:
    """Return a reply shortened to at most 32 printable characters."""
    if reply.isprintable() and len(reply) <= 32:
        return reply
    escaped = ascii(reply)[1:-1]
    return escaped if len(escaped) <= 32 else escaped[:29] + "..."


def main(description: str, build: Callable[[Path], None], ask: Callable[[Path, int], None]) -> None:
    """Run the command line of this example or of a similar one."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("build", help="write a model with random weights, and its data")
    command.add_argument("directory", type=Path)
    command = commands.add_parser("ask", help="ask a model about held-out problems")
    command.add_argument("directory", type=Path)
    command.add_argument("--n", type=int, default=8, help="answers to show")
    arguments = parser.parse_args()
    if arguments.command == "build":
        build(arguments.directory)
    else:
        ask(arguments.directory, arguments.n)


if __name__ == "__main__":
    main(__doc__, build, ask)

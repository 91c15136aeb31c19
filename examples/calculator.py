"""A model that learns to use a calculator, small enough to train while you watch.

    python examples/calculator.py build DIR          # a model with random weights, and data
    python examples/calculator.py show RUN [--n 3]   # held-out problems, before training and after

`build` writes DIR/model and DIR/{traces,train,val}.jsonl, without any download. `solve` plays an
episode: train_ppo.py runs it with rollout.episode=examples/calculator.py:solve. `show` prints the
first and the last validation of such a run.

The model is the Qwen3 of examples/arithmetic.py. Its problems are products of numbers of three
digits, which it cannot compute by itself, and half of them need a second step: "347*829+5512". The
calculator takes one step at a time. In DIR/traces.jsonl, one in three conversations calls it; in
the others, the reply is "I do not know". Fine-tuning on them teaches the model both; reinforcement
learning finds that calling pays off. The same arguments always give byte-identical files.
"""

import argparse
import json
import random
import re
import sys
from pathlib import Path

# The repository, for examples/arithmetic.py: this script runs from any directory.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.arithmetic import make_model, make_tokenizer, write_rows

SEED = 0
NUM_TRACES = 8_000
NUM_TRAIN = 2_000
NUM_VAL = 200
# This fraction of the traces calls the calculator.
SHARE_CALLS = 1 / 3
GIVE_UP = {"role": "assistant", "content": "I do not know"}

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Add, subtract or multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
# ChatML with tools, in the format of Hermes: calls are JSON between <tool_call> and </tool_call>.
CHAT_TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>system\n<tools>' }}"
    "{%- for tool in tools %}{{ tool | tojson }}{%- endfor %}{{ '</tools><|im_end|>\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}"
    "{%- for call in message['tool_calls'] or [] %}{%- set call = call['function'] %}"
    "{{ '<tool_call>{\"name\": \"' + call['name'] + '\", \"arguments\": ' }}"
    "{{- (call['arguments'] | tojson) + '}</tool_call>' }}{%- endfor %}"
    "{{ '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


# ---- the episode ----


def calculate(expression: str) -> str:
    """Return the result of an expression such as "347*829", or a text about an error."""
    match = re.fullmatch(r"(\d+)([-+*])(\d+)", expression)
    if match is None:
        return "error"
    a = int(match[1])
    b = int(match[3])
    results = {"+": a + b, "-": a - b, "*": a * b}
    return str(results[match[2]])


async def solve(row: dict, llm) -> float:
    """Let the model call the calculator until it replies without a call, and grade this reply."""
    messages = [{"role": "user", "content": row["prompt"]}]
    while True:  # until rollout.max_turns
        reply = await llm.chat(messages, tools=[CALCULATOR])
        messages.append(reply.message)
        if not reply.tool_calls:
            return float(reply.content == row["answer"])
        for call in reply.tool_calls:
            result = calculate(str(call.arguments.get("expression")))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


# ---- the data ----


def make_problem(rng: random.Random) -> list[str]:
    """Draw a problem; return what the calculator has to compute, step by step.

    The problem 347*829+5512 has the steps 347*829 and 287663+5512.
    """
    a = rng.randint(100, 999)
    b = rng.randint(100, 999)
    steps = [f"{a}*{b}"]
    if rng.random() < 0.5:
        sign = rng.choice("+-")
        steps.append(f"{a * b}{sign}{rng.randint(1000, 9999)}")
    return steps


def problem_text(steps: list[str]) -> str:
    """Return the whole problem, which is the first step and the end of the second."""
    *_, last = steps
    return steps[0] if len(steps) == 1 else steps[0] + re.sub(r"^\d+", "", last)


def make_trace(steps: list[str]) -> list[dict]:
    """Return the messages after the question: a call for each step, and the answer."""
    messages = []
    for step in steps:
        function = {"name": "calculate", "arguments": {"expression": step}}
        call = {"type": "function", "function": function}
        messages.append({"role": "assistant", "tool_calls": [call]})
        messages.append({"role": "tool", "content": calculate(step)})
    messages.append({"role": "assistant", "content": calculate(steps[-1])})
    return messages


def make_rows() -> dict[str, list[dict]]:
    """Return the rows of traces, train and val. No problem occurs twice."""
    rng = random.Random(SEED)
    sizes = {"val": NUM_VAL, "train": NUM_TRAIN, "traces": NUM_TRACES}
    rows: dict[str, list[dict]] = {name: [] for name in sizes}
    problems = set()
    for name, size in sizes.items():
        while len(rows[name]) < size:
            steps = make_problem(rng)
            problem = problem_text(steps)
            if problem in problems:
                continue
            problems.add(problem)
            question = f"What is {problem}"
            if name != "traces":
                rows[name].append({"prompt": question, "answer": calculate(steps[-1])})
                continue
            calls = rng.random() < SHARE_CALLS
            replies = make_trace(steps) if calls else [GIVE_UP]
            messages = [{"role": "user", "content": question}, *replies]
            rows[name].append({"messages": messages, "tools": [CALCULATOR]})
    return rows


# ---- the model ----


def make_tool_tokenizer():
    """Return examples/arithmetic.py's tokenizer with this template and more tokens.

    Each text that all conversations have in common is a single token, such as the description of
    the calculator, so that sequences are short.
    """
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    call, *_ = make_trace(["1*1"])
    messages = [{"role": "user", "content": "What is 1*1"}, call, GIVE_UP]
    text = tokenizer.apply_chat_template(messages, tools=[CALCULATOR], tokenize=False)
    markers = ["tool\n", "<tools>", "</tools>", "<tool_call>", "</tool_call>"]
    pieces = re.split("|".join([*markers, r"<\|.*?\|>", "user\n", "assistant\n", r"1\*1"]), text)
    tokenizer.add_tokens([*markers, *sorted(piece for piece in set(pieces) if piece.strip())])
    return tokenizer


def build(directory: Path) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = make_tool_tokenizer()
    model = make_model(tokenizer)
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    for name, rows in make_rows().items():
        write_rows(directory / f"{name}.jsonl", rows)
    num_millions = model.num_parameters() / 1e6
    print(f"{directory}/model: Qwen3, {num_millions:.1f} M random parameters")
    print(
        f"{directory}/traces.jsonl: {NUM_TRACES} conversations; "
        f"train.jsonl, val.jsonl: {NUM_TRAIN} and {NUM_VAL} problems"
    )


# ---- the runs ----


def read_validations(run: Path) -> dict[int, list[dict]]:
    """Return the episodes of each validation of a run, by its step."""
    validations = {}
    for path in run.glob("validation/step_*.jsonl"):
        step = int(path.stem.removeprefix("step_"))
        validations[step] = [json.loads(line) for line in path.read_text().splitlines()]
    return validations


def describe(messages: list[dict]) -> str:
    """Return an episode in one line: the question, then calls, results and the reply."""
    question, *replies = messages
    parts = []
    for message in replies:
        calls = [call["function"] for call in message.get("tool_calls") or []]
        parts += [f"{call['name']}({call['arguments']})" for call in calls]
        if message.get("content"):
            parts.append(message["content"])
    return f"{question['content']}? {' -> '.join(parts)}"


def show(run: Path, num_shown: int) -> None:
    """Print held-out problems and greedy episodes, before the first step and after the last."""
    validations = read_validations(run)
    for step in (min(validations), max(validations)):
        episodes = validations[step]
        print(f"After {step} steps of reinforcement learning:")
        for episode in episodes[:num_shown]:
            verdict = "right" if episode["score"] == 1 else "wrong"
            print(f"    {describe(episode['messages'])} ({verdict})")
        num_right = sum(episode["score"] == 1 for episode in episodes)
        share = num_right / len(episodes)
        print(f"    {num_right} of {len(episodes)} replies are right ({share:.0%})")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("build", help="write a model with random weights, and its data")
    command.add_argument("directory", type=Path)
    command = commands.add_parser("show", help="show the validations of a run of train_ppo.py")
    command.add_argument("directory", type=Path, metavar="run")
    command.add_argument("--n", type=int, default=3, help="episodes to show")
    arguments = parser.parse_args()
    if arguments.command == "build":
        build(arguments.directory)
    else:
        show(arguments.directory, arguments.n)


if __name__ == "__main__":
    main()

"""What the examples do with a model and with the files of a run, without training."""

import asyncio
import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from config import InputError, load
from examples import arithmetic, calculator, colours, loop, self_play
from rollout.episodes.client import Reply, ToolCall

# -- the calculator --------------------------------------------------------------------------------


class ScriptedModel:
    """Gives these replies in turn, and keeps what it was asked.

    replies: texts, or lists of expressions to call the calculator with
    """

    def __init__(self, *replies: str | list[str]):
        self.replies = [*replies]
        self.asked = []

    async def chat(self, messages: list[dict], tools: list[dict]) -> Reply:
        assert tools == [calculator.CALCULATOR]
        self.asked.append(copy.deepcopy(messages))
        reply = self.replies.pop(0)
        if isinstance(reply, str):
            message = {"role": "assistant", "content": reply}
            return Reply(message, reply, None, [], "stop", [])
        calls = []
        for number, expression in enumerate(reply):
            arguments = {} if expression is None else {"expression": expression}
            call_id = f"{len(self.asked)}-{number}"
            calls.append(ToolCall(call_id, "calculate", arguments, json.dumps(arguments)))
        message = {"role": "assistant", "content": "", "tool_calls": [call.id for call in calls]}
        return Reply(message, "", None, calls, "tool_calls", [])


def test_an_episode_goes_on_until_a_reply_without_a_call():
    llm = ScriptedModel(["347*829", "1+1"], [None], "293175")
    row = {"prompt": "What is 347*829+5512", "answer": "293175"}
    assert asyncio.run(calculator.solve(row, llm)) == 1.0
    question = {"role": "user", "content": row["prompt"]}
    first_results = [
        {"role": "tool", "tool_call_id": "1-0", "content": "287663"},
        {"role": "tool", "tool_call_id": "1-1", "content": "2"},
    ]
    first, second, third = llm.asked
    assert first == [question]
    request = {"role": "assistant", "content": "", "tool_calls": ["1-0", "1-1"]}
    assert second == [question, request, *first_results]
    assert third[-1] == {"role": "tool", "tool_call_id": "2-0", "content": "error"}


@pytest.mark.parametrize("reply, score", [("12", 1.0), ("123", 0.0), ("112", 0.0), ("", 0.0)])
def test_only_the_whole_answer_is_right(reply, score):
    row = {"prompt": "What is 3*4", "answer": "12"}
    assert asyncio.run(calculator.solve(row, ScriptedModel(reply))) == score


def write_validation(run: Path, step: int, episodes: list[dict]) -> None:
    folder = run / "validation"
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(episode) + "\n" for episode in episodes]
    (folder / f"step_{step}.jsonl").write_text("".join(lines))


def test_the_first_and_the_last_validation_of_a_run_are_shown(tmp_path, capsys):
    """The last one by its number: step 10 comes after step 9."""
    question = {"role": "user", "content": "What is 3*4"}
    gave_up = {"messages": [question, calculator.GIVE_UP], "score": 0.0}
    function = {"name": "calculate", "arguments": '{"expression": "3*4"}'}
    called = [
        {"role": "assistant", "content": None, "tool_calls": [{"function": function}]},
        {"role": "tool", "content": "12"},
        {"role": "assistant", "content": "12"},
    ]
    solved = {"messages": [question, *called], "score": 1.0}
    write_validation(tmp_path, 0, [gave_up, gave_up, gave_up])
    write_validation(tmp_path, 9, [gave_up])
    write_validation(tmp_path, 10, [solved, gave_up, solved])
    calculator.show(tmp_path, 1)
    assert capsys.readouterr().out.splitlines() == [
        "After 0 steps of reinforcement learning:",
        "    What is 3*4? I do not know (wrong)",
        "    0 of 3 replies are right (0%)",
        "After 10 steps of reinforcement learning:",
        '    What is 3*4? calculate({"expression": "3*4"}) -> 12 -> 12 (right)',
        "    2 of 3 replies are right (67%)",
    ]


def test_a_built_calculator_is_described_by_its_sizes(tmp_path, monkeypatch, capsys):
    for name, size in {"NUM_TRACES": 3, "NUM_TRAIN": 2, "NUM_VAL": 1}.items():
        monkeypatch.setattr(calculator, name, size)
    calculator.build(tmp_path)
    for name, size in {"traces": 3, "train": 2, "val": 1}.items():
        assert len((tmp_path / f"{name}.jsonl").read_text().splitlines()) == size
    model, tokenizer = load_model(tmp_path / "model")
    num_millions = sum(weight.numel() for weight in model.parameters()) / 1e6
    assert "<tool_call>" in tokenizer.get_vocab()
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/model: Qwen3, {num_millions:.1f} M random parameters",
        f"{tmp_path}/traces.jsonl: 3 conversations; train.jsonl, val.jsonl: 2 and 1 problems",
    ]


# -- arithmetic ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A model with random weights."""
    folder = tmp_path_factory.mktemp("arithmetic")
    tokenizer = arithmetic.make_tokenizer()
    made = arithmetic.make_model(tokenizer)
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load_model(directory: Path):
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return loaded, AutoTokenizer.from_pretrained(directory)


def test_replies_do_not_depend_on_the_other_questions(model):
    questions = ["1+1", "What is 12345*6789", "7"]
    together = arithmetic.generate(*load_model(model), questions)
    alone = [arithmetic.generate(*load_model(model), [question])[0] for question in questions]
    assert together == alone
    assert len(set(alone)) == 3
    assert not any(question in reply for question, reply in zip(questions[:2], alone))


def test_replies_that_end_in_the_right_number_are_counted(model, monkeypatch, capsys):
    """Columns before it do not count, nor whether a reply is shown. Here, the reply decides which
    number is right."""
    questions = ["1+1", "What is 12345*6789", "7"]
    rows = []
    for question, reply in zip(questions, arithmetic.generate(*load_model(model), questions)):
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "t"}]
        rows.append({"messages": messages, "answer": reply.rpartition(", ")[2]})
    rows[1]["answer"] = "a wrong one"
    monkeypatch.setattr(arithmetic, "make_rows", lambda: ([], rows))
    arithmetic.ask(model, 2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[1:-1]] == ["right", "wrong"]
    assert lines[-1] == "2 of 3 replies end in the right number (67%)"


# -- loops of your own -----------------------------------------------------------------------------


def test_advantages_of_a_loop_of_your_own_are_those_of_each_group():
    scores = torch.tensor([1.0, 5.0, 3.0, 7.0, 2.0])
    group = torch.tensor([4, 1, 4, 0, 4])
    advantages = loop.advantages_of(scores, group)
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == pytest.approx([-1, 0, 1, 0, 0], abs=1e-5)
    assert scores.tolist() == [1, 5, 3, 7, 2]
    same = loop.advantages_of(torch.ones(2), torch.zeros(2))
    assert same.tolist() == [0, 0]


def fields_of_tokens() -> dict[str, torch.Tensor]:
    return {"advantages": torch.tensor([1.0, -2.0, 3.0]), "weight": torch.tensor([0.5, 0.5, 0.0])}


@pytest.mark.parametrize("example, entropy_bonus", [(loop, 0.0), (self_play, 0.1)])
def test_losses_of_the_loops_raise_what_has_an_advantage(example, entropy_bonus):
    """At the old policy: the gradient is that of the weighted log-probability."""
    log_probs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    entropy = torch.tensor([0.8, 0.4, 7.0], requires_grad=True)
    fields = fields_of_tokens()
    loss, metrics = example.loss_fn(log_probs, entropy, fields)
    # In the first loop, entropy has no part in the loss.
    (loss + 0 * entropy.sum()).backward()
    assert log_probs.grad.tolist() == pytest.approx([-0.5, 1.0, 0.0])
    assert entropy.grad.tolist() == pytest.approx([-entropy_bonus * x for x in (0.5, 0.5, 0)])
    assert metrics["pg_loss"].item() == pytest.approx(0.5)
    assert metrics["entropy"].item() == pytest.approx(0.8 * 0.5 + 0.4 * 0.5)


def test_players_learn_from_what_they_won_more_than_others():
    """Of three moves, this rank trains the last and the first, which have two tokens and one."""
    mask = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    move_of_token = torch.tensor([2, 2, 2, 0, 0])
    share = SimpleNamespace(
        batch=SimpleNamespace(fields={"loss_mask": mask}),
        repeat_on_tokens=lambda values: values[move_of_token],
    )
    samples = SimpleNamespace(response_lengths=torch.tensor([1, 5, 2]))
    roles = SimpleNamespace(
        divide=lambda divided: share if divided is samples else None,
        update=lambda *arguments: {"arguments": arguments},
    )
    run = SimpleNamespace(progress=SimpleNamespace(step=3))
    metrics = self_play.learn(run, roles, samples, torch.tensor([1.0, 1.0, -1.0]))
    assert metrics["arguments"] == (share, self_play.loss_fn, 3)
    fields = share.batch.fields
    assert fields["advantages"].tolist() == pytest.approx([0, -4 / 3, -4 / 3, 0, 2 / 3])
    assert fields["weight"].tolist() == pytest.approx([0, 1 / 8, 1 / 8, 0, 1 / 8])


# -- what examples print and refuse ----------------------------------------------------------------


def test_built_arithmetic_is_described_by_its_sizes_and_first_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(arithmetic, "NUM_TRAIN", 5)
    monkeypatch.setattr(arithmetic, "NUM_VAL", 4)
    arithmetic.build(tmp_path)
    model, tokenizer = load_model(tmp_path / "model")
    num_millions = sum(weight.numel() for weight in model.parameters()) / 1e6
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        f"{tmp_path}/model: Qwen3, {num_millions:.1f} M random parameters, {len(tokenizer)} tokens"
    )
    assert lines[1] == (
        f"{tmp_path}/train.jsonl, val.jsonl: 5 and 4 conversations; the first three:"
    )
    val = (tmp_path / "val.jsonl").read_text().splitlines()
    shown = []
    for line in val[:3]:
        question, reply = (message["content"] for message in json.loads(line)["messages"])
        shown.append(f"    {question:30} -> {reply}")
    assert lines[2:] == shown
    sizes = {}
    for folder in (".", "worked", "pairs"):
        for name in ("train", "val"):
            text = (tmp_path / folder / f"{name}.jsonl").read_text()
            sizes[f"{folder}/{name}"] = len(text.splitlines())
    assert {name: size for name, size in sizes.items() if name.endswith("train")} == dict.fromkeys(
        ["./train", "worked/train", "pairs/train"], 5
    )
    assert {size for name, size in sizes.items() if name.endswith("val")} == {4}


def test_built_colours_are_described_by_their_sizes_and_names(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(colours, "NUM_TRAIN", 3)
    monkeypatch.setattr(colours, "NUM_VAL", 2)
    colours.build(tmp_path)
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/model: PaddleOCR-VL, 0.6 M random parameters",
        f"{tmp_path}/train.jsonl, val.jsonl: 3 and 2 pictures of squares in "
        + ", ".join(colours.COLOURS),
    ]
    for name, size in {"train": 3, "val": 2, "words": 3}.items():
        assert len((tmp_path / f"{name}.jsonl").read_text().splitlines()) == size


@pytest.mark.parametrize(
    "setting, key",
    [
        ("algorithm.clip_ratio_low=0.1", "algorithm"),
        ("critic.warmup_steps=2", "critic"),
        ("reference.path=r", "reference"),
        ("reward.model.path=r", "reward.model"),
        ("reward.step_rewards=true", "reward.step_rewards"),
        ("reward.overlong_buffer=4", "reward.overlong_buffer"),
        ("data.teacher_prompt_key=t", "data.teacher_prompt_key"),
        ("dry_run=true", "dry_run"),
        ("trainer.val_only=true", "trainer.val_only"),
    ],
)
def test_a_loop_of_your_own_refuses_what_it_does_not_read(setting, key):
    needed = ["model.path=m", "data.train_files=t", "data.val_files=v"]
    with pytest.raises(InputError) as caught:
        loop.main(load("ppo.yaml", [*needed, setting]))
    assert str(caught.value) == f"examples/loop.py does not read {key}: leave it out"

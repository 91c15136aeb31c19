"""examples/game.py: games of its scripted player, and episodes of a model."""

import asyncio
import json
import random
import re
from pathlib import Path

import pytest

from examples import game
from examples.arithmetic import make_model, make_tokenizer
from examples.calculator import read_validations
from rollout.episodes.client import Reply
from tests.support.recipes import run_both_recipes

SIZES = {"traces": 300, "val_traces": 10, "train": 10, "val": 5}


def number_of(seed: int) -> int:
    """Return the number that the game with this seed looks for."""
    return game.start_game(seed).state.game_state["game_number"]


def check_hints(messages: list[dict], number: int) -> list[int]:
    """Check that each hint is right, and return the guesses."""
    guesses = []
    for message, following in zip(messages, [*messages[1:], None]):
        if message["role"] != "assistant":
            continue
        guess = int(re.fullmatch(r"\[(\d+)\]", message["content"])[1])
        guesses.append(guess)
        if following is not None and guess != number:
            hint = "higher" if guess < number else "lower"
            assert following["content"].startswith(f"The target number is {hint}.")
    return guesses


def test_traces_are_valid_games_of_which_a_third_is_won():
    num_won = 0
    num_careless = 0
    for seed, row in enumerate(game.make_rows(SIZES)["traces"]):
        number = number_of(seed)
        guesses = check_hints(row["messages"], number)
        assert len(set(guesses)) == len(guesses)
        assert all(1 <= guess <= game.LARGEST for guess in guesses)
        assert number not in guesses[:-1]
        is_won = guesses[-1] == number
        assert is_won or len(guesses) == game.MAX_TURNS + 1
        num_won += is_won
        num_careless += any(
            (later - guess) * (number - guess) < 0 for guess, later in zip(guesses, guesses[1:])
        )
    assert num_won / SIZES["traces"] == pytest.approx(0.33, abs=0.08)
    assert num_careless > SIZES["traces"] / 2


def test_halving_the_range_wins_every_game():
    for seed in range(50):
        current = game.start_game(seed)
        game.read_game(current)
        lowest = 1
        highest = game.LARGEST
        is_over = False
        while not is_over:
            guess = (lowest + highest) // 2
            is_over, _ = current.step(f"[{guess}]")
            if "higher" in game.read_game(current):
                lowest = guess + 1
            else:
                highest = guess - 1
        assert game.is_won(current)


def test_rows_have_the_prompt_of_the_game_and_seeds_of_their_own():
    rows = game.make_rows(SIZES)
    assert {name: len(rows[name]) for name in rows} == SIZES
    seeds = [row["seed"] for row in rows["train"] + rows["val"]]
    assert len(set(seeds)) == 15
    assert min(seeds) == 310
    prompt = rows["traces"][0]["messages"][0]["content"]
    assert prompt == rows["val"][0]["prompt"]
    assert "between 1 and 100" in prompt


class Player:
    """Answers with these numbers in turn, and keeps the messages that it has seen."""

    def __init__(self, numbers: list[int]):
        self.numbers = [*numbers]
        self.seen = []

    async def chat(self, messages: list[dict]) -> Reply:
        self.seen.append([message["content"] for message in messages])
        text = f"[{self.numbers.pop(0)}]"
        return Reply({"role": "assistant", "content": text}, text, None, [], "stop", [])


def test_an_episode_ends_with_the_right_number_which_scores_1():
    number = number_of(5)
    others = [guess for guess in (20, 80) if guess != number]
    player = Player([*others, number, 1])
    assert asyncio.run(game.play({"seed": 5}, player)) == 1.0
    assert player.numbers == [1], "the game is over"
    prompt = game.read_game(game.start_game(5))
    assert player.seen[0] == [prompt]
    for seen, guess in zip(player.seen[1:], others):
        hint = "higher" if guess < number else "lower"
        assert seen[-2] == f"[{guess}]"
        assert seen[-1].startswith(f"The target number is {hint}.")


def test_an_episode_without_the_right_number_ends_after_seven_guesses_and_scores_0():
    number = number_of(5)
    wrong = [guess for guess in range(1, 12) if guess != number][:9]
    player = Player(wrong)
    assert asyncio.run(game.play({"seed": 5}, player)) == 0.0
    assert len(player.seen) == 7


class Chooser(random.Random):
    """Is careful or not, and returns all numbers that it may choose from."""

    def __init__(self, number: float):
        super().__init__()
        self.number = number

    def random(self) -> float:
        return self.number

    def choice(self, numbers: list[int]) -> list[int]:
        return numbers


@pytest.mark.parametrize(
    "number, expected",
    [(0.69, [*range(21, 60)]), (0.71, [n for n in range(1, 101) if n not in (5, 20, 60, 90)])],
    ids=["careful", "careless"],
)
def test_a_careful_guess_lies_between_all_hints_and_no_guess_is_repeated(number, expected):
    hints = [(5, "higher"), (90, "lower"), (60, "lower"), (20, "higher")]
    assert game.choose_number(hints, Chooser(number)) == expected


def test_build_writes_and_names_a_file_of_each_kind(tmp_path, monkeypatch, capsys):
    sizes = {"traces": 4, "val_traces": 3, "train": 2, "val": 1}
    monkeypatch.setattr(game, "NUM_ROWS", sizes)
    folder = tmp_path / "new" / "game"
    game.build(folder)
    assert capsys.readouterr().out.splitlines() == [
        f"{folder}/{name}.jsonl: {size} games" for name, size in sizes.items()
    ]
    rows = {}
    for name in sizes:
        lines = (folder / f"{name}.jsonl").read_text().splitlines()
        rows[name] = [json.loads(line) for line in lines]
    assert rows == game.make_rows(sizes)
    assert [row["seed"] for row in rows["train"] + rows["val"]] == [7, 8, 9]


@pytest.mark.slow
def test_both_recipes_run_with_a_small_model(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(game, "NUM_ROWS", {"traces": 320, "val_traces": 4, "train": 8, "val": 4})
    game.build(tmp_path)
    # A single token for each text of the game, so that a small model reads it in 512 positions.
    tokenizer = make_tokenizer()
    prompt = json.loads((tmp_path / "val.jsonl").read_text().splitlines()[0])["prompt"]
    hints = [f"The target number is {hint}." for hint in ("higher", "lower")]
    tokenizer.add_tokens([prompt, *hints])
    make_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    grpo = run_both_recipes("game", tmp_path, grpo_settings=["rollout.max_episode_tokens=512"])
    episodes = read_validations(grpo)[1]
    assert len(episodes) == 4
    for episode in episodes:
        assert episode["turns"] > 1
        assert episode["score"] in (0.0, 1.0)

"""examples/game.py: games of its scripted player, and episodes of a model."""

import json
import re
from pathlib import Path

import pytest

from examples import game
from examples.arithmetic import make_model, make_tokenizer
from examples.calculator import read_validations
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

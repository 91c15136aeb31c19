"""A game of several turns from the package textarena: guess a number from "higher" and "lower".

    pip install --no-deps -r requirements-examples.txt
    python examples/game.py build runs/game

`play` plays an episode: train_ppo.py runs it with rollout.episode=examples/game.py:play. The game
is textarena's GuessTheNumber with numbers from 1 to 100. It writes the prompt and the hints, and
decides who wins; the score is 1 for a win and 0 for a loss.

`build` writes these files, the same ones in every call:
    traces.jsonl        games of a scripted player, for supervised fine-tuning
    val_traces.jsonl    more of them
    train.jsonl         a prompt and a seed, for episodes
    val.jsonl           other seeds

The scripted player knows the format, but plays badly: it guesses at random, and forgets the hints
in three of ten turns. It wins a third of its games. A player that halves the range wins all.
"""

import argparse
import json
import random
import sys
from pathlib import Path

try:
    import textarena
except ModuleNotFoundError as error:
    sys.exit(f"{error}. Run: pip install --no-deps -r requirements-examples.txt")

LARGEST = 100
# textarena counts turns from 0: the game ends after the seventh guess.
MAX_TURNS = 6
SHARE_CAREFUL = 0.7
# Rows by their file, in the order of their seeds: no seed is in two files.
NUM_ROWS = {"traces": 1000, "val_traces": 200, "train": 4000, "val": 500}


# ---- the game ----


def start_game(seed: int) -> textarena.Env:
    """Start the game whose number this seed determines."""
    game = textarena.make("GuessTheNumber-v0-raw", max_number=LARGEST, max_turns=MAX_TURNS)
    game.reset(num_players=1, seed=seed)
    return game


def read_game(game: textarena.Env) -> str:
    """Return the text that the game has written since the last call."""
    _, observations = game.get_observation()
    texts = [text for sender, text, _ in observations if sender == textarena.GAME_ID]
    return "\n".join(texts)


def is_won(game: textarena.Env) -> bool:
    """Return whether a game that is over was won; a lost one has a reward below 1."""
    rewards, _ = game.close()
    return rewards[0] == 1


async def play(row: dict, llm) -> float:
    """Let the model guess until the game is over; return 1.0 if it has won."""
    game = start_game(row["seed"])
    messages = [{"role": "user", "content": read_game(game)}]
    is_over = False
    while not is_over:
        reply = await llm.chat(messages)
        messages.append(reply.message)
        is_over, _ = game.step(reply.content)
        messages.append({"role": "user", "content": read_game(game)})
    return float(is_won(game))


# ---- the data ----


def choose_number(hints: list[tuple[int, str]], rng: random.Random) -> int:
    """Return the scripted player's next guess: a random number that it has not guessed before.

    Args:
        hints: its guesses, each with "higher" or "lower".
    """
    lowest = 1
    highest = LARGEST
    if rng.random() < SHARE_CAREFUL:
        lowest = max([lowest] + [guess + 1 for guess, hint in hints if hint == "higher"])
        highest = min([highest] + [guess - 1 for guess, hint in hints if hint == "lower"])
    guesses = [guess for guess, _ in hints]
    return rng.choice([n for n in range(lowest, highest + 1) if n not in guesses])


def make_trace(seed: int) -> list[dict]:
    """Return the messages of a game of the scripted player, up to its last guess."""
    rng = random.Random(seed)
    game = start_game(seed)
    messages = []
    is_over = False
    while not is_over:
        messages.append({"role": "user", "content": read_game(game)})
        guess = choose_number(game.state.game_state["guess_history"], rng)
        messages.append({"role": "assistant", "content": f"[{guess}]"})
        is_over, _ = game.step(f"[{guess}]")
    return messages


def make_rows(num_rows: dict[str, int]) -> dict[str, list[dict]]:
    """Return the rows of each file."""
    prompt = read_game(start_game(0))
    rows: dict[str, list[dict]] = {}
    first_seed = 0
    for name, size in num_rows.items():
        seeds = range(first_seed, first_seed + size)
        if name.endswith("traces"):
            rows[name] = [{"messages": make_trace(seed)} for seed in seeds]
        else:
            rows[name] = [{"prompt": prompt, "seed": seed} for seed in seeds]
        first_seed += size
    return rows


def build(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, rows in make_rows(NUM_ROWS).items():
        lines = [json.dumps(row) + "\n" for row in rows]
        (directory / f"{name}.jsonl").write_text("".join(lines))
        print(f"{directory}/{name}.jsonl: {len(rows)} games")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("build", help="write the scripted games and the seeds")
    command.add_argument("directory", type=Path)
    build(parser.parse_args().directory)


if __name__ == "__main__":
    main()

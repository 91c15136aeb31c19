"""examples/self_play.py: the game, and a short run of two players on two ranks."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from config import InputError, load
from examples import self_play
from tests.support.launch import launch, metrics, run


def test_smaller_numbers_win_and_the_loser_pays_the_winner():
    numbers = torch.arange(10.0)
    for number in numbers:
        won = self_play.winnings(number.expand(10), numbers)
        assert won.tolist() == (numbers - number).sign().tolist()
        assert self_play.winnings(numbers, number.expand(10)).tolist() == (-won).tolist()


def test_any_text_is_a_move():
    assert [self_play.move(text) for text in ("", "0", "1x", "\u20ac")] == [9.0, 8.0, 9.0, 4.0]


def test_players_take_turns():
    """Each player goes on with the state in which it stopped."""
    state = {"adapter": torch.zeros(2)}

    def load_state(new):
        state["adapter"].copy_(new["adapter"])

    actor = SimpleNamespace(state=lambda: state, load_state=load_state)
    roles = SimpleNamespace(actor=actor)
    states = [{"adapter": torch.tensor([1.0, 2.0])}, {"adapter": torch.tensor([3.0, 4.0])}]
    for player in (0, 1, 0):
        with self_play.playing(roles, states, player):
            state["adapter"] += 10
    assert [x["adapter"].tolist() for x in states] == [[21.0, 22.0], [13.0, 14.0]]


class Roles:
    """Two games, of players whose adapters are their numbers. The second player skips its update.

    moves: the numbers that each player names
    advantages: player -> those of the moves that it has learned from
    """

    def __init__(self, moves=((0.0, 0.0), (0.0, 0.0))):
        state = {"adapter": torch.zeros(1)}
        self.actor = SimpleNamespace(state=lambda: state, load_state=state.update)
        self.moves = moves
        self.advantages = {}

    @property
    def player(self):
        return int(self.actor.state()["adapter"])

    def wake(self):
        pass

    sleep = wake

    def collect(self, train, rows_of_batch, batch, step):
        scores = torch.tensor(self.moves[self.player])
        samples = SimpleNamespace(player=self.player, scores=scores, response_lengths=torch.ones(2))
        return samples, batch + 1

    def divide(self, samples):
        assert samples.player == self.player, "a player learns from its own moves"
        batch = SimpleNamespace(fields={"loss_mask": torch.ones(2)})
        return SimpleNamespace(batch=batch, repeat_on_tokens=lambda values: values)

    def update(self, share, loss_fn, step):
        self.advantages[self.player] = share.batch.fields["advantages"].tolist()
        return {"actor/skipped": self.player}


def play_once(roles):
    """Play two games, and return the batches of prompts that they took, and what play() returns."""
    progress = SimpleNamespace(batch=0, step=0)
    run = SimpleNamespace(train=[], order=SimpleNamespace(rows_of_batch=None), progress=progress)
    states = [{"adapter": torch.tensor([float(player)])} for player in range(2)]
    result = self_play.play(run, roles, states)
    return progress.batch, result


def test_skipped_updates_of_both_players_are_counted():
    num_batches, (*_, metrics) = play_once(Roles())
    assert metrics == {"actor/skipped": 1, "game/winnings": 0}
    assert num_batches == 2


def test_each_player_learns_to_make_the_moves_that_win():
    """The first player wins the first game and loses the second one."""
    roles = Roles(moves=[(1.0, 5.0), (3.0, 2.0)])
    _, (samples, other_samples, metrics) = play_once(roles)
    assert roles.advantages == {0: [1, -1], 1: [-1, 1]}
    assert (samples.player, other_samples.player) == (0, 1)
    assert metrics["game/winnings"] == 0
    _, (*_, metrics) = play_once(Roles(moves=[(1.0, 2.0), (3.0, 2.0)]))
    assert metrics["game/winnings"] == 0.5, "of the first player"


def test_the_second_player_is_exported_and_the_first_one_is_left_in_the_actor(tmp_path):
    """The end of a run exports the actor to hf, so it would be the second player's, too."""
    roles = Roles()
    exported = []

    def export(directory, base_name):
        exported.append((directory, base_name, roles.actor.state()["adapter"].item()))

    roles.export = export
    states = [{"adapter": torch.tensor([float(player)])} for player in range(2)]
    run = SimpleNamespace(output_dir=tmp_path, base_name="base")
    self_play.export_second_player(run, roles, states)
    assert exported == [(tmp_path / "hf_other", "base", 1.0)]
    assert roles.actor.state()["adapter"].item() == 0.0


def test_build_writes_a_model_and_the_same_prompt_64_times(tmp_path):
    self_play.build(tmp_path)
    lines = (tmp_path / "prompts.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"prompt": "Name a number from 0 to 9."}] * 64
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        file.name for file in (tmp_path / "model").iterdir()
    }


LORA = "model.lora.rank=4"
NO_FAILURES = "reward.max_failure_rate=0"


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            [LORA, NO_FAILURES, "algorithm.clip_ratio_low=0.1"],
            "does not read algorithm: leave it out",
        ),
        (
            [LORA, NO_FAILURES, "rollout.partial.enable=true"],
            "does not read rollout.partial: leave",
        ),
        ([LORA, NO_FAILURES, "dry_run=true"], "does not read dry_run: leave it out"),
        ([NO_FAILURES], "needs model_engine=fsdp and model.lora.rank > 0"),
        ([LORA, NO_FAILURES, "model_engine=megatron"], "needs model_engine=fsdp and model.lora"),
        ([LORA], "missing: set reward.max_failure_rate=0"),
    ],
)
def test_a_setting_that_the_example_lacks_is_reported_before_anything_starts(settings, message):
    config = load("ppo.yaml", ["model.path=m", "data.train_files=t", *settings])
    with pytest.raises(InputError) as caught:
        self_play.main(config)
    assert str(caught.value).startswith("examples/self_play.py ")
    assert message in str(caught.value)


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("game")
    run([sys.executable, "examples/self_play.py", "build", folder])
    return folder


def arguments(assets, out, *more):
    return [
        "examples/self_play.py",
        "configs/demo/self_play.yaml",
        f"model.path={assets}/model",
        f"data.train_files={assets}/prompts.jsonl",
        f"data.cache_dir={assets}/cache",
        f"output_dir={out}",
        "trainer.report=false",
        *more,
    ]


@pytest.mark.slow
def test_each_player_is_exported_with_its_own_adapter(assets, tmp_path):
    """After one step: what one of them has won, the other one has lost."""
    settings = ["trainer.total_steps=1", "model_engine=fsdp", "trainer.test_freq=1"]
    settings += [f"data.val_files={assets}/prompts.jsonl", "data.val_max_samples=4"]
    run([sys.executable, *arguments(assets, tmp_path, *settings)])
    first, second = [
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("hf", "hf_other")
    ]
    validated = [line["step"] for line in metrics(tmp_path) if "val/move" in line]
    assert validated == [0, 1]
    of_b = [name for name in first if ".lora_B." in name]
    assert of_b
    assert any(not torch.equal(first[name], second[name]) for name in of_b)


@pytest.mark.slow
def test_both_players_learn_to_beat_the_frozen_model(assets, tmp_path):
    """A mean of 128 games has a standard deviation of at most 0.09."""
    launch(2, *arguments(assets, tmp_path, "trainer.total_steps=12"))
    lines = metrics(tmp_path)
    assert len(lines) == 12
    assert abs(lines[0]["game/against_frozen"]) < 0.3
    assert lines[-1]["game/against_frozen"] > 0.5
    assert abs(sum(line["game/winnings"] for line in lines) / 12) < 0.3
    adapters = [
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("hf", "hf_other")
    ]
    for name, matrix in adapters[0].items():
        assert matrix.any()
        assert not torch.equal(matrix, adapters[1][name])


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting, message",
    [
        ("model.lora.rank=0", "needs model_engine=fsdp and model.lora.rank > 0"),
        ("model_engine=megatron", "needs model_engine=fsdp and model.lora.rank > 0"),
        ("rollout.partial.enable=true", "does not read rollout.partial: leave it out"),
        ("reward.max_failure_rate=0.1", "pairs the moves of both players in their order"),
    ],
)
def test_a_setting_that_the_example_lacks_is_one_line(assets, tmp_path, setting, message):
    done = run([sys.executable, *arguments(assets, tmp_path, setting)], returncode=2)
    assert f"error: examples/self_play.py {message}" in done.stderr

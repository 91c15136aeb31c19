"""Self-play in a loop of your own: two adapters of one model play against each other.

    python examples/self_play.py build runs/self_play    # a model with random weights, and prompts
    torchrun --nproc-per-node 2 examples/self_play.py configs/demo/self_play.yaml

The game: two players name a number from 0 to 9 at the same time. The winner is the one who is
closer to two thirds of the mean of both. The loser pays 1 to the winner, so what one gains is what
the other loses. Smaller numbers always win, which both players find out. Against each other they
win about nothing, since both improve; against the model before the first step they win.

Any text is a move: its number is the code of its first character, modulo 10. So a model with random
weights can play from the first step on.

There is one base model in the trainer, and one in vLLM; if every rank has the whole base, they are
the same memory. Roles hold one adapter at a time. The waiting player's adapter and optimizer are
kept as a copy of the engine's state, and `playing` swaps them in. docs/your_own_loop.md describes
the other calls.
"""

import copy
import json
import sys
import time
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from config import InputError, defaults, run as run_script
from examples.loop import UNREAD

# A response may not continue in the next step, which another player begins.
UNREAD_BY_PLAYERS = [*UNREAD, "rollout.partial"]
PROMPT = "Name a number from 0 to 9."
NUM_PROMPTS = 64
ENTROPY_BONUS = 0.1
NUM_PLAYERS = 2  # each has one update per step


# ---- the game ----


def move(response):
    """Return the number that a response names: the reward function of the run."""
    return float(ord(response[0]) % 10) if response else 9.0


def winnings(numbers, other_numbers):
    """Return 1 for each game that `numbers` [n] win, -1 for a lost one and 0 for a draw."""
    # Three times the distance from two thirds of the mean.
    distance = (2 * numbers - other_numbers).abs()
    other_distance = (2 * other_numbers - numbers).abs()
    return (other_distance - distance).sign()


# ---- the loop ----


def loss_fn(log_probs, entropy, fields):
    """Return the policy loss of a micro-batch, and metrics: sums over its tokens.

    The entropy bonus keeps a player from naming one number only, before it has tried the others.
    """
    ratio = (log_probs - log_probs.detach()).exp()  # 1, with the gradient of log_probs
    pg_loss = -(fields["advantages"] * ratio * fields["weight"]).sum()
    mean_entropy = (entropy * fields["weight"]).sum()
    loss = pg_loss - ENTROPY_BONUS * mean_entropy
    return loss, {"pg_loss": pg_loss.detach(), "entropy": mean_entropy.detach()}


@contextmanager
def playing(roles, states, player):
    """Within this block, the actor has the adapter and the optimizer of this player."""
    roles.actor.load_state(states[player])
    yield
    states[player] = copy.deepcopy(roles.actor.state())


def draw(run, roles):
    """Return the moves of the player whose adapter the actor has."""
    progress = run.progress
    roles.wake()  # vLLM gets the adapter, and the device
    samples, progress.batch = roles.collect(
        run.train, run.order.rows_of_batch, progress.batch, progress.step + 1
    )
    roles.sleep()  # the trainer gets the device back
    return samples


def learn(run, roles, samples, won):
    """Take one optimizer step on a player's moves, and return metrics. won: [n] fp32."""
    share = roles.divide(samples)  # the moves that this rank trains on
    fields = share.batch.fields
    fields["advantages"] = share.repeat_on_tokens(won - won.mean()) * fields["loss_mask"]
    fields["weight"] = fields["loss_mask"] / samples.response_lengths.sum()
    return roles.update(share, loss_fn, run.progress.step)


def play(run, roles, states):
    """Let both players move once and learn from it. Return the moves of each, and metrics."""
    with playing(roles, states, 0):
        samples = draw(run, roles)
    with playing(roles, states, 1):
        other_samples = draw(run, roles)
        won = winnings(samples.scores, other_samples.scores)
        other_metrics = learn(run, roles, other_samples, -won)
    with playing(roles, states, 0):
        metrics = learn(run, roles, samples, won)
    metrics["actor/skipped"] += other_metrics["actor/skipped"]
    metrics["game/winnings"] = won.mean().item()
    return samples, other_samples, metrics


def export_second_player(run, roles, states):
    """Write the second player to hf_other. The actor is then the first, which finish() exports."""
    with playing(roles, states, 1):
        roles.export(run.output_dir / "hf_other", run.base_name)
    roles.actor.load_state(states[0])


def main(config):
    from omegaconf import OmegaConf

    from train_ppo import build_roles, end_step, finish, set_up, start_grader, validate_first

    for key in UNREAD_BY_PLAYERS:
        if OmegaConf.select(config, key) != defaults(key):
            raise InputError(f"examples/self_play.py does not read {key}: leave it out")
    if config.model_engine != "fsdp" or not config.model.lora.rank:
        raise InputError("examples/self_play.py needs model_engine=fsdp and model.lora.rank > 0")
    if config.reward.max_failure_rate > 0:
        raise InputError(
            "examples/self_play.py pairs the moves of both players in their order, so none may be "
            "missing: set reward.max_failure_rate=0"
        )
    grader = start_grader(config)
    run = set_up(config, grader)
    if run.resume_from:
        raise InputError(
            "examples/self_play.py does not resume, because a checkpoint has only one player: set "
            "trainer.resume=never and another output_dir"
        )
    roles = build_roles(run, grader)
    run.start("two adapters that play against each other")
    states = [copy.deepcopy(roles.actor.state()) for _ in range(NUM_PLAYERS)]
    frozen_numbers = None
    validate_first(run, roles)
    while run.should_continue:
        start = time.perf_counter()
        run.profiler.begin_step(run.progress.step + 1)
        samples, other_samples, metrics = play(run, roles, states)
        if frozen_numbers is None:
            # New adapters change nothing, so these are the moves of the model itself.
            frozen_numbers = other_samples.scores
        metrics["game/against_frozen"] = winnings(samples.scores, frozen_numbers).mean().item()
        end_step(run, roles, samples, metrics, NUM_PLAYERS, start)
    export_second_player(run, roles, states)
    finish(run, roles, grader)


def build(directory):
    """Write the model and the prompts, which are all the same."""
    from examples.arithmetic import make_model, make_tokenizer

    tokenizer = make_tokenizer()
    make_model(tokenizer).save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    rows = [json.dumps({"prompt": PROMPT}) + "\n"] * NUM_PROMPTS
    (directory / "prompts.jsonl").write_text("".join(rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["build"]:
        build(Path(sys.argv[2]))
    else:
        run_script(main, "ppo.yaml", __doc__)

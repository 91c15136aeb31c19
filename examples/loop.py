"""GRPO in a loop of your own, with its advantages and its loss in plain Python.

    torchrun --nproc-per-node 2 examples/loop.py model.path=DIR data.train_files=prompts.jsonl

It takes the arguments of train_ppo.py, and with the same arguments both train the same weights, bit
for bit. docs/your_own_loop.md describes each call.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from config import InputError, defaults, run as run_script

UNREAD = ["algorithm", "critic", "reference", "reward.model", "reward.step_rewards"]
UNREAD += ["reward.overlong_buffer", "data.teacher_prompt_key", "dry_run", "trainer.val_only"]


def advantages_of(scores, group):
    """Return (score - mean) / standard deviation over the responses to the same prompt: [n]."""
    advantages = scores.double()
    for number in group.unique():
        members = group == number
        deviation = advantages[members] - advantages[members].mean()
        variance = deviation.square().sum() / max(1, len(deviation) - 1)
        advantages[members] = deviation / (variance.sqrt() + 1e-6)
    return advantages.float()


def loss_fn(log_probs, entropy, fields):
    """Return the clipped policy loss of a micro-batch, and metrics: sums over its tokens."""
    ratio = (log_probs - log_probs.detach()).exp()  # the step's only update starts at 1
    surrogate = fields["advantages"] * ratio
    clipped = fields["advantages"] * ratio.clamp(0.8, 1.2)
    loss = -(surrogate.minimum(clipped) * fields["weight"]).sum()
    return loss, {"pg_loss": loss, "entropy": (entropy * fields["weight"]).sum()}


def main(config):
    from omegaconf import OmegaConf

    from train_ppo import build_roles, end_step, finish, set_up, start_grader, validate_first

    for key in UNREAD:
        if OmegaConf.select(config, key) != defaults(key):
            raise InputError(f"examples/loop.py does not read {key}: leave it out")
    grader = start_grader(config)
    run = set_up(config, grader)
    roles = build_roles(run, grader)
    run.start("a loop of your own")
    progress = run.progress
    validate_first(run, roles)
    while run.should_continue:
        start = time.perf_counter()
        run.profiler.begin_step(progress.step + 1)
        roles.wake()  # vLLM gets the new weights, and the device
        samples, progress.batch = roles.collect(
            run.train, run.order.rows_of_batch, progress.batch, progress.step + 1
        )
        roles.sleep()  # the trainer gets the device back
        share = roles.divide(samples)  # the responses that this rank trains on
        fields = share.batch.fields
        advantages = advantages_of(samples.scores, samples.group)
        fields["advantages"] = share.repeat_on_tokens(advantages) * fields["loss_mask"]
        fields["weight"] = fields["loss_mask"] / samples.response_lengths.sum()
        metrics = roles.update(share, loss_fn, progress.step)
        metrics["score/mean"] = samples.scores.mean().item()
        end_step(run, roles, samples, metrics, 1, start)
    finish(run, roles, grader)


if __name__ == "__main__":
    run_script(main, "ppo.yaml", __doc__)

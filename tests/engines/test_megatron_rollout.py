"""vLLM in the same process as the Megatron engine, with a mixture of experts."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from config import load
from engines.megatron.engine import MegatronEngine
from tests.engines.megatron_worker import EP2, TOTAL_STEPS, new_layout, work
from tests.support.cases import needs
from tests.support.plain import column
from tests.support.training import gather, make_batch

pytestmark = pytest.mark.slow
NUM_ROUNDS = 3


@work(2)
def rollout(folder: Path, this_device: torch.device) -> list[dict[str, float]]:
    """Generate and update several times.

    Returns for each round how far vLLM's and the trainer's log-probabilities are apart (the largest
    gap on any rank), and how far the update moved them. vLLM has no attention on CPUs for heads of
    fewer than 32 dimensions.
    """
    from rollout.vllm.engine import Rollout

    config = load(
        "ppo.yaml",
        [
            "model_engine=megatron",
            f"model.path={folder / 'qwen3_moe'}",
            "data.train_files=unused",
            "optim.lr=0.02",
            "optim.weight_decay=0",
            "engine.compute_dtype=float32",
            f"engine.{EP2}",
            "rollout.kv_cache_gib=0.05",
            "data.max_prompt_length=16",
            "rollout.max_tokens=24",
            "validation.max_tokens=24",
        ],
    )
    sampling = OmegaConf.merge(config.rollout, {"stop": []})
    new_layout()
    engine = MegatronEngine(config, this_device, TOTAL_STEPS)
    vllm = Rollout(config, this_device)
    prompts = [list(range(3, 9 + i)) for i in range(6)]
    seeds = [6 * vllm.replica + i for i in range(6)]
    same_batch = make_batch(0)
    rounds = []
    for step in range(NUM_ROUNDS):
        before = engine.log_probs(same_batch)[0]
        vllm.wake("weights")
        vllm.update_weights(engine.export_weights())
        vllm.wake("kv_cache")
        batch, _ = vllm.generate(prompts, seeds, sampling)
        gap = engine.log_probs(batch)[0] - batch.fields["rollout_log_probs"]
        largest_gap = max(gather(gap.abs().max().item()))
        vllm.sleep()
        engine.train_batch(batch, lambda log_probs, *_: (-log_probs.sum() / 100, {}), step)
        moved = (engine.log_probs(same_batch)[0] - before).abs().max().item()
        rounds.append({"gap": largest_gap, "moved": moved})
    vllm.shutdown()  # It ends the process group, so this is the last case.
    return rounds


@needs((2, "rollout"))
def test_vllm_has_the_trainers_experts(megatron_results):
    rounds = megatron_results[2]["rollout"]
    assert len(rounds) == NUM_ROUNDS
    assert max(column(rounds, "gap")) < 1e-4
    assert min(column(rounds, "moved")) > 0.1

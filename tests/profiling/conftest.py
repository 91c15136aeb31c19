"""Runs that several files of profiler tests read."""

import json
import sys

import pytest
from safetensors.torch import load_file, save_file

from examples.arithmetic import make_rows, make_tokenizer
from tests.profiling.support import MODEL_STAGES, PROBE, arguments
from tests.support.launch import launch, run
from tests.support.models import make_model


@pytest.fixture(scope="session")
def assets(tmp_path_factory):
    """A model of four layers, copies of it with a scaled matrix, 84 rows, and a reward."""
    directory = tmp_path_factory.mktemp("assets")
    tokenizer = make_tokenizer()
    matrices = {
        "model": (None, 1),
        "defect": ("model.layers.2.self_attn.k_proj.weight", 1.01),
        "early": ("model.layers.0.mlp.up_proj.weight", 1.01),
        "late": ("model.layers.3.mlp.down_proj.weight", 1.01),
        "head": ("lm_head.weight", 1.05),
    }
    for name, (matrix, factor) in matrices.items():
        # On CPUs, vLLM has no attention for heads smaller than 32.
        make_model(
            directory / name,
            "qwen3",
            head_dim=32,
            num_hidden_layers=4,
            vocab_size=len(tokenizer),
            eos_token_id=tokenizer.eos_token_id,
        )
        tokenizer.save_pretrained(directory / name)
        if matrix:
            path = directory / name / "model.safetensors"
            weights = load_file(path)
            weights[matrix] *= factor
            save_file(weights, path, metadata={"format": "pt"})
    (directory / "train.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in make_rows()[0][:84])
    )
    (directory / "reward.py").write_text(
        "def letters(prompt, response, row):\n    return len(set(response)) / 10\n"
    )
    return directory


@pytest.fixture(scope="session")
def sft(assets, tmp_path_factory):
    """Runs of three steps: without a profile, with the second step dumped, and with the defect."""
    out = tmp_path_factory.mktemp("sft")
    for name, model, overrides in (
        ("plain", "model", []),
        ("dumped", "model", ["trainer.profile_interval=[2,2]"]),
        ("defect", "defect", ["trainer.profile_interval=[2,2]"]),
    ):
        run(
            [
                sys.executable,
                "train_sft.py",
                *arguments(
                    assets,
                    out / name,
                    f"model.path={assets}/{model}",
                    PROBE,
                    "trainer.total_steps=3",
                    *overrides,
                ),
            ]
        )
    return out


@pytest.fixture(scope="session")
def ppo_run(assets, tmp_path_factory):
    """Two steps with a critic and a reference on two ranks; two tools record the second on both."""
    out = tmp_path_factory.mktemp("ppo")
    stages = ",".join(["rollout_generate", *MODEL_STAGES])
    launch(
        2,
        "train_ppo.py",
        *arguments(
            assets,
            out,
            "trainer.total_steps=2",
            "trainer.profile_interval=[2,2]",
            "profiler.tool=[torch,msprobe]",
            "profiler.ranks=all",
            f"profiler.msprobe.stages=[{stages}]",
            "algorithm.adv_estimator=gae",
            "critic.lr=1e-3",
            "algorithm.use_kl_in_reward=true",
            "rollout.n=2",
            "rollout.max_tokens=12",
            "data.max_prompt_length=40",
            "rollout.kv_cache_gib=0.05",
            "reward.num_workers=1",
            f"reward.function={assets}/reward.py:letters",
        ),
    )
    return out

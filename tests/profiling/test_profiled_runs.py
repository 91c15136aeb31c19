"""Whole runs with a profiler, started as users start them."""

import json
import sys

import pytest

from tests.profiling.support import MODEL_STAGES, PROBE, arguments, read_dump, recorded
from tests.support.launch import launch, metrics, run


@pytest.mark.slow
def test_every_stage_of_a_ppo_step_leaves_a_trace_and_every_model_a_dump_of_its_own(ppo_run):
    assert [p.name for p in (ppo_run / "profile").glob("step_*")] == ["step_2"]
    failed_dumps = [step.get("profiler/failed_dumps") for step in metrics(ppo_run)]
    assert [number for number in failed_dumps if number is not None] == [0]
    for stage in (
        "rollout_generate",
        "reward",
        "advantages",
        "update_weights",
        "save",
        *MODEL_STAGES,
    ):
        for rank in (0, 1):
            trace = json.loads(
                (ppo_run / f"profile/step_2/{stage}/torch_step2_rank{rank}.json").read_text()
            )
            assert stage in {e.get("name") for e in trace["traceEvents"]}, (stage, rank)
    dumps = {
        (stage, rank): read_dump(ppo_run, 2, stage, rank)
        for stage in ("rollout_generate", *MODEL_STAGES)
        for rank in (0, 1)
    }
    for (stage, rank), dump in dumps.items():
        assert any(name.endswith("backward.0") for name in dump) == stage.endswith("_update"), (
            stage,
            rank,
        )
        assert any("layers.3." in name for name in dump)
        assert any(name.endswith(".forward.0") for name in dump)
    call = "Module.0.hf.model.layers.3.mlp.down_proj.Linear.forward.0"
    norms = {}
    for stage in MODEL_STAGES:
        norms[stage] = dumps[stage, 0][call]["parameters"]["weight"]["Norm"]
    assert norms["actor_compute_log_prob"] == norms["actor_update"]
    assert norms["compute_values"] == norms["critic_update"]
    assert len(set(norms.values())) == 3, (
        "actor, critic and reference are three models by the second step"
    )


@pytest.mark.slow
def test_a_run_that_ends_with_an_error_writes_its_trace_on_the_first_rank_alone(assets, tmp_path):
    done = launch(
        2,
        "train_sft.py",
        *arguments(
            assets,
            tmp_path,
            "optim.lr=1e30",
            "optim.clip_grad=0",
            "trainer.max_skipped_steps=2",
            "profiler.tool=torch",
            "optim.lr_scheduler_type=constant",
            "optim.lr_warmup_steps_ratio=0",
            "trainer.profile_interval=[2,9]",
            "profiler.torch.trace=interval",
        ),
        returncode=1,
    )
    assert "the gradient was not finite in 3 of 4 updates" in done.stderr
    last = metrics(tmp_path)[-1]["step"] + 1
    [(name, events)] = recorded(tmp_path).items()
    assert name == f"step_2/interval/torch_step2-{last}_rank0.json"
    assert {"data", "train_batch"} <= events


@pytest.mark.slow
def test_a_mistake_is_one_line_before_the_model_is_loaded(assets, tmp_path):
    done = run(
        [
            sys.executable,
            "train_ppo.py",
            *arguments(
                assets,
                tmp_path,
                PROBE,
                "profiler.msprobe.stages=[compute_values]",
                "data.max_prompt_length=60",
                "rollout.max_tokens=60",
            ),
        ],
        returncode=2,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert lines[0].endswith("these are rollout_generate, actor_update")
    assert not (tmp_path / "config.yaml").exists()

"""Scores of the reward model on several ranks, each of which holds some of the responses."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from config import InputError
from engines.fsdp.engine import FSDPEngine
from engines.heads import Head
from rl.reward_model import PART, reward_model_config
from rl.scoring import RewardModel
from rollout.samples import Samples
from tests.rl.test_reward_model import OTHER_TEMPLATE, make_other_tokenizer, make_reward_model
from tests.support.guarded import unguarded
from tests.support.ranks import on_ranks
from tests.support.samples import configure, make_samples

QUESTION = {"role": "user", "content": "What is 1+1"}
MISSING = "~"
TEXTS = ["2", "the number 3, I think", f"2{MISSING}", "three, or is it four?"]
OWNERS = [1, 0, 1, 1]
# Room for the conversations that end with a digit, of 33 tokens, and for no longer ones.
NUM_POSITIONS = 40
REJECTING = (
    "{% for m in messages %}{{ raise_exception('a bad word') if 'bad' in m.content | string }}"
)


@pytest.fixture(scope="module")
def judge(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("judge")
    tokenizer = make_other_tokenizer(MISSING)
    tokenizer.chat_template = OTHER_TEMPLATE.replace("{% for m in messages %}", REJECTING)
    shape = dict(num_hidden_layers=1, max_position_embeddings=NUM_POSITIONS)
    make_reward_model(path, "qwen3", tokenizer, **shape)
    return path


def held_samples(all_texts: list[str]) -> Samples:
    """Return samples with these texts, as this rank holds them after drawing."""
    num_texts = len(all_texts)
    samples = make_samples([1] * num_texts, [0.0] * num_texts, range(num_texts))
    owner = torch.tensor(OWNERS[:num_texts]) % dist.get_world_size()
    samples = replace(samples, owner=owner, rank=dist.get_rank())
    held = samples.held.tolist()
    prompts = [replace(samples.prompts[i], row={"messages": [QUESTION]}) for i in held]
    texts = [all_texts[i] for i in held]
    return replace(samples, batch=samples.batch.select(held), texts=texts, prompts=prompts)


def score_on_rank(path: Path, texts: list[str], *settings: str) -> dict[str, list[float]] | str:
    """Return the scores and the metrics of all responses, or the error."""
    config = configure(f"reward.model.path={path}", *settings)
    device = torch.device("cpu")
    with unguarded():
        engine = FSDPEngine(
            reward_model_config(config), device, 1, optimize=False, head=Head.VALUES
        )
    try:
        scored = RewardModel(config, engine, []).score(held_samples(texts), None)
    except InputError as error:
        return str(error)
    metrics = {name: [value] for name, value in scored.metrics.items()}
    return {"scores": scored.parts[PART].tolist(), **metrics}


def test_ranks_score_as_one_does(judge, tmp_path):
    """In the order of the responses. Each rank holds one of the two that are cut."""
    (expected,) = on_ranks(1, tmp_path, score_on_rank, judge, TEXTS)
    assert expected["reward/model/cut"] == [0.5]
    first, second, third, fourth = expected["scores"]
    assert third == pytest.approx(first), "characters without tokens are left out"
    assert len({first, second, fourth}) == 3
    # Two ranks have room for 40 tokens of a sequence that they share, as many as the model.
    shared = ["engine.context_parallel_size=auto", "data.max_tokens_per_micro_batch=20"]
    for settings in ([], shared):
        for own in on_ranks(2, tmp_path, score_on_rank, judge, TEXTS, *settings):
            assert own.keys() == expected.keys()
            for name, values in expected.items():
                assert own[name] == pytest.approx(values, abs=1e-5), name


def test_a_step_in_which_nothing_was_graded_has_no_scores(judge, tmp_path):
    nothing = {"scores": [], "reward/model/mean": [pytest.approx(math.nan, nan_ok=True)]}
    assert on_ranks(2, tmp_path, score_on_rank, judge, []) == [nothing, nothing]


def test_a_conversation_that_the_template_rejects_is_an_error_on_all_ranks(judge, tmp_path):
    """Only rank 1 has it. Otherwise the others would wait for that rank's tokens."""
    first, second = on_ranks(2, tmp_path, score_on_rank, judge, [*TEXTS[:3], "bad"])
    assert first == second
    assert "a bad word" in first

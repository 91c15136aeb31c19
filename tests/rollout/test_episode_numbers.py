"""What all ranks know of episodes that were played: their numbers, metrics and samples."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from data.prompts import Prompt, PromptDataset
from examples.arithmetic import make_tokenizer
from rollout.drawing import Assignment, Request
from rollout.episodes.drawing import (
    EpisodeNumbers,
    EpisodeSampler,
    Kept,
    Played,
    gateway_settings,
    make_replica_group,
)
from rollout.episodes.jobs import Limit
from rollout.episodes.stepping import Playing, StepTimes
from rollout.grading.pool import WorkerPool
from rollout.grading.results import Failure, Reward
from rollout.samples import Samples
from tests.support.ranks import on_ranks
from tests.support.samples import configure

PROMPT = [1, 2]


def play(*lengths: int, is_cut: bool = False, **numbers) -> Playing:
    """Return an episode whose turns have these lengths, each in a branch of its own."""
    playing = Playing(seed=(0,), **numbers)
    for number, length in enumerate(lengths):
        turn = playing.episode.begin([*PROMPT, 10 + number], seed=0)
        turn.response.append(np.full(length, 5), np.zeros(length), None, version=0)
        is_last = number == len(lengths) - 1
        playing.episode.end(turn, is_cut=is_cut and is_last)
    return playing


def test_numbers_of_episodes_and_their_metrics():
    rewarded = play(3, 4, num_tool_calls=4, num_tool_errors=1)
    rewarded.episode.reward(0.5)
    playing = [
        rewarded,
        play(2, is_cut=True, num_tool_calls=2),
        play(1, 1, 1, limit="max_turns", num_tool_calls=3, num_tool_errors=2),
        play(6),
    ]
    results = [
        Reward(1.0, {"right": 2.0}),
        Reward(-1.0, {"right": 3.0}),
        Limit("max_turns", None),
        Failure("raised", "", {}, ""),
    ]
    prompts = [Prompt(PROMPT, "", {})] * 4
    numbers = EpisodeNumbers.of(Kept(torch.arange(4), playing, results, prompts), ["right"])
    expected = {
        "branches": [2, 1, 0, 0],
        "score": [1.5, -1, 0, 0],
        "truncated": [0, 1, 1, 0],
        "tokens": [7, 2, 3, 6],
        "turns": [2, 1, 3, 1],
        "tool_calls": [4, 2, 3, 0],
        "tool_errors": [1, 0, 2, 0],
        "limited": [0, 0, 1, 0],
        "left_out": [0, 0, 1, 0],
    }
    assert {name: getattr(numbers, name).tolist() for name in expected} == expected
    assert numbers.parts["right"].tolist() == [2, 3, 0, 0]
    assert numbers.metrics() == {
        "episodes/turns/mean": 1.75,
        "episodes/turns/max": 3.0,
        "episodes/tool_calls/mean": 2.25,
        "episodes/tool_errors": 3.0,
        "episodes/limited": 0.25,
        "episodes/left_out": 0.25,
    }


class FourPrompts(PromptDataset):
    """Prompts that are in no file."""

    def __init__(self):
        self.prompts = [Prompt(PROMPT, f"prompt {row}", {"row": row}) for row in range(4)]
        self.drawn_lengths = np.full(4, np.nan, np.float32)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]


class Runner(WorkerPool):
    """Worker processes that have played all episodes."""

    def __init__(self):
        self.parts = None


ROWS = [3, 1]  # with two episodes each, of which rank 1 plays the first and the last one
OWNERS = [1, 0]
OUTCOMES = [
    (play(3, 4, is_cut=True), Reward(1.0, {"right": 2.0})),
    (play(2), Failure("raised", "", {"row": 3}, "")),
    (play(1, 2, 3), Reward(4.0, {"right": 5.0})),
    (play(5, limit="max_turns"), Limit("max_turns", -1.0)),
]


def share_on_rank() -> tuple[Samples, list[float]]:
    """Share the episodes of this rank; return all samples, and the lengths on record."""
    rank = dist.get_rank()
    config = configure("rollout.n=2")
    request = Request(FourPrompts(), ROWS, config.rollout, seed=(), first_group=40)
    assignment = Assignment.of(torch.tensor(OWNERS), 2, rank, 1)
    playing = []
    for i in assignment.replica.tolist():
        play, play.result = OUTCOMES[i]
        playing.append(play)
    OUTCOMES[0][0].episode.reward(0.25)
    rollout = SimpleNamespace(vocab_size=50, recorder=None)
    sampler = EpisodeSampler(rollout, Runner(), None, make_tokenizer(), None, None, 0.0)
    seconds = torch.zeros(2).index_fill(0, torch.tensor(rank), 1.0 + rank)
    times = StepTimes(total=1.0 + rank, idle=0.75 * rank)
    samples = sampler.share(request, assignment, Played(playing, times, seconds))
    return samples, request.dataset.drawn_lengths.tolist()


def test_all_ranks_know_the_samples_and_one_rank_the_tokens(tmp_path):
    """The second episode has failed; the others have 2, 3 and 1 branches."""
    results = on_ranks(2, tmp_path, share_on_rank)
    tokenizer = make_tokenizer()
    for rank, (samples, drawn_lengths) in enumerate(results):
        assert samples.rank == rank
        assert samples.owner.tolist() == [1, 1, 0, 0, 0, 0]
        assert samples.episode.tolist() == [0, 0, 2, 2, 2, 3]
        assert samples.group.tolist() == [40, 40, 41, 41, 41, 41]
        assert samples.scores.tolist() == [1.25, 1.25, 4, 4, 4, -1]
        assert samples.parts["right"].tolist() == [2, 2, 5, 5, 5, 0]
        assert samples.parts["right"].dtype == samples.scores.dtype == torch.float32
        assert samples.truncated.tolist() == [True, True, False, False, False, True]
        assert samples.response_lengths.tolist() == [3, 4, 1, 2, 3, 5]
        assert samples.lengths.tolist() == [6, 7, 4, 5, 6, 8]
        assert samples.num_drawn == 4
        assert [failure.row for failure in samples.failures] == [{"row": 3}]
        assert drawn_lengths == pytest.approx([np.nan, 5.5, np.nan, 4.5], nan_ok=True)
        assert samples.metrics["episodes/vllm_idle"] == 0.25
        assert samples.metrics["perf/rollout_idle_max"] == 0.5
        assert samples.metrics["episodes/turns/max"] == 3
        held = [0, 1] if rank == 1 else [2, 3, 4, 5]
        branches = [[0, 1], [0, 1, 2], [0]]
        of_rank = branches[:1] if rank == 1 else branches[1:]
        assert [detail["branch"] for detail in samples.details] == sum(of_rank, [])
        assert samples.batch.lengths == [samples.lengths[i] for i in held]
        rows = [3, 3] if rank == 1 else [1, 1, 1, 1]
        assert [prompt.row["row"] for prompt in samples.prompts] == rows
        for text, detail, sequence in zip(
            samples.texts, samples.details, samples.batch.input_ids.split(samples.batch.lengths)
        ):
            assert detail["prompt"] == tokenizer.decode(sequence[:3])
            assert text == tokenizer.decode(sequence[3:])


@pytest.mark.parametrize("template", ["a template", {"default": "named templates"}, None])
def test_the_gateway_gets_the_settings_of_the_run(template):
    """Of templates with names, the gateway reads the tokenizer's files."""
    config = configure(
        "data.special_tokens_in_text=keep",
        "rollout.episode=my.py:play",
        "rollout.max_episode_tokens=70",
        "rollout.tool_parser=hermes",
        "rollout.reasoning_parser=qwen3",
        path="a/model",
    )
    rollout = SimpleNamespace(stop_token_ids=[7, 9], vocab_size=50)
    assert gateway_settings(config, rollout, SimpleNamespace(chat_template=template)) == {
        "model_path": "a/model",
        "chat_template": template if template == "a template" else None,
        "template_kwargs": {},
        "special_tokens_in_text": "keep",
        "tool_parser": "hermes",
        "reasoning_parser": "qwen3",
        "stop_token_ids": [7, 9],
        "max_model_len": 70,
        "vocab_size": 50,
    }


def ranks_of_group_on_rank(tp_size: int) -> list[int]:
    """Return the ranks of this replica's group, which add up their numbers."""
    rank = dist.get_rank()
    num_replicas = dist.get_world_size() // tp_size
    replica = rank // tp_size
    group = make_replica_group(
        SimpleNamespace(tp_size=tp_size, num_replicas=num_replicas, replica=replica)
    )
    is_member = torch.zeros(dist.get_world_size()).index_fill(0, torch.tensor(rank), 1.0)
    dist.all_reduce(is_member, group=group)
    return is_member.nonzero().flatten().tolist()


def test_the_ranks_of_a_replica_have_a_group_of_their_own(tmp_path):
    groups = on_ranks(4, tmp_path, ranks_of_group_on_rank, 2)
    assert groups == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert make_replica_group(SimpleNamespace(tp_size=1)) is None


def test_a_limit_with_a_score_is_a_reward_and_an_episode_without_tokens_is_none():
    """A score of 0 is a score, too. A turn that was aborted has no tokens."""
    runner = Runner()
    runner.parts = ["right"]
    sampler = EpisodeSampler(None, runner, None, None, None, None, 0.0)
    prompt = Prompt(PROMPT, "", {"row": 4})
    played = play(2)
    for score in (0.0, -1.0):
        judged = sampler.judge(Limit("max_turns", score), played, prompt)
        assert judged == Reward(score, {"right": 0.0})
    for result in (Limit("max_turns", None), Failure("raised", "", {}, ""), Reward(1.0, {}), None):
        assert sampler.judge(result, played, prompt) is result
    aborted = play()
    aborted.episode.drop(aborted.episode.begin(PROMPT, seed=0))
    assert aborted.episode.num_turns == 1
    for result in (Reward(1.0, {}), Limit("max_turns", 0.0)):
        judged = sampler.judge(result, aborted, prompt)
        assert (judged.kind, judged.row) == ("no turns", {"row": 4})

"""Which rank draws and grades a response, and what all ranks learn of it.

The tokens of the responses are made by hand; vLLM draws them in test_rollout_samples.py.
"""

import math
import time
from contextlib import closing
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from config import load
from data.batching.batch import Batch
from data.prompts import Prompt, PromptDataset
from examples.arithmetic import make_tokenizer
from profiling import Profiler
from rollout.drawing import (
    Assignment,
    Generation,
    Request,
    Sampler,
    agree_on_parts,
    assign,
    dataset_rows,
    idle_metrics,
    response_seeds,
    seconds_of_rank,
)
from rollout.exchange import gather_on_all_ranks, gather_on_first_rank, sum_over_ranks
from rollout.grading.grader import Failure, Grader, Result, Reward
from rollout.responses import Responses
from rollout.samples import Samples
from rollout.vllm.sampling import request_seed
from tests.support.ranks import on_ranks

NUM_ROWS = 7
ROWS = [6, 2, 3, 0, 5]
FAILING_ROW = 6
NUM_SAMPLES = 2
# It allows one failure of the 10 responses of all ranks, but none of a single rank's share.
MAX_FAILURE_RATE = 0.15
MAX_TOKENS = 6
FIRST_GROUP = 40
END = 257  # ends a response in the tokenizer of examples/arithmetic.py
REWARD = """
def score(prompt, response, row):
    if row["number"] == 6 and response.endswith("1"):
        raise ValueError(f"no reward for {response}")
    return {"tens": int(response[1]) * 10, "units": len(response)}

def step_score(response):
    rest = 0.5 if len(response) > 3 else 0.0
    return 1.0, [(2, 0.25), (len(response), rest)]

def parts_score(response, row):
    if row["number"] == 6 and response.endswith("0"):
        raise ValueError("no reward")
    return {"first" if row["number"] == 6 else "other": 1.0}
"""
SAMPLING = SimpleNamespace(n=NUM_SAMPLES, stop=[])


class HandmadePrompts(PromptDataset):
    """Seven prompts that are in no file. The prompt of row r has r + 1 tokens."""

    def __init__(self):
        self.prompts = [
            Prompt([3 + row] * (row + 1), f"prompt {row}", {"number": row})
            for row in range(NUM_ROWS)
        ]
        self.drawn_lengths = np.full(NUM_ROWS, np.nan, np.float32)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]


def make_request() -> Request:
    return Request(HandmadePrompts(), ROWS, SAMPLING, seed=(7, 1), first_group=FIRST_GROUP)


def response_text(i: int) -> str:
    """Return the text of response i of the request: "r" and its row, once or twice, and i % 2."""
    row = ROWS[i // NUM_SAMPLES]
    return f"r{row}" * (1 + i % 2) + str(i % 2)


def generate_by_hand(request: Request, assignment: Assignment) -> Generation:
    """Return the responses of this rank's replica. Those of 5 tokens with END are complete."""
    tokenizer = make_tokenizer()
    indices = assignment.replica.tolist()
    prompts = [request.dataset[ROWS[int(assignment.position[i])]] for i in indices]
    responses = Responses(len(indices), MAX_TOKENS, 0)
    truncated = []
    for number, i in enumerate(indices):
        ids = [*tokenizer(response_text(i), add_special_tokens=False)["input_ids"], END]
        truncated.append(i % 3 == 0)
        ids = ids[: len(ids) - truncated[-1]]
        log_probs = -np.ones((len(ids), 1)) * (i + 1)
        responses.extend(number, np.array(ids)[:, None], log_probs)
    rank = dist.get_rank()
    seconds = torch.zeros(dist.get_world_size())
    seconds[rank] = 1.0 + rank
    batch = responses.batch([prompt.input_ids for prompt in prompts])
    return Generation(batch, torch.tensor(truncated), prompts, seconds, {"of vLLM": 3.0})


class HandmadeRollout:
    """One of several replicas. It knows what to respond to a seed, and is slower than the first."""

    drafter = "ngram"

    def __init__(self, num_replicas: int):
        self.num_replicas = num_replicas
        self.replica = dist.get_rank() * num_replicas // dist.get_world_size()
        # One step with drafts, of 4 tokens, of which 2 and 4 were accepted, and kept 1 and 3.
        counts = [1, 4, 2 + 2 * self.replica, 1 + 2 * self.replica]
        self.drafts = SimpleNamespace(counts=torch.tensor(counts))
        self.response_of_seed = {}
        for i in range(len(ROWS) * NUM_SAMPLES):
            seed = request_seed(7, 1, ROWS[i // NUM_SAMPLES], i % NUM_SAMPLES)
            self.response_of_seed[seed] = i

    def generate(self, prompts, seeds, sampling) -> tuple[Batch, torch.Tensor]:
        assert sampling is SAMPLING
        time.sleep(0.02 + 0.3 * self.replica)
        indices = [self.response_of_seed[seed] for seed in seeds]
        rows = [ROWS[i // NUM_SAMPLES] for i in indices]
        assert prompts == [[3 + row] * (row + 1) for row in rows]
        position = torch.arange(len(ROWS)).repeat_interleave(NUM_SAMPLES)
        assignment = SimpleNamespace(replica=torch.tensor(indices), position=position)
        generation = generate_by_hand(make_request(), assignment)
        return generation.batch, generation.truncated


def draw_at_once(config, num_replicas: int) -> tuple[Samples, list[int]]:
    """Return the samples of Sampler.draw(), and the counts of this rank's drafts after it."""
    rollout = HandmadeRollout(num_replicas)
    with closing(Grader(config)) as grader:
        sampler = Sampler(rollout, grader, make_tokenizer(), None, MAX_FAILURE_RATE, True)
        return sampler.draw(make_request(), Profiler()), rollout.drafts.counts.tolist()


def agree_by_hand(config, results: list[dict[int, Result]]) -> list[str] | None:
    """Return the parts that this rank expects after a draw; results[rank]: {response: result}.

    In another draw, all rewards have other parts.
    """
    own = results[dist.get_rank()]
    later = [Reward(0.0, {"of another draw": 0.0})] * len(own)
    with closing(Grader(config)) as grader:
        for rewards in ([*own.values()], later):
            agree_on_parts(grader, torch.tensor([*own]), rewards, None)
        return grader.parts


def draw_by_hand(config, num_replicas: int) -> tuple[Samples, list, list, list]:
    """Return the samples of this rank, the lengths that were recorded, parts and seeds."""
    request = make_request()
    ranks_per_replica = dist.get_world_size() // num_replicas
    assignment = assign(request, dist.get_rank() // ranks_per_replica, num_replicas)
    with closing(Grader(config)) as grader:
        sampler = Sampler(None, grader, make_tokenizer(), None, MAX_FAILURE_RATE, True)
        generation = generate_by_hand(request, assignment)
        graded = sampler.grade(request, assignment, generation)
        samples, is_graded = sampler.share(request, assignment, generation, graded)
        seeds = dict(zip(assignment.replica.tolist(), response_seeds(request, assignment)))
        recorded = request.dataset.drawn_lengths.tolist()
        return samples, is_graded, recorded, grader.parts, seeds


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drawing")
    (folder / "reward.py").write_text(REWARD)
    return load(
        "ppo.yaml",
        [
            "model.path=unused",
            "data.train_files=unused",
            f"output_dir={folder}",
            f"reward.function={folder}/reward.py:score",
            "reward.num_workers=1",
        ],
    )


@pytest.fixture(scope="module")
def draw(config, tmp_path_factory):
    @cache
    def draw(num_ranks: int, num_replicas: int):
        folder = tmp_path_factory.mktemp("ranks")
        return on_ranks(num_ranks, folder, draw_by_hand, config, num_replicas)

    return draw


def expected_lengths_of_responses() -> list[int]:
    return [len(response_text(i)) + (i % 3 != 0) for i in range(len(ROWS) * NUM_SAMPLES)]


@pytest.mark.parametrize("num_ranks, num_replicas", [(1, 1), (2, 2), (3, 1)])
def test_all_ranks_know_the_numbers_and_one_rank_the_tokens(draw, num_ranks, num_replicas):
    results = draw(num_ranks, num_replicas)
    tokenizer = make_tokenizer()
    num_responses = len(ROWS) * NUM_SAMPLES
    failing = ROWS.index(FAILING_ROW) * NUM_SAMPLES + 1
    rows = [row for row in ROWS for _ in range(NUM_SAMPLES)]
    lengths = expected_lengths_of_responses()
    units = [float(len(response_text(i))) for i in range(num_responses)]
    units[failing] = 0.0
    tens = [10.0 * row for row in rows]
    tens[failing] = 0.0
    held_by = []
    for rank, (samples, is_graded, recorded, parts, _) in enumerate(results):
        assert is_graded.tolist() == [i != failing for i in range(num_responses)]
        assert parts == ["tens", "units"]
        assert samples.parts["tens"].tolist() == tens
        assert samples.parts["units"].tolist() == units
        assert samples.scores.tolist() == [a + b for a, b in zip(tens, units)]
        assert samples.scores.dtype == torch.float32
        assert samples.response_lengths.tolist() == lengths
        assert samples.lengths.tolist() == [n + row + 1 for n, row in zip(lengths, rows)]
        assert samples.truncated.tolist() == [i % 3 == 0 for i in range(num_responses)]
        assert samples.group.tolist() == [FIRST_GROUP + i // 2 for i in range(num_responses)]
        assert samples.rank == rank
        assert samples.num_drawn == num_responses
        assert samples.rows is None
        (failure,) = samples.failures
        assert (failure.kind, failure.row) == ("raised", {"number": FAILING_ROW})
        assert failure.response == response_text(failing)
        idle = [1 - (1 + r) / num_ranks for r in range(num_ranks)]
        assert samples.metrics == pytest.approx(
            {
                "perf/rollout_idle": sum(idle) / num_ranks,
                "perf/rollout_idle_max": idle[0],
                "of vLLM": 3.0,
            }
        )
        means = [math.nan] * NUM_ROWS
        for k, row in enumerate(ROWS):
            means[row] = sum(lengths[2 * k : 2 * k + 2]) / 2
        assert recorded == pytest.approx(means, nan_ok=True)
        held = samples.held.tolist()
        held_by += held
        assert samples.texts == [response_text(i) for i in held]
        assert [prompt.row["number"] for prompt in samples.prompts] == [rows[i] for i in held]
        for number, i in enumerate(held):
            sequence = samples.batch.select([number])
            is_response = sequence.fields["loss_mask"] > 0
            response = sequence.input_ids[is_response].tolist()
            assert sequence.input_ids[~is_response].tolist() == [3 + rows[i]] * (rows[i] + 1)
            assert tokenizer.decode(response, skip_special_tokens=True) == response_text(i)
            assert sequence.fields["rollout_log_probs"][is_response].unique().tolist() == [-i - 1]
    assert sorted(held_by) == list(range(num_responses))


def test_a_draw_leaves_out_what_was_not_graded(config, draw, tmp_path):
    """Apart from that, it has what its steps would have, one after the other."""
    drawn = on_ranks(2, tmp_path, draw_at_once, config, 2)
    for rank, (samples, counts) in enumerate(drawn):
        expected, is_graded, *_ = draw(2, 2)[rank]
        expected = expected.select(is_graded)
        failing = ROWS.index(FAILING_ROW) * NUM_SAMPLES + 1
        assert len(samples) == len(expected) == len(ROWS) * NUM_SAMPLES - 1
        assert samples.group.tolist() == expected.group.tolist()
        assert samples.scores.tolist() == expected.scores.tolist()
        assert samples.texts == expected.texts
        assert response_text(failing) not in samples.texts
        assert samples.batch.input_ids.tolist() == expected.batch.input_ids.tolist()
        assert [failure.response for failure in samples.failures] == [response_text(failing)]
        assert samples.num_drawn == len(ROWS) * NUM_SAMPLES
        # 8 tokens of both replicas were drafted in 2 steps, 6 accepted, and 4 kept.
        assert samples.metrics["mtp/accept_rate"] == 6 / 8
        assert samples.metrics["mtp/accept_length"] == 1 + 4 / 2
        assert counts == [1, 4, 2 + 2 * rank, 1 + 2 * rank], "of this replica, as before"
        # The first replica waits for the second.
        idle = samples.metrics["perf/rollout_idle_max"]
        assert 0.1 < idle < 1
        assert samples.metrics["perf/rollout_idle"] == pytest.approx(idle / 2)


def test_rewards_with_other_parts_than_the_first_are_failures_on_all_ranks(config, tmp_path):
    """The first reward is that of the second response, whichever rank has it."""
    function = config.reward.function.replace(":score", ":parts_score")
    with_parts = OmegaConf.merge(config, {"reward": {"function": function}})
    for samples, _ in on_ranks(2, tmp_path, draw_at_once, with_parts, 2):
        assert samples.group.tolist() == [FIRST_GROUP]
        assert samples.parts.keys() == {"first"}
        kinds = [failure.kind for failure in samples.failures]
        assert kinds == ["raised"] + 8 * ["different parts"]
        texts = [failure.response for failure in samples.failures]
        assert texts == [response_text(i) for i in (0, *range(2, 10))], "in their order"


def test_rewards_of_steps_are_at_the_last_tokens_of_the_steps(config, tmp_path):
    """Two ranks of one replica generate all responses, and each grades some of them."""
    settings = {"function": config.reward.function.replace(":score", ":step_score")}
    with_steps = OmegaConf.merge(config, {"reward": settings | {"step_rewards": True}})
    for samples, _ in on_ranks(2, tmp_path, draw_at_once, with_steps, 1):
        assert samples.truncated.tolist() == [i % 3 == 0 for i in range(len(samples))]
        for number, i in enumerate(samples.held.tolist()):
            text = response_text(i)
            rest = 0.5 if len(text) > 3 else 0.0
            assert samples.scores[i] == 1.0 + 0.25 + rest
            sequence = samples.batch.select([number])
            # A token is a character; the end token, if there is one, belongs to the last step.
            num_tokens = len(sequence.input_ids)
            first = ROWS[i // NUM_SAMPLES] + 1
            rewards = torch.zeros(num_tokens)
            ends = torch.zeros(num_tokens)
            rewards[first + 1] = 0.25
            rewards[first + len(text) - 1] = rest
            ends[[first + 1, first + len(text) - 1]] = 1
            assert sequence.fields["turn_rewards"].tolist() == rewards.tolist()
            assert sequence.fields["step_ends"].tolist() == ends.tolist()


def test_a_seed_belongs_to_the_row_and_the_number_in_the_group(draw):
    """However the responses are divided over replicas."""
    expected = {}
    for i in range(len(ROWS) * NUM_SAMPLES):
        expected[i] = request_seed(7, 1, ROWS[i // NUM_SAMPLES], i % NUM_SAMPLES)
    seeds = {}
    for *_, seeds_of_rank in draw(2, 2):
        assert not seeds.keys() & seeds_of_rank.keys(), "both replicas would draw a response"
        seeds |= seeds_of_rank
    assert seeds == expected


def test_all_ranks_expect_the_parts_of_the_first_reward_of_the_run(config, tmp_path):
    """It may be on any rank, after a response that could not be graded."""
    failure = Failure("raised", "no reward", {}, "r")
    results = [
        {4: Reward(1.0, {"on rank 0": 1.0})},
        {0: failure, 1: Reward(2.0, {"b": 1.0, "a": 1.0}), 5: Reward(1.0, {"later": 1.0})},
        {2: failure},
    ]
    assert on_ranks(3, tmp_path, agree_by_hand, config, results) == [["a", "b"]] * 3


def assign_by_length(num_replicas: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Assign prompts whose last responses had known lengths, and return the parts as lists."""
    request = make_request()
    request.dataset.drawn_lengths[ROWS] = [1, 1, 1, 9, 6]
    ranks_per_replica = dist.get_world_size() // num_replicas
    assignment = assign(request, dist.get_rank() // ranks_per_replica, num_replicas)
    lists = [x.tolist() for x in vars(assignment).values()]
    return *lists, dataset_rows(request, assignment).tolist()


def test_replicas_get_equal_lengths_and_their_ranks_get_whole_groups(tmp_path):
    """Two replicas of two ranks: the prompt of 9 tokens is as long as all others together."""
    for rank, (position, owner, replica, held, rows) in enumerate(
        on_ranks(4, tmp_path, assign_by_length, 2)
    ):
        assert position == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
        assert rows == [6, 6, 2, 2, 3, 3, 0, 0, 5, 5]
        replica_of_prompt = [owner[2 * k] // 2 for k in range(len(ROWS))]
        long_one = replica_of_prompt[3]
        assert [k for k in range(len(ROWS)) if replica_of_prompt[k] == long_one] == [3]
        of_others = [owner[2 * k] for k in (0, 1, 2, 4)]
        first_rank = 2 * (1 - long_one)
        assert of_others == [first_rank, first_rank + 1, first_rank, first_rank + 1]
        assert owner[1::2] == owner[::2], "a group is on one rank"
        assert replica == [i for i in range(10) if owner[i] // 2 == rank // 2]
        assert held == [owner[i] == rank for i in replica]


def seeds_of(rows, n):
    """Return the seeds of all responses, [prompts][n], and those of a replica with every second."""
    request = Request(None, rows, SimpleNamespace(n=n), seed=(7, 1))
    position = torch.arange(len(rows)).repeat_interleave(n)
    everything = torch.arange(len(position))
    seeds = []
    for replica in (everything, everything[::2]):
        seeds.append(response_seeds(request, Assignment(position, position, replica, replica >= 0)))
    return [seeds[0][i * n : (i + 1) * n] for i in range(len(rows))], seeds[1]


def test_responses_to_a_repeated_row_differ():
    """The first group of a row has the seeds that it has when the row is not repeated."""
    seeds, half = seeds_of([4, 2, 4, 4], n=2)
    assert seeds[:2] == seeds_of([4, 2], n=2)[0]
    assert seeds[0] + seeds[2] + seeds[3] == [request_seed(7, 1, 4, i) for i in range(6)]
    assert half == [group[0] for group in seeds]


def limits_of_grading(config, own_limit: float | None) -> list[float]:
    """Grade all responses of a request with this max_failures; return what the grader got."""
    limits = []
    request = replace(make_request(), max_failures=own_limit)
    assignment = assign(request, 0, 1)
    with closing(Grader(config)) as grader:
        original = grader.grade

        def grade(items, groups, max_failures):
            limits.append(max_failures)
            assert groups == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
            texts = [(f"prompt {ROWS[i // 2]}", response_text(i)) for i in range(10)]
            assert [(prompt, text) for prompt, text, _ in items] == texts
            assert [row["number"] for *_, row in items] == [ROWS[i // 2] for i in range(10)]
            return original(items, groups, 10)

        grader.grade = grade
        sampler = Sampler(None, grader, make_tokenizer(), None, MAX_FAILURE_RATE, True)
        sampler.grade(request, assignment, generate_by_hand(request, assignment))
    return limits


@pytest.mark.parametrize("own_limit, expected", [(None, 1.5), (0.0, 0.0), (4.0, 4.0)])
def test_grading_stops_after_the_failures_of_the_request_or_of_the_samplers_rate(
    config, tmp_path, own_limit, expected
):
    """The rate of 0.15 is that of the 10 responses of all ranks."""
    assert on_ranks(1, tmp_path, limits_of_grading, config, own_limit) == [[expected]]


def idle_of_ranks(seconds: list[float]) -> tuple[dict[str, float], list[float]]:
    """Return the metrics of ranks that took these seconds, and this rank's own seconds after it."""
    own = seconds_of_rank(seconds[dist.get_rank()])
    return idle_metrics(own, None), own.tolist()


def test_a_replica_is_idle_while_it_waits_for_the_slowest_one(tmp_path):
    """The first rank waits for three quarters of the time, and the third one for half of it."""
    for rank, (metrics, own) in enumerate(on_ranks(3, tmp_path, idle_of_ranks, [1.0, 4.0, 2.0])):
        expected = {"perf/rollout_idle": 1.25 / 3, "perf/rollout_idle_max": 0.75}
        assert metrics == pytest.approx(expected)
        assert own == [[1.0, 0, 0], [0, 4.0, 0], [0, 0, 2.0]][rank], "these stay as they were"


def gather_by_position() -> tuple[list[str], list[str]]:
    """Return what rank 0 and what all ranks gather of items at the positions 3 - rank and 9."""
    rank = dist.get_rank()
    items = [(9 - rank, f"late {rank}"), (3 - rank, f"early {rank}")]
    return gather_on_first_rank(items, None), gather_on_all_ranks([f"of {rank}"], None)


def test_items_of_all_ranks_are_sorted_by_position_on_the_first_one(tmp_path):
    first, second = on_ranks(2, tmp_path, gather_by_position)
    assert first == (["early 1", "early 0", "late 1", "late 0"], ["of 0", "of 1"])
    assert second == ([], ["of 0", "of 1"])


def test_without_a_process_group_there_are_only_ones_own_numbers():
    assert gather_on_first_rank([(5, "b"), (2, "a")], None) == ["a", "b"]
    assert sum_over_ranks(torch.tensor([2.0, 3.0]), None).tolist() == [2, 3]

"""Steps whose responses continue in later steps, with a vLLM that has no model."""

from __future__ import annotations

import itertools
from contextlib import closing
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from data.prompts import Prompt, PromptDataset
from engines.model.routes import FIELD as ROUTES
from examples.arithmetic import make_tokenizer
from profiling import Profiler
from rollout.drawing import Request, Sampler
from rollout.grading.grader import Grader
from rollout.partial.drawing import Draw, PartialSampler, TrainedGroup
from rollout.partial.groups import Counters, OpenGroup, OpenGroups, OpenResponse, to_bytes
from rollout.partial.ledger import Ledger
from rollout.partial.responses import PartialResponses
from rollout.responses import Responses
from rollout.samples import Samples
from rollout.vllm.continuing import ContinuingRollout
from rollout.vllm.image_prompts import ImagePrompt
from rollout.vllm.sampling import request_seed
from tests.rollout.scripted_vllm import ScriptedRecorder, ScriptedRollout, whole_response
from tests.support.ranks import on_ranks
from tests.support.samples import configure

BATCH_SIZE = 4  # groups of a step
GROUP_SIZE = 2
MAX_TOKENS = 12
NUM_STEPS = 4
NUM_ROWS = 3 * NUM_STEPS
MAX_STALENESS = 2
SEED = 11
FAILURE_RATE = 0.25
REWARD = """
def score(prompt, response, row):
    if row["number"] == 4:
        raise ValueError("no reward")
    return row["number"] + 0.5
"""


class HandmadePrompts(PromptDataset):
    """Prompts that are in no file. The prompt of row r has 1 + r % 3 tokens."""

    def __init__(self):
        self.prompts = [
            Prompt([3 + row] * (1 + row % 3), f"prompt {row}", {"number": row})
            for row in range(NUM_ROWS)
        ]
        self.drawn_lengths = np.full(NUM_ROWS, np.nan, np.float32)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]


def rows_of_batch(batch: int) -> list[int]:
    """Return the rows of a batch: no other batch has them, but this one has one of them twice."""
    return [3 * batch, 3 * batch + 1, 3 * batch + 2, 3 * batch]


def expected_response(row: int, number: int) -> tuple[list[int], str]:
    """Return a response, and why it ends. number: of the response among those to its row."""
    prompt = HandmadePrompts()[row].input_ids
    return whole_response(prompt, request_seed(SEED, row // 3, row, number), MAX_TOKENS)


def make_sampler(config, rollout: ScriptedRollout, grader) -> PartialResponses:
    settings = config.rollout.partial
    return PartialResponses(
        sampler=Sampler(rollout, grader, make_tokenizer(), None, FAILURE_RATE, True),
        ledger=Ledger(rollout.num_replicas, settings.oversample, NUM_STEPS * BATCH_SIZE),
        dataset=HandmadePrompts(),
        rows_of_batch=rows_of_batch,
        config=config,
        open=OpenGroups(settings.max_staleness, finishes_old=True),
        continuing=ContinuingRollout(rollout),
    )


@dataclass
class Step:
    """What a step trains on, as one rank knows it, and what its vLLM has done.

    num_slots: the requests that vLLM got, times its steps.
    """

    request: Request
    samples: Samples
    metrics: dict[str, float]
    num_carried: int
    num_slots: int
    num_tokens: int


def run_step(sampler: PartialResponses, version: int) -> Step:
    engine = sampler.sampler.rollout.llm.llm_engine
    engine.version = version
    before = SimpleNamespace(**vars(engine))
    request, samples = sampler.draw(BATCH_SIZE, version, 100 * version, Profiler())
    metrics = sampler.end_step(version)
    return Step(
        replace(request, dataset=None, sampling=None),
        samples,
        metrics,
        len(sampler.open.groups),
        (engine.num_added - before.num_added) * (engine.num_steps - before.num_steps),
        engine.num_tokens - before.num_tokens,
    )


def run_steps(
    config, versions, tp_size: int, is_closed: bool, files: list[bytes]
) -> tuple[list[Step], dict[str, bytes]]:
    """Return the steps of this rank, and its files of a checkpoint at the end.

    files: of a checkpoint that the first step continues from, if any.
    """
    rollout = ScriptedRollout(is_closed, tp_size)
    rollout.recorder = ScriptedRecorder()
    with closing(Grader(config)) as grader:
        sampler = make_sampler(config, rollout, grader)
        if files:
            sampler.load_state(files)
        steps = [run_step(sampler, version) for version in versions]
        return steps, sampler.state()


@pytest.fixture(scope="module", autouse=True)
def vllm_of_all_ranks():
    """Import vLLM before the ranks are forked, so that none of them has to."""
    import vllm.sampling_params
    import vllm.v1.engine.detokenizer  # noqa: F401


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("partial")
    (folder / "reward.py").write_text(REWARD)
    return configure(
        f"reward.function={folder}/reward.py:score",
        "reward.num_workers=1",
        "rollout.partial.enable=true",
        "rollout.partial.oversample=1.5",
        f"rollout.partial.max_staleness={MAX_STALENESS}",
        f"rollout.n={GROUP_SIZE}",
        f"rollout.max_tokens={MAX_TOKENS}",
        "rollout.top_k=3",
        "rollout.routing_replay=true",
        f"data.train_batch_size={BATCH_SIZE}",
        f"trainer.seed={SEED}",
    )


def check_sequence(samples: Samples, held: int, row: int, version: int) -> int:
    """Check a response that a rank holds; return its number among the responses to its row."""
    i = int(samples.held[held])
    sequence = samples.batch.select([held])
    is_response = sequence.fields["loss_mask"] > 0
    tokens = sequence.input_ids[is_response].tolist()
    prompt = HandmadePrompts()[row].input_ids
    assert sequence.input_ids[~is_response].tolist() == prompt
    numbers = [n for n in range(2 * GROUP_SIZE) if expected_response(row, n)[0] == tokens]
    assert numbers, "these tokens belong to no response to this row"
    _, reason = expected_response(row, numbers[0])
    assert bool(samples.truncated[i]) == (reason == "length")
    assert samples.response_lengths[i] == len(tokens)
    assert samples.lengths[i] == len(prompt) + len(tokens)
    places = torch.arange(len(prompt), len(prompt) + len(tokens))
    # The vLLM of these tests tells in a log-probability which weights have drawn a token.
    drawn_by = -sequence.fields["rollout_log_probs"][is_response] - places / 1024
    assert sequence.fields["age"][is_response].tolist() == (version - drawn_by).tolist()
    assert not sequence.fields["age"][~is_response].any()
    candidates = sequence.candidate_ids[is_response]
    assert candidates[:, 0].tolist() == tokens
    assert candidates[:, 1:].tolist() == [[*range(2, 2 + candidates.shape[1] - 1)]] * len(tokens)
    assert sequence.fields[ROUTES][:, 0, 0].tolist() == [*range(len(prompt) + len(tokens))]
    assert samples.prompts[held].row["number"] == row
    return numbers[0]


def check_step(steps: list[Step], version: int, tp_size: int) -> list[tuple[int, int]]:
    """Check one step, as all ranks know it; return row and number of each of its responses."""
    trained = []
    first = steps[0]
    for rank, step in enumerate(steps):
        samples = step.samples
        rows = step.request.rows
        assert rows == first.request.rows
        rest = itertools.chain(*map(rows_of_batch, range(NUM_STEPS)))
        assert all(row in rest for row in rows), "groups are in the order of the data"
        assert samples.scores.tolist() == first.samples.scores.tolist()
        assert samples.owner.tolist() == first.samples.owner.tolist()
        for held, i in enumerate(samples.held.tolist()):
            group = int(samples.group[i]) - 100 * version
            number = check_sequence(samples, held, rows[group], version)
            assert samples.scores[i] == rows[group] + 0.5
            trained.append((rows[group], number))
        num_failures = GROUP_SIZE * rows.count(4)
        assert [failure.row["number"] for failure in samples.failures] == [4] * num_failures
        assert samples.num_drawn == GROUP_SIZE * len(rows)
        trained += [(4, -1)] * num_failures if rank == 0 else []
    tokens = sum(step.num_tokens for step in steps)
    slots = sum(step.num_slots for step in steps)
    carried = sum(step.num_carried for step in steps[::tp_size])
    assert first.metrics == {
        "partial/carried_groups": carried,
        "partial/stale_drops": 0,
        "partial/idle_slots": pytest.approx(1 - tokens / slots if slots else 0),
    }
    return trained


EVERY_RESPONSE = sorted(
    (3 * batch + place, number)
    for batch in range(NUM_STEPS)
    for place, num_groups in enumerate((2, 1, 1))
    for number in range(num_groups * GROUP_SIZE)
)
TRAINED = sorted((row, -1 if row == 4 else number) for row, number in EVERY_RESPONSE)


@pytest.mark.parametrize(
    "num_ranks, tp_size, is_closed", [(1, 1, True), (2, 1, False), (2, 2, True)]
)
def test_every_response_is_trained_once_with_all_its_tokens(
    config, tmp_path, num_ranks, tp_size, is_closed
):
    """However often it was interrupted, and whichever ranks have drawn and graded it."""
    arguments = (config, range(NUM_STEPS), tp_size, is_closed, [])
    results = on_ranks(num_ranks, tmp_path, run_steps, *arguments)
    trained = []
    ages = set()
    for version in range(NUM_STEPS):
        steps = [steps[version] for steps, _ in results]
        trained += check_step(steps, version, tp_size)
        for step in steps:
            ages |= {*step.samples.batch.fields["age"].tolist()}
    assert sorted(trained) == TRAINED
    assert len(ages) > 1
    assert max(ages) <= MAX_STALENESS


def test_another_number_of_replicas_goes_on_with_a_checkpoint(config, tmp_path):
    before = on_ranks(2, tmp_path, run_steps, config, range(2), 1, True, [])
    files = before[0][1] | before[1][1]
    names = [f"open_responses_0000{rank}.safetensors" for rank in range(2)]
    assert list(files) == names
    arguments = (config, range(2, NUM_STEPS), 1, True, [files[name] for name in names])
    after = on_ranks(1, tmp_path, run_steps, *arguments)
    trained = []
    for version in range(NUM_STEPS):
        results = before if version < 2 else after
        trained += check_step([steps[version % 2] for steps, _ in results], version, 1)
    assert sorted(trained) == TRAINED


def test_the_first_rank_of_a_replica_saves_its_groups(config, tmp_path):
    results = on_ranks(2, tmp_path, run_steps, config, range(1), 2, False, [])
    assert [[*files] for _, files in results] == [["open_responses_00000.safetensors"], []]


def draw_on_one_rank(config, *first_groups: int) -> list[tuple[Request, Samples]]:
    """Return the draws of one step, of four groups each."""
    rollout = ScriptedRollout()
    with closing(Grader(config)) as grader:
        sampler = make_sampler(config, rollout, grader)
        draws = [sampler.draw(BATCH_SIZE, 0, first, Profiler()) for first in first_groups]
        return [(replace(request, dataset=None), samples) for request, samples in draws]


def test_the_permitted_failures_are_those_of_a_whole_step(config, tmp_path):
    """A draw may have those that earlier draws of its step have left."""
    (draws,) = on_ranks(1, tmp_path, draw_on_one_rank, config, 0, 4, 8)
    num_graded = 0
    num_failed = 0
    for request, samples in draws:
        num_graded += GROUP_SIZE * BATCH_SIZE
        assert request.max_failures == FAILURE_RATE * num_graded - num_failed
        num_failed += len(samples.failures)
    assert num_failed == GROUP_SIZE


@pytest.mark.usefixtures("process_group")
def test_a_group_stays_on_one_of_the_ranks_that_have_drawn_it():
    """The ranks of a replica take turns."""
    config = configure(f"rollout.n={GROUP_SIZE}")
    rollout = SimpleNamespace(num_replicas=2, replica=0, tp_size=2)
    sampler = PartialSampler(
        sampler=SimpleNamespace(rollout=rollout),
        ledger=None,
        dataset=None,
        rows_of_batch=None,
        config=config,
        open=None,
    )
    replicas = [1, 0, 0, 1, 0]
    assignment = sampler.assign([TrainedGroup(g, 7, r) for g, r in enumerate(replicas)])
    assert assignment.owner.tolist() == [2, 2, 0, 0, 1, 1, 3, 3, 0, 0]
    assert assignment.position.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert assignment.replica.tolist() == [2, 3, 4, 5, 8, 9]
    assert assignment.held.tolist() == [dist.get_rank() == r for r in (0, 0, 1, 1, 0, 0)]


class RecordingContinuation:
    """A ContinuingRollout that generates nothing, and records the images that it gets."""

    num_steps = 0

    def generate(self, prompts, *arguments, image_prompts):
        self.image_prompts = image_prompts
        return Responses(len(prompts), 1, 0), {}


@pytest.mark.usefixtures("process_group")
def test_prompts_with_images_continue_after_their_tokens(config):
    """What vLLM gets has one placeholder per image; the trainer finds the images by the row."""
    sampler = make_sampler(config, ScriptedRollout(), None)
    sampler.continuing = RecordingContinuation()
    sampler.dataset.image_store = "images"
    images = ["an image"]
    sampler.dataset.prompts[5] = replace(sampler.dataset[5], before_images=[8, 9], images=images)
    running = OpenResponse(seed=1)
    running.append(np.array([6, 7]), np.zeros(2), np.zeros((2, 12), np.int32), version=0)
    sampler.open.groups = [OpenGroup(g, row, [running]) for g, row in enumerate((2, 5))]
    sampler.generate(1, 0)
    assert sampler.continuing.image_prompts == [
        ImagePrompt([*sampler.dataset[2].input_ids, 6, 7], sampler.dataset[2].images),
        ImagePrompt([8, 9, 6, 7], images),
    ]


@pytest.mark.usefixtures("process_group")
def test_responses_of_a_replica_are_packed_with_the_rows_of_their_images(config):
    sampler = make_sampler(config, ScriptedRollout(), None)
    sampler.dataset.image_store = "images"
    complete = OpenResponse(seed=1)
    complete.append(np.array([6, 7]), np.zeros(2), np.zeros((2, 12), np.int32), version=0)
    groups = [TrainedGroup(0, 5, replica=1), TrainedGroup(1, 2, replica=0)]
    sampler.sampler.rollout.num_replicas = 2
    request = Request(sampler.dataset, [5, 2], config.rollout, seed=())
    trained = [OpenGroup(1, 2, [complete] * GROUP_SIZE)]
    generation = sampler.pack(Draw(request, sampler.assign(groups), trained, 3, torch.zeros(1)))
    assert generation.batch.rows.tolist() == [2, 2]
    assert generation.batch.image_store == "images"


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    "num_replicas, own, replica_of",
    [
        (1, [3, 4, 7], {3: 0, 4: 0, 7: 0}),
        (2, [4], {3: 0, 7: 0, 4: 1}),
        (3, [4], {3: 0, 4: 1, 7: 2}),
    ],
)
def test_groups_of_a_checkpoint_stay_on_their_replicas_or_are_dealt(
    config, num_replicas, own, replica_of
):
    rollout = ScriptedRollout()
    rollout.num_replicas = num_replicas
    rollout.replica = min(1, num_replicas - 1)
    sampler = make_sampler(config, rollout, None)
    files = []
    for numbers in ([7, 3], [4]):
        groups = [OpenGroup(g, g, [OpenResponse(seed=g)]) for g in numbers]
        files.append(to_bytes(groups, Counters(next_group=9, num_dropped=2)))
    sampler.load_state(files)
    assert [group.number for group in sampler.open.groups] == own
    assert sampler.ledger.replica_of == replica_of
    assert (sampler.ledger.next_group, sampler.ledger.num_dropped) == (9, 2)

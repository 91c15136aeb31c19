"""What a step of rollout.partial draws, trains on and keeps: the arithmetic around vLLM.

The tokens are made by hand; vLLM draws them in test_partial_reference.py.
"""

from dataclasses import asdict, dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from config import InputError
from engines.checkpoint.checkpointer import FILES
from engines.model.routes import FIELD as ROUTES
from profiling import Profiler
from rollout.drawing import Assignment, Request
from rollout.partial.drawing import Draw, StepCounts, TrainedGroup
from rollout.partial.groups import Counters, OpenGroup, OpenGroups, OpenResponse, to_bytes
from rollout.partial.ledger import Ledger
from rollout.partial.responses import PartialResponses
from rollout.partial.resume import check_open_groups
from rollout.responses import Responses
from rollout.vllm.image_prompts import ImagePrompt
from rollout.vllm.sampling import NUM_TIES, request_seed
from tests.rollout.test_drawing import HandmadePrompts
from tests.support.ranks import on_ranks
from tests.support.samples import configure

VOCAB_SIZE = 50
SEED = 11
# (rollout.top_k, the candidates of each token)
WITH_AND_WITHOUT_CANDIDATES = [(-1, 0), (3, 3 + NUM_TIES)]


@dataclass
class Replica:
    """What a sampler knows of vLLM: this rank's place among the replicas."""

    replica: int = 0
    num_replicas: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    vocab_size: int = VOCAB_SIZE
    recorder: object = None


def make_sampler(*settings: str, rollout: Replica | None = None, **parts) -> PartialResponses:
    """Return a sampler of single turns. parts: fields of PartialResponses."""
    rollout = rollout or Replica()
    sampler = SimpleNamespace(rollout=rollout, host_group=None, max_failure_rate=0.25)
    defaults = {
        "sampler": sampler,
        "ledger": Ledger(rollout.num_replicas, oversample=1.5, limit=None),
        "dataset": HandmadePrompts(),
        "rows_of_batch": None,
        "config": configure("rollout.partial.enable=true", f"trainer.seed={SEED}", *settings),
        "open": OpenGroups(max_staleness=2, finishes_old=True),
        "continuing": None,
    }
    return PartialResponses(**defaults | parts)


def drawn_response(versions: list[int], first_token: int, num_candidates: int = 0) -> OpenResponse:
    """Return a response with a token per entry of `versions`, the version that drew it."""
    response = OpenResponse(seed=first_token)
    for place, version in enumerate(versions):
        token = first_token + place
        candidates = None
        if num_candidates:
            candidates = np.array([[token, *range(num_candidates)]], np.int32)
        response.append(
            np.array([token], np.int32), np.array([-token / 10], np.float32), candidates, version
        )
    response.is_complete = True
    return response


# -- packing ---------------------------------------------------------------------------------------


def make_draw(groups: list[OpenGroup], n: int, version: int) -> Draw:
    """Return a draw of these groups, after a group of another replica."""
    rows = [0, *(group.row for group in groups)]
    owners = torch.tensor([0, *(1 for _ in groups)])
    position = torch.arange(len(rows)).repeat_interleave(n)
    owner = owners[position]
    own = (owner == 1).nonzero()[:, 0]
    assignment = Assignment(position, owner, own, own >= 0)
    request = Request(HandmadePrompts(), rows, SimpleNamespace(n=n), seed=())
    return Draw(request, assignment, groups, version, torch.tensor([0.0, 2.0]))


@pytest.mark.parametrize("top_k, num_candidates", WITH_AND_WITHOUT_CANDIDATES)
def test_groups_are_packed_with_the_age_of_every_token(top_k, num_candidates):
    responses = [
        drawn_response([4, 5], 10, num_candidates),
        drawn_response([5], 20, num_candidates),
        drawn_response([3, 3, 5], 30, num_candidates),
        drawn_response([6], 40, num_candidates),
    ]
    responses[2].is_truncated = True
    groups = [OpenGroup(7, 1, responses[:2]), OpenGroup(9, 0, responses[2:])]
    sampler = make_sampler(f"rollout.top_k={top_k}")
    generation = sampler.pack(make_draw(groups, 2, version=6))
    batch = generation.batch
    # The prompt of row r is r + 1 times the token 3 + r.
    assert batch.input_ids.tolist() == [4, 4, 10, 11, 4, 4, 20, 3, 30, 31, 32, 3, 40]
    assert batch.lengths == [4, 3, 4, 2]
    assert batch.fields["age"].tolist() == [0, 0, 2, 1, 0, 0, 1, 0, 3, 3, 1, 0, 0]
    log_probs = [0, 0, -1, -1.1, 0, 0, -2, 0, -3, -3.1, -3.2, 0, -4]
    assert batch.fields["rollout_log_probs"].tolist() == pytest.approx(log_probs)
    assert generation.truncated.tolist() == [False, False, True, False]
    assert generation.truncated.dtype == torch.bool
    assert [prompt.row["number"] for prompt in generation.prompts] == [1, 1, 0, 0]
    assert generation.seconds.tolist() == [0, 2]
    assert batch.image_store is None
    if num_candidates:
        tokens = batch.input_ids[batch.fields["loss_mask"] > 0].tolist()
        of_tokens = batch.candidate_ids[batch.fields["loss_mask"] > 0].tolist()
        assert of_tokens == [[token, *range(num_candidates)] for token in tokens]
    else:
        assert "candidate_ids" not in batch.fields


def test_a_replica_without_groups_packs_nothing():
    generation = make_sampler().pack(make_draw([], 2, version=6))
    assert len(generation.batch) == 0
    assert generation.batch.fields["age"].tolist() == []
    assert generation.truncated.dtype == torch.bool


def test_packed_responses_know_the_rows_of_their_images():
    sampler = make_sampler()
    sampler.dataset.image_store = object()
    groups = [OpenGroup(7, 4, [drawn_response([5], 10)]), OpenGroup(9, 2, [drawn_response([5], 9)])]
    batch = sampler.pack(make_draw(groups, 1, version=6)).batch
    assert batch.rows.tolist() == [4, 2], "row 0 is another replica's"
    assert batch.image_store is sampler.dataset.image_store


# -- continuing ------------------------------------------------------------------------------------


@dataclass
class HandmadeContinuing:
    """Continues every response by a few tokens, and records what it was asked for.

    lengths: the number of new tokens of each response. reasons: why those that ended have ended.
    routes: the experts that it reports.
    """

    lengths: list[int]
    reasons: dict[int, str]
    num_candidates: int = 0
    num_steps: int = 5
    routes: np.ndarray | None = None
    asked: dict = field(default_factory=dict)

    def generate(self, prompts, seeds, num_drawn, sampling, is_enough, **arguments):
        self.asked = {"prompts": prompts, "seeds": seeds, "num_drawn": num_drawn, **arguments}
        self.asked["is_enough"] = [is_enough(set()), is_enough(set(self.reasons))]
        responses = Responses(len(prompts), sampling.max_tokens, self.num_candidates)
        responses.routes = self.routes
        for row, length in enumerate(self.lengths):
            tokens = 100 * (row + 1) + np.arange(length)
            columns = tokens[:, None].repeat(1 + self.num_candidates, 1)
            responses.extend(row, columns, np.where(columns == tokens[:, None], -0.0, -9.0))
        return responses, self.reasons


@pytest.mark.parametrize("top_k, num_candidates", WITH_AND_WITHOUT_CANDIDATES)
def test_running_responses_continue_after_their_tokens(top_k, num_candidates):
    """Complete ones are left alone."""
    continuing = HandmadeContinuing([2, 3, 1], {0: "stop", 2: "length"}, num_candidates)
    sampler = make_sampler(f"rollout.top_k={top_k}", continuing=continuing)
    begun = drawn_response([1, 2], 10, num_candidates)
    begun.is_complete = False
    fresh = OpenResponse(seed=77)
    other = OpenResponse(seed=78)
    complete = drawn_response([1], 30, num_candidates)
    sampler.open.groups = [OpenGroup(0, 1, [begun, complete]), OpenGroup(1, 0, [fresh, other])]
    sampler.counts = StepCounts(slots=1, tokens=2)
    sampler.generate(1, version=3)
    assert continuing.asked == {
        "prompts": [[4, 4, 10, 11], [3], [3]],
        "seeds": [10, 77, 78],
        "num_drawn": [2, 0, 0],
        "is_enough": [False, True],
    }
    assert begun.tokens.tolist() == [10, 11, 100, 101]
    assert begun.versions.tolist() == [1, 2, 3, 3]
    assert fresh.tokens.tolist() == [200, 201, 202]
    assert other.tokens.tolist() == [300]
    assert fresh.versions.tolist() == [3, 3, 3]
    assert len(fresh.log_probs) == 3
    assert complete.tokens.tolist() == [30]
    if num_candidates:
        assert fresh.candidates[:, 0].tolist() == [200, 201, 202]
        assert fresh.candidates.shape == (3, 1 + num_candidates)
    states = [(r.is_complete, r.is_truncated) for r in (begun, fresh, other)]
    assert states == [(True, False), (False, False), (True, True)]
    assert (sampler.counts.slots, sampler.counts.tokens) == (1 + 5 * 3, 2 + 6)


def test_images_stand_before_the_tokens_of_their_response():
    sampler = make_sampler()
    image = np.zeros((2, 2, 3), np.uint8)
    prompts = [sampler.dataset[1], sampler.dataset[0]]
    running = [drawn_response([1, 1], 10), OpenResponse(seed=0)]
    assert sampler.image_arguments(prompts, running) == {}
    sampler.dataset.image_store = object()
    with_image = SimpleNamespace(input_ids=[4, 5, 5], before_images=[4, 5], images=[image])
    arguments = sampler.image_arguments([with_image, prompts[1]], running)
    assert arguments == {
        "image_prompts": [ImagePrompt([4, 5, 10, 11], [image]), ImagePrompt([3], ())]
    }


def routes_of(*numbers: int) -> np.ndarray:
    """Return the routes of tokens: one expert in one layer. 255: the token has none."""
    return np.array(numbers, np.uint8)[:, None, None]


class JoiningRecorder:
    """What records the experts."""

    def join(self, routes: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(routes)


def test_experts_are_those_of_the_request_that_read_a_token():
    """vLLM reports those of the prompt, of the earlier tokens and of the new ones."""
    continuing = HandmadeContinuing([1, 2], {0: "stop", 1: "stop"})
    continuing.routes = routes_of(20, 21, 22, 23, 255, 30, 31, 255)
    rollout = Replica(recorder=JoiningRecorder())
    sampler = make_sampler(continuing=continuing, rollout=rollout)
    begun = drawn_response([2, 2], 10)
    begun.is_complete = False
    begun.routes = routes_of(1, 2, 3, 255)
    fresh = OpenResponse(seed=77)
    sampler.open.groups = [OpenGroup(0, 1, [begun]), OpenGroup(1, 0, [fresh])]
    sampler.generate(2, version=3)
    assert begun.routes.flatten().tolist() == [1, 2, 3, 23, 255]
    assert fresh.routes.flatten().tolist() == [30, 31, 255]
    trained = sampler.open.take_trained(2, version=3)
    fields = sampler.pack(make_draw(trained, 1, version=3)).batch.fields
    assert fields[ROUTES].flatten().tolist() == [1, 2, 3, 23, 255, 30, 31, 255]


# -- a step ----------------------------------------------------------------------------------------


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_draws_of_a_step_share_the_failures_that_are_permitted(one_rank):
    """The other replica has no rank here. Its groups are not trained, and stay on record."""
    graded = []

    def grade_and_share(request, assignment, generation) -> SimpleNamespace:
        graded.append((request, assignment, generation))
        return SimpleNamespace(num_drawn=len(generation.prompts), failures=["one"])

    rows = {0: [5, 2, 0, 1], 1: [3, 6, 4, 2]}
    sampler = make_sampler(
        "data.train_batch_size=4",
        "rollout.n=2",
        rollout=Replica(replica=0, num_replicas=2),
        ledger=Ledger(2, oversample=2.0, limit=None),
        rows_of_batch=rows.__getitem__,
    )
    sampler.sampler.grade_and_share = grade_and_share
    sampler.open.groups = [
        OpenGroup(90, 6, [drawn_response([6], 9), drawn_response([7], 9)]),
        OpenGroup(91, 5, [drawn_response([6], 9), drawn_response([8], 9)]),
    ]
    sampler.ledger.replica_of = {90: 0, 91: 0}
    sampler.continuing = HandmadeContinuing([], {})
    request, samples = sampler.draw(2, 8, 40, Profiler())
    assert (request.rows, request.first_group) == ([6, 5], 40), "both are due"
    ((graded_request, assignment, generation),) = graded
    assert graded_request is request
    assert assignment.position.tolist() == [0, 0, 1, 1]
    ages = [*[0] * 7, 2, *[0] * 7, 1, *[0] * 6, 2, *[0] * 6, 0]
    assert generation.batch.fields["age"].tolist() == ages
    assert generation.seconds[0] > 0
    assert request.max_failures == 0.25 * 4
    assert (sampler.counts.graded, sampler.counts.failed) == (4, 1)

    reasons = {0: "stop", 1: "length", 2: "stop", 3: "stop"}
    sampler.continuing = HandmadeContinuing([1, 2, 1, 1], reasons)
    request, _ = sampler.draw(2, 8, 42, Profiler())
    assert sampler.continuing.asked["num_drawn"] == [0, 0, 0, 0], "two groups, one in advance"
    assert (request.rows, request.first_group) == ([0], 42), "the other one is not needed yet"
    assert request.max_failures == 0.25 * (4 + 2) - 1
    assert (sampler.counts.graded, sampler.counts.failed) == (6, 2)
    assert graded[1][2].truncated.tolist() == [False, True]

    given_up = []
    sampler.give_up = given_up.extend
    sampler.open.max_staleness = 0
    sampler.end_step(8)
    assert [group.number for group in given_up] == [3], "it would be too old in the next step"
    assert sampler.ledger.replica_of == {0: 1, 1: 1}
    assert sampler.counts == StepCounts()


# -- groups and replicas ---------------------------------------------------------------------------


def test_a_replica_begins_its_own_groups_of_the_batches_in_turn():
    """Five groups in batches of four; a row that a batch repeats has further response numbers."""
    rows = {0: [5, 2, 5, 5], 1: [3, 6, 3, 3]}
    asked = []

    def rows_of_batch(batch: int) -> list[int]:
        asked.append(batch)
        return rows[batch]

    sampler = make_sampler(
        "data.train_batch_size=4",
        "rollout.n=2",
        rollout=Replica(replica=1, num_replicas=2),
        rows_of_batch=rows_of_batch,
    )
    assert sampler.begin_groups(3) == 1, "replica 0 completes two"
    assert asked == [0, 1], "also for the other replica's groups"
    groups = sampler.open.groups
    assert [(group.number, group.row) for group in groups] == [(2, 5), (4, 3)]
    seeds = [response.seed for group in groups for response in group.responses]
    numbers = [(0, 5, 2), (0, 5, 3), (1, 3, 0), (1, 3, 1)]
    assert seeds == [request_seed(SEED, *three) for three in numbers]


def agree_and_assign(tp_size: int) -> tuple[list[TrainedGroup], Ledger, dict]:
    """Train on three groups of replica 0 and one of replica 1, and keep group 4."""
    replica, tp_rank = divmod(dist.get_rank(), tp_size)
    num_replicas = dist.get_world_size() // tp_size
    sampler = make_sampler("rollout.n=2", rollout=Replica(replica, num_replicas, tp_rank, tp_size))
    sampler.ledger.replica_of = {5: 0, 1: 0, 3: 1, 2: 0, 4: 2}
    numbers = [[1, 2, 5], [3], []][replica]
    trained = [OpenGroup(number, 10 * number, []) for number in numbers]
    groups = sampler.agree_on_trained(trained)
    assignment = {name: x.tolist() for name, x in asdict(sampler.assign(groups)).items()}
    return groups, sampler.ledger, assignment


def test_all_ranks_train_on_the_groups_of_all_replicas_in_order(tmp_path):
    """The ranks of a replica know the same groups, and share the work in turn."""
    for rank, (groups, ledger, assignment) in enumerate(on_ranks(6, tmp_path, agree_and_assign, 2)):
        assert groups == [
            TrainedGroup(1, 10, 0),
            TrainedGroup(2, 20, 0),
            TrainedGroup(3, 30, 1),
            TrainedGroup(5, 50, 0),
        ]
        assert ledger.replica_of == {4: 2}
        assert assignment["position"] == [0, 0, 1, 1, 2, 2, 3, 3]
        owners = [0, 0, 1, 1, 2, 2, 0, 0]
        assert assignment["owner"] == owners
        own = [i for i, owner in enumerate(owners) if owner // 2 == rank // 2]
        assert assignment["replica"] == own
        assert assignment["held"] == [owners[i] == rank for i in own]


def test_failures_are_permitted_per_step():
    """A quarter of 12 responses, of which 4 were drawn before and 2 have failed."""
    sampler = make_sampler("rollout.n=2")
    assert sampler.max_failures(4) == 2
    sampler.counts = StepCounts(graded=4, failed=2)
    assert sampler.max_failures(4) == 1


# -- checkpoints -----------------------------------------------------------------------------------


def make_group(number: int) -> OpenGroup:
    return OpenGroup(number, number % 7, [drawn_response([1], number)])


def test_one_rank_of_each_replica_saves_its_groups():
    for tp_rank in (0, 1):
        sampler = make_sampler(rollout=Replica(3, 4, tp_rank, 2))
        sampler.ledger.next_group = 12
        sampler.ledger.num_dropped = 2
        sampler.open.groups = [make_group(9)]
        files = sampler.state()
        if tp_rank:
            assert files == {}
        else:
            content = to_bytes([make_group(9)], Counters(12, 2))
            assert files == {"open_responses_00003.safetensors": content}


FILES_OF_REPLICAS = [
    to_bytes([make_group(5), make_group(6)], Counters(12, 2)),
    to_bytes([make_group(3)], Counters(12, 2)),
]


@pytest.mark.parametrize(
    "replica, num_replicas, own, replica_of",
    [
        (0, 2, [5, 6], {5: 0, 6: 0, 3: 1}),
        (1, 2, [3], {5: 0, 6: 0, 3: 1}),
        (0, 1, [3, 5, 6], {3: 0, 5: 0, 6: 0}),
        (1, 3, [5], {3: 0, 5: 1, 6: 2}),
    ],
)
def test_groups_continue_on_their_replica_unless_the_number_of_replicas_changes(
    replica, num_replicas, own, replica_of
):
    sampler = make_sampler(rollout=Replica(replica, num_replicas))
    sampler.load_state(FILES_OF_REPLICAS)
    assert [group.number for group in sampler.open.groups] == own
    assert sampler.open.groups[0].responses[0].tokens.tolist() == own[:1]
    assert sampler.ledger.replica_of == replica_of
    assert (sampler.ledger.next_group, sampler.ledger.num_dropped) == (12, 2)


@pytest.mark.parametrize(
    "settings, message",
    [
        (["rollout.top_k=3"], "rollout.top_k=3, but the checkpoint has responses"),
        (["rollout.routing_replay=true"], "set rollout.routing_replay=false"),
        (["rollout.episode=agent.py:play"], "set rollout.episode=null"),
        ([], None),
        (["rollout.top_k=3", "rollout.partial.enable=false"], None),
    ],
)
def test_the_files_of_all_replicas_are_checked_before_models_load(tmp_path, settings, message):
    """The first replica has no group, so that only the second file shows what is wrong."""
    (tmp_path / FILES).mkdir()
    contents = [to_bytes([], Counters(1, 0)), FILES_OF_REPLICAS[0]]
    for replica, content in enumerate(contents):
        (tmp_path / FILES / f"open_responses_{replica:05}.safetensors").write_bytes(content)
    config = configure("rollout.partial.enable=true", *settings)
    check_open_groups(config, None, VOCAB_SIZE)
    if message is None:
        check_open_groups(config, tmp_path, VOCAB_SIZE)
        return
    with pytest.raises(InputError, match=message):
        check_open_groups(config, tmp_path, VOCAB_SIZE)


@pytest.mark.parametrize("is_replayed", [False, True])
def test_experts_of_a_checkpoint_stay_only_if_they_are_replayed(is_replayed):
    """Responses without tokens have none."""
    response = drawn_response([1], 4)
    response.routes = routes_of(3, 255)
    groups = [OpenGroup(0, 0, [response, OpenResponse(seed=1)])]
    sampler = make_sampler(f"rollout.routing_replay={is_replayed}")
    _, (group,) = sampler.from_bytes(to_bytes(groups, Counters(1, 0)))
    with_tokens, without = group.responses
    assert without.routes is None
    if is_replayed:
        assert with_tokens.routes.flatten().tolist() == [3, 255]
    else:
        assert with_tokens.routes is None


def test_candidates_of_a_checkpoint_are_counted_as_in_a_run(tmp_path):
    """With rollout.top_k, as many as that, or all tokens of a small vocabulary."""
    (tmp_path / FILES).mkdir()
    group = OpenGroup(0, 0, [drawn_response([1], 4, num_candidates=3 + NUM_TIES)])
    content = to_bytes([group], Counters(1, 0))
    (tmp_path / FILES / "open_responses_00000.safetensors").write_bytes(content)
    config = configure("rollout.partial.enable=true", "rollout.top_k=3")
    check_open_groups(config, tmp_path, VOCAB_SIZE)
    large = configure("rollout.partial.enable=true", "rollout.top_k=40")
    check_open_groups(large, tmp_path, vocab_size=3 + NUM_TIES)
    with pytest.raises(InputError, match="rollout.top_k=40"):
        check_open_groups(large, tmp_path, VOCAB_SIZE)

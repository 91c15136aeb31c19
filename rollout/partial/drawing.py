"""Draw groups of graded responses, and carry those that are not complete into the next step."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field

import torch
from omegaconf import DictConfig
from torch import Tensor

from data.batching.order import RowsOfBatch
from data.prompts import PromptDataset
from profiling import Profiler
from rollout.drawing import (
    Assignment,
    Request,
    Sampler,
    first_response_numbers,
    seconds_of_rank,
)
from rollout.episodes.drawing import EpisodeSampler
from rollout.exchange import gather_on_all_ranks, sum_over_ranks
from rollout.partial.groups import Counters, OpenGroup, OpenGroups
from rollout.partial.ledger import Ledger
from rollout.samples import Samples


@dataclass(frozen=True)
class TrainedGroup:
    """A group that a step trains on, as all ranks know it."""

    number: int
    row: int
    replica: int


@dataclass
class StepCounts:
    """The work of a step so far, on this rank's replica unless noted otherwise.

    Attributes:
        slots: the number of responses that were incomplete when a draw began, times the number of
            vLLM's steps in that draw; summed over draws.
        tokens: the number of tokens that were drawn.
        graded, failed: for all replicas, the number of responses to grade, and how many of them
            could not be graded.
    """

    slots: int = 0
    tokens: int = 0
    graded: int = 0
    failed: int = 0


@dataclass(frozen=True)
class Draw:
    """The groups that a step trains on.

    request, assignment  the prompts and responses of all replicas
    trained              the groups of this rank's replica
    version              the number of steps that have trained vLLM's weights
    seconds              [ranks] fp32: the time that this rank spent; 0 for other ranks
    """

    request: Request
    assignment: Assignment
    trained: list[OpenGroup]
    version: int
    seconds: Tensor


@dataclass(kw_only=True)
class PartialSampler:
    """Draws graded responses or episodes for the prompts of the data in their order.

    This class decides which groups begin, and which are trained. Its subclasses draw them.

    Attributes:
        sampler: grades, and shares numbers with all ranks.
        ledger: the groups that have begun, the same on every rank.
        dataset, rows_of_batch: the prompts and their order.
        config: the configuration.
        open: the groups that this rank's replica has begun.
        counts: of the current step.
    """

    sampler: Sampler | EpisodeSampler
    ledger: Ledger
    dataset: PromptDataset
    rows_of_batch: RowsOfBatch
    config: DictConfig
    open: OpenGroups
    counts: StepCounts = field(default_factory=StepCounts)

    # -- drawing -----------------------------------------------------------------------------------

    def draw(
        self, num_groups: int, version: int, first_group: int, profiler: Profiler
    ) -> tuple[Request, Samples]:
        """Return the graded responses of `num_groups` groups, or of fewer at the end of the run.

        Called by all ranks. As in Sampler.draw(), all ranks get all numbers, but each token is on
        one rank. The request, which is also returned, has the rows of these groups.

        Args:
            version: the number of steps that have trained vLLM's weights.
            first_group: the number of the first group among the samples.
        """
        num_complete = self.begin_groups(num_groups)
        with profiler.stage("rollout_generate", self.sampler.rollout):
            start = time.perf_counter()
            self.generate(num_complete, version)
            trained = self.open.take_trained(num_complete, version)
            seconds = seconds_of_rank(time.perf_counter() - start)
        groups = self.agree_on_trained(trained)
        request = Request(
            self.dataset,
            [group.row for group in groups],
            self.config.rollout,
            seed=(),
            first_group=first_group,
            max_failures=self.max_failures(len(groups)),
        )
        with profiler.stage("reward"):
            samples = self.grade_and_share(
                Draw(request, self.assign(groups), trained, version, seconds)
            )
        self.counts.graded += samples.num_drawn
        self.counts.failed += len(samples.failures)
        return request, samples

    def max_failures(self, num_groups: int) -> float:
        """Return how many responses of a draw may fail. The permitted rate is for the whole step.

        With filter_groups, later draws of a step are small, so their own failure rates vary a lot.
        """
        num_responses = self.counts.graded + num_groups * self.config.rollout.n
        return self.sampler.max_failure_rate * num_responses - self.counts.failed

    def begin_groups(self, num_groups: int) -> int:
        """Begin the groups that a draw needs; return how many this replica has to complete."""
        quotas = self.ledger.begin(num_groups)
        batch_size = self.config.data.train_batch_size
        own_replica = self.sampler.rollout.replica
        # All ranks ask for the rows of all batches, since a user's sampler compares them.
        for batch, numbers in itertools.groupby(quotas.begun, lambda g: g // batch_size):
            rows = [int(row) for row in self.rows_of_batch(batch)]
            first_numbers = first_response_numbers(rows, self.config.rollout.n)
            for number in numbers:
                if quotas.begun[number] == own_replica:
                    position = number % batch_size
                    key = (self.config.trainer.seed, batch, rows[position])
                    self.open.groups.append(self.new_group(number, key, first_numbers[position]))
        return quotas.num_complete[own_replica]

    def new_group(self, number: int, key: tuple[int, int, int], first_number: int) -> OpenGroup:
        """Return a group without tokens.

        key: the run's seed, the batch and the row, from which the seeds of the group's responses
        are made, as without rollout.partial.
        """
        raise NotImplementedError

    def generate(self, num_complete: int, version: int) -> None:
        """Continue this replica's groups until enough of them are complete. Count the work."""
        raise NotImplementedError

    def grade_and_share(self, draw: Draw) -> Samples:
        """Return the samples of all replicas.

        Their batch has the additional field age, fp32 [T]: how many steps have trained the weights
        since they drew the token.
        """
        raise NotImplementedError

    def give_up(self, groups: list[OpenGroup]) -> None:
        """Stop working on groups that were dropped."""

    def agree_on_trained(self, trained: list[OpenGroup]) -> list[TrainedGroup]:
        """Return the groups of all replicas that this step trains on; the ledger forgets them."""
        rollout = self.sampler.rollout
        own = []
        if rollout.tp_rank == 0:
            own = [TrainedGroup(group.number, group.row, rollout.replica) for group in trained]
        groups = gather_on_all_ranks(own, self.sampler.host_group)
        groups.sort(key=lambda group: group.number)
        self.ledger.end(group.number for group in groups)
        return groups

    def assign(self, groups: list[TrainedGroup]) -> Assignment:
        """Divide the responses of each replica over its ranks; a group stays on one rank."""
        rollout = self.sampler.rollout
        num_of_replica = [0] * rollout.num_replicas
        owner_of_group = []
        for group in groups:
            rank_in_replica = num_of_replica[group.replica] % rollout.tp_size
            num_of_replica[group.replica] += 1
            owner_of_group.append(group.replica * rollout.tp_size + rank_in_replica)
        owners = torch.tensor(owner_of_group, dtype=torch.int64)
        return Assignment.of(owners, self.config.rollout.n, rollout.replica, rollout.tp_size)

    # -- between steps -----------------------------------------------------------------------------

    def end_step(self, version: int) -> dict[str, float]:
        """Drop the groups that would be too old in the next step; return metrics of the step.

        version: of the weights that were in use. With on_stale=finish, no group is ever too old.
        """
        stale = self.open.take_stale(version)
        self.give_up(stale)
        is_first = self.sampler.rollout.tp_rank == 0
        own = [group.number for group in stale] if is_first else []
        dropped = gather_on_all_ranks(own, self.sampler.host_group)
        self.ledger.drop(dropped)
        counts = self.counts
        self.counts = StepCounts()
        work = torch.tensor([counts.tokens, counts.slots], dtype=torch.float64)
        num_tokens, num_slots = sum_over_ranks(work, self.sampler.host_group).tolist()
        return {
            "partial/carried_groups": float(len(self.ledger.replica_of)),
            "partial/stale_drops": float(len(dropped)),
            # All groups may have been complete already.
            "partial/idle_slots": 1 - num_tokens / num_slots if num_slots else 0.0,
        }

    # -- checkpoints -------------------------------------------------------------------------------

    def state(self) -> dict[str, bytes]:
        """Return the files of a checkpoint that this rank writes: name -> content."""
        rollout = self.sampler.rollout
        if rollout.tp_rank != 0:
            return {}
        counters = Counters(self.ledger.next_group, self.ledger.num_dropped)
        content = self.to_bytes(counters)
        return {f"open_responses_{rollout.replica:05}.safetensors": content}

    def to_bytes(self, counters: Counters) -> bytes:
        """Return the content of a file with the open groups of this replica."""
        raise NotImplementedError

    def from_bytes(self, content: bytes) -> tuple[Counters, list]:
        """Return what to_bytes() has written. Each group has at least a number.

        Raises InputError if the groups do not fit the current settings.
        """
        raise NotImplementedError

    def restored(self, group) -> OpenGroup:
        """Return the open group for one of the groups that from_bytes() has returned."""
        raise NotImplementedError

    def load_state(self, files: list[bytes]) -> None:
        """Continue where a checkpoint ended.

        If the number of replicas has changed, the groups are divided among them again.

        files: the contents of the files that state() has returned, for all replicas in order.

        Raises InputError if responses cannot continue with the current settings.
        """
        saved = [self.from_bytes(content) for content in files]
        counters, _ = saved[0]
        groups_of_replica = [groups for _, groups in saved]
        rollout = self.sampler.rollout
        if len(files) != rollout.num_replicas:
            groups_of_replica = deal(groups_of_replica, rollout.num_replicas)
        own_groups = groups_of_replica[rollout.replica]
        self.open.groups = [self.restored(group) for group in own_groups]
        self.ledger.next_group = counters.next_group
        self.ledger.num_dropped = counters.num_dropped
        self.ledger.replica_of = {
            group.number: replica
            for replica, groups in enumerate(groups_of_replica)
            for group in groups
        }


def deal(groups_of_replica: list[list], num_replicas: int) -> list[list]:
    """Divide groups among another number of replicas, in turn."""
    groups = sorted(itertools.chain(*groups_of_replica), key=lambda group: group.number)
    return [groups[replica::num_replicas] for replica in range(num_replicas)]

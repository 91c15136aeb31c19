"""Draw groups of graded responses, and carry those that are not complete into the next step."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from config import InputError
from data.batching.batch import Batch
from data.batching.order import RowsOfBatch
from data.prompts import Prompt, PromptDataset
from profiling import Profiler
from rollout.drawing import (
    Assignment,
    Generation,
    Request,
    Sampler,
    dataset_rows,
    first_response_numbers,
    image_arguments,
    seconds_of_rank,
)
from rollout.exchange import gather_on_all_ranks, sum_over_ranks
from rollout.partial.groups import OpenGroup, OpenGroups, OpenResponse, from_bytes, to_bytes
from rollout.partial.ledger import Ledger
from rollout.responses import Responses
from rollout.samples import Samples
from rollout.vllm.continuing import ContinuingRollout
from rollout.vllm.sampling import count_candidates, request_seed


@dataclass(frozen=True)
class TrainedGroup:
    """A group that a step trains on, as all ranks know it."""

    number: int
    row: int
    replica: int


@dataclass
class StepCounts:
    """What happened in a step, on this rank's replica.

    Attributes:
        slots: for each step of vLLM, the responses of its draw that were not complete when the draw
            began; their sum.
        tokens: the tokens that were drawn.
        graded, failed: the responses of all replicas that were to be graded, and those of them that
            could not be.
    """

    slots: int = 0
    tokens: int = 0
    graded: int = 0
    failed: int = 0


@dataclass
class PartialSampler:
    """Draws graded responses to the prompts of the data in their order.

    Attributes:
        sampler: grades responses and shares their numbers.
        continuing: generates parts of responses.
        ledger: the groups that have begun, the same on every rank.
        dataset, rows_of_batch: the prompts and their order.
        config: the configuration.
        open: the groups that this rank's replica has begun.
        counts: of the current step.
    """

    sampler: Sampler
    continuing: ContinuingRollout
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

        Called by all ranks. Numbers and tokens are shared as Sampler.draw() does. The request has
        the rows of these groups.

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
        assignment = self.assign(groups)
        generation = self.pack(request, assignment, trained, version, seconds)
        with profiler.stage("reward"):
            samples = self.sampler.grade_and_share(request, assignment, generation)
        self.counts.graded += samples.num_drawn
        self.counts.failed += len(samples.failures)
        return request, samples

    def max_failures(self, num_groups: int) -> float:
        """Return how many responses of a draw may fail: the rate is that of the whole step.

        With filter_groups, later draws of a step are small, so their own rates vary a lot.
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

        key: the run's seed, the batch and the row. Its responses have the same seeds as without
        rollout.partial.
        """
        numbers = range(first_number, first_number + self.config.rollout.n)
        responses = [OpenResponse(request_seed(*key, i)) for i in numbers]
        return OpenGroup(number, key[-1], responses)

    def generate(self, num_complete: int, version: int) -> None:
        """Continue this replica's responses until enough of its groups are complete."""
        pairs = self.open.running()
        running = [response for _, response in pairs]
        # Responses share their prompt, so that its images are converted only once.
        rows = dict.fromkeys(group.row for group, _ in pairs)
        prompt_of_row = {row: self.dataset[row] for row in rows}
        prompts = [prompt_of_row[group.row] for group, _ in pairs]
        responses, reasons = self.continuing.generate(
            [[*p.input_ids, *r.tokens.tolist()] for p, r in zip(prompts, running)],
            [response.seed for response in running],
            [len(response) for response in running],
            self.config.rollout,
            self.open.make_is_enough(num_complete, version),
            **self.image_arguments(prompts, running),
        )
        for i, response in enumerate(running):
            length = responses.lengths[i]
            candidates = responses.candidates
            response.append(
                responses.tokens[i, :length],
                responses.log_probs[i, :length],
                None if candidates is None else candidates[i, :length],
                version,
            )
            response.is_complete = i in reasons
            response.is_truncated = reasons.get(i) == "length"
        self.counts.slots += self.continuing.num_steps * len(running)
        self.counts.tokens += int(responses.lengths.sum())

    def image_arguments(self, prompts: list[Prompt], running: list[OpenResponse]) -> dict:
        """Return the argument `image_prompts` of ContinuingRollout.generate(), if needed."""
        arguments = image_arguments(self.dataset, prompts)
        if arguments:
            arguments["image_prompts"] = [
                image_prompt._replace(
                    input_ids=[*image_prompt.input_ids, *response.tokens.tolist()]
                )
                for image_prompt, response in zip(arguments["image_prompts"], running)
            ]
        return arguments

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

    def pack(
        self,
        request: Request,
        assignment: Assignment,
        trained: list[OpenGroup],
        version: int,
        seconds: Tensor,
    ) -> Generation:
        """Return the responses of this replica's groups, as Sampler.generate() does.

        The batch has the additional field age, fp32 [T]: how many steps have trained the weights
        since they drew the token.
        """
        prompts = []
        own = []
        for group in trained:
            prompt = self.dataset[group.row]
            prompts += [prompt] * len(group.responses)
            own += group.responses
        batch = pack_responses(own, [prompt.input_ids for prompt in prompts], self.num_candidates)
        ages = [version - response.versions for response in own]
        age = torch.zeros_like(batch.fields["loss_mask"])
        if own:
            age[batch.fields["loss_mask"] > 0] = torch.from_numpy(np.concatenate(ages)).float()
        batch.fields["age"] = age
        if self.dataset.image_store:
            rows = dataset_rows(request, assignment)[assignment.replica]
            batch = replace(batch, rows=rows, image_store=self.dataset.image_store)
        truncated = torch.tensor([response.is_truncated for response in own], dtype=torch.bool)
        return Generation(batch, truncated, prompts, seconds, metrics={})

    @property
    def num_candidates(self) -> int:
        return count_candidates(self.config.rollout, self.sampler.rollout.vocab_size)

    # -- between steps -----------------------------------------------------------------------------

    def end_step(self, version: int) -> dict[str, float]:
        """Drop the groups that would be too old in the next step; return metrics of the step.

        version: of the weights that were in use. With on_stale=finish, no group is ever too old.
        """
        stale = [group.number for group in self.open.take_stale(version)]
        own = stale if self.sampler.rollout.tp_rank == 0 else []
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
        content = to_bytes(self.open.groups, self.ledger.next_group, self.ledger.num_dropped)
        return {f"open_responses_{rollout.replica:05}.safetensors": content}

    def load_state(self, files: list[bytes]) -> None:
        """Continue where a checkpoint ended.

        With another number of replicas, the groups are dealt to them anew.

        files: what state() has returned, for all replicas in order.

        Raises InputError if responses cannot continue with the current settings.
        """
        saved = [from_bytes(content) for content in files]
        for one in saved:
            check_can_continue(one.groups, self.config.rollout, self.num_candidates)
        groups_of_replica = [one.groups for one in saved]
        rollout = self.sampler.rollout
        if len(files) != rollout.num_replicas:
            groups_of_replica = deal(groups_of_replica, rollout.num_replicas)
        self.open.groups = groups_of_replica[rollout.replica]
        self.ledger.next_group = saved[0].next_group
        self.ledger.num_dropped = saved[0].num_dropped
        self.ledger.replica_of = {
            group.number: replica
            for replica, groups in enumerate(groups_of_replica)
            for group in groups
        }


def check_can_continue(groups: list[OpenGroup], sampling: DictConfig, num_candidates: int) -> None:
    """Raise InputError if responses of a checkpoint do not fit the current settings.

    sampling: the section `rollout`. num_candidates: from count_candidates().
    """
    num_columns = 1 + num_candidates if num_candidates else 0
    for response in itertools.chain(*(group.responses for group in groups)):
        num_tokens = len(response)
        is_running_at_limit = num_tokens == sampling.max_tokens and not response.is_complete
        if num_tokens > sampling.max_tokens or is_running_at_limit:
            raise InputError(
                f"rollout.max_tokens={sampling.max_tokens}, but the checkpoint has responses that "
                f"are not trained yet and already have {num_tokens} tokens: raise it"
            )
        if num_tokens and response.candidates.shape[-1] != num_columns:
            raise InputError(
                f"rollout.top_k={sampling.top_k}, but the checkpoint has responses that are not "
                "trained yet and were drawn with another rollout.top_k: set that one"
            )


def deal(groups_of_replica: list[list[OpenGroup]], num_replicas: int) -> list[list[OpenGroup]]:
    """Deal groups to another number of replicas, one after another."""
    groups = sorted(itertools.chain(*groups_of_replica), key=lambda group: group.number)
    return [groups[replica::num_replicas] for replica in range(num_replicas)]


def pack_responses(
    responses: list[OpenResponse], prompts: list[list[int]], num_candidates: int
) -> Batch:
    """Return prompts and complete responses as Rollout.generate() does."""
    longest = max((len(response) for response in responses), default=0)
    arrays = Responses(len(responses), longest, num_candidates)
    for i, response in enumerate(responses):
        length = len(response)
        arrays.tokens[i, :length] = response.tokens
        arrays.log_probs[i, :length] = response.log_probs
        if num_candidates:
            arrays.candidates[i, :length] = response.candidates
        arrays.lengths[i] = length
    return arrays.batch(prompts)

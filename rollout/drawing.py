"""Draw graded responses to prompts, in four steps: assign, generate, grade, share.

Each prompt is assigned to a replica of vLLM. A replica generates its responses, and all of its
ranks receive them. Each rank grades some of these responses, and keeps their tokens and texts.
Finally, lengths, scores and other numbers of each response are shared with all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor

from data.batching.batch import Batch
from data.batching.packing import partition
from data.prompts import Prompt, PromptDataset
from profiling import Profiler
from rollout.exchange import gather_on_all_ranks, sum_over_ranks
from rollout.grading.grader import Failure, Grader, Result, Reward
from rollout.grading.pool import WorkerPool
from rollout.samples import Samples
from rollout.steps import place_steps
from rollout.texts import decode_responses
from rollout.vllm.engine import Rollout
from rollout.vllm.image_prompts import ImagePrompt
from rollout.vllm.sampling import request_seed
from rollout.vllm.speculation import draft_metrics


@dataclass(frozen=True)
class Request:
    """A request for graded responses to some prompts.

    dataset      the prompts
    rows         the rows of the dataset to respond to; each gets one group of responses
    sampling     the section `rollout` or `validation` of the configuration: n, temperature, ...
    seed         differs between draws. A response depends only on this seed, its row, and its
                 number among the responses to this row, on any number of ranks
    first_group  the number of the first group
    section      the section that `sampling` comes from, for messages about its values
    max_failures  grading stops when more responses have failed; None: as many as the sampler's
                 max_failure_rate permits for these rows
    """

    dataset: PromptDataset
    rows: Sequence[int]
    sampling: DictConfig
    seed: tuple[int, ...]
    first_group: int = 0
    section: str = "rollout"
    max_failures: float | None = None


@dataclass(frozen=True)
class Assignment:
    """The ranks that draw and grade the n responses, in the order of their rows.

    position  [n] int64: the prompt of each response, as an index into the request's rows
    owner     [n] int64: the rank that grades each response and keeps its tokens
    replica   [r] int64: which of the n responses this rank's replica generates
    held      [r] bool: which of these r responses this rank keeps
    """

    position: Tensor
    owner: Tensor
    replica: Tensor
    held: Tensor

    @staticmethod
    def of(owner_of_prompt: Tensor, n: int, own_replica: int, ranks_per_replica: int) -> Assignment:
        """Return the assignment of n responses to each prompt.

        owner_of_prompt: int64, the rank that grades each prompt's responses. own_replica: the index
        of this rank's replica.
        """
        position = torch.arange(len(owner_of_prompt)).repeat_interleave(n)
        owner = owner_of_prompt[position]
        of_replica = (owner // ranks_per_replica == own_replica).nonzero()[:, 0]
        held = owner[of_replica] == dist.get_rank()
        return Assignment(position, owner, of_replica, held)


@dataclass(frozen=True)
class Generation:
    """The r responses of this rank's replica.

    batch      prompts and responses, packed
    truncated  [r] bool: whether a response reached max_tokens
    prompts    the prompt of each response
    seconds    [ranks] fp32: the time that this rank spent on generation; 0 for other ranks
    metrics    metrics of speculative decoding
    """

    batch: Batch
    truncated: Tensor
    prompts: list[Prompt]
    seconds: Tensor
    metrics: dict[str, float]


@dataclass(frozen=True)
class Graded:
    """The m responses that this rank keeps, and their results.

    index             [m] int64: their indices among the n responses
    response_lengths  [m] int64: the number of tokens that the model sampled
    results           rewards and failures; None for responses that were not graded, because there
                      were too many failures
    """

    index: Tensor
    batch: Batch
    texts: list[str]
    prompts: list[Prompt]
    truncated: Tensor
    response_lengths: Tensor
    results: list[Result | None]


@dataclass(frozen=True)
class ResponseNumbers:
    """Numbers of each response that all ranks know: float64 tensors with one entry per response.

    is_graded  1 for a response with a reward; otherwise score and parts are 0
    parts      the parts of the reward, by name
    """

    length: Tensor
    response_length: Tensor
    truncated: Tensor
    is_graded: Tensor
    score: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(graded: Graded, part_names: Sequence[str]) -> ResponseNumbers:
        """Return the numbers of this rank's m responses."""
        rewards = [r if isinstance(r, Reward) else None for r in graded.results]
        parts = {}
        for name in part_names:
            parts[name] = float64([reward.parts[name] if reward else 0.0 for reward in rewards])
        return ResponseNumbers(
            length=graded.batch.cu_seqlens.diff().double(),
            response_length=graded.response_lengths.double(),
            truncated=graded.truncated.double(),
            is_graded=float64([1.0 if reward else 0.0 for reward in rewards]),
            score=float64([reward.score if reward else 0.0 for reward in rewards]),
            parts=parts,
        )

    def on_all_ranks(
        self, index: Tensor, num_responses: int, group: dist.ProcessGroup | None
    ) -> ResponseNumbers:
        """Gather the numbers of all responses from all ranks.

        index: [m] int64, the indices of this rank's responses among all responses.
        """
        columns = [
            self.length,
            self.response_length,
            self.truncated,
            self.is_graded,
            self.score,
            *self.parts.values(),
        ]
        # One collective for all columns.
        table = torch.zeros(num_responses, len(columns), dtype=torch.float64)
        table[index] = torch.stack(columns, 1)
        length, response_length, truncated, is_graded, score, *parts = sum_over_ranks(
            table, group
        ).unbind(1)
        return ResponseNumbers(
            length, response_length, truncated, is_graded, score, dict(zip(self.parts, parts))
        )


def float64(values: list[float]) -> Tensor:
    """Return a float64 tensor of these numbers."""
    return torch.tensor(values, dtype=torch.float64)


@dataclass(frozen=True)
class Sampler:
    """Draws graded responses.

    rollout              vLLM, which must be awake
    grader               the processes that call the reward function
    tokenizer            decodes responses
    host_group           gloo group of all ranks
    max_failure_rate     grading stops when more than this fraction of a draw has failed
    skip_special_tokens  whether the texts that are graded lack special tokens
    """

    rollout: Rollout
    grader: Grader
    tokenizer: object
    host_group: dist.ProcessGroup | None
    max_failure_rate: float
    skip_special_tokens: bool

    def close(self) -> None:
        """Do nothing: the grader belongs to the caller. (EpisodeSampler ends its processes.)"""

    def draw(self, request: Request, profiler: Profiler) -> Samples:
        """Return the responses to a request, generated by all replicas and graded by all ranks.

        Called by all ranks. Every rank gets the numbers of all responses, but the tokens and the
        text of a response are only on the rank that graded it. Responses that could not be graded
        appear only in the list of failures.
        """
        assignment = assign(request, self.rollout.replica, self.rollout.num_replicas)
        with profiler.stage("rollout_generate", self.rollout):
            generation = self.generate(request, assignment)
        with profiler.stage("reward"):
            return self.grade_and_share(request, assignment, generation)

    def generate(self, request: Request, assignment: Assignment) -> Generation:
        """Generate the responses of this rank's replica."""
        positions = assignment.position[assignment.replica].tolist()
        prompt_at = {p: request.dataset[int(request.rows[p])] for p in dict.fromkeys(positions)}
        prompts = [prompt_at[p] for p in positions]
        start = time.perf_counter()
        batch, truncated = self.rollout.generate(
            [prompt.input_ids for prompt in prompts],
            response_seeds(request, assignment),
            request.sampling,
            **image_arguments(request.dataset, prompts),
        )
        if request.dataset.image_store:
            rows = dataset_rows(request, assignment)[assignment.replica]
            batch = replace(batch, rows=rows, image_store=request.dataset.image_store)
        seconds = seconds_of_rank(time.perf_counter() - start)
        metrics = {}
        if self.rollout.drafter:
            counts = sum_over_ranks(self.rollout.drafts.counts.clone(), self.host_group)
            metrics = draft_metrics(counts)
        return Generation(batch, truncated, prompts, seconds, metrics)

    def grade_and_share(
        self, request: Request, assignment: Assignment, generation: Generation
    ) -> Samples:
        """Grade the responses of all replicas, and return those that have a reward."""
        graded = self.grade(request, assignment, generation)
        samples, is_graded = self.share(request, assignment, generation, graded)
        if is_graded.all():
            return samples
        return samples.select(is_graded)

    def grade(self, request: Request, assignment: Assignment, generation: Generation) -> Graded:
        """Grade the responses that this rank keeps."""
        kept = assignment.held.nonzero()[:, 0]
        index = assignment.replica[kept]
        batch = generation.batch
        if len(kept) < len(batch):
            batch = batch.select(kept)
        prompts = [generation.prompts[i] for i in kept.tolist()]
        tokens = batch.fields["loss_mask"].nonzero()[:, 0]
        response_lengths = torch.searchsorted(tokens, batch.cu_seqlens).diff()
        responses = batch.input_ids[tokens].split(response_lengths.tolist())
        responses = [response.tolist() for response in responses]
        texts = decode_responses(
            self.tokenizer, responses, request.sampling.stop, self.skip_special_tokens
        )
        items = [(prompt.text, text, prompt.row) for prompt, text in zip(prompts, texts)]
        groups = assignment.position[index].tolist()
        max_failures = request.max_failures
        if max_failures is None:
            max_failures = self.max_failure_rate * len(assignment.owner)
        results = self.grader.grade(items, groups, max_failures)
        agree_on_parts(self.grader, index, results, self.host_group)
        results = self.grader.check_parts(items, results)
        if self.grader.has_steps:
            steps = place_steps(self.tokenizer, responses, results, self.skip_special_tokens)
            zeros = torch.zeros(len(batch.input_ids))
            step_fields = {
                "turn_rewards": zeros.index_copy(0, tokens, steps.rewards),
                "step_ends": zeros.index_copy(0, tokens, steps.ends),
            }
            batch = replace(batch, fields=batch.fields | step_fields)
        truncated = generation.truncated[kept]
        return Graded(index, batch, texts, prompts, truncated, response_lengths, results)

    def share(
        self, request: Request, assignment: Assignment, generation: Generation, graded: Graded
    ) -> tuple[Samples, Tensor]:
        """Share the numbers of all responses with all ranks.

        Returns samples of all n responses, and which of them were graded: [n] bool. Also records
        the mean length of the responses to each row in the dataset.
        """
        failures = all_failures(graded.index, graded.results, self.host_group)
        num_responses = len(assignment.owner)
        own_numbers = ResponseNumbers.of(graded, self.grader.parts or [])
        numbers = own_numbers.on_all_ranks(graded.index, num_responses, self.host_group)
        mean_lengths = numbers.response_length.view(len(request.rows), -1).float().mean(1)
        request.dataset.drawn_lengths[request.rows] = mean_lengths
        samples = Samples(
            batch=graded.batch,
            texts=graded.texts,
            prompts=graded.prompts,
            owner=assignment.owner,
            rank=dist.get_rank(),
            lengths=numbers.length.long(),
            response_lengths=numbers.response_length.long(),
            group=request.first_group + assignment.position,
            scores=numbers.score.float(),
            truncated=numbers.truncated.bool(),
            failures=failures,
            num_drawn=num_responses,
            metrics=idle_metrics(generation.seconds, self.host_group) | generation.metrics,
            parts={name: values.float() for name, values in numbers.parts.items()},
            rows=dataset_rows(request, assignment) if request.dataset.image_store else None,
        )
        return samples, numbers.is_graded.bool()


def agree_on_parts(
    pool: WorkerPool, index: Tensor, results: list, group: dist.ProcessGroup | None
) -> None:
    """Make all ranks expect the same parts as in the first reward of the run.

    index: [m] int64, the indices of this rank's results among those of all ranks.
    """
    if pool.parts is not None:
        return
    rewards = [
        (i, sorted(result.parts))
        for i, result in zip(index.tolist(), results)
        if isinstance(result, Reward)
    ]
    first_of_rank = gather_on_all_ranks(rewards[:1], group)
    _, pool.parts = min(first_of_rank, default=(0, None))


def all_failures(index: Tensor, results: list, group: dist.ProcessGroup | None) -> list[Failure]:
    """Return the failures of all ranks, in order. index: as in agree_on_parts()."""
    failures = [
        (i, result) for i, result in zip(index.tolist(), results) if isinstance(result, Failure)
    ]
    failures = gather_on_all_ranks(failures, group)
    return [failure for _, failure in sorted(failures, key=lambda pair: pair[0])]


def seconds_of_rank(seconds: float) -> Tensor:
    """Return [ranks] fp32: the seconds that this rank took; 0 for other ranks."""
    rank = torch.tensor(dist.get_rank())
    return torch.zeros(dist.get_world_size()).index_fill(0, rank, seconds)


def idle_metrics(seconds: Tensor, group: dist.ProcessGroup | None) -> dict[str, float]:
    """Return how long replicas wait for the slowest one. seconds: from seconds_of_rank()."""
    seconds = sum_over_ranks(seconds.clone(), group)
    idle = 1 - seconds / seconds.max()
    return {
        "perf/rollout_idle": idle.mean().item(),
        "perf/rollout_idle_max": idle.max().item(),
    }


def assign(request: Request, own_replica: int, num_replicas: int) -> Assignment:
    """Divide the prompts over the replicas, and the responses of a replica over its ranks.

    If responses are as long as in the previous draw, all replicas finish at about the same time. A
    group stays on one rank, for reward functions that grade whole groups.

    own_replica: the index of this rank's replica.
    """
    num_prompts = len(request.rows)
    ranks_per_replica = dist.get_world_size() // num_replicas
    owner_of_prompt = torch.empty(num_prompts, dtype=torch.int64)
    lengths = request.dataset.expected_lengths(request.rows)
    for replica, prompts in enumerate(partition(lengths, num_replicas)):
        rank_in_replica = torch.arange(len(prompts)) % ranks_per_replica
        owner_of_prompt[prompts] = replica * ranks_per_replica + rank_in_replica
    return Assignment.of(owner_of_prompt, request.sampling.n, own_replica, ranks_per_replica)


def response_seeds(request: Request, assignment: Assignment) -> list[int]:
    """Return the seed of each response of this rank's replica."""
    return [request_seed(*numbers) for numbers in response_numbers(request, assignment)]


def response_numbers(request: Request, assignment: Assignment) -> list[tuple[int, ...]]:
    """Return the numbers that the random numbers of each response of this replica depend on."""
    n = request.sampling.n
    rows = [int(row) for row in request.rows]
    first_numbers = first_response_numbers(rows, n)
    numbers = []
    for i in assignment.replica.tolist():
        position = int(assignment.position[i])
        numbers.append((*request.seed, rows[position], first_numbers[position] + i % n))
    return numbers


def first_response_numbers(rows: Sequence[int], n: int) -> list[int]:
    """Return the number of the first of n responses to each row.

    It is 0 for most rows. If a row is repeated, the numbers of its second group continue those of
    the first, and so on: responses with the same number would be identical.
    """
    first_numbers = []
    num_responses: dict[int, int] = {}
    for row in rows:
        first_numbers.append(num_responses.get(row, 0))
        num_responses[row] = first_numbers[-1] + n
    return first_numbers


def dataset_rows(request: Request, assignment: Assignment) -> Tensor:
    """Return the dataset row of each response: [n] int64."""
    rows = torch.tensor([int(row) for row in request.rows])
    return rows[assignment.position]


def image_arguments(dataset: PromptDataset, prompts: list[Prompt]) -> dict:
    """Return Rollout.generate()'s arguments for the prompts' images, if the dataset has images."""
    if not dataset.image_store:
        return {}
    image_prompts = [
        ImagePrompt(prompt.before_images or prompt.input_ids, prompt.images) for prompt in prompts
    ]
    return {"image_prompts": image_prompts}

"""Draw graded episodes of several turns: assign, play, share.

Each episode is assigned to a replica of vLLM, whose first rank starts the user's function in worker
processes. All ranks of the replica record the tokens. Each keeps some of the episodes, and shares
their numbers with all ranks. See rollout/drawing.py, which does the same for single responses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor

from data.prompts import Prompt
from engines.model.lengths import longest_sequence
from engines.model.routes import FIELD as ROUTES
from profiling import Profiler
from rollout.drawing import (
    Assignment,
    Request,
    agree_on_parts,
    all_failures,
    assign,
    float64,
    idle_metrics,
    response_numbers,
    seconds_of_rank,
)
from rollout.episodes.director import Cast, Director
from rollout.episodes.jobs import Limit
from rollout.episodes.recorder import Branch, pack
from rollout.episodes.runner import EpisodeRunner
from rollout.episodes.server import GatewayServer
from rollout.episodes.stepping import EpisodeLoop, Inbox, Playing, StepTimes
from rollout.exchange import sum_over_ranks
from rollout.grading.grader import Failure, Reward
from rollout.samples import Samples
from rollout.vllm.engine import Rollout
from rollout.vllm.sampling import count_candidates

Result = Reward | Failure | Limit | None

NO_TURNS = "the episode ended without a turn of the model, so there is nothing to learn from"


@dataclass(frozen=True)
class Played:
    """The r episodes of this rank's replica.

    playing  their recorded tokens and their results
    times    the time of the draw, and the part of it in which this replica's vLLM was idle
    seconds  [ranks] fp32: the time that this rank spent; 0 for other ranks
    version  the number of steps that have trained the weights, with rollout.partial; else None
    """

    playing: list[Playing]
    times: StepTimes
    seconds: Tensor
    version: int | None = None


@dataclass(frozen=True)
class Kept:
    """The m episodes that this rank keeps.

    index    [m] int64: their indices among the n episodes of the draw
    playing  their recorded tokens
    results  their rewards and failures; a Limit for an episode that is left out
    prompts  the rows that they were started with
    """

    index: Tensor
    playing: list[Playing]
    results: list[Result]
    prompts: list[Prompt]

    def branches(self, i: int) -> list[Branch]:
        """Return the branches of an episode that has a reward; none for the others."""
        is_graded = isinstance(self.results[i], Reward)
        return self.playing[i].episode.branches if is_graded else []


@dataclass(frozen=True)
class EpisodeNumbers:
    """Numbers of each episode that all ranks know: float64 [n].

    branches     the number of training sequences; 0 without a reward
    score        the reward, plus the rewards of turns; 0 without a reward
    truncated    1 if the last turn was cut off, or a limit has ended the episode
    tokens       the number of tokens that the model sampled
    turns        the number of turns
    tool_calls   the number of tool calls that the model wrote
    tool_errors  the number of these calls that failed
    limited      1 if the episode has reached a limit
    left_out     1 if rollout.limit_score leaves the episode out of training
    parts        the parts of the reward, by name; 0 without a reward
    """

    branches: Tensor
    score: Tensor
    truncated: Tensor
    tokens: Tensor
    turns: Tensor
    tool_calls: Tensor
    tool_errors: Tensor
    limited: Tensor
    left_out: Tensor
    parts: dict[str, Tensor]

    @staticmethod
    def of(kept: Kept, part_names: Sequence[str]) -> EpisodeNumbers:
        """Return the numbers of this rank's m episodes."""
        playing = kept.playing
        rewards = [result if isinstance(result, Reward) else None for result in kept.results]
        scores = [
            reward.score + play.episode.reward_sum if reward else 0.0
            for play, reward in zip(playing, rewards)
        ]
        parts = {}
        for name in part_names:
            parts[name] = float64([reward.parts[name] if reward else 0.0 for reward in rewards])
        return EpisodeNumbers(
            branches=float64([float(len(kept.branches(i))) for i in range(len(playing))]),
            score=float64(scores),
            truncated=float64([float(play.is_truncated) for play in playing]),
            tokens=float64([float(play.episode.num_sampled) for play in playing]),
            turns=float64([float(play.episode.num_turns) for play in playing]),
            tool_calls=float64([float(play.num_tool_calls) for play in playing]),
            tool_errors=float64([float(play.num_tool_errors) for play in playing]),
            limited=float64([float(play.limit is not None) for play in playing]),
            left_out=float64([float(isinstance(result, Limit)) for result in kept.results]),
            parts=parts,
        )

    def on_all_ranks(
        self, index: Tensor, num_episodes: int, group: dist.ProcessGroup | None
    ) -> EpisodeNumbers:
        """Gather the numbers of all episodes from all ranks. index: as in Kept."""
        columns = [value for value in vars(self).values() if isinstance(value, Tensor)]
        columns += self.parts.values()
        table = torch.zeros(num_episodes, len(columns), dtype=torch.float64)
        table[index] = torch.stack(columns, 1)
        gathered = sum_over_ranks(table, group).unbind(1)
        num_parts = len(self.parts)
        own = gathered[: len(gathered) - num_parts]
        parts = gathered[len(gathered) - num_parts :]
        return EpisodeNumbers(*own, dict(zip(self.parts, parts)))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the draw."""
        return {
            "episodes/turns/mean": self.turns.mean().item(),
            "episodes/turns/max": self.turns.max().item(),
            "episodes/tool_calls/mean": self.tool_calls.mean().item(),
            "episodes/tool_errors": self.tool_errors.sum().item(),
            "episodes/limited": self.limited.mean().item(),
            "episodes/left_out": self.left_out.mean().item(),
        }


@dataclass(frozen=True)
class EpisodeSampler:
    """Draws graded episodes.

    rollout           vLLM, which must be awake
    runner            the worker processes; closed except on the first rank of a replica
    director          plays the episodes; None except on the first rank of a replica
    tokenizer         decodes tokens for people to read
    host_group        gloo group of all ranks
    replica_group     gloo group of the replica's ranks; None if it has a single rank
    max_failure_rate  no more episodes start when more than this fraction of a draw has failed
    """

    rollout: Rollout
    runner: EpisodeRunner
    director: Director | None
    tokenizer: object
    host_group: dist.ProcessGroup | None
    replica_group: dist.ProcessGroup | None
    max_failure_rate: float

    @classmethod
    def start(
        cls,
        config: DictConfig,
        rollout: Rollout,
        runner: EpisodeRunner,
        tokenizer,
        host_group: dist.ProcessGroup | None,
    ) -> EpisodeSampler:
        """Start the gateway on the first rank of each replica. Called by all ranks.

        Raises InputError on that rank if the gateway cannot work with the configuration.
        """
        replica_group = make_replica_group(rollout)
        director = None
        if rollout.tp_rank == 0:
            server = GatewayServer(gateway_settings(config, rollout, tokenizer))
            max_turns = config.rollout.max_turns
            limits = {"max_turns": max_turns, "max_episode_tokens": longest_sequence(config)[0]}
            director = Director(server, runner, limits)
            if dist.get_rank() == 0:
                print("\n".join(server.notices), flush=True)
        else:
            runner.close()
        max_failure_rate = config.reward.max_failure_rate
        groups = (host_group, replica_group)
        return cls(rollout, runner, director, tokenizer, *groups, max_failure_rate)

    def close(self) -> None:
        """End the gateway and the workers."""
        if self.director:
            self.director.close()

    def draw(self, request: Request, profiler: Profiler) -> Samples:
        """Return the graded episodes of a request, played by all replicas.

        Called by all ranks. Every rank gets the numbers of all episodes, but the tokens of an
        episode are only on one rank. Episodes without a reward appear only in the list of failures.
        """
        assignment = assign(request, self.rollout.replica, self.rollout.num_replicas)
        with profiler.stage("rollout_generate", self.rollout):
            played = self.play(request, assignment)
        with profiler.stage("reward"):
            return self.share(request, assignment, played)

    def play(self, request: Request, assignment: Assignment) -> Played:
        """Play the episodes of this rank's replica."""
        start = time.perf_counter()
        positions = assignment.position[assignment.replica].tolist()
        cast = None
        if self.director:
            row_at = {p: request.dataset[int(request.rows[p])].row for p in set(positions)}
            rows = [row_at[p] for p in positions]
            max_failures = self.max_failure_rate * len(assignment.owner)
            sampling = request.sampling
            cast = self.director.start(rows, sampling, max_failures, request.section)
        loop = EpisodeLoop(self.rollout, request.sampling, self.inbox(cast), self.answer)
        for number, seed in enumerate(response_numbers(request, assignment)):
            loop.add(number, seed)
        loop.run()
        seconds = seconds_of_rank(time.perf_counter() - start)
        return Played(list(loop.playing.values()), loop.times, seconds)

    def inbox(self, cast: Cast | None) -> Inbox:
        """Return the inbox of a cast. cast: None except on the first rank of a replica."""
        receive = partial(self.director.receive, cast) if self.director else no_messages
        return Inbox(self.rollout, receive, self.replica_group)

    @property
    def answer(self) -> Callable[[dict], None]:
        """The function that sends an answer to the gateway."""
        return self.director.server.send if self.director else no_answer

    def share(self, request: Request, assignment: Assignment, played: Played) -> Samples:
        """Share the numbers of all episodes with all ranks, and return all samples.

        Also records the mean number of sampled tokens of each row's episodes in the dataset.
        """
        kept = self.keep(request, assignment, played)
        num_episodes = len(assignment.owner)
        own_numbers = EpisodeNumbers.of(kept, self.runner.parts or [])
        numbers = own_numbers.on_all_ranks(kept.index, num_episodes, self.host_group)
        mean_tokens = numbers.tokens.view(len(request.rows), -1).float().mean(1)
        request.dataset.drawn_lengths[request.rows] = mean_tokens

        num_branches = numbers.branches.long()
        first_sequence = num_branches.cumsum(0) - num_branches
        episode = torch.repeat_interleave(torch.arange(num_episodes), num_branches)
        branches = []
        prompts = []
        sequences = []
        details = []
        for i, first in enumerate(first_sequence[kept.index].tolist()):
            for j, branch in enumerate(kept.branches(i)):
                branches.append(branch)
                prompts.append(kept.prompts[i])
                sequences.append(first + j)
                details.append({"prompt": self.prompt(branch), **kept.playing[i].details(j)})
        lengths = torch.zeros(len(episode), 2, dtype=torch.int64)
        for sequence, branch in zip(sequences, branches):
            lengths[sequence] = torch.tensor([len(branch.token_ids), branch.num_sampled])
        lengths = sum_over_ranks(lengths, self.host_group)
        batch = pack(branches, self.num_candidates(request.sampling), played.version)
        if self.rollout.recorder:
            routes = self.rollout.recorder.join([branch.routes for branch in branches])
            batch.fields[ROUTES] = torch.from_numpy(routes)
        return Samples(
            batch=batch,
            texts=[self.text(branch) for branch in branches],
            details=details,
            prompts=prompts,
            owner=assignment.owner[episode],
            rank=dist.get_rank(),
            lengths=lengths[:, 0],
            response_lengths=lengths[:, 1],
            group=request.first_group + assignment.position[episode],
            scores=numbers.score.float()[episode],
            truncated=numbers.truncated.bool()[episode],
            failures=all_failures(kept.index, kept.results, self.host_group),
            num_drawn=num_episodes,
            metrics=self.metrics(played) | numbers.metrics(),
            parts={name: values.float()[episode] for name, values in numbers.parts.items()},
            episode=episode,
        )

    def keep(self, request: Request, assignment: Assignment, played: Played) -> Kept:
        """Return the episodes that this rank keeps."""
        kept = assignment.held.nonzero()[:, 0].tolist()
        index = assignment.replica[kept]
        rows = [int(request.rows[p]) for p in assignment.position[index].tolist()]
        prompts = [request.dataset[row] for row in rows]
        playing = [played.playing[i] for i in kept]
        results = [play.result for play in playing]
        agree_on_parts(self.runner, index, results, self.host_group)
        results = [
            self.judge(result, play, prompt)
            for result, play, prompt in zip(results, playing, prompts)
        ]
        items = [(prompt.text, "", prompt.row) for prompt in prompts]
        return Kept(index, playing, self.runner.check_parts(items, results), prompts)

    def judge(self, result: Result, playing: Playing, prompt: Prompt) -> Result:
        """Return the reward of an episode, or the reason why it has none."""
        if isinstance(result, Limit) and result.score is not None:
            result = Reward(result.score, dict.fromkeys(self.runner.parts or [], 0.0))
        if isinstance(result, Reward) and not playing.episode.num_sampled:
            return Failure("no turns", NO_TURNS, prompt.row, "")
        return result

    def metrics(self, played: Played) -> dict[str, float]:
        """Return metrics of the times of all replicas."""
        waiting = torch.tensor([played.times.idle, played.times.total], dtype=torch.float64)
        waiting_seconds, total_seconds = sum_over_ranks(waiting, self.host_group).tolist()
        return {
            **idle_metrics(played.seconds, self.host_group),
            "episodes/vllm_idle": waiting_seconds / total_seconds,
        }

    def num_candidates(self, sampling: DictConfig) -> int:
        return count_candidates(sampling, self.rollout.vocab_size)

    def prompt(self, branch: Branch) -> str:
        """Return the text of a branch before its first sampled token, with special tokens."""
        first = branch.is_sampled.index(True)
        return self.tokenizer.decode(branch.token_ids[:first], skip_special_tokens=False)

    def text(self, branch: Branch) -> str:
        """Return the text of a branch, from its first sampled token on, with special tokens."""
        first = branch.is_sampled.index(True)
        return self.tokenizer.decode(branch.token_ids[first:], skip_special_tokens=False)


def make_replica_group(rollout: Rollout) -> dist.ProcessGroup | None:
    """Return a gloo group of this rank's replica, or None if the replica is this rank alone."""
    if rollout.tp_size == 1:
        return None
    own_group = None
    for replica in range(rollout.num_replicas):
        first = replica * rollout.tp_size
        ranks = list(range(first, first + rollout.tp_size))
        group = dist.new_group(ranks, backend="gloo")
        if replica == rollout.replica:
            own_group = group
    return own_group


def gateway_settings(config: DictConfig, rollout: Rollout, tokenizer) -> dict:
    """Return the first message to the gateway."""
    template = tokenizer.chat_template
    return {
        "model_path": config.model.path,
        "chat_template": template if isinstance(template, str) else None,
        "template_kwargs": {},
        "special_tokens_in_text": config.data.special_tokens_in_text,
        "tool_parser": config.rollout.tool_parser,
        "reasoning_parser": config.rollout.reasoning_parser,
        "stop_token_ids": rollout.stop_token_ids,
        "max_model_len": longest_sequence(config)[0],
        "vocab_size": rollout.vocab_size,
    }


def no_messages(seconds: float) -> list[dict]:
    """Receive nothing: only the first rank of a replica receives messages from the gateway."""
    return []


def no_answer(message: dict) -> None:
    """Send nothing: only the first rank of a replica answers the gateway."""

"""Step vLLM while the requests of running episodes arrive, and record what it samples.

Requests join the running batch between two steps, and episodes end while others go on. All ranks of
a replica run the same loop. The first one talks to the gateway, and tells the others what has
arrived, so that all of them see the same requests in the same order.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch.distributed as dist
from omegaconf import DictConfig
from tqdm import tqdm

from rollout.episodes.recorder import Episode, Turn
from rollout.responses import Responses
from rollout.vllm.engine import Rollout
from rollout.vllm.generation import output_id, read_output, wait_for_last_step
from rollout.vllm.sampling import RequestSampling, count_candidates, request_seed

# How long to wait for a request while vLLM has none, before asking again whether the draw is over.
WAIT_SECONDS = 0.01
# vLLM gets at most this many requests at once for each episode; further ones wait.
REQUESTS_PER_EPISODE = 2


@dataclass
class Playing:
    """An episode that is being played.

    Attributes:
        key: the API key of the current attempt. An attempt whose worker has died is repeated.
        seed: the numbers that its random numbers depend on.
        episode: the recorded tokens.
        messages: the conversation so far, for people to read.
        limit: the limit that it has reached, or None.
        num_tool_calls: calls of tools that the model wrote.
        num_tool_errors: those that could not be read, or whose tool raised an error.
    """

    key: str = ""
    seed: tuple[int, ...] = ()
    episode: Episode = field(default_factory=Episode)
    messages: list[dict] = field(default_factory=list)
    limit: str | None = None
    num_tool_calls: int = 0
    num_tool_errors: int = 0

    def details(self, branch: int) -> dict:
        """Return what rollouts/step_N.jsonl has about a branch, besides its text."""
        rewards = self.episode.branches[branch].rewards
        details = {
            "branch": branch,
            "num_branches": len(self.episode.branches),
            "turns": self.episode.num_turns,
            "turn_rewards": [reward for reward in rewards if reward],
            "limit": self.limit,
        }
        if branch == len(self.episode.branches) - 1:
            details["messages"] = self.messages
        return details

    @property
    def is_truncated(self) -> bool:
        """Whether the last turn was cut off, or a limit has ended the episode."""
        return self.episode.is_truncated or self.limit is not None

    def restart(self, key: str) -> None:
        """Forget everything, and begin another attempt."""
        self.__init__(key, self.seed)


@dataclass(frozen=True)
class Running:
    """A request that vLLM works on.

    Attributes:
        number: the gateway's number of the request.
        playing: its episode.
        turn: its turn.
        internal_id: vLLM's own id of the request.
    """

    number: int
    playing: Playing
    turn: Turn
    internal_id: str


@dataclass
class StepTimes:
    """Seconds of a draw: all of them, and those in which vLLM had no request."""

    total: float = 0.0
    idle: float = 0.0


class EpisodeLoop:
    """The loop of one draw.

    Args:
        rollout: vLLM, which must be awake.
        sampling: the section `rollout` or `validation` of the configuration.
        seeds: for each episode, the numbers that its random numbers depend on.
        inbox: returns the next messages. On the first rank of a replica it may wait this many
            seconds; the other ranks get what the first one got.
        answer: sends a message to the gateway; does nothing on the other ranks.
    """

    def __init__(
        self,
        rollout: Rollout,
        sampling: DictConfig,
        seeds: list[tuple[int, ...]],
        inbox: Callable[[float], list[dict]],
        answer: Callable[[dict], None],
    ):
        self.rollout = rollout
        self.sampling = RequestSampling.of(sampling)
        self.playing = [Playing(seed=seed) for seed in seeds]
        self.inbox = inbox
        self.answer = answer
        self.of_key: dict[str, Playing] = {}
        self.waiting: list[tuple[Playing, dict]] = []  # requests that vLLM does not have yet
        self.running: dict[str, Running] = {}  # by the id of their outputs
        # An episode has one request at a time, unless the agent asks for several at once.
        num_rows = REQUESTS_PER_EPISODE * len(seeds)
        num_candidates = count_candidates(sampling, rollout.vocab_size)
        self.responses = Responses(num_rows, sampling.max_tokens, num_candidates)
        self.times = StepTimes()
        self.results: list | None = None

    def run(self) -> list:
        """Step vLLM until a message with the results arrives, and return the results."""
        start = time.perf_counter()
        self.is_closed_batch = self.rollout.begin_batch(self.responses)
        with progress_bar() as progress:
            while self.results is None:
                progress.update(self.step())
        self.abort(list(self.running))
        wait_for_last_step(self.rollout.llm.llm_engine)
        self.rollout.end_batch(self.is_closed_batch)
        self.times.total = time.perf_counter() - start
        return self.results

    def step(self) -> int:
        """Take in what has arrived, and step vLLM. Returns the number of turns that have ended."""
        engine = self.rollout.llm.llm_engine
        begin = time.perf_counter()
        is_idle = not engine.has_unfinished_requests()
        self.handle(self.inbox(WAIT_SECONDS if is_idle else 0.0))
        if is_idle:
            self.times.idle += time.perf_counter() - begin
        if not engine.has_unfinished_requests():
            return 0
        return self.finish(engine.step())

    def handle(self, messages: list[dict]) -> None:
        """Act on the messages that have arrived, and give their requests to vLLM together."""
        for message in messages:
            if "attempt" in message:
                self.begin_attempt(message["attempt"], message["index"])
            elif "results" in message:
                self.end(message["results"], message["tool_errors"])
            elif "abort" in message:
                self.abort_number(message["abort"])
            elif message["episode"] in self.of_key:
                playing = self.of_key[message["episode"]]
                if "id" in message:
                    self.waiting.append((playing, message))
                else:
                    self.record(playing, message)
        num_free = len(self.responses.lengths) - len(self.running)
        requests = self.waiting[:num_free]
        self.waiting = self.waiting[num_free:]
        if requests:
            self.begin_turns(requests)

    def end(self, results: list, tool_errors: list[int]) -> None:
        """Note that all episodes have ended. tool_errors: calls of tools that failed, of each."""
        self.results = results
        for playing, num_errors in zip(self.playing, tool_errors, strict=True):
            playing.num_tool_errors += num_errors

    def begin_attempt(self, key: str, index: int) -> None:
        """Begin an episode, or begin it anew with another key."""
        playing = self.playing[index]
        self.of_key.pop(playing.key, None)
        self.abort([i for i, running in self.running.items() if running.playing is playing])
        self.waiting = [request for request in self.waiting if request[0] is not playing]
        playing.restart(key)
        self.of_key[key] = playing

    def record(self, playing: Playing, message: dict) -> None:
        """Record what the gateway reports of an episode besides its requests."""
        if "reward" in message:
            playing.episode.reward(message["reward"])
        if "limit" in message:
            playing.limit = message["limit"]
        if "messages" in message:
            playing.messages = message["messages"]
            playing.num_tool_calls += message["tool_calls"]
            playing.num_tool_errors += message["tool_errors"]

    def begin_turns(self, requests: list[tuple[Playing, dict]]) -> None:
        """Give requests to vLLM."""
        prompts = []
        params = []
        began = []
        for playing, message in requests:
            prompt_ids = message["prompt_ids"]
            repetition = playing.episode.count(prompt_ids)
            seed = turn_seed(playing.seed, prompt_ids, repetition)
            sampling = replace(
                self.sampling, max_tokens=message["max_tokens"], stop=message["stop"]
            )
            prompts.append({"prompt_token_ids": prompt_ids})
            params.append(self.rollout.sampling_params(sampling, seed))
            began.append((message["id"], playing, playing.episode.begin(prompt_ids)))
        internal_ids = self.rollout.llm.enqueue(
            prompts, params, lora_request=self.rollout.lora_request, use_tqdm=False
        )
        for internal_id, request in zip(internal_ids, began, strict=True):
            self.running[output_id(internal_id)] = Running(*request, internal_id)

    def finish(self, outputs: list) -> int:
        """Record the turns that have ended, and answer their requests. Returns their number."""
        num_ended = 0
        for output in outputs:
            if not output.finished or output.request_id not in self.running:
                continue
            running = self.running.pop(output.request_id)
            num_ended += 1
            tokens, log_probs, candidates = self.take(running, output.outputs[0])
            reason = output.outputs[0].finish_reason
            is_cut = reason == "length"
            running.playing.episode.end(running.turn, tokens, log_probs, candidates, is_cut)
            self.answer(
                {
                    "id": running.number,
                    "token_ids": tokens.tolist(),
                    "log_probs": log_probs.tolist(),
                    "finish_reason": reason,
                }
            )
        return num_ended

    def take(self, running: Running, output) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return the tokens of a turn that has ended: see Responses.row()."""
        if self.is_closed_batch:
            return self.rollout.scheduler.take(running.internal_id)
        # vLLM's own scheduler leaves the rows empty, so any of them will do.
        self.responses.lengths[0] = 0
        self.responses.extend(0, *read_output(output))
        return self.responses.row(0)

    def abort_number(self, number: int) -> None:
        """Take the request with this number of the gateway's away from vLLM."""
        self.waiting = [request for request in self.waiting if request[1]["id"] != number]
        self.abort([i for i, running in self.running.items() if running.number == number])

    def abort(self, request_ids: list[str]) -> None:
        """Take requests away from vLLM, and forget their turns."""
        if not request_ids:
            return
        self.rollout.llm.llm_engine.abort_request(request_ids)
        for request_id in request_ids:
            running = self.running.pop(request_id)
            running.playing.episode.drop(running.turn)
            if self.is_closed_batch:
                self.rollout.scheduler.take(running.internal_id)


def progress_bar() -> tqdm:
    """Return a line that shows the turns so far, on rank 0 and only on a terminal."""
    return tqdm(
        leave=False,
        dynamic_ncols=True,
        disable=dist.get_rank() != 0 or None,
        bar_format="episodes: {n_fmt} turns, {rate_fmt}, {elapsed}",
    )


def turn_seed(seed: tuple[int, ...], prompt_ids: list[int], repetition: int) -> int:
    """Return the seed of a turn.

    It depends on the episode, on the prompt, and on how often the episode has had this prompt. So
    it does not depend on the order in which requests arrive.
    """
    digest = hashlib.sha256(np.array(prompt_ids, np.int64).tobytes()).hexdigest()
    return request_seed(*seed, int(digest[:16], 16), repetition)


class Inbox:
    """The messages of a draw, on every rank of a replica.

    Args:
        rollout: tells which rank of its replica this is.
        receive: returns the next messages on the first rank, and waits at most this many seconds.
        group: gloo group of the replica's ranks, or None if the replica has one rank.
    """

    def __init__(
        self,
        rollout: Rollout,
        receive: Callable[[float], list[dict]],
        group: dist.ProcessGroup | None,
    ):
        self.is_first = rollout.tp_rank == 0
        self.receive = receive
        self.group = group

    def __call__(self, seconds: float) -> list[dict]:
        messages = self.receive(seconds) if self.is_first else []
        if self.group is None:
            return messages
        shared = [messages]
        dist.broadcast_object_list(shared, group=self.group, group_src=0)
        return shared[0]

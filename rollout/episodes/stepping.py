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

from rollout.episodes.jobs import EndedEpisode, EpisodeResult
from rollout.episodes.recorder import Episode, Turn
from rollout.responses import Responses
from rollout.vllm.continuing import RandomStreams, continue_texts, report_every_token
from rollout.vllm.engine import Rollout
from rollout.vllm.generation import output_id, read_output, wait_for_last_step
from rollout.vllm.sampling import (
    RequestSampling,
    count_candidates,
    preserved_random_state,
    request_seed,
)

# How long to wait for a request while vLLM has none, before asking again whether the draw is over.
WAIT_SECONDS = 0.01
# vLLM gets at most this many requests at once for each episode; further ones wait.
REQUESTS_PER_EPISODE = 2


@dataclass
class Playing:
    """An episode that is being played.

    Attributes:
        seed: the numbers that its random numbers depend on.
        key: the API key of the current attempt. An attempt whose worker has died is repeated.
        episode: the recorded tokens.
        messages: the conversation so far, for people to read.
        limit: the limit that it has reached, or None.
        num_tool_calls: calls of tools that the model wrote.
        num_tool_errors: those that could not be read, or whose tool raised an error.
        is_over: whether it has ended, with or without a result.
        result: the reward, the failure or the limit; None without one.
    """

    seed: tuple[int, ...]
    key: str = ""
    episode: Episode = field(default_factory=Episode)
    messages: list[dict] = field(default_factory=list)
    limit: str | None = None
    num_tool_calls: int = 0
    num_tool_errors: int = 0
    is_over: bool = False
    result: EpisodeResult | None = None

    def details(self, branch: int) -> dict:
        """Return the fields of a branch in rollouts/step_N.jsonl, besides its text."""
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
        self.__init__(self.seed, key)


@dataclass(eq=False)
class TurnRequest:
    """A request for the tokens of a turn, which vLLM works on or will work on.

    Attributes:
        number: the gateway's number of the request.
        playing: its episode.
        prompt_ids: the tokens that the turn continues.
        max_tokens: of the turn.
        stop: strings that end the turn.
        turn: None until vLLM gets the request for the first time.
        internal_id: vLLM's own id of the request.
    """

    number: int
    playing: Playing
    prompt_ids: list[int]
    max_tokens: int
    stop: list[str]
    turn: Turn | None = None
    internal_id: str = ""

    @staticmethod
    def read(playing: Playing, message: dict) -> TurnRequest:
        """Return the request in a message of the gateway."""
        names = ("prompt_ids", "max_tokens", "stop")
        return TurnRequest(message["id"], playing, *(message[name] for name in names))

    def begin(self) -> None:
        """Begin the turn, unless it has begun in an earlier draw."""
        if self.turn is None:
            episode = self.playing.episode
            repetition = episode.count(self.prompt_ids)
            seed = turn_seed(self.playing.seed, self.prompt_ids, repetition)
            self.turn = episode.begin(self.prompt_ids, seed)

    @property
    def num_drawn(self) -> int:
        """The tokens of the turn that were drawn in earlier draws."""
        return len(self.turn.response)


@dataclass
class StepTimes:
    """Seconds of a draw: all of them, and those in which vLLM had no request."""

    total: float = 0.0
    idle: float = 0.0


class EpisodeLoop:
    """The loop of one draw, or of all draws of a run whose episodes continue.

    Args:
        rollout: vLLM, which must be awake.
        sampling: the section `rollout` or `validation` of the configuration.
        inbox: called with a number of seconds, returns the next messages. The first rank of a
            replica waits at most so long; the other ranks get the same messages.
        answer: sends a message to the gateway; does nothing on the other ranks.
        streams: needed if episodes continue in another draw.

    Attributes:
        playing: the episodes, by their numbers.
        is_over: whether all episodes of the draw have ended.
        num_ended: the episodes that have ended so far.
        times, num_steps, num_tokens: of the last run(): the steps of vLLM, and the tokens that it
            has drawn.
    """

    def __init__(
        self,
        rollout: Rollout,
        sampling: DictConfig,
        inbox: Callable[[float], list[dict]],
        answer: Callable[[dict], None],
        streams: RandomStreams | None = None,
    ):
        self.rollout = rollout
        self.sampling = RequestSampling.of(sampling)
        self.num_candidates = count_candidates(sampling, rollout.vocab_size)
        self.inbox = inbox
        self.answer = answer
        self.streams = streams
        self.playing: dict[int, Playing] = {}
        self.of_key: dict[str, Playing] = {}
        self.waiting: list[TurnRequest] = []  # requests that vLLM does not have
        self.running: dict[str, TurnRequest] = {}  # by the id of their outputs
        self.is_over = False
        self.num_ended = 0

    def add(self, number: int, seed: tuple[int, ...]) -> Playing:
        """Expect an episode. seed: the numbers that its random numbers depend on."""
        self.playing[number] = Playing(seed)
        return self.playing[number]

    def remove(self, number: int) -> None:
        """Forget an episode, which may not have ended."""
        playing = self.playing.pop(number)
        self.of_key.pop(playing.key, None)
        self.drop_requests(playing)

    def run(self, is_enough: Callable[[], bool] | None = None, version: int = 0) -> None:
        """Step vLLM until all episodes have ended, or enough of them.

        The turns that vLLM works on then keep their tokens, and go on in the next run().

        Args:
            is_enough: tells whether to stop, after every step; None: when all have ended.
            version: the number of steps that have trained vLLM's weights.
        """
        is_enough = is_enough or (lambda: self.is_over)
        self.version = version
        self.times = StepTimes()
        self.num_steps = 0
        self.num_tokens = 0
        start = time.perf_counter()
        # An episode has one request at a time, unless the agent asks for several at once.
        num_rows = REQUESTS_PER_EPISODE * max(1, len(self.playing))
        self.responses = Responses(num_rows, self.sampling.max_tokens, self.num_candidates)
        self.is_closed_batch = self.rollout.begin_batch(self.responses)
        with preserved_random_state(), progress_bar() as progress:
            self.handle([])
            while not is_enough():
                progress.update(self.step())
            self.suspend()
            wait_for_last_step(self.rollout.llm.llm_engine)
        self.rollout.end_batch(self.is_closed_batch)
        self.times.total = time.perf_counter() - start

    def step(self) -> int:
        """Handle new messages, and step vLLM. Returns the number of turns that have ended."""
        engine = self.rollout.llm.llm_engine
        begin = time.perf_counter()
        is_idle = not engine.has_unfinished_requests()
        self.handle(self.inbox(WAIT_SECONDS if is_idle else 0.0))
        if is_idle:
            self.times.idle += time.perf_counter() - begin
        if not engine.has_unfinished_requests():
            return 0
        self.num_steps += 1
        return self.finish(engine.step())

    # -- messages ----------------------------------------------------------------------------------

    def handle(self, messages: list[dict]) -> None:
        """Act on the messages that have arrived, and give their requests to vLLM together."""
        for message in messages:
            if "attempt" in message:
                self.begin_attempt(message["attempt"], message["index"])
            elif "ended" in message:
                self.end(message["ended"])
                self.is_over = message["is_over"]
            elif message["episode"] in self.of_key:
                self.handle_episode(self.of_key[message["episode"]], message)
        num_free = len(self.responses.lengths) - len(self.running)
        requests = self.waiting[:num_free]
        self.waiting = self.waiting[num_free:]
        if requests:
            self.begin_turns(requests)

    def handle_episode(self, playing: Playing, message: dict) -> None:
        """Act on a message of the gateway about an episode."""
        if "id" in message:
            self.waiting.append(TurnRequest.read(playing, message))
        elif "abort" in message:
            self.drop([r for r in self.requests_of(playing) if r.number == message["abort"]])
        else:
            self.record(playing, message)

    def end(self, ended: list[EndedEpisode]) -> None:
        """Record the results of episodes, and drop their open requests."""
        for episode in ended:
            self.num_ended += 1
            playing = self.playing.get(episode.number)
            if playing is not None:
                playing.is_over = True
                playing.result = episode.result
                playing.num_tool_errors += episode.tool_errors
                self.of_key.pop(playing.key, None)
                self.drop_requests(playing)

    def begin_attempt(self, key: str, number: int) -> None:
        """Begin an episode, or begin it again with another key."""
        playing = self.playing.get(number)
        if playing is None:  # it was given up
            return
        self.of_key.pop(playing.key, None)
        self.drop_requests(playing)
        playing.restart(key)
        self.of_key[key] = playing

    def record(self, playing: Playing, message: dict) -> None:
        """Record what the gateway reports about an episode, apart from its requests."""
        if "reward" in message:
            playing.episode.reward(message["reward"])
        if "limit" in message:
            playing.limit = message["limit"]
        if "messages" in message:
            playing.messages = message["messages"]
            playing.num_tool_calls += message["tool_calls"]
            playing.num_tool_errors += message["tool_errors"]

    # -- turns -------------------------------------------------------------------------------------

    def begin_turns(self, requests: list[TurnRequest]) -> None:
        """Give requests to vLLM. Turns that have begun continue after their tokens so far."""
        prompts = []
        params = []
        for request in requests:
            request.begin()
            response = request.turn.response
            sampling = replace(
                self.sampling,
                max_tokens=request.max_tokens - len(response),
                stop=request.stop,
            )
            prompts.append([*request.prompt_ids, *response.tokens.tolist()])
            params.append(self.rollout.sampling_params(sampling, response.seed))
        internal_ids = self.rollout.enqueue(prompts, params)
        for internal_id, request in zip(internal_ids, requests, strict=True):
            request.internal_id = internal_id
            self.running[output_id(internal_id)] = request
        if self.streams:
            num_drawn = [request.num_drawn for request in requests]
            self.streams.skip(internal_ids, num_drawn)
            engine = self.rollout.llm.llm_engine
            if not self.is_closed_batch:
                report_every_token(engine, internal_ids)
            continue_texts(engine, internal_ids, prompts, num_drawn, params)

    def finish(self, outputs: list) -> int:
        """Record what vLLM has drawn. Returns the number of turns that have ended."""
        num_ended = 0
        for output in outputs:
            request = self.running.get(output.request_id)
            if request is None:
                continue
            if not self.is_closed_batch:
                self.append(request, *self.read(output.outputs[0]))
            if output.finished:
                num_ended += 1
                del self.running[output.request_id]
                self.end_turn(request, output.outputs[0].finish_reason)
        return num_ended

    def end_turn(self, request: TurnRequest, reason: str) -> None:
        """Record a turn that has ended, and answer its request."""
        self.take(request)
        response = request.turn.response
        request.playing.episode.end(request.turn, is_cut=reason == "length")
        self.answer(
            {
                "id": request.number,
                "token_ids": response.tokens.tolist(),
                "log_probs": response.log_probs.tolist(),
                "finish_reason": reason,
            }
        )

    def take(self, request: TurnRequest) -> None:
        """Append the tokens that the scheduler for closed batches has for a request, if any.

        Also note the experts that vLLM chose for them, with rollout.routing_replay.
        """
        if self.is_closed_batch:
            self.append(request, *self.rollout.scheduler.take(request.internal_id))
        if self.rollout.recorder:
            num_tokens = len(request.prompt_ids) + request.num_drawn
            routes = self.rollout.recorder.take(request.internal_id, num_tokens)
            request.turn.response.read(routes)

    def append(
        self,
        request: TurnRequest,
        tokens: np.ndarray,
        log_probs: np.ndarray,
        candidates: np.ndarray | None,
    ) -> None:
        """Append tokens to a turn. Shapes as in Responses.row()."""
        self.num_tokens += len(tokens)
        request.turn.response.append(tokens, log_probs, candidates, self.version)

    def read(self, output) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return the tokens in an output of vLLM: see Responses.row()."""
        # vLLM's own scheduler leaves the rows empty, so any of them will do.
        self.responses.lengths[0] = 0
        self.responses.extend(0, *read_output(output))
        return self.responses.row(0)

    def suspend(self) -> None:
        """Take all requests away from vLLM, and let their turns keep their tokens."""
        suspended = list(self.running.values())
        self.abort(suspended)
        for request in suspended:
            self.take(request)
        # Requests continue in the order in which they arrived.
        self.waiting = sorted([*suspended, *self.waiting], key=lambda request: request.number)
        if self.streams:
            self.streams.forget()

    def requests_of(self, playing: Playing) -> list[TurnRequest]:
        requests = [*self.waiting, *self.running.values()]
        return [request for request in requests if request.playing is playing]

    def drop_requests(self, playing: Playing) -> None:
        """Forget the requests of an episode, and their turns."""
        self.drop(self.requests_of(playing))

    def drop(self, requests: list[TurnRequest]) -> None:
        """Forget requests and their turns, and take them away from vLLM if it has them."""
        running = [request for request in self.running.values() if request in requests]
        self.abort(running)
        for request in running:
            self.take(request)
        self.waiting = [request for request in self.waiting if request not in requests]
        for request in requests:
            if request.turn is not None:
                request.playing.episode.drop(request.turn)

    def abort(self, requests: list[TurnRequest]) -> None:
        """Take requests away from vLLM."""
        request_ids = [output_id(request.internal_id) for request in requests]
        if request_ids:
            self.rollout.llm.llm_engine.abort_request(request_ids)
        for request_id in request_ids:
            del self.running[request_id]


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

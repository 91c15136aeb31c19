"""A vLLM without a model: a token follows from the seed of its request and from its place.

So a response that goes on in another request has the tokens that it would have had in the first
one, as with vLLM's own random numbers. The Rollout around it is the real one.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

from rollout.responses import Responses
from rollout.vllm.engine import PARTS, Rollout
from rollout.vllm.sampling import request_seed

VOCAB_SIZE = 64
END = 1  # ends a response


def scripted_token(seed: int, place: int) -> int:
    """Return the token at a place of a sequence. About one of eight ends the response."""
    number = request_seed(seed, place)
    return END if number % 8 == 0 else 2 + number % (VOCAB_SIZE - 2)


def whole_response(prompt: Sequence[int], seed: int, max_tokens: int) -> tuple[list[int], str]:
    """Return the tokens of a response, and why it ends."""
    tokens = []
    while len(tokens) < max_tokens:
        tokens.append(scripted_token(seed, len(prompt) + len(tokens)))
        if tokens[-1] == END:
            return tokens, "stop"
    return tokens, "length"


@dataclass
class Request:
    """A request that has not ended. row: of the responses of a closed batch."""

    prompt: list[int]
    params: object
    row: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[list[float]] = field(default_factory=list)
    columns: list[list[int]] = field(default_factory=list)


class ScriptedScheduler:
    """Takes the tokens of closed batches, like ClosedBatchScheduler."""

    responses: Responses | None = None

    def begin(self, responses: Responses) -> bool:
        self.responses = responses
        self.row_of: dict[str, int] = {}
        return True

    def end(self) -> float:
        self.responses = None
        return 0.75

    def take(self, internal_id: str) -> tuple:
        row = self.row_of.pop(internal_id)
        taken = self.responses.row(row)
        self.responses.lengths[row] = 0
        return taken


class ScriptedEngine:
    """Draws a token of every request in each step.

    Attributes:
        version: every log-probability is -version and a fraction that tells the place.
        requests: those that have not ended, by the id of their outputs.
        num_added, num_steps, num_tokens: of the whole life of the engine.
        drafts: counts as many in each step, see DraftCounter. The first rank accepts none of them.
        in_flight: is not empty while vLLM works on a step that nobody has waited for.
    """

    def __init__(self, scheduler: ScriptedScheduler | None):
        self.scheduler = scheduler
        self.version = 0
        self.requests: dict[str, Request] = {}
        self.num_added = 0
        self.num_steps = 0
        self.num_tokens = 0
        self.drafts = SimpleNamespace(counts=torch.ones(4, dtype=torch.int64))
        self.in_flight: deque = deque()
        self.output_processor = SimpleNamespace(request_states={}, tokenizer=None)
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(batch_queue=self.in_flight))

    @property
    def responses(self) -> Responses | None:
        return self.scheduler.responses if self.scheduler else None

    def add(self, prompt: list[int], params) -> str:
        from vllm.sampling_params import RequestOutputKind

        name = str(self.num_added)
        internal_id = f"{name}-a1b2"
        self.num_added += 1
        row = 0
        if self.responses is not None:
            rows = self.scheduler.row_of
            row = min({*range(len(self.responses.lengths))} - {*rows.values()})
            rows[internal_id] = row
        self.requests[name] = Request(prompt, params, row)
        state = SimpleNamespace(output_kind=RequestOutputKind.FINAL_ONLY)
        self.output_processor.request_states[internal_id] = state
        return internal_id

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.requests[name]

    def step(self) -> list:
        random.random(), np.random.random(), torch.rand(1)  # as vLLM does
        self.in_flight.clear()
        if not self.requests:
            return []
        self.num_steps += 1
        self.drafts.counts += torch.tensor([1, 8, 4 * dist.get_rank(), 3])
        self.in_flight.append("the next step")
        # Neither vLLM's outputs nor its own scheduler keep the order of the requests.
        outputs = [self.draw(name) for name in reversed([*self.requests])]
        return [output for output in outputs if output is not None]

    def draw(self, name: str):
        """Draw a token of a request, and return the output, if there is one in this step."""
        from vllm.sampling_params import RequestOutputKind

        self.num_tokens += 1
        request = self.requests[name]
        params = request.params
        place = len(request.prompt) + len(request.tokens)
        token = scripted_token(params.seed, place)
        request.tokens.append(token)
        others = range(2, 2 + params.logprobs)
        columns = [token, *others]
        log_probs = [-self.version - place / 1024, *[-np.log(params.logprobs or 1)] * len(others)]
        reason = None
        if token in params.stop_token_ids:
            reason = "stop"
        elif len(request.tokens) == params.max_tokens:
            reason = "length"
        if reason:
            del self.requests[name]
        if self.responses is not None:
            row = np.array([request.row])
            self.responses.append(row, np.array([columns]), np.array([log_probs]))
            return make_output(name, [], [], reason) if reason else None
        request.columns.append(columns)
        request.log_probs.append(log_probs)
        state = self.output_processor.request_states[f"{name}-a1b2"]
        if state.output_kind == RequestOutputKind.DELTA:
            return make_output(name, [columns], [log_probs], reason)
        if reason:
            return make_output(name, request.columns, request.log_probs, reason)
        return None


def make_output(
    name: str, columns: list[list[int]], log_probs: list[list[float]], reason: str | None
):
    """Return what vLLM's step() returns for a request."""
    flat = SimpleNamespace(token_ids=sum(columns, []), logprobs=sum(log_probs, []))
    tokens = [row[0] for row in columns]
    output = SimpleNamespace(token_ids=tokens, logprobs=flat, finish_reason=reason)
    return SimpleNamespace(request_id=name, finished=reason is not None, outputs=[output])


class ScriptedLlm:
    """What Rollout uses of vLLM's LLM. enqueued: prompt and parameters of each request."""

    def __init__(self, scheduler: ScriptedScheduler | None):
        self.llm_engine = ScriptedEngine(scheduler)
        self.enqueued: list[tuple[list[int], object]] = []

    def enqueue(self, prompts: list[dict], params: list, **options) -> list[str]:
        ids = []
        for prompt, request_params in zip(prompts, params, strict=True):
            self.enqueued.append((prompt["prompt_token_ids"], request_params))
            ids.append(self.llm_engine.add(prompt["prompt_token_ids"], request_params))
        return ids

    def collective_rpc(self, function) -> list:
        return [function(SimpleNamespace(use_v2_model_runner=True))]


class ScriptedRollout(Rollout):
    """A Rollout that is awake. is_closed: whether a scheduler takes closed batches."""

    def __init__(self, is_closed: bool = False, tp_size: int = 1):
        self._set_coordinates(tp_size)
        self.device = torch.device("cpu")
        self.drafter = None
        self.vocab_size = VOCAB_SIZE
        self.stop_token_ids = [END]
        self.placeholder_ids: list[int] = []
        self.scheduler = ScriptedScheduler() if is_closed else None
        self.llm = ScriptedLlm(self.scheduler)
        self.drafts = self.llm.llm_engine.drafts
        self.lora_request = None
        self.recorder = None
        self.closed_batch_share = 0.5
        self.awake = set(PARTS)
        self.needed = {"base"}
        self.valid = {"base"}


class ScriptedRecorder:
    """Records the experts of requests: those of a token are its place and its request."""

    def __init__(self):
        self.num_taken = 0

    def take(self, request_id: str, num_tokens: int) -> np.ndarray:
        return self.take_all([request_id], np.array([num_tokens]))

    def take_all(self, request_ids: Sequence[str], lengths: np.ndarray) -> np.ndarray:
        assert len(request_ids) == len(lengths)
        places = [np.arange(length) for length in lengths]
        return self.join([np.stack([p, np.full_like(p, 7)], 1)[:, None] for p in places])

    def join(self, routes: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.zeros((0, 1, 2), np.int64), *routes]).astype(np.int16)

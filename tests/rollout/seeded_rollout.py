"""A rollout without a model: the tokens of a response depend only on its seed.

As with vLLM's V1 model runner on a CPU, every request has a generator of random numbers, which
draws one integer per token.
"""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch

from rollout.responses import Responses
from rollout.vllm.continuing import SEED_RANGE
from rollout.vllm.engine import Rollout
from rollout.vllm.generation import output_id
from rollout.vllm.sampling import RequestSampling, sampling_params
from tests.data.chat_templates import make_tokenizer

VOCAB_SIZE = 100
NO_EXPERT = 255


class SeededSampler(torch.nn.Module):
    """Draws one integer from each generator, by the index of its request."""

    def forward(self, logits, sampling_metadata) -> dict[int, int]:
        return {
            index: int(torch.randint(0, SEED_RANGE, (1,), generator=generator))
            for index, generator in sampling_metadata.generators.items()
        }


@dataclass
class EngineRequest:
    """A request that the engine works on.

    Attributes:
        state: what vLLM keeps about it, see report_every_token() and continue_texts().
        tokens: those that were drawn.
    """

    params: object
    state: SimpleNamespace
    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)


class SeededEngine:
    """Draws a token for every request in each step.

    Attributes:
        num_steps: the steps so far.
        batch_queue: the steps in flight. Another step waits for them.
        responses: the arrays to append tokens to, while a closed batch is drawn.
    """

    def __init__(self):
        self.tokenizer = make_tokenizer()
        self.letters = [self.tokenizer.encode(letter)[0] for letter in "abcdefghijklmnop"]
        self.output_processor = SimpleNamespace(tokenizer=self.tokenizer, request_states={})
        self.engine_core = SimpleNamespace(engine_core=self)
        self.batch_queue: list = []
        self.requests: dict[str, EngineRequest] = {}
        self.rows: dict[str, int] = {}
        self.num_steps = 0
        self.runner = SimpleNamespace(
            sampler=SeededSampler(), input_batch=SimpleNamespace(req_ids=[])
        )
        self.worker = SimpleNamespace(use_v2_model_runner=False, model_runner=self.runner)
        self.responses: Responses | None = None

    def add(self, internal_id: str, prompt: list[int], params) -> None:
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        request = SimpleNamespace(
            request_id=internal_id, prompt_token_ids=prompt, sampling_params=params
        )
        state = SimpleNamespace(
            output_kind=RequestOutputKind.FINAL_ONLY,
            detokenizer=IncrementalDetokenizer.from_new_request(self.tokenizer, request),
        )
        generator = torch.Generator().manual_seed(params.seed)
        self.rows[internal_id] = len(self.rows)
        self.requests[internal_id] = EngineRequest(params, state, generator)
        self.output_processor.request_states[internal_id] = state

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def abort_request(self, output_ids: list[str]) -> None:
        for request_id in output_ids:
            (internal_id,) = [name for name in self.requests if output_id(name) == request_id]
            del self.requests[internal_id]

    def step(self) -> list:
        self.num_steps += 1
        for draw in (random.random, np.random.rand, torch.rand):
            draw(*([1] if draw is torch.rand else []))
        # The batch is in another order than the requests.
        names = [*reversed(self.requests)]
        self.runner.input_batch.req_ids = names
        generators = {index: self.requests[name].generator for index, name in enumerate(names)}
        metadata = SimpleNamespace(generators=generators)
        numbers = self.runner.sampler(None, sampling_metadata=metadata)
        outputs = []
        for index, name in enumerate(names):
            token = self.letters[numbers[index] % len(self.letters)]
            outputs += self.report(name, self.requests[name], token)
        self.batch_queue = ["a step"] if names else []
        return outputs

    def report(self, name: str, request: EngineRequest, token: int) -> list:
        """Append a token to a request, and return the outputs about it."""
        from vllm.sampling_params import RequestOutputKind

        request.tokens.append(token)
        reason = None
        if request.state.detokenizer.update([token], stop_terminated=False):
            reason = "stop"
        elif len(request.tokens) == request.params.max_tokens:
            reason = "length"
        if reason:
            del self.requests[name]
        if self.responses is not None:
            row = np.array([self.rows[name]])
            self.responses.append(row, np.array([[token]]), np.array([[-token / 10]]))
        kind = request.state.output_kind
        if kind == RequestOutputKind.FINAL_ONLY and not reason:
            return []
        token_ids = [token] if kind == RequestOutputKind.DELTA else [*request.tokens]
        return [output_of(output_id(name), token_ids, reason)]


def output_of(request_id: str, token_ids: list[int], reason: str | None):
    """Return what vLLM reports for a request. Token t has a log-probability of -t / 10."""
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput

    log_probs = FlatLogprobs()
    for token in token_ids:
        log_probs.append_fast([token], [-token / 10], iter([1]), [None])
    completion = CompletionOutput(0, "", token_ids, None, log_probs, finish_reason=reason)
    return RequestOutput(request_id, None, None, None, [completion], reason is not None)


class SeededRecorder:
    """Records the number of tokens of each request as its expert."""

    def take(self, internal_id: str, num_tokens: int) -> np.ndarray:
        routes = np.full((num_tokens, 1, 1), num_tokens, np.uint8)
        routes[-1] = NO_EXPERT
        return routes

    def take_all(self, internal_ids, lengths: np.ndarray) -> np.ndarray:
        routes = [self.take(*pair) for pair in zip(internal_ids, lengths, strict=True)]
        return np.concatenate(routes)


class SeededRollout(Rollout):
    """A rollout whose engine is a SeededEngine.

    Attributes:
        is_closed: whether a scheduler for closed batches takes the requests.
        prompts: those of all requests so far.
        batches: for each begin_batch() and end_batch(), whether the batch is closed.
    """

    vocab_size = VOCAB_SIZE
    stop_token_ids: tuple[int, ...] = ()
    progress_label = ""
    tp_rank = 0
    tp_size = 1
    replica = 0
    num_replicas = 1

    def __init__(self, is_closed: bool = False, has_recorder: bool = False):
        self.engine = SeededEngine()
        self.llm = SimpleNamespace(
            llm_engine=self.engine,
            collective_rpc=lambda function: [function(self.engine.worker)],
        )
        self.device = torch.device("cpu")
        self.is_closed = is_closed
        self.recorder = SeededRecorder() if has_recorder else None
        self.scheduler = self
        self.prompts: list[list[int]] = []
        self.batches: list[bool] = []

    def sampling_params(self, sampling: RequestSampling, seed: int):
        return sampling_params(sampling, seed, [], VOCAB_SIZE)

    def begin_batch(self, responses: Responses, params=()) -> bool:
        self.batches.append(self.is_closed)
        self.engine.rows.clear()
        self.engine.responses = responses if self.is_closed else None
        return self.is_closed

    def take(self, internal_id: str):
        """Return the tokens of a request, as the scheduler for closed batches does."""
        return self.engine.responses.row(self.engine.rows[internal_id])

    def end_batch(self, is_closed_batch: bool) -> None:
        self.batches.append(is_closed_batch)

    def enqueue(self, prompts, params, image_prompts=None) -> list[str]:
        names = [f"{len(self.prompts) + i}-random" for i in range(len(prompts))]
        self.prompts += prompts
        for request in zip(names, prompts, params, strict=True):
            self.engine.add(*request)
        return names

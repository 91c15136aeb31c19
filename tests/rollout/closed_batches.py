"""Batches that a scheduler steps through without a model, for test_scheduler.py.

Importing this takes seconds, as vLLM does.
"""

from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from config import load
from rollout.responses import Responses
from rollout.vllm.arguments import Host, engine_arguments
from rollout.vllm.scheduler import ClosedBatchScheduler

BLOCK = 4  # tokens of a block of the KV cache
NUM_BLOCKS = 100
MAX_MODEL_LEN = 20
MAX_REQUESTS = 3  # that run at the same time
STOP = 7  # the token that ends a response
MAX_STEPS = 500  # many more than the requests need


@dataclass(frozen=True)
class Draws:
    """A request: its prompt's length, its limit of tokens, and the tokens that it would draw."""

    prompt_length: int
    max_tokens: int
    tokens: tuple[int, ...]

    def request(self, name: str) -> Request:
        params = SamplingParams(
            max_tokens=self.max_tokens, stop_token_ids=[STOP], logprobs=0, ignore_eos=True
        )
        hasher = get_request_block_hasher(BLOCK, sha256)
        # Prompts differ, so none is in the prefix cache.
        prompt = [10 + list(REQUESTS).index(name)] * self.prompt_length
        return Request(name, prompt, params, None, block_hasher=hasher)


WITHOUT_END = tuple(range(50, 90))
REQUESTS = {
    "ends by a token": Draws(5, 12, (11, 12, 13, STOP, 14, 15, 16)),
    "ends at once": Draws(4, 12, (STOP, 21, 22)),
    "ends at max_tokens": Draws(3, 6, WITHOUT_END),
    "one token": Draws(8, 1, WITHOUT_END),
    "ends at max_model_len": Draws(11, 15, WITHOUT_END),
    "ends by a token at max_tokens": Draws(2, 3, (31, 32, STOP, 33)),
    "just below max_model_len": Draws(8, 12, WITHOUT_END),
}


def make_vllm_config(model: Path) -> VllmConfig:
    settings = [f"model.path={model}", "data.train_files=unused"]
    config = load("ppo.yaml", [*settings, f"rollout.max_num_seqs={MAX_REQUESTS}"])
    arguments = engine_arguments(config, Host(1, "cpu", 0, "0.32.0"), False)
    arguments |= {"max_model_len": MAX_MODEL_LEN, "distributed_executor_backend": "uni"}
    init_none_hash(sha256)
    return EngineArgs(**arguments, block_size=BLOCK).create_engine_config()


def make_scheduler(cls: type, vllm_config: VllmConfig) -> AsyncScheduler:
    dtype = vllm_config.model_config.dtype
    spec = FullAttentionSpec(BLOCK, num_kv_heads=1, head_size=32, dtype=dtype)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    vllm_config.cache_config.num_gpu_blocks = NUM_BLOCKS
    return cls(
        vllm_config,
        KVCacheConfig(NUM_BLOCKS, [], groups),
        StructuredOutputManager(vllm_config),
        block_size=BLOCK,
    )


def begin(vllm_config: VllmConfig, responses: Responses) -> ClosedBatchScheduler:
    """Return a scheduler whose requests become a closed batch."""
    scheduler = make_scheduler(ClosedBatchScheduler, vllm_config)
    assert scheduler.begin(responses)
    return scheduler


class Steps:
    """The steps of a scheduler; those in flight have been scheduled, but their tokens are unknown.

    Attributes:
        reasons: request -> why it ended, "stop" or "length".
        num_in_flight: how many steps are scheduled before the tokens of the first one are known.
    """

    def __init__(self, scheduler: AsyncScheduler, num_in_flight: int):
        self.scheduler = scheduler
        self.num_in_flight = num_in_flight
        self.in_flight: deque[SchedulerOutput] = deque()
        self.num_steps = 0
        self.num_drawn: dict[str, int] = {}
        self.num_computed: dict[str, int] = {}
        self.reasons: dict[str, str] = {}

    def add(self, name: str) -> None:
        self.num_drawn[name] = 0
        self.num_computed[name] = 0
        self.scheduler.add_request(REQUESTS[name].request(name))

    def step(self) -> list[str]:
        """Schedule a step, draw the tokens of an earlier one, and return which requests ended."""
        self.num_steps += 1
        assert self.num_steps < MAX_STEPS, "the requests never end"
        scheduled = self.scheduler.schedule()
        self.check_blocks(scheduled)
        self.in_flight.append(scheduled)
        if len(self.in_flight) < self.num_in_flight:
            return []
        output = self.in_flight.popleft()
        results = self.scheduler.update_from_output(output, self.draw(output))
        ended = []
        for of_client in results.values():
            for result in of_client.outputs:
                if result.finish_reason is not None:
                    self.reasons[result.request_id] = str(result.finish_reason)
                    ended.append(result.request_id)
        return ended

    def check_blocks(self, output: SchedulerOutput) -> None:
        """Check that the step computes only needed keys and values, and that they have room."""
        for name in output.scheduled_cached_reqs.resumed_req_ids:
            self.num_computed[name] = 0  # it was preempted
        for name, num_tokens in output.num_scheduled_tokens.items():
            self.num_computed[name] += num_tokens
            (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
            assert self.num_computed[name] <= BLOCK * len(blocks), name
            # The last token that the limits permit is drawn, but never read.
            draws = REQUESTS[name]
            longest = min(draws.prompt_length + draws.max_tokens, MAX_MODEL_LEN)
            assert self.num_computed[name] < longest, f"{name} has drawn all of its tokens"

    def draw(self, output: SchedulerOutput) -> ModelRunnerOutput:
        names = list(output.num_scheduled_tokens)
        tokens = []
        for name in names:
            tokens.append(REQUESTS[name].tokens[self.num_drawn[name]])
            self.num_drawn[name] += 1
        column = np.array(tokens, np.int64).reshape(-1, 1)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=column.tolist(),
            logprobs=LogprobsLists(column, -column / 100, np.zeros(len(names), np.int64)),
        )


def run_vllms(
    vllm_config: VllmConfig, num_in_flight: int
) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Return the tokens of every request, and why it ended, by vLLM's own scheduler."""
    scheduler = make_scheduler(AsyncScheduler, vllm_config)
    steps = Steps(scheduler, num_in_flight)
    for name in REQUESTS:
        steps.add(name)
    requests = dict(scheduler.requests)
    while scheduler.has_unfinished_requests():
        steps.step()
    tokens = {name: list(request.output_token_ids) for name, request in requests.items()}
    return tokens, steps.reasons

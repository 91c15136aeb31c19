"""vLLM's engine without a model: the tokens of its requests are given, and so are their experts.

Engine, scheduler, output processor and routers are vLLM's own. Importing this takes seconds, as
vLLM does.
"""

import math
import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from omegaconf import DictConfig
from torch import nn
from vllm import SamplingParams
from vllm.entrypoints import llm  # noqa: F401  (it takes long, and start() imports it otherwise)
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes

from rollout.vllm import engine
from rollout.vllm.engine import Rollout
from rollout.vllm.routing_worker import SlotRoutes
from tests.rollout.launches import schedule_asynchronously

BLOCK = 4  # tokens of a block of the KV cache
NUM_BLOCKS = 20  # of the KV cache: not enough for the longest four requests
END = 7  # the model's eos_token_id
# Of the model; see tests/support/models.py.
NUM_LAYERS = 3
EXPERTS_PER_TOKEN = 3
NUM_EXPERTS = 8


def given_token(first: int, position: int) -> int:
    """Return the token at a position of the sequence that begins with the token `first`.

    Sequences end at the position `first`. All other tokens are printable ASCII characters in the
    tokenizer of examples/arithmetic.py.
    """
    return END if position == first else 20 + (31 * first + 7 * position) % 80


def given_log_prob(first: int, position: int, token: int = 0) -> float:
    """Return the log-probability of a token at a position; 0 stands for the given one."""
    return -(position + first / 100 + token / 10_000) / 8


def given_experts(first: int, position: int) -> list[list[int]]:
    """Return the experts of a token: [layers, experts per token]."""
    experts = []
    for layer in range(NUM_LAYERS):
        start = first + (3 + layer) * position
        experts.append([(start + i) % NUM_EXPERTS for i in range(EXPERTS_PER_TOKEN)])
    return experts


@dataclass
class Admitted:
    """A request as it reaches the model.

    num_cached: the tokens that are in the prefix cache.
    """

    prompt: list[int]
    params: SamplingParams
    num_cached: int

    @property
    def first(self) -> int:
        return self.prompt[0]


class GivenRouter(BaseRouter):
    """A router that is told the experts of the next tokens: int64 [tokens, k]."""

    experts: torch.Tensor

    def _compute_routing(self, hidden_states, router_logits, indices_type, *, input_ids=None):
        return torch.ones(self.experts.shape), self.experts

    @property
    def routing_method_type(self):
        raise NotImplementedError


class GivenTokens(Executor):
    """Draws given_token() for every request.

    Attributes:
        admitted: all requests.
        preempted: the requests that were preempted, and have not been computed again.
        num_encoder_resets: how often the features of images were forgotten.
        num_steps: the steps with tokens.
    """

    def _init_executor(self) -> None:
        layers = [nn.Module() for _ in range(NUM_LAYERS)]
        for layer in layers:
            layer.router = GivenRouter(EXPERTS_PER_TOKEN, NUM_EXPERTS)
        self.model = nn.ModuleList(layers)
        self.worker = SimpleNamespace(use_v2_model_runner=True)
        self.admitted: list[Admitted] = []
        self.preempted: set[str] = set()
        self.num_encoder_resets = 0
        self.num_steps = 0
        self.request_of: dict[str, Admitted] = {}
        self.blocks_of: dict[str, list[int]] = {}

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False) -> list:
        if isinstance(method, Callable):
            return [method(self.worker)]
        answer = getattr(self, f"answer_{method}", lambda *_, **__: None)
        return [answer(*args, **kwargs or {})]

    def answer_get_kv_cache_spec(self) -> dict:
        dtype = self.model_config.dtype
        return {"layer": FullAttentionSpec(BLOCK, num_kv_heads=1, head_size=32, dtype=dtype)}

    def answer_get_supported_kv_cache_layouts(self) -> list[str]:
        return ["NHD"]

    def answer_determine_available_memory(self) -> int:
        return NUM_BLOCKS * self.answer_get_kv_cache_spec()["layer"].page_size_bytes

    def answer_initialize_from_config(self, kv_cache_configs: list) -> None:
        max_tokens = self.scheduler_config.max_num_batched_tokens
        self.worker.slot_routes = SlotRoutes(
            self.model, kv_cache_configs[0], max_tokens, torch.device("cpu")
        )

    def answer_compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(0.0, 0.0)

    def answer_get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def answer_apply_model(self, function):
        return function(self.model)

    def answer_reload_weights(self, weights_iterator) -> None:
        """Take the first weight, as vLLM may stop when its layers are complete."""
        next(weights_iterator)

    def answer_reset_encoder_cache(self) -> None:
        self.num_encoder_resets += 1

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False):
        self.output = self.draw(scheduler_output)
        return finished(None if self.output.req_ids else self.output)

    def sample_tokens(self, grammar_output, non_block: bool = False):
        return finished(self.output) if non_block else self.output

    def draw(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Return the next token of each request, and record the experts of its earlier ones."""
        num_computed = self.place(scheduled)
        names = list(scheduled.num_scheduled_tokens)
        self.num_steps += bool(names)
        token_ids = []
        log_probs = []
        positions = []  # (request, position of a token that the step computes)
        for name in names:
            request = self.request_of[name]
            end = num_computed[name] + scheduled.num_scheduled_tokens[name]
            positions += [(name, position) for position in range(num_computed[name], end)]
            token = given_token(request.first, end)
            scored = request.params.logprob_token_ids or []
            num_others = max((request.params.logprobs or 0) - 1, 0)
            # If candidates are asked for, the token itself is the only one that was possible.
            candidates = [token, *range(num_others)] if request.params.logprobs else []
            token_ids.append([token, *candidates, *scored])
            log_probs.append(
                [given_log_prob(request.first, end)]
                + [0.0] * bool(candidates)
                + [-math.inf] * num_others
                + [given_log_prob(request.first, end, token) for token in scored]
            )
        self.record(positions)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[ids[:1] for ids in token_ids],
            logprobs=LogprobsLists(
                np.array(token_ids), np.array(log_probs, np.float32), np.zeros(len(names), int)
            ),
        )

    def place(self, scheduled: SchedulerOutput) -> dict[str, int]:
        """Remember the requests and their blocks; return the number of their computed tokens."""
        num_computed = {}
        for new in scheduled.scheduled_new_reqs:
            request = Admitted(new.prompt_token_ids, new.sampling_params, new.num_computed_tokens)
            self.admitted.append(request)
            self.request_of[new.req_id] = request
            self.blocks_of[new.req_id] = list(new.block_ids[0])
            num_computed[new.req_id] = new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        num_computed |= zip(cached.req_ids, cached.num_computed_tokens)
        self.preempted = (self.preempted | scheduled.preempted_req_ids) - cached.resumed_req_ids
        for name, block_ids in zip(cached.req_ids, cached.new_block_ids):
            if name in cached.resumed_req_ids:
                self.blocks_of[name] = []
            self.blocks_of[name] += block_ids[0] if block_ids else []
        return num_computed

    def record(self, positions: list[tuple[str, int]]) -> None:
        """Let the routers choose the given experts of the step's tokens, and record them.

        As in vLLM, a token of padding follows, without a slot.
        """
        if not positions:
            self.worker.slot_routes.record(None)
            return
        experts = [given_experts(self.request_of[name].first, p) for name, p in positions]
        experts.append([[NUM_EXPERTS - 1] * EXPERTS_PER_TOKEN] * NUM_LAYERS)
        slots = [self.blocks_of[name][p // BLOCK] * BLOCK + p % BLOCK for name, p in positions]
        slots.append(-1)
        for layer, module in enumerate(self.model):
            module.router.experts = torch.tensor(experts)[:, layer]
            module.router._select_experts(None, None)
        # vLLM's two model runners have different names for it.
        name = "slot_mappings" if self.num_steps % 2 else "slot_mappings_by_layer"
        self.worker.slot_routes.record(SimpleNamespace(**{name: {"layer": torch.tensor(slots)}}))

    def check_health(self) -> None:
        pass


def finished(result) -> Future:
    future = Future()
    future.set_result(result)
    return future


def start(config: DictConfig) -> Rollout:
    """Return a Rollout whose tokens are given. Call this only in a fork, such as of on_ranks()."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # as with an external launcher
    arguments_of_runs = engine.engine_arguments

    def arguments(*values) -> dict:
        changes = {"distributed_executor_backend": GivenTokens, "block_size": BLOCK}
        return arguments_of_runs(*values) | changes

    engine.engine_arguments = arguments
    rollout = Rollout(config, torch.device("cpu"))
    schedule_asynchronously(rollout)
    return rollout

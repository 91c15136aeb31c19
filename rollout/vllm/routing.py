"""The experts that vLLM chose for the tokens of a request (rollout.routing_replay)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from config import InputError
from engines.memory import GIB
from engines.model.experts import experts_per_token
from engines.model.hf import build_on_meta, read_hf_config
from engines.model.lengths import longest_sequence
from engines.model.replay import first_weights
from engines.model.routes import no_route, route_dtype
from rollout.vllm import adapters
from rollout.vllm.capacity import kv_bytes_per_token

WORKER = "rollout.vllm.routing_worker.RecordingWorker"


def check_routing_replay(config: DictConfig) -> None:
    """Raise InputError if there is no routing to replay, or vLLM cannot record it."""
    if not config.rollout.routing_replay:
        return
    hf_config = read_hf_config(config.model.path)
    if not experts_per_token(hf_config.get_text_config()):
        raise InputError(
            f"rollout.routing_replay=true needs a mixture of experts, but model.path="
            f"{config.model.path} is {hf_config.model_type}, which has no experts: set "
            "rollout.routing_replay=false"
        )
    if adapters.has_separate_adapter(config):
        raise InputError(
            "rollout.routing_replay=true has not been tested with model.lora.merge=false, for "
            "which vLLM has other layers: set model.lora.merge=true"
        )
    if config.model.images:
        raise InputError(
            "rollout.routing_replay=true has not been tested with model.images=true: set "
            "rollout.routing_replay=false"
        )
    if torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == "npu":
        raise InputError(
            "rollout.routing_replay=true is not supported on an NPU, where vLLM has other routers: "
            "set rollout.routing_replay=false"
        )


def expert_weights_of_layers(config: DictConfig) -> list[Tensor]:
    """Return one weight [num_experts, ...] of each layer with experts, on the meta device."""
    hf = build_on_meta(read_hf_config(config.model.path), torch.float32)
    return [weight for _, weight in first_weights(hf)]


def check_same_layers(config: DictConfig, recorded: tuple[int, int]) -> None:
    """Raise InputError if vLLM has experts in other layers than the trainer, or chooses others.

    recorded: the number of vLLM's layers with experts, and its number of experts per token.
    """
    shape = read_hf_config(config.model.path).get_text_config()
    trained = (len(expert_weights_of_layers(config)), experts_per_token(shape))
    if recorded != trained:
        raise InputError(
            f"rollout.routing_replay=true: vLLM chooses {recorded[1]} experts in {recorded[0]} "
            f"layers of model.path={config.model.path}, but the trainer chooses {trained[1]} in "
            f"{trained[0]}: set rollout.routing_replay=false"
        )


def describe_memory(config: DictConfig, world_size: int) -> str:
    """Describe the memory for the experts of a step's responses on one rank, if all are longest.

    They are in host memory twice: on the rank that generated a response, and on the rank that
    trains on it.
    """
    shape = read_hf_config(config.model.path).get_text_config()
    weights = expert_weights_of_layers(config)
    itemsize = route_dtype(max(map(len, weights))).itemsize
    bytes_per_token = len(weights) * experts_per_token(shape) * itemsize
    num_responses = config.data.train_batch_size * config.rollout.n
    generated = num_responses * config.rollout.tensor_parallel_size / world_size
    trained = num_responses / world_size
    longest, _ = longest_sequence(config)
    host_bytes = (generated + trained) * longest * bytes_per_token
    share_of_cache = bytes_per_token / kv_bytes_per_token(config, shape)
    return (
        f"routing replay: {bytes_per_token} bytes per token; at most {host_bytes / GIB:.2f} GiB of "
        f"each rank's host memory, and next to the KV cache {share_of_cache:.2%} of its size"
    )


@dataclass(frozen=True)
class KeptRoutes:
    """Routes on their way to host memory.

    routes: [tokens, L, k], at least those of all tokens that vLLM has read
    arrival: the event that marks their arrival; None on a CPU
    """

    routes: Tensor
    arrival: torch.Event | None

    def on_host(self) -> Tensor:
        """Return the routes, after they have arrived."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.routes


def check_recorded(routes: Tensor) -> None:
    """Raise InputError if a layer has no record for the first token of routes [tokens, L, k]."""
    if (routes[:1] == no_route(routes.dtype)).any():
        raise InputError(
            "rollout.routing_replay=true: vLLM chooses experts in a kernel, without its routers, "
            "so the choices cannot be recorded: set rollout.routing_replay=false"
        )


class RouteRecorder:
    """Keeps the routes of requests that have ended, until they are taken.

    vLLM frees the blocks of the KV cache when a request ends, or is aborted or preempted. The
    routes of its tokens are copied before that. A preempted request is usually computed again. But
    its last token may be in flight, and then it ends without any blocks.

    Attributes:
        slot_routes: the routes of the tokens in the KV cache.
        kept: the routes by vLLM's id of the request.
    """

    def __init__(self, llm, config: DictConfig):
        # vLLM-private: the worker, and the scheduler's methods that free the blocks of a request
        # that has ended or is preempted.
        workers = llm.collective_rpc(lambda worker: worker)
        self.slot_routes = workers[0].slot_routes
        check_same_layers(config, self.slot_routes.shape)
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self.manager = scheduler.kv_cache_manager
        self.kept: dict[str, KeptRoutes] = {}
        self._free_blocks = scheduler._free_blocks
        self._preempt_request = scheduler._preempt_request
        scheduler._free_blocks = self._keep_and_free
        scheduler._preempt_request = self._keep_and_preempt

    def _keep_and_free(self, request) -> None:
        self._keep(request)
        self._free_blocks(request)

    def _keep_and_preempt(self, request, *arguments, **options) -> None:
        self._keep(request)
        self._preempt_request(request, *arguments, **options)

    def _keep(self, request) -> None:
        """Copy the routes of a request's tokens, unless its blocks were freed before."""
        block_ids = self.manager.get_block_ids(request.request_id)[self.slot_routes.group]
        if not block_ids:
            return
        routes = self.slot_routes.read(block_ids)
        arrival = None
        if self.slot_routes.device.type != "cpu":
            arrival = torch.Event(self.slot_routes.device)
            arrival.record()
        self.kept[request.request_id] = KeptRoutes(routes, arrival)

    def take(self, request_id: str, num_tokens: int) -> np.ndarray:
        """Return the routes of a request that has ended: [num_tokens, L, k].

        The last token was sampled but not read, so it has no route. Neither have the tokens of a
        request that was aborted before vLLM had read them.

        Args:
            request_id: vLLM's own id, as returned by LLM.enqueue().
            num_tokens: the number of tokens of its prompt and its response.
        """
        return self.take_all([request_id], np.array([num_tokens]))

    def take_all(self, request_ids: Sequence[str], lengths: np.ndarray) -> np.ndarray:
        """Return the routes of several requests, laid end to end: see take()."""
        missing = no_route(self.slot_routes.dtype)
        shape = (int(np.sum(lengths)), *self.slot_routes.shape)
        routes = torch.full(shape, missing, dtype=self.slot_routes.dtype)
        start = 0
        for request_id, length in zip(request_ids, lengths, strict=True):
            kept = self.kept.pop(request_id, None)
            if kept is not None:
                num_read = min(len(kept.routes), int(length) - 1)
                own = kept.on_host()[:num_read]
                check_recorded(own)
                routes[start : start + num_read] = own
            start += int(length)
        return routes.numpy()

    def join(self, routes: Sequence[np.ndarray]) -> np.ndarray:
        """Lay routes [tokens, L, k] of several sequences end to end. There may be no sequence."""
        # Zero experts of the right shape and dtype.
        return np.concatenate([self.take_all([], np.zeros(0, np.int64)), *routes])

    def forget(self) -> None:
        """Forget the routes that have not been taken."""
        self.kept.clear()

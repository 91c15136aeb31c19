"""The experts that vLLM chose for the tokens of a request (rollout.routing_replay)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from config import InputError
from engines.model.experts import experts_per_token
from engines.model.hf import read_hf_config
from engines.model.routes import no_route

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
    if torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == "npu":
        raise InputError(
            "rollout.routing_replay=true is not supported on an NPU, where vLLM has other routers: "
            "set rollout.routing_replay=false"
        )


@dataclass(frozen=True)
class KeptRoutes:
    """Routes on their way to host memory.

    routes: [tokens, L, k], at least those of all tokens that vLLM has read
    arrival: the event after which they are there; None on a CPU
    """

    routes: Tensor
    arrival: torch.Event | None

    def on_host(self) -> Tensor:
        """Return the routes, after they have arrived."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.routes


class RouteRecorder:
    """Keeps the routes of requests that have ended, until they are taken.

    vLLM frees the blocks of the KV cache when a request ends or is aborted. The routes of its
    tokens are copied before that.

    Attributes:
        slot_routes: the routes of the tokens in the KV cache.
        kept: the routes by vLLM's id of the request.
    """

    def __init__(self, llm):
        # vLLM-private: the worker and the manager of the KV cache.
        workers = llm.collective_rpc(lambda worker: worker)
        self.slot_routes = workers[0].slot_routes
        self.manager = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
        self.kept: dict[str, KeptRoutes] = {}
        self._free_blocks = self.manager.free
        self.manager.free = self._keep_and_free

    def _keep_and_free(self, request) -> None:
        # A request that is preempted is computed again.
        if request.is_finished():
            block_ids = self.manager.get_block_ids(request.request_id)
            routes = self.slot_routes.read(block_ids[self.slot_routes.group])
            arrival = None
            if self.slot_routes.device.type != "cpu":
                arrival = torch.Event(self.slot_routes.device)
                arrival.record()
            self.kept[request.request_id] = KeptRoutes(routes, arrival)
        self._free_blocks(request)

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
                routes[start : start + num_read] = kept.on_host()[:num_read]
            start += int(length)
        return routes.numpy()

    def join(self, routes: Sequence[np.ndarray]) -> np.ndarray:
        """Lay routes [tokens, L, k] of several sequences end to end. There may be no sequence."""
        # Zero experts of the right shape and dtype.
        return np.concatenate([self.take_all([], np.zeros(0, np.int64)), *routes])

    def forget(self) -> None:
        """Forget the routes that nobody has taken."""
        self.kept.clear()

"""vLLM workers that record the experts which the model chooses for each token.

vLLM can return these experts itself (enable_return_routed_experts), but not with every model
runner: 0.25.1 only in V1, 0.32 only in V2, which does not run on a CPU. So these workers record
them, for all model runners in the same way.

The routers write their choices into a buffer with a row per token of the step. It has a fixed
address, so that this also works within CUDA graphs. After the step, the rows are copied to the
slots of the KV cache that hold the tokens' keys and values. So the experts of a token are found as
long as its keys and values are: after a hit in the prefix cache, and for a draft that was accepted.

vLLM-private: every attribute of the model runner and of the routers. `worker_cls` is an option.
"""

from functools import partial

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec

from config import InputError
from engines.model.routes import no_route, route_dtype

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class SlotRoutes:
    """The experts of the tokens in the KV cache, for L layers with k experts per token.

    Attributes:
        num_experts: the number of experts of a layer.
        group: the number of the group of attention layers whose KV cache has a slot for each token.
        step: [max tokens of a step, L, k], the experts of the current step's tokens.
        slots: [slots + 1, L, k], the experts of the token in each slot. The last row is for
            padding, whose slot is -1. None while vLLM sleeps.
    """

    def __init__(self, model: nn.Module, kv_cache_config, max_tokens: int, device: torch.device):
        routers = find_routers(model)
        if not routers:
            raise InputError(
                f"rollout.routing_replay=true: vLLM's {type(model).__name__} has no router whose "
                "choices can be recorded: set rollout.routing_replay=false"
            )
        self.num_experts = routers[0].global_num_experts
        self.group = full_attention_group(kv_cache_config)
        self.block_size = kv_cache_config.kv_cache_groups[self.group].kv_cache_spec.block_size
        self.num_slots = kv_cache_config.num_blocks * self.block_size
        self.layer_name = kv_cache_config.kv_cache_groups[self.group].layer_names[0]
        self.shape = (len(routers), routers[0].top_k)
        self.dtype = route_dtype(self.num_experts)
        self.device = device
        self.step = self._unrecorded(max_tokens)
        self.slots: Tensor | None = None
        for layer, router in enumerate(routers):
            router.set_capture_fn(partial(self._capture, layer))
        self.allocate()

    def allocate(self) -> None:
        """Allocate the memory of the slots."""
        if self.slots is None:
            self.slots = self._unrecorded(self.num_slots + 1)

    def _unrecorded(self, num_tokens: int) -> Tensor:
        shape = (num_tokens, *self.shape)
        return torch.full(shape, no_route(self.dtype), dtype=self.dtype, device=self.device)

    def free(self) -> None:
        """Free the memory of the slots."""
        self.slots = None

    def _capture(self, layer: int, experts: Tensor) -> None:
        """Called by a router with its choices, [tokens, k]."""
        self.step[: len(experts), layer].copy_(experts)

    @torch.no_grad()
    def record(self, state) -> None:
        """Copy the experts of a step to its tokens' slots.

        Args:
            state: the model runner's execute_model_state; None if the step had no tokens.
        """
        if state is None or self.slots is None:
            return
        # The V1 model runner calls it slot_mappings.
        name = "slot_mappings" if hasattr(state, "slot_mappings") else "slot_mappings_by_layer"
        by_layer = getattr(state, name)
        if by_layer is None:
            return
        slot_of_token = by_layer[self.layer_name]
        self.slots[slot_of_token] = self.step[: len(slot_of_token)]

    def read(self, block_ids: list[int]) -> Tensor:
        """Return the experts of the tokens in these blocks of the KV cache: [tokens, L, k].

        The result is in host memory. On a GPU it is complete when the device has caught up.
        """
        blocks = torch.tensor(block_ids, dtype=torch.int64, device=self.device)
        by_block = self.slots[:-1].view(-1, self.block_size, *self.shape)
        return by_block[blocks].flatten(0, 1).to("cpu", non_blocking=True)


def find_routers(model: nn.Module) -> list[BaseRouter]:
    """Return the routers of a model, in the order of its layers."""
    routers = {}
    for module in model.modules():
        router = getattr(module, "router", None)
        if isinstance(router, BaseRouter):
            routers[id(router)] = router  # wrappers of a layer, such as for adapters, repeat it
    return list(routers.values())


def full_attention_group(kv_cache_config) -> int:
    """Return the number of the first group of layers whose KV cache keeps all tokens."""
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            return number
    raise InputError(
        "rollout.routing_replay=true needs a model with full attention in some layer, whose KV "
        "cache has a slot for each token: set rollout.routing_replay=false"
    )


class RecordingWorker(Worker):
    """vLLM's worker on this platform, which also records experts, from the warm-up on.

    Attributes:
        slot_routes: the experts of the tokens in the KV cache.
    """

    slot_routes: SlotRoutes

    def compile_or_warm_up_model(self):
        # Before CUDA graphs are captured, which must contain the copies.
        runner = self.model_runner
        max_tokens = self.vllm_config.scheduler_config.max_num_batched_tokens
        self.slot_routes = SlotRoutes(
            runner.get_model(), runner.kv_cache_config, max_tokens, self.device
        )
        return super().compile_or_warm_up_model()

    def execute_model(self, scheduler_output):
        output = super().execute_model(scheduler_output)
        self.slot_routes.record(self.model_runner.execute_model_state)
        return output

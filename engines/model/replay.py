"""Replay vLLM's choices of experts in a Hugging Face model: see engines/model/routes.py."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from config import InputError
from data.batching.batch import Batch
from engines.base import Engine
from engines.model.experts import expert_weights, experts_per_token
from engines.model.routes import (
    FIELD,
    Mismatch,
    has_route,
    replayed,
    replays_routing,
    route_dtype,
)

CHECKED_TOKENS = 8


class RoutingReplay:
    """Makes the layers of a model use given experts.

    Routers of different families score experts differently: by softmax or sigmoid, with a bias, in
    groups. But all of them choose with torch.topk, and then look up the weights of the chosen
    experts. So this class replaces the result of topk while a layer with experts runs.

    Attributes:
        blocks: the modules that contain a router and its experts, in the order of the layers.
        routes: [t, L, k], the experts of the tokens of the next forward pass, and of its
            recomputation in the backward pass. None: the routers choose freely.
        mismatch: counts how often the routers would have chosen other experts.
    """

    def __init__(self, hf: nn.Module, hf_config, device: torch.device):
        """Replace the forward() of the blocks. Call this before layers are compiled."""
        self.num_chosen = experts_per_token(hf_config)
        self.num_experts = [len(weight) for _, weight in first_weights(hf)]
        self.blocks = [hf.get_submodule(name) for name, _ in first_weights(hf)]
        self.routes: Tensor | None = None
        self.mismatch = Mismatch(device)
        self._is_counting = False
        for layer, block in enumerate(self.blocks):
            # Compiled code would not notice that topk is replaced.
            block.forward = torch.compiler.disable(partial(self._forward, block.forward, layer))

    @staticmethod
    def of(
        hf: nn.Module, hf_config, config: DictConfig, device: torch.device
    ) -> "RoutingReplay | None":
        """Return the replay of a model, or None without rollout.routing_replay."""
        if not replays_routing(config):
            return None
        return RoutingReplay(hf, hf_config, device)

    @contextmanager
    def replaying(self, routes: Tensor | None) -> Iterator[None]:
        """Set the experts of a forward pass, and count mismatches during the pass.

        The experts stay set for the recomputation in the backward pass, until the next call.

        Args:
            routes: [b, s, L, k], for all positions of the model's input; None: choose freely.
        """
        self.routes = None if routes is None else routes.flatten(0, 1)
        self._is_counting = True
        yield
        self._is_counting = False

    def _forward(self, forward: Callable, layer: int, *args, **kwargs):
        """Run the forward() of a block with the experts in `routes`, if there are any."""
        if self.routes is None:
            return forward(*args, **kwargs)
        mismatch = self.mismatch if self._is_counting else None
        choice = ReplayedChoice(self.routes[:, layer], self.num_experts[layer], mismatch)
        with choice:
            output = forward(*args, **kwargs)
        choice.check(self.blocks[layer])
        return output


class ReplayedChoice(TorchFunctionMode):
    """Within this context, a call of topk over all experts returns given experts.

    Args:
        routes: [t, k], see engines/model/routes.py.
        num_experts: the number of experts among which a router chooses.
        mismatch: counts how often the router would have chosen others; None: do not count.
    """

    def __init__(self, routes: Tensor, num_experts: int, mismatch: Mismatch | None):
        super().__init__()
        self.routes = routes
        self.num_experts = num_experts
        self.mismatch = mismatch
        self.num_replaced = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function not in (torch.topk, Tensor.topk):
            return result
        scores = args[0] if args else kwargs["input"]
        own = result.indices
        # Some routers first choose groups of experts, also with topk.
        if scores.shape[-1] != self.num_experts or own.shape != self.routes.shape:
            return result
        self.num_replaced += 1
        if self.mismatch is not None:
            self.mismatch.add(own, self.routes)
        chosen = replayed(own, self.routes)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))

    def check(self, block: nn.Module) -> None:
        """Raise InputError unless the block has chosen its experts exactly once."""
        if self.num_replaced != 1:
            raise InputError(
                f"rollout.routing_replay=true does not work with {type(block).__name__}, which "
                f"chooses experts with {self.num_replaced} calls of topk instead of one: set "
                "rollout.routing_replay=false"
            )


def check_can_replay(hf: nn.Module, config: DictConfig) -> None:
    """Raise InputError for rollout.routing_replay with a model without stacked experts.

    Args:
        hf: the model on the meta device.
    """
    if replays_routing(config) and not first_weights(hf):
        raise InputError(
            f"rollout.routing_replay=true needs a mixture of experts, but model.path="
            f"{config.model.path} ({type(hf).__name__}) has no layer with routed experts: set "
            "rollout.routing_replay=false"
        )


def first_weights(hf: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return (name of the block, one weight of its experts) for each layer with experts."""
    weights = {}
    for name, weight in expert_weights(hf):
        weights.setdefault(name.rpartition(".experts.")[0], weight)
    return list(weights.items())


# -- the check at start --------------------------------------------------------------------------


def check_replay(engine: Engine, replay: RoutingReplay) -> None:
    """Check with a forward pass that each block sends tokens to the experts that it is given.

    All ranks call this together. The pass has a few tokens, with random experts.

    Raises:
        InputError: on all ranks, if some block sends a token to another expert.
    """
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(engine.hf_config.vocab_size, (CHECKED_TOKENS,), generator=generator)
    shape = (CHECKED_TOKENS, len(replay.blocks), min(replay.num_experts))
    scores = torch.rand(shape, generator=generator)
    routes = scores.argsort(-1)[..., : replay.num_chosen].to(route_dtype(max(replay.num_experts)))
    batch = Batch(token_ids, torch.tensor([0, CHECKED_TOKENS]), {FIELD: routes})
    wrong: set[str] = set()

    def compare(layer: int, _, args: tuple) -> None:
        expected = replay.routes[:, layer]
        if not any(sends_to(tensor, expected) for tensor in args):
            wrong.add(type(replay.blocks[layer]).__name__)

    handles = [
        block.experts.register_forward_pre_hook(partial(compare, layer))
        for layer, block in enumerate(replay.blocks)
    ]
    # Compiling for this shape would take a minute.
    with torch.compiler.set_stance("force_eager"):
        engine.head_outputs(batch)
    for handle in handles:
        handle.remove()
    if wrong:
        raise InputError(
            f"rollout.routing_replay=true does not work with {min(wrong)} of model.path="
            f"{engine.config.model.path}, which sends tokens to other experts than the given ones: "
            "set rollout.routing_replay=false"
        )


def sends_to(indices: Tensor, expected: Tensor) -> bool:
    """Return whether an argument of the experts' forward() is the indices of expected experts.

    Args:
        indices: any tensor argument; [t, k] int64 if it has the indices of experts.
        expected: [t, k], see engines/model/routes.py.
    """
    if indices.is_floating_point() or indices.shape != expected.shape:
        return False
    is_routed = has_route(expected)
    return torch.equal(indices[is_routed].sort(1).values, expected[is_routed].long().sort(1).values)

"""Routes: the experts that vLLM chose for each token, which the trainer replays.

The trainer's kernels, batches and precision differ from vLLM's. So its router sees slightly
different hidden states, and chooses other experts for some tokens. Their outputs then differ by
much more than rounding. Routing replay (R3, Ma et al. 2025, arXiv 2510.11370) computes the
trainer's forward pass with vLLM's experts. The weights of the experts are still computed from the
trainer's own router logits, but normalized over vLLM's experts. So the router gets a gradient.

A batch has the field FIELD: [T, L, k], for each token the k experts in each of the L layers that
have experts. Entry t is for token t as an input. The last token of a sequence was sampled, but vLLM
never read it. So it has no route, which no_route() marks, and the trainer's router chooses.
"""

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor

FIELD = "routed_experts"


def replays_routing(config: DictConfig) -> bool:
    """Return whether an engine with this configuration replays vLLM's routing."""
    return "rollout" in config and config.rollout.routing_replay


def route_dtype(num_experts: int) -> torch.dtype:
    """Return the smallest dtype that holds the index of every expert, and no_route()."""
    return torch.uint8 if num_experts < 256 else torch.int16


def no_route(dtype: torch.dtype) -> int:
    """Return the value that marks a missing route in this dtype."""
    return torch.iinfo(dtype).max


def has_route(routes: Tensor) -> Tensor:
    """Return which tokens have a route: [t] bool, from the routes of one layer, [t, k]."""
    return routes[:, 0] != no_route(routes.dtype)


def replayed(own: Tensor, routes: Tensor) -> Tensor:
    """Return the experts of each token, [t, k] int64: vLLM's, or `own` for tokens without a route.

    Args:
        own: [t, k] int64, the experts that the trainer's router chooses.
        routes: [t, k], see route_dtype().
    """
    return torch.where(has_route(routes)[:, None], routes.long(), own)


def joined_parts(earlier: np.ndarray | None, later: np.ndarray) -> np.ndarray:
    """Return the routes of a sequence that vLLM has sampled in two requests: [n, L, k].

    The tokens of the earlier request keep their routes, even if the later one has read them again
    with other weights, because their log-probabilities come from the earlier request. Only its last
    token takes the later route: the earlier request never read it.

    Args:
        earlier: the routes of the earlier request's tokens; None: there was no earlier request.
        later: [n, L, k], the later request's routes, for all tokens.
    """
    num_kept = 0 if earlier is None else len(earlier) - 1
    if num_kept <= 0:
        return later
    return np.concatenate([earlier[:num_kept], later[num_kept:]])


class Mismatch:
    """Counts how often the trainer's router would have chosen other experts.

    counts: fp32 [2], the number of choices that differ, and of all choices. A choice is the set of
        experts of one token in one layer. Tokens without a route do not count.
    """

    def __init__(self, device: torch.device):
        self.counts = torch.zeros(2, device=device)

    @torch.no_grad()
    def add(self, own: Tensor, routes: Tensor) -> None:
        """Add the choices of a layer. Arguments as for replayed()."""
        is_routed = has_route(routes)
        differs = (own.sort(1).values != routes.long().sort(1).values).any(1)
        self.counts += torch.stack([(differs & is_routed).sum(), is_routed.sum()])

    def reset(self) -> None:
        """Forget the counts."""
        self.counts.zero_()

    def metrics(self) -> dict[str, float]:
        """Return the share of the choices that differ, over all ranks; nothing without choices."""
        counts = self.counts.clone()
        dist.all_reduce(counts)
        num_mismatches, num_choices = counts.tolist()
        return {"routing_mismatch": num_mismatches / num_choices} if num_choices else {}

"""A mixture of experts in plain PyTorch, in place of Megatron's MoELayer.

megatron-core 0.16.1 routes with functions of TransformerEngine, and weights the routers' auxiliary
loss by one tensor- and context-parallel rank's number of tokens instead of the micro-batch's.

Ranks divide the experts between them, but never split an expert. Every rank computes its own
experts. It also routes its own tokens, so tensor parallelism needs sequence parallelism.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from omegaconf import DictConfig
from torch import Tensor, nn

from engines.model.routes import Mismatch, replayed, replays_routing


class MixtureOfExperts(MegatronModule):
    """A router and the experts to which it sends tokens; takes the place of a layer's MLP."""

    def __init__(self, config):
        super().__init__(config)
        self.router = Router(config)
        self.experts = Experts(config)

    def set_layer_number(self, number: int) -> None:
        """Called by Megatron with the number of the layer in the whole model, from 1."""
        self.router.layer = number - 1

    def forward(self, hidden: Tensor, padding_mask: Tensor) -> tuple[Tensor, None]:
        """Compute the weighted sum of the experts' outputs for this rank's tokens.

        Args:
            hidden: [s, b, h].
            padding_mask: [b, s] bool, True for padding; or the result of add_routes().

        Returns:
            ([s, b, h], None). None means that there is no bias to add.
        """
        tokens = hidden.flatten(0, 1)
        padding, routes = split_routes(padding_mask.transpose(0, 1).flatten(0, 1))
        weights, chosen = self.router(tokens, padding, routes)
        return self.experts(tokens, weights, chosen).view_as(hidden), None


def add_routes(padding: Tensor, routes: Tensor | None) -> Tensor:
    """Add the experts that vLLM chose to a padding mask.

    Megatron passes the mask to every layer, divides it like the tokens, and keeps it for the
    recomputation of a layer. So each layer finds the experts of its own micro-batch there, on any
    pipeline stage.

    Args:
        padding: [b, s] bool.
        routes: [b, s, L, k], see engines/model/routes.py; None: there are none.

    Returns:
        [b, s, 1 + L, k], the mask before the routes, in their dtype; without routes, the mask.
    """
    if routes is None:
        return padding
    first = padding[..., None, None].expand(*padding.shape, 1, routes.shape[-1])
    return torch.cat([first.to(routes.dtype), routes], 2)


def split_routes(mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the padding [t] bool and the routes [t, L, k] of t tokens: see add_routes()."""
    if mask.ndim == 1:
        return mask, None
    return mask[:, 0, 0].bool(), mask[:, 1:]


class Router(MegatronModule):
    """Chooses the experts for every token.

    The auxiliary loss rewards balanced choices (Switch Transformer, Fedus et al. 2021). Within a
    micro-batch, it is

        num_experts * sum over experts of (share of choices) * (mean probability),

    which is 1 if all experts are chosen equally often. A batch's loss is the mean over its
    micro-batches, weighted by their numbers of tokens. It counts the router's own choices even if
    vLLM's are replayed, because those are the choices that it has to balance.

    Attributes:
        layer: the number of the router's layer in the whole model, from 0.
        mismatch: counts the choices that differ from vLLM's; None: do not count.
    """

    layer: int
    mismatch: Mismatch | None = None

    def __init__(self, config):
        super().__init__(config)
        self.weight = new_weight(config, config.num_moe_experts, config.hidden_size)
        # Each tensor-parallel rank routes its own tokens, so gradients are summed over the ranks.
        self.weight.sequence_parallel = config.sequence_parallel
        self.begin_batch(0.0, 1)

    def begin_batch(self, coefficient: float, num_tokens: int) -> None:
        """Reset the auxiliary loss before a batch.

        Args:
            coefficient: the weight of the auxiliary loss.
            num_tokens: the number of tokens in all micro-batches of the batch, on all ranks.
        """
        self.coefficient = coefficient
        self.num_tokens = num_tokens
        self.aux_loss = torch.zeros((), device=self.weight.device)

    def forward(
        self, tokens: Tensor, padding: Tensor, routes: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Choose k experts for each token.

        Args:
            tokens: [t, h].
            padding: [t] bool.
            routes: [t, L, k], the experts that vLLM chose, which take precedence; or None.

        Returns:
            (weights, indices) of the chosen experts, both [t, k].
        """
        probs = F.linear(tokens, self.weight).softmax(-1, dtype=torch.float32)
        weights, own = probs.topk(self.config.moe_router_topk)
        chosen = own
        if routes is not None:
            chosen = replayed(own, routes[:, self.layer])
            weights = probs.gather(1, chosen)
            if self.mismatch is not None:
                self.mismatch.add(own, routes[:, self.layer])
        if not self.config.moe_router_pre_softmax:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.coefficient and torch.is_grad_enabled():
            aux_loss = self._aux_loss(probs, own, padding)
            self.aux_loss += aux_loss.detach()
            # This sends the auxiliary loss's gradient along with the gradient of the weights, so
            # that it works on any pipeline stage.
            weights = MoEAuxLossAutoScaler.apply(weights, self.coefficient * aux_loss)
        return weights.to(tokens.dtype), chosen

    def _aux_loss(self, probs: Tensor, chosen: Tensor, padding: Tensor) -> Tensor:
        """Return this rank's part of a micro-batch's auxiliary loss."""
        is_token = (~padding).float()[:, None]
        is_chosen = torch.zeros_like(probs).scatter(1, chosen, 1.0)
        choices = (is_chosen * is_token).sum(0)
        dist.all_reduce(choices, group=mpu.get_tensor_and_context_parallel_group())
        share = choices / choices.sum().clamp(min=1)
        sums_of_probs = (probs * is_token).sum(0)
        num_experts = len(share)
        return num_experts * (share * sums_of_probs).sum() / self.num_tokens


class Experts(MegatronModule):
    """This rank's experts, stacked.

    linear_fc1: [n, 2 * f, h], for each of n experts first the gate rows, then the up rows
    linear_fc2: [n, h, f]
    """

    def __init__(self, config):
        super().__init__(config)
        self.group = mpu.get_expert_model_parallel_group()
        num_experts = config.num_moe_experts // self.group.size()
        width = config.moe_ffn_hidden_size
        self.linear_fc1 = new_weight(config, num_experts, 2 * width, config.hidden_size)
        self.linear_fc2 = new_weight(config, num_experts, config.hidden_size, width)
        for weight in self.parameters():
            # Gradients are reduced only over the ranks that hold the same experts.
            weight.allreduce = False
            # Each rank has different experts, so all ranks contribute to the gradient norm.
            weight.tensor_model_parallel = True

    def forward(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the weighted sum of k experts' outputs for each token.

        Args:
            tokens: [t, h].
            weights, chosen: [t, k], as returned by Router.

        Returns:
            [t, h].
        """
        order = chosen.flatten().argsort(stable=True)  # t * k copies of tokens, by expert
        counts = order.new_zeros(self.config.num_moe_experts)
        counts = counts.scatter_add_(0, chosen.flatten(), torch.ones_like(order))
        copies = CopyTokens.apply(tokens, order, chosen.shape[1])
        if self.group.size() > 1:
            outputs = self._compute_on_owners(copies, counts)
        else:
            outputs = self._compute(copies, counts)
        outputs = outputs.index_select(0, inverse(order)).view(*chosen.shape, -1)
        return torch.einsum("tk,tkh->th", weights, outputs)

    def _compute_on_owners(self, copies: Tensor, counts: Tensor) -> Tensor:
        """Send each copy to the rank that holds its expert, and receive the expert's output.

        Args:
            copies: [c, h], sorted by expert.
            counts: [all experts], the number of copies for each expert.

        Returns:
            The outputs [c, h], in the order of `copies`.
        """
        num_ranks = self.group.size()
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts, group=self.group)
        incoming = incoming.view(num_ranks, -1)  # [sending rank, own expert]
        num_sent = counts.view_as(incoming).sum(1).tolist()
        num_received = incoming.sum(1).tolist()

        # Copies arrive sorted by sending rank; sort them by expert.
        expert_numbers = torch.arange(incoming.shape[1], device=counts.device).repeat(num_ranks)
        expert_of_copy = expert_numbers.repeat_interleave(
            incoming.flatten(), output_size=sum(num_received)
        )
        order = expert_of_copy.argsort(stable=True)
        received = all_to_all(self.group, copies, num_received, num_sent).index_select(0, order)
        outputs = self._compute(received, incoming.sum(0)).index_select(0, inverse(order))
        return all_to_all(self.group, outputs, num_sent, num_received)

    def _compute(self, copies: Tensor, counts: Tensor) -> Tensor:
        """Compute this rank's experts, [c, h] -> [c, h].

        The first counts[0] rows go through the first expert, the next counts[1] rows through the
        second one, and so on.
        """
        gate, up = grouped_linear(copies, self.linear_fc1, counts).chunk(2, dim=-1)
        return grouped_linear(F.silu(gate) * up, self.linear_fc2, counts)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """Describe the experts to dist_checkpointing as parts of one stack of all experts."""
        num_leading_axes = len(sharded_offsets)
        expert_offset = (num_leading_axes, self.group.rank(), self.group.size())
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}{name}",
                weight,
                *sharded_offsets,
                expert_offset,
                replica_id=(0, 0, mpu.get_expert_data_parallel_rank()),
                prepend_axis_num=num_leading_axes,
            )
            for name, weight in self.named_parameters()
        }


def new_weight(config, *shape: int) -> nn.Parameter:
    """Return an uninitialized parameter on this rank's device."""
    device = torch.cuda.current_device()
    return nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply consecutive groups of rows by one matrix each.

    Args:
        x: [c, in].
        weight: [n, out, in].
        counts: [n] int64, the number of rows for each matrix.

    Returns:
        [c, out].
    """
    if x.is_cuda and x.dtype == torch.bfloat16 and len(x):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))
    groups = x.split(counts.tolist())
    return torch.cat([F.linear(rows, matrix) for rows, matrix in zip(groups, weight.unbind())])


def inverse(order: Tensor) -> Tensor:
    """Return the inverse of a permutation [n] int64."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class CopyTokens(torch.autograd.Function):
    """Makes k copies of every token and arranges them in the given order.

    The gradient sums the copies in a fixed order. So it is deterministic, unlike the gradient of
    indexing.
    """

    @staticmethod
    def forward(ctx, tokens: Tensor, order: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        return tokens.index_select(0, order // k)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (order,) = ctx.saved_tensors
        by_token = grad.index_select(0, inverse(order)).unflatten(0, (-1, ctx.k))
        return by_token.sum(1), None, None


def mean_aux_loss(routers: list[Router], num_layers: int) -> float:
    """Return the routers' auxiliary loss in a step, as a mean over the layers of all ranks."""
    aux_loss = torch.stack([router.aux_loss for router in routers]).sum()
    dist.all_reduce(aux_loss)
    return aux_loss.item() / num_layers


def count_mismatches(
    routers: list[Router], config: DictConfig, device: torch.device
) -> Mismatch | None:
    """Make routers count the choices that differ from vLLM's; None without routing replay."""
    if not replays_routing(config):
        return None
    mismatch = Mismatch(device)
    for router in routers:
        router.mismatch = mismatch
    return mismatch

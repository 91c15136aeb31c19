"""A mixture of experts instead of Megatron's MoELayer, in plain PyTorch.

megatron-core 0.16.1 routes with functions of TransformerEngine, and weighs the routers' auxiliary loss by the tokens of
one tensor- and context-parallel rank instead of the micro-batch's. Experts are divided over ranks whole, never sliced:
every rank computes its own tokens (so tensor parallelism needs sequence parallelism) and the experts that it has.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor, nn


class MixtureOfExperts(MegatronModule):
    def __init__(self, config):
        super().__init__(config)
        self.router, self.experts = Router(config), Experts(config)

    def forward(self, hidden: Tensor, padding_mask: Tensor) -> tuple[Tensor, None]:
        """hidden [s, b, h] of this rank's tokens, padding_mask [b, s] bool -> ([s, b, h], no bias)"""
        tokens = hidden.flatten(0, 1)
        weights, chosen = self.router(tokens, padding_mask.T.flatten())
        return self.experts(tokens, weights, chosen).view_as(hidden), None


class Router(MegatronModule):
    """Chooses the experts of every token. Its auxiliary loss asks them to be chosen alike (Switch Transformer, Fedus et
    al. 2021): of a micro-batch num_experts * sum over experts of (share of choices) * (mean probability), which is 1 if
    they are. A batch has the mean over its micro-batches, by tokens."""

    def __init__(self, config):
        super().__init__(config)
        self.weight = new_weight(config, config.num_moe_experts, config.hidden_size)
        self.weight.sequence_parallel = (
            config.sequence_parallel
        )  # each rank sees its own tokens: gradients add up
        self.begin(0.0, 1)

    def begin(self, coefficient: float, num_tokens: int) -> None:
        """Before a batch: set the auxiliary loss's weight and the number of tokens of all micro-batches and ranks."""
        self.coefficient, self.num_tokens = coefficient, num_tokens
        self.aux_loss = torch.zeros((), device=self.weight.device)

    def forward(self, tokens: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [t, h], padding [t] bool -> the weights [t, k] of the chosen experts and their numbers [t, k]"""
        probs = F.linear(tokens, self.weight).softmax(-1, dtype=torch.float32)
        weights, chosen = probs.topk(self.config.moe_router_topk)
        if not self.config.moe_router_pre_softmax:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.coefficient and torch.is_grad_enabled():
            real = (~padding).float()[:, None]
            choices = (torch.zeros_like(probs).scatter(1, chosen, 1.0) * real).sum(0)
            dist.all_reduce(choices, group=mpu.get_tensor_and_context_parallel_group())
            share = choices / choices.sum().clamp(min=1)
            aux_loss = (
                len(share) * (share * (probs * real).sum(0)).sum() / self.num_tokens
            )  # this rank's part
            self.aux_loss += aux_loss.detach()
            # When weights get their gradient, so does this loss, on whatever pipeline stage that is.
            weights = MoEAuxLossAutoScaler.apply(weights, self.coefficient * aux_loss)
        return weights.to(tokens.dtype), chosen


class Experts(MegatronModule):
    """This rank's experts, stacked: linear_fc1 [n, 2 * f, h] (gate, then up), linear_fc2 [n, h, f]."""

    def __init__(self, config):
        super().__init__(config)
        self.group = mpu.get_expert_model_parallel_group()
        number, width = config.num_moe_experts // self.group.size(), config.moe_ffn_hidden_size
        self.linear_fc1 = new_weight(config, number, 2 * width, config.hidden_size)
        self.linear_fc2 = new_weight(config, number, config.hidden_size, width)
        for weight in self.parameters():
            weight.allreduce = False  # reduced over the ranks with the same experts, not over all
            weight.tensor_model_parallel = True  # counts in the gradient norm of every such rank

    def forward(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """tokens [t, h], weights and chosen [t, k] -> [t, h], each the weighted sum of k experts' outputs"""
        order = chosen.flatten().argsort(stable=True)  # t * k copies of tokens, by expert
        counts = order.new_zeros(self.config.num_moe_experts).scatter_add_(
            0, chosen.flatten(), torch.ones_like(order)
        )
        copies = Copies.apply(tokens, order, chosen.shape[1])
        outputs = (
            self.on_their_ranks(copies, counts)
            if self.group.size() > 1
            else self.compute(copies, counts)
        )
        outputs = outputs.index_select(0, inverse(order)).view(*chosen.shape, -1)
        return torch.einsum("tk,tkh->th", weights, outputs)

    def on_their_ranks(self, copies: Tensor, counts: Tensor) -> Tensor:
        """Each copy's output, computed by the rank that has its expert."""
        incoming = torch.empty_like(counts)  # [ranks, experts here], flat
        dist.all_to_all_single(incoming, counts, group=self.group)
        incoming = incoming.view(self.group.size(), -1)
        send, receive = counts.view_as(incoming).sum(1).tolist(), incoming.sum(1).tolist()
        here = torch.arange(incoming.shape[1], device=counts.device).repeat(self.group.size())
        order = here.repeat_interleave(incoming.flatten(), output_size=sum(receive)).argsort(
            stable=True
        )
        copies = all_to_all(self.group, copies, receive, send).index_select(0, order)
        outputs = self.compute(copies, incoming.sum(0)).index_select(0, inverse(order))
        return all_to_all(self.group, outputs, send, receive)

    def compute(self, copies: Tensor, counts: Tensor) -> Tensor:
        """[c, h], the first counts[0] for the first expert here, and so on -> [c, h]"""
        gate, up = grouped_linear(copies, self.linear_fc1, counts).chunk(2, dim=-1)
        return grouped_linear(F.silu(gate) * up, self.linear_fc2, counts)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        layers = len(sharded_offsets)
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}{name}",
                weight,
                *sharded_offsets,
                (layers, self.group.rank(), self.group.size()),
                replica_id=(0, 0, mpu.get_expert_data_parallel_rank()),
                prepend_axis_num=layers,
            )
            for name, weight in self.named_parameters()
        }


def new_weight(config, *shape: int) -> nn.Parameter:
    return nn.Parameter(
        torch.empty(shape, dtype=config.params_dtype, device=torch.cuda.current_device())
    )


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x [c, in], of which counts [n] rows in turn go to each matrix of weight [n, out, in] -> [c, out]"""
    if x.is_cuda and x.dtype == torch.bfloat16 and len(x):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))
    return torch.cat(
        [F.linear(rows, matrix) for rows, matrix in zip(x.split(counts.tolist()), weight.unbind())]
    )


def inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class Copies(torch.autograd.Function):
    """k copies of every token, in this order. Its gradient is a sum in a fixed order, and so deterministic, unlike indexing's."""

    @staticmethod
    def forward(ctx, tokens: Tensor, order: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        return tokens.index_select(0, order // k)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return (
            grad.index_select(0, inverse(*ctx.saved_tensors)).unflatten(0, (-1, ctx.k)).sum(1),
            None,
            None,
        )

"""megatron-core: tensor, sequence, pipeline, context and data parallelism around a Hugging Face model's weights."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

if torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == "npu":
    import mindspeed.megatron_adaptor  # noqa: F401  replaces parts of megatron.core, so it comes before it

from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE
from megatron.core.optimizer import (
    USING_PYTORCH_OPTIMIZER,
    OptimizerConfig,
    clip_grads,
    get_megatron_optimizer,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from omegaconf import DictConfig
from torch import Tensor, nn

from config import InputError
from data.batching.packing import Batch
from data.batching.plan import MicroBatches
from engines import schedule
from engines.adapter_guard import AdapterGuard
from engines.base import Engine, LossFn
from engines.context_parallel import has_dynamic_cp
from engines.dropout import DropoutSeeds
from engines.heads import Head, LogProbHead, ValueHead
from engines.megatron import adapted_layers as adapters, bridge, layout, sharded_state as checkpoint
from engines.megatron.layers import Packing
from engines.megatron.mapping import Mapping, global_parameters
from engines.megatron.moe import Router
from engines.megatron.without_cuda import cuda_is_cpu
from engines.microbatch import Ahead, MicroBatch, lay_out
from engines.model import freeze, guard, lora, mtp
from engines.model.experts import aux_loss_weight
from engines.model.hf import build_on_meta, count_flops, keep_zero_rows, read_hf_config
from engines.model.weights import is_ignored, shapes_in_files
from engines.parallel.collectives import groups_of
from engines.parallel.offload import HostMemory

RECOMPUTE = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def count_ahead(batch: Batch, num_layers: int) -> Tensor:
    """[num_layers]: for how many tokens of a batch each layer of multi-token prediction is asked."""
    asked = batch.fields.get("loss_mask", torch.ones(len(batch.input_ids))) != 0
    return torch.tensor(
        [float((asked & (batch.position_ids > k)).sum()) for k in range(1, num_layers + 1)]
    )


class MegatronEngine(Engine):
    @cuda_is_cpu()
    def __init__(
        self,
        config: DictConfig,
        device: torch.device,
        total_steps: int,
        optimize: bool = True,
        head: Head = Head.LOG_PROBS,
        temperature: float = 1.0,
        shared_weights: dict[str, Tensor] | None = None,
    ):
        """Build this rank's part of the model of config.model.path and load its weights.

        optimize: with DDP and an optimizer; False for a model that is only evaluated. head: Head.VALUES puts a value head (zeros, unless
        the directory has one) in place of the output matrix. temperature: the logits are divided by it, as in sampling.
        shared_weights: must be None, since Megatron fuses and splits the weights and cannot use another owner's tensors.
        Raises InputError for a model or a layout that cannot work.
        """
        if shared_weights is not None:
            raise InputError(
                "model_engine=megatron cannot use vLLM's weights as its own: set rollout.share_base=never"
            )
        self.config, self.device, self.total_steps = config, device, total_steps
        self.head_kind, self.optim, engine = head, config.optim, config.engine
        self.hf_config = self.check(config, dist.get_world_size(), head)
        self.compute_dtype = getattr(torch, engine.compute_dtype)
        layout.initialize(engine)
        self.dp_rank, self.dp_size = (
            mpu.get_data_parallel_rank(),
            mpu.get_data_parallel_world_size(),
        )
        self.dp_group, self.cp_group = (
            mpu.get_data_parallel_group(),
            mpu.get_context_parallel_group(),
        )
        self.tp_group, self.pp_group = (
            mpu.get_tensor_model_parallel_group(),
            mpu.get_pipeline_model_parallel_group(),
        )
        self.sequence_parallel = engine.sequence_parallel and self.tp_group.size() > 1
        self.cp_groups = (
            groups_of(self.dp_group, self.cp_group)
            if has_dynamic_cp(engine)
            else {self.cp_group.size(): self.cp_group}
        )
        if engine.virtual_pipeline_model_parallel_size > 1:  # as the interleaved schedule needs it
            self.micro_batches_multiple = self.pp_group.size()

        path, with_mtp, self.lora = (
            Path(config.model.path),
            mtp.is_trained(config),
            config.model.lora,
        )
        hf = build_on_meta(self.hf_config, torch.float32, head, with_mtp=with_mtp)
        self.num_mtp_layers = mtp.num_layers(self.hf_config) if with_mtp else 0
        frozen, own = (
            freeze.apply(config, hf, head, Mapping(self.hf_config, head).holder),
            hf.state_dict().keys(),
        )
        self.names = {
            name: None if name not in own and is_ignored(hf, name) else name
            for name in shapes_in_files(path)
        }
        self.mapping = bridge.make_mapping(engine.bridge, self.hf_config, self.compute_dtype, head)
        self.models = bridge.build(
            self.mapping,
            hf,
            path,
            head,
            self.compute_dtype,
            self.num_mtp_layers,
            config.model.mtp.detach_encoder,
            sequence_parallel=self.sequence_parallel,
            # The loss has its own denominator already: the schedule and DDP must not divide it again.
            calculate_per_token_loss=True,
            gradient_accumulation_fusion=False,
            bias_activation_fusion=device.type != "cpu",
            **RECOMPUTE[engine.recompute],
        )
        for model in self.models:
            for name, p in global_parameters(model):
                p.requires_grad_(self.mapping.names(name)[0] not in frozen)
        if self.lora.rank:
            lora.inject(hf, self.lora)
        self._flops = count_flops(hf, self.hf_config)
        self._adapters = (
            adapters.attach(self.mapping, self.models, config, lora.shapes(hf))
            if self.lora.rank
            else {}
        )
        if (
            self._adapters
            and head is Head.VALUES
            and mpu.is_pipeline_last_stage(ignore_virtual=True)
        ):
            self.models[-1].output_layer.to(getattr(torch, self.lora.dtype)).requires_grad_()
        # The gradient of values passes through the head's weights, which start at zero: it proves nothing.
        has_provable_adapters = self.lora.rank > 0 and head is not Head.VALUES
        self.adapter_guard = AdapterGuard(device, has_provable_adapters)
        self.dropout_seeds = DropoutSeeds(config)
        for model in self.models:
            if (
                model.pre_process and engine.recompute == "full"
            ):  # which takes layers behind frozen ones to need no gradient
                model.embedding.register_forward_hook(
                    lambda module, inputs, output: output.requires_grad_()
                )
            if model.pre_process or model.mtp_process:
                self._keep_zero_rows(model.embedding.word_embeddings)
        self.head = (
            ValueHead()
            if head is Head.VALUES
            else LogProbHead(
                temperature,
                engine.log_prob_chunk_size,
                device.type == "cuda",
                self.hf_config.vocab_size,
                self.tp_group,
            )
        )
        if mpu.is_pipeline_last_stage(ignore_virtual=True):
            self.models[
                -1
            ].head = self.head  # called after the schedule's forward pass, and seen by hooks
        self.routers = [
            module
            for model in self.models
            for module in model.modules()
            if isinstance(module, Router)
        ]
        self.stages, self.optimizer = self.models, None  # stages: what the schedule calls, in DDP
        if optimize:
            self._build_optimizer()
        self._host_memory = HostMemory(device)
        guard.check(self)

    @staticmethod
    def check(config: DictConfig, world_size: int, head: Head = Head.LOG_PROBS):
        """The model's configuration; raises InputError for what this engine cannot do, before anything is built."""
        if config.model.images:
            raise InputError(
                "model.images=true needs model_engine=fsdp: model_engine=megatron has no vision towers"
            )
        hf_config = read_hf_config(config.model.path)
        bridge.check(hf_config, config.model.path, config.engine.bridge)
        layout.check_layout(config, hf_config, world_size)
        mtp.check(config, hf_config)
        hf = build_on_meta(hf_config, torch.float32, head, with_mtp=mtp.is_trained(config))
        bridge.check_files(hf, Path(config.model.path), head)
        freeze.apply(config, hf, head, Mapping(hf_config, head).holder)
        adapters.check(config, hf_config, hf)
        return hf_config

    def _keep_zero_rows(self, words: nn.Module) -> None:
        zero = [
            torch.empty(len(words.weight), dtype=torch.bool, device=self.device)
            for _ in range(self.tp_group.size())
        ]
        dist.all_gather(zero, (words.weight.detach() == 0).all(1), group=self.tp_group)
        share = self.tp_group.rank(), self.tp_group.size()
        keep_zero_rows(
            words,
            torch.cat(zero),
            lambda mask: (
                mask.t().chunk(share[1])[share[0]] if words.reduce_scatter_embeddings else mask
            ),
        )

    def _build_optimizer(self) -> None:
        engine, optim, config = self.config.engine, self.optim, self.models[0].config
        trained = getattr(torch, self.lora.dtype) if self.lora.rank else self.compute_dtype
        self.stages = [
            DistributedDataParallel(
                config, layout.ddp_config(engine), model, disable_bucketing=i > 0
            )
            for i, model in enumerate(self.models)
        ]
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=optim.lr,
                weight_decay=optim.weight_decay,
                adam_beta1=optim.betas[0],
                adam_beta2=optim.betas[1],
                adam_eps=optim.eps,
                clip_grad=optim.clip_grad,
                bf16=trained is torch.bfloat16,
                params_dtype=trained,
                use_distributed_optimizer=engine.use_distributed_optimizer,
            ),
            self.stages,
        )
        # Where all but experts is frozen, the optimizer of the rest is an empty shell.
        self.optimizer.chained_optimizers = [
            o for o in self.optimizer.chained_optimizers if not o.is_stub_optimizer
        ]
        if USING_PYTORCH_OPTIMIZER:  # else TransformerEngine's, which is fused anyway
            for group in self.optimizer.param_groups:
                group["fused"] = True
        # Without the number of tokens, by which it would divide.
        config.finalize_model_grads_func = lambda stages, _, **groups: finalize_model_grads(
            stages, None, **groups
        )
        if self.stages[0].ddp_config.overlap_grad_reduce:
            syncs = [stage.no_sync for stage in self.stages]
            config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]

    # -- training and asking -------------------------------------------------------------------------------------------

    def multiple(self, size: int) -> int:
        return layout.multiple_of(self.config.engine, size)

    @cuda_is_cpu()
    def train_batch(
        self, batch: Batch, loss_fn: LossFn, step: int, micro_batches: MicroBatches | None = None
    ) -> dict[str, float]:
        self._onload("parameters", "optimizer")
        micro_batches = micro_batches or self.divide_share(batch.lengths)
        amounts = defaultdict(lambda: torch.zeros((), device=self.device))
        num_tokens, loss_fn = (
            torch.zeros((), dtype=torch.int, device=self.device),
            self.adapter_guard.watch(loss_fn),
        )

        def loss_of(micro_batch: MicroBatch, hidden: Tensor):
            hidden, *ahead = hidden.chunk(1 + self.num_mtp_layers)
            outputs = self._answers(micro_batch, hidden)[: self.head.num_differentiable]
            loss, extra = loss_fn(*outputs, micro_batch.fields)
            for name, amount in {"loss": loss, **extra}.items():
                amounts[name] += amount.detach() * self.counts_group(micro_batch.group)
            for k, (question, hidden) in enumerate(zip(micro_batch.ahead, ahead)):
                part = self._mtp_loss(question, hidden) / num_ahead[k]
                mtp_losses[k] += part.detach()
                loss = (
                    loss
                    + self.config.model.mtp.mtp_loss_scaling_factor / self.num_mtp_layers * part
                )
            return loss, num_tokens, {}

        counted = self.counted_sequences(batch, micro_batches)
        coefficient = self._begin_routers(len(counted.input_ids))
        mtp_losses = torch.zeros(self.num_mtp_layers, device=self.device)
        if self.num_mtp_layers:
            num_ahead = self.sum_over_dp(count_ahead(counted, self.num_mtp_layers)).clamp(min=1)
        for stage in self.stages:
            stage.zero_grad_buffer()
        self.optimizer.zero_grad()
        with self.dropout_seeds.seeded(
            step, self.dp_rank, self.cp_group.rank(), self.pp_group.rank()
        ):
            self._run(batch, micro_batches, loss_of, forward_only=False)
        lr = schedule.learning_rate(self.optim, step, self.total_steps)
        grad_norm = self._update(lr)
        totals = {}
        if mpu.is_pipeline_last_stage(ignore_virtual=True):
            totals = dict(
                zip(amounts, self.sum_over_dp(torch.stack(list(amounts.values()))).tolist())
            )
            if self.num_mtp_layers:
                dist.all_reduce(
                    mtp_losses, group=mpu.get_data_parallel_group(with_context_parallel=True)
                )
            totals |= {f"mtp/loss_{k}": loss for k, loss in enumerate(mtp_losses.tolist(), 1)}
        if self.pp_group.size() > 1:
            box = [totals]
            dist.broadcast_object_list(
                box, mpu.get_pipeline_model_parallel_last_rank(), self.pp_group, self.device
            )
            totals = box[0]
        if coefficient:
            aux_losses = torch.stack([router.aux_loss for router in self.routers]).sum()
            dist.all_reduce(aux_losses)
            totals["router_aux_loss"] = aux_losses.item() / self.hf_config.num_hidden_layers
        return {
            **totals,
            "grad_norm": grad_norm,
            "lr": lr,
            "skipped": float(not math.isfinite(grad_norm)),
        }

    def _begin_routers(self, num_tokens: int) -> float:
        """The weight of the routers' auxiliary loss. num_tokens: in this data-parallel rank's share of the batch."""
        coefficient = aux_loss_weight(
            self.config.engine.router_aux_loss_coef,
            self.hf_config,
            self.hf_config.num_hidden_layers,
        )
        if coefficient:
            num_tokens = self.sum_over_dp(torch.tensor(float(num_tokens))).item()
            for router in self.routers:
                router.begin(coefficient, num_tokens)
        return coefficient

    @cuda_is_cpu()
    @torch.no_grad()
    def ask(self, batch: Batch, micro_batches: MicroBatches | None = None) -> Tensor:
        self._onload("parameters")
        answers = torch.zeros(self.head.num_outputs, len(batch.input_ids), device=self.device)
        where = Batch(torch.arange(len(batch.input_ids)), batch.cu_seqlens)
        micro_batches = micro_batches or self.divide_share(batch.lengths)
        micro_batches = micro_batches + -len(micro_batches) % self.micro_batches_multiple * [
            (min(self.cp_groups), [])
        ]
        indices = iter(
            [where.select(members).input_ids.to(self.device) for _, members in micro_batches]
        )

        def collect(micro_batch: MicroBatch, hidden: Tensor, non_loss_data: bool) -> None:
            answers[:, next(indices)] = torch.stack(
                [x.float() for x in self._answers(micro_batch, hidden)]
            )

        for model in self.models:
            model.eval()  # recomputes nothing
        self._run(batch, micro_batches, collect, forward_only=True)
        for model in self.models:
            model.train()
        if self.pp_group.size() > 1:
            dist.broadcast(answers, mpu.get_pipeline_model_parallel_last_rank(), self.pp_group)
        return answers

    def one_at_a_time(self, batch: Batch) -> Tensor:
        return self.ask(batch, [(min(self.cp_groups), [i]) for i in range(len(batch))])

    def layers(self) -> list[list[tuple[int, nn.Module]]]:
        return [
            [(layer.layer_number - 1, layer) for layer in model.decoder.layers]
            for model in self.models
        ]

    def _run(
        self, batch: Batch, planned: MicroBatches, of_hidden: Callable, forward_only: bool
    ) -> None:
        """Forward and (unless forward_only) backward; the last pipeline stage calls of_hidden(micro-batch, hidden states)."""
        packed, micro_batches = self.config.engine.use_remove_padding, []
        for size, members in planned:
            group = self.cp_groups[size]
            packing_of = (
                partial(Packing.of, group=group, device=self.device)
                if packed or not HAVE_TE
                else None
            )
            micro_batches.append(
                lay_out(
                    batch.select(members),
                    packed,
                    packing_of,
                    group,
                    self.device,
                    self.multiple(size),
                    zigzag=True,
                    num_ahead=0 if forward_only else self.num_mtp_layers,
                )
            )

        def forward(remaining: Iterator[MicroBatch], stage: nn.Module):
            micro_batch = next(remaining)
            hidden = stage(
                micro_batch.input_ids,
                None,
                None,
                packed_seq_params=micro_batch.packing,
                padding_mask=micro_batch.padding,
                labels=[x.input_ids for x in micro_batch.ahead],
            )
            return hidden, partial(of_hidden, micro_batch)

        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(micro_batches) for _ in self.stages],
            model=self.stages,
            num_microbatches=len(micro_batches),
            seq_length=1,
            micro_batch_size=1,  # stages send each other the shapes
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _answers(self, micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, ...]:
        """The head's outputs, each [T], from hidden states [s, b, h] of the last stage."""
        outputs = self.head(
            self._whole(hidden).index_select(0, micro_batch.place),
            self._output_matrix().to(hidden.dtype),
            micro_batch.targets,
            micro_batch.kept_words,
        )
        return tuple(micro_batch.to_tokens(x) for x in outputs)

    def _mtp_loss(self, ahead: Ahead, hidden: Tensor) -> Tensor:
        """The cross-entropy of what this rank is asked ahead, added up; hidden [s, b, h]. The output matrix gets no gradient."""
        of_all_words = ahead.targets.new_empty(len(ahead.targets), 0)
        return -self.head(
            self._whole(hidden).index_select(0, ahead.place),
            self._output_matrix().detach().to(hidden.dtype),
            ahead.targets,
            of_all_words,
        )[0].sum()

    def _whole(self, hidden: Tensor) -> Tensor:
        """[s, b, h] of the last stage -> [places, h] on every tensor-parallel rank."""
        # Where ranks divide the vocabulary, each has a part of hidden's gradient; where they all have a value head, the whole.
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden,
                tensor_parallel_output_grad=self.head_kind is not Head.VALUES,
                group=self.tp_group,
            )
        elif self.head_kind is not Head.VALUES:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)
        return hidden.flatten(0, 1)

    def _output_matrix(self) -> Tensor:
        model = self.models[-1]
        return (
            model.shared_embedding_or_output_weight()
            if model.output_layer.weight is None
            else model.output_layer.weight
        )

    @torch.no_grad()
    def _update(self, lr: float) -> float:
        """Clip and step; the gradient norm before clipping. A gradient that is not finite leaves the weights alone."""
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        if self.adapter_guard.is_active:
            self.adapter_guard.check(min(grad_norm, self._least_gradient()))
        if math.isfinite(grad_norm):
            for group in self.optimizer.param_groups:  # wd_mult is 0 for norms and biases
                group["lr"], group["weight_decay"] = lr, self.optim.weight_decay * group["wd_mult"]
            if self.optim.clip_grad > 0:
                for optimizer in self.optimizer.chained_optimizers:
                    clip_grads.clip_grad_by_total_norm_fp32(
                        optimizer.get_parameters(), self.optim.clip_grad, grad_norm
                    )
            self.optimizer.step_with_ready_grads()
        return grad_norm

    def _least_gradient(self) -> float:
        """The largest gradient of the pipeline stage, virtual or not, whose largest is the least."""
        largest = torch.zeros(len(self.stages), self.pp_group.size(), device=self.device)
        for i, stage in enumerate(self.stages):
            largest[i, self.pp_group.rank()] = torch.stack(
                [buffer.grad_data.abs().max() for buffer in stage.buffers]
            ).max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest.min().item()

    def modules(self) -> list[nn.Module]:
        return self.models

    def coordinates(self) -> dict:
        groups = {
            "dp": self.dp_group,
            "cp": self.cp_groups[max(self.cp_groups)],
            "tp": self.tp_group,
            "pp": self.pp_group,
        }
        return {
            **{name: [group.rank(), group.size()] for name, group in groups.items()},
            "first_layers": [model.decoder.layers[0].layer_number - 1 for model in self.models],
            "sequence_parallel": self.sequence_parallel,
        }

    # -- memory --------------------------------------------------------------------------------------------------------

    def offload(self, *parts: str) -> None:
        self._host_memory.offload(self._tensors(parts))
        if "optimizer" in parts and self.optimizer is not None:
            # Before the first step there is no state yet: two moments.
            self._host_memory.reserve(
                2
                * [
                    x
                    for o in self.optimizer.chained_optimizers
                    if not o.state
                    for x in o.get_parameters()
                ]
            )
            self.optimizer.zero_grad()  # the fp32 copies of bf16 gradients
            for storage in self._host_memory.storages(self._gradients()):
                storage.resize_(0)  # not kept: every step begins with zeros

    def _onload(self, *parts: str) -> None:
        self._host_memory.onload(self._tensors(parts))
        if "optimizer" in parts:
            for gradients in self._gradients():
                gradients.untyped_storage().resize_(gradients.numel() * gradients.element_size())

    def _tensors(self, parts: tuple[str, ...]) -> list[Tensor]:
        """Parameters are views of DDP's few large buffers, and where they are fp32 the optimizer's are views of those."""
        parameters = [x for model in self.models for x in model.parameters()]
        tensors = parameters if "parameters" in parts else []
        if "optimizer" in parts and self.optimizer is not None:
            of_parameters = {x.untyped_storage()._cdata for x in parameters}
            of_optimizer = [
                x
                for optimizer in self.optimizer.chained_optimizers
                for x in (
                    *optimizer.get_parameters(),
                    *(v for state in optimizer.state.values() for v in state.values()),
                )
            ]
            tensors = tensors + [
                x for x in of_optimizer if x.untyped_storage()._cdata not in of_parameters
            ]
        return tensors

    def _gradients(self) -> list[Tensor]:
        wrapped = self.stages if self.optimizer is not None else []
        return [
            buffer.grad_data
            for stage in wrapped
            for buffer in (*stage.buffers, *stage.expert_parallel_buffers)
        ]

    # -- weights -------------------------------------------------------------------------------------------------------

    def _use_adapters(self, use: bool) -> None:
        for adapter in self._adapters.values():
            adapter.enabled = use

    def export_weights(self, whole: bool = True) -> Iterator[tuple[str, Tensor]]:
        self._onload("parameters")
        merged = {weight: adapter for weight, adapter in self._adapters.items() if adapter.enabled}
        yield from bridge.export(
            self.mapping,
            self.models,
            self.compute_dtype,
            self.device,
            lambda weight: (merged[weight].merged(weight) if weight in merged else weight).detach(),
        )
        if whole:
            yield from self.left_alone()

    def export_adapter(self) -> Iterator[tuple[str, Tensor]]:
        self._onload("parameters")
        yield from adapters.export(self.models, getattr(torch, self.lora.dtype), self.device)

    @cuda_is_cpu()
    def state(self, loading: bool = False) -> dict:
        self._onload("parameters", "optimizer")
        return checkpoint.sharded_state(
            self.models, self.optimizer, loading, by_layer=bool(self.config.model.freeze)
        )

    @cuda_is_cpu()
    def load_state(self, state: dict) -> None:
        self._onload("parameters", "optimizer")
        checkpoint.load(self.models, self.optimizer, state)

    @cuda_is_cpu()
    def write(
        self, states: dict[str, dict], directory: Path, group: dist.ProcessGroup | None
    ) -> Future | None:
        return checkpoint.write(states, directory, group)

    @cuda_is_cpu()
    def read(self, states: dict[str, dict], directory: Path) -> dict[str, dict]:
        return checkpoint.read(states, directory)

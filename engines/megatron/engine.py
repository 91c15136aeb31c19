"""The Megatron engine: Megatron-core's parallelism around a Hugging Face model's weights."""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

if torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == "npu":
    # It replaces parts of megatron.core, so it must be imported first.
    import mindspeed.megatron_adaptor  # noqa: F401

from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE
from megatron.core.optimizer import MegatronOptimizer
from omegaconf import DictConfig
from torch import Tensor, nn

from config import InputError
from data.batching.batch import Batch
from data.batching.plan import MicroBatches
from engines import schedule
from engines.adapter_guard import AdapterGuard
from engines.base import Engine, LossFn
from engines.context_parallel import has_dynamic_cp
from engines.dropout import DropoutSeeds
from engines.heads import Head, LogProbHead, ValueHead
from engines.megatron import (
    bridge,
    checkpoint_files,
    device_tensors,
    distributed_optimizer,
    layout,
    sharded_state,
    stage_memory,
    transforms,
)
from engines.megatron.adapters import check_adapters, export_adapters
from engines.megatron.families import check_family
from engines.megatron.gpt import ModelDescription, build_models
from engines.megatron.mapping import Mapping
from engines.megatron.moe import Router, count_mismatches, mean_aux_loss
from engines.megatron.outputs import TokenOutputs, on_all_stages
from engines.megatron.pipeline import run_schedule
from engines.megatron.step_loss import MTPLoss, StepLoss
from engines.megatron.torch_layers import Packing
from engines.megatron.without_cuda import cuda_is_cpu
from engines.microbatch import Layout, MicroBatch, TokenResults, lay_out
from engines.model import freeze, guard, lora, mtp
from engines.model.experts import aux_loss_weight
from engines.model.flops import count_flops
from engines.model.hf import build_on_meta, read_hf_config
from engines.model.model_files import is_only_described
from engines.model.names import literal_names
from engines.parallel.collectives import groups_by_size
from engines.parallel.offload import HostMemory


class MegatronEngine(Engine):
    """Trains and evaluates one model with Megatron-core; see Engine for the interface.

    models: this rank's part of the model, one module per virtual pipeline stage
    stages: the modules that the schedule calls: `models`, wrapped in DDP if there is an optimizer
    """

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
        """Build this rank's part of the model in config.model.path, and load its weights.

        Args:
            optimize: whether to wrap the model in DDP and create an optimizer.
            head: Head.VALUES replaces the output matrix by a value head (zero if not in the files).
            temperature: the logits are divided by it, as in sampling.
            shared_weights: must be None, since Megatron fuses and divides weights.

        Raises:
            InputError: if this engine does not support the model or the layout.
        """
        if shared_weights is not None:
            raise InputError(
                "model_engine=megatron cannot use vLLM's weights as its own: set "
                "rollout.share_base=never"
            )
        self.config = config
        self.device = device
        self.total_steps = total_steps
        self.head_kind = head
        self.optim = config.optim
        self.lora = config.model.lora
        self.hf_config = self.check(config, dist.get_world_size(), head, reports=False)
        self.compute_dtype = getattr(torch, config.engine.compute_dtype)
        self._join_groups()
        self._build_model()
        self._build_head(temperature)
        self._prepare_training()
        self.stages: list[nn.Module] = self.models
        self.optimizer: MegatronOptimizer | None = None
        if optimize:
            self.stages = distributed_optimizer.wrap_in_ddp(self.models, config.engine)
            trained_dtype = self.compute_dtype
            if self.lora.rank:
                trained_dtype = getattr(torch, self.lora.dtype)
            self.optimizer = distributed_optimizer.build_optimizer(
                self.stages, config, trained_dtype
            )
        self.host_memory = HostMemory(device)
        guard.check_isolation(self)

    @staticmethod
    def check(
        config: DictConfig, world_size: int, head: Head = Head.LOG_PROBS, reports: bool = True
    ):
        """Check a run before anything is built, and return the model's configuration.

        Args:
            reports: whether rank 0 prints what model.freeze freezes.

        Raises:
            InputError: if this engine does not support the model, the layout or the settings.
        """
        if config.model.images:
            raise InputError(
                "model.images=true needs model_engine=fsdp: model_engine=megatron has no vision "
                "towers"
            )
        path = config.model.path
        hf_config = read_hf_config(path)
        check_family(hf_config, path, config.engine.bridge)
        layout.check_layout(config, hf_config, world_size)
        mtp.check_config(config, hf_config)
        hf = build_on_meta(hf_config, torch.float32, head, with_mtp=mtp.is_trained(config))
        if not is_only_described(config):
            bridge.check_files(hf, Path(path), head)
        freeze.apply(config, hf, head, Mapping(hf_config, head).parameter_key, reports=reports)
        check_adapters(config, hf_config, hf)
        return hf_config

    def _join_groups(self) -> None:
        """Create the process groups, and record this rank's position in them."""
        engine = self.config.engine
        layout.initialize(engine)
        self.dp_rank = mpu.get_data_parallel_rank()
        self.dp_size = mpu.get_data_parallel_world_size()
        self.dp_group = mpu.get_data_parallel_group()
        self.cp_group = mpu.get_context_parallel_group()
        self.tp_group = mpu.get_tensor_model_parallel_group()
        self.pp_group = mpu.get_pipeline_model_parallel_group()
        self.sequence_parallel = engine.sequence_parallel and self.tp_group.size() > 1
        if has_dynamic_cp(engine):
            self.cp_groups = groups_by_size(self.dp_group, self.cp_group)
        else:
            self.cp_groups = {self.cp_group.size(): self.cp_group}
        if engine.virtual_pipeline_model_parallel_size > 1:
            # The interleaved schedule needs a multiple of pp micro-batches.
            self.micro_batches_multiple = self.pp_group.size()

    def _build_model(self) -> None:
        """Build the model, load its weights and apply the transforms."""
        config = self.config
        path = Path(config.model.path)
        with_mtp = mtp.is_trained(config)
        hf = build_on_meta(self.hf_config, torch.float32, self.head_kind, with_mtp=with_mtp)
        self.num_mtp_layers = mtp.num_layers(self.hf_config) if with_mtp else 0
        parameter_key = Mapping(self.hf_config, self.head_kind).parameter_key
        frozen = freeze.apply(config, hf, self.head_kind, parameter_key)
        self.names = literal_names(hf, path)

        self.mapping = bridge.make_mapping(
            config.engine.bridge, self.hf_config, self.compute_dtype, self.head_kind
        )
        description = ModelDescription(
            hf,
            path,
            self.head_kind,
            self.compute_dtype,
            self.num_mtp_layers,
            config.model.mtp.detach_encoder,
            transforms.config_fields(config, self.device, self.sequence_parallel),
        )
        self.models = build_models(self.mapping, description)
        if self.lora.rank:
            lora.inject(hf, self.lora)
        self._flops = count_flops(hf, self.hf_config)
        changes = transforms.Changes(config, self.head_kind, self.models, self.mapping, hf, frozen)
        transforms.apply_transforms(changes)
        self._adapters = changes.adapters
        modules = [module for model in self.models for module in model.modules()]
        self.routers = [module for module in modules if isinstance(module, Router)]
        self._mismatch = count_mismatches(self.routers, config, self.device)

    def _build_head(self, temperature: float) -> None:
        """Create the head that follows the last hidden state."""
        if self.head_kind is Head.VALUES:
            self.head = ValueHead()
        else:
            self.head = LogProbHead(
                temperature,
                self.config.engine.log_prob_chunk_size,
                self.device.type == "cuda",
                self.hf_config.vocab_size,
                self.tp_group,
            )
        last_model = self.models[-1]
        if mpu.is_pipeline_last_stage(ignore_virtual=True):
            # It is a submodule so that hooks find it, although it runs after the schedule's forward
            # pass.
            last_model.head = self.head
        self.outputs = TokenOutputs(last_model, self.head, self.tp_group, self.sequence_parallel)

    def _prepare_training(self) -> None:
        """Set up the adapter guard and dropout seeds."""
        # A value head starts at zero, so that adapters rightly get a zero gradient at first.
        has_provable_adapters = self.lora.rank > 0 and self.head_kind is not Head.VALUES
        self.adapter_guard = AdapterGuard(self.device, has_provable_adapters)
        self.dropout_seeds = DropoutSeeds(self.config)

    # -- training ----------------------------------------------------------------------------------

    def padding_multiple(self, group_size: int) -> int:
        return layout.padding_multiple(self.config.engine, group_size)

    @cuda_is_cpu()
    def train_batch(
        self, batch: Batch, loss_fn: LossFn, step: int, micro_batches: MicroBatches | None = None
    ) -> dict[str, float]:
        self.onload("parameters", "optimizer")
        micro_batches = micro_batches or self.divide_share(batch.lengths)
        reported = self.reported_sequences(batch, micro_batches)
        has_aux_loss = self._begin_routers(len(reported.input_ids))
        if self._mismatch:
            self._mismatch.reset()
        step_loss = StepLoss(
            self.adapter_guard.watch(loss_fn),
            self.outputs,
            self.reports_group,
            self.device,
            self._mtp_loss(reported),
        )
        for stage in self.stages:
            stage.zero_grad_buffer()
        self.optimizer.zero_grad()
        ranks = (self.dp_rank, self.cp_group.rank(), self.pp_group.rank())
        with self.dropout_seeds.seeded(step, *ranks):
            self._run_schedule(batch, micro_batches, step_loss, forward_only=False)
        lr = schedule.learning_rate(self.optim, step, self.total_steps)
        grad_norm = self.step_optimizer(lr)
        metrics = step_loss.reduce_metrics(self.sum_over_dp, self.pp_group)
        if has_aux_loss:
            num_layers = self.hf_config.num_hidden_layers
            metrics["router_aux_loss"] = mean_aux_loss(self.routers, num_layers)
        if self._mismatch:
            metrics |= self._mismatch.metrics()
        return {
            **metrics,
            "grad_norm": grad_norm,
            "lr": lr,
            "skipped": float(not math.isfinite(grad_norm)),
        }

    def _begin_routers(self, num_tokens: int) -> bool:
        """Prepare the routers' auxiliary loss, and return whether there is one.

        Args:
            num_tokens: the number of tokens in this data-parallel rank's share of the batch.
        """
        coefficient = aux_loss_weight(
            self.config.engine.router_aux_loss_coef,
            self.hf_config,
            self.hf_config.num_hidden_layers,
        )
        if not coefficient:
            return False
        num_tokens = self.sum_over_dp(torch.tensor(float(num_tokens))).item()
        for router in self.routers:
            router.begin_batch(coefficient, num_tokens)
        return True

    def _mtp_loss(self, reported: Batch) -> MTPLoss | None:
        """Return the state of the MTP layers' loss for a step; None without such layers.

        reported: the result of reported_sequences().
        """
        factor = self.config.model.mtp.mtp_loss_scaling_factor
        return MTPLoss.begin(reported, self.num_mtp_layers, factor, self.sum_over_dp)

    @torch.no_grad()
    def step_optimizer(self, lr: float) -> float:
        """Clip the gradients and take a step; return the gradient norm before clipping.

        The weights do not change if the gradient is not finite.
        """
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        if self.adapter_guard.is_active:
            smallest = distributed_optimizer.smallest_stage_gradient(
                self.stages, self.pp_group, self.device
            )
            self.adapter_guard.check(min(grad_norm, smallest))
        if math.isfinite(grad_norm):
            distributed_optimizer.apply_gradients(self.optimizer, self.optim, lr, grad_norm)
        return grad_norm

    # -- evaluation --------------------------------------------------------------------------------

    @cuda_is_cpu()
    @torch.no_grad()
    def head_outputs(self, batch: Batch, micro_batches: MicroBatches | None = None) -> Tensor:
        results = self._evaluate(batch, micro_batches, self.device)
        shape = (self.head.num_outputs, len(batch.input_ids))
        return on_all_stages(results, shape, self.pp_group, self.device)

    @cuda_is_cpu()
    @torch.no_grad()
    def token_outputs(
        self, batch: Batch, head: nn.Module, micro_batches: MicroBatches | None = None
    ) -> tuple[Tensor, ...]:
        self.outputs.head = head
        try:
            return self._evaluate(batch, micro_batches, torch.device("cpu"))
        finally:
            self.outputs.head = self.head

    def _evaluate(
        self, batch: Batch, micro_batches: MicroBatches | None, result_device: torch.device
    ) -> tuple[Tensor, ...]:
        """Return the head's outputs, [T, ...] each; none except on the last pipeline stage."""
        self.onload("parameters")
        micro_batches = micro_batches or self.divide_share(batch.lengths)
        num_missing = -len(micro_batches) % self.micro_batches_multiple
        empty = (min(self.cp_groups), [])
        micro_batches = micro_batches + num_missing * [empty]
        results = TokenResults(batch, micro_batches, result_device)

        def collect(micro_batch: MicroBatch, hidden: Tensor, non_loss_data: bool) -> None:
            results.add(self.outputs.compute(micro_batch, hidden))

        for model in self.models:
            model.eval()  # In training mode, activations would be recomputed.
        self._run_schedule(batch, micro_batches, collect, forward_only=True)
        for model in self.models:
            model.train()
        return results.outputs or ()

    @torch.no_grad()
    def output_matrix(self) -> Tensor:
        self.onload("parameters")
        return self.outputs.whole_output_matrix(self.hf_config.vocab_size, self.compute_dtype)

    def head_outputs_one_by_one(self, batch: Batch) -> Tensor:
        smallest_group = min(self.cp_groups)
        return self.head_outputs(
            batch, [(smallest_group, [number]) for number in range(len(batch))]
        )

    def _run_schedule(
        self, batch: Batch, planned: MicroBatches, use_hidden: Callable, forward_only: bool
    ) -> None:
        """Lay out the planned micro-batches, and run the schedule over them: see run_schedule()."""
        num_ahead = 0 if forward_only else self.num_mtp_layers
        micro_batches = [
            self._lay_out(batch.select(members), size, num_ahead) for size, members in planned
        ]
        run_schedule(self.stages, micro_batches, use_hidden, forward_only, self._remember_padding)

    def _remember_padding(self, micro_batch: MicroBatch) -> None:
        self._padding = micro_batch.padding.T

    def _lay_out(self, batch: Batch, cp_size: int, num_ahead: int) -> MicroBatch:
        """Return this rank's part of a micro-batch that a context-parallel group shares.

        Args:
            num_ahead: the number of MTP layers, each of which needs its own tokens ahead.
        """
        is_packed = self.config.engine.use_remove_padding
        group = self.cp_groups[cp_size]
        packing_of = None
        if is_packed or not HAVE_TE:
            packing_of = partial(Packing.from_lengths, group=group, device=self.device)
        arrangement = Layout(is_packed, self.padding_multiple(cp_size), is_zigzag=True)
        return lay_out(batch, arrangement, group, self.device, packing_of, num_ahead)

    # -- modules -----------------------------------------------------------------------------------

    def layers(self) -> list[list[tuple[int, nn.Module]]]:
        layers = []
        for model in self.models:
            layers.append([(layer.layer_number - 1, layer) for layer in model.decoder.layers])
        return layers

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

    # -- memory ------------------------------------------------------------------------------------

    estimate_memory = staticmethod(stage_memory.estimate_memory)
    checkpoint_bytes = staticmethod(stage_memory.checkpoint_bytes)

    def offload(self, *parts: str) -> None:
        self.host_memory.offload(self.tensors_of(*parts))
        if "optimizer" in parts and self.optimizer is not None:
            # Adam's two moments do not exist before the first step.
            without_state = device_tensors.weights_without_state(self.optimizer)
            self.host_memory.reserve(2 * without_state)
            self.optimizer.zero_grad()  # frees the fp32 copies of bf16 gradients
            # Gradients are not kept: every step begins with zeros.
            for storage in self.host_memory.storages(self.gradient_buffers()):
                storage.resize_(0)

    def onload(self, *parts: str) -> None:
        """Move parts back to the device after offload(). Methods that need them call this."""
        self.host_memory.onload(self.tensors_of(*parts))
        if "optimizer" in parts:
            for gradients in self.gradient_buffers():
                gradients.untyped_storage().resize_(gradients.numel() * gradients.element_size())

    def tensors_of(self, *parts: str) -> list[Tensor]:
        """Return the tensors of "parameters", "optimizer" or both, without gradients."""
        tensors = []
        if "parameters" in parts:
            tensors += device_tensors.parameters_of(self.models)
        if "optimizer" in parts and self.optimizer is not None:
            tensors += device_tensors.optimizer_tensors(self.models, self.optimizer)
        return tensors

    def gradient_buffers(self) -> list[Tensor]:
        """Return DDP's gradient buffers; none without an optimizer."""
        if self.optimizer is None:
            return []
        return device_tensors.gradient_buffers(self.stages)

    # -- weights and checkpoints -------------------------------------------------------------------

    def _use_adapters(self, use: bool) -> None:
        for adapter in self._adapters.values():
            adapter.enabled = use

    def export_weights(self, include_unused: bool = True) -> Iterator[tuple[str, Tensor]]:
        self.onload("parameters")
        enabled = {weight: adapter for weight, adapter in self._adapters.items() if adapter.enabled}

        def merged(weight: nn.Parameter) -> Tensor:
            if weight in enabled:
                return enabled[weight].merged(weight).detach()
            return weight.detach()

        yield from bridge.export(self.mapping, self.models, self.compute_dtype, self.device, merged)
        if include_unused:
            yield from self.unused_weights()

    def export_adapter(self) -> Iterator[tuple[str, Tensor]]:
        self.onload("parameters")
        if self.lora.rank:
            yield from export_adapters(self.models, getattr(torch, self.lora.dtype), self.device)

    @cuda_is_cpu()
    def state(self, loading: bool = False) -> dict:
        self.onload("parameters", "optimizer")
        return sharded_state.sharded_state(
            self.models, self.optimizer, loading, has_frozen_layers=bool(self.config.model.freeze)
        )

    @cuda_is_cpu()
    def load_state(self, state: dict) -> None:
        self.onload("parameters", "optimizer")
        sharded_state.load_state(self.models, self.optimizer, state)

    @cuda_is_cpu()
    def write(
        self, states: dict[str, dict], directory: Path, group: dist.ProcessGroup | None
    ) -> Future | None:
        return checkpoint_files.write(states, directory, group)

    @cuda_is_cpu()
    def read(self, states: dict[str, dict], directory: Path) -> dict[str, dict]:
        return checkpoint_files.read(states, directory)

"""The FSDP2 engine: trains and evaluates a Hugging Face causal language model."""

import math
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from omegaconf import DictConfig
from torch import Tensor, nn

from data.batching.batch import Batch
from data.batching.plan import MicroBatches
from data.images.processor import Processor
from engines import optimizer, schedule
from engines.adapter_guard import AdapterGuard
from engines.base import Engine, LossFn
from engines.checkpoint.storage import Writer
from engines.context_parallel import fixed_cp_size, has_dynamic_cp
from engines.dropout import DropoutSeeds
from engines.fsdp import sharded_memory, sharding, transforms, vision
from engines.fsdp.attention import Packing, attention_set_to, gathers_keys
from engines.fsdp.checks import check_model_and_layout
from engines.fsdp.packed_model import PackedModel
from engines.fsdp.rounding import report_lost_updates
from engines.fsdp.router_loss import RouterLoss
from engines.fsdp.state import ModelState, future_optimizer_sizes, optimizer_tensors
from engines.heads import Head, LogProbHead, ValueHead, call_loss
from engines.microbatch import Layout, MicroBatch, TokenResults, lay_out
from engines.model import guard, lora
from engines.model.flops import count_flops
from engines.model.hf import keep_zero_padding_row, layer_modules, plain_attention
from engines.model.lengths import keep_short_frequencies
from engines.model.logits import logit_constants
from engines.model.replay import RoutingReplay, check_replay
from engines.model.weights import Placement, load_adapter, load_weights
from engines.parallel.collectives import groups_by_size, groups_of_grid
from engines.parallel.device import to_device
from engines.parallel.offload import HostMemory


class FSDPEngine(Engine):
    """An engine whose parameters, gradients and optimizer states are sharded over all ranks.

    hf           the Hugging Face model
    model        the module that FSDP shards: hf and a head
    optimizers   empty if the engine only evaluates
    """

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
        """Build the model of config.model.path on the meta device, shard it, and read its weights.

        Args:
            optimize: False for a model that is only evaluated and so needs no optimizer.
            head: Head.VALUES replaces the output matrix by a value head, which is zero unless the
                model directory has one.
            temperature: the logits are divided by it, as in sampling.
            shared_weights: with adapters, vLLM's tensors by name, which hold the frozen weights.
                They are never offloaded.

        Raises:
            InputError: if this engine does not support the model or the layout.
        """
        self.config = config
        self.device = device
        self.total_steps = total_steps
        self.optim = config.optim
        self.compute_dtype = getattr(torch, config.engine.compute_dtype)
        self.world_size = dist.get_world_size()
        self.hf_config = self.check(config, self.world_size, head, reports=False)
        self._form_groups()
        self._build(head, temperature)
        self._load(head, shared_weights)
        self.optimizers = []
        if optimize:
            compiled = transforms.compiles_updates(config.engine, device.type)
            self.optimizers = optimizer.build(self.model, self._layers, config, compiled=compiled)
            report_lost_updates(self.model, config, device)
        self._lr_ratios = [self._lr_ratio(group) for group in self._param_groups()]
        self._flops = count_flops(self.hf, self.hf_config)
        self.host_memory = HostMemory(device)
        self._shares_weights = shared_weights is not None
        guard.check_isolation(self)
        if self._replay:
            check_replay(self, self._replay)

    @staticmethod
    def check(
        config: DictConfig, world_size: int, head: Head = Head.LOG_PROBS, reports: bool = True
    ):
        """Check a run before anything is built, and return the text model's configuration.

        Args:
            reports: whether rank 0 prints what model.freeze freezes.

        Raises:
            InputError: if this engine does not support the model, the layout or the settings.
        """
        return check_model_and_layout(config, world_size, head, reports)

    # -- construction ------------------------------------------------------------------------------

    def _form_groups(self) -> None:
        cp = fixed_cp_size(self.config.engine)
        rank = dist.get_rank()
        self.dp_rank = rank // cp
        self.dp_size = self.world_size // cp
        self.dp_group, self.cp_group = groups_of_grid((self.dp_size, cp))
        if has_dynamic_cp(self.config.engine):
            self.cp_groups = groups_by_size(self.dp_group, self.cp_group)
        else:
            self.cp_groups = {cp: self.cp_group}

    def _build(self, head: Head, temperature: float) -> None:
        """Build the sharded model on the meta device."""
        config = self.config
        self.hf, adapted_layers = transforms.build_model(config, head)
        self._state = ModelState(self.hf, adapted_layers, config, self.device)
        self.names = self._state.names
        # With a value head, which starts at zero, adapters get a zero gradient at first. So a zero
        # gradient does not prove that something is wrong.
        has_provable_adapters = bool(adapted_layers) and head is not Head.VALUES
        self.adapter_guard = AdapterGuard(self.device, has_provable_adapters)
        self.dropout_seeds = DropoutSeeds(config)
        self.model = PackedModel(self.hf, self._make_head(head, temperature))
        self.head = self.model.head
        self._router_loss = RouterLoss.of(self.hf, self.hf_config, config.engine)
        self._replay = RoutingReplay.of(self.hf, self.hf_config, config, self.device)
        self._images = None
        self._image_flops = 0
        if config.model.images:
            self.processor = Processor(config.model.path, dropped=config.data.drop_processor_keys)
            self._images = vision.Images(self.hf, self.processor)
            self._image_flops = vision.count_flops(self.hf, self.processor)
        self._layers = layer_modules(self.hf, self.hf.get_decoder())
        transforms.prepare_layers(self.hf, config, self.device.type)
        # Unlike self._layers, these include the vision tower's layers.
        all_layers = layer_modules(self.hf, self.hf)
        sharding.shard(self.model, all_layers, config, self.device.type, self.world_size)

    def _make_head(self, head: Head, temperature: float) -> nn.Module:
        if head is Head.VALUES:
            return ValueHead()
        engine = self.config.engine
        return LogProbHead(
            temperature,
            engine.log_prob_chunk_size,
            transforms.uses_compile(engine, self.device.type),
            self.hf_config.vocab_size,
            None,
            *logit_constants(self.hf),
        )

    def _load(self, head: Head, shared_weights: dict[str, Tensor] | None) -> None:
        """Allocate the parameters and read this rank's share of the files."""
        parameter_device = torch.device("cpu") if self.config.engine.cpu_offload else self.device
        load_weights(
            self.hf,
            Path(self.config.model.path),
            self.names,
            Placement(
                parameter_device=parameter_device,
                buffer_device=self.device,
                buffer_dtype=self.compute_dtype,
            ),
            head,
            shared_weights,
        )
        engine = self.config.engine
        num_shards = sharding.num_shards(engine, self.world_size)
        transforms.gather_in_float8(self.hf, engine, self.device.type, num_shards)
        keep_short_frequencies(self.hf)
        load_adapter(self.hf, self.config.model.lora, self.config.trainer.seed)
        embedding = self.hf.get_input_embeddings()
        row_sums = sharding.full_tensor(embedding.weight.detach().abs().sum(1)).to(self.device)
        keep_zero_padding_row(embedding, embedding.padding_row, row_sums == 0)
        self.model.train()

    def _weights_for_float8(self) -> AbstractContextManager[None]:
        return transforms.weights_kept_for_float8(self.model, self.config, self.device.type)

    # -- training ----------------------------------------------------------------------------------

    def train_batch(
        self, batch: Batch, loss_fn: LossFn, step: int, micro_batches: MicroBatches | None = None
    ) -> dict[str, float]:
        self.onload("parameters", "optimizer")
        micro_batches = micro_batches or self.divide_share(batch.lengths)
        loss_fn = self.adapter_guard.watch(loss_fn)
        sums = defaultdict(lambda: torch.zeros((), device=self.device))
        if self._router_loss:
            self._router_loss.begin_step(self._count_tokens(batch, micro_batches), self.device)
        if self._replay:
            self._replay.mismatch.reset()
        with self.dropout_seeds.seeded(step, dist.get_rank()), self._weights_for_float8():
            laid_out = self._laid_out(batch, micro_batches)
            for number, micro_batch in enumerate(laid_out, start=1):
                is_last = number == len(micro_batches)
                sharding.begin_micro_batch(self.model, self.config.engine, self.world_size, is_last)
                for name, amount in self._backward(micro_batch, loss_fn).items():
                    sums[name] += amount.detach() * self.reports_group(micro_batch.group)
        sharding.check_all_are_summed(self.model, self.config.engine, self.world_size)
        grad_norm = self._clip_gradients()
        self.adapter_guard.check(grad_norm, self._adapters_without_gradient())
        lr = schedule.learning_rate(self.optim, step, self.total_steps)
        skipped = not math.isfinite(grad_norm)
        if not skipped:
            self._update(lr)
        self.model.zero_grad(set_to_none=True)
        totals = self.sum_over_dp(torch.stack(list(sums.values()))).tolist()
        metrics = dict(zip(sums, totals))
        if self._router_loss:
            metrics["router_aux_loss"] = self._router_loss.sum_over_ranks()
        if self._replay:
            metrics |= self._replay.mismatch.metrics()
        return {**metrics, "grad_norm": grad_norm, "lr": lr, "skipped": float(skipped)}

    def _backward(self, micro_batch: MicroBatch, loss_fn: LossFn) -> dict[str, Tensor]:
        """Add a micro-batch's gradient; return its loss and the amounts that loss_fn reports."""
        if self._router_loss:
            with self._router_loss.record() as router_logits:
                outputs = self._forward(micro_batch)
        else:
            outputs = self._forward(micro_batch)
        loss, amounts = call_loss(loss_fn, self.head, outputs, micro_batch.fields)
        total = loss
        if self._router_loss:
            total = loss + self._router_loss.weighted(router_logits, micro_batch)
        # FSDP averages gradients over ranks, but ours must be summed.
        (total * self.world_size).backward()
        return {"loss": loss, **amounts}

    def _count_tokens(self, batch: Batch, micro_batches: MicroBatches) -> float:
        """Return the number of tokens in the batch, over all data-parallel ranks."""
        num_tokens = len(self.reported_sequences(batch, micro_batches).input_ids)
        return self.sum_over_dp(torch.tensor(float(num_tokens))).item()

    def _clip_gradients(self) -> float:
        """Clip the gradients, and return their norm before clipping."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = sharding.gradient_norm(gradients)
        if self.optim.clip_grad > 0:
            max_norm = self.optim.clip_grad
            norm_on_device = norm.to(gradients[0].device)
            nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, norm_on_device)
        return norm.item()

    def _adapters_without_gradient(self) -> Iterator[str]:
        for name, parameter in self.hf.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                yield lora.plain_name(name)

    def _update(self, lr: float) -> None:
        for group, ratio in zip(self._param_groups(), self._lr_ratios):
            group["lr"] = lr * ratio
        for torch_optimizer in self.optimizers:
            torch_optimizer.step()

    def _param_groups(self) -> list[dict]:
        groups = []
        for torch_optimizer in self.optimizers:
            groups += torch_optimizer.param_groups
        return groups

    def _lr_ratio(self, group: dict) -> float:
        """Return the ratio of a group's learning rate to optim.lr.

        The ratio is 1 unless the user's own optimizer has set another learning rate.
        """
        return group["lr"] / self.optim.lr if self.optim.lr else 1.0

    # -- evaluation --------------------------------------------------------------------------------

    def head_outputs(self, batch: Batch, micro_batches: MicroBatches | None = None) -> Tensor:
        outputs = self._evaluate(batch, micro_batches, self.device)
        return torch.stack([x.float() for x in outputs])

    def token_outputs(
        self, batch: Batch, head: nn.Module, micro_batches: MicroBatches | None = None
    ) -> tuple[Tensor, ...]:
        self.model.head = head
        try:
            return self._evaluate(batch, micro_batches, torch.device("cpu"))
        finally:
            self.model.head = self.head

    @torch.no_grad()
    def _evaluate(
        self, batch: Batch, micro_batches: MicroBatches | None, result_device: torch.device
    ) -> tuple[Tensor, ...]:
        """Return the head's outputs, without gradient: [T, ...] each."""
        self.onload("parameters")
        micro_batches = micro_batches or self.divide_share(batch.lengths)
        results = TokenResults(batch, micro_batches, result_device)
        self.model.eval()
        with self._weights_for_float8():
            for micro_batch in self._laid_out(batch, micro_batches):
                results.add(self._forward(micro_batch))
        self.model.train()
        return results.outputs

    def output_matrix(self) -> Tensor:
        self.onload("parameters")
        sharding.reshard(self.model)
        weight = sharding.full_tensor(self.hf.get_output_embeddings().weight.detach())
        # A copy, since offloading frees the parameter's own memory.
        return weight.to(self.device, self.compute_dtype, copy=True)

    @torch.no_grad()
    def head_outputs_one_by_one(self, batch: Batch) -> Tensor:
        self.onload("parameters")
        answers = torch.zeros(self.head.num_outputs, len(batch.input_ids), device=self.device)
        self.model.eval()
        sequences = batch.split([1] * len(batch))
        replaying = self._replay.replaying(None) if self._replay else nullcontext()
        with attention_set_to(self.hf, "eager"), replaying:
            for start, sequence in zip(batch.cu_seqlens.tolist(), sequences):
                outputs = self._forward_alone(sequence)
                tokens = slice(start + 1, start + len(sequence.input_ids))
                answers[:, tokens] = torch.stack([x.float() for x in outputs])
        self.model.train()
        return answers

    def _forward_alone(self, sequence: Batch) -> tuple[Tensor, ...]:
        """Return the head's outputs for all tokens of one sequence but the first."""
        ids = sequence.input_ids.to(self.device)
        predicting_slots = torch.arange(len(ids) - 1, device=self.device)
        candidate_ids = ids.new_empty(len(predicting_slots), 0)
        if sequence.images:
            inputs = self._images.inputs(sequence, sequence.images, packed=False)
            inputs = {name: x.to(self.device) for name, x in inputs.items()}
        else:
            position_ids = torch.arange(len(ids), device=self.device)
            inputs = {"input_ids": ids[None], "position_ids": position_ids[None]}
        return self.model(predicting_slots, ids[1:], candidate_ids, **inputs)

    @contextmanager
    def padded(self) -> Iterator[None]:
        with super().padded(), attention_set_to(self.hf, plain_attention(self.hf)):
            yield

    # -- micro-batches -----------------------------------------------------------------------------

    def padding_multiple(self, group_size: int) -> int:
        is_zigzag = group_size > 1 and gathers_keys(self.config.engine, self.hf_config, group_size)
        return 2 * group_size if is_zigzag else 1

    def _laid_out(self, batch: Batch, micro_batches: MicroBatches) -> Iterator[MicroBatch]:
        """Yield the micro-batches, each divided over its group of ranks."""
        parts = (batch.select(members) for _, members in micro_batches)
        if self._images:
            prepared = self._images.prefetch_inputs(parts, self.config.engine.use_remove_padding)
        else:
            prepared = zip(parts, repeat(None))
        for (size, _), (part, image_inputs) in zip(micro_batches, prepared):
            yield self._lay_out(part, self.cp_groups[size], image_inputs)

    def _lay_out(
        self, batch: Batch, group: dist.ProcessGroup, image_inputs: dict[str, Tensor] | None
    ) -> MicroBatch:
        """Divide a micro-batch of T tokens over a group of ranks.

        T may be 0. Then the model runs on padding only, because other ranks wait for this rank in
        collectives.

        Args:
            image_inputs: for a model that reads images, its inputs for this micro-batch.
        """
        engine = self.config.engine
        packed = engine.use_remove_padding
        zigzag = gathers_keys(engine, self.hf_config, group.size())
        packing_of = None
        if packed or zigzag:
            packing_of = partial(Packing.of, group=group, device=self.device, zigzag=zigzag)
        if image_inputs is None:
            multiple = self.padding_multiple(group.size())
            layout = Layout(packed, multiple, zigzag)
            return lay_out(batch, layout, group, self.device, packing_of)
        filler = 0 if batch.images else len(self._images.filler)
        layout = Layout(packed)
        laid_out = lay_out(batch, layout, group, self.device, packing_of, filler=filler)
        inputs_on_device = {name: to_device(x, self.device) for name, x in image_inputs.items()}
        return replace(laid_out, image_inputs=inputs_on_device)

    def _forward(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        """Return log_probs, entropy and is_greedy (with a value head: values), each [T].

        Entry t belongs to token t.
        """
        inputs = batch.image_inputs or {
            "input_ids": batch.input_ids,
            "position_ids": batch.positions.expand_as(batch.input_ids),
        }
        self._padding = batch.padding
        predictions = (batch.predicting_slots, batch.targets, batch.candidate_ids)
        replaying = self._replay.replaying(batch.routes) if self._replay else nullcontext()
        with replaying:
            outputs = self.model(*predictions, batch.packing, batch.teacher, **inputs)
        return tuple(batch.to_tokens(x) for x in outputs)

    # -- structure ---------------------------------------------------------------------------------

    def layers(self) -> list[list[tuple[int, nn.Module]]]:
        return [list(enumerate(self._layers))]

    def modules(self) -> list[nn.Module]:
        return [self.model]

    def coordinates(self) -> dict:
        cp_group = self.cp_groups[max(self.cp_groups)]
        return {
            "dp": [self.dp_rank, self.dp_size],
            "cp": [cp_group.rank(), cp_group.size()],
            "tp": [0, 1],
            "pp": [0, 1],
            "first_layers": [0],
        }

    # -- memory ------------------------------------------------------------------------------------

    estimate_memory = staticmethod(sharded_memory.estimate_memory)
    checkpoint_bytes = staticmethod(sharded_memory.checkpoint_bytes)

    def offload(self, *parts: str) -> None:
        sharding.reshard(self.model)
        self.host_memory.offload(self.tensors_of(*parts))
        optimizers = self.optimizers if "optimizer" in parts else []
        self.host_memory.reserve_bytes(future_optimizer_sizes(optimizers, self.device.type))

    def onload(self, *parts: str) -> None:
        """Move parts back to the device after offload(). Methods that need them call this."""
        self.host_memory.onload(self.tensors_of(*parts))

    def tensors_of(self, *parts: str) -> Iterator[Tensor]:
        """Yield the tensors that move between device and host."""
        if "parameters" in parts:
            for parameter in self.model.parameters():
                if parameter.requires_grad or not self._shares_weights:
                    yield parameter
        if "optimizer" in parts:
            yield from optimizer_tensors(self.optimizers)

    # -- weights and state -------------------------------------------------------------------------

    def _use_adapters(self, use: bool) -> None:
        self._state.use_adapters(use)

    def export_weights(self, include_unused: bool = True) -> Iterator[tuple[str, Tensor]]:
        self.onload("parameters")
        yield from self._state.weights()
        if include_unused:
            yield from self.unused_weights()

    def export_adapter(self) -> Iterator[tuple[str, Tensor]]:
        self.onload("parameters")
        yield from self._state.adapter()

    def state(self, loading: bool = False) -> dict:
        self.onload("parameters", "optimizer")
        return self._state.state_dict(self.optimizers)

    def load_state(self, state: dict) -> None:
        self.onload("parameters", "optimizer")
        settings = optimizer.group_settings(self.optimizers, self.optim)
        self._state.load_state_dict(state, self.optimizers)
        # A checkpoint holds the settings with which it was written; the configuration may differ.
        for group, of_group in zip(self._param_groups(), settings):
            group.update(of_group)

    def write(
        self, states: dict[str, dict], directory: Path, group: dist.ProcessGroup | None
    ) -> Future | None:
        if group is None:
            dcp.save(states, storage_writer=Writer(directory))
            return None
        return dcp.async_save(states, storage_writer=Writer(directory), process_group=group)

    def read(self, states: dict[str, dict], directory: Path) -> dict[str, dict]:
        dcp.load(states, checkpoint_id=directory)
        return states

"""FSDP2 around a Hugging Face causal language model."""

import math
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from config import InputError
from data.batching.packing import Batch
from data.batching.plan import MicroBatches
from data.images.processor import Reader
from engines import optimizer, schedule
from engines.adapter_guard import AdapterGuard
from engines.base import Engine, LossFn
from engines.checkpoint.storage import Writer
from engines.context_parallel import (
    check_batch_size,
    check_micro_batch_cap,
    fixed_cp_size,
    has_dynamic_cp,
    shares_sequences,
)
from engines.dropout import DropoutSeeds
from engines.fsdp import tracing as shapes, vision as images
from engines.fsdp.attention import WINDOWS, Packing, attending, of_towers
from engines.fsdp.recurrence import Bounds, recurrent_layers
from engines.heads import Head, LogProbHead, ValueHead
from engines.microbatch import MicroBatch, lay_out
from engines.model import experts, freeze, guard, lora, mtp
from engines.model.hf import (
    build_on_meta,
    check_rope,
    check_windows,
    count_flops,
    keep_short_frequencies,
    keep_zero_rows,
    layer_configs,
    logit_constants,
    plain_attention,
    read_hf_config,
    whole_modules,
)
from engines.model.weights import (
    check_files,
    in_files,
    load_adapter,
    load_weights,
    model_names,
    stacked,
    stored_tensors,
)
from engines.parallel.collectives import groups_of
from engines.parallel.device import to_device
from engines.parallel.offload import HostMemory


class FSDPEngine(Engine):
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
        """Build the model of config.model.path on the meta device, shard it, and stream its weights in.

        optimize: with an optimizer; False for a model that is only evaluated. head: Head.VALUES puts a value head (zeros, unless
        the directory has one) in place of the output matrix. temperature: the logits are divided by it, as in sampling.
        shared_weights: with adapters, tensors of another owner (vLLM) by name that hold the frozen weights and never move.
        Raises InputError for a model or a layout that cannot work.
        """
        self.config, self.device, self.total_steps = config, device, total_steps
        engine, self.optim = config.engine, config.optim
        self.world_size, cp = dist.get_world_size(), fixed_cp_size(engine)
        self.hf_config = self.check(config, self.world_size, head)
        self.dp_rank, self.dp_size = dist.get_rank() // cp, self.world_size // cp
        mesh = init_device_mesh(device.type, (self.dp_size, cp), mesh_dim_names=("dp", "cp"))
        self.dp_group, self.cp_group = mesh["dp"].get_group(), mesh["cp"].get_group()
        self.cp_groups = (
            groups_of(self.dp_group, self.cp_group)
            if has_dynamic_cp(engine)
            else {cp: self.cp_group}
        )

        self.compute_dtype, self.lora = getattr(torch, engine.compute_dtype), config.model.lora
        compiled = uses_compile(engine, device.type)
        self.hf, self._adapted = build(config, head)
        names, parts = model_names(self.hf, Path(config.model.path)), stacked(self.hf)
        self.names, self._file_names = (
            names,
            {name: file_name for file_name, name in names.items() if name},
        )
        self._parts = {name: found for name, found in parts.items() if name not in self._file_names}
        # The gradient of values passes through the head's weights, which start at zero: it proves nothing.
        has_provable_adapters = bool(self._adapted) and head is not Head.VALUES
        self.adapter_guard = AdapterGuard(device, has_provable_adapters)
        self.dropout_seeds = DropoutSeeds(config)
        self.model = PackedModel(
            self.hf,
            ValueHead()
            if head is Head.VALUES
            else LogProbHead(
                temperature,
                engine.log_prob_chunk_size,
                compiled,
                self.hf_config.vocab_size,
                None,
                *logit_constants(self.hf),
            ),
        )
        self.head = self.model.head
        balanced = experts.aux_loss_coef(engine.router_aux_loss_coef, self.hf_config)
        self._routers = experts.Routers(self.hf.get_decoder()) if balanced else None
        self._aux_loss_coef = balanced and experts.aux_loss_weight(
            engine.router_aux_loss_coef, self.hf_config, len(self._routers.modules)
        )
        if config.model.images:
            self.reader = Reader(config.model.path, dropped=config.data.drop_processor_keys)
        self._images = images.Images(self.hf, self.reader) if self.reader else None
        self._image_flops = images.count_flops(self.hf, self.reader) if self.reader else 0
        self._layers = layers = whole_modules(self.hf, self.hf.get_decoder())
        if engine.activation_checkpointing:
            self.hf.gradient_checkpointing_enable({"use_reentrant": False})
        if compiled:
            experts.leave_uncompiled(self.hf)
            for layer in layers:
                layer.forward = torch.compile(layer.forward, dynamic=True)
        shard(self.model, whole_modules(self.hf, self.hf), config, device.type, self.world_size)
        load_weights(
            self.hf,
            Path(config.model.path),
            names,
            torch.device("cpu") if engine.cpu_offload else device,
            device,
            self.compute_dtype,
            head,
            shared_weights,
        )
        keep_short_frequencies(self.hf)
        load_adapter(self.hf, self.lora, config.trainer.seed)
        words = self.hf.get_input_embeddings()
        keep_zero_rows(words, full(words.weight.detach().abs().sum(1)).to(device) == 0)
        self.model.train()
        self.optimizers = optimizer.build(self.model, layers, self.optim) if optimize else []
        # Each group's learning rate relative to the schedule's: 1, unless the user's optimizer has set another one.
        self._lr_ratios = [
            group["lr"] / self.optim.lr if self.optim.lr else 1.0 for group in self._groups()
        ]
        self._flops = count_flops(self.hf, self.hf_config)
        self._host_memory, self._shares_weights = HostMemory(device), shared_weights is not None
        guard.check(self)

    @staticmethod
    def check(config: DictConfig, world_size: int, head: Head = Head.LOG_PROBS):
        """The configuration of the layers; raises InputError for what this engine cannot do, before anything is built."""
        whole = read_hf_config(config.model.path)
        hf_config = whole.get_text_config()
        check_layout(config, hf_config, world_size)
        check_rope(hf_config, config)
        check_windows(hf_config, config.model.path)
        mtp.check(config, whole)
        hf = build_on_meta(whole, torch.float32, head, images=config.model.images)
        if shares_sequences(config.engine) and recurrent_layers(hf):
            raise InputError(
                f"engine.context_parallel_size={config.engine.context_parallel_size}: layers of {type(hf).__name__} "
                "carry a state from token to token: ranks cannot share a sequence"
            )
        if head is not Head.VALUES:
            logit_constants(hf)
        experts.check(hf, hf_config, config.model.path)
        check_files(hf, Path(config.model.path), head)
        shapes.check(hf, config)
        freeze.apply(config, hf, head)
        lora.check(config, hf)
        return hf_config

    # -- training and asking -------------------------------------------------------------------------------------------

    def multiple(self, size: int) -> int:
        return 2 * size if size > 1 and is_zigzag(self.config.engine, self.hf_config, size) else 1

    def train_batch(
        self, batch: Batch, loss_fn: LossFn, step: int, micro_batches: MicroBatches | None = None
    ) -> dict[str, float]:
        self._onload("parameters", "optimizer")
        micro_batches = micro_batches or self.divide_share(batch.lengths)
        amounts, loss_fn = (
            defaultdict(lambda: torch.zeros((), device=self.device)),
            self.adapter_guard.watch(loss_fn),
        )
        aux_losses, num_tokens = torch.zeros((), device=self.device), 1.0
        if self._aux_loss_coef:
            num_tokens = self.sum_over_dp(
                torch.tensor(float(len(self.counted_sequences(batch, micro_batches).input_ids)))
            ).item()
        with self.dropout_seeds.seeded(step, dist.get_rank()):
            for micro_batch in self._laid_out(batch, micro_batches):
                with self._routers.noted() if self._routers else nullcontext([]) as router_logits:
                    outputs = self._forward(micro_batch)
                loss, extra = loss_fn(
                    *outputs[: self.model.head.num_differentiable], micro_batch.fields
                )
                aux_loss = 0.0
                if router_logits:
                    aux_loss = experts.aux_loss(
                        router_logits,
                        micro_batch.padding.flatten(),
                        experts.num_chosen(self.hf_config),
                        num_tokens,
                        micro_batch.group,
                    )
                    aux_losses += aux_loss.detach() / len(router_logits)
                # FSDP averages gradients over ranks; ours are parts of one sum.
                ((loss + self._aux_loss_coef * aux_loss) * self.world_size).backward()
                for name, amount in {"loss": loss, **extra}.items():
                    amounts[name] += amount.detach() * self.counts_group(micro_batch.group)
        grad_norm = self._clip()
        self.adapter_guard.check(
            grad_norm,
            (
                lora.plain_name(name)
                for name, p in self.hf.named_parameters()
                if p.requires_grad and p.grad is None
            ),
        )
        lr = schedule.learning_rate(self.optim, step, self.total_steps)
        skipped = not math.isfinite(grad_norm)
        if not skipped:
            for group, ratio in zip(self._groups(), self._lr_ratios):
                group["lr"] = lr * ratio
            for each in self.optimizers:
                each.step()
        self.model.zero_grad(set_to_none=True)
        totals = dict(zip(amounts, self.sum_over_dp(torch.stack(list(amounts.values()))).tolist()))
        if self._aux_loss_coef:
            dist.all_reduce(aux_losses)
            totals["router_aux_loss"] = aux_losses.item()
        return {**totals, "grad_norm": grad_norm, "lr": lr, "skipped": float(skipped)}

    @torch.no_grad()
    def ask(self, batch: Batch, micro_batches: MicroBatches | None = None) -> Tensor:
        self._onload("parameters")
        answers = torch.zeros(self.model.head.num_outputs, len(batch.input_ids), device=self.device)
        where = Batch(torch.arange(len(batch.input_ids)), batch.cu_seqlens)
        self.model.eval()
        micro_batches = micro_batches or self.divide_share(batch.lengths)
        for (_, members), micro_batch in zip(micro_batches, self._laid_out(batch, micro_batches)):
            outputs = self._forward(micro_batch)
            answers[:, where.select(members).input_ids.to(self.device)] = torch.stack(
                [x.float() for x in outputs]
            )
        self.model.train()
        return answers

    @torch.no_grad()
    def one_at_a_time(self, batch: Batch) -> Tensor:
        self._onload("parameters")
        answers = torch.zeros(self.head.num_outputs, len(batch.input_ids), device=self.device)
        self.model.eval()
        with attending(self.hf, "eager"):
            for start, each in zip(batch.cu_seqlens.tolist(), batch.split([1] * len(batch))):
                ids, before = (
                    each.input_ids.to(self.device),
                    torch.arange(len(each.input_ids) - 1, device=self.device),
                )
                given = {
                    "input_ids": ids[None],
                    "position_ids": torch.arange(len(ids), device=self.device)[None],
                }
                if found := each.images:
                    given = {
                        name: x.to(self.device)
                        for name, x in self._images.given(each, found, packed=False).items()
                    }
                outputs = self.model(before, ids[1:], ids.new_empty(len(before), 0), **given)
                answers[:, start + 1 : start + len(ids)] = torch.stack([x.float() for x in outputs])
        self.model.train()
        return answers

    @contextmanager
    def padded(self) -> Iterator[None]:
        with super().padded(), attending(self.hf, plain_attention(self.hf)):
            yield

    def layers(self) -> list[list[tuple[int, nn.Module]]]:
        return [list(enumerate(self._layers))]

    def _laid_out(self, batch: Batch, micro_batches: MicroBatches) -> Iterator[MicroBatch]:
        parts = (batch.select(members) for _, members in micro_batches)
        given = (
            self._images.ahead(parts, self.config.engine.use_remove_padding)
            if self._images
            else zip(parts, repeat(None))
        )
        return (
            self._lay_out(part, self.cp_groups[size], more)
            for (size, _), (part, more) in zip(micro_batches, given)
        )

    def _lay_out(
        self, batch: Batch, group: dist.ProcessGroup, given: dict[str, Tensor] | None
    ) -> MicroBatch:
        """T may be 0: then the model runs on padding alone, because other ranks wait for its collectives."""
        engine, packing_of = self.config.engine, None
        packed, zigzag = engine.use_remove_padding, is_zigzag(engine, self.hf_config, group.size())
        if packed or zigzag:
            packing_of = partial(Packing.of, group=group, device=self.device, zigzag=zigzag)
        if given is None:
            return lay_out(
                batch, packed, packing_of, group, self.device, self.multiple(group.size()), zigzag
            )
        laid_out = lay_out(
            batch,
            packed,
            packing_of,
            group,
            self.device,
            filler=0 if batch.images else len(self._images.filler),
        )
        return replace(
            laid_out, given={name: to_device(x, self.device) for name, x in given.items()}
        )

    def _forward(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        """log_probs, entropy, greedy (with a value head: values), each [T] on the device, entry t about token t."""
        given = batch.given or {
            "input_ids": batch.input_ids,
            "position_ids": batch.positions.expand_as(batch.input_ids),
        }
        values = self.model(batch.place, batch.targets, batch.kept_words, batch.packing, **given)
        return tuple(batch.to_tokens(x) for x in values)

    def _clip(self) -> float:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        norm = full(norm)
        if self.optim.clip_grad > 0:
            nn.utils.clip_grads_with_norm_(
                self.model.parameters(), self.optim.clip_grad, norm.to(gradients[0].device)
            )
        return norm.item()

    def _groups(self) -> list[dict]:
        return [group for each in self.optimizers for group in each.param_groups]

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

    # -- memory ----------------------------------------------------------------------------------------------------------

    def offload(self, *parts: str) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        self._host_memory.offload(self._tensors(parts))
        # Before the first step there is no state yet. Adam's has two moments, Muon's one, and a user's perhaps two.
        self._host_memory.reserve(
            p
            for o in self.optimizers
            if "optimizer" in parts and not o.state
            for group in o.param_groups
            for p in group["params"] * (2 - isinstance(o, torch.optim.Muon))
        )

    def _onload(self, *parts: str) -> None:
        self._host_memory.onload(self._tensors(parts))

    def _tensors(self, parts: tuple[str, ...]) -> Iterator[Tensor]:
        if "parameters" in parts:
            yield from (
                p for p in self.model.parameters() if p.requires_grad or not self._shares_weights
            )
        if "optimizer" in parts:
            states = (state for each in self.optimizers for state in each.state.values())
            yield from (x for state in states for x in state.values() if isinstance(x, Tensor))

    # -- weights and state -----------------------------------------------------------------------------------------------

    def _use_adapters(self, use: bool) -> None:
        for layer in self._adapted:
            layer._disable_adapters = not use  # enable_adapters() would also freeze them

    def export_weights(self, whole: bool = True) -> Iterator[tuple[str, Tensor]]:
        yield from in_files(self._whole_weights(), self._parts)
        if whole:
            yield from self.left_alone()

    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        self._onload("parameters")
        adapted = {
            layer.base_layer.weight: layer for layer in self._adapted if not layer.disable_adapters
        }
        for name, tensor in stored_tensors(self.hf):
            if ".lora_" in name:
                continue
            weight = self._whole(tensor)
            weight = weight.to(self.compute_dtype) if isinstance(tensor, nn.Parameter) else weight
            if tensor in adapted:
                a, b = (
                    self._whole(pair["default"].weight)
                    for pair in (adapted[tensor].lora_A, adapted[tensor].lora_B)
                )
                weight = lora.merge(weight, a, b, self.lora)
            yield self._in_files(lora.plain_name(name)), weight

    def export_adapter(self) -> Iterator[tuple[str, Tensor]]:
        self._onload("parameters")
        for name, parameter in self.hf.named_parameters():
            if ".lora_" in name:
                yield lora.plain_name(name), self._whole(parameter)

    def _in_files(self, name: str) -> str:
        """The name in the files of model.path of a weight that the model names so."""
        return self._file_names.get(name, name)

    def _whole(self, tensor: Tensor) -> Tensor:
        return full(tensor.detach().to(self.device))

    def state(self, loading: bool = False) -> dict:
        self._onload("parameters", "optimizer")
        weights = get_model_state_dict(
            self.hf, options=StateDictOptions(ignore_frozen_params=bool(self._adapted))
        )
        buffers = dict(
            self.hf.named_buffers()
        )  # by themselves, since an export leaves them their dtypes
        state = {
            "model": {
                self._in_files(name): x for name, x in weights.items() if name not in buffers
            },
            "buffers": {self._in_files(name): x for name, x in weights.items() if name in buffers},
        }
        if self.optimizers:
            state["optimizer"] = get_optimizer_state_dict(
                self.hf,
                self.optimizers,
                options=StateDictOptions(flatten_optimizer_state_dict=True),
            )
        return state

    def load_state(self, state: dict) -> None:
        self._onload("parameters", "optimizer")
        weights = {
            self.names.get(file_name, file_name): x
            for part in ("model", "buffers")
            for file_name, x in state[part].items()
        }
        set_model_state_dict(self.hf, weights, options=StateDictOptions(strict=not self._adapted))
        if self.optimizers:
            set_optimizer_state_dict(
                self.hf,
                self.optimizers,
                state["optimizer"],
                options=StateDictOptions(flatten_optimizer_state_dict=True),
            )

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


# -- construction ------------------------------------------------------------------------------------------------------


class PackedModel(nn.Module):
    """A Hugging Face model with a head in place of its last matrix product; the root that FSDP shards."""

    def __init__(self, hf: nn.Module, head: nn.Module):
        super().__init__()
        self.hf, self.head, self.bounds = hf, head, Bounds(hf)

    def forward(
        self,
        place: Tensor,
        targets: Tensor,
        kept_words: Tensor,
        packing: Packing | None = None,
        **given: Tensor,
    ):
        """given: input_ids and position_ids [rows, length], and what the model reads of images. Returns the head's outputs for the
        tokens `targets` [k] that follow the places `place` [k] in [length * rows], and were drawn from `kept_words` [k, K]."""
        self.bounds.now, attention = (
            (packing.bounds, packing.arguments()) if packing else (None, {})
        )
        body = self.hf.base_model if len(given) > 2 else self.hf.get_decoder()
        outputs = body(use_cache=False, **attention, **given)
        hidden = outputs[0].transpose(0, 1).flatten(0, 1).index_select(0, place)
        weight = self.hf.get_output_embeddings().weight.to(hidden.dtype)
        return self.head(hidden, weight, targets, kept_words)


def build(config: DictConfig, head: Head) -> tuple[nn.Module, list[nn.Module]]:
    """The model on the meta device, and its layers with adapters. A value head is trained beside these."""
    engine, settings = config.engine, config.model.lora
    # Frozen weights need no more precision than the pass that reads them.
    hf = build_on_meta(
        read_hf_config(config.model.path),
        getattr(torch, engine.compute_dtype if settings.rank else engine.param_dtype),
        head,
        images=config.model.images,
    )
    divided = engine.use_remove_padding or shares_sequences(engine)
    hf.get_decoder().set_attn_implementation("packed" if divided else plain_attention(hf))
    for tower in of_towers(hf):
        tower._attn_implementation = WINDOWS  # set_attn_implementation() would look for a package
    images.multiply_patches(hf)
    hf.get_decoder().config.output_router_logits = False  # which experts.Routers notes
    freeze.apply(config, hf, head)
    return hf, lora.inject(hf, settings, head) if settings.rank else []


def check_layout(config: DictConfig, hf_config, world_size: int) -> None:
    engine, cp = config.engine, fixed_cp_size(config.engine)
    schedule.check(config.optim)
    optimizer.check(config)
    if any(
        getattr(layer, "num_attention_heads", None) is None for layer in layer_configs(hf_config)
    ):
        raise InputError(
            f"model.path={config.model.path}: model_type={hf_config.model_type} has no attention heads "
            "(num_attention_heads in config.json), which is not supported"
        )
    if world_size % cp:
        raise InputError(
            f"engine.context_parallel_size={cp} does not divide the {world_size} ranks"
        )
    if engine.fsdp_size > 0 and world_size % engine.fsdp_size:
        raise InputError(
            f"engine.fsdp_size={engine.fsdp_size} does not divide the {world_size} ranks"
        )
    if config.model.images:
        images.check(config)
    check_batch_size(config, world_size // cp)
    sizes = (
        [1 << level for level in range(world_size.bit_length())] if has_dynamic_cp(engine) else [cp]
    )
    if any(size > 1 and is_zigzag(engine, hf_config, size) for size in sizes):
        check_micro_batch_cap(config, 2 if has_dynamic_cp(engine) else 2 * cp)
    experts.aux_loss_coef(engine.router_aux_loss_coef, hf_config)


def is_zigzag(engine: DictConfig, hf_config, size: int) -> bool:
    """Whether a group of this size gathers keys and values: for padded rows, and where Ulysses has no heads for all ranks."""
    return shares_sequences(engine) and not (
        engine.use_remove_padding and by_heads(hf_config, size)
    )


def by_heads(hf_config, size: int) -> bool:
    """Whether so many ranks can have whole heads each, as Ulysses needs it: key-value heads may be repeated."""
    if getattr(hf_config, "is_heterogeneous", False):
        return all(by_heads(layer, size) for layer in layer_configs(hf_config))
    heads = hf_config.num_attention_heads
    kv_heads = getattr(hf_config, "num_key_value_heads", None) or heads
    of_layers = getattr(hf_config, "num_attention_heads_per_layer", None) or [heads]
    return all(number % size == 0 for number in of_layers) and (
        kv_heads % size == 0 or size % kv_heads == 0
    )


def is_sharded(config: DictConfig, world_size: int) -> bool:
    """One rank that computes in the dtype it stores (or casts adapters, see engines/model/lora.py) has nothing to divide or cast;
    FSDP would still copy every weight through its buffers."""
    engine, adapted = config.engine, config.model.lora.rank > 0
    return (
        world_size > 1
        or engine.cpu_offload
        or engine.param_dtype != engine.compute_dtype
        and not adapted
    )


def is_replicated(config: DictConfig, world_size: int) -> bool:
    """Whether each rank holds all frozen weights: then they are left alone by FSDP, which has the adapters."""
    engine = config.engine
    return (
        config.model.lora.rank > 0
        and not engine.cpu_offload
        and (world_size == 1 or engine.fsdp_size == 1)
    )


def uses_compile(engine: DictConfig, device_type: str) -> bool:
    return (
        engine.torch_compile == "always" or engine.torch_compile == "auto" and device_type == "cuda"
    )


def fsdp_mesh(engine: DictConfig, device_type: str, world_size: int) -> DeviceMesh:
    size = engine.fsdp_size if engine.fsdp_size > 0 else world_size
    if size == world_size:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
    return init_device_mesh(
        device_type, (world_size // size, size), mesh_dim_names=("replicate", "shard")
    )


def shard(
    model: nn.Module, layers: list[nn.Module], config: DictConfig, device_type: str, world_size: int
) -> None:
    engine = config.engine
    if not is_sharded(config, world_size):
        return
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, engine.compute_dtype),
        reduce_dtype=getattr(torch, engine.reduce_dtype),
    )
    offload = (
        CPUOffloadPolicy(pin_memory=device_type != "cpu") if engine.cpu_offload else OffloadPolicy()
    )
    options = {
        "mesh": fsdp_mesh(engine, device_type, world_size),
        "mp_policy": precision,
        "offload_policy": offload,
    }
    if is_replicated(config, world_size):
        options["ignored_params"] = {p for p in model.parameters() if not p.requires_grad}
    for layer in layers:
        fully_shard(layer, reshard_after_forward=engine.reshard_after_forward, **options)
    fully_shard(model, reshard_after_forward=False, **options)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

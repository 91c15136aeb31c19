"""What an engine is: a model's weights, divided over ranks, that can be trained, asked and written out."""

import shutil
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from config import InputError
from data.batching.packing import Batch, pack, partition, spread
from data.batching.plan import MicroBatches, Plan, schedule
from data.images.processor import Reader
from engines.model.weights import ignored_weights

# (log_probs [T], entropy [T], fields {name: [T]}) -> (loss to add up, {name: amount to add up}).
# Sums, not means: the caller divides by a denominator of the whole batch, so that micro-batches do not matter.
LossFn = Callable[[Tensor, Tensor, dict[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]


# A model's files besides its weights and tokenizer: how to end a response, how to read images, and code, which is not run here, but
# which others may need where config.json names it as auto_map.
SIDE_FILES = ("generation_config.json", "*processor_config.json", "*.py")


class Engine(ABC):
    """One rank's share of a model. Every method is called by all ranks together.

    dp_rank, dp_size  which of how many shares of a batch this rank works on; ranks with the same dp_rank (tensor parallel, or
                      context parallel of a fixed size) are handed the same batch and all get its results
    cp_groups         by their size, the groups of ranks that may share a micro-batch: one, or where context parallelism follows the
                      batch several, of data-parallel ranks
    """

    config: DictConfig
    hf_config: Any  # transformers' configuration of the model
    device: torch.device
    compute_dtype: torch.dtype
    dp_rank: int
    dp_size: int
    dp_group: ProcessGroup
    cp_groups: dict[int, ProcessGroup]
    head: nn.Module  # of engines/heads.py
    reader: Reader | None = None  # of images, for a model of them
    micro_batches_multiple: int = (
        1  # a batch is divided into a multiple of this number of micro-batches
    )
    names: dict[
        str, str | None
    ]  # name in the files of model.path -> in the model; None: no part of it, see left_alone()
    _step: int | None = None  # of the last train_batch, and how many of this step came before it
    _turn: int = 0
    _unproven: bool = (
        False  # whether there are adapters, and no gradient has been seen to reach them
    )
    _flops: tuple[int, int, int]  # see count_flops in engines/model/hf.py

    def plan(self, lengths: list[int], image_flops: list[float] | None = None) -> Plan:
        """What this rank does of a batch with sequences of these lengths; every pass over it that is given this plan has the same
        micro-batches. image_flops: of each sequence, where there are images."""
        of_length, engine = {n: self.flops([n]) for n in {*lengths}}, self.config.engine
        costs = [
            of_length[n] + more for n, more in zip(lengths, image_flops or [0.0] * len(lengths))
        ]
        if follows_batch(engine):
            passes = schedule(
                lengths,
                costs,
                self.dp_size,
                self.config.data.max_tokens_per_micro_batch,
                self.multiple,
                not engine.use_remove_padding,
                self.micro_batches_multiple,
            )
            return Plan.of(passes, self.dp_rank, lengths, costs)
        shares = partition(costs, self.dp_size)
        first = torch.empty(len(lengths), dtype=torch.int64)
        for dp_rank, share in enumerate(shares):
            first[share] = dp_rank
        share = shares[self.dp_rank]
        return Plan(
            share, self._micro_batches([lengths[i] for i in share]), first, torch.ones_like(first)
        )

    def _micro_batches(self, lengths: list[int]) -> MicroBatches:
        """Of a share with sequences of these lengths, in groups of a fixed size; of a rank alone where context parallelism follows
        the batch. The same number on every data-parallel rank, because passes have collectives. Padding counts."""
        size, engine = fixed_cp(self.config.engine), self.config.engine
        multiple = self.multiple(size)
        lengths = [-(-n // multiple) * multiple for n in lengths]
        bins = pack(
            lengths,
            self.config.data.max_tokens_per_micro_batch,
            padded=not engine.use_remove_padding,
        )
        count = torch.tensor(len(bins), device=self.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=self.dp_group)
        bins = spread(
            bins,
            -(-int(count) // self.micro_batches_multiple) * self.micro_batches_multiple,
            lengths,
        )
        return [(size, members) for members in bins]

    @abstractmethod
    def multiple(self, size: int) -> int:
        """In a group of this size each sequence is padded to a multiple of this number of tokens."""

    def _speaks(self, group: ProcessGroup) -> bool:
        """Whether this rank, of a group that shares a micro-batch, counts in sum_over_dp()."""
        return not follows_batch(self.config.engine) or group.rank() == 0

    def _counted(self, batch: Batch, micro_batches: MicroBatches) -> Batch:
        """Of this rank's share what counts in sum_over_dp()."""
        return batch.select(
            [
                i
                for size, members in micro_batches
                if self._speaks(self.cp_groups[size])
                for i in members
            ]
        )

    @abstractmethod
    def train_batch(
        self, batch: Batch, loss_fn: LossFn, step: int, micro_batches: MicroBatches | None = None
    ) -> dict[str, float]:
        """One optimizer step on this rank's share of a global batch. micro_batches: as plan() has them; None: as many as the token
        cap requires of this share.

        Log-probabilities are computed for the tokens whose fields["loss_mask"] is not 0 (without that field: for all but
        first tokens) and are 0 elsewhere: the output matrix costs as much as several layers. With fields["kept_words"]
        [T, K] they, and the entropy, are of the words that sampling kept.
        Returns loss and loss_fn's amounts (summed over micro-batches and data-parallel ranks), grad_norm (before
        clipping), lr (of this step, counted from 0), skipped (1.0 if the weights were left alone, for a non-finite gradient).
        """

    def log_probs(
        self, batch: Batch, micro_batches: MicroBatches | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Without gradient: log p(x_t | x_<t) [T] fp32, the entropy there [T] fp32 (nats), and whether x_t was the
        likeliest token [T] bool. Where fields["loss_mask"] is 0, and on the first token of a sequence: 0, 0, False."""
        log_probs, entropy, greedy = self.ask(batch, micro_batches)
        return log_probs, entropy, greedy > 0

    def values(self, batch: Batch, micro_batches: MicroBatches | None = None) -> Tensor:
        """Without gradient, of an engine built as a critic: V(x_<t) [T] fp32, the value of the tokens before t; 0 where
        fields["loss_mask"] is 0. Its train_batch calls loss_fn(values, fields)."""
        return self.ask(batch, micro_batches)[0]

    @abstractmethod
    def ask(self, batch: Batch, micro_batches: MicroBatches | None = None) -> Tensor:
        """Without gradient: what the head says, [outputs, T] fp32 on every rank that has the batch."""

    @abstractmethod
    def one_at_a_time(self, batch: Batch) -> Tensor:
        """ask(), of sequences that are alone in their micro-batch, by transformers' own attention where there is one; the same
        on all ranks."""

    @abstractmethod
    def layers(self) -> list[list[tuple[int, nn.Module]]]:
        """(number in the whole model from 0, module) of the decoder layers in each of modules(). Their first argument is hidden
        states, and so is what they return, or the first of it."""

    @contextmanager
    def padded(self) -> Iterator[None]:
        """Meanwhile as with engine.use_remove_padding=false."""
        before, self.config = (
            self.config,
            OmegaConf.merge(self.config, {"engine": {"use_remove_padding": False}}),
        )
        try:
            yield
        finally:
            self.config = before

    @contextmanager
    def _seeded(self, step: int, *ranks: int) -> Iterator[None]:
        """Around the passes of a train_batch: the dropout of adapters depends on trainer.seed, the step, how many batches of it
        came before, and these ranks alone."""
        self._turn = self._turn + 1 if step == self._step else 0
        self._step = step
        if not (self.config.model.lora.rank and self.config.model.lora.dropout):
            yield
            return
        accelerators = (
            [torch.accelerator.current_device_index()] if torch.accelerator.is_available() else []
        )
        with torch.random.fork_rng(accelerators):
            torch.manual_seed(
                zlib.crc32(repr((self.config.trainer.seed, step, self._turn, *ranks)).encode())
            )
            yield

    def _watched(self, loss_fn: LossFn) -> LossFn:
        """A loss that notes, until adapters are known to learn, whether it has a gradient at all."""
        if not self._unproven:
            return loss_fn

        def note(gradient: Tensor) -> None:
            self._asked += gradient.abs().sum()

        def watched(outputs: Tensor, *others):
            outputs.requires_grad_().register_hook(
                note
            )  # also where recomputation has lost its way back
            return loss_fn(outputs, *others)

        self._asked = torch.zeros((), device=self.device)
        return watched

    def _prove(self, grad_norm: float, unreached: Iterable[str] = ()) -> None:
        """Raise RuntimeError if a loss with a gradient gave adapters none: recomputation, for one, can lose it in silence.
        unreached: adapters' matrices without one, as where a kernel reads a layer's matrix past its adapter."""
        if self._unproven:
            dist.all_reduce(self._asked)
            name = min(unreached, default=None)
            if grad_norm == 0 and self._asked > 0:
                raise RuntimeError(
                    "the gradient of every adapter is exactly 0, but the loss has one: model.lora learns nothing "
                    "with this configuration"
                )
            if name and self._asked > 0:
                raise RuntimeError(
                    f"no gradient reaches {name}, since the model does not call that layer: leave it out with "
                    "model.lora.exclude_modules"
                )
            self._unproven = grad_norm == 0

    @abstractmethod
    def offload(self, *parts: str) -> None:
        """Move "parameters", "optimizer" or both to host memory, so that others can use the device's. They come back by themselves
        when a method needs them. Before the first step a thread takes memory for the optimizer's state, and the next call waits."""

    @abstractmethod
    def modules(self) -> list[nn.Module]:
        """What this rank runs of the model: one module, or the chunks of a virtual pipeline in their order."""

    @abstractmethod
    def coordinates(self) -> dict:
        """What modules() are of the whole model: {dp, cp, tp, pp: [this rank, how many], first_layers: the number of the
        first layer of each module, and what else divides tensors}. Recorded with a dump, for comparison with other layouts."""

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Meanwhile the model is the frozen one alone: what it computes without gradient, and what export_weights() gives."""
        self._use_adapters(False)
        try:
            yield
        finally:
            self._use_adapters(True)

    @abstractmethod
    def _use_adapters(self, use: bool) -> None: ...

    @abstractmethod
    def export_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """(name as engines/model/lora.py has it, full tensor in model.lora.dtype) of each adapter matrix, in the same order on all
        ranks; nothing without adapters."""

    def sum_over_dp(self, amounts: Tensor) -> Tensor:
        """The sum of every data-parallel rank's tensor, on all of them. Several may have the same sequences, see Plan.speaks()."""
        amounts = amounts.to(self.device)
        dist.all_reduce(amounts, group=self.dp_group)
        return amounts

    def flops(self, lengths: list[int], num_asked: int | None = None) -> float:
        """FLOPs of forward and backward on sequences of these lengths: of matrix products (of the output matrix only for
        num_asked tokens; None: all) and, by the sum of squared lengths, of causal attention. Recomputation is not counted."""
        in_layers, in_head, in_attention = self._flops
        num_tokens = sum(lengths)
        return float(
            in_layers * num_tokens
            + in_head * (num_tokens if num_asked is None else num_asked)
            + in_attention * sum(n * n for n in lengths)
        )

    def image_flops(self, batch: Batch) -> list[float]:
        """FLOPs of forward and backward in what images go through, for each sequence. Attention among an image's patches is not
        counted."""
        if self.reader is None:
            return [0.0] * len(batch)
        of_images = self.reader.token_types([batch.input_ids.tolist()])[0] > 0
        return [
            float(self._image_flops) * int(part.sum()) for part in of_images.split(batch.lengths)
        ]

    @abstractmethod
    def export_weights(self, whole: bool = True) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor in the compute dtype), in the same order on all ranks; a tied output matrix
        is left out. With adapters: merged weights. whole: left_alone() behind them."""

    @property
    def leaves_alone(self) -> bool:
        return None in self.names.values()

    def left_alone(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of what model.path has besides the model, such as a vision tower, read from its files as it is."""
        for name, tensor in ignored_weights(Path(self.config.model.path), self.names):
            yield name, tensor.to(self.device)

    @abstractmethod
    def state(self, loading: bool = False) -> dict:
        """This engine's part of a checkpoint, in the form that write() takes, or when loading, in the form that read() takes."""

    @abstractmethod
    def load_state(self, state: dict) -> None:
        """Take over a state that read() returned."""

    @abstractmethod
    def write(
        self, states: dict[str, dict], directory: Path, group: ProcessGroup | None
    ) -> Future | None:
        """Write the states of engines of this kind by name, and this rank's generators under "rng", into a new
        directory. With a group (gloo) in the background: done when the Future of rank 0 is."""

    @abstractmethod
    def read(self, states: dict[str, dict], directory: Path) -> dict[str, dict]:
        """The states as write() left them."""

    def save_config(self, directory: Path) -> None:
        """Write config.json and SIDE_FILES; called on rank 0 alone."""
        from engines.model import mtp  # slow: not for those who only want the interface
        from engines.model.hf import auto_class, read_hf_config

        path = Path(self.config.model.path)
        hf_config = read_hf_config(path)
        hf_config.dtype = hf_config.get_text_config().dtype = self.compute_dtype
        hf_config.architectures = [auto_class(hf_config)._model_mapping[type(hf_config)].__name__]
        mtp.write_class(hf_config, directory)
        hf_config.save_pretrained(directory)
        for file in (file for pattern in SIDE_FILES for file in path.glob(pattern)):
            shutil.copy(file, directory)


def follows_batch(engine: DictConfig) -> bool:
    return engine.context_parallel_size == "auto"


def shares_sequences(engine: DictConfig) -> bool:
    return engine.context_parallel_size != 1


def fixed_cp(engine: DictConfig) -> int:
    """The ranks that share every sequence; others may share some where context parallelism follows the batch."""
    return 1 if follows_batch(engine) else engine.context_parallel_size


def longest_sequence(config: DictConfig, world_size: int) -> tuple[int, str]:
    """The most tokens that a sequence may have, and the keys that say so."""
    cap, engine = config.data.max_tokens_per_micro_batch, config.engine
    said = f"data.max_tokens_per_micro_batch={cap}"
    if not follows_batch(engine):
        return cap, said
    ranks = world_size // (
        engine.get("tensor_model_parallel_size", 1) * engine.get("pipeline_model_parallel_size", 1)
    )
    size = 1 << max(0, ranks.bit_length() - 1)
    return cap * size, f"{said} for each of {size} ranks"


def check_batch_size(config: DictConfig, num_shares: int) -> None:
    """Raise InputError for steps of fewer sequences than data-parallel ranks, unless these share them."""
    if follows_batch(config.engine):
        return
    size, what = (
        config.data.train_batch_size,
        f"data.train_batch_size={config.data.train_batch_size}",
    )
    if "rollout" in config:
        size, what = size * config.rollout.n, f"{what} x rollout.n={config.rollout.n}"
    if size < num_shares:
        raise InputError(f"{what} is less than the {num_shares} data-parallel ranks")


def check_cap(config: DictConfig, multiple: int) -> None:
    """Raise InputError if a sequence as long as a rank, or a group, has room for would not fit once it is padded."""
    if config.data.max_tokens_per_micro_batch % multiple:
        raise InputError(
            f"data.max_tokens_per_micro_batch={config.data.max_tokens_per_micro_batch} must be a multiple of "
            f"{multiple}, which this layout pads every sequence to"
        )

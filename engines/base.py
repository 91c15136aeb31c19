"""The interface of an engine: a model divided over ranks, to train, evaluate and export."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from data.batching.batch import Batch
from data.batching.plan import MicroBatches, Plan
from data.images.processor import Reader
from engines.context_parallel import has_dynamic_cp
from engines.heads import Head
from engines.memory import Estimate
from engines.model.model_files import ignored_weights
from engines.planning import Planner

LossFn = Callable[[Tensor, Tensor, dict[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]
"""(log_probs [T], entropy [T], fields {name: [T]}) -> (loss, {metric name: amount}).

Loss and amounts are sums over tokens, not means. Whoever writes the loss divides it by a
denominator of the whole batch, so that the result does not depend on how the batch is cut into
micro-batches.
"""


class Engine(ABC):
    """One rank's part of a model. All ranks call every method together.

    Attributes:
        config: the configuration of the run, with model.path of this engine's model.
        hf_config: the configuration of the model's decoder in transformers.
        device: where this rank computes.
        compute_dtype: the dtype of matrix products.
        dp_rank, dp_size, dp_group: the data-parallel rank, their number and their group. Ranks with
            the same dp_rank (tensor-parallel ranks, and context-parallel ranks of a fixed size) get
            the same batch and return the same results.
        cp_groups: group size -> the ranks that may share a micro-batch with this rank. One group if
            engine.context_parallel_size is a number; several groups of data-parallel ranks if it is
            "auto".
        head: the module in engines/heads.py that follows the last hidden state.
        reader: reads images, for a vision-language model.
        micro_batches_multiple: a batch is divided into a multiple of this number of micro-batches.
        names: name in the files of model.path -> name in the model. None: the engine does not use
            that weight.
    """

    config: DictConfig
    hf_config: Any
    device: torch.device
    compute_dtype: torch.dtype
    dp_rank: int
    dp_size: int
    dp_group: ProcessGroup
    cp_groups: dict[int, ProcessGroup]
    head: nn.Module
    reader: Reader | None = None
    micro_batches_multiple: int = 1
    names: dict[str, str | None]
    _flops: tuple[int, int, int]  # see count_flops in engines/model/flops.py
    _image_flops: float

    # -- batches ---------------------------------------------------------------------------------

    def plan(self, lengths: list[int], image_flops: list[float] | None = None) -> Plan:
        """Return the sequences of a batch that this rank works on, and its micro-batches.

        All passes over a batch that use the same plan have the same micro-batches.

        Args:
            lengths: tokens of each sequence of the batch, the same on all ranks.
            image_flops: FLOPs for the images of each sequence, see image_flops().
        """
        flops_of_length = {length: self.flops([length]) for length in {*lengths}}
        image_flops = image_flops or [0.0] * len(lengths)
        costs = [flops_of_length[length] + flops for length, flops in zip(lengths, image_flops)]
        return self._planner().plan(lengths, costs)

    def divide_share(self, lengths: list[int]) -> MicroBatches:
        """Return the micro-batches of this rank's share, which has sequences of these lengths.

        They are for groups of the fixed context-parallel size: one rank, if sizes are chosen per
        batch.
        """
        return self._planner().divide_share(lengths)

    def _planner(self) -> Planner:
        return Planner(
            self.config,
            self.dp_rank,
            self.dp_size,
            self.dp_group,
            self.device,
            self.multiple,
            self.micro_batches_multiple,
        )

    @abstractmethod
    def multiple(self, size: int) -> int:
        """Return the multiple of tokens that sequences are padded to in a group of this size."""

    def counts_group(self, group: ProcessGroup) -> bool:
        """Return whether this rank contributes the micro-batches of a group to sum_over_dp().

        With dynamic context parallelism several data-parallel ranks have the same micro-batch; one
        of them counts.
        """
        return not has_dynamic_cp(self.config.engine) or group.rank() == 0

    def counted_sequences(self, batch: Batch, micro_batches: MicroBatches) -> Batch:
        """Return the sequences of this rank's share that it contributes to sum_over_dp()."""
        counted = []
        for size, members in micro_batches:
            if self.counts_group(self.cp_groups[size]):
                counted.extend(members)
        return batch.select(counted)

    def sum_over_dp(self, amounts: Tensor) -> Tensor:
        """Return the sum of the tensors of all data-parallel ranks, on every one of them.

        Several ranks may have the same sequences, see Plan.speaks().
        """
        amounts = amounts.to(self.device)
        dist.all_reduce(amounts, group=self.dp_group)
        return amounts

    @contextmanager
    def padded(self) -> Iterator[None]:
        """Within this block, compute as with engine.use_remove_padding=false."""
        packed_config = self.config
        self.config = OmegaConf.merge(packed_config, {"engine": {"use_remove_padding": False}})
        try:
            yield
        finally:
            self.config = packed_config

    # -- training and evaluation -----------------------------------------------------------------

    @abstractmethod
    def train_batch(
        self, batch: Batch, loss_fn: LossFn, step: int, micro_batches: MicroBatches | None = None
    ) -> dict[str, float]:
        """Take one optimizer step on a global batch, of which `batch` is this rank's share.

        Log-probabilities are computed only for tokens whose fields["loss_mask"] is not 0 (without
        that field, for all but the first token of each sequence), and are 0 elsewhere: the output
        matrix costs as much as several layers. With fields["kept_words"] [T, K], they and the
        entropy are normalized over the tokens that sampling kept.

        Args:
            batch: this rank's share.
            loss_fn: see LossFn. An engine with a value head calls loss_fn(values, fields) instead.
            step: the number of the step, from 0; it determines the learning rate.
            micro_batches: from plan(). None: as many as the token cap requires.

        Returns:
            "loss" and the amounts of loss_fn, summed over micro-batches and data-parallel ranks;
            "grad_norm" before clipping; "lr" of this step; "skipped", which is 1.0 if the weights
            were not updated because the gradient was not finite.
        """

    def log_probs(
        self, batch: Batch, micro_batches: MicroBatches | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute log-probabilities without gradient.

        Returns:
            log p(x_t | x_<t) [T] fp32, the entropy of that distribution [T] fp32 in nats, and
            whether x_t is its most likely token [T] bool. Where fields["loss_mask"] is 0, and for
            the first token of a sequence: 0, 0, False.
        """
        log_probs, entropy, is_greedy = self.ask(batch, micro_batches)
        return log_probs, entropy, is_greedy > 0

    def values(self, batch: Batch, micro_batches: MicroBatches | None = None) -> Tensor:
        """Compute values without gradient; for engines built with Head.VALUES.

        Returns V(x_<t) [T] fp32, the value of the state before token t; 0 where fields["loss_mask"]
        is 0.
        """
        return self.ask(batch, micro_batches)[0]

    @abstractmethod
    def ask(self, batch: Batch, micro_batches: MicroBatches | None = None) -> Tensor:
        """Return the head's outputs [outputs, T] fp32 without gradient."""

    @abstractmethod
    def one_at_a_time(self, batch: Batch) -> Tensor:
        """Return the same as ask(), computed with every sequence alone in its micro-batch.

        Where transformers has its own attention for the model, that is used: the reference for the
        guard.
        """

    @abstractmethod
    def layers(self) -> list[list[tuple[int, nn.Module]]]:
        """Return (number in the whole model, module) of the decoder layers of each of modules().

        A layer's first argument is the hidden states; it returns the new hidden states, or a tuple
        that begins with them.
        """

    @abstractmethod
    def modules(self) -> list[nn.Module]:
        """Return this rank's part of the model: one module, or the virtual pipeline's chunks."""

    @abstractmethod
    def coordinates(self) -> dict:
        """Return the place of modules() in the whole model, to compare dumps of different layouts.

        {dp, cp, tp, pp: [rank, size], first_layers: number of the first layer of each module}, and
        the other settings that divide tensors.
        """

    # -- FLOPs -----------------------------------------------------------------------------------

    def flops(self, lengths: list[int], num_asked: int | None = None) -> float:
        """Return the FLOPs of forward and backward on sequences of these lengths.

        They are the matrix products, and causal attention by the sum of squared lengths.
        Recomputation is not counted.

        Args:
            lengths: tokens of each sequence.
            num_asked: for how many tokens the output matrix is applied. None: for all.
        """
        flops_in_layers, flops_in_head, flops_in_attention = self._flops
        num_tokens = sum(lengths)
        num_outputs = num_tokens if num_asked is None else num_asked
        return float(
            flops_in_layers * num_tokens
            + flops_in_head * num_outputs
            + flops_in_attention * sum(length * length for length in lengths)
        )

    def image_flops(self, batch: Batch) -> list[float]:
        """Return the FLOPs of forward and backward in the vision tower for each sequence.

        Attention among the patches of an image is not counted.
        """
        if self.reader is None:
            return [0.0] * len(batch)
        is_image_token = self.reader.token_types([batch.input_ids.tolist()])[0] > 0
        image_flops = float(self._image_flops)
        return [image_flops * int(part.sum()) for part in is_image_token.split(batch.lengths)]

    # -- memory ----------------------------------------------------------------------------------

    @abstractmethod
    def offload(self, *parts: str) -> None:
        """Move "parameters", "optimizer" or both to host memory, to free the device for others.

        They return by themselves when a method needs them. Before the first step a background
        thread allocates host memory for the optimizer's future state; the next call waits for it.
        """

    @staticmethod
    @abstractmethod
    def estimate_memory(
        config: DictConfig,
        world_size: int,
        device_type: str,
        head: Head = Head.LOG_PROBS,
        is_trained: bool = True,
    ) -> list[Estimate]:
        """Estimate the memory of one rank of each pipeline stage, before anything is built.

        is_trained: with gradients and an optimizer; False for a reference.
        """

    @staticmethod
    @abstractmethod
    def checkpoint_bytes(config: DictConfig, head: Head = Head.LOG_PROBS) -> int:
        """Estimate the bytes of this engine in a checkpoint."""

    # -- weights ---------------------------------------------------------------------------------

    @abstractmethod
    def export_weights(self, whole: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor in the compute dtype).

        The order is the same on all ranks. A tied output matrix is left out. Adapters are merged
        into the weights. whole: yield left_alone() at the end.
        """

    @abstractmethod
    def export_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name as in engines/model/lora.py, full tensor in model.lora.dtype) of adapters.

        The order is the same on all ranks. Yields nothing without adapters.
        """

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Within this block, adapters are disabled: in evaluation, and in export_weights()."""
        self._use_adapters(False)
        try:
            yield
        finally:
            self._use_adapters(True)

    @abstractmethod
    def _use_adapters(self, use: bool) -> None: ...

    @property
    def leaves_alone(self) -> bool:
        """Whether model.path has weights that this engine does not use, such as a vision tower."""
        return None in self.names.values()

    def left_alone(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the weights in model.path that this engine does not use."""
        for name, tensor in ignored_weights(Path(self.config.model.path), self.names):
            yield name, tensor.to(self.device)

    def save_config(self, directory: Path) -> None:
        """Write an export's files besides weights and tokenizer; called on rank 0 alone."""
        # Imported here: transformers takes seconds to import.
        from engines.checkpoint.model_config import save_model_config

        save_model_config(Path(self.config.model.path), self.compute_dtype, directory)

    # -- checkpoints -----------------------------------------------------------------------------

    @abstractmethod
    def state(self, loading: bool = False) -> dict:
        """Return this engine's part of a checkpoint, as write() or (if loading) read() takes it."""

    @abstractmethod
    def load_state(self, state: dict) -> None:
        """Restore a state that read() returned."""

    @abstractmethod
    def write(
        self, states: dict[str, dict], directory: Path, group: ProcessGroup | None
    ) -> Future | None:
        """Write a checkpoint into a new directory.

        Args:
            states: engine name -> state() of engines of this class; and this rank's random
                generators as "rng".
            directory: where to write.
            group: a gloo group of all ranks, to write in the background. The checkpoint is complete
                when the returned Future of rank 0 is done. None: write before returning.
        """

    @abstractmethod
    def read(self, states: dict[str, dict], directory: Path) -> dict[str, dict]:
        """Return the states that write() wrote."""

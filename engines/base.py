"""The interface of an engine: a model divided over ranks, to train, evaluate and export."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from data.batching.batch import Batch
from data.batching.plan import MicroBatches, PassCosts, Plan
from data.images.processor import Processor
from engines.context_parallel import has_dynamic_cp
from engines.heads import Head, ValueHead
from engines.memory import Estimate
from engines.model.flops import cost_of_length
from engines.model.model_files import ignored_weights
from engines.pass_costs import pass_costs
from engines.planning import Planner

LossFn = Callable[[Tensor, Tensor, dict[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]
"""(log_probs [T], entropy [T], fields {name: [T]}) -> (loss, {metric name: amount}).

The loss and the amounts are sums over tokens, not means. The loss function itself divides by a
denominator computed from the whole batch, so that the result does not depend on how the batch is
cut into micro-batches.
"""


class Engine(ABC):
    """One rank's part of a model. All ranks call its methods together, unless documented otherwise.

    Attributes:
        config: the run's configuration, in which model.path is the path of this engine's model.
        hf_config: the transformers configuration of the model's decoder.
        device: where this rank computes.
        compute_dtype: the dtype of matrix products.
        dp_rank, dp_size, dp_group: this rank's data-parallel rank, the number of data-parallel
            ranks, and their process group. Ranks with the same dp_rank (tensor-parallel ranks, and
            context-parallel ranks if the group size is fixed) get the same batch and return the
            same results.
        cp_groups: group size -> the ranks that may share a micro-batch with this rank. One group if
            engine.context_parallel_size is a number; several groups of data-parallel ranks if it is
            "auto".
        head: the module from engines/heads.py that is applied to the last hidden states.
        processor: turns images into tokens and tensors; None for a text model.
        micro_batches_multiple: the number of micro-batches in a batch is a multiple of this.
        names: name in the files of model.path -> name in the model. None: the engine does not use
            that weight.
        new_end_ids: end tokens that the run teaches and that the files of model.path do not name;
            save_config() names them.
        padding_id: for an engine with a value head, see describe_as_classifier() in
            engines/model/classifier.py.
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
    processor: Processor | None = None
    micro_batches_multiple: int = 1
    names: dict[str, str | None]
    new_end_ids: Sequence[int] = ()
    padding_id: int | None = None
    _flops: tuple[int, int, int]  # see count_flops in engines/model/flops.py
    _image_flops: float
    _padding: Tensor | None = None  # of the latest micro-batch

    # -- batches ---------------------------------------------------------------------------------

    def plan(
        self, lengths: list[int], image_flops: list[float] | None = None, group_size: int = 1
    ) -> Plan:
        """Plan which sequences of a batch this rank works on, and in which micro-batches.

        All passes over a batch that use the same plan have the same micro-batches.

        Args:
            lengths: number of tokens in each sequence of the batch; the same on all ranks.
            image_flops: FLOPs for the images of each sequence, see image_flops().
            group_size: the number of neighbouring sequences that stay in one micro-batch, such as 2
                for pairs.
        """
        image_flops = image_flops or [0.0] * len(lengths)
        costs = []
        for length, flops in zip(lengths, image_flops):
            costs.append(self.cost(length) + flops)
        if group_size > 1:
            return self._planner().plan_groups(lengths, costs, group_size)
        return self._planner().plan(lengths, costs)

    def divide_share(self, lengths: list[int]) -> MicroBatches:
        """Divide this rank's share of a batch into micro-batches.

        Every micro-batch is for a group of the fixed context-parallel size, or for one rank if
        group sizes are chosen per batch.

        Args:
            lengths: number of tokens in each sequence of the share.
        """
        return self._planner().divide_share(lengths)

    def _planner(self) -> Planner:
        return Planner(
            self.config,
            self.dp_rank,
            self.dp_size,
            self.dp_group,
            self.device,
            self.padding_multiple,
            self.micro_batches_multiple,
            self._pass_costs,
        )

    @cached_property
    def _pass_costs(self) -> PassCosts:
        if not has_dynamic_cp(self.config.engine):
            return PassCosts()
        num_layers = self.hf_config.get_text_config().num_hidden_layers
        return pass_costs(self.config.engine, num_layers, self.dp_size, self.device)

    @abstractmethod
    def padding_multiple(self, group_size: int) -> int:
        """Return the padding multiple for a context-parallel group of this size.

        Every sequence is padded to a multiple of this number of tokens.
        """

    def reports_group(self, group: ProcessGroup) -> bool:
        """Return whether this rank contributes the micro-batches of a group to sum_over_dp().

        With dynamic context parallelism, several data-parallel ranks work on the same micro-batch,
        but only one of them contributes it.
        """
        return not has_dynamic_cp(self.config.engine) or group.rank() == 0

    def reported_sequences(self, batch: Batch, micro_batches: MicroBatches) -> Batch:
        """Return the sequences whose results this rank contributes to sum_over_dp()."""
        numbers = []
        for size, members in micro_batches:
            if self.reports_group(self.cp_groups[size]):
                numbers.extend(members)
        return batch.select(numbers)

    def sum_over_dp(self, amounts: Tensor) -> Tensor:
        """Sum a tensor over all data-parallel ranks, and return the sum on each of them.

        If several ranks work on one sequence, only one may add its result: see Plan.reported_by().
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

        Log-probabilities are computed only for tokens whose fields["loss_mask"] is not 0, because
        the output matrix costs as much as several layers; elsewhere they are 0. Without that field,
        they are computed for all but the first token of each sequence. With fields["candidate_ids"]
        [T, K], log-probabilities and entropy are normalized over these candidates.

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
        log_probs, entropy, is_greedy = self.head_outputs(batch, micro_batches)
        return log_probs, entropy, is_greedy > 0

    def values(self, batch: Batch, micro_batches: MicroBatches | None = None) -> Tensor:
        """Compute values without gradient; for engines built with Head.VALUES.

        Returns V(x_<t) [T] fp32, the value of the state before token t; 0 where fields["loss_mask"]
        is 0.
        """
        return self.head_outputs(batch, micro_batches)[0]

    @abstractmethod
    def token_outputs(
        self, batch: Batch, head: nn.Module, micro_batches: MicroBatches | None = None
    ) -> tuple[Tensor, ...]:
        """Compute the outputs of another head, without gradient: [T, ...] each, in host memory.

        Only the ranks of the last pipeline stage return them; others return an empty tuple.

        Args:
            head: a module without parameters that is called like those in engines/heads.py.
        """

    @abstractmethod
    def output_matrix(self) -> Tensor:
        """Return all rows [V, h] of the output matrix in the compute dtype, on the device.

        On ranks of other pipeline stages than the last: an empty tensor.
        """

    @abstractmethod
    def head_outputs(self, batch: Batch, micro_batches: MicroBatches | None = None) -> Tensor:
        """Compute the head's outputs [num_outputs, T] fp32, without gradient."""

    @abstractmethod
    def head_outputs_one_by_one(self, batch: Batch) -> Tensor:
        """Compute the same as head_outputs(), with every sequence alone in its micro-batch.

        The guard uses the result as its reference. An engine that can run the attention of
        transformers uses it here.
        """

    @abstractmethod
    def layers(self) -> list[list[tuple[int, nn.Module]]]:
        """Return the decoder layers in each of modules(), as (number in the whole model, layer).

        A layer's first argument is the hidden states; it returns the new hidden states, or a tuple
        that begins with them.
        """

    @abstractmethod
    def modules(self) -> list[nn.Module]:
        """Return this rank's part of the model: one module, or the virtual pipeline's chunks."""

    @abstractmethod
    def coordinates(self) -> dict:
        """Return where modules() lie in the whole model, for comparing dumps of different layouts.

        Returns:
            "dp", "cp", "tp", "pp": [rank, size]; "first_layers": the number of the first layer in
            each module; and the other settings that determine how tensors are divided.
        """

    def padding(self) -> Tensor | None:
        """Return a mask of the latest micro-batch's padding, for records of modules' outputs.

        Returns:
            [b, s] bool, or [s, b] if the engine's hidden states are [s, b, h]: True for the slots
            of this context-parallel rank without a token. None before the first micro-batch.
        """
        return self._padding

    # -- FLOPs -----------------------------------------------------------------------------------

    def flops(self, lengths: list[int], num_predicted: int | None = None) -> float:
        """Return the FLOPs of the forward and backward passes over some sequences.

        Matrix products and causal attention are counted; attention is proportional to the sum of
        the squared lengths. Recomputation is not counted.

        Args:
            lengths: number of tokens in each sequence.
            num_predicted: number of tokens that the output matrix is applied to. None: all.
        """
        flops_in_layers, flops_in_head, flops_in_attention = self._flops
        num_tokens = sum(lengths)
        num_outputs = num_tokens if num_predicted is None else num_predicted
        return float(
            flops_in_layers * num_tokens
            + flops_in_head * num_outputs
            + flops_in_attention * sum(length * length for length in lengths)
        )

    def cost(self, length: int) -> float:
        """Return the time that a sequence takes, see cost_of_length() in engines/model/flops.py."""
        return cost_of_length(self._flops, length)

    def image_flops(self, batch: Batch) -> list[float]:
        """Return each sequence's FLOPs in the forward and backward passes of the vision tower.

        Attention among the patches of an image is not counted.
        """
        if self.processor is None:
            return [0.0] * len(batch)
        is_image_token = self.processor.token_types([batch.input_ids.tolist()])[0] > 0
        image_flops = float(self._image_flops)
        return [image_flops * int(part.sum()) for part in is_image_token.split(batch.lengths)]

    # -- memory ----------------------------------------------------------------------------------

    @abstractmethod
    def offload(self, *parts: str) -> None:
        """Move "parameters", "optimizer" or both to host memory, to free device memory.

        A method that needs them moves them back. Before the first step, a background
        thread allocates host memory for the optimizer's future state; the next call of offload()
        waits for it.
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
        """Estimate the memory of one rank in each pipeline stage, before anything is built.

        Args:
            config: the run's configuration.
            world_size: number of ranks.
            device_type: for example "cuda" or "cpu".
            head: the engine's head.
            is_trained: whether to count gradients and an optimizer; False for a reference model.
        """

    @staticmethod
    @abstractmethod
    def checkpoint_bytes(config: DictConfig, head: Head = Head.LOG_PROBS) -> int:
        """Estimate how many bytes this engine adds to a checkpoint."""

    # -- weights ---------------------------------------------------------------------------------

    @abstractmethod
    def export_weights(self, include_unused: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor in the compute dtype).

        The order is the same on all ranks. A tied output matrix is left out. Adapters are merged
        into the weights.

        Args:
            include_unused: also yield the weights of unused_weights(), at the end.
        """

    @abstractmethod
    def export_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor in model.lora.dtype) for each adapter matrix.

        Names are as in engines/model/lora.py. The order is the same on all ranks. Without adapters,
        nothing is yielded.
        """

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Within this block, adapters are disabled, in evaluation and in export_weights()."""
        self._use_adapters(False)
        try:
            yield
        finally:
            self._use_adapters(True)

    @abstractmethod
    def _use_adapters(self, use: bool) -> None: ...

    @property
    def is_classifier(self) -> bool:
        """Whether exports are sequence classifiers: true if the engine has a value head."""
        return isinstance(self.head, ValueHead)

    @property
    def has_unused_weights(self) -> bool:
        """Whether model.path has weights that this engine does not use, such as a vision tower."""
        return None in self.names.values()

    def unused_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the weights in model.path that this engine does not use."""
        for name, tensor in ignored_weights(Path(self.config.model.path), self.names):
            yield name, tensor.to(self.device)

    def save_config(self, directory: Path) -> None:
        """Write an export's files other than weights and tokenizer. Only rank 0 calls it."""
        # Imported here: transformers takes seconds to import.
        from engines.checkpoint.model_config import save_classifier_config, save_model_config

        path = Path(self.config.model.path)
        if self.is_classifier:
            save_classifier_config(path, self.compute_dtype, directory, self.padding_id)
        else:
            save_model_config(path, self.compute_dtype, directory, self.new_end_ids)

    # -- checkpoints -----------------------------------------------------------------------------

    @abstractmethod
    def state(self, loading: bool = False) -> dict:
        """Return this engine's part of a checkpoint, to pass to write() or (if loading) read()."""

    @abstractmethod
    def load_state(self, state: dict) -> None:
        """Restore a state that read() returned."""

    @abstractmethod
    def write(
        self, states: dict[str, dict], directory: Path, group: ProcessGroup | None
    ) -> Future | None:
        """Write a checkpoint into a new directory.

        Args:
            states: engine name -> state(), for all engines of this class; and the state of this
                rank's random generators as "rng".
            directory: where to write.
            group: a gloo group of all ranks, to write in the background. The checkpoint is complete
                when the Future that rank 0 gets is done. None: write before returning.
        """

    @abstractmethod
    def read(self, states: dict[str, dict], directory: Path) -> dict[str, dict]:
        """Read the states that write() wrote.

        Args:
            states: engine name -> state(loading=True), and "rng", as in write().
            directory: the directory that write() filled.
        """

"""Copy the trainer's weights into vLLM's model."""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from rollout.vllm import cpu, speculation
from rollout.vllm.adapters import Adapter, LayoutError
from rollout.vllm.fp8_weights import Fp8Weights
from rollout.vllm.startup import print_once

NamedWeights = Iterable[tuple[str, Tensor]]


class WeightSync:
    """Copies weights into vLLM's model and its drafter on this rank."""

    def __init__(
        self,
        llm,
        device_type: str,
        vllm_names: dict[str, str | None],
        adapter: Adapter | None,
        drafter: str | None,
        is_quantized: bool = False,
    ):
        """
        Args:
            vllm_names: As returned by `weight_names.vllm_weight_names`.
            is_quantized: Whether vLLM quantizes the weights that it gets.
        """
        self.llm = llm
        self.device_type = device_type
        self.vllm_names = vllm_names
        self.adapter = adapter
        self.drafter = drafter
        self.is_quantized = is_quantized
        # The weights of the first update, in order to write later ones into FP8 layers directly.
        self.shapes: dict[str, torch.Size] = {}
        self.fp8_weights: Fp8Weights | None = None
        self.is_form_known = True
        # Whether vLLM's output matrix needs a copy of the embedding's weights.
        self.needs_output_matrix = False

    def untie_output_matrix(self, vllm_model) -> None:
        """In later updates, copy the embedding of a tied model to vLLM's output matrix, too.

        Some families stay tied in vLLM regardless of hf_overrides, and have no output matrix.
        """
        layer_names = [name for name, _ in vllm_model.named_modules()]
        self.needs_output_matrix = any(name.endswith("lm_head") for name in layer_names)

    def load(self, weights: NamedWeights) -> None:
        """Copy all weights of the model, as yielded by Engine.export_weights().

        Called by all ranks together, because iterating over `weights` may run collectives.
        """
        drafter_weights: list[tuple[str, Tensor]] = []
        weights = speculation.collect_drafter_weights(self.renamed(weights), drafter_weights)
        with self.adapter.unwrapped() if self.adapter else nullcontext():
            self.load_model(weights)
        # If vLLM stops early, the other ranks still need this rank in the remaining collectives.
        for _ in weights:
            pass
        if self.drafter == "mtp":
            speculation.load_drafter(self.llm, drafter_weights, self.device_type)
        if self.adapter:
            self.adapter.register()
        self.llm.reset_prefix_cache()
        # This cache holds image features that were computed with the old weights.
        self.llm.llm_engine.reset_encoder_cache()

    def renamed(self, weights: NamedWeights) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that vLLM needs, with their names in vLLM."""
        for name, tensor in weights:
            vllm_name = self.vllm_names.get(name, name)
            if vllm_name is None:
                continue
            yield vllm_name, tensor
            if self.needs_output_matrix and vllm_name.endswith("embed_tokens.weight"):
                yield "lm_head.weight", tensor

    def load_model(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load the weights into vLLM's model in the way that works on this device."""
        if self.device_type == "cuda" and self.can_load_in_place():
            if self.fp8_weights:
                weights = self.fp8_weights.write(weights)

            # This copies in place, and is ten times as fast as reload_weights.
            def load_in_place(model) -> None:
                model.load_weights(weights)

            self.llm.apply_model(load_in_place)
            return
        if self.device_type == "cpu":
            self.llm.apply_model(cpu.forget_packed_experts)
        # On a CPU, vLLM packs linear layers after loading; reload_weights packs them again. It also
        # quantizes them again, into the same memory.
        recorded = self.recorded_shapes(weights)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": recorded})

    def can_load_in_place(self) -> bool:
        """Return whether vLLM can load weights without rebuilding its layers.

        If vLLM quantizes the weights, the first update cannot do this. The second one finds out
        where the weights belong, and later ones write them there.
        """
        if not self.is_quantized:
            return True
        if self.shapes and self.is_form_known and self.fp8_weights is None:
            try:
                (self.fp8_weights,) = self.llm.apply_model(
                    lambda model: Fp8Weights(model, self.shapes, torch.bfloat16)
                )
            except LayoutError as error:
                self.is_form_known = False
                print_once(f"rollout.quantization: {error}, so updates of its weights are slower")
        return self.fp8_weights is not None

    def recorded_shapes(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator:
        """Yield the weights. If vLLM quantizes them, remember their names and shapes."""
        for name, weight in weights:
            if self.is_quantized:
                self.shapes[name] = weight.shape
            yield name, weight

"""Statistics of modules' outputs over tokens alone, which are the same in every layout.

msprobe's statistics cover whole tensors on one rank. Those tensors depend on the layout: sequence
and context parallelism add padding, tensor parallelism divides or repeats elements. OutputRecorder
therefore records the outputs of forward passes a second time, without padding and without calls
that recompute activations. Records of several ranks and calls can then be pooled (layouts.py).
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

FILE = "outputs.json"
HEAD = "head"
WRAPPER = "hf."  # where the FSDP engine keeps a Hugging Face model
LAYER = re.compile(
    r"(?P<before>(?:.+\.)?(?:decoder|model)\.layers\.)(?P<number>\d+)(?P<after>\..+)?"
)


@dataclass(frozen=True)
class Statistics:
    """Statistics of a number of elements.

    Attributes:
        size: number of elements. If it is 0, the other numbers are 0.
    """

    size: int
    max: float = 0.0
    min: float = 0.0
    mean: float = 0.0
    rms: float = 0.0


@dataclass(frozen=True)
class OutputRecord:
    """An output of a module on one rank.

    Attributes:
        module: its name, with the layer's number in the whole model.
        index: the tensor's index among the module's outputs.
        first_layer: the number of the first layer in the rank's module (its pipeline chunk).
        calls: one entry per call. None: the output does not have one row per token.
    """

    module: str
    index: int
    first_layer: int
    calls: list[Statistics] | None


@dataclass(frozen=True)
class RankOutputs:
    """The outputs on one rank, in execution order.

    Attributes:
        world_size: number of ranks in the run.
        num_recomputed: number of calls that recomputed activations; they are not recorded.
    """

    world_size: int
    num_recomputed: int
    records: list[OutputRecord]


def read_outputs(folder: Path) -> RankOutputs | None:
    """Return the outputs in the folder of a rank's dump; None for a dump without them."""
    path = folder / FILE
    if not path.exists():
        return None
    content = json.loads(path.read_text())
    records = []
    for module, index, first_layer, calls in content["outputs"]:
        statistics = None if calls is None else [Statistics(*call) for call in calls]
        records.append(OutputRecord(module, index, first_layer, statistics))
    return RankOutputs(content["world_size"], content["num_recomputed"], records)


# -- recording -------------------------------------------------------------------------------------


class OutputRecorder:
    """Records the outputs of an engine's modules between start() and stop()."""

    def __init__(self, engine):
        """
        Args:
            engine: an engine with modules(), coordinates() and padding().
        """
        self.engine = engine
        self.tp_rank = 0
        self.tp_size = 1
        self.handles = []
        # (module, index, first layer) -> one [max, min, sum, sum of squares] and size per call.
        # None: a call had no row per token.
        self.calls: dict[tuple[str, int, int], list[tuple[Tensor, int]] | None] = {}
        self.num_recomputed = 0
        self.padding: Tensor | None = None
        self.has_padding = False

    def start(self) -> None:
        """Register hooks on all modules except those that contain decoder layers."""
        coordinates = self.engine.coordinates()
        self.tp_rank, self.tp_size = coordinates.get("tp", (0, 1))
        modules = self.engine.modules()
        first_layers = coordinates.get("first_layers", [0] * len(modules))
        for first_layer, root in zip(first_layers, modules, strict=True):
            containers = containers_of_layers(root)
            for name, module in root.named_modules():
                if name in containers or type(module).__name__.startswith("Identity"):
                    continue
                hook = partial(self._record, global_name(name, first_layer), first_layer)
                self.handles.append(module.register_forward_hook(hook))

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def write(self, path: Path) -> None:
        """Write the records as JSON; read_outputs() reads them."""
        outputs = [[*key, in_numbers(calls)] for key, calls in self.calls.items()]
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        content = {
            "world_size": world_size,
            "num_recomputed": self.num_recomputed,
            "outputs": outputs,
        }
        path.write_text(json.dumps(content))

    @torch.no_grad()
    def _record(self, name: str, first_layer: int, module: nn.Module, inputs, output) -> None:
        if is_in_backward():
            self.num_recomputed += 1
            return
        self._update_padding()
        for index, tensor in float_tensors(output):
            key = (name, index, first_layer)
            calls = self.calls.setdefault(key, [])
            rows = tensor if name == HEAD else self._tokens_of(tensor)
            if rows is None:
                self.calls[key] = None
            elif calls is not None:
                calls.append((statistics_of(rows), rows.numel()))

    def _update_padding(self) -> None:
        padding = self.engine.padding()
        if padding is not self.padding:
            self.padding = padding
            self.has_padding = padding is not None and bool(padding.any())

    def _tokens_of(self, tensor: Tensor) -> Tensor | None:
        """Return the elements that belong to tokens, or None if rows do not correspond to slots."""
        if self.padding is None:
            return tensor if tensor.dim() > 1 else None
        parts = [self.padding]
        if self.tp_size > 1:  # sequence parallelism divides the sequence between these ranks
            parts.append(self.padding.tensor_split(self.tp_size)[self.tp_rank])
        for part in parts:
            for mask in (part, part.T, part.flatten()):
                if tensor.dim() > mask.dim() and tensor.shape[: mask.dim()] == mask.shape:
                    return tensor[~mask] if self.has_padding else tensor
        return None


def containers_of_layers(root: nn.Module) -> set[str]:
    """Return the names of the modules that contain decoder layers.

    Their output is the output of their last part, which differs between pipeline stages.
    """
    containers = set()
    for name, _ in root.named_modules():
        match = LAYER.fullmatch(name)
        if match is None or match["after"]:
            continue
        while name:
            name = name.rpartition(".")[0]
            containers.add(name)
    return containers


def global_name(name: str, first_layer: int) -> str:
    """Return a module's name with the layer's number in the whole model."""
    name = name.removeprefix(WRAPPER)
    match = LAYER.fullmatch(name)
    if match is None:
        return name
    return f"{match['before']}{first_layer + int(match['number'])}{match['after'] or ''}"


def is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def float_tensors(output) -> list[tuple[int, Tensor]]:
    """Return the floating-point tensors in a module's output, with their indices.

    Megatron's modules may return a bias separately; it is added, as Hugging Face modules do.
    """
    if isinstance(output, Tensor):
        output = (output,)
    elif isinstance(output, Mapping):
        output = tuple(output.values())
    if not isinstance(output, Sequence):
        return []
    if len(output) == 2 and is_bias(output[1], output[0]):
        output = (output[0] + output[1],)
    indexed = [(i, tensor) for i, tensor in enumerate(output) if isinstance(tensor, Tensor)]
    return [(i, tensor) for i, tensor in indexed if tensor.is_floating_point() and tensor.dim()]


def is_bias(value, tensor) -> bool:
    are_tensors = isinstance(value, Tensor) and isinstance(tensor, Tensor)
    return are_tensors and tensor.dim() > 1 and value.shape == tensor.shape[-1:]


def statistics_of(rows: Tensor) -> Tensor:
    """Return [4] fp32 on the tensor's device: maximum, minimum, sum and sum of squares."""
    rows = rows.float()
    if not rows.numel():
        return rows.new_zeros(4)
    return torch.stack([rows.max(), rows.min(), rows.sum(), rows.square().sum()])


def in_numbers(calls: list[tuple[Tensor, int]] | None) -> list[list[float]] | None:
    """Return the fields of Statistics of each call."""
    if calls is None:
        return None
    values = torch.stack([tensor for tensor, _ in calls]).tolist()
    numbers = []
    for (largest, smallest, total, squares), (_, size) in zip(values, calls, strict=True):
        mean = total / max(size, 1)
        rms = math.sqrt(squares / max(size, 1))
        numbers.append([size, largest, smallest, mean, rms])
    return numbers

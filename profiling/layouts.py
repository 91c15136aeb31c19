"""Pairs the outputs of two runs whose ranks divide the model or the batch differently.

The records of OutputRecorder hold the outputs of forward passes without padding. An output is
pooled over the ranks that divide or repeat it; maximum, minimum, mean and root mean square of the
pooled elements do not depend on the layout. If both runs also divide the batch into the same
micro-batches, outputs are compared call by call; otherwise they are pooled over the whole stage.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction

from profiling.dumps import Coordinates, DumpedTensor, RankDump
from profiling.outputs import FILE, HEAD, LAYER, RankOutputs, Statistics, read_outputs

# Module -> its name in comparisons of two engines. Megatron fuses projections, and the norms before
# them. The projections of a Hugging Face model are pooled instead; norms that Megatron fuses have
# no equivalent. Both engines have the same head.
SAME_MODULE = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.final_layernorm": "model.norm",
    "self_attention": "self_attn",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "self_attention.linear_qkv": "self_attn.{q,k,v}_proj",
    "self_attn.q_proj": "self_attn.{q,k,v}_proj",
    "self_attn.k_proj": "self_attn.{q,k,v}_proj",
    "self_attn.v_proj": "self_attn.{q,k,v}_proj",
    "self_attn.qkv_proj": "self_attn.{q,k,v}_proj",
    "self_attention.linear_proj": "self_attn.o_proj",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": "mlp.{gate,up}_proj",
    "mlp.gate_proj": "mlp.{gate,up}_proj",
    "mlp.up_proj": "mlp.{gate,up}_proj",
    "mlp.gate_up_proj": "mlp.{gate,up}_proj",
    "mlp.linear_fc2": "mlp.down_proj",
}
SAME_IN_BOTH = {
    *("model.embed_tokens", "model.norm", "input_layernorm", "post_attention_layernorm"),
    *("self_attn", "self_attn.q_norm", "self_attn.k_norm", "self_attn.o_proj"),
    *("mlp", "mlp.down_proj", "", HEAD),
}
PART_OF_LAYER = re.compile(r"(?:decoder|model)\.layers\.(?P<number>\d+)\.?(?P<module>.*)")
OTHER_SIZES = "the runs have different numbers of elements"
NO_ROWS = "without a row for every token"


@dataclass(frozen=True)
class Call:
    """A call of a module: its number on a rank, and the rank's data- and context-parallel rank."""

    number: int
    dp_rank: int
    cp_rank: int


@dataclass(frozen=True)
class OutputKey:
    """An output in one call, or in all calls of the stage (None)."""

    call: Call | None
    module: str
    index: int


@dataclass
class Outputs:
    """The outputs of a run in one stage.

    Attributes:
        coordinates: of one of the ranks.
        statistics: by output, pooled over ranks; in execution order.
        sizes_of_head: the numbers of elements of the head's first output in each call.
        uncountable: modules with an output that does not have one row per token.
        own_names: module -> its name in this run's engine.
    """

    coordinates: Coordinates
    statistics: dict[OutputKey, Statistics] = field(default_factory=dict)
    sizes_of_head: dict[Call, set[int]] = field(default_factory=dict)
    uncountable: set[str] = field(default_factory=set)
    own_names: dict[str, str] = field(default_factory=dict)

    @property
    def modules(self) -> set[str]:
        return {key.module for key in self.statistics} | self.uncountable


@dataclass
class Matches:
    """The outputs of two runs, paired.

    Attributes:
        pairs: outputs that both runs have, in execution order, each with its index and call.
        before: for each pair, how many outputs before it could not be compared.
        left_out: reason -> the outputs that could not be compared.
        only_in_one: modules that only one run has.
        layers_left_out: numbers of layers of which no output was compared.
    """

    pairs: list[tuple[DumpedTensor, DumpedTensor, str]] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    only_in_one: list[str] = field(default_factory=list)
    layers_left_out: list[int] = field(default_factory=list)


# -- one run ---------------------------------------------------------------------------------------


def read_all(ranks: list[RankDump]) -> list[RankOutputs]:
    """Return the outputs of all ranks of a run.

    Raises:
        ValueError: ranks are missing, or their dumps hold no outputs.
    """
    outputs = [read_outputs(rank.folder) for rank in ranks]
    if None in outputs:
        raise ValueError(f"has a dump without {FILE}, of an older version: dump the step again")
    world_size = outputs[0].world_size
    if len(ranks) < world_size:
        raise ValueError(
            f"has dumps of only {len(ranks)} of {world_size} ranks: set profiler.ranks=all"
        )
    return outputs


def same_calls(a: Outputs, b: Outputs) -> bool:
    """Return whether both runs compute the same tokens in each call on each share of the batch.

    The head's outputs show this: they have no padding.
    """
    is_one_engine = a.coordinates.engine == b.coordinates.engine
    # The two engines divide sequences over context-parallel ranks differently.
    are_divided_equally = is_one_engine or a.coordinates.cp.size == b.coordinates.cp.size == 1
    return are_divided_equally and a.sizes_of_head == b.sizes_of_head


def gather(ranks: list[RankDump], rank_outputs: list[RankOutputs], translated: bool) -> Outputs:
    """Pool the outputs of all ranks, call by call.

    Args:
        ranks: all ranks of a run.
        rank_outputs: the outputs of each of them.
        translated: name modules as in SAME_MODULE, and leave the other modules out.
    """
    gathered = Outputs(ranks[0].coordinates)
    parts: dict[tuple[int, OutputKey], list[Statistics]] = {}
    for rank, outputs in zip(ranks, rank_outputs, strict=True):
        dp_rank, cp_rank = rank.coordinates.share
        for record in outputs.records:
            module = common_name(record.module) if translated else record.module
            if module is None or (translated and record.index and module != HEAD):
                continue
            gathered.own_names.setdefault(module, record.module)
            if record.calls is None:
                gathered.uncountable.add(module)
                continue
            for number, statistics in enumerate(record.calls):
                call = Call(number, dp_rank, cp_rank)
                key = OutputKey(call, module, record.index)
                parts.setdefault((record.first_layer, key), []).append(statistics)
                if module == HEAD and record.index == 0 and statistics.size:
                    gathered.sizes_of_head.setdefault(call, set()).add(statistics.size)
    in_model_order = sorted(parts, key=lambda place: place[0])
    for place in sorted(in_model_order, key=lambda place: call_order(place[1].call)):
        if place[1].module not in gathered.uncountable:
            gathered.statistics[place[1]] = pool(parts[place])
    return gathered


def call_order(call: Call) -> tuple[int, int, int]:
    return call.number, call.dp_rank, call.cp_rank


def common_name(module: str) -> str | None:
    """Return a module's name in comparisons of two engines; None if it has no equivalent."""
    layer = PART_OF_LAYER.fullmatch(module)
    prefix = f"model.layers.{layer['number']}." if layer else ""
    path = layer["module"] if layer else module
    name = SAME_MODULE.get(path, path)
    known = SAME_IN_BOTH | set(SAME_MODULE.values())
    is_known = name in known and (bool(layer) or name != "")
    return (prefix + name).rstrip(".") if is_known else None


def pool(parts: Iterable[Statistics]) -> Statistics:
    """Return the statistics of all elements together."""
    parts = [part for part in parts if part.size]
    if not parts:
        return Statistics(0)
    size = sum(part.size for part in parts)
    mean = sum(part.mean * part.size for part in parts) / size
    squares = sum(part.rms**2 * part.size for part in parts) / size
    return Statistics(
        size,
        max(part.max for part in parts),
        min(part.min for part in parts),
        mean,
        math.sqrt(squares),
    )


def over_calls(outputs: Outputs) -> dict[OutputKey, Statistics]:
    """Return the statistics of every output, pooled over all calls of the stage."""
    parts: dict[OutputKey, list[Statistics]] = {}
    for key, statistics in outputs.statistics.items():
        parts.setdefault(OutputKey(None, key.module, key.index), []).append(statistics)
    return {key: pool(calls) for key, calls in parts.items()}


# -- two runs --------------------------------------------------------------------------------------


def have_same_calls(a: RankDump, b: RankDump) -> bool:
    """Return whether the same rank of two runs called its modules for the same micro-batches.

    The head shows the number of tokens in each call; recomputation calls modules again. True if a
    dump holds no outputs.
    """
    outputs_a = read_outputs(a.folder)
    outputs_b = read_outputs(b.folder)
    if outputs_a is None or outputs_b is None:
        return True
    if outputs_a.num_recomputed != outputs_b.num_recomputed:
        return False
    return head_calls(outputs_a) == head_calls(outputs_b)


def head_calls(outputs: RankOutputs) -> list[list[int]]:
    """Return the numbers of elements in each call of the head, for each of its outputs."""
    sizes = []
    for record in outputs.records:
        if record.module == HEAD and record.calls:
            sizes.append([call.size for call in record.calls])
    return sizes


def match(a: Outputs, b: Outputs) -> Matches:
    """Pair the outputs of two runs."""
    statistics_a = a.statistics
    statistics_b = b.statistics
    if not same_calls(a, b):
        statistics_a = over_calls(a)
        statistics_b = over_calls(b)
    matches = Matches()
    common = a.modules & b.modules
    compared_modules = set()
    for key, x in statistics_a.items():
        if key.module not in common:
            continue
        y = statistics_b.get(key)
        if x.size == 0 and (y is None or y.size == 0):  # a micro-batch without tokens
            continue
        reason = reason_to_leave_out(x, y, a.coordinates, b.coordinates)
        if reason is not None:
            matches.left_out[reason] += 1
            continue
        compared_modules.add(key.module)
        matches.before.append(matches.left_out.total())
        place = describe(key, a.coordinates)
        matches.pairs.append((to_tensor(a, key.module, x), to_tensor(b, key.module, y), place))
    for key, y in statistics_b.items():
        if key.module in common and key not in statistics_a and y.size:
            matches.left_out[NO_ROWS] += 1
    ordered = [*a.own_names, *(name for name in b.own_names if name not in a.own_names)]
    matches.only_in_one = [name for name in ordered if name not in common]
    layers = layer_numbers(a.own_names.values()) | layer_numbers(b.own_names.values())
    matches.layers_left_out = sorted(layers - layer_numbers(compared_modules))
    return matches


def reason_to_leave_out(
    x: Statistics, y: Statistics | None, a: Coordinates, b: Coordinates
) -> str | None:
    """Return why two outputs cannot be compared, or None if they can.

    Tensor-parallel ranks may all hold the same elements, so that one run may have several times as
    many elements.
    """
    if y is None:
        return NO_ROWS
    if x.size == y.size:
        return None
    if not (x.size and y.size):
        return OTHER_SIZES
    ratio = Fraction(x.size, y.size)
    is_repeated = a.tp.size % ratio.numerator == 0 and b.tp.size % ratio.denominator == 0
    return None if is_repeated else OTHER_SIZES


def describe(key: OutputKey, coordinates: Coordinates) -> str:
    """Return the output's index and call for messages."""
    words = [f"output {key.index}"]
    if key.call is None:
        words.append("all calls")
    else:
        words.append(f"call {key.call.number}")
        if coordinates.dp.size > 1:
            words.append(f"data-parallel rank {key.call.dp_rank}")
        if coordinates.cp.size > 1:
            words.append(f"context-parallel rank {key.call.cp_rank}")
    return ", ".join(words)


def to_tensor(run: Outputs, module: str, statistics: Statistics) -> DumpedTensor:
    """Return pooled statistics in the form of a dumped tensor, for the report."""
    name = module if "{" in module else run.own_names[module]
    values = {
        "max": statistics.max,
        "min": statistics.min,
        "mean": statistics.mean,
        "rms": statistics.rms,
    }
    return DumpedTensor(name, [statistics.size], "", values, None)


def layer_numbers(names: Iterable[str]) -> set[int]:
    return {int(match["number"]) for match in map(LAYER.fullmatch, names) if match}

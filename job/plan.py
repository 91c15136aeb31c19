"""The plan that dry_run=true prints: configuration, layout, steps, and estimated memory."""

import math
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from common import disk
from common.counting import count_of
from config import without_secrets
from data.columns import REASONS_FOR_UNUSED_ROWS
from data.preview import NUM_ROWS, preview_dataset
from engines.model.model_files import is_only_described
from engines.teacher_settings import is_frozen
from job.memory_plan import VALUE_ROLES
from job.run import Run


def print_plan(run: Run, roles: dict[str | None, DictConfig]) -> None:
    """Print the plan of a run. Called by rank 0.

    Args:
        roles: the configuration of each engine, by role. If the run has only one engine, its role
            is None.
    """
    config = next(iter(roles.values()))
    print(OmegaConf.to_yaml(without_secrets(run.named_config)))
    print(f"layout: {run.hardware.describe()} = {layout(config, run.world_size)}")
    for name, dataset in (("train", run.train), ("val", run.val)):
        if dataset:
            print(f"{name}: {describe_rows(dataset.stats)}")
    print("the first rows, with the trained tokens highlighted:")
    for line in preview_dataset(run.train, run.chat_tokenizer(), NUM_ROWS):
        print(line)
    origin = f", continuing from {run.resume_from}" if run.resume_from else ""
    print(f"steps: {run.total_steps}{origin}")
    for role, settings in roles.items():
        print_memory(settings, run, role)
        if is_only_described(settings):
            print(
                f"weights: {settings.model.path} has none, so this plan follows from config.json "
                "and cannot check the files"
            )
    if "rollout" in config:
        print_rollout(config, run)
    if run.hardware.device_bytes:
        answer = "may run out of memory" if run.memory_plan.warnings() else "fits"
        print(f"this run {answer}: {run.memory_plan.describe()}")


def describe_rows(stats: dict) -> str:
    """Describe the rows of a data set.

    Rows that are cut or not used are left out: see data.columns.unused_row_lines().

    Args:
        stats: their counts, as tokenization.write_arrays() describes them.
    """
    counts = dict(stats)
    text = f"{count_of(counts.pop('rows'), 'row')} with {count_of(counts.pop('tokens'), 'token')}"
    if "loss_tokens" in counts:
        text += f", {counts.pop('loss_tokens'):,} of them trained"
    text += f"; the longest row has {count_of(counts.pop('max_length'), 'token')}"
    for name, count in counts.items():
        is_reported_elsewhere = name in REASONS_FOR_UNUSED_ROWS
        if count and not is_reported_elsewhere:
            text += f"; {name.replace('_', ' ')}: {count:,}"
    return text


def layout(config, world_size: int) -> str:
    """Describe the parallel layout of the ranks."""
    engine = config.engine
    sizes = {
        "tensor": engine.get("tensor_model_parallel_size", 1),
        "context": engine.get("context_parallel_size", 1),
        "pipeline": engine.get("pipeline_model_parallel_size", 1),
    }
    is_dynamic = sizes["context"] == "auto"
    if is_dynamic:
        sizes["context"] = 1
    data_parallel_size = world_size // math.prod(sizes.values())
    factors = [f"{data_parallel_size} data-parallel"]
    factors += [f"{size} {name}-parallel" for name, size in sizes.items() if size > 1]
    text = " x ".join(factors)
    if is_dynamic:
        text += ", which share long sequences"
    num_expert_ranks = engine.get("expert_model_parallel_size", 1)
    if num_expert_ranks > 1:
        text += f"; experts divided by {num_expert_ranks} within a pipeline stage"
    if "rollout" not in config:
        return text
    tensor_size = config.rollout.tensor_parallel_size
    num_replicas = world_size // tensor_size
    return f"{text} to train, {num_replicas} vLLM x {tensor_size} tensor-parallel to generate"


def print_memory(config, run: Run, role: str | None) -> None:
    """Print the estimated memory of one rank in GiB, and the size of a checkpoint."""
    from engines.build import engine_class
    from engines.heads import Head
    from engines.memory import GIB

    engine = engine_class(config.model_engine)
    head = Head.VALUES if role in VALUE_ROLES else Head.LOG_PROBS
    is_trained = not is_frozen(role)
    estimates = engine.estimate_memory(
        config, run.world_size, run.hardware.device_type, head, is_trained
    )
    stages = [estimate.rows() for estimate in estimates]
    at_peak = " at the end of the backward pass" if estimates[0].is_after_backward else ""
    for_role = f" for the {role}" if role else ""
    for_stages = " for each pipeline stage" if len(stages) > 1 else ""
    print(
        f"memory of one rank{for_role} [GiB], estimated{at_peak}{for_stages}, "
        f"with {config.data.max_tokens_per_micro_batch:,} tokens in a micro-batch:"
    )
    for name in stages[0]:
        columns = [f"{stage[name] / GIB:9.2f}" for stage in stages]
        print(f"  {name:<30}{''.join(columns)}")
    if not is_trained:
        return
    of_role = f" of the {role}" if role else ""
    size = disk.format_bytes(engine.checkpoint_bytes(config, head))
    free = disk.format_bytes(disk.free(Path(config.output_dir)))
    print(f"checkpoint{of_role}: {size}; {free} are free in {config.output_dir}")


def print_rollout(config, run: Run) -> None:
    """Print vLLM's memory, its number of concurrent responses, and whose frozen weights it uses."""
    from engines.memory import GIB
    from rollout.vllm import adapters, capacity, routing

    device_bytes = run.hardware.device_bytes
    num_sequences = capacity.max_num_seqs(config, run.world_size, device_bytes)
    decodes = f"it decodes {num_sequences} responses at once"
    if device_bytes:
        awake = capacity.AwakeMemory.of(config, device_bytes)
        print(f"vLLM while awake: {awake.describe()}; {decodes}")
        print(f"vLLM while asleep, and CUDA: about {capacity.ASLEEP_BYTES / GIB:.0f} GiB")
    else:
        kv_cache_gib = config.rollout.kv_cache_gib or capacity.CPU_KV_CACHE_GIB
        print(f"vLLM's KV cache: {kv_cache_gib} GiB; {decodes}")
    if config.rollout.routing_replay:
        print(routing.describe_memory(config, run.world_size))
    if not adapters.has_separate_adapter(config):
        return
    if adapters.shares_base(config, run.world_size):
        print("frozen weights: vLLM uses the trainer's own")
    else:
        reason = adapters.sharing_obstacle(config, run.world_size) or "rollout.share_base=never"
        print(f"frozen weights: vLLM has a copy, because {reason}")

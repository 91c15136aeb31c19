"""Steps of a run's setup: directories, CPUs, heartbeat, profiler, and the number of steps."""

import os
import shutil
from pathlib import Path

from common import disk
from config import InputError, without_secrets
from configs.environment import is_rank0


def cache_directory(config) -> Path:
    """Return the directory of tokenized data."""
    return Path(config.data.cache_dir or Path.home() / ".cache" / "rankwise")


def check_directories(config) -> None:
    """Raise InputError if ranks cannot share the directories, or another run uses output_dir.

    Called by all ranks, before anything is loaded.
    """
    from job import output

    output_dir = Path(config.output_dir)
    output.check_shared(output_dir, "output_dir")
    output.check_shared(cache_directory(config), "data.cache_dir")
    if not config.dry_run:
        output.claim(output_dir)


def check_validation(config) -> None:
    """Raise InputError for settings of the validation that contradict each other or do nothing."""
    from data.selection import ALL, validation_rows

    data = config.data
    if data.val_files is not None and data.val_size:
        raise InputError(
            f"data.val_files={data.val_files} and data.val_size={data.val_size} both choose the "
            "rows to validate: leave one of them out"
        )
    if validation_rows(data) is not None:
        return
    unused = []
    if config.trainer.test_freq > 0:
        unused.append(f"trainer.test_freq={config.trainer.test_freq}")
    if data.val_max_samples != ALL:
        unused.append(f"data.val_max_samples={data.val_max_samples}")
    if unused:
        raise InputError(
            f"{', '.join(unused)} does nothing without data.val_files or data.val_size: set one of "
            "these, or leave it out"
        )


def check_names(config) -> None:
    """Raise InputError for a name that only wandb reads, if it is not among the loggers."""
    from config import CONFIGS
    from configs.files import SCRIPTS, read_defaults

    if "wandb" in config.trainer.logger:
        return
    defaults = [read_defaults(CONFIGS / f"{script}.yaml").trainer for script in SCRIPTS]
    for key in ("project_name", "experiment_name"):
        value = config.trainer[key]
        if value not in [trainer[key] for trainer in defaults]:
            raise InputError(
                f"trainer.{key}={value} has no effect without wandb in trainer.logger: add wandb, "
                f"or leave out trainer.{key}"
            )


def write_config(config) -> None:
    """Write config.yaml, without secrets, to the output directory."""
    from omegaconf import OmegaConf

    path = Path(config.output_dir) / "config.yaml"
    with disk.writing(path):
        OmegaConf.save(without_secrets(config), path)


def start_heartbeat(config):
    """Start watching for ranks that hang or have gone, and return the Heartbeat.

    Called by all ranks. Returns None in a dry run.
    """
    import torch.distributed as dist

    from engines.parallel import device
    from job.heartbeat import Heartbeat

    if config.dry_run:
        return None
    directory = Path(config.output_dir) / "heartbeat"
    # Delete the records of an earlier run: its ranks would seem to hang.
    device.on_rank0(shutil.rmtree, directory, True)
    with disk.writing(directory):
        return Heartbeat(
            directory,
            dist.get_rank(),
            int(os.environ.get("LOCAL_RANK", 0)),
            config.trainer.timeout_minutes,
            device.seconds_in_collective,
        )


def bind_cpus(config, device) -> None:
    """Keep this rank on the CPUs near its accelerator, if trainer.numa_affinity is true."""
    import torch.distributed as dist

    from engines.parallel import affinity

    if config.trainer.numa_affinity and device.type != "cpu":
        print(f"rank {dist.get_rank()}: {affinity.bind(device)}", flush=True)


def count_steps(config, train) -> tuple[int, int]:
    """Return the steps per epoch and the total steps for this training set."""
    batch_size = config.data.train_batch_size
    steps_per_epoch = len(train) // batch_size
    if steps_per_epoch == 0:
        raise InputError(
            f"data.train_batch_size={batch_size} is more than the {len(train)} rows of "
            f"{config.data.train_files}: lower it"
        )
    if config.trainer.total_steps > 0:
        warn_of_unused_epochs(config.trainer, steps_per_epoch)
        return steps_per_epoch, config.trainer.total_steps
    return steps_per_epoch, config.trainer.total_epochs * steps_per_epoch


def warn_of_unused_epochs(trainer, steps_per_epoch: int) -> None:
    """Warn on rank 0 if trainer.total_epochs is set, but trainer.total_steps chooses another end.

    This is no error: a command often shortens the run of a YAML file with total_steps.
    """
    from config import defaults

    epochs = trainer.total_epochs
    steps_of_epochs = epochs * steps_per_epoch
    is_set = epochs != defaults("trainer").total_epochs
    is_unused = is_set and steps_of_epochs != trainer.total_steps
    if is_unused and is_rank0():
        print(
            f"warning: trainer.total_epochs={epochs} ({steps_of_epochs:,} steps) is not used, "
            f"because trainer.total_steps={trainer.total_steps} is set: leave out one of them",
            flush=True,
        )


def check_tool_settings(config) -> None:
    """Raise InputError for changed settings of a tool that profiler.tool does not name.

    profiler.synchronize has an effect without a tool.
    """
    from config import defaults
    from configs.files import flatten
    from profiling import tool_names

    names = tool_names(config.profiler)
    unchanged = flatten(defaults("profiler"))
    for key, value in flatten(config.profiler).items():
        if value == unchanged[key] or key in ("tool", "synchronize"):
            continue
        tool, is_of_one_tool, _ = key.partition(".")
        has_effect = tool in names if is_of_one_tool else len(names) > 0
        if not has_effect:
            needed = f"profiler.tool={tool}" if is_of_one_tool else "profiler.tool"
            raise InputError(f"profiler.{key}={value} does nothing without {needed}: set it, too")


def start_profiler(config, device, total_steps: int, model_stages: list[str]):
    """Return a Profiler for the settings in `profiler` and trainer.profile_interval.

    Args:
        model_stages: the stages of this run in which a model computes; msprobe can dump these.
    """
    from profiling import OFF, Profiler, tool_names

    tool = config.profiler.tool
    check_tool_settings(config)
    try:
        profiler = Profiler(
            config.profiler,
            config.trainer.profile_interval,
            Path(config.output_dir) / "profile",
            total_steps,
            model_stages,
        )
    except ValueError as error:
        raise InputError(str(error)) from None
    if profiler.interval == OFF and tool and is_rank0():
        print(
            "profiler.tool records nothing: trainer.profile_interval=[-1, -1] selects no steps",
            flush=True,
        )
    compiling_values = ("always", "auto") if device.type == "cuda" else ("always",)
    is_compiled = config.engine.get("torch_compile") in compiling_values
    if is_compiled and "msprobe" in tool_names(config.profiler):
        raise InputError(
            "profiler.tool=msprobe sees nothing in compiled layers: set engine.torch_compile=never"
        )
    return profiler


def check_skipped(trainer, skipped: int, updates: int, is_last: bool) -> None:
    """Raise InputError if too many updates, or all of them, had gradients that were not finite.

    Args:
        skipped: number of updates that were skipped, out of `updates`.
        is_last: whether this was the last step.
    """
    has_learned_nothing = is_last and 0 < skipped == updates
    if skipped > trainer.max_skipped_steps or has_learned_nothing:
        raise InputError(
            f"the gradient was not finite in {skipped} of {updates} updates "
            f"(trainer.max_skipped_steps={trainer.max_skipped_steps}): lower optim.lr, or look at "
            "the data and the rewards"
        )

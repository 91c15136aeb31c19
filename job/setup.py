"""What every training script does around its loop: find the model, resume a run, stop when asked."""

import math
import os
import shutil
import signal
import time
from pathlib import Path

from common import disk
from config import InputError, without_secrets


def with_local_model(config):
    """The configuration with a directory for every model: a name on the hub is downloaded, or found in the cache."""
    from huggingface_hub import snapshot_download
    from omegaconf import OmegaConf

    paths = {}
    for role in ("model", "critic", "reference"):
        path = config[role].path if role in config else None
        if path is None or Path(path).is_dir():
            continue
        try:
            if path.startswith((".", "/", "~")):
                raise FileNotFoundError("no such directory")
            paths[role] = {
                "path": snapshot_download(
                    path,
                    allow_patterns=[
                        "*.json",
                        "*.safetensors",
                        "*.model",
                        "*.txt",
                        "*.jinja",
                        "*.py",
                    ],
                )
            }
        except (OSError, ValueError, RuntimeError) as error:  # the hub's errors are of these kinds
            raise InputError(
                f"{role}.path={path} is neither a directory nor a model on the hub: "
                f"{str(error).splitlines()[0]}"
            ) from None
    return OmegaConf.merge(config, paths)


def load_tokenizer(config):
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"no tokenizer from model.path={config.model.path}: {error}") from None
    if config.data.chat_template is not None:
        try:
            tokenizer.chat_template = Path(config.data.chat_template).read_text()
        except OSError as error:
            raise InputError(
                f"data.chat_template={config.data.chat_template}: {error.strerror}"
            ) from None
    return tokenizer


def load_reader(config, tokenizer):
    """What reads images, with model.images; else None. Raises InputError for a critic or a reference that reads them in another
    way, since it is handed the actor's tokens."""
    if not config.model.images:
        if config.data.drop_processor_keys:
            raise InputError(
                "data.drop_processor_keys does nothing with model.images=false: set model.images=true"
            )
        return None
    from data.images.processor import Reader

    reader = Reader(config.model.path, tokenizer, config.data.drop_processor_keys)
    for role in ("critic", "reference"):
        path = config[role].path if role in config else None
        if (
            path
            and path != config.model.path
            and not reader.reads_as(Reader(path, dropped=config.data.drop_processor_keys))
        ):
            raise InputError(
                f"{role}.path={path} reads an image in another way than model.path={config.model.path}: give both the "
                "same processor"
            )
    tokenizer.chat_template = (
        tokenizer.chat_template or reader.processor.chat_template
    )  # which older models have apart
    return reader


def count_steps(config, train) -> tuple[int, int]:
    """(steps per epoch, steps in all)"""
    steps_per_epoch = len(train) // config.data.train_batch_size
    if steps_per_epoch == 0:
        raise InputError(
            f"data.train_batch_size={config.data.train_batch_size} is more than the {len(train)} rows of "
            f"{config.data.train_files}: lower it"
        )
    steps = config.trainer.total_steps
    return steps_per_epoch, steps if steps > 0 else config.trainer.total_epochs * steps_per_epoch


def cache_directory(config) -> Path:
    """Where tokenized data is kept."""
    return Path(config.data.cache_dir or Path.home() / ".cache" / "rankwise")


def check_directories(config) -> None:
    """Raise InputError for directories that ranks cannot share, or that another run writes to. Called by all ranks, before
    anything is loaded."""
    from job import output

    output.check_shared(Path(config.output_dir), "output_dir")
    output.check_shared(cache_directory(config), "data.cache_dir")
    if not config.dry_run:
        output.claim(Path(config.output_dir))


def write_config(config) -> None:
    from omegaconf import OmegaConf

    path = Path(config.output_dir) / "config.yaml"
    with disk.writing(path):
        OmegaConf.save(without_secrets(config), path)


def identity(config, hf_config, train) -> dict:
    """What must not change between a checkpoint and its resume: step k's rows follow from it, and the weights' shapes. Of
    adapters, the frozen weights too, which a checkpoint does not hold; rank 0 reads them."""
    from engines.model import mtp
    from engines.model.weights import fingerprint
    from engines.parallel.device import on_rank0

    lora = config.model.lora
    adapted = {
        "model.lora": "none",
        "model.mtp.enable_train": mtp.is_trained(config),
        "model.freeze": list(config.model.freeze),
    }
    if lora.rank:
        adapted |= {
            "model.lora": f"rank {lora.rank}, alpha {lora.alpha}, on {lora.target_modules} without {lora.exclude_modules}",
            "frozen weights": on_rank0(fingerprint, Path(config.model.path)),
        }
        if "critic" in config and config.critic.path:
            adapted["frozen weights of the critic"] = on_rank0(
                fingerprint, Path(config.critic.path)
            )
    return adapted | {
        "model_engine": config.model_engine,
        "data.train_batch_size": config.data.train_batch_size,
        "trainer.seed": config.trainer.seed,
        "optim.name": config.optim.name,
        "data.train_files": f"{train.name[:16]} (a hash of data, tokenizer and their options)",
        "the model": f"{hf_config.model_type} of {hf_config.num_hidden_layers} layers of {hf_config.hidden_size}",
    }


def adapter(config) -> dict | None:
    """What an export needs to know of adapters, besides them."""
    from omegaconf import OmegaConf

    if config.model.lora.rank:
        return OmegaConf.to_container(config.model.lora) | {
            "base": str(Path(config.model.path).absolute())
        }


# Of what identifies a run, trainer.resume_override may name these: the rest is what the weights are.
OVERRIDABLE = (
    "data.train_batch_size",
    "data.train_files",
    "trainer.seed",
    "rollout.n",
    "algorithm.adv_estimator",
)


def find_resume(config, latest: Path | None, fresh: dict, total_steps: int) -> Path | None:
    """The checkpoint to go on from, or None. latest: the newest one in output_dir; fresh: the progress of a new run.

    Raises InputError when the checkpoint does not fit this run: fresh["run"] must be what it was, except for the keys in
    trainer.resume_override.
    """
    from engines.checkpoint.checkpointer import read_progress

    resume, override = config.trainer.resume, list(config.trainer.resume_override)
    allowed = [key for key in OVERRIDABLE if key in fresh["run"]]
    for key in override:
        if key not in allowed:
            raise InputError(
                f"trainer.resume_override names {key}: only {', '.join(allowed)} can change in a run"
            )
    if latest is not None and resume == "never":
        raise InputError(
            f"trainer.resume=never, but {latest} is there: set trainer.resume=auto to go on from it, or "
            "another output_dir to keep it"
        )
    path = latest or (Path(resume) if resume not in ("auto", "never") else None)
    if path is None:
        if override:
            raise InputError(
                "trainer.resume_override has no checkpoint to go on from: set trainer.resume to its path"
            )
        return None
    if not (path / "trainer.json").is_file():
        raise InputError(
            f"trainer.resume={resume} is neither auto, never, nor a checkpoint directory"
        )
    progress = read_progress(path)
    adapter_path = config.model.lora.adapter_path
    if adapter_path and adapter_path != (progress.get("lora") or {}).get("adapter_path"):
        raise InputError(
            f"model.lora.adapter_path={adapter_path} is where a run begins, and {path} has adapters of its own: "
            "leave it out, or start anew in another output_dir"
        )
    saved, run = progress["run"], fresh["run"]
    if (
        config.model_engine == "megatron"
    ):  # whose weights have that dtype, with fp32 masters or without
        saved, run = (
            {
                **x["run"],
                "engine.compute_dtype": x["export_dtype"],
                "model.lora.dtype": (x.get("lora") or {}).get("dtype"),
            }
            for x in (progress, fresh)
        )
    saved.setdefault("optim.name", "adamw")  # older checkpoints do not name these
    saved.setdefault("model.lora", "none")
    saved.setdefault("model.mtp.enable_train", False)
    saved.setdefault("model.freeze", [])
    saved.setdefault("critic", saved.get("algorithm.adv_estimator") == "gae")
    changed = [key for key, value in run.items() if saved.get(key) != value]
    for key in changed:
        said = f"{path} was written with {key}={saved.get(key)}, now it is {run[key]}"
        if key not in override:
            raise InputError(
                f"{said}: set it back, {'name it in trainer.resume_override, ' * (key in allowed)}"
                "or start anew in another output_dir"
            )
        print(f"{said}, as trainer.resume_override allows", flush=True)
    if changed and progress["step"] >= total_steps:
        raise InputError(
            f"{path} is of step {progress['step']}, and this run has {total_steps} steps: raise "
            "trainer.total_epochs or set trainer.total_steps"
        )
    return path


def bind_cpus(config, device) -> None:
    """Keep this rank on the CPUs near its accelerator if trainer.numa_affinity says so, and print what was done."""
    import torch.distributed as dist

    from engines.parallel import affinity

    if config.trainer.numa_affinity and device.type != "cpu":
        print(f"rank {dist.get_rank()}: {affinity.bind(device)}", flush=True)


def start_profiler(config, device, total_steps: int, model_stages: list[str]):
    """The Profiler that `profiler` and trainer.profile_interval ask for. model_stages: the stages of this run in which a
    model computes, which msprobe can dump."""
    from profiling import OFF, Profiler

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
    if profiler.interval == OFF and config.profiler.tool and int(os.environ.get("RANK", 0)) == 0:
        print("profiler.tool records nothing: trainer.profile_interval=[-1, -1] is off", flush=True)
    compiled = ("always", "auto") if device.type == "cuda" else ("always",)
    if "msprobe" in (config.profiler.tool or ()) and config.engine.get("torch_compile") in compiled:
        raise InputError(
            "profiler.tool=msprobe sees nothing in compiled layers: set engine.torch_compile=never"
        )
    return profiler


def check_skipped(trainer, skipped: int, updates: int, last: bool) -> None:
    """Raise InputError where a model learns nothing: of so many of its updates these were skipped. last: there is no other step."""
    if skipped > trainer.max_skipped_steps or last and 0 < skipped == updates:
        raise InputError(
            f"the gradient was not finite in {skipped} of {updates} updates (trainer.max_skipped_steps="
            f"{trainer.max_skipped_steps}): lower optim.lr, or look at the data and the rewards"
        )


def tell_of_mtp(config, hf_config) -> None:
    """Say on rank 0 that layers for multi-token prediction are left as they are."""
    from engines.model import mtp

    number = mtp.num_layers(hf_config)
    if number and not mtp.is_trained(config) and int(os.environ.get("RANK", 0)) == 0:
        print(
            f"the model is built without its {number} MTP layer{'s' * (number > 1)} (model.mtp.enable_train=false): exports hold "
            "what the files of model.path have of them",
            flush=True,
        )


def warn_of_length(hf_config, longest: int) -> None:
    """Say on rank 0 that rows have positions for which the model was not made."""
    import torch.distributed as dist

    limit = getattr(hf_config, "max_position_embeddings", None)
    if limit is not None and longest > limit and dist.get_rank() == 0:
        print(
            f"warning: a row has {longest:,} tokens, more than the model's max_position_embeddings={limit:,}: lower "
            "data.max_length unless the model is meant to learn longer positions",
            flush=True,
        )


def start_heartbeat(config):
    """A watch over which ranks keep the others waiting, or are gone; None in a dry run. Called by all ranks."""
    import torch.distributed as dist

    from engines.parallel import device
    from job.heartbeat import Heartbeat

    if config.dry_run:
        return None
    directory = Path(config.output_dir) / "heartbeat"
    device.on_rank0(
        shutil.rmtree, directory, True
    )  # what an earlier run left: its ranks would seem to be waiting
    with disk.writing(directory):
        return Heartbeat(
            directory,
            dist.get_rank(),
            int(os.environ.get("LOCAL_RANK", 0)),
            config.trainer.timeout_minutes,
            device.seconds_in_collective,
        )


def print_plan(
    roles: dict, device, datasets: dict, total_steps: int, resume_from: Path | None
) -> None:
    """What dry_run shows. roles: the configuration of each engine by its name, which is None where there is only one."""
    import torch.distributed as dist
    from omegaconf import OmegaConf

    config, world = next(iter(roles.values())), dist.get_world_size()
    print(OmegaConf.to_yaml(without_secrets(config)))
    print(f"layout: {world} ranks on {device.type} = {layout(config, world)}")
    for name, dataset in datasets.items():
        if dataset:
            print(f"{name}: {', '.join(f'{k} {v:,}' for k, v in dataset.stats.items())}")
    print(f"steps: {total_steps}" + f", going on from {resume_from}" * bool(resume_from))
    for role, settings in roles.items():
        print_memory(settings, world, device.type, role)
    if "rollout" in config:
        from engines import memory
        from engines.parallel.device import capacity
        from rollout.vllm import adapters

        print(
            (
                f"vLLM while awake: {config.rollout.gpu_memory_utilization:.0%} of the device"
                if device.type != "cpu"
                else f"vLLM's KV cache: {config.rollout.kv_cache_gib or memory.CPU_KV_CACHE_GIB} GiB"
            )
            + f"; it decodes {memory.max_num_seqs(config, world, capacity(device))} responses at once"
        )
        if adapters.has_separate_adapter(config):
            reason = adapters.sharing_obstacle(config, world) or "rollout.share_base=never"
            print(
                "frozen weights: "
                + (
                    "vLLM uses the trainer's own"
                    if adapters.shares_base(config, world)
                    else f"vLLM has a copy, because {reason}"
                )
            )


def layout(config, world_size: int) -> str:
    """How the ranks are divided, in words."""
    sizes = {"tensor": "tensor_model", "context": "context", "pipeline": "pipeline_model"}
    sizes = {name: config.engine.get(f"{key}_parallel_size", 1) for name, key in sizes.items()}
    shared = sizes["context"] == "auto"
    sizes["context"] = 1 if shared else sizes["context"]
    data_parallel, experts = (
        world_size // math.prod(sizes.values()),
        config.engine.get("expert_model_parallel_size", 1),
    )
    text = " x ".join(
        [
            f"{data_parallel} data-parallel",
            *(f"{size} {name}-parallel" for name, size in sizes.items() if size > 1),
        ]
    )
    text += ", which share long sequences" * shared
    text += f"; experts divided by {experts} within a pipeline stage" * (experts > 1)
    if "rollout" not in config:
        return text
    tp = config.rollout.tensor_parallel_size
    return f"{text} to train, {world_size // tp} vLLM x {tp} tensor-parallel to generate"


def print_memory(config, world_size: int, device_type: str, role: str | None) -> None:
    """Print the estimated memory of one rank, and the size of a checkpoint. role: None if there is only one model."""
    from engines.memory import checkpoint_bytes, estimates

    stages = estimates(config, world_size, device_type, role or "actor")
    print(
        "memory of one rank"
        + f" for the {role}" * bool(role)
        + " [GiB], estimated"
        + " for each pipeline stage" * (len(stages) > 1)
        + ":"
    )
    for name in stages[0]:
        print(f"  {name:<30}" + "".join(f"{stage[name]:9.2f}" for stage in stages))
    if role != "reference":
        print(
            "checkpoint"
            + f" of the {role}" * bool(role)
            + f": {disk.amount(checkpoint_bytes(config, role or 'actor'))}; "
            f"{disk.amount(disk.free(Path(config.output_dir)))} are free in {config.output_dir}"
        )


class Agreement:
    """What the ranks agree on after each step: whether to stop, and whether to save.

    SIGTERM, SIGUSR1, SIGINT (Ctrl-C) or SIGHUP on any rank stops all of them after their step, with a checkpoint; before the
    first step, at once. A second Ctrl-C stops at once.
    """

    def __init__(self, save_freq: int, save_minutes: float, total_steps: int = 0):
        self.save_freq, self.save_seconds, self.total_steps = (
            save_freq,
            60 * save_minutes,
            total_steps,
        )
        self.received, self.stop, self.save, self.training, self.saved_at = (
            None,
            False,
            False,
            False,
            time.monotonic(),
        )
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, self._receive)

    def begin(self, total_steps: int) -> str:
        """From here on a signal waits for the step's end. Returns when checkpoints are saved, for people."""
        self.training, self.total_steps, self.saved_at = True, total_steps, time.monotonic()
        when = [f"every {self.save_freq} steps"] * (self.save_freq > 0) + [
            f"every {self.save_seconds / 60:g} minutes"
        ] * (self.save_seconds > 0)
        return f"checkpoints: {', '.join([*when, 'when asked to stop'])}, and after the last step"

    def _receive(self, number: int, _) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        # torchrun hands its own Ctrl-C on to ranks that had it from the terminal already.
        again = self.received is not None and number == signal.SIGINT and now - self.received > 2
        said = (
            f"{name}: stopped at once"
            if again or not self.training
            else f"{name}: a checkpoint will be saved after this step; a second Ctrl-C stops at once, without it"
        )
        if int(os.environ.get("RANK", 0)) == 0 and (again or self.received is None):
            os.write(2, f"\n{said}\n".encode())
        if again or not self.training:
            os._exit(128 + number)
        self.received = self.received or now

    def after(self, step: int, device) -> None:
        """Set stop and save, the same on all ranks. Called by all of them."""
        import torch
        import torch.distributed as dist

        # The time is rank 0's, since clocks of ranks differ.
        due = dist.get_rank() == 0 and 0 < self.save_seconds <= time.monotonic() - self.saved_at
        flags = torch.tensor([float(self.received is not None), float(due)], device=device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        self.stop, due = (bool(flag) for flag in flags.tolist())
        self.save = (
            due
            or self.stop
            or step == self.total_steps
            or self.save_freq > 0
            and step % self.save_freq == 0
        )
        if self.save:
            self.saved_at = time.monotonic()

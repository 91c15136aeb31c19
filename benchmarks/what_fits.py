"""Which settings make a model fit into a GPU's memory, by the estimates of dry_run.

    python -m benchmarks.what_fits                          the tables of docs/what_fits.md
    python -m benchmarks.what_fits Qwen/Qwen3-8B --gpus 2 --gib 79.2
    python -m benchmarks.what_fits path/to/model --gpus 4 --gib 44.4

The second form prints the settings for one model: a name in benchmarks/known_models.py, or a
directory with a config.json. It needs neither weights nor GPUs.

Settings are tried from the mildest to the slowest (see ladder()), and the first that fit are shown.
They fit if a run would start without a warning: if the estimate is at most 95 % of the memory.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from omegaconf import DictConfig, OmegaConf
from torch import nn

from benchmarks.harness import make_parser, print_header, print_row
from benchmarks.known_models import CONFIGS, write_config
from config import InputError, load
from engines.fsdp.sharded_memory import Setup, estimate_peak
from engines.fsdp.transforms import build_model
from engines.heads import Head
from engines.memory import GIB, Estimate
from engines.model.experts import experts_per_token
from engines.model.hf import read_hf_config
from job.hardware import Hardware
from job.memory_plan import FULL, MemoryPlan
from rollout.vllm.capacity import ASLEEP_BYTES, AwakeMemory, max_num_seqs

# Nominal memory [GB] -> the memory that torch reports [GiB]: the least of the common cards.
MEMORY = {
    24: 22.0,  # A10G: 22.0; L4: 22.0; RTX 3090 and 4090: 23.6
    48: 44.4,  # L40S: 44.4; RTX A6000: 47.5
    80: 79.1,  # A100: 79.1; H100: 79.2
    141: 139.7,  # H200: 139.8
}
NUM_GPUS = (1, 8)
TABLE = [name for name in CONFIGS if "VL" not in name and "gemma" not in name]
LORA = ["model.lora.rank=16"]
# In mixtures, experts cannot have adapters.
LORA_OF_MIXTURE = [*LORA, "model.lora.target_modules=[q_proj,k_proj,v_proj,o_proj]"]
# The fewest responses that vLLM has to decode at once: with fewer, generation would take too long.
LEAST_RESPONSES = 32
TOKENS = (16384, 8192, 4096)
CHUNKS = (2048, 512)
UTILIZATIONS = (0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class Step:
    """Settings of a run, and their short form in the tables.

    Attributes:
        settings: key=value pairs that differ from the defaults.
        short: the parts of the short form.
    """

    settings: tuple[str, ...] = ()
    short: tuple[str, ...] = ()

    def __add__(self, other: Self) -> "Step":
        return Step(self.settings + other.settings, self.short + other.short)


@dataclass(frozen=True)
class Fit:
    """The mildest settings that fit.

    Attributes:
        step: the settings.
        device_bytes: the estimate for one GPU while it trains.
        host_bytes: host memory for the parameters, gradients and optimizer of one GPU's rank.
    """

    step: Step
    device_bytes: float
    host_bytes: float

    def __str__(self) -> str:
        return f"{', '.join(self.step.short)}: **{self.device_bytes / GIB:.1f}**"


NOTHING = Step()
RECOMPUTE = Step(("engine.activation_checkpointing=true",), ("ckpt",))
BF16 = Step(("engine.param_dtype=bfloat16",), ("bf16",))
ON_HOST = Step(("engine.cpu_offload=true",), ("offload",))


# ---- settings, the mildest first ----


def ladder(method: "Method") -> Iterator[Step]:
    """Yield the settings for training that are tried, in this order.

    The weights are stored in fp32, then in bf16, then in host memory. For each of these, first try
    fewer tokens per micro-batch and fewer logits at once, which hardly cost any speed, and then the
    same with recomputed activations. bf16 is tried only if the weights are trained, and host memory
    only without vLLM, since GRPO offloads weights by its own settings.
    """
    storages = [NOTHING]
    if method.is_full:
        storages.append(BF16)
    if not method.has_rollout:
        storages.append(ON_HOST)
    for storage in storages:
        for recomputation in (NOTHING, RECOMPUTE):
            for tokens in TOKENS:
                for chunk in CHUNKS:
                    yield storage + recomputation + batch(tokens, chunk)


def batch(tokens: int, chunk: int) -> Step:
    """Return the settings for this many tokens in a micro-batch, and logits at once."""
    settings = []
    short = [f"{tokens // 1024}k"]
    if tokens != TOKENS[0]:
        settings.append(f"data.max_tokens_per_micro_batch={tokens}")
    if chunk != CHUNKS[0]:
        settings.append(f"engine.log_prob_chunk_size={chunk}")
        short.append("chunk")
    return Step(tuple(settings), tuple(short))


def rollouts(num_gpus: int, num_heads: int) -> Iterator[Step]:
    """Yield the settings for vLLM that are tried, in this order."""
    tensor_sizes = [size for size in (1, 2, 4, 8) if size <= num_gpus and num_heads % size == 0]
    for size in tensor_sizes:
        for utilization in UTILIZATIONS:
            settings = []
            short = []
            if utilization != UTILIZATIONS[0]:
                settings.append(f"rollout.gpu_memory_utilization={utilization}")
                short.append(f"vLLM {utilization:.0%}")
            if size > 1:
                settings.append(f"rollout.tensor_parallel_size={size}")
                short.append(f"TP {size}")
            yield Step(tuple(settings), tuple(short))


# ---- estimates ----


@dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes:
        is_full: whether all weights are trained; otherwise adapters are.
        has_rollout: whether vLLM takes part.
    """

    is_full: bool
    has_rollout: bool

    @property
    def role(self) -> str | None:
        return "actor" if self.has_rollout else None


@dataclass(frozen=True)
class Plan(MemoryPlan):
    """A memory plan of one role whose estimate is known."""

    known: Estimate

    def estimate(self, role: str | None, config: DictConfig) -> Estimate:
        return self.known


@dataclass
class Model:
    """One model. What is computed for it is kept, since many cells of the tables need it.

    Attributes:
        path: the directory of config.json.
        bases: configurations with the default settings, by method.
        built: models on the meta device.
        trainings: configurations and their estimates.
    """

    path: Path
    bases: dict = field(default_factory=dict)
    built: dict = field(default_factory=dict)
    trainings: dict = field(default_factory=dict)

    @property
    def shape(self):
        return read_hf_config(str(self.path)).get_text_config()

    @property
    def lora_settings(self) -> list[str]:
        return LORA_OF_MIXTURE if experts_per_token(self.shape) else LORA

    def configure(self, method: Method, settings: Iterable[str]) -> DictConfig:
        needed = [f"model.path={self.path}", "data.train_files=none", "dry_run=true"]
        adapters = [] if method.is_full else self.lora_settings
        defaults = "ppo.yaml" if method.has_rollout else "sft.yaml"
        return load(defaults, [*needed, *adapters, *settings])

    def base(self, method: Method) -> DictConfig:
        """Return the configuration without further settings."""
        if method not in self.bases:
            self.bases[method] = self.configure(method, [])
        return self.bases[method]

    def train(self, method: Method, num_gpus: int, step: Step) -> tuple[DictConfig, Estimate]:
        """Return the configuration of a training, and its estimate for one GPU."""
        key = (method, num_gpus, step)
        if key not in self.trainings:
            config = changed(self.base(method), step)
            hf = self.build(method, config)
            setup = Setup(config, num_gpus, "cuda", Head.LOG_PROBS, True, hf, self.shape)
            self.trainings[key] = (config, estimate_peak(setup))
        return self.trainings[key]

    def build(self, method: Method, config: DictConfig) -> nn.Module:
        """Build the model on the meta device. Of the ladder's settings, only bf16 changes it."""
        key = (method.is_full, config.engine.param_dtype)
        if key not in self.built:
            self.built[key], _ = build_model(config, Head.LOG_PROBS)
        return self.built[key]

    def find_fit(self, method: Method, hardware: Hardware) -> Fit | None:
        """Return the mildest settings that fit, or None if none of them do."""
        rollout = self.find_rollout(method, hardware) if method.has_rollout else NOTHING
        if rollout is None:
            return None
        for step in ladder(method):
            config, estimate = self.train(method, hardware.world_size, step)
            plan = Plan({method.role: changed(config, rollout)}, hardware, estimate)
            _, num_bytes = plan.largest()
            needed = max(num_bytes, plan.generation_bytes() if method.has_rollout else 0)
            if needed <= FULL * hardware.device_bytes:
                return Fit(step + rollout, num_bytes, host_bytes(estimate))
        return None

    def find_rollout(self, method: Method, hardware: Hardware) -> Step | None:
        """Return the mildest settings with which vLLM has room for LEAST_RESPONSES."""
        config = self.base(method)
        for step in rollouts(hardware.world_size, self.shape.num_attention_heads):
            candidate = changed(config, step)
            awake = AwakeMemory.of(candidate, hardware.device_bytes)
            num_seqs = max_num_seqs(candidate, hardware.world_size, hardware.device_bytes)
            fits = awake.total + ASLEEP_BYTES <= FULL * hardware.device_bytes
            if fits and not awake.problem and num_seqs >= LEAST_RESPONSES:
                return step
        return None


def changed(config: DictConfig, step: Step) -> DictConfig:
    """Return a configuration with other settings."""
    if not step.settings:
        return config
    return OmegaConf.merge(config, OmegaConf.from_dotlist(list(step.settings)))


def host_bytes(estimate: Estimate) -> float:
    """Return the bytes of host memory that one rank needs for tensors of the model."""
    if estimate.is_on_host:
        return estimate.parameters + estimate.gradients + estimate.optimizer
    return estimate.offloaded or 0


# ---- tables ----

METHODS = {
    "SFT of all weights": Method(is_full=True, has_rollout=False),
    "SFT with LoRA": Method(is_full=False, has_rollout=False),
    "GRPO of all weights": Method(is_full=True, has_rollout=True),
    "GRPO with LoRA": Method(is_full=False, has_rollout=True),
}


def print_tables(models: dict[str, Model], titles: Iterable[str] = METHODS) -> None:
    """Print two tables per method, for one GPU and for several, with a row per model."""
    for title in titles:
        method = METHODS[title]
        print(f"## {title}\n")
        for num_gpus in NUM_GPUS:
            gpus = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs, each"
            print_header(f"{gpus} of", *(f"{gb} GB" for gb in MEMORY))
            for name, model in models.items():
                cells = []
                for gib in MEMORY.values():
                    fit = model.find_fit(method, Hardware(num_gpus, "cuda", int(gib * GIB)))
                    cells.append(str(fit or "does not fit"))
                print_row(name.partition("/")[2], *cells)
            print()


def print_settings(model: Model, hardware: Hardware) -> None:
    """Print the settings for every method, in full."""
    for title, method in METHODS.items():
        fit = model.find_fit(method, hardware)
        if fit is None:
            print(f"{title}: does not fit")
            continue
        adapters = [] if method.is_full else model.lora_settings
        settings = [*adapters, *fit.step.settings]
        size = f"{fit.device_bytes / GIB:.1f} GiB on each GPU"
        if fit.host_bytes:
            size += f", and {fit.host_bytes / GIB:.1f} GiB of host memory per GPU"
        print(f"{title}: {size}\n    {' '.join(settings) or 'the defaults'}")


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("model", nargs="?", help="a name, or a directory with config.json")
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs")
    parser.add_argument("--gib", type=float, default=MEMORY[80], help="memory of each GPU [GiB]")
    return parser.parse_args()


def find_model(name: str, directory: Path) -> Path:
    """Return the directory of a model. That of a well-known one is made in `directory`.

    Exits with code 2 if there is no such model, or if transformers cannot read it.
    """
    if name in CONFIGS:
        return write_config(name, directory)
    try:
        read_hf_config(name)
    except InputError as error:
        print(f"error: {error}; or name one of {', '.join(CONFIGS)}", file=sys.stderr)
        sys.exit(2)
    return Path(name)


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as directory:
        if arguments.model is None:
            names = {name: write_config(name, Path(directory)) for name in TABLE}
            print_tables({name: Model(path) for name, path in names.items()})
            return
        path = find_model(arguments.model, Path(directory))
        hardware = Hardware(arguments.gpus, "cuda", int(arguments.gib * GIB))
        print_settings(Model(path), hardware)


if __name__ == "__main__":
    main()

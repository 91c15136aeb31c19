"""The device memory that a run needs, and the keys that lower it."""

from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from config import InputError
from engines.build import engine_class
from engines.heads import Head
from engines.memory import GIB, Estimate
from engines.model.lengths import longest_sequence
from engines.teacher_settings import is_frozen
from job.hardware import Hardware
from rollout.vllm import adapters
from rollout.vllm.capacity import ASLEEP_BYTES, AwakeMemory

# train_ppo.py has a frozen "reward model"; train_rm.py trains the "trained reward model".
VALUE_ROLES = ("critic", "reward model", "trained reward model")
FULL = 0.95  # share of the device above which a run is likely to run out of memory


@dataclass(frozen=True)
class Saving:
    """A change of the configuration that lowers the estimate.

    Attributes:
        setting: the change, as key=value.
        num_bytes: the estimated bytes that it saves on one rank.
    """

    setting: str
    num_bytes: float


@dataclass(frozen=True)
class MemoryPlan:
    """The estimated memory of one rank while each role of a run computes.

    Attributes:
        roles: the configuration of each engine, by role; the only role of SFT is None.
        hardware: the ranks and their devices. On CPUs, estimates are not compared with the memory.
    """

    roles: dict[str | None, DictConfig]
    hardware: Hardware

    @property
    def capacity(self) -> int:
        """The bytes of each device; 0 on a CPU."""
        return self.hardware.device_bytes

    @property
    def config(self) -> DictConfig:
        """The configuration of the first role, whose settings outside the engine are the run's."""
        return next(iter(self.roles.values()))

    @property
    def asleep_bytes(self) -> float:
        """The bytes that vLLM keeps on the device while a role computes."""
        has_vllm = "rollout" in self.config and self.hardware.device_type != "cpu"
        return ASLEEP_BYTES if has_vllm else 0

    def estimate(self, role: str | None, config: DictConfig) -> Estimate:
        """Return the estimate for the pipeline stage that needs the most memory."""
        stages = engine_class(config.model_engine).estimate_memory(
            config,
            self.hardware.world_size,
            self.hardware.device_type,
            Head.VALUES if role in VALUE_ROLES else Head.LOG_PROBS,
            not is_frozen(role),
        )
        return max(stages, key=lambda stage: stage.device_total)

    def largest(self) -> tuple[str | None, float]:
        """Return the role that needs the most memory when it computes, and the bytes in use then.

        These include the parameters and optimizer state of other roles that stay on the device, and
        the memory of vLLM, which sleeps.
        """
        estimates = {role: self.estimate(role, config) for role, config in self.roles.items()}
        resident = {role: resident_bytes(estimate) for role, estimate in estimates.items()}
        totals = {}
        for role, estimate in estimates.items():
            of_others = sum(resident.values()) - resident[role]
            totals[role] = estimate.device_total + of_others + self.asleep_bytes
        role = max(totals, key=totals.get)
        return role, totals[role]

    def generation_bytes(self) -> float:
        """Return the most bytes in use while vLLM receives weights and while it generates.

        The actor's parameters are on the device until vLLM has them.
        """
        actor = self.roles["actor"]
        awake = AwakeMemory.of(actor, self.capacity)
        estimates = {role: self.estimate(role, config) for role, config in self.roles.items()}
        resident = sum(resident_bytes(estimate) for estimate in estimates.values())
        receiving = awake.weights + parameters_on_device(estimates["actor"])
        generating = awake.total + resident
        if adapters.shares_base(actor, self.hardware.world_size):
            receiving = parameters_on_device(estimates["actor"])
            generating = max(awake.total, awake.total - awake.weights + resident)
        return max(receiving, generating) + self.asleep_bytes

    def warnings(self) -> list[str]:
        """Return a warning for each phase whose estimate exceeds FULL of the device.

        Raises:
            InputError: if the model's weights alone exceed vLLM's share of the device.
        """
        if not self.capacity:
            return []
        warnings = []
        _, num_bytes = self.largest()
        if num_bytes > FULL * self.capacity:
            warnings.append(
                f"warning: {self.describe()}: it may run out of memory. {self.advice()}"
            )
        if "rollout" in self.config:
            warnings += self.generation_warnings()
        return warnings

    def generation_warnings(self) -> list[str]:
        """Return a warning if memory may run out while vLLM is awake, or []."""
        awake = AwakeMemory.of(self.config, self.capacity)
        if awake.weights >= awake.total:
            raise InputError(awake.problem)
        if awake.problem:
            return [f"warning: {awake.problem}"]
        num_bytes = self.generation_bytes()
        if num_bytes <= FULL * self.capacity:
            return []
        key_of_vllm = awake.setting.partition("=")[0]
        settings = [f"{key_of_vllm} to a smaller value"]
        for key, is_offloaded in self.config.offload.items():
            if not is_offloaded:
                settings.append(f"offload.{key}=true")
        return [
            f"warning: generation needs about {num_bytes / GIB:.1f} GiB with the actor's weights, "
            f"and the device has {self.capacity / GIB:.1f} GiB: set {' or '.join(settings)}"
        ]

    def describe(self) -> str:
        """Describe the estimate and the device's memory."""
        role, num_bytes = self.largest()
        for_role = f" for the {role}" if role else ""
        return (
            f"training needs about {num_bytes / GIB:.1f} GiB{for_role}, by the estimate of "
            f"dry_run, and the device has {self.capacity / GIB:.1f} GiB"
        )

    def advice(self) -> str:
        """Name the settings that lower the memory, in the order of their effect."""
        settings = [
            f"{saving.setting} (saves about {saving.num_bytes / GIB:.1f} GiB)"
            for saving in self.savings()
        ]
        if "rollout" in self.config:
            utilization = self.config.rollout.gpu_memory_utilization
            settings.append(f"rollout.gpu_memory_utilization below {utilization:g}")
            kv_cache_gib = self.config.rollout.kv_cache_gib
            if kv_cache_gib is not None:
                settings.append(f"rollout.kv_cache_gib below {kv_cache_gib:g}")
        return f"To lower it, set {', '.join(settings)}, or use more ranks"

    def savings(self) -> list[Saving]:
        """Return the changes that lower the largest estimate, the most effective one first."""
        role, _ = self.largest()
        config = self.roles[role]
        before = self.estimate(role, config).device_total
        savings = []
        for key, value in candidates(config).items():
            changed = OmegaConf.merge(config, OmegaConf.from_dotlist([f"{key}={value}"]))
            saved = before - self.estimate(role, changed).device_total
            if saved > 0:
                savings.append(Saving(f"{key}={value}", saved))
        savings += self.offload_savings(role)
        return sorted(savings, key=lambda saving: -saving.num_bytes)

    def offload_savings(self, largest_role: str | None) -> list[Saving]:
        """Return the savings by moving other roles to host memory while this one computes."""
        savings: dict[str, float] = {}
        for role, config in self.roles.items():
            if role == largest_role or "offload" not in config:
                continue
            estimate = self.estimate(role, config)
            for part in ("parameters", "optimizer"):
                key = "reference" if is_frozen(role) else part
                if not config.offload[key]:
                    setting = f"offload.{key}=true"
                    savings[setting] = savings.get(setting, 0) + (getattr(estimate, part) or 0)
        return [Saving(setting, num_bytes) for setting, num_bytes in savings.items() if num_bytes]

    def explain(self, rank: int, stage: str, step: int | None) -> str:
        """Return the error for a rank that ran out of memory.

        Args:
            stage: the stage in which it ran out.
            step: the step, or None outside of steps.
        """
        of_step = f" of step {step}" if step is not None else ""
        return (
            f"rank {rank} ran out of device memory in stage {stage}{of_step}: {self.describe()}. "
            f"{self.advice()}"
        )


def resident_bytes(estimate: Estimate) -> float:
    """Return the bytes that a role keeps on the device while another one computes."""
    if estimate.is_on_host:
        return 0
    stored = estimate.parameters + (estimate.optimizer or 0)
    return stored - (estimate.offloaded or 0)


def parameters_on_device(estimate: Estimate) -> float:
    """Return the bytes of a role's parameters while it uses them; 0 if they are on the host."""
    return 0 if estimate.is_on_host else estimate.parameters


def candidates(config: DictConfig) -> dict[str, str]:
    """Return key -> value for settings that need less memory than the current ones."""
    engine = config.engine
    data = config.data
    longest, _ = longest_sequence(config)
    if "chosen_key" in config.data:
        longest *= 2  # the two answers of a pair stay together
    half = data.max_tokens_per_micro_batch // 2
    settings = {
        "data.max_tokens_per_micro_batch": str(max(half, longest)),
        "engine.log_prob_chunk_size": str(max(engine.log_prob_chunk_size // 4, 1)),
    }
    if engine.get("activation_checkpointing") is False:
        settings["engine.activation_checkpointing"] = "true"
    if engine.get("recompute") in ("none", "selective"):
        settings["engine.recompute"] = "full"
    if engine.get("float8_cache_weights"):
        settings["engine.float8_cache_weights"] = "false"  # cpu_offload does not go with it
    elif (
        engine.get("cpu_offload") is False
        and "offload" not in config
        and not engine.get("float8_all_gather")
    ):
        settings["engine.cpu_offload"] = "true"
    return settings

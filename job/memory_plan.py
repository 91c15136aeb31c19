"""The device memory that a run needs, and the keys that lower it."""

from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from engines.build import engine_class
from engines.heads import Head
from engines.memory import GIB, Estimate

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
        world_size: the number of ranks.
        device_type: for example "cuda".
        capacity: bytes of the device; 0 on a CPU, where nothing is compared with it.
    """

    roles: dict[str | None, DictConfig]
    world_size: int
    device_type: str
    capacity: int

    def estimate(self, role: str | None, config: DictConfig) -> Estimate:
        """Return the estimate for the pipeline stage that needs the most memory."""
        stages = engine_class(config.model_engine).estimate_memory(
            config,
            self.world_size,
            self.device_type,
            Head.VALUES if role == "critic" else Head.LOG_PROBS,
            role != "reference",
        )
        return max(stages, key=lambda stage: stage.device_total)

    def largest(self) -> tuple[str | None, float]:
        """Return the role that needs the most memory when it computes, and the bytes in use then.

        These include the parameters and optimizer state of other roles that stay on the device.
        """
        estimates = {role: self.estimate(role, config) for role, config in self.roles.items()}
        resident = {role: resident_bytes(estimate) for role, estimate in estimates.items()}
        totals = {}
        for role, estimate in estimates.items():
            of_others = sum(resident.values()) - resident[role]
            totals[role] = estimate.device_total + of_others
        role = max(totals, key=totals.get)
        return role, totals[role]

    def warning(self) -> str | None:
        """Return a warning if the estimate exceeds FULL of the device, or None."""
        if not self.capacity:
            return None
        _, num_bytes = self.largest()
        if num_bytes <= FULL * self.capacity:
            return None
        return f"warning: {self.describe()}: it may run out of memory. {self.advice()}"

    def describe(self) -> str:
        """Describe the estimate beside the device's memory."""
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
        config = next(iter(self.roles.values()))
        if "rollout" in config:
            utilization = config.rollout.gpu_memory_utilization
            settings.append(f"rollout.gpu_memory_utilization below {utilization:g}")
            if config.rollout.kv_cache_gib is not None:
                settings.append(f"rollout.kv_cache_gib below {config.rollout.kv_cache_gib:g}")
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
                key = "reference" if role == "reference" else part
                if not config.offload[key]:
                    setting = f"offload.{key}=true"
                    savings[setting] = savings.get(setting, 0) + (getattr(estimate, part) or 0)
        return [Saving(setting, num_bytes) for setting, num_bytes in savings.items() if num_bytes]

    def explain(self, rank: int, stage: str, step: int | None) -> str:
        """Return the error for a rank that ran out of memory.

        Args:
            stage: the stage of the step in which it did.
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


def candidates(config: DictConfig) -> dict[str, str]:
    """Return key -> value for settings that need less memory than the current ones."""
    engine = config.engine
    data = config.data
    longest = data.get("max_length") or data.max_prompt_length + config.rollout.max_tokens
    half = data.max_tokens_per_micro_batch // 2
    settings = {
        "data.max_tokens_per_micro_batch": str(max(half, longest)),
        "engine.log_prob_chunk_size": str(max(engine.log_prob_chunk_size // 4, 1)),
    }
    if engine.get("activation_checkpointing") is False:
        settings["engine.activation_checkpointing"] = "true"
    if engine.get("recompute") in ("none", "selective"):
        settings["engine.recompute"] = "full"
    if engine.get("cpu_offload") is False and "offload" not in config:
        settings["engine.cpu_offload"] = "true"
    return settings

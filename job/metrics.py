"""Metrics of a step of fine-tuning."""

from engines.parallel import device


def with_prefix(prefix: str, metrics: dict[str, float]) -> dict[str, float]:
    """Return metrics under names with a prefix; names that already have one keep it."""
    return {name if "/" in name else f"{prefix}/{name}": x for name, x in metrics.items()}


def throughput(run, tokens_per_second: float, flops_per_second: float) -> dict[str, float]:
    """Return the speed per device as metrics.

    Model FLOPs utilization (MFU) is left out if the device's peak is unknown.

    Args:
        tokens_per_second, flops_per_second: speed of all devices together.
    """
    metrics = {"perf/tokens_per_second": tokens_per_second / run.world_size}
    peak = device.peak_flops(run.device)
    if peak:
        metrics["perf/mfu"] = flops_per_second / run.world_size / peak
    return metrics

"""Change settings of this process before vLLM starts."""

import logging
import os
import sys
import warnings
from collections import defaultdict

import torch.distributed as dist
from omegaconf import DictConfig

from engines.model import mtp
from engines.model.experts import experts_per_token
from engines.model.hf import read_hf_config
from rollout.vllm import cpu, speculation
from rollout.vllm.arguments import Host, is_eager
from rollout.vllm.versions import SUPPORTED, SUPPORTED_NAMES


def quiet_vllm() -> None:
    """Make vLLM log only errors, unless the user has set a level. Call before importing vLLM."""
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # On a CPU, vLLM warns that Triton is disabled, before it reads the level.
    logging.getLogger("vllm.triton_utils").setLevel(level.upper())
    # It looks at all attributes of all modules, and torch warns about its deprecated one.
    warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is deprecated")


def prepare_process(config: DictConfig, host: Host, shares_base: bool) -> None:
    """Set environment variables, and replace code of vLLM, where vLLM has no argument for it.

    Raises:
        InputError: A drafter is configured, but not supported with this release of vLLM.
    """
    if host.is_cpu:
        prepare_cpu(config, shares_base)
    else:
        choose_model_runner(config, host)
    if not is_eager(config, host.device_type):
        print_graph_capture()
    if mtp.drafter(config):
        speculation.replace_samplers(config, host.vllm_version, host.device_type)
    if host.vllm_version not in SUPPORTED:
        warnings.warn(
            f"vLLM {host.vllm_version} is installed, but rollout/vllm/scheduler.py was tested only "
            f"with {SUPPORTED_NAMES}. vLLM's own scheduler is used instead, which takes up to "
            "three times as long for small models.",
            stacklevel=3,
        )
    elif host.device_type == "cuda":
        skip_ranks_of_tokens()


def prepare_cpu(config: DictConfig, shares_base: bool) -> None:
    """Apply the workarounds for vLLM's CPU build."""
    cpu.free_shared_memory(dist.get_rank(), config.rollout.tensor_parallel_size)
    cpu.skip_ranks_of_tokens()
    if shares_base:
        cpu.keep_plain_weights()


def choose_model_runner(config: DictConfig, host: Host) -> None:
    """Request the V2 model runner for mixtures of experts if vLLM does not use it by default."""
    release = SUPPORTED.get(host.vllm_version)
    if release is None or not release.has_optional_v2_runner_for_experts:
        return
    needs_v1_runner = mtp.drafter(config) in ("ngram", "suffix")
    text_config = read_hf_config(config.model.path).get_text_config()
    if experts_per_token(text_config) and not needs_v1_runner:
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")


def print_graph_capture() -> None:
    """Make vLLM print on rank 0 how much time and memory its CUDA graphs took."""
    if dist.get_rank() != 0:
        return
    # The modules of the V2 and of the V1 model runner.
    for name in ("gpu.model_runner", "gpu_model_runner"):
        handler = logging.StreamHandler(sys.stdout)
        handler.addFilter(lambda record: "Graph capturing finished" in record.msg)
        handler.setFormatter(logging.Formatter("vLLM: %(message)s"))
        logger = logging.getLogger(f"vllm.v1.worker.{name}")
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)


def skip_ranks_of_tokens() -> None:
    """Keep vLLM's CUDA sampler from computing each sampled token's rank by likelihood.

    These ranks are not used. Computing them reads all logits, and takes a third of the time for
    log-probabilities.
    """
    # vLLM-private: the sampler computes ranks along with log-probabilities; no option avoids it.
    from vllm.v1.worker.gpu.sample import logprob

    def do_nothing(*arguments, **options):
        return None

    # vLLM launches the kernel as `_ranks_kernel[grid](...)`.
    logprob._ranks_kernel = defaultdict(lambda: do_nothing)


def print_once(line: str) -> None:
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)

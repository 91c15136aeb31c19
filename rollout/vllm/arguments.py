"""The arguments of `vllm.LLM`, computed from the configuration. Nothing here changes any state."""

from dataclasses import dataclass

import torch.distributed as dist
from omegaconf import DictConfig
from transformers import AutoModelForCausalLM

from engines.model import mtp
from engines.model.experts import experts_per_token
from engines.model.hf import read_hf_config
from engines.model.quirks import RECURRENT_LAYER_TYPES
from engines.parallel.device import capacity
from rollout.vllm import adapters, image_prompts, speculation
from rollout.vllm.capacity import CPU_KV_CACHE_GIB, max_num_seqs
from rollout.vllm.sampling import NUM_TIES
from rollout.vllm.versions import SUPPORTED, installed_version

MAX_PREFILL_TOKENS = 8192  # tokens of prompts in one forward pass


@dataclass(frozen=True)
class Host:
    """The hardware and the vLLM release that a run uses.

    Attributes:
        world_size: The number of ranks of the run.
        device_type: "cpu", "cuda" or "npu".
        device_bytes: The device's memory; 0 for a CPU.
        vllm_version: The installed vLLM's version, as in `versions.SUPPORTED`.
    """

    world_size: int
    device_type: str
    device_bytes: int
    vllm_version: str

    @classmethod
    def current(cls, device) -> "Host":
        """Return the host of this rank. Needs the default process group; imports vLLM."""
        return cls(
            world_size=dist.get_world_size(),
            device_type=device.type,
            device_bytes=capacity(device),
            vllm_version=installed_version(),
        )

    @property
    def is_cpu(self) -> bool:
        return self.device_type == "cpu"


def engine_arguments(config: DictConfig, host: Host, shares_base: bool) -> dict:
    """Return the arguments of `vllm.LLM`.

    Args:
        shares_base: Whether the trainer's frozen weights are vLLM's own tensors.

    Raises:
        InputError: vLLM does not support adapters of this rank.
    """
    num_seqs = max_num_seqs(config, host.world_size, host.device_bytes)
    # vLLM for CPUs packs the output matrix. If it is tied to the embedding, an update would leave
    # old weights in the packed copy. So it is untied and also gets the embedding's weights, unless
    # it is the trainer's own tensor.
    hf_config = read_hf_config(config.model.path)
    is_tied = hf_config.tie_word_embeddings and shares_base
    arguments = model_arguments(config, is_tied)
    if adapters.has_separate_adapter(config):
        arguments |= adapters.adapter_arguments(config)
    arguments |= memory_arguments(config, host)
    arguments |= batch_arguments(config, num_seqs, arguments["max_model_len"])
    arguments |= graph_arguments(config, host, num_seqs)
    arguments |= architecture_limits(hf_config.get_text_config(), host)
    if mtp.drafter(config):
        arguments["speculative_config"] = speculation.drafter_arguments(config)
    elif host.vllm_version in SUPPORTED:
        from rollout.vllm.scheduler import ClosedBatchScheduler

        arguments["scheduler_cls"] = ClosedBatchScheduler
    return arguments | {
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": config.rollout.tensor_parallel_size,
        "load_format": "dummy",  # weights come from the trainer
    }


def model_arguments(config: DictConfig, is_tied: bool = False) -> dict:
    """Return the arguments that describe the model and its requests.

    Args:
        is_tied: Whether vLLM's output matrix is its embedding, if config.json ties them.
    """
    max_tokens = max(config.rollout.max_tokens, config.validation.max_tokens)
    num_logprobs = max(config.rollout.top_k, config.validation.top_k) + NUM_TIES
    needs_text = bool(config.rollout.stop or config.validation.stop)
    hf_config = read_hf_config(config.model.path)
    return {
        "model": config.model.path,
        "max_model_len": config.data.max_prompt_length + max_tokens,
        "dtype": config.engine.compute_dtype,
        # Only stop strings need text. The ids that end a response come from the model's files.
        "skip_tokenizer_init": not needs_text,
        "logprobs_mode": "processed_logprobs",  # of the distribution that tokens are sampled from
        "max_logprobs": num_logprobs,
        "seed": config.trainer.seed % 2**32,
        **modality_arguments(hf_config, is_tied, config.model.images),
    }


def modality_arguments(hf_config, is_tied: bool, with_images: bool) -> dict:
    """Return the arguments that choose between a text model and a vision-language model.

    A vision-language model without images in its data runs as a text model if vLLM has a class for
    its text part, and otherwise without its vision tower.
    """
    if hf_config.get_text_config() is hf_config:
        return {"hf_overrides": {"tie_word_embeddings": is_tied}}
    text_class = None if with_images else standalone_text_class(hf_config)
    if text_class is not None:

        def text_config(whole_config):
            text = whole_config.get_text_config()
            text.update({"tie_word_embeddings": is_tied, "architectures": [text_class]})
            return text

        return {"hf_overrides": text_config}
    overrides = {
        "tie_word_embeddings": is_tied,
        "text_config": {"tie_word_embeddings": is_tied},
    }
    modality = image_prompts.image_arguments() if with_images else {"language_model_only": True}
    return {"hf_overrides": overrides, **modality}


def standalone_text_class(hf_config) -> str | None:
    """Return the name of vLLM's class for a model's text part alone, or None if it has none."""
    from vllm import ModelRegistry

    text_config = type(hf_config.get_text_config())
    # transformers has no public function that returns the class for a configuration.
    text_class = AutoModelForCausalLM._model_mapping.get(text_config, None)
    if text_class and text_class.__name__ in ModelRegistry.get_supported_archs():
        return text_class.__name__
    return None


def memory_arguments(config: DictConfig, host: Host) -> dict:
    """Return the arguments that control the device's memory."""
    rollout = config.rollout
    if host.is_cpu:
        # Profiling the memory that images need takes 14 s and has no effect on a CPU.
        arguments = {"skip_mm_profiling": True}
    else:
        arguments = {
            "gpu_memory_utilization": rollout.gpu_memory_utilization,
            "enable_sleep_mode": True,
        }
    kv_cache_gib = rollout.kv_cache_gib
    if host.is_cpu and not kv_cache_gib:
        kv_cache_gib = CPU_KV_CACHE_GIB
    if kv_cache_gib:
        arguments["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
    return arguments


def batch_arguments(config: DictConfig, num_seqs: int, max_model_len: int) -> dict:
    """Return the arguments that limit the requests and tokens of one forward pass."""
    tokens_per_request = 1 + mtp.num_drafted(config)
    return {
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": max(
            MAX_PREFILL_TOKENS, max_model_len, num_seqs * tokens_per_request
        ),
        # A prompt cut into chunks draws too early from its request's random generator. On a CPU,
        # vLLM crashes.
        "enable_chunked_prefill": False,
    }


def is_eager(config: DictConfig, device_type: str) -> bool:
    """Return whether vLLM runs without CUDA graphs."""
    return config.rollout.enforce_eager or device_type == "cpu"


def graph_arguments(config: DictConfig, host: Host, num_seqs: int) -> dict:
    """Return the arguments that control CUDA graphs."""
    if is_eager(config, host.device_type):
        return {"enforce_eager": True}
    # By default, vLLM captures no graphs for more than 512 tokens, and larger batches run eagerly.
    num_tokens = speculation.graph_tokens(num_seqs, mtp.num_drafted(config))
    return {
        "enforce_eager": False,
        "compilation_config": {"max_cudagraph_capture_size": num_tokens},
    }


def architecture_limits(text_config, host: Host) -> dict:
    """Return the arguments that work around vLLM's errors with some architectures."""
    arguments = {}
    if experts_per_token(text_config) and not host.is_cpu:
        # Other backends keep experts in a layout in which their weights cannot be updated.
        arguments["moe_backend"] = "triton"
    layer_types = getattr(text_config, "layer_types", None) or ()
    if RECURRENT_LAYER_TYPES & set(layer_types):
        # vLLM caches the states of recurrent layers only if prompts are cut into chunks.
        arguments["enable_prefix_caching"] = False
    return arguments

"""Compute the arguments of `vllm.LLM` from the configuration. Nothing here changes any state."""

from dataclasses import dataclass

import torch.distributed as dist
from omegaconf import DictConfig
from transformers import AutoModelForCausalLM

from engines.model import mtp
from engines.model.experts import experts_per_token
from engines.model.hf import read_hf_config
from engines.model.quirks import RECURRENT_LAYER_TYPES
from engines.parallel.device import capacity
from rollout.vllm import adapters, image_prompts, quantization, routing, speculation
from rollout.vllm.capacity import CPU_KV_CACHE_GIB, max_num_seqs
from rollout.vllm.sampling import NUM_TIES, sampling_groups
from rollout.vllm.versions import SUPPORTED, installed_version

MAX_PREFILL_TOKENS = 8192  # prompt tokens in one forward pass, unless one prompt is longer


@dataclass(frozen=True)
class Host:
    """The hardware and the vLLM release that a run uses.

    Attributes:
        world_size: The number of ranks in the run.
        device_type: "cpu", "cuda" or "npu".
        device_bytes: The device's memory; 0 for a CPU.
        vllm_version: The version of the installed vLLM, as in `versions.SUPPORTED`.
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
        shares_base: Whether vLLM and the trainer share the tensors of the frozen weights.

    Raises:
        InputError: vLLM does not support adapters of this rank.
    """
    num_seqs = max_num_seqs(config, host.world_size, host.device_bytes)
    # On a CPU, vLLM packs a copy of the output matrix. If it were tied to the embedding, an update
    # would leave old weights in this copy. So the output matrix is untied, and each update copies
    # the embedding's weights into it. A shared base stays tied.
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
    if config.rollout.routing_replay:
        arguments["worker_cls"] = routing.WORKER
    return arguments | {
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": config.rollout.tensor_parallel_size,
        "load_format": "dummy",  # weights come from the trainer
    }


def model_arguments(config: DictConfig, is_tied: bool = False) -> dict:
    """Return the arguments that describe the model and its requests.

    Args:
        is_tied: Whether vLLM ties the output matrix to the embedding, if config.json does so.
    """
    groups = sampling_groups(config).values()
    max_tokens = max(sampling.max_tokens for sampling in groups)
    num_logprobs = max(sampling.top_k for sampling in groups) + NUM_TIES
    longest_response = config.data.max_prompt_length + max_tokens
    # A request of an episode may have stop strings of its own.
    needs_text = bool(config.rollout.episode) or any(sampling.stop for sampling in groups)
    hf_config = read_hf_config(config.model.path)
    return {
        "model": config.model.path,
        "max_model_len": config.rollout.max_episode_tokens or longest_response,
        "dtype": config.engine.compute_dtype,
        # Text is needed only to find stop strings. The ids that end a response are read from the
        # model's files.
        "skip_tokenizer_init": not needs_text,
        "logprobs_mode": "processed_logprobs",  # those of the distribution that is sampled from
        "max_logprobs": num_logprobs,
        "seed": config.trainer.seed % 2**32,
        **modality_arguments(hf_config, is_tied, config.model.images),
        **quantization.weight_arguments(config),
    }


def modality_arguments(hf_config, is_tied: bool, with_images: bool) -> dict:
    """Return the arguments that choose between a text model and a vision-language model.

    Without images in the data, a vision-language model runs as a text model if vLLM has a class for
    its text part. Otherwise it runs without its vision tower.
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
    """Return the name of vLLM's class for only the text part of a model, or None."""
    from vllm import ModelRegistry

    text_config = type(hf_config.get_text_config())
    # transformers has no public function that maps a configuration to its class.
    text_class = AutoModelForCausalLM._model_mapping.get(text_config, None)
    if text_class and text_class.__name__ in ModelRegistry.get_supported_archs():
        return text_class.__name__
    return None


def memory_arguments(config: DictConfig, host: Host) -> dict:
    """Return the arguments that control the device's memory."""
    rollout = config.rollout
    if host.is_cpu:
        # Measuring the memory for images takes 14 s and has no effect on a CPU.
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
    return arguments | quantization.cache_arguments(config)


def batch_arguments(config: DictConfig, num_seqs: int, max_model_len: int) -> dict:
    """Return the arguments that limit the requests and tokens of one forward pass."""
    tokens_per_request = 1 + mtp.num_drafted(config)
    return {
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": max(
            MAX_PREFILL_TOKENS, max_model_len, num_seqs * tokens_per_request
        ),
        # If a prompt is cut into chunks, its request draws from the random generator too early, and
        # on a CPU vLLM crashes.
        "enable_chunked_prefill": False,
    }


def is_eager(config: DictConfig, device_type: str) -> bool:
    """Return whether vLLM runs without CUDA graphs."""
    return config.rollout.enforce_eager or device_type == "cpu"


def graph_arguments(config: DictConfig, host: Host, num_seqs: int) -> dict:
    """Return the arguments that control CUDA graphs."""
    if is_eager(config, host.device_type):
        return {"enforce_eager": True}
    # By default, vLLM captures graphs for at most 512 tokens, so larger batches would run eagerly.
    num_tokens = speculation.graph_tokens(num_seqs, mtp.num_drafted(config))
    return {
        "enforce_eager": False,
        "compilation_config": {"max_cudagraph_capture_size": num_tokens},
    }


def architecture_limits(text_config, host: Host) -> dict:
    """Return the arguments that work around vLLM's limitations for some architectures."""
    arguments = {}
    if experts_per_token(text_config) and not host.is_cpu:
        # Other backends store experts in a layout that cannot be updated.
        arguments["moe_backend"] = "triton"
    layer_types = getattr(text_config, "layer_types", None) or ()
    if RECURRENT_LAYER_TYPES & set(layer_types):
        # vLLM can cache the states of recurrent layers only with chunked prompts.
        arguments["enable_prefix_caching"] = False
    return arguments

"""Check the configuration for errors that vLLM would report only after models were loaded."""

from omegaconf import DictConfig

from config import InputError
from engines.model.hf import read_hf_config
from engines.model.lengths import frequency_limits
from engines.model.shape import layer_configs
from rollout.vllm import adapters, image_prompts, quantization, routing, speculation
from rollout.vllm.arguments import model_arguments
from rollout.vllm.sampling import sampling_groups
from rollout.vllm.startup import quiet_vllm


def check_rollout(config: DictConfig, world_size: int) -> None:
    """Raise InputError if vLLM cannot run this configuration on this many ranks.

    Reads the model's config.json. Does not import vLLM.
    """
    check_tensor_parallel_size(config, world_size)
    check_frequencies(config)
    image_prompts.check_images(config)
    adapters.check_adapter(config, world_size)
    speculation.check_drafter(config)
    routing.check_routing_replay(config)
    quantization.check_quantization(config)


def check_tensor_parallel_size(config: DictConfig, world_size: int) -> None:
    """Raise InputError unless the size divides the number of ranks and of attention heads."""
    tp_size = config.rollout.tensor_parallel_size
    if world_size % tp_size:
        raise InputError(
            f"rollout.tensor_parallel_size={tp_size} does not divide the number of ranks, "
            f"{world_size}: lower it, or start other ranks with torchrun --nproc-per-node"
        )
    text_config = read_hf_config(config.model.path).get_text_config()
    for layer in layer_configs(text_config):
        num_heads = getattr(layer, "num_attention_heads", tp_size)
        if num_heads % tp_size:
            raise InputError(
                f"rollout.tensor_parallel_size={tp_size} does not divide the model's {num_heads} "
                "attention heads: lower it"
            )


def check_frequencies(config: DictConfig) -> None:
    """Raise InputError if vLLM and the trainer would rotate training responses differently.

    With longrope, vLLM applies the long factors to all requests if any request may be longer than
    the original length. The trainer applies the short factors, since no training sequence is longer
    (see engines/model/lengths.py).
    """
    prompt = config.data.max_prompt_length
    hf_config = read_hf_config(config.model.path).get_text_config()
    for rope_type, limit in frequency_limits(hf_config):
        for group, sampling in sampling_groups(config).items():
            if rope_type == "longrope" and prompt + sampling.max_tokens > limit:
                raise InputError(
                    f"{group}.max_tokens={sampling.max_tokens} and data.max_prompt_length={prompt} "
                    f"allow more than the {limit} tokens of longrope's short factors, so vLLM "
                    "would apply the long factors to training responses too: lower "
                    f"{group}.max_tokens to at most {limit - prompt}"
                )


def check_vllm_model(config: DictConfig) -> None:
    """Raise InputError if vLLM rejects the model, its adapter, or the length of its sequences.

    Importing vLLM takes seconds.
    """
    quiet_vllm()
    from vllm.config import ModelConfig

    arguments = model_arguments(config)
    if adapters.has_separate_adapter(config):
        adapters.adapter_arguments(config)
    image_prompts.check_packages(config)
    try:
        ModelConfig(**arguments)
    except ValueError as error:
        raise InputError(
            f"vLLM rejects model.path={config.model.path} with {describe_length(config)}: "
            f"{reason_of(error)}"
        ) from error


def describe_length(config: DictConfig) -> str:
    """Return the keys that determine the longest sequence, with their values."""
    num_tokens = config.rollout.max_episode_tokens
    if num_tokens:
        return f"sequences of {num_tokens} tokens (rollout.max_episode_tokens={num_tokens})"
    groups = sampling_groups(config)
    longest = max(groups, key=lambda name: groups[name].max_tokens)
    prompt = config.data.max_prompt_length
    response = groups[longest].max_tokens
    return (
        f"sequences of {prompt + response} tokens (data.max_prompt_length={prompt} + "
        f"{longest}.max_tokens={response})"
    )


def reason_of(error: ValueError) -> str:
    """Return the reason of a pydantic validation error in one line."""
    message = str(error).split("Value error, ")[-1]
    one_line = " ".join(message.split())
    return one_line.split(" [type=")[0]

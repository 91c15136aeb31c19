"""Speculative decoding: a drafter guesses the next tokens of a response, and the model verifies
all of them in one step.

Each token is drawn as it would be without drafts, with the same random numbers, and a draft is
accepted if it equals the drawn token. vLLM drafts single tokens rather than distributions, so this
accepts as many drafts as rejection sampling (Leviathan et al. 2023): a draft of probability p is
accepted with probability p. Unlike with rejection sampling, a response depends neither on its
drafts nor on other requests.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor, nn

from config import InputError
from engines.model import mtp
from engines.model.hf import read_hf_config
from engines.model.quirks import RECURRENT_LAYER_TYPES
from rollout.vllm.sampling import validation_sampling
from rollout.vllm.versions import SUPPORTED, SUPPORTED_NAMES

# "ngram" drafts the tokens that followed an earlier occurrence of the last 2 to 4 tokens.
NGRAM_ARGUMENTS = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
MAX_GRAPH_TOKENS = 1024  # larger steps keep a device busy even without CUDA graphs
# Drafter -> (the module that it needs, the package to install).
PACKAGES = {
    "suffix": ("arctic_inference", "arctic-inference==0.1.1"),
    "ngram": ("numba", "numba"),
}


# -- the configuration ----------------------------------------------------------------------------


def check_drafter(config: DictConfig) -> None:
    """Raise InputError for settings that vLLM does not support, or gets wrong, with a drafter."""
    drafter = mtp.drafter(config)
    if drafter is None:
        return
    speculative = config.rollout.speculative
    key = "model.mtp.enable_rollout=true" if drafter == "mtp" else f"rollout.speculative={drafter}"
    if drafter == "mtp" and speculative:
        raise InputError(
            f"{key} and rollout.speculative={speculative} are two drafters: set only one of them"
        )
    if torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == "npu":
        raise InputError(f"{key} is not supported on an NPU, where vLLM has a different sampler")
    if drafter in PACKAGES:
        module, package = PACKAGES[drafter]
        if find_spec(module) is None:
            raise InputError(f"{key} needs the module {module}: pip install {package}")
    check_drafted_sampling(config, key)
    hf_config = read_hf_config(config.model.path)
    layer_types = getattr(hf_config.get_text_config(), "layer_types", None) or ()
    if RECURRENT_LAYER_TYPES & set(layer_types):
        raise InputError(
            f"{key} is not supported for models with recurrent layers, whose states cannot be "
            "reset after rejected drafts"
        )
    if drafter == "mtp":
        check_mtp_drafter(config, key, hf_config)


def check_drafted_sampling(config: DictConfig, key: str) -> None:
    """Raise InputError for sampling parameters that vLLM does not support with a drafter."""
    groups = {"rollout": config.rollout, "validation": validation_sampling(config)}
    for name, sampling in groups.items():
        if sampling.min_p > 0:
            raise InputError(
                f"{name}.min_p={sampling.min_p:g}: vLLM does not support min_p with {key}"
            )
        if sampling.stop:
            # vLLM would keep all tokens of the step that completes a stop string.
            raise InputError(
                f"{name}.stop is not supported with {key}: vLLM searches for stop strings once per "
                "step, but a step draws several tokens"
            )


def check_mtp_drafter(config: DictConfig, key: str, hf_config) -> None:
    """Raise InputError for models and adapters with which MTP layers cannot be a drafter."""
    path = config.model.path
    if hf_config.model_type != "mimo":
        raise InputError(
            f"{key} is supported only for MiMo, but model.path={path} is {hf_config.model_type}"
        )
    num_tokens = config.model.mtp.num_speculative_tokens
    num_layers = mtp.num_layers(hf_config)
    if num_tokens % max(num_layers, 1):
        raise InputError(
            f"model.mtp.num_speculative_tokens={num_tokens}: vLLM needs a multiple of the "
            f"{num_layers} MTP layers of model.path={path}"
        )
    if config.model.lora.rank and not config.model.lora.merge:
        raise InputError(
            f"{key} with adapters needs model.lora.merge=true: vLLM's drafters have no adapters"
        )


def drafter_arguments(config: DictConfig) -> dict:
    """Return vLLM's speculative_config."""
    arguments = {
        "method": mtp.drafter(config),
        "num_speculative_tokens": mtp.num_drafted(config),
    }
    if arguments["method"] == "ngram":
        arguments |= NGRAM_ARGUMENTS
    return arguments


def graph_tokens(num_seqs: int, num_drafted: int) -> int:
    """Return the largest number of tokens for which vLLM captures a CUDA graph."""
    return min(num_seqs * (1 + num_drafted), max(num_seqs, MAX_GRAPH_TOKENS))


# -- metrics --------------------------------------------------------------------------------------


class DraftCounter:
    """Counts drafts, and the tokens that responses got from them.

    Attributes:
        counts: int64 [4], summed over responses: the numbers of steps with drafts, of drafted
            tokens, of accepted tokens, and of accepted tokens that the response kept. It does not
            keep tokens after its end.
    """

    def __init__(self, scheduler):
        self.counts = torch.zeros(4, dtype=torch.int64)
        # vLLM-private: only the scheduler knows which tokens a response keeps. For each response,
        # it calls the two methods that are replaced here in this order, the first one only if there
        # were drafts.
        self.update_request = scheduler._update_request_with_output
        self.had_drafts = False
        scheduler.make_spec_decoding_stats = self._count_drafts
        scheduler._update_request_with_output = self._count_kept

    def _count_drafts(
        self, stats, num_draft_tokens: int, num_accepted_tokens: int, **options
    ) -> None:
        self.counts += torch.tensor([1, num_draft_tokens, num_accepted_tokens, 0])
        self.had_drafts = True

    def _count_kept(self, *arguments, **options) -> tuple[list[int], bool]:
        tokens, has_ended = self.update_request(*arguments, **options)
        if self.had_drafts:
            self.counts[3] += max(len(tokens) - 1, 0)
        self.had_drafts = False
        return tokens, has_ended


def draft_metrics(counts: Tensor) -> dict[str, float]:
    """Compute metrics from `DraftCounter.counts`.

    mtp/accept_rate is the fraction of drafted tokens that were accepted; mtp/accept_length is the
    mean number of tokens that a response got from a step with drafts.
    """
    num_steps, num_drafted, num_accepted, num_kept = counts.tolist()
    return {
        "mtp/accept_rate": num_accepted / max(num_drafted, 1),
        "mtp/accept_length": 1 + num_kept / max(num_steps, 1),
    }


# -- drawing tokens -------------------------------------------------------------------------------


def replace_samplers(config: DictConfig, vllm_version: str, device_type: str) -> None:
    """Replace vLLM's rejection samplers with our own. Call this before vLLM starts.

    Raises:
        InputError: This version of vLLM is not supported.
    """
    release = SUPPORTED.get(vllm_version)
    if release is None:
        raise InputError(
            f"speculative decoding supports vLLM {SUPPORTED_NAMES}, but {vllm_version} is "
            "installed: install one of these, or turn speculative decoding off"
        )
    if dist.get_rank() == 0:
        print(
            f"rollout: {mtp.drafter(config)} drafts up to {mtp.num_drafted(config)} tokens at "
            "once, with vLLM's own scheduler",
            flush=True,
        )
    # vLLM-private: no option replaces the rejection sampler.
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    RejectionSampler.forward = sample_and_verify
    if device_type == "cuda":
        replace_v2_sampler(release.gumbel_sample_options)


def replace_v2_sampler(gumbel_sample_options: dict[str, bool]) -> None:
    """Replace the rejection sampler of vLLM's V2 model runner."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    def sample_and_count(*arguments, use_fp64=False, **options):
        # vLLM passes these by position. Names that begin with "_" are not used.
        (
            logits,
            _draft_logits,
            drafts,
            ends,
            positions,
            _request_indices,
            request_of_row,
            _local_positions,
            temperature,
            seeds,
            num_tokens,
        ) = arguments[:11]
        drawn = gumbel_sample(
            logits,
            request_of_row,
            temperature,
            seeds,
            positions,
            apply_temperature=False,
            use_fp64=use_fp64,
            **gumbel_sample_options,
        )
        return accepted_tokens(drawn, drafts, ends, num_tokens)

    rejection_sampler.rejection_sample = sample_and_count


def accepted_tokens(
    drawn: Tensor, drafts: Tensor, ends: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return the tokens drawn for each request, and how many of them are valid.

    For vLLM's V2 model runner. The rows of one request are consecutive. The token of its first row
    is valid. The token of a later row is valid if all drafts up to this row are right: a draft is
    right if it equals the token drawn in the previous row.

    Args:
        drawn: int64 [rows], the token drawn in each row.
        drafts: [rows], the input token of each row. It is a draft except in a request's first row.
        ends: [requests + 1], the first row of each request, followed by the number of rows.
        num_tokens: The largest number of drafts per request.

    Returns:
        int64 [requests, 1 + num_tokens] and int32 [requests].
    """
    rows = ends[:-1, None] + torch.arange(1 + num_tokens, device=ends.device)
    is_drafted = rows[:, 1:] < ends[1:, None]
    rows = rows.clamp(max=len(drawn) - 1).long()
    is_right = is_drafted & (drawn[rows[:, :-1]] == drafts[rows[:, 1:]])
    num_accepted = is_right.cumprod(1).sum(1, dtype=torch.int32)
    return drawn[rows], 1 + num_accepted


def sample_and_verify(
    self: nn.Module, metadata, draft_probs: Tensor | None, logits: Tensor, sampling
):
    """Sample one token after another for each request, until one of its drafts is wrong.

    Replaces RejectionSampler.forward() in vLLM's V1 model runner, where each request has a random
    generator of its own.

    Args:
        logits: [rows, vocabulary]. A request has one row more than it has drafts, and its rows are
            consecutive.
        sampling: vLLM's SamplingMetadata of all requests.
    """
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput

    device = logits.device
    num_drafts = torch.tensor(metadata.num_draft_tokens, device=device)
    num_requests = len(num_drafts)
    max_tokens = 1 + max(metadata.num_draft_tokens)
    first_row = (num_drafts + 1).cumsum(0) - num_drafts - 1
    first_draft = first_row - torch.arange(num_requests, device=device)
    # vLLM uses -1 for "no token".
    tokens = torch.full((num_requests, max_tokens), -1, dtype=torch.int32, device=device)
    log_probs = None
    requests = torch.arange(num_requests, device=device)  # those whose drafts were all right so far
    for step in range(max_tokens):
        sampled = self.sampler(logits[first_row[requests] + step], select(sampling, requests))
        tokens[requests, step] = sampled.sampled_token_ids[:, 0]
        if sampled.logprobs_tensors is not None:
            if log_probs is None:
                log_probs = allocate_log_probs(sampled.logprobs_tensors, num_requests, max_tokens)
            for all_values, values in zip(log_probs, sampled.logprobs_tensors):
                all_values[requests, step] = values
        requests = requests[step < num_drafts[requests]]
        draft = metadata.draft_token_ids[first_draft[requests] + step]
        requests = requests[tokens[requests, step] == draft]
        if not len(requests):
            break
    logprobs_tensors = None
    if log_probs is not None:
        logprobs_tensors = LogprobsTensors(*(values.flatten(0, 1) for values in log_probs))
    return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs_tensors)


def allocate_log_probs(step_tensors, num_requests: int, max_tokens: int) -> list[Tensor]:
    """Return zeros for the token ids, log-probabilities and ranks of all tokens of a step."""
    return [
        values.new_zeros(num_requests, max_tokens, *values.shape[1:]) for values in step_tensors[:3]
    ]


def select(sampling, requests: Tensor):
    """Return vLLM's SamplingMetadata for only some of its requests.

    Of its fields, those that sampling.sampling_params() may set are selected.
    """
    selected = {}
    for name in ("temperature", "top_p", "top_k"):
        values = getattr(sampling, name)
        selected[name] = None if values is None else values[requests]
    generators = {
        new_index: sampling.generators[index]
        for new_index, index in enumerate(requests.tolist())
        if index in sampling.generators
    }
    return replace(sampling, **selected, generators=generators)


# -- the drafter's weights ------------------------------------------------------------------------


def drafter_module(llm) -> nn.Module:
    """Return vLLM's MTP layers on this rank. They share the model's embedding and output matrix."""

    def find(worker):
        # vLLM-private: apply_model() reaches the model, but not its drafter.
        runner = worker.model_runner
        drafter = runner.speculator if worker.use_v2_model_runner else runner.drafter
        return drafter.model

    return llm.collective_rpc(find)[0]


def collect_drafter_weights(
    weights: Iterable[tuple[str, Tensor]], drafter_weights: list[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights, and append those of the MTP layers to `drafter_weights`."""
    for name, tensor in weights:
        if ".mtp_layers." in name:
            drafter_weights.append((name, tensor))
        yield name, tensor


def load_drafter(llm, weights: list[tuple[str, Tensor]], device_type: str) -> None:
    """Copy the MTP layers' weights into vLLM's drafter. vLLM's model ignores them."""
    drafter = drafter_module(llm)
    if device_type == "cuda":
        drafter.load_weights(weights)
        return
    # vLLM-private: reload_weights() does not include the drafter. Kernels for CPUs store weights in
    # a layout of their own, which these functions undo and redo.
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    initialize_layerwise_reload(drafter)
    drafter.load_weights(iter(weights))
    finalize_layerwise_reload(drafter, llm.llm_engine.vllm_config.model_config)

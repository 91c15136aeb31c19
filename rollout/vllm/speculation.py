"""Speculative decoding: a drafter guesses the next tokens of a response, and one step of the model checks all of them.

Each token is drawn as it would be without drafts, from the same random numbers of its request, and a draft is accepted when it is
that token. vLLM's drafts are single tokens, so this accepts as many as rejection sampling (Leviathan et al. 2023) does: a draft of
probability p with probability p. But a response then depends neither on its drafts nor on the requests beside it.

For vLLM 0.25.1 (V2 model runner; V1 with ngram and suffix) and 0.32.0 (V1 model runner on a CPU).
"""

from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor, nn

from config import InputError
from engines.model import mtp
from engines.model.hf import RECURRENT, read_hf_config

VERSIONS = ("0.25.1", "0.32.0")  # of vLLM
NGRAM = {
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}  # tokens that have occurred before, with what followed them
MAX_GRAPH_TOKENS = 1024  # larger steps keep an accelerator busy without CUDA graphs


def check(config: DictConfig) -> None:
    """Raise InputError for what vLLM cannot do, or would do wrongly, with drafts."""
    drafter = mtp.drafter(config)
    if drafter is None:
        return
    hf_config = read_hf_config(config.model.path)
    key = "model.mtp.enable_rollout=true" if drafter == "mtp" else f"rollout.speculative={drafter}"
    if drafter == "mtp" and config.rollout.speculative:
        raise InputError(
            f"{key} and rollout.speculative={config.rollout.speculative} are two drafters: choose one"
        )
    if torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == "npu":
        raise InputError(
            f"{key} is not there on an NPU, whose vLLM draws tokens with code of its own"
        )
    for name, package, module in (
        ("suffix", "arctic-inference==0.1.1", "arctic_inference"),
        ("ngram", "numba", "numba"),
    ):
        if drafter == name and find_spec(module) is None:
            raise InputError(f"{key} needs a package: pip install {package}")
    for name in ("rollout", "validation"):
        if config[name].min_p > 0:
            raise InputError(f"{name}.min_p={config[name].min_p:g}: vLLM has no min_p with {key}")
        if config[
            name
        ].stop:  # which vLLM finds after a step, behind which it keeps the tokens of the step
            raise InputError(
                f"{name}.stop: vLLM looks for strings once per step, and with {key} a step has several tokens"
            )
    if RECURRENT & set(getattr(hf_config.get_text_config(), "layer_types", None) or ()):
        raise InputError(
            f"{key} is not there for recurrent layers, whose states would have to forget what is not accepted"
        )
    if drafter == "mtp" and hf_config.model_type != "mimo":
        raise InputError(
            f"{key} is there for MiMo alone, and model.path={config.model.path} is {hf_config.model_type}"
        )
    number, num_layers = config.model.mtp.num_speculative_tokens, mtp.num_layers(hf_config)
    if drafter == "mtp" and number % max(num_layers, 1):
        raise InputError(
            f"model.mtp.num_speculative_tokens={number}: vLLM wants a multiple of the {num_layers} MTP layers of "
            f"model.path={config.model.path}"
        )
    if drafter == "mtp" and config.model.lora.rank and not config.model.lora.merge:
        raise InputError(
            f"{key} with adapters needs model.lora.merge=true: vLLM has no adapters beside its drafter"
        )


def graph_tokens(num_seqs: int, num_drafted: int) -> int:
    """Tokens of the largest step that vLLM has a CUDA graph for."""
    return min(num_seqs * (1 + num_drafted), max(num_seqs, MAX_GRAPH_TOKENS))


class Drafts:
    """Counts them, as vLLM's scheduler does for its log, and what responses get from them: not what is behind their ends.

    counts: int64 [4], of the responses' steps with drafts: how many there were, tokens drafted, tokens accepted, and those of them
    that responses have got
    """

    def __init__(self, scheduler):
        self.counts, self.drafted, self.append = (
            torch.zeros(4, dtype=torch.int64),
            False,
            scheduler._update_request_with_output,
        )
        scheduler.make_spec_decoding_stats, scheduler._update_request_with_output = (
            self._count,
            self._count_kept,
        )

    def _count(self, stats, num_draft_tokens: int, num_accepted_tokens: int, **others) -> None:
        self.counts += torch.tensor([1, num_draft_tokens, num_accepted_tokens, 0])
        self.drafted = True

    def _count_kept(self, *given, **more) -> tuple[list[int], bool]:
        """Called for the same response right after _count(), if it had drafts."""
        tokens, ended = self.append(*given, **more)
        self.counts[3] += max(len(tokens) - 1, 0) if self.drafted else 0
        self.drafted = False
        return tokens, ended


def metrics(counts: Tensor) -> dict[str, float]:
    """mtp/accept_rate, the share of drafted tokens that were accepted; mtp/accept_length, the tokens that a response got from a
    step with drafts."""
    steps, drafted, accepted, kept = counts.tolist()
    return {
        "mtp/accept_rate": accepted / max(drafted, 1),
        "mtp/accept_length": 1 + kept / max(steps, 1),
    }


# -- drawing tokens ------------------------------------------------------------------------------------------------------


def start(config: DictConfig, version: str, device_type: str) -> dict:
    """Replace vLLM's rejection samplers; returns what vLLM is then told of the drafter. Raises InputError for another version of
    vLLM."""
    if version not in VERSIONS:
        raise InputError(
            f"speculative decoding is there for vLLM {' and '.join(VERSIONS)}, and this is {version}"
        )
    arguments = {"method": mtp.drafter(config), "num_speculative_tokens": mtp.num_drafted(config)}
    if dist.get_rank() == 0:
        print(
            "rollout: {method} drafts up to {num_speculative_tokens} tokens at once, with vLLM's own scheduler".format(
                **arguments
            ),
            flush=True,
        )
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    RejectionSampler.forward = draw_v1
    if device_type == "cuda":
        from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
        from vllm.v1.worker.gpu.spec_decode import rejection_sampler

        more = {} if version == "0.25.1" else {"is_drafting": False}

        def draw(*given, use_fp64=False, **others):
            (
                logits,
                _,
                drafts,
                ends,
                positions,
                _,
                request_of_row,
                _,
                temperature,
                seeds,
                num_tokens,
            ) = given[:11]
            drawn = gumbel_sample(
                logits,
                request_of_row,
                temperature,
                seeds,
                positions,
                apply_temperature=False,
                use_fp64=use_fp64,
                **more,
            )
            return accepted(drawn, drafts, ends, num_tokens)

        rejection_sampler.rejection_sample = draw
    return arguments | (NGRAM if arguments["method"] == "ngram" else {})


def accepted(drawn: Tensor, drafts: Tensor, ends: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """For vLLM's V2 model runner. drawn: [rows] int64, a token drawn at every place of every request, one request behind the other;
    drafts: [rows], what each place was given as input; ends: [requests + 1], where each request's rows begin and end.

    Returns (drawn [requests, 1 + num_tokens], how many of them count [requests] int32): a place counts where what follows from the
    places before it is what it was given.
    """
    rows = ends[:-1, None] + torch.arange(1 + num_tokens, device=ends.device)
    given = rows[:, 1:] < ends[1:, None]
    rows = rows.clamp(max=len(drawn) - 1).long()
    right = given & (drawn[rows[:, :-1]] == drafts[rows[:, 1:]])
    return drawn[rows], 1 + right.cumprod(1).sum(1, dtype=torch.int32)


def draw_v1(self: nn.Module, metadata, draft_probs: Tensor | None, logits: Tensor, sampling):
    """RejectionSampler.forward() for vLLM's V1 model runner, whose requests have generators: place by place, for the requests
    whose drafts were right so far. logits: [drafts and one more of each request, words], one request behind the other."""
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput

    num_drafts = torch.tensor(metadata.num_draft_tokens, device=logits.device)
    width = 1 + max(metadata.num_draft_tokens)
    first = (num_drafts + 1).cumsum(0) - num_drafts - 1
    tokens = torch.full(
        (len(num_drafts), width), -1, dtype=torch.int32, device=logits.device
    )  # -1: none, to vLLM
    alive, log_probs = torch.arange(len(num_drafts), device=logits.device), None
    for place in range(width):
        drawn = self.sampler(logits[first[alive] + place], of_requests(sampling, alive))
        tokens[alive, place] = drawn.sampled_token_ids[:, 0]
        if drawn.logprobs_tensors is not None:
            log_probs = log_probs or [
                x.new_zeros(*tokens.shape, *x.shape[1:]) for x in drawn.logprobs_tensors[:3]
            ]
            for all_of_them, x in zip(log_probs, drawn.logprobs_tensors):
                all_of_them[alive, place] = x
        alive = alive[place < num_drafts[alive]]
        draft = metadata.draft_token_ids[first[alive] - alive + place]
        alive = alive[tokens[alive, place] == draft]
        if not len(alive):
            break
    return SamplerOutput(
        sampled_token_ids=tokens,
        logprobs_tensors=log_probs and LogprobsTensors(*(x.flatten(0, 1) for x in log_probs)),
    )


def of_requests(sampling, requests: Tensor):
    """vLLM's SamplingMetadata of some of its requests, as far as anybody here sets it."""
    numbers = requests.tolist()
    return replace(
        sampling,
        **{
            name: x if x is None else x[requests]
            for name, x in (
                ("temperature", sampling.temperature),
                ("top_p", sampling.top_p),
                ("top_k", sampling.top_k),
            )
        },
        generators={
            i: sampling.generators[n] for i, n in enumerate(numbers) if n in sampling.generators
        },
    )


# -- the drafter's weights -----------------------------------------------------------------------------------------------


def drafter(llm) -> nn.Module:
    """The MTP layers in vLLM on this rank; embedding and output matrix are the model's own."""

    def find(worker):
        runner = worker.model_runner
        return (runner.speculator if worker.use_v2_model_runner else runner.drafter).model

    return llm.collective_rpc(find)[0]


def noting(
    weights: Iterable[tuple[str, Tensor]], drafters: list[tuple[str, Tensor]]
) -> Iterable[tuple[str, Tensor]]:
    """Let them pass, and note those of the MTP layers."""
    for name, tensor in weights:
        if ".mtp_layers." in name:
            drafters.append((name, tensor))
        yield name, tensor


def update(llm, weights: list[tuple[str, Tensor]], device_type: str) -> None:
    """Give the drafter its weights, which vLLM's model has passed over."""
    model = drafter(llm)
    if device_type == "cuda":
        model.load_weights(weights)
    else:
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        initialize_layerwise_reload(model)  # a CPU's kernels keep weights in a layout of their own
        model.load_weights(iter(weights))
        finalize_layerwise_reload(model, llm.llm_engine.vllm_config.model_config)

"""Generate until enough responses are complete, and continue the others later (rollout.partial).

A response continues as a new request: its prompt is the old prompt with the tokens so far, whose
keys and values are computed again with the current weights. It keeps drawing from its own random
numbers where it left off, so with unchanged weights its text does not depend on the interruption.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from types import SimpleNamespace

import torch
from omegaconf import DictConfig

from config import InputError
from rollout.responses import Responses
from rollout.vllm.engine import Rollout
from rollout.vllm.generation import output_id, step_requests, wait_for_last_step
from rollout.vllm.image_prompts import ImagePrompt
from rollout.vllm.sampling import RequestSampling, count_candidates, preserved_random_state

# vLLM's V1 model runner for CPUs draws one such integer for every token.
SEED_RANGE = 2**31


class ContinuingRollout:
    """Generates parts of responses with a Rollout, which must be awake.

    Attributes:
        num_steps: the steps of vLLM in the last call of generate().

    Raises:
        InputError: vLLM cannot continue responses of this model on this device.
    """

    def __init__(self, rollout: Rollout):
        self.rollout = rollout
        self.streams = RandomStreams(rollout)
        self.num_steps = 0

    def generate(
        self,
        prompts: Sequence[list[int]],
        seeds: Sequence[int],
        num_drawn: Sequence[int],
        sampling: DictConfig,
        is_enough: Callable[[Set[int]], bool],
        image_prompts: Sequence[ImagePrompt] | None = None,
    ) -> tuple[Responses, dict[int, str]]:
        """Continue responses until enough of them are complete.

        All ranks of a replica pass the same arguments.

        Args:
            prompts: each prompt, followed by the tokens that its response has already.
            num_drawn: the number of these tokens.
            sampling: as for Rollout.generate(); max_tokens limits the whole response.
            is_enough: whether to stop, given the indices of the responses that are complete. It is
                called after every step of vLLM.

        Returns:
            The new tokens, and for each complete response, by its index, why it has ended: "stop"
            or "length".
        """
        rollout = self.rollout
        whole = RequestSampling.of(sampling)
        params = []
        for seed, num_tokens in zip(seeds, num_drawn):
            remaining = replace(whole, max_tokens=whole.max_tokens - num_tokens)
            params.append(rollout.sampling_params(remaining, seed))
        num_candidates = count_candidates(sampling, rollout.vocab_size)
        responses = Responses(len(prompts), sampling.max_tokens, num_candidates)
        with preserved_random_state():
            is_closed_batch = rollout.begin_batch(responses, params)
            request_ids = rollout.enqueue(prompts, params, image_prompts)
            if not is_closed_batch:
                report_every_token(rollout.llm.llm_engine, request_ids)
            self.streams.skip(request_ids, num_drawn)
            continue_texts(rollout.llm.llm_engine, request_ids, prompts, num_drawn, params)
            reasons, self.num_steps = step_requests(
                rollout.llm.llm_engine,
                request_ids,
                responses,
                is_closed_batch,
                is_enough,
                rollout.progress_label,
            )
            rollout.end_batch(is_closed_batch)
            self.streams.forget()
            unfinished = [output_id(name) for i, name in enumerate(request_ids) if i not in reasons]
            rollout.llm.llm_engine.abort_request(unfinished)
            wait_for_last_step(rollout.llm.llm_engine)
        if rollout.recorder:
            lengths = [len(prompt) for prompt in prompts] + responses.lengths
            responses.routes = rollout.recorder.take_all(request_ids, lengths)
        return responses, reasons


def report_every_token(llm_engine, request_ids: Sequence[str]) -> None:
    """Make vLLM's own scheduler report new tokens after every step, not only at the end."""
    from vllm.sampling_params import RequestOutputKind

    # vLLM-private: LLM.enqueue() sets the output_kind of all parameters to FINAL_ONLY.
    for request_id in request_ids:
        state = llm_engine.output_processor.request_states[request_id]
        state.output_kind = RequestOutputKind.DELTA


def continue_texts(
    llm_engine,
    request_ids: Sequence[str],
    prompts: Sequence[list[int]],
    num_drawn: Sequence[int],
    params: Sequence,
) -> None:
    """Make vLLM look for stop strings in whole responses, not only in their new parts.

    Args:
        prompts: each prompt, followed by the tokens that its response has already.
        num_drawn: the number of these tokens.
        params: vLLM's SamplingParams of each request.
    """
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    # vLLM-private: no method gives a request the first tokens of its response.
    processor = llm_engine.output_processor
    for request_id, prompt, num_tokens, request_params in zip(
        request_ids, prompts, num_drawn, params, strict=True
    ):
        if not num_tokens or not request_params.stop:
            continue
        start = len(prompt) - num_tokens
        request = SimpleNamespace(
            request_id=request_id,
            prompt_token_ids=prompt[:start],
            prompt_embeds=None,
            sampling_params=request_params,
        )
        detokenizer = IncrementalDetokenizer.from_new_request(processor.tokenizer, request)
        detokenizer.update(prompt[start:], stop_terminated=False)
        processor.request_states[request_id].detokenizer = detokenizer


class RandomStreams:
    """Makes a request continue the sequence of random numbers of its response.

    vLLM's V2 model runner computes the random numbers of a token from the seed and the token's
    position, so a request that continues a response draws the right ones by itself. The V1 model
    runner gives each request a generator, which draws one integer per token on a CPU. This class
    skips those that belong to earlier tokens.
    """

    def __init__(self, rollout: Rollout):
        self.num_skipped: dict[str, int] = {}  # by vLLM's request id
        # vLLM-private: apply_model() reaches the model, but not the model runner.
        workers = rollout.llm.collective_rpc(lambda worker: worker)
        worker = workers[0]
        if worker.use_v2_model_runner:
            return
        if rollout.device.type != "cpu":
            raise InputError(
                f"rollout.partial.enable=true does not work with vLLM's V1 model runner on "
                f"{rollout.device.type}: set VLLM_USE_V2_MODEL_RUNNER=1, or "
                "rollout.partial.enable=false"
            )
        self.runner = worker.model_runner
        self.runner.sampler.register_forward_pre_hook(self._before_sampling, with_kwargs=True)

    def skip(self, request_ids: Sequence[str], num_drawn: Sequence[int]) -> None:
        """Make new requests skip the random numbers of this many tokens."""
        self.num_skipped |= {name: num for name, num in zip(request_ids, num_drawn) if num}

    def forget(self) -> None:
        """Forget the requests that were aborted before they drew a token."""
        self.num_skipped.clear()

    def _before_sampling(self, sampler, args, kwargs) -> None:
        if not self.num_skipped:
            return
        # vLLM-private: the generators of the requests in the batch, by their index.
        for index, generator in kwargs["sampling_metadata"].generators.items():
            num_tokens = self.num_skipped.pop(self.runner.input_batch.req_ids[index], 0)
            torch.randint(0, SEED_RANGE, (num_tokens,), generator=generator, dtype=torch.long)

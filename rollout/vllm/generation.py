"""Step vLLM until the requests of a batch have ended."""

import time
from collections.abc import Callable, Sequence, Set

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from data.batching.batch import Batch
from rollout.responses import Responses
from rollout.vllm.sampling import next_token_params


def never_enough(ended: Set[int]) -> bool:
    """Make step_requests() continue until all requests have ended."""
    return False


def step_requests(
    llm_engine,
    request_ids: Sequence[str],
    responses: Responses,
    is_closed_batch: bool,
    is_enough: Callable[[Set[int]], bool] = never_enough,
    progress_label: str = "",
) -> tuple[dict[int, str], int]:
    """Step vLLM until all requests have ended, or enough of them.

    On a terminal, rank 0 shows the progress of its replica in one line, which is removed at the
    end.

    Args:
        request_ids: What LLM.enqueue() has returned.
        responses: Receives the tokens, one row per request.
        is_closed_batch: Whether the scheduler for closed batches appends the tokens.
        is_enough: Whether to stop, given the indices of the requests that have ended.
        progress_label: The text after "generate" in the progress line.

    Returns:
        For each request that has ended, by its index, vLLM's finish_reason; and the number of
        steps.
    """
    index_of = {output_id(name): index for index, name in enumerate(request_ids)}
    reasons: dict[int, str] = {}
    num_steps = 0
    progress = tqdm(
        total=len(request_ids),
        leave=False,
        dynamic_ncols=True,
        disable=dist.get_rank() != 0 or None,  # None: only on a terminal
        bar_format=(
            f"generate{progress_label} |{{bar:20}}| {{n_fmt}}/{{total_fmt}} responses{{postfix}}"
        ),
    )
    with progress:
        start = time.perf_counter()
        while llm_engine.has_unfinished_requests() and not is_enough(reasons.keys()):
            num_steps += 1
            for output in llm_engine.step():
                index = index_of[output.request_id]
                if not is_closed_batch:
                    responses.extend(index, *read_output(output.outputs[0]))
                if output.finished:
                    reasons[index] = output.outputs[0].finish_reason
            speed = responses.lengths.sum() / (time.perf_counter() - start)
            progress.set_postfix_str(f"{tqdm.format_sizeof(speed)} tokens/s", refresh=False)
            progress.update(len(reasons) - progress.n)
    return reasons, num_steps


def wait_for_last_step(llm_engine) -> None:
    """Wait for the step that vLLM may still be working on after its last requests were aborted.

    Otherwise, the step could use memory that is freed for training.
    """
    # vLLM-private: no method tells whether a step is in flight.
    engine_core = llm_engine.engine_core.engine_core
    while engine_core.batch_queue:
        llm_engine.step()


def output_id(internal_id: str) -> str:
    """Return the id that an output has, and that a request is aborted by.

    vLLM appends random characters to a request's number: "12" becomes "12-8ba0c3f1".
    """
    return internal_id.partition("-")[0]


def read_output(output) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids and log-probabilities of an output: [tokens, 1 + num_candidates]."""
    num_tokens = len(output.token_ids)
    token_ids = np.array(output.logprobs.token_ids).reshape(num_tokens, -1)
    log_probs = np.array(output.logprobs.logprobs).reshape(num_tokens, -1)
    return token_ids, log_probs


def next_token_log_probs(llm, batch: Batch, temperature: float, lora_request) -> Tensor:
    """Return the log-probabilities of the tokens whose loss_mask is not 0: fp32 [tokens].

    Each token needs a request of its own, with all earlier tokens as the prompt.
    """
    prompts = []
    params = []
    tokens = []
    sequences = batch.input_ids.split(batch.lengths)
    masks = batch.fields["loss_mask"].split(batch.lengths)
    for ids, mask in zip(sequences, masks):
        for position in mask.nonzero().flatten().tolist():
            token = int(ids[position])
            tokens.append(token)
            prompts.append({"prompt_token_ids": ids[:position].tolist()})
            params.append(next_token_params(temperature, token))
    outputs = llm.generate(prompts, params, lora_request=lora_request, use_tqdm=False)
    log_probs = [
        output.outputs[0].logprobs[0][token].logprob for output, token in zip(outputs, tokens)
    ]
    return torch.tensor(log_probs)

"""Step vLLM until all requests of a batch have ended."""

import time

import numpy as np
import torch.distributed as dist
from tqdm import tqdm

from rollout.responses import Responses


def run_requests(
    llm_engine, num_requests: int, responses: Responses | None, progress_label: str
) -> list:
    """Step vLLM until all requests have ended, and return their outputs in order.

    On a terminal, rank 0 shows the progress of its replica in one line, which is removed at the
    end.

    Args:
        responses: The responses that the scheduler for closed batches appends tokens to; None if
            this scheduler is not used.
        progress_label: The text after "generate" in the progress line.
    """
    outputs = {}
    num_tokens = 0
    progress = tqdm(
        total=num_requests,
        leave=False,
        dynamic_ncols=True,
        disable=dist.get_rank() != 0 or None,  # None: only on a terminal
        bar_format=(
            f"generate{progress_label} |{{bar:20}}| {{n_fmt}}/{{total_fmt}} responses{{postfix}}"
        ),
    )
    with progress:
        start = time.perf_counter()
        while llm_engine.has_unfinished_requests():
            finished = {
                int(output.request_id): output.outputs[0]
                for output in llm_engine.step()
                if output.finished
            }
            outputs |= finished
            num_tokens += sum(len(output.token_ids) for output in finished.values())
            num_drawn = num_tokens if responses is None else responses.lengths.sum()
            speed = num_drawn / (time.perf_counter() - start)
            progress.set_postfix_str(f"{tqdm.format_sizeof(speed)} tokens/s", refresh=False)
            progress.update(len(finished))
    return [outputs[request_id] for request_id in sorted(outputs)]


def copy_outputs(outputs: list, responses: Responses) -> None:
    """Copy vLLM's outputs into `responses`, one row per output."""
    for row, output in enumerate(outputs):
        responses.set(row, *read_output(output))


def read_output(output) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids and log-probabilities of an output: [tokens, 1 + num_candidates]."""
    num_tokens = len(output.token_ids)
    token_ids = np.array(output.logprobs.token_ids).reshape(num_tokens, -1)
    log_probs = np.array(output.logprobs.logprobs).reshape(num_tokens, -1)
    return token_ids, log_probs

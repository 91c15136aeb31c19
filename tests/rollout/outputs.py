"""vLLM's outputs for requests, made by hand."""

from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput


def output_of(request_id: str, token_ids: list[int], reason: str | None) -> RequestOutput:
    """Return what vLLM reports for a request. Token t has a log-probability of -t / 10."""
    log_probs = FlatLogprobs()
    for token in token_ids:
        log_probs.append_fast([token], [-token / 10], iter([1]), [None])
    completion = CompletionOutput(0, "", token_ids, None, log_probs, finish_reason=reason)
    return RequestOutput(request_id, None, None, None, [completion], reason is not None)

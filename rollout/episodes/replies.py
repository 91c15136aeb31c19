"""Write the answers of the gateway, in OpenAI's format and in vLLM's."""

from __future__ import annotations

import time
from dataclasses import dataclass

MODEL = "policy"


@dataclass(frozen=True)
class Sampled:
    """Sampled tokens.

    Attributes:
        number: the request's number.
        prompt_ids: the tokens that they continue.
        token_ids: includes the end token.
        log_probs: of token_ids.
        finish_reason: "stop" or "length".
    """

    number: int
    prompt_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str


def chat_completion(sampled: Sampled, message: dict, logprobs: dict | None) -> dict:
    """Return the answer to a request for a chat completion.

    As in vLLM, `prompt_token_ids` and the choice's `token_ids` are added to OpenAI's fields.
    """
    has_calls = bool(message.get("tool_calls"))
    choice = {
        "index": 0,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": "tool_calls" if has_calls else sampled.finish_reason,
        "token_ids": sampled.token_ids,
    }
    return {
        "id": f"chatcmpl-{sampled.number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "usage": usage(sampled),
        "prompt_token_ids": sampled.prompt_ids,
    }


def generation(sampled: Sampled, has_logprobs: bool) -> dict:
    """Return the answer to a request for tokens."""
    logprobs = None
    if has_logprobs:
        pairs = zip(sampled.token_ids, sampled.log_probs, strict=True)
        content = [
            {"token": f"token_id:{i}", "token_id": i, "logprob": log_prob, "top_logprobs": []}
            for i, log_prob in pairs
        ]
        logprobs = {"content": content}
    choice = {
        "index": 0,
        "token_ids": sampled.token_ids,
        "logprobs": logprobs,
        "finish_reason": sampled.finish_reason,
    }
    return {
        "request_id": f"generate-{sampled.number}",
        "model": MODEL,
        "choices": [choice],
        "usage": usage(sampled),
        "prompt_token_ids": sampled.prompt_ids,
    }


def usage(sampled: Sampled) -> dict:
    """Return the numbers of tokens, in OpenAI's format."""
    num_prompt = len(sampled.prompt_ids)
    num_sampled = len(sampled.token_ids)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }


def chat_logprobs(sampled: Sampled, texts: list[str]) -> dict:
    """Return the log-probabilities of the sampled tokens, whose texts these are."""
    content = []
    for text, log_prob in zip(texts, sampled.log_probs, strict=True):
        entry = {"token": text, "logprob": log_prob, "bytes": list(text.encode())}
        content.append(entry | {"top_logprobs": []})
    return {"content": content}


def models() -> dict:
    """Return the list of models: there is one, whatever clients call it."""
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rankwise"}
    return {"object": "list", "data": [model]}


def error(message: str, kind: str, code: str | None) -> dict:
    """Return an error in OpenAI's format."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}

"""The texts of responses, as reward functions and files of samples get them."""

from collections.abc import Sequence


def decode_responses(
    tokenizer, responses: Sequence[list[int]], stop: Sequence[str], skip_special_tokens: bool
) -> list[str]:
    """Return the text of each response, without the stop string that ended it.

    Args:
        responses: the token ids of each response.
        stop: the strings that end a response.
        skip_special_tokens: whether to leave out special tokens, such as the end token.
    """
    texts = tokenizer.batch_decode(responses, skip_special_tokens=skip_special_tokens)
    if not stop:
        return texts
    # A stop string may contain special tokens, so it is searched for in the complete text.
    complete_texts = tokenizer.batch_decode(responses, skip_special_tokens=False)
    for i, complete in enumerate(complete_texts):
        end = find_stop(complete, stop)
        if end is not None:
            texts[i] = decode_up_to(tokenizer, responses[i], complete[:end], skip_special_tokens)
    return texts


def find_stop(text: str, stop: Sequence[str]) -> int | None:
    """Return where the first of the stop strings that occurs begins, or None.

    vLLM ends a response at its first stop string, so it occurs only at the end.
    """
    for string in stop:
        position = text.find(string)
        if position >= 0:
            return position
    return None


def decode_up_to(tokenizer, ids: list[int], text: str, skip_special_tokens: bool) -> str:
    """Decode the tokens whose texts make up `text`, which is a prefix of the response's text.

    The last token may reach beyond `text`; then only its part inside is returned.
    """
    num_tokens = len(ids)
    inside = tokenizer.decode(ids, skip_special_tokens=False)
    while num_tokens and not text.startswith(inside):
        num_tokens -= 1
        inside = tokenizer.decode(ids[:num_tokens], skip_special_tokens=False)
    rest = text[len(inside) :]
    return tokenizer.decode(ids[:num_tokens], skip_special_tokens=skip_special_tokens) + rest

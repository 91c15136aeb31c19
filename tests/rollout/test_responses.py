"""Responses as arrays: written token by token or whole, and packed with their prompts."""

import math
import warnings

import numpy as np
import pytest
import torch

from engines.model import routes
from rollout.responses import Responses
from rollout.vllm.generation import read_output

PROMPTS = [[11, 12, 13], [21], [31, 32]]
TOKENS = [[1, 2], [], [3, 4, 5]]  # of each response
LOG_PROBS = [[-0.5, -1.0], [], [-1.5, -2.0, -2.5]]
# For each token: the two tokens that it was drawn from, and their log-probabilities. vLLM lists a
# token that top_k excludes with a log-probability of minus infinity.
CANDIDATES = [[[1, 7], [9, 2]], [], [[3, 8], [8, 4], [5, 6]]]
HALF = math.log(0.5)
CANDIDATE_LOG_PROBS = [
    [[HALF, HALF], [0.0, -math.inf]],
    [],
    [[HALF, HALF], [HALF, HALF], [math.log(0.996), -math.inf]],
]


def columns(row: int, token: int, with_candidates: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return what vLLM reports for one token: [1, 1 + candidates] each."""
    ids = [TOKENS[row][token]]
    log_probs = [LOG_PROBS[row][token]]
    if with_candidates:
        ids += CANDIDATES[row][token]
        log_probs += CANDIDATE_LOG_PROBS[row][token]
    return np.array([ids]), np.array([log_probs])


def append_all(responses: Responses, with_candidates: bool) -> None:
    """Append the tokens in steps, in which the rows that still run are in descending order."""
    for step in range(3):
        rows = [row for row in (2, 1, 0) if step < len(TOKENS[row])]
        reports = [columns(row, step, with_candidates) for row in rows]
        token_ids = np.concatenate([ids for ids, _ in reports])
        log_probs = np.concatenate([values for _, values in reports])
        responses.append(np.array(rows), token_ids, log_probs)


def extend_all(responses: Responses, with_candidates: bool) -> None:
    """Append the first token by itself, then the others together."""
    for row in (2, 0):
        reports = [columns(row, token, with_candidates) for token in range(len(TOKENS[row]))]
        responses.extend(row, *reports[0])
        token_ids = np.concatenate([ids for ids, _ in reports[1:]])
        log_probs = np.concatenate([values for _, values in reports[1:]])
        responses.extend(row, token_ids, log_probs)


@pytest.mark.parametrize("write", [append_all, extend_all])
@pytest.mark.parametrize("num_candidates", [0, 2])
def test_prompts_and_responses_are_packed(write, num_candidates):
    responses = Responses(3, 4, num_candidates)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write(responses, num_candidates > 0)
    assert responses.lengths.tolist() == [2, 0, 3]
    batch = responses.batch(PROMPTS)
    assert batch.input_ids.tolist() == [11, 12, 13, 1, 2, 21, 31, 32, 3, 4, 5]
    assert batch.input_ids.dtype == torch.int64
    assert batch.cu_seqlens.tolist() == [0, 5, 6, 11]
    assert batch.cu_seqlens.dtype == torch.int64
    assert batch.fields["loss_mask"].tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1]
    assert batch.fields["rollout_log_probs"].tolist() == [
        *[0, 0, 0, -0.5, -1],
        0,
        *[0, 0, -1.5, -2, -2.5],
    ]
    assert batch.fields["rollout_log_probs"].dtype == torch.float32
    if num_candidates == 0:
        assert "candidate_ids" not in batch.fields
        assert batch.candidate_ids.shape == (11, 0)
        return
    none = [-1, -1, -1]
    assert batch.candidate_ids.tolist() == [
        *[none, none, none, [1, 1, 7], [2, 9, -1]],
        none,
        *[none, none, [3, 3, 8], [4, 8, 4], [5, 5, -1]],
    ]
    assert batch.candidate_ids.dtype == torch.int64


def test_routes_of_all_tokens_are_a_field_of_the_batch():
    responses = Responses(3, 4, 0)
    append_all(responses, with_candidates=False)
    responses.routes = np.arange(11 * 2, dtype=np.uint8).reshape(11, 1, 2)
    batch = responses.batch(PROMPTS)
    assert batch.fields[routes.FIELD].tolist() == responses.routes.tolist()


def test_a_token_with_unknown_candidates_is_reported():
    """Beyond 1 % of the probability: then top_p kept tokens that are not among the candidates."""
    responses = Responses(2, 2, 2)
    token_ids = np.array([[4, 4, 5], [5, 4, 5]])
    nearly_all = np.log(np.array([[0.9, 0.9, 0.095], [0.5, 0.5, 0.5]]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        responses.extend(0, token_ids, nearly_all)
    too_little = np.log(np.array([[0.5, 0.5, 0.5], [0.9, 0.9, 0.085]]))
    with pytest.warns(UserWarning, match="more than 2 candidates.*only the first 2"):
        responses.extend(1, token_ids, too_little)
    assert responses.candidates[1].tolist() == token_ids.tolist()


def test_outputs_of_vllm_are_copied():
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput

    outputs = []
    expected = Responses(2, 4, 2)
    for number, row in enumerate((0, 2)):
        reported = FlatLogprobs()
        for token in range(len(TOKENS[row])):
            ids, log_probs = columns(row, token, with_candidates=True)
            ranks = iter([1, 1, 2])
            reported.append_fast(ids[0].tolist(), log_probs[0].tolist(), ranks, [None] * 3)
            expected.append(np.array([number]), ids, log_probs)
        outputs.append(CompletionOutput(0, "", TOKENS[row], None, reported))
    copied = Responses(2, 4, 2)
    for row, output in enumerate(outputs):
        copied.extend(row, *read_output(output))
    for name in ("lengths", "tokens", "log_probs", "candidates"):
        assert getattr(copied, name).tolist() == getattr(expected, name).tolist(), name


def test_no_response_at_all():
    responses = Responses(0, 5, 0)
    assert len(responses.batch([])) == 0


def test_a_row_that_was_taken_does_not_change_when_others_use_its_memory():
    responses = Responses(1, 4, 2)
    ids = np.array([[5, 5, 6], [7, 7, 8]])
    log_probs = np.array([[-0.5, -0.5, -0.9], [-0.25, -0.25, -1.4]])
    responses.extend(0, ids, log_probs)
    taken = responses.row(0)
    expected = [values.tolist() for values in taken]
    assert expected[0] == [5, 7]
    responses.lengths[0] = 0
    responses.extend(0, ids + 10, log_probs + 0.125)
    assert [values.tolist() for values in taken] == expected

"""vLLM and the trainer in one process: generating, and updating weights.

One launch of rollout_worker.py with one vLLM runs all cases for a model and a layout.
"""

import json
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.arithmetic import make_tokenizer
from rollout.vllm.arguments import MAX_PREFILL_TOKENS
from tests.rollout.launches import (
    CUT_TEMPERATURE,
    CUTS,
    END_TOKENS,
    GREEDY_CUTS,
    LAUNCHES,
    LOG_PROB_BOUND,
    MAX_TOKENS,
    NUM_UPDATES,
    ONE_RANK,
    ONE_REPLICA_PER_RANK,
    ROLLOUT_BOUND,
    make_prompts,
    split_written,
    written_responses,
)
from tests.support.cases import launch_params
from tests.support.launch import launch

pytestmark = pytest.mark.slow


@pytest.fixture(params=launch_params(LAUNCHES))
def name(request):
    return request.param


@pytest.mark.parametrize(
    "family, ranks, setting",
    [
        ("one_layer", 1, "rollout.kv_cache_gib=0.0004"),  # 26 blocks for 24 requests
        ("tied", 2, "rollout.tensor_parallel_size=2"),
    ],
)
def test_the_closed_batch_scheduler_gives_vllms_results(
    rollout_folder, tmp_path, family, ranks, setting
):
    """Bit for bit, however requests end, with other weights, preemptions, and TP 2."""
    # Half of the rounds is scheduled asynchronously: on one rank, each kind of sampling in turn.
    num_rounds = 14 if ranks == 1 else 4
    file = tmp_path / "rounds.json"
    worker = "tests/rollout/scheduler_worker.py"
    launch(ranks, worker, rollout_folder / family, file, num_rounds, setting)
    rounds = json.loads(file.read_text())
    assert len(rounds) == num_rounds
    for name, compared in rounds.items():
        assert compared["differ"] == [], (name, compared)
        assert compared["closed batch share"] > 0.8, (name, compared)
        assert compared["requests left"] == 0, (name, compared)
        assert compared["responses"] == 48, (name, compared)
        assert 0 < compared["truncated"] <= 48, (name, compared)
        assert compared["tokens"] >= 48, (name, compared)
        assert ("candidate_ids" in compared["fields"]) == ("top_k" in name), (name, compared)
    shares_of_vllm = [
        compared["steps of vLLM"] / compared["steps"]
        for name, compared in rounds.items()
        if "short" not in name
    ]
    if ranks == 1:  # memory is short
        assert all(0 < share < 0.2 for share in shares_of_vllm), shares_of_vllm
    else:
        assert set(shares_of_vllm) == {0}
        # 24 requests are admitted at first, and the other 24 not one by one.
        assert max(compared["admissions"] for compared in rounds.values()) <= 12
    own_calls, vllm_calls = rounds["1 greedy"]["calls per token"]
    assert own_calls < (40 if ranks == 1 else 9)
    assert vllm_calls > 60


@cache
def plain_model(directory):
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def plain_log_probs(directory, ids, temperature=1.0):
    """Return transformers' log-probabilities [t, V]. Entry i follows ids[:i]; the first is 0."""
    with torch.no_grad():
        logits = plain_model(directory)(ids[None], use_cache=False).logits[0, :-1]
    return torch.cat([torch.zeros(1, logits.shape[1]), (logits / temperature).log_softmax(-1)])


# -- the same log-probabilities -------------------------------------------------------------------


@pytest.mark.parametrize("temperature", ["1.0", "0.6"])
def test_log_probs_agree_before_and_after_every_update(result, temperature):
    updates = result["updates"][temperature]
    assert len(updates["gaps"]) == NUM_UPDATES + 1
    assert max(updates["gaps"]) < ROLLOUT_BOUND
    assert min(updates["moved"]) > 1000 * ROLLOUT_BOUND, "stale weights would go unnoticed"


def test_no_cached_block_of_a_prompt_outlives_the_weights(result):
    before, after = result["cached prompt"]
    assert before > 100 * ROLLOUT_BOUND, "stale blocks would go unnoticed"
    assert after < ROLLOUT_BOUND


@pytest.mark.parametrize("temperature", ["1.0", "0.6"])
def test_first_ratio_is_exactly_1(result, temperature, name):
    ratios = result["updates"][temperature]["ratios"]
    assert len(ratios) == NUM_UPDATES
    for ratio in ratios:
        assert ratio["unequal"] == [0] * LAUNCHES[name].ranks
        assert ratio["micro_batches"] >= 2
        assert ratio["tokens"] > 40


@pytest.mark.parametrize("name", launch_params(LAUNCHES, ONE_REPLICA_PER_RANK))
def test_first_ratio_is_exactly_1_in_bfloat16_with_recomputation(rollout_results, name):
    ratio = rollout_results(name)["rounded"]
    assert ratio["unequal"] == [0] * LAUNCHES[name].ranks
    assert ratio["micro_batches"] > 2
    assert ratio["tokens"] > 100


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", launch_params(LAUNCHES, ONE_RANK))
def test_log_probs_at_a_temperature_are_those_of_transformers(
    rollout_results, rollout_folder, name, temperature
):
    updates = rollout_results(name)["updates"][str(temperature)]
    lengths = updates["drawn"]["lengths"]
    all_log_probs = torch.tensor(updates["log_probs"]).split(lengths)
    all_entropies = torch.tensor(updates["entropy"]).split(lengths)
    sequences = split_written(updates["drawn"])
    for sequence, log_probs, entropy in zip(sequences, all_log_probs, all_entropies, strict=True):
        ids, mask, vllm_log_probs, _ = sequence
        expected = plain_log_probs(rollout_folder / LAUNCHES[name].family, ids, temperature)
        expected_chosen = expected.gather(1, ids[:, None])[:, 0] * mask
        expected_entropy = -(expected.exp() * expected).sum(1) * mask
        assert (log_probs - expected_chosen).abs().max() < LOG_PROB_BOUND
        assert (entropy - expected_entropy).abs().max() < LOG_PROB_BOUND
        assert (vllm_log_probs - expected_chosen).abs().max() < ROLLOUT_BOUND


# -- the same responses ---------------------------------------------------------------------------


def test_a_response_depends_on_its_seed_alone(result):
    runs = result["seeds"]["runs"]
    assert len(runs) == 3
    for name, responses in runs.items():
        assert responses == runs["in order"], name
    alone = result["seeds"]["alone"]
    assert len(alone) == 4
    for i, response in alone.items():
        assert response == runs["in order"][int(i)]
    *responses, same_seed = result["seeds"]["one prompt"]
    assert len(set(map(tuple, responses))) == 8
    assert same_seed == responses[0]


@pytest.mark.parametrize("call", ["Rollout()", "generate()"])
def test_the_trainers_random_generators_are_untouched(result, name, call):
    assert result[f"random state after {call}"] == [True] * LAUNCHES[name].ranks


def test_more_prompt_tokens_than_one_forward_pass_takes(result):
    long_prompts = result["long_prompts"]
    assert long_prompts["prompt_tokens"] > MAX_PREFILL_TOKENS
    assert long_prompts["gap"] < ROLLOUT_BOUND
    assert long_prompts["last"] == long_prompts["last alone"]


def test_greedy_responses_are_the_likeliest_and_the_same_after_a_sleep(result, name):
    before, after = result["greedy"]["responses"]
    assert before == after
    assert len(set(map(tuple, before))) > 6
    assert result["greedy"]["likeliest"] == [1.0] * LAUNCHES[name].ranks


# -- order of calls -------------------------------------------------------------------------------

SLEEPS = "generate() with nothing awake"
STALE = "generate() with weights awake and base not valid"
NO_WEIGHTS = "before the weights were updated"
WEIGHTS_SLEEP = "update_weights() while the weights are asleep"
# (case, part of the error message, or None)
PROTOCOL = [
    ("generate at first", SLEEPS),
    ("cache at first", f"wake('kv_cache') {NO_WEIGHTS}"),
    ("update at first", WEIGHTS_SLEEP),
    ("wake", None),
    ("generate before update", STALE),
    ("cache before update", NO_WEIGHTS),
    ("update", None),
    ("generate without cache", "generate() with weights awake and weights valid"),
    ("cache", None),
    ("generate", None),
    ("sleep", None),
    ("generate asleep", SLEEPS),
    ("update asleep", WEIGHTS_SLEEP),
    ("wake again", None),
    ("generate with old weights", STALE),
    ("cache with old weights", NO_WEIGHTS),
    ("an unknown part", "wake('all')"),
    ("update again", None),
    ("cache again", None),
    ("generate again", None),
    ("broken update", "broken export"),
    ("generate after broken update", "base not valid"),
    ("update once more", None),
    ("generate once more", None),
]


def test_calls_out_of_order_are_errors(result, name):
    for (case, errors), (expected_case, message) in zip(result["protocol"], PROTOCOL, strict=True):
        assert case == expected_case
        assert len(errors) == LAUNCHES[name].ranks
        for error in errors:
            if message is None:
                assert error is None, (case, error)
                continue
            assert error is not None, case
            kind, text = error
            assert kind == "RuntimeError", (case, error)
            assert message in text, (case, error)


# -- how responses are sampled and end ------------------------------------------------------------


def test_a_response_ends_with_an_end_token_or_is_truncated(result):
    sequences = split_written(result["plain"])
    last_tokens = set()
    for prompt, (ids, mask, log_probs, truncated) in zip(make_prompts(12), sequences, strict=True):
        num_response = len(ids) - len(prompt)
        assert mask.tolist() == [0] * len(prompt) + [1] * num_response
        assert ids[mask == 0].tolist() == prompt
        assert (log_probs[mask > 0] < 0).all(), "the end token has a log-probability, too"
        assert (log_probs[mask == 0] == 0).all()
        *before, last = ids[mask > 0].tolist()
        assert set(before).isdisjoint(END_TOKENS)
        assert truncated == (last not in END_TOKENS)
        if truncated:
            assert num_response == MAX_TOKENS
        last_tokens.add(last)
    assert last_tokens & set(END_TOKENS)
    assert set(result["plain"]["truncated"]) == {True, False}


@pytest.mark.parametrize("parameter", CUTS)
@pytest.mark.parametrize("name", launch_params(LAUNCHES, ONE_RANK))
def test_cut_distributions(rollout_results, rollout_folder, name, parameter):
    """vLLM's log-probabilities are those of the distribution after cutting and normalizing."""
    lost_masses = []
    value = CUTS[parameter]
    for ids, mask, log_probs, _ in split_written(rollout_results(name)["cuts"][parameter]):
        is_response = mask > 0
        expected = plain_log_probs(rollout_folder / LAUNCHES[name].family, ids, CUT_TEMPERATURE)
        probs, order = expected.exp().sort(descending=True)
        is_kept = {
            "top_k": torch.arange(probs.shape[1]).expand_as(probs) < value,
            "top_p": probs.cumsum(1) - probs < value,
            "min_p": probs >= value * probs[:, :1],
        }[parameter]
        kept_mass = (probs * is_kept).sum(1)
        rank = (order == ids[:, None]).int().argmax(1)
        assert is_kept[torch.arange(len(ids)), rank][is_response].all()
        expected_chosen = expected.gather(1, ids[:, None])[:, 0] - kept_mass.log()
        gaps = (log_probs - expected_chosen)[is_response].abs()
        assert gaps.max() < ROLLOUT_BOUND
        lost_masses += (1 - kept_mass[is_response]).tolist()
    assert sum(lost_masses) / len(lost_masses) > 0.2, "nothing was cut"


@pytest.mark.parametrize("name", launch_params(LAUNCHES, ONE_RANK))
def test_the_trainer_knows_the_tokens_that_sampling_kept(rollout_results, name):
    written = rollout_results(name)["kept tokens"]
    kept = torch.tensor(written["candidate_ids"])
    ids = torch.tensor(written["input_ids"])
    is_response = torch.tensor(written["loss_mask"]) > 0
    assert torch.equal(kept[is_response, 0], ids[is_response])
    assert (kept[~is_response] == -1).all()
    # top_k bounds the number of kept tokens; top_p and min_p vary it.
    num_kept = (kept[:, 1:] >= 0).sum(1)[is_response]
    assert 1 <= num_kept.min() < num_kept.max() <= 12
    num_sampled = (kept[:, 1:] == ids[:, None]).sum(1)[is_response]
    assert (num_sampled == 1).all(), "the sampled token is one of the kept ones"
    vllm_log_probs = torch.tensor(written["rollout_log_probs"])
    gaps = (torch.tensor(written["engine"]) - vllm_log_probs).abs()
    assert gaps.max() < ROLLOUT_BOUND
    blind_gaps = (torch.tensor(written["blind"]) - vllm_log_probs)[is_response].abs()
    assert blind_gaps.mean() > 0.1


@pytest.mark.parametrize("parameter", GREEDY_CUTS)
@pytest.mark.parametrize("name", launch_params(LAUNCHES, ONE_RANK))
def test_cuts_that_leave_one_token_are_greedy(rollout_results, name, parameter):
    results = rollout_results(name)
    cut = results["greedy cuts"][parameter]
    greedy = [response[:MAX_TOKENS] for response in results["greedy"]["responses"][0]]
    assert written_responses(cut) == greedy
    assert greedy != written_responses(results["plain"])
    if parameter != "temperature":
        assert cut["rollout_log_probs"] == pytest.approx([0] * len(cut["input_ids"]), abs=1e-6)


@pytest.mark.parametrize("name", launch_params(LAUNCHES, ["moe", "tied"]))
def test_stop_strings(rollout_results, name):
    """Responses are the plain ones up to the token that completes the stop string.

    The third model is left out. Its responses are bytes that form no text, so that the strings in
    them depend on where decoding begins.
    """
    tokenizer = make_tokenizer()
    results = rollout_results(name)
    for case in results["stop strings"]:
        assert len(case["stop"]) in (1, 2)
        num_cut = 0
        plain_sequences = split_written(results["plain"])
        stopped_sequences = split_written(case["stopped"])
        for plain, stopped in zip(plain_sequences, stopped_sequences, strict=True):
            plain_ids, mask, plain_log_probs, plain_truncated = plain
            ids, _, log_probs, truncated = stopped
            start = int((mask == 0).sum())
            ends = [
                end
                for end in range(start + 1, len(plain_ids) + 1)
                if case["stop"] in tokenizer.decode(plain_ids[start:end])
            ]
            assert ids.tolist() == plain_ids[: min(ends, default=len(plain_ids))].tolist()
            assert truncated == (plain_truncated and not ends)
            assert (log_probs - plain_log_probs[: len(ids)]).abs().max() < LOG_PROB_BOUND
            num_cut += len(ids) < len(plain_ids)
        assert num_cut > 0


@pytest.mark.parametrize("name", launch_params(LAUNCHES, ONE_RANK))
def test_a_length_that_vllm_rejects_is_an_input_error(rollout_results, name):
    kind, message = rollout_results(name)["too long"]
    assert kind == "InputError"
    assert message.startswith("vLLM cannot start: ")
    assert "rollout.gpu_memory_utilization=0.6)" in message
    assert "max_position_embeddings=512" in message

"""Speculative decoding: drafters in vLLM change the speed, and nothing else."""

import json
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import engines.model.mimo  # noqa: F401  makes transformers know MiMo
from config import InputError, load
from rollout.vllm.settings import check_rollout
from rollout.vllm.speculation import (
    DraftCounter,
    accepted_tokens,
    check_drafter,
    collect_drafter_weights,
    draft_metrics,
    graph_tokens,
    sample_and_verify,
)
from tests.rollout.speculation_worker import DRAWN_TOKENS, NUM_DRAWS, PROMPT, ROUNDS
from tests.support.cases import launch_params, needs, selected_launches
from tests.support.launch import launch, launch_each
from tests.support.models import make_model

ROLLOUT_BOUND = 1e-4  # nats, between vLLM's log-probabilities and the trainer's, in fp32
# Nats, between a step with several tokens per response and a step with one.
ROUNDING = 2e-5
NEGLIGIBLE = 1e-4  # a probability
VOCAB_SIZE = 24
END = 1


@dataclass
class Launch:
    """A launch of speculation_worker.py.

    max_drafts: The largest number of tokens drafted at once.
    """

    ranks: int
    settings: str
    max_drafts: int = 0


MTP = "model.mtp.enable=true model.mtp.enable_rollout=true model.mtp.num_speculative_tokens"
LAUNCHES = {
    "plain": Launch(1, "rollout.kv_cache_gib=0.1"),
    # 39 blocks for 24 requests of up to 3 blocks, so that vLLM preempts some.
    "mtp": Launch(1, f"{MTP}=2 rollout.kv_cache_gib=0.0018", max_drafts=2),
    "ngram": Launch(
        1,
        "rollout.speculative=ngram rollout.num_speculative_tokens=3 rollout.kv_cache_gib=0.1",
        max_drafts=3,
    ),
    "mtp_tp2": Launch(
        2, f"{MTP}=1 rollout.tensor_parallel_size=2 rollout.kv_cache_gib=0.1", max_drafts=1
    ),
}
WITH_DRAFTER = [name for name, case in LAUNCHES.items() if case.max_drafts > 0]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A MiMo in which the last token nearly determines the next, as its MTP layer knows.

    Beside it, in the directory "two", is one with two MTP layers.
    """
    path = tmp_path_factory.mktemp("speculation") / "mimo"
    make_model(path, "mimo", vocab_size=VOCAB_SIZE, eos_token_id=END)
    make_model(path.parent / "two", "mimo", num_nextn_predict_layers=2)
    (file,) = path.glob("*.safetensors")
    weights = load_file(file)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight *= 0.0 if ".mtp_layers." in name else 0.01
    weights["lm_head.weight"] *= 2
    size = weights["model.norm.weight"].numel()
    layer = "model.mtp_layers.0"
    # The MTP layer takes the token, not the hidden state.
    weights[f"{layer}.input_proj.weight"] = torch.eye(size, 2 * size).roll(size, 1)
    weights[f"{layer}.token_layernorm.weight"] = torch.ones(size)
    weights[f"{layer}.final_layernorm.weight"] = weights["model.norm.weight"].clone()
    save_file(weights, file, {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def speculation_results(request, model):
    """A function: name of a launch -> its results, for the launches that the tests need."""

    def run(name):
        file = model / f"{name}.json"
        settings = LAUNCHES[name].settings.split()
        worker = "tests/rollout/speculation_worker.py"
        launch(LAUNCHES[name].ranks, worker, model, file, *settings)
        return json.loads(file.read_text())

    return launch_each(selected_launches(request, LAUNCHES), run)


# -- what is generated ----------------------------------------------------------------------------


@pytest.mark.slow
@needs((1, "plain"))
@pytest.mark.parametrize("name", launch_params(LAUNCHES, WITH_DRAFTER))
def test_responses_do_not_depend_on_the_drafter(speculation_results, name):
    """Greedy or sampled, with preemptions, in rounds of different weights, on one rank or two."""
    for round_name in ROUNDS:
        for sampling, expected in speculation_results("plain")[round_name].items():
            case = (round_name, sampling)
            drafted = speculation_results(name)[round_name][sampling]
            for key in ("input_ids", "lengths", "truncated", "loss_mask", "candidate_ids"):
                assert drafted.get(key) == expected.get(key), (case, key)
            log_probs = torch.tensor(drafted["rollout_log_probs"])
            expected_log_probs = torch.tensor(expected["rollout_log_probs"])
            assert (log_probs - expected_log_probs).abs().max() < ROUNDING, case
            assert drafted.get("gap", 0) < ROLLOUT_BOUND, case
            check_metrics(drafted, name, round_name, sampling)


def check_metrics(drafted: dict, name: str, round_name: str, sampling: str) -> None:
    """The metrics show that the drafter has its weights, good ones or bad ones, in every round."""
    case = (round_name, sampling)
    accept_rate = drafted["mtp/accept_rate"]
    if sampling == "short":
        # One token comes from the prompt's step, and one from the step with drafts.
        assert drafted["mtp/accept_length"] == 1
        return
    if name == "ngram" and sampling != "greedy":
        return
    if sampling == "greedy" and (name == "ngram" or round_name != "without MTP"):
        assert accept_rate > 0.4, case  # greedy responses repeat themselves
    elif round_name == "without MTP":
        assert accept_rate < 0.2, case
    else:
        assert accept_rate > 0.1, case
    expected_length = 1 + LAUNCHES[name].max_drafts * accept_rate
    assert drafted["mtp/accept_length"] == pytest.approx(expected_length, rel=0.2), case


@pytest.mark.slow
@pytest.mark.parametrize("name", launch_params(LAUNCHES))
def test_requests_are_preempted_where_memory_is_short(speculation_results, name):
    assert (speculation_results(name)["preempted"] > 0) == (name == "mtp")


@pytest.mark.slow
@needs((1, "mtp"))
def test_sampled_tokens_follow_the_distribution_of_the_model(model, speculation_results):
    """Pearson's chi-square of the second and third tokens. It detects unverified drafts."""
    hf_model = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():  # the weights of the last round
        for parameter in hf_model.parameters():
            parameter *= 1.1 ** (len(ROUNDS) - 1)
    p_values = {"drawn": [], "drawn without verifying": []}
    ids = torch.tensor([PROMPT])
    prefix_probs = torch.ones(1)  # of all prefixes of responses that go on
    for place in range(DRAWN_TOKENS):
        with torch.no_grad():
            probs = hf_model(ids).logits[:, -1].double().softmax(1)
        probs = prefix_probs[:, None] * probs
        if place > 0:
            for name, values in p_values.items():
                responses = speculation_results("mtp")[name]
                tokens = [response[place] for response in responses if len(response) > place]
                counts = torch.bincount(torch.tensor(tokens), minlength=VOCAB_SIZE)
                values.append(chi_square_p_value(counts, probs.sum(0)))
        next_tokens = torch.arange(VOCAB_SIZE).repeat(len(ids))[:, None]
        ids = torch.cat([ids.repeat_interleave(VOCAB_SIZE, 0), next_tokens], 1)
        prefix_probs = probs.index_fill(1, torch.tensor(END), 0).flatten()
    assert min(p_values["drawn"]) > NEGLIGIBLE, p_values
    assert min(p_values["drawn without verifying"]) < NEGLIGIBLE, p_values


def chi_square_p_value(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Return the probability that NUM_DRAWS draws deviate at least as much from `probs`.

    Responses that have ended before are missing in both, and count as one more token.
    """
    num_ended = NUM_DRAWS - counts.sum(0, keepdim=True)
    counts = torch.cat([counts, num_ended])
    prob_ended = 1 - probs.sum(0, keepdim=True)
    expected = NUM_DRAWS * torch.cat([probs, prob_ended])
    statistic = ((counts - expected) ** 2 / expected).sum().double()
    half_freedom = torch.tensor((len(counts) - 1) / 2).double()
    return torch.special.gammaincc(half_freedom, statistic / 2).item()


def test_accepted_tokens_of_the_v2_model_runner():
    """Requests with 0, 1, 3 and 1 drafts: all, some and none of them are right."""
    ends = torch.tensor([0, 1, 3, 7, 9])
    #         request 0 | 1      | 2             | 3
    drawn = torch.tensor([5, 6, 7, 1, 2, 3, 4, 8, 9])
    # Each draft is compared with the token drawn before it: 6 is right; 1 is, 9 is not; 7 is not.
    drafts = torch.tensor([0, 0, 6, 0, 1, 9, 3, 0, 7])
    tokens, counts = accepted_tokens(drawn, drafts, ends, 3)
    assert counts.tolist() == [1, 2, 2, 1]
    assert counts.dtype == torch.int32
    accepted = [row[:count] for row, count in zip(tokens.tolist(), counts)]
    assert accepted == [[5], [6, 7], [1, 2], [8]]


NUM_DRAFTS = [0, 2, 3]
TEMPERATURES = [1.0, 0.7, 1.3]
TOP_K = [24, 5, 3]


def sampling_metadata(requests: list[int]):
    """Return vLLM's SamplingMetadata of these requests, with new random generators."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    values = {field.name: None for field in fields(SamplingMetadata)}  # they depend on the release
    generators = [torch.Generator().manual_seed(i) for i in requests]
    values |= {
        "temperature": torch.tensor([TEMPERATURES[i] for i in requests]),
        "top_k": torch.tensor([TOP_K[i] for i in requests], dtype=torch.int32),
        "all_greedy": False,
        "all_random": True,
        "generators": dict(enumerate(generators)),
        "max_num_logprobs": 2,
        "no_penalties": True,
        "output_token_ids": [[]] * len(requests),
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
    }
    return SamplingMetadata(**values)


@pytest.fixture(scope="module")
def sampler():
    from vllm.v1.sample.sampler import Sampler

    return Sampler(logprobs_mode="processed_logprobs")


def draw_one_by_one(sampler, logits: torch.Tensor, request: int) -> list[tuple]:
    """Draw a token from each row of logits as without drafts: (token, ids, log-probabilities)."""
    metadata = sampling_metadata([request])
    drawn = []
    for row in logits:
        output = sampler(row[None].clone(), metadata)
        ids, log_probs = output.logprobs_tensors[:2]
        drawn.append((int(output.sampled_token_ids), ids[0].tolist(), log_probs[0].tolist()))
    return drawn


def test_drafts_change_no_token_of_the_v1_model_runner(sampler):
    """The first request has no drafts, those of the second are right, the third's second is not."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    generator = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(sum(NUM_DRAFTS) + 3, VOCAB_SIZE, generator=generator)
    rows_of_request = logits.split([num_drafts + 1 for num_drafts in NUM_DRAFTS])
    expected = [
        draw_one_by_one(sampler, rows, request) for request, rows in enumerate(rows_of_request)
    ]
    drafts = []
    for drawn in expected:
        drafts.append([token for token, *_ in drawn[:-1]])
    drafts[2][1] = (drafts[2][1] + 1) % VOCAB_SIZE
    values = {field.name: None for field in fields(SpecDecodeMetadata)} | {
        "draft_token_ids": torch.tensor(sum(drafts, []), dtype=torch.int32),
        "num_draft_tokens": NUM_DRAFTS,
    }
    metadata = SpecDecodeMetadata(**values)
    output = sample_and_verify(
        RejectionSampler(sampler), metadata, None, logits.clone(), sampling_metadata([0, 1, 2])
    )
    num_tokens = [1, 3, 2]
    assert output.sampled_token_ids.dtype == torch.int32
    max_tokens = max(NUM_DRAFTS) + 1
    all_ids, all_log_probs = output.logprobs_tensors[:2]
    assert len(all_ids) == 3 * max_tokens
    for request, drawn in enumerate(expected):
        tokens = [token for token, *_ in drawn[: num_tokens[request]]]
        padding = [-1] * (max_tokens - len(tokens))
        assert output.sampled_token_ids[request].tolist() == tokens + padding
        for step, (_, ids, log_probs) in enumerate(drawn[: num_tokens[request]]):
            row = request * max_tokens + step
            assert all_ids[row].tolist() == ids
            assert all_log_probs[row].tolist() == log_probs


@pytest.fixture
def scheduler():
    """vLLM's scheduler, of which only the end of a request's step is used."""
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler = Scheduler.__new__(Scheduler)
    scheduler.max_model_len = 100
    return scheduler


def test_drafts_are_counted_with_the_tokens_that_responses_keep(scheduler):
    """Of three steps, the second has no drafts, and the third draws tokens after the end."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    counter = DraftCounter(scheduler)
    params = SamplingParams(max_tokens=50, stop_token_ids=[END])
    request = Request("a", [5, 6], params, None)
    steps = [(4, 2, [7, 8, 9]), (0, 0, [7]), (3, 3, [8, END, 9, 9])]
    kept = []
    for num_drafts, num_accepted, tokens in steps:
        if num_drafts:
            scheduler.make_spec_decoding_stats(
                None,
                num_draft_tokens=num_drafts,
                num_accepted_tokens=num_accepted,
                num_invalid_spec_tokens=None,
                request_id="a",
            )
        kept.append(scheduler._update_request_with_output(request, tokens))
    assert kept == [([7, 8, 9], False), ([7], False), ([8, END], True)]
    assert counter.counts.tolist() == [2, 4 + 3, 2 + 3, 2 + 1]
    # Tokens of a later step without drafts come from no draft.
    other = Request("b", [5], params, None)
    scheduler._update_request_with_output(other, [7, 8])
    assert counter.counts.tolist() == [2, 7, 5, 3]


def test_metrics_of_drafts():
    """Five steps with ten drafts, of which six were accepted, and five kept."""
    assert draft_metrics(torch.tensor([5, 10, 6, 5])) == {
        "mtp/accept_rate": 0.6,
        "mtp/accept_length": 2.0,
    }
    assert draft_metrics(torch.zeros(4)) == {"mtp/accept_rate": 0, "mtp/accept_length": 1}


def test_graphs_cover_all_drafted_tokens_of_small_batches():
    assert graph_tokens(64, 3) == 256
    assert graph_tokens(700, 0) == 700
    assert graph_tokens(700, 3) == 1024
    assert graph_tokens(2000, 3) == 2000


def test_weights_of_the_drafter_are_collected_on_the_way():
    names = ["model.embed_tokens.weight", "model.mtp_layers.0.norm.weight", "lm_head.weight"]
    weights = [(name, torch.tensor(float(i))) for i, name in enumerate(names)]
    of_drafter = []
    assert list(collect_drafter_weights(weights, of_drafter)) == weights
    assert of_drafter == weights[1:2]


# -- what is rejected -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            "rollout.speculative=ngram model.mtp.enable=true model.mtp.enable_rollout=true",
            "two drafters",
        ),
        ("rollout.speculative=suffix", "arctic-inference"),
        ("rollout.speculative=ngram rollout.min_p=0.1", "rollout.min_p=0.1: .*speculative=ngram"),
        ("rollout.speculative=ngram validation.min_p=0.1", "validation.min_p=0.1"),
        ("rollout.speculative=ngram rollout.stop=[x]", "rollout.stop"),
        (
            "model.mtp.enable=true model.mtp.enable_rollout=true model.lora.rank=4",
            "model.mtp.enable_rollout=true with adapters needs model.lora.merge=true",
        ),
        (
            f"{MTP}=3 model.path=TWO",
            "num_speculative_tokens=3: vLLM needs a multiple of the 2 MTP layers",
        ),
    ],
)
def test_settings_that_drafters_do_not_support(model, settings, message):
    settings = settings.replace("TWO", str(model.parent / "two")).split()
    config = load("ppo.yaml", [f"model.path={model}", "data.train_files=unused", *settings])
    with pytest.raises(InputError, match=message):
        check_drafter(config)
    with pytest.raises(InputError, match=message):
        check_rollout(config, world_size=1)


@pytest.mark.parametrize(
    "settings",
    [
        "rollout.speculative=ngram model.lora.rank=4",
        f"{MTP}=2 model.lora.rank=4 model.lora.merge=true",
        f"{MTP}=4 model.path=TWO",
    ],
)
def test_settings_that_drafters_support(model, settings):
    settings = settings.replace("TWO", str(model.parent / "two")).split()
    config = load("ppo.yaml", [f"model.path={model}", "data.train_files=unused", *settings])
    check_drafter(config)


def test_a_model_whose_mtp_layers_vllm_does_not_have(tmp_path):
    make_model(tmp_path / "qwen3", "qwen3")
    settings = ["data.train_files=unused", "model.mtp.enable=true", "model.mtp.enable_rollout=true"]
    config = load("ppo.yaml", [f"model.path={tmp_path / 'qwen3'}", *settings])
    with pytest.raises(InputError, match="only for MiMo"):
        check_drafter(config)

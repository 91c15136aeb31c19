"""Speculative decoding: drafters in vLLM change the speed, and nothing else."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import engines.model.mtp  # noqa: F401  makes transformers know MiMo
from config import InputError, load
from rollout.vllm import speculation
from tests.rollout.speculation_worker import DRAWN, NUM_DRAWS, PROMPT, ROUNDS, SAMPLING
from tests.support.launch import launch, launch_each
from tests.support.models import make_model

ROLLOUT_BOUND = 1e-4  # nats, vLLM's log-probabilities from the trainer's, in fp32
ROUNDING = 2e-5  # nats, of a step with several tokens per response from one with one
UNLIKELY = 1e-4  # a chance that counts as none
WORDS, END = 24, 1


@dataclass
class Launch:
    ranks: int
    more: str


MTP = "model.mtp.enable=true model.mtp.enable_rollout=true model.mtp.num_speculative_tokens"
LAUNCHES = {
    "plain": Launch(1, "rollout.kv_cache_gib=0.1"),
    "mtp": Launch(
        1, f"{MTP}=2 rollout.kv_cache_gib=0.0018"
    ),  # 39 blocks for 24 requests of up to 3
    "ngram": Launch(
        1, "rollout.speculative=ngram rollout.num_speculative_tokens=3 rollout.kv_cache_gib=0.1"
    ),
    "mtp_tp2": Launch(2, f"{MTP}=1 rollout.tensor_parallel_size=2 rollout.kv_cache_gib=0.1"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A MiMo whose words follow from the last one but for a little, and whose MTP layer knows that. Beside it one of two layers."""
    path = make_model(
        tmp_path_factory.mktemp("speculation") / "mimo", "mimo", vocab_size=WORDS, eos_token_id=END
    )
    make_model(path.parent / "two", "mimo", num_nextn_predict_layers=2)
    (file,) = path.glob("*.safetensors")
    weights = load_file(file)
    for name, x in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            x *= 0.0 if ".mtp_layers." in name else 0.01
    size, layer = weights["model.norm.weight"].numel(), "model.mtp_layers.0"
    weights["lm_head.weight"] *= 2
    weights[f"{layer}.input_proj.weight"] = torch.eye(size, 2 * size).roll(
        size, 1
    )  # the token, not the hidden state
    weights[f"{layer}.token_layernorm.weight"] = torch.ones(size)
    weights[f"{layer}.final_layernorm.weight"] = weights["model.norm.weight"].clone()
    save_file(weights, file, {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def results(model):
    """name of a launch -> what it wrote down"""

    def run(name):
        launch(
            LAUNCHES[name].ranks,
            "tests/rollout/speculation_worker.py",
            model,
            model / f"{name}.json",
            *LAUNCHES[name].more.split(),
        )
        return json.loads((model / f"{name}.json").read_text())

    return launch_each(LAUNCHES, run)


@pytest.mark.parametrize("name", [name for name in LAUNCHES if name != "plain"])
def test_what_is_generated_does_not_depend_on_the_drafter(results, name):
    """Greedy or sampled, where requests are preempted, in rounds of sleep and other weights, on one rank or two."""
    plain, drafted = results("plain"), results(name)
    for round_, sampling in ((r, s) for r in ROUNDS for s in SAMPLING):
        expected, said = plain[round_][sampling], drafted[round_][sampling]
        for key in ("input_ids", "lengths", "truncated", "loss_mask", "kept_words"):
            assert said.get(key) == expected.get(key), (round_, sampling, key)
        apart = torch.tensor(said["rollout_log_probs"]) - torch.tensor(
            expected["rollout_log_probs"]
        )
        assert apart.abs().max() < ROUNDING, (round_, sampling)
        assert said.get("gap", 0) < ROLLOUT_BOUND, (round_, sampling)
        if sampling == "short":  # one token of the prompt's step, one of the step with drafts
            assert said["mtp/accept_length"] == 1
        if name == "ngram" and sampling != "greedy" or sampling == "short":
            continue
        accepted = said["mtp/accept_rate"]
        # Greedy responses repeat themselves. The drafter gets its weights, good ones or bad ones, in every round.
        assert (
            accepted > 0.4
            if sampling == "greedy" and (name == "ngram" or round_ != "without MTP")
            else accepted < 0.2
            if round_ == "without MTP"
            else accepted > 0.1
        ), (round_, sampling, accepted)
        most = int(LAUNCHES[name].more.partition("speculative_tokens=")[2][0])
        assert said["mtp/accept_length"] == pytest.approx(1 + most * accepted, rel=0.2), (
            round_,
            sampling,
        )
    assert (drafted["preempted"] > 0) == (name == "mtp") and plain["preempted"] == 0


def test_sampled_tokens_follow_the_distribution_of_the_model(model, results):
    """Pearson's chi-square of the second and the third token of responses; it sees drafts that nobody checked."""
    hf, ids, going_on = (
        AutoModelForCausalLM.from_pretrained(model),
        torch.tensor([PROMPT]),
        torch.ones(1),
    )
    with torch.no_grad():  # the weights of the last round
        for parameter in hf.parameters():
            parameter *= 1.1 ** (len(ROUNDS) - 1)
    found = {"drawn": [], "drawn without a check": []}
    for place in range(DRAWN):
        with torch.no_grad():
            chances = going_on[:, None] * hf(ids).logits[:, -1].double().softmax(1)
        for name, chances_of_counts in found.items() if place else ():
            drawn = torch.tensor(
                [response[place] for response in results("mtp")[name] if len(response) > place]
            )
            chances_of_counts.append(
                chance_of(torch.bincount(drawn, minlength=WORDS), chances.sum(0))
            )
        ids = torch.cat(
            [ids.repeat_interleave(WORDS, 0), torch.arange(WORDS).repeat(len(ids))[:, None]], 1
        )
        going_on = chances.index_fill(1, torch.tensor(END), 0).flatten()
    assert min(found["drawn"]) > UNLIKELY > min(found["drawn without a check"]), found


def chance_of(counts: torch.Tensor, chances: torch.Tensor) -> float:
    """The probability that NUM_DRAWS draws are at least as far from what is expected. What is missing in both had ended before."""
    counts, chances = (
        torch.cat([x, total - x.sum(0, keepdim=True)])
        for x, total in ((counts, NUM_DRAWS), (chances, 1))
    )
    statistic = ((counts - NUM_DRAWS * chances) ** 2 / (NUM_DRAWS * chances)).sum()
    return torch.special.gammaincc(
        torch.tensor((len(counts) - 1) / 2).double(), statistic.double() / 2
    ).item()


@pytest.mark.parametrize(
    "settings, said",
    [
        (
            "rollout.speculative=ngram model.mtp.enable=true model.mtp.enable_rollout=true",
            "two drafters",
        ),
        ("rollout.speculative=suffix", "arctic-inference"),
        ("rollout.speculative=ngram rollout.min_p=0.1", "rollout.min_p=0.1"),
        ("rollout.speculative=ngram validation.min_p=0.1", "validation.min_p=0.1"),
        ("rollout.speculative=ngram rollout.stop=[x]", "rollout.stop"),
        (
            "model.mtp.enable=true model.mtp.enable_rollout=true model.lora.rank=4",
            "model.lora.merge=true",
        ),
        (
            f"{MTP}=3 model.path=TWO",
            "num_speculative_tokens=3: vLLM needs a multiple of the 2 MTP layers",
        ),
    ],
)
def test_what_drafters_cannot_do_is_one_line(model, settings, said):
    settings = settings.replace("TWO", str(model.parent / "two")).split()
    with pytest.raises(InputError, match=said):
        speculation.check_drafter(
            load("ppo.yaml", [f"model.path={model}", "data.train_files=unused", *settings])
        )


def test_a_model_without_mtp_layers_that_vllm_knows_is_one_line(tmp_path):
    make_model(tmp_path / "qwen3", "qwen3")
    with pytest.raises(InputError, match="MiMo only"):
        speculation.check_drafter(
            load(
                "ppo.yaml",
                [
                    f"model.path={tmp_path / 'qwen3'}",
                    "data.train_files=unused",
                    "model.mtp.enable=true",
                    "model.mtp.enable_rollout=true",
                ],
            )
        )


def test_accepted_tokens_on_an_accelerator():
    """accepted() of requests with 0, 1 and 3 drafts: all, none and some of them right."""
    ends = torch.tensor([0, 1, 3, 7, 9])
    #         request 0 | 1      | 2             | 3
    drawn = torch.tensor([5, 6, 7, 1, 2, 3, 4, 8, 9])
    drafts = torch.tensor(
        [0, 0, 6, 0, 1, 9, 3, 0, 7]
    )  # what follows what was drawn: 6 is right; 1 is, 9 is not; 7 is not
    tokens, counts = speculation.accepted_tokens(drawn, drafts, ends, 3)
    assert counts.tolist() == [1, 2, 2, 1] and counts.dtype == torch.int32
    assert [row[:n] for row, n in zip(tokens.tolist(), counts)] == [[5], [6, 7], [1, 2], [8]]

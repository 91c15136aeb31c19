"""vLLM and the trainer in one process: what one generates, the other finds as likely; critics; checkpoints of both.

One launch of rollout_worker.py, with one vLLM, for each model and layout runs all its cases; they are judged here.
"""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

from config import InputError, load
from engines.check import in_vllm
from engines.model.names import model_names
from examples.arithmetic import make_tokenizer
from rollout.vllm.arguments import MAX_PREFILL_TOKENS
from rollout.vllm.image_prompts import image_arguments
from rollout.vllm.sampling import find_stop_token_ids, request_seed
from rollout.vllm.settings import check_rollout, check_vllm_model
from rollout.vllm.weight_names import vllm_weight_names
from tests.rollout.rollout_images_worker import GROUP, MANY, SIZES, WEIGHTS, asked, weights_of
from tests.rollout.rollout_worker import (
    CRITIC_STEPS,
    CUT_TEMPERATURE,
    CUTS,
    LAUNCHES,
    LEARNED,
    MAX_TOKENS,
    NUM_UPDATES,
    ONE_WORD,
    make_prompts,
    make_returns,
)
from tests.support.launch import launch, launch_each
from tests.support.models import make_model, make_ocr_model

ROLLOUT_BOUND = 1e-4  # nats, vLLM's log-probabilities from the trainer's, in fp32
LOG_PROB_BOUND = 1e-5  # nats, the trainer's from those of transformers
END_TOKENS = [
    10,
    11,
    12,
    13,
    14,
    257,
]  # the last by config.json, the others by generation_config.json
PLACEHOLDERS, ENDS = {262, 263}, {257, 262, 263}  # of the model that sees images
LONE = [name for name, launch in LAUNCHES.items() if launch.ranks == 1]
CRITICS = [name for name, launch in LAUNCHES.items() if launch.tp == 1]
REWARD = """
def score(prompt, response, row):
    if row["bad"] and len(response) % 2:
        raise ValueError("an odd length")
    return len(response)

def rank(prompts, responses, rows):
    return [{"rank": sorted(responses).index(r) / 4, "size": len(responses) * len(set(prompts))} for r in responses]
"""

FUNCTIONS = """
import torch

def surprising(mask, sequence, num_sequences, values, outcome, group, total, **_):
    best = torch.stack([outcome[group == g].max() for g in group])
    return (outcome - best)[sequence] * mask - (values - total(values) / total(mask)).float() * mask, values * num_sequences

def later(lengths, max_tokens):
    return torch.arange(len(lengths)) / max_tokens / lengths.sum()
"""


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Two threads would spend their time waiting for each other over models this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("rollout"), make_tokenizer()
    shape = dict(vocab_size=len(tokenizer), eos_token_id=END_TOKENS[-1])
    # vLLM has no attention on CPUs for heads of less than 32 numbers.
    make_model(folder / "qwen3", "qwen3", head_dim=32, **shape)
    make_model(folder / "moe", "qwen3_moe", **shape)
    make_model(
        folder / "tied",
        "qwen2_tied",
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        **shape,
    )
    # Of this class embeddings are tied where config.json does not say so, and vLLM has no output matrix whatever it is told.
    config = (
        make_model(
            folder / "tied_unsaid",
            "gemma3",
            model_type="gemma2",
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
            **shape,
        )
        / "config.json"
    )
    config.write_text(
        json.dumps(
            {k: v for k, v in json.loads(config.read_text()).items() if k != "tie_word_embeddings"}
        )
    )
    # Nor do its files say the prefix of the base model, which transformers adds.
    file = config.parent / "model.safetensors"
    save_file(
        {name.removeprefix("model."): x for name, x in load_file(file).items()},
        file,
        {"format": "pt"},
    )
    for family in ("qwen3", "moe", "tied", "tied_unsaid"):
        tokenizer.save_pretrained(folder / family)
        (folder / family / "generation_config.json").write_text(
            json.dumps({"eos_token_id": END_TOKENS[:-1]})
        )
    (folder / "reward.py").write_text(REWARD)
    (folder / "functions.py").write_text(FUNCTIONS)
    return folder


@pytest.fixture(scope="module")
def results(folder):
    """name of a launch -> what it wrote down"""
    # As a run leaves it that was killed: vLLM on CPUs could not start beside it.
    Path("/dev/shm/-tp:0-[0-1]-cpushm_1").touch()

    def run(name):
        launch(LAUNCHES[name].ranks, "tests/rollout/rollout_worker.py", folder, name)
        return json.loads((folder / f"{name}.json").read_text())

    return launch_each(LAUNCHES, run)


@pytest.fixture(params=LAUNCHES)
def name(request):
    return request.param


@pytest.fixture
def result(results, name):
    return results(name)


@pytest.mark.parametrize(
    "family, ranks, more",
    [
        ("qwen3", 1, "rollout.kv_cache_gib=0.0012"),  # 26 blocks for 24 requests
        ("tied", 2, "rollout.tensor_parallel_size=2"),
    ],
)
def test_the_closed_batch_scheduler_generates_what_vllm_does(folder, tmp_path, family, ranks, more):
    """Bit for bit, however requests end, in rounds of other weights, where requests are preempted, and with TP 2."""
    num_rounds = 20 if ranks == 1 else 8
    launch(
        ranks,
        "tests/rollout/scheduler_worker.py",
        folder / family,
        tmp_path / "rounds.json",
        num_rounds,
        more,
    )
    rounds = json.loads((tmp_path / "rounds.json").read_text())
    assert len(rounds) == num_rounds
    for name, said in rounds.items():
        assert said["differ"] == [] and said["own steps"] > 0.8 and said["requests left"] == 0, (
            name,
            said,
        )
        assert (
            0 < said["truncated"] <= said["responses"] and said["tokens"] >= said["responses"] == 48
        ), (name, said)
        assert ("kept_words" in said["fields"]) == ("top_k" in name), (name, said)
    # Where memory is short, some steps are vLLM's own and most are not; where it is not, none is.
    shares = [
        said["preempting"] / said["steps"] for name, said in rounds.items() if "short" not in name
    ]
    assert all(0 < share < 0.2 for share in shares) if ranks == 1 else set(shares) == {0}
    own, vllms = rounds["1 greedy"]["calls per token"]
    assert own < (40 if ranks == 1 else 9) and vllms > 60, (own, vllms)


def sequences(written):
    """(input_ids, loss_mask, log-probabilities, truncated) of each sequence that a launch wrote down."""
    lengths = written["lengths"]
    columns = [
        torch.tensor(written[k]).split(lengths)
        for k in ("input_ids", "loss_mask", "rollout_log_probs")
    ]
    return list(zip(*columns, written["truncated"], strict=True))


def responses(written):
    return [ids[mask > 0].tolist() for ids, mask, *_ in sequences(written)]


def plain_log_probs(directory, ids, temperature=1.0):
    """[t, V] by transformers: entry i of what follows ids[:i]; the first is 0."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0, :-1]
    return torch.cat([torch.zeros(1, logits.shape[1]), (logits / temperature).log_softmax(-1)])


# -- the same log-probabilities ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", ["1.0", "0.6"])
def test_log_probs_agree_before_and_after_every_update(result, temperature):
    updates = result["updates"][temperature]
    assert len(updates["gaps"]) == NUM_UPDATES + 1 and max(updates["gaps"]) < ROLLOUT_BOUND
    assert min(updates["moved"]) > 1000 * ROLLOUT_BOUND, "stale weights would go unseen"


@pytest.mark.parametrize("temperature", ["1.0", "0.6"])
def test_first_ratio_is_exactly_1(result, temperature, name):
    ratios = result["updates"][temperature]["ratios"]
    assert len(ratios) == NUM_UPDATES
    for ratio in ratios:
        assert ratio["unequal"] == [0] * LAUNCHES[name].ranks
        assert ratio["micro_batches"] >= 2 and ratio["asked"] > 40


@pytest.mark.parametrize("name", CRITICS)
def test_first_ratio_is_exactly_1_in_bfloat16_with_recomputation(results, name):
    ratio = results(name)["rounded"]
    assert ratio["unequal"] == [0] * LAUNCHES[name].ranks
    assert ratio["micro_batches"] > 2 and ratio["asked"] > 100


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", LONE)
def test_log_probs_at_a_temperature_are_those_of_transformers(results, folder, name, temperature):
    updates = results(name)["updates"][str(temperature)]
    answers = zip(
        *(
            torch.tensor(updates[k]).split(updates["drawn"]["lengths"])
            for k in ("log_probs", "entropy")
        )
    )
    for (ids, mask, from_vllm, _), (log_probs, entropy) in zip(
        sequences(updates["drawn"]), answers, strict=True
    ):
        want = plain_log_probs(folder / LAUNCHES[name].family, ids, temperature)
        chosen = want.gather(1, ids[:, None])[:, 0] * mask
        assert (log_probs - chosen).abs().max() < LOG_PROB_BOUND
        assert (entropy + (want.exp() * want).sum(1) * mask).abs().max() < LOG_PROB_BOUND
        assert (from_vllm - chosen).abs().max() < ROLLOUT_BOUND


# -- the same responses ------------------------------------------------------------------------------------------------


def test_a_response_follows_from_its_seed_alone(result):
    runs = result["seeds"]["runs"]
    assert all(run == runs["in order"] for run in runs.values()) and len(runs) == 4
    *drawn, again = result["seeds"]["one prompt"]
    assert len(set(map(tuple, drawn))) == 8 and again == drawn[0]


@pytest.mark.parametrize("many, one", [("moe_dp2", "moe"), ("tied_tp2", "tied")])
def test_samples_do_not_depend_on_the_number_of_ranks(results, many, one):
    many, one = results(many)["samples"], results(one)["samples"]
    assert len(many["all"]) == 2 and many["all"][0] == many["all"][1], "ranks disagree"
    for key in (
        "texts",
        "input_ids",
        "group",
        "scores",
        "truncated",
        "prompts",
        "failures",
        "loss_mask",
        "sizes",
    ):
        for case in ("two", "one"):  # the latter for fewer prompts than there are replicas
            assert many[case][key] == one[case][key]
        assert (
            many["all"][0][key]
            == one["all"][0][key]
            == many["by length"][key]
            == one["by length"][key]
        )
    assert many["all"][0]["rollout_log_probs"] == pytest.approx(
        one["all"][0]["rollout_log_probs"], abs=LOG_PROB_BOUND
    )
    assert len({tuple(r) for r in responses(one["all"][0])}) > 15, "the same text over and over"


def test_replicas_get_prompts_whose_responses_are_as_long_together(results):
    """As many prompts where no length is known; then by what the lengths were. Both ranks know the same ones."""
    drawn, alone = results("moe_dp2")["samples"], results("moe")["samples"]
    of_last = [
        len(r)
        for r, group in zip(responses(drawn["by length"]), drawn["by length"]["group"])
        if group == 14
    ]
    assert (
        drawn["lengths"] == 2 * alone["lengths"] and drawn["lengths"][0][4] == sum(of_last) / 4 > 6
    )
    assert sorted(drawn["num_local"]) == [[8, 16], [12, 4]] and alone["num_local"] == [[20, 20]]
    idle, most = (drawn["all"][0]["metrics"][f"perf/rollout_idle{name}"] for name in ("", "_max"))
    assert 0 < most < 1 and idle == pytest.approx(most / 2)
    assert set(alone["all"][0]["metrics"].values()) == {0.0}


@pytest.mark.parametrize("what", LEARNED)
@pytest.mark.parametrize("many, one", [("moe_dp2", "moe"), ("tied_tp2", "tied")])
def test_what_is_learned_does_not_depend_on_the_number_of_ranks(results, many, one, what):
    """To the last bit: all that ranks add up are numbers per response, in the order of the responses."""
    many, one = (results(name)["samples"]["learned"][what] for name in (many, one))
    assert (
        many["fields"] == one["fields"]
        and many["metrics"] == one["metrics"]
        and sum(many["counts"]) < sum(one["counts"])
    )
    assert len(set(one["fields"]["advantages"])) > 5 and sum(
        one["fields"]["token_weight"]
    ) == pytest.approx(2)
    assert what != "rejecting" or 0 < one["metrics"]["rollout_corr/rejected"] < 1


def test_each_token_is_on_one_rank_and_what_all_ranks_know_is_numbers_per_response(
    result, results, name
):
    """Counted in bytes: id, mask and log-probability of each token move once, and whatever the algorithm needs of the tokens of
    others is a few float64 per response."""
    ranks, samples = LAUNCHES[name].ranks, result["samples"]
    n, num_tokens = len(samples["all"][0]["group"]), len(samples["all"][0]["input_ids"])
    assert sum(samples["all"][0]["held"]) == n and all(
        0 < held <= 12 * (3 - ranks) for held in samples["all"][0]["held"]
    )
    for given in samples["bytes"]:
        assert (
            given.keys() == {"all_reduce", "all_gather_object"}
            and given["all_reduce"] == 20 * 5 * 8 + 4 * ranks
        )
        assert given["all_gather_object"] < 4000, "failures, with their traces"
    for what, learned in samples["learned"].items():
        moved, told, tokens = zip(*learned["bytes"])
        assert sum(tokens) == num_tokens and sum(
            x["all_to_all_single"] for x in moved
        ) == num_tokens * (8 + 4 + 4)
        assert all(x["all_reduce"] == 8 * ranks + 8 * 2 for x in moved), (
            "ranks, and micro-batches per mini-batch"
        )
        assert all(x.keys() == {"all_reduce"} for x in told)
        assert told[0]["all_reduce"] <= 8 * n * 30, what


def test_samples_are_scored_in_order_and_failures_are_left_out(result, name):
    samples = result["samples"]["all"][0]
    assert samples["scores"] == [len(text) for text in samples["texts"]]
    assert samples["prompts"] == [f"prompt {group - 10}" for group in samples["group"]]
    assert samples["texts"] == make_tokenizer().batch_decode(
        responses(samples), skip_special_tokens=True
    )
    prompts = make_prompts(5)
    for (ids, mask, *_), group in zip(sequences(samples), samples["group"], strict=True):
        assert ids[mask == 0].tolist() == prompts[group - 10]
    left = [samples["group"].count(10 + i) for i in range(5)]
    assert left[:3] == [4, 4, 4] and left[4] == 4 and 0 < left[3] < 4
    assert len(samples["failures"]) == 4 - left[3]
    for kind, row, response in samples["failures"]:
        assert kind == "raised" and row == {"bad": True} and len(response) % 2
    told = result["samples"]["too many failures"]
    assert len(told) == LAUNCHES[name].ranks and len(set(map(tuple, told))) == 1
    assert (
        told[0][0] == "InputError"
        and "of 20 samples" in told[0][1]
        and "an odd length" in told[0][1]
    )


def test_a_group_is_graded_in_one_call_whatever_the_layout(result):
    groups = result["samples"]["groups"]
    assert all(g == groups[0] for g in groups) and groups[0]["parts"]["size"] == [4.0] * 12
    ranks = [
        sorted(texts).index(text) / 4
        for i in (0, 4, 8)
        for texts in [groups[0]["texts"][i : i + 4]]
        for text in texts
    ]
    assert groups[0]["parts"]["rank"] == ranks and groups[0]["scores"] == [r + 4 for r in ranks]
    assert result["samples"]["all"][0]["parts"] == {}, "of a reward that is a number"


def test_a_response_to_a_row_is_the_same_in_another_batch(result):
    everything, two, one = (
        result["samples"]["all"][0],
        result["samples"]["two"],
        result["samples"]["one"],
    )
    assert two["texts"] == everything["texts"][-4:] + everything["texts"][8:12]
    assert one["texts"] == everything["texts"][4:5]


@pytest.mark.parametrize("after", ["Rollout()", "generate()"])
def test_the_trainers_random_generators_are_untouched(result, name, after):
    assert result[f"random state after {after}"] == [True] * LAUNCHES[name].ranks


def test_more_prompt_tokens_than_one_forward_pass_takes(result):
    assert result["long_prompts"]["prompt_tokens"] > MAX_PREFILL_TOKENS
    assert result["long_prompts"]["gap"] < ROLLOUT_BOUND
    assert result["long_prompts"]["last"] == result["long_prompts"]["last alone"]


def test_greedy_responses_are_the_likeliest_and_the_same_after_a_sleep(result, name):
    before, after = result["greedy"]["responses"]
    assert before == after and len(set(map(tuple, before))) > 6
    assert result["greedy"]["likeliest"] == [1.0] * LAUNCHES[name].ranks


# -- order of calls ----------------------------------------------------------------------------------------------------

SLEEPS, STALE = "generate() with nothing awake", "generate() with weights awake and base not valid"
CACHE, ASLEEP = "before the weights were updated", "update_weights() while the weights sleep"
PROTOCOL = [
    ("generate at first", SLEEPS),
    ("cache at first", f"wake('kv_cache') {CACHE}"),
    ("update at first", ASLEEP),
    ("wake", None),
    ("generate before update", STALE),
    ("cache before update", CACHE),
    ("update", None),
    ("generate without cache", "generate() with weights awake and weights valid"),
    ("cache", None),
    ("generate", None),
    ("sleep", None),
    ("generate asleep", SLEEPS),
    ("update asleep", ASLEEP),
    ("wake again", None),
    ("generate with old weights", STALE),
    ("cache with old weights", CACHE),
    ("a name that is none", "wake('all'): there are"),
    ("update again", None),
    ("cache again", None),
    ("generate again", None),
    ("broken update", "cut short"),
    ("generate after broken update", "base not valid"),
    ("update once more", None),
    ("generate once more", None),
]


def test_calls_out_of_order_are_refused(result, name):
    assert [what for what, _ in result["protocol"]] == [what for what, _ in PROTOCOL]
    for (what, answers), (_, message) in zip(result["protocol"], PROTOCOL):
        assert len(answers) == LAUNCHES[name].ranks
        for answer in answers:
            if message is None:
                assert answer is None, (what, answer)
            else:
                assert (
                    answer is not None and answer[0] == "RuntimeError" and message in answer[1]
                ), (what, answer)


# -- how responses are drawn and end -----------------------------------------------------------------------------------


def test_a_response_ends_with_an_end_token_or_is_truncated(result):
    drawn, used = sequences(result["plain"]), set()
    for prompt, (ids, mask, log_probs, truncated) in zip(make_prompts(12), drawn, strict=True):
        assert (
            mask.tolist() == [0] * len(prompt) + [1] * (len(ids) - len(prompt))
            and ids[mask == 0].tolist() == prompt
        )
        assert (log_probs[mask > 0] < 0).all() and (log_probs[mask == 0] == 0).all(), (
            "the end token has one too"
        )
        *before, last = ids[mask > 0].tolist()
        assert not set(before) & set(END_TOKENS)
        assert truncated == (last not in END_TOKENS) and (
            not truncated or len(before) + 1 == MAX_TOKENS
        )
        used.add(last)
    assert used & set(END_TOKENS) and {True, False} == set(result["plain"]["truncated"])


@pytest.mark.parametrize("what", CUTS)
@pytest.mark.parametrize("name", LONE)
def test_cut_distributions(results, folder, name, what):
    """vLLM's log-probabilities are those of the distribution that it sampled from, cut and scaled up again."""
    lost = []
    for ids, mask, log_probs, _ in sequences(results(name)["cuts"][what]):
        want = plain_log_probs(folder / LAUNCHES[name].family, ids, CUT_TEMPERATURE)
        p, order = want.exp().sort(descending=True)
        kept = {
            "top_k": torch.arange(p.shape[1]).expand_as(p) < CUTS[what],
            "top_p": p.cumsum(1) - p < CUTS[what],
            "min_p": p >= CUTS[what] * p[:, :1],
        }[what]
        kept_mass = (p * kept).sum(1)
        place = (order == ids[:, None]).int().argmax(1)
        assert kept[torch.arange(len(ids)), place][mask > 0].all()
        chosen = (want.gather(1, ids[:, None])[:, 0] - kept_mass.log())[mask > 0]
        assert (log_probs[mask > 0] - chosen).abs().max() < ROLLOUT_BOUND
        lost += (1 - kept_mass[mask > 0]).tolist()
    assert sum(lost) / len(lost) > 0.2, "nothing was cut"


@pytest.mark.parametrize("name", LONE)
def test_the_trainer_knows_the_words_that_sampling_kept(results, name):
    drawn = results(name)["kept words"]
    words, ids, mask, of_vllm, of_engine, blind = (
        torch.tensor(drawn[key])
        for key in ("kept_words", "input_ids", "loss_mask", "rollout_log_probs", "engine", "blind")
    )
    mask, counts = mask > 0, (words[:, 1:] >= 0).sum(1)
    assert torch.equal(words[mask, 0], ids[mask]) and (words[~mask] == -1).all()
    assert 1 <= counts[mask].min() < counts[mask].max() <= 12, (
        "top_k bounds their number, top_p and min_p vary it"
    )
    assert ((words[:, 1:] == ids[:, None]).sum(1) == 1)[mask].all(), (
        "the word that was drawn is one of them"
    )
    assert (
        (of_engine - of_vllm).abs().max()
        < ROLLOUT_BOUND
        < 0.1
        < (blind - of_vllm)[mask].abs().mean()
    )


@pytest.mark.parametrize("what", ONE_WORD)
@pytest.mark.parametrize("name", LONE)
def test_cuts_that_leave_one_word_are_greedy(results, name, what):
    words = results(name)["one word"]
    greedy = [r[:MAX_TOKENS] for r in results(name)["greedy"]["responses"][0]]
    assert responses(words[what]) == greedy != responses(results(name)["plain"])
    if what != "temperature":
        assert words[what]["rollout_log_probs"] == pytest.approx(
            [0] * len(words[what]["input_ids"]), abs=1e-6
        )


@pytest.mark.parametrize("name", ["moe", "tied"])
def test_stop_strings(results, name):
    """The plain responses, as far as the token that completes the stop string. (Of bytes that are no text, as those of the third
    model's responses are, what a string is depends on where one begins to decode.)"""
    tokenizer, result = make_tokenizer(), results(name)
    for case in result["stop strings"]:
        cut = 0
        for (free_ids, mask, free, free_truncated), (ids, _, log_probs, truncated) in zip(
            sequences(result["plain"]), sequences(case["stopped"]), strict=True
        ):
            start = int((mask == 0).sum())
            ends = [
                i + 1
                for i in range(start, len(free_ids))
                if case["stop"] in tokenizer.decode(free_ids[start : i + 1])
            ]
            assert ids.tolist() == free_ids[: min(ends, default=len(free_ids))].tolist()
            assert truncated == (free_truncated and not ends)
            assert (log_probs - free[: len(ids)]).abs().max() < LOG_PROB_BOUND
            cut += len(ids) < len(free_ids)
        assert cut and len(case["stop"]) in (1, 2)


# -- images ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_images(tmp_path_factory):
    """What rollout_images_worker.py wrote down, and the folder of its model."""
    folder = tmp_path_factory.mktemp("images")
    make_ocr_model(folder / "model")
    launch(1, "tests/rollout/rollout_images_worker.py", folder)
    return json.loads((folder / "results.json").read_text()), folder / "model"


def log_probs_with_images(directory, name, results, sizes, group):
    """[(vLLM's, transformers') log-probabilities of each response, its tokens] of prompts with images of these sizes."""
    processor, found = AutoProcessor.from_pretrained(directory), []
    model = AutoModelForImageTextToText.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    names = model_names(model, directory)
    model.load_state_dict({names[k]: x for k, x in weights_of(directory, name).items()})
    for i, (ids, mask, log_probs, truncated) in enumerate(sequences(results)):
        inputs, _ = asked(processor, i // group, sizes[i // group])
        words, number = ids[mask > 0], int(mask.sum())
        assert (
            ids[mask == 0].tolist() == inputs.pop("input_ids")[0].tolist()
            and len(ids) - number == mask.argmax()
        )
        assert truncated == (int(words[-1]) not in ENDS)
        kinds = torch.nn.functional.pad(inputs.pop("mm_token_type_ids"), (0, number))
        # A placeholder at the end is a word that was said, whatever is given to the model in its place.
        given = ids.index_fill(0, torch.tensor([len(ids) - 1]), 0)[None]
        with torch.no_grad():
            logits = model(
                **inputs
                | {
                    "input_ids": given,
                    "mm_token_type_ids": kinds,
                    "attention_mask": torch.ones_like(given),
                }
            ).logits[0]
        want = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0][-number:]
        found.append((log_probs[mask > 0], want, words.tolist()))
    return found


@pytest.mark.parametrize("name", WEIGHTS)
def test_log_probs_of_responses_to_images(with_images, name):
    """Without images and with one or two, several responses to each, and after each change of tower or projector."""
    results, directory = with_images
    for case, group in ((name, GROUP), (f"{name}, greedy", 1)):
        found = log_probs_with_images(directory, name, results[case], SIZES, group)
        assert len(found) == len(SIZES) * group
        assert max((got - want).abs().max() for got, want, _ in found) < ROLLOUT_BOUND
        assert len({tuple(words) for *_, words in found}) > 3
        said = [words[-1] in PLACEHOLDERS for *_, words in found]
        assert any(said) == (name == "placeholders") and not all(said)
        assert not any(PLACEHOLDERS & set(words[:-1]) for *_, words in found)
    before = log_probs_with_images(directory, "as they are", results[name], SIZES, GROUP)
    moved = [(got - want).abs().max() > 100 * ROLLOUT_BOUND for got, want, _ in before]
    if "another" in name:
        assert moved == [bool(SIZES[i // GROUP]) for i in range(len(moved))], (
            "stale features would go unseen"
        )


def test_texts_beside_images(with_images):
    results, _ = with_images
    assert responses(results["text"]) == responses(results["as they are"])[:GROUP]


def test_more_images_than_vllm_keeps_at_a_time(with_images):
    """With the closed-batch scheduler and with vLLM's own, bit for bit, where memory is short for features and for the KV cache."""
    results, directory = with_images
    assert results["as they are"] == results["vLLM's"] and results["many"] == results["vLLM's many"]
    num_steps, num_preempting = results["steps"]
    assert 0 < num_preempting < num_steps / 2 and num_steps < 40, (
        "features of a prompt were kept to the end of its response"
    )
    found = log_probs_with_images(directory, "as they are", results["many"], MANY, 1)
    assert (
        len(found) == len(MANY)
        and max((got - want).abs().max() for got, want, _ in found) < ROLLOUT_BOUND
    )


def test_the_processor_normalises_pixels_for_vllm_too():
    """vLLM 0.32 would hand the tower raw bytes where preprocessor_config.json has no mean, and the processor's class has one."""
    from vllm import EngineArgs

    told = EngineArgs(model="m", **image_arguments())
    assert vars(told).get("mm_device_do_normalize") is (
        False if "mm_device_do_normalize" in vars(EngineArgs) else None
    )


def test_vllm_and_the_trainer_must_see_the_same_image_tokens(with_images):
    results, _ = with_images
    assert results["another size"].startswith(
        "vLLM sees 12 image tokens in a prompt of 40 tokens with images of 84 x 56, 84 x 56 "
        "pixels, and the trainer 8 in 36 tokens"
    )
    assert "vLLM rejects a prompt with images" in results["too long"]


@pytest.mark.parametrize(
    "more, message",
    [
        ("model.lora.rank=4 model.lora.merge=true", None),
        ("model.lora.rank=4", "model.lora.merge=true"),
        ("rollout.speculative=ngram", "rollout.speculative=null"),
        ("", None),
    ],
)
def test_what_does_not_go_with_images(with_images, more, message):
    config = load(
        "ppo.yaml",
        [f"model.path={with_images[1]}", "data.train_files=x", "model.images=true", *more.split()],
    )
    if message is None:
        return check_rollout(config, 1)
    with pytest.raises(InputError, match="model.images=true.*" + re.escape(message)):
        check_rollout(config, 1)


def test_a_model_for_which_vllm_needs_torchvision(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)  # as where it is not installed
    make_model(tmp_path, "gemma3 with images")
    config = load(
        "ppo.yaml",
        [
            f"model.path={tmp_path}",
            "data.train_files=x",
            "model.images=true",
            "data.max_prompt_length=9",
            "rollout.max_tokens=9",
            "validation.max_tokens=9",
        ],
    )
    with pytest.raises(
        InputError, match="Gemma3ForConditionalGeneration: .*pip install torchvision"
    ):
        check_vllm_model(config)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LONE)
def test_what_vllm_does_not_take_is_an_input_error(results, name):
    kind, text = results(name)["too long"]
    assert (
        kind == "InputError"
        and "vLLM cannot start" in text
        and "max_position_embeddings=512" in text
    )


@pytest.mark.parametrize(
    "tp, world, message",
    [
        (2, 3, "rollout.tensor_parallel_size=2 does not divide the 3 ranks"),
        (4, 4, "rollout.tensor_parallel_size=4 does not divide the model's 2 attention heads"),
        (2, 4, None),
        (1, 3, None),
    ],
)
def test_layouts(folder, tp, world, message):
    config = load(
        "ppo.yaml",
        [f"model.path={folder}/tied", "data.train_files=x", f"rollout.tensor_parallel_size={tp}"],
    )
    if message is None:
        return check_rollout(config, world)
    with pytest.raises(InputError) as error:
        check_rollout(config, world)
    assert str(error.value) == message


def test_names_that_vllm_would_not_know_are_replaced(folder):
    assert vllm_weight_names(folder / "qwen3", False) == {}
    names = vllm_weight_names(folder / "tied_unsaid", False)
    assert (
        names
        and all(own == f"model.{name}" for name, own in names.items())
        and "embed_tokens.weight" in names
    )


def test_a_class_that_vllm_has_is_no_excuse(folder, tmp_path):
    """engines.check forgives it only that it has none."""
    assert in_vllm(folder / "qwen3")
    assert not in_vllm(make_model(tmp_path, "qwen3", model_type="openai-gpt"))


def test_end_tokens_come_from_both_files(folder, tmp_path):
    assert find_stop_token_ids(folder / "tied") == END_TOKENS
    shutil.copy(folder / "tied" / "config.json", tmp_path)
    assert find_stop_token_ids(tmp_path) == END_TOKENS[-1:]
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    (tmp_path / "generation_config.json").write_text("{}")
    with pytest.raises(InputError, match="has an eos_token_id"):
        find_stop_token_ids(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert find_stop_token_ids(tmp_path) == [0]


def test_seeds_are_apart_and_fit_into_64_bits():
    seeds = {
        request_seed(0, step, row, k)
        for step in range(-1, 9)
        for row in range(100)
        for k in range(10)
    }
    assert len(seeds) == 10_000 and 0 <= min(seeds) and 2**61 < max(seeds) < 2**62
    assert request_seed(1, 23) != request_seed(12, 3)


# -- critics -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CRITICS)
def test_a_critic_begins_at_zero_and_learns_the_returns(results, name):
    critic, batch = results(name)["critic"], make_returns()
    asked = batch.fields["loss_mask"] > 0
    assert critic["first"] == [0.0] * len(batch.input_ids)
    last = torch.tensor(critic["last"])
    assert (last[~asked] == 0).all() and (last[asked] != 0).all() and asked.sum() > 50
    assert (
        len(critic["losses"]) == CRITIC_STEPS and critic["losses"][-1] < 0.02 * critic["losses"][0]
    )
    assert (last - batch.fields["returns"])[asked].abs().mean() < 0.2
    assert critic["losses"][0] == pytest.approx(
        batch.fields["returns"][asked].square().sum().item() / 100, rel=1e-5
    )


@pytest.mark.parametrize("name", CRITICS)
def test_a_value_is_that_of_what_precedes_its_token(results, name):
    # Other tokens leave an expert's products with other rounding.
    assert results(name)["critic"]["another end"] == pytest.approx(
        results(name)["critic"]["last"], abs=1e-6
    )


@pytest.mark.parametrize("name", CRITICS)
def test_an_exported_critic_keeps_its_value_head(results, folder, name):
    assert results(name)["critic"]["read again"] == results(name)["critic"]["last"]
    with safe_open(folder / f"{name}_critic" / "model.safetensors", framework="pt") as tensors:
        assert tensors.get_slice("lm_head.weight").get_shape()[0] == 1


def test_a_critic_is_the_same_on_one_rank_and_two(results):
    one, two = results("moe")["critic"], results("moe_dp2")["critic"]
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-3)
    assert two["last"] == pytest.approx(one["last"], abs=1e-3)


@pytest.mark.parametrize("name", CRITICS)
def test_a_checkpoint_restores_actor_and_critic(results, name):
    critic = results(name)["critic"]
    assert critic["progress"] == {"step": 2, "kl_coef": 0.25}
    assert critic["restored"] == [True] * LAUNCHES[name].ranks
    assert critic["went on again"] == critic["went on"] and len(critic["went on"]) == 4

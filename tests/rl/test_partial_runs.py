"""train_ppo.py with rollout.partial: the same texts in other steps, and a kill changes nothing."""

import json
import re
import shutil
import sys

import pytest

from examples import colours
from examples.arithmetic import make_rows, make_tokenizer
from tests.support.launch import kill_all, launch, metrics, run, start, wait_for
from tests.support.models import make_model, make_ocr_model

pytestmark = pytest.mark.slow

BATCH_SIZE = 6
NUM_STEPS = 4
PARTIAL = [
    "rollout.partial.enable=true",
    "rollout.partial.oversample=1.6",
    "algorithm.rollout_is=token",
]
REWARD = """
def score(response):
    return float(len(response) % 2)
"""


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """A model whose responses have 1 to 40 tokens, since one token in ten ends them."""
    directory = tmp_path_factory.mktemp("partial")
    tokenizer = make_tokenizer()
    vocab_size = len(tokenizer)
    shape = {"vocab_size": vocab_size, "eos_token_id": tokenizer.eos_token_id}
    # vLLM has no attention on CPUs for heads of less than 32 numbers.
    make_model(directory / "model", "qwen3", num_hidden_layers=2, head_dim=32, **shape)
    tokenizer.save_pretrained(directory / "model")
    end_ids = list(range(tokenizer.eos_token_id % 10, vocab_size, 10))
    generation = {"eos_token_id": end_ids}
    (directory / "model" / "generation_config.json").write_text(json.dumps(generation))
    (directory / "reward.py").write_text(REWARD)
    rows = make_rows()[0][: BATCH_SIZE * NUM_STEPS]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def arguments(assets, out, *more):
    return [
        f"model.path={assets}/model",
        f"data.train_files={assets}/train.jsonl",
        f"output_dir={out}",
        "trainer.report=false",
        f"data.cache_dir={assets}/cache",
        "engine.compute_dtype=float32",
        f"data.train_batch_size={BATCH_SIZE}",
        "data.max_prompt_length=40",
        "data.max_tokens_per_micro_batch=400",
        f"reward.function={assets}/reward.py:score",
        "reward.num_workers=1",
        "rollout.n=2",
        "rollout.max_tokens=40",
        "rollout.kv_cache_gib=0.05",
        "optim.lr=0",
        f"trainer.total_steps={NUM_STEPS}",
        "trainer.rollout_freq=1",
        "trainer.save_freq=-1",
        *more,
    ]


def samples_of_step(out, step: int) -> list[dict]:
    lines = (out / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def samples(out) -> list[dict]:
    return sum((samples_of_step(out, step) for step in range(1, NUM_STEPS + 1)), [])


def texts(out) -> dict[str, list[str]]:
    """Return the responses to every prompt of a run."""
    responses: dict[str, list[str]] = {}
    for sample in samples(out):
        responses.setdefault(sample["prompt"], []).append(sample["response"])
    return {prompt: sorted(own) for prompt, own in responses.items()}


def ages(out) -> list[int]:
    """Return the age of every response of a run."""
    return [sample["age"] for sample in samples(out)]


@pytest.fixture(scope="module")
def plain(assets, tmp_path_factory):
    """A run with a learning rate of 0, in which no response continues."""
    out = tmp_path_factory.mktemp("plain")
    run([sys.executable, "train_ppo.py", *arguments(assets, out)])
    return out


@pytest.mark.parametrize(
    "num_ranks, settings",
    [
        (1, ["rollout.top_k=30"]),
        (2, []),
        (2, ["rollout.tensor_parallel_size=2"]),
    ],
    ids=["candidates", "two replicas", "tp"],
)
def test_with_the_same_weights_the_texts_are_the_same(assets, tmp_path, plain, num_ranks, settings):
    """A response draws from its random numbers where it left off, in whatever step."""
    launch(num_ranks, "train_ppo.py", *arguments(assets, tmp_path, *PARTIAL, *settings))
    lines = metrics(tmp_path)
    assert len(lines) == NUM_STEPS
    assert all(line["partial/carried_groups"] > 0 for line in lines[:-1])
    assert lines[-1]["partial/carried_groups"] == 0
    assert max(line["partial/age_1/tokens"] for line in lines) > 0.1
    assert max(ages(tmp_path)) == 1
    for line in lines:
        # The trainer's weights are those of all versions.
        assert line["rollout_corr/log_prob_gap"] < 1e-5
    if "rollout.top_k=30" in settings:
        return  # other distributions, so other texts
    assert texts(tmp_path) == texts(plain)


@pytest.fixture(scope="module")
def picture_assets(assets, tmp_path_factory):
    """A vision-language model whose responses have 1 to 40 tokens, and pictures."""
    directory = tmp_path_factory.mktemp("pictures")
    make_ocr_model(directory / "model")
    config = json.loads((directory / "model" / "config.json").read_text())["text_config"]
    end_ids = list(range(config["eos_token_id"] % 10, config["vocab_size"], 10))
    generation = {"eos_token_id": end_ids}
    (directory / "model" / "generation_config.json").write_text(json.dumps(generation))
    shutil.copy(assets / "reward.py", directory)
    rows = colours.make_rows(directory / "images")["train"][: BATCH_SIZE * NUM_STEPS]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def test_responses_to_pictures_continue(picture_assets, tmp_path):
    """With the same weights they are the same, and the trainer's log-probabilities are vLLM's."""
    images = ["model.images=true", "data.max_prompt_length=80"]
    plain = tmp_path / "plain"
    partial = tmp_path / "partial"
    for out, settings in ((plain, []), (partial, PARTIAL)):
        command = arguments(picture_assets, out, *images, *settings)
        run([sys.executable, "train_ppo.py", *command])
    lines = metrics(partial)
    assert max(line["partial/age_1/tokens"] for line in lines) > 0.1
    assert max(line["rollout_corr/log_prob_gap"] for line in lines) < 1e-5
    assert min(line["rollout_corr/effective_sample_size"] for line in lines) > 0.9999
    assert texts(partial) == texts(plain)


@pytest.fixture(scope="module")
def ascii_assets(assets, tmp_path_factory):
    """The same model with a tokenizer whose tokens are all ASCII, so that every text is valid."""
    directory = tmp_path_factory.mktemp("ascii")
    shutil.copytree(assets, directory, dirs_exist_ok=True)
    file = directory / "model" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    white_space = {"\u0120", "\u010a"}  # the space and the line break, which prompts have
    content["model"]["vocab"] = {
        name if name.isascii() or name in white_space else f"<{i}>": i
        for name, i in vocabulary.items()
    }
    file.write_text(json.dumps(content))
    return directory


def test_responses_end_at_texts_that_two_steps_have_drawn(ascii_assets, tmp_path):
    """The text that ends a response is all of it, except its first two and its last two tokens."""
    plain = tmp_path / "plain"
    run([sys.executable, "train_ppo.py", *arguments(ascii_assets, plain)])
    ends = {}
    for sample in samples(plain):
        tokens = re.findall(r"<\d+>|.", sample["response"])
        # The texts here lack special tokens, and those that vLLM searches have them.
        is_whole = len(tokens) == sample["length"]
        if len(tokens) > 8 and is_whole and sample["response"].isprintable():
            ends[sample["response"]] = End(tokens[:-2])
    assert len(ends) > 10
    out = tmp_path / "out"
    setting = f"rollout.stop={json.dumps([end.stop for end in ends.values()])}"
    run([sys.executable, "train_ppo.py", *arguments(ascii_assets, out, *PARTIAL, setting)])
    expected = []
    for prompt, wholes in texts(plain).items():
        expected += [(prompt, ends[text].text if text in ends else text) for text in wholes]
    drawn = [(sample["prompt"], sample["response"]) for sample in samples(out)]
    assert sorted(drawn) == sorted(expected)
    # A text is cut before its stop string, also if vLLM has not seen it. The tokens are not.
    expected_lengths = {(end.text, end.length) for end in ends.values()}
    lengths = {(sample["response"], sample["length"]) for sample in samples(out)}
    assert expected_lengths <= lengths
    assert num_interrupted_tokens(out) > 10
    assert max(line["rollout_corr/log_prob_gap"] for line in metrics(out)) < 1e-5


def num_interrupted_tokens(out) -> float:
    """Return how many tokens current weights have drawn in responses that older ones began."""
    num_tokens = 0.0
    for line, step in zip(metrics(out), range(1, NUM_STEPS + 1), strict=True):
        own = samples_of_step(out, step)
        share_of_old = line["partial/age_1/tokens"]
        num_tokens += sum(sample["length"] for sample in own if sample["age"])
        num_tokens -= share_of_old * sum(sample["length"] for sample in own)
    return num_tokens


class End:
    """The end of a response at a stop string.

    Args:
        tokens: the texts of its tokens. All but the first two are the stop string.

    Attributes:
        stop: the stop string.
        text: the text before it.
        length: the number of tokens with it.
    """

    def __init__(self, tokens: list[str]):
        self.stop = "".join(tokens[2:])
        self.text = "".join(tokens[:2])
        self.length = len(tokens)


LEARNING = [
    *PARTIAL,
    "optim.lr=1e-2",
    "model.lora.rank=4",
    "model.lora.alpha=8",
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.max_num_gen_batches=3",
    "algorithm.ppo_mini_batch_size=3",
]


def learned(out) -> list[dict]:
    """Return the metrics of every step that do not depend on how long something took."""
    return [without_times(line) for line in metrics(out)]


def without_times(line: dict) -> dict:
    return {name: x for name, x in line.items() if not name.startswith(("timing/", "perf/"))}


@pytest.fixture(scope="module")
def undisturbed(assets, tmp_path_factory):
    """A run that learns an adapter, which vLLM swaps between two parts of a response."""
    out = tmp_path_factory.mktemp("undisturbed")
    run([sys.executable, "train_ppo.py", *arguments(assets, out, *LEARNING)])
    return out


def test_tokens_of_older_weights_have_the_log_probs_that_they_were_drawn_with(undisturbed):
    """The weights of other tokens are 1; those of older ones vary, and make samples worth less."""
    is_old = [
        line.get("partial/age_1/effective_sample_size", 1.0) < 0.999
        for line in learned(undisturbed)
    ]
    assert any(is_old)
    for line in learned(undisturbed):
        assert line["partial/age_0/effective_sample_size"] == pytest.approx(1, abs=1e-5)
        assert line["partial/age_0/tokens"] + line["partial/age_1/tokens"] == pytest.approx(1)


def test_groups_that_teach_nothing_are_replaced_by_those_under_way(undisturbed):
    lines = learned(undisturbed)
    assert max(line["rollout/num_gen_batches"] for line in lines) > 1
    for step, line in enumerate(lines, 1):
        samples = (undisturbed / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()
        if line["rollout/num_gen_batches"] < 3:
            assert len(samples) == BATCH_SIZE * 2


def test_a_run_that_is_killed_resumes_to_the_last_bit(assets, tmp_path, undisturbed):
    """The checkpoint has the responses that continue."""
    more = [*LEARNING, "trainer.save_freq=1"]
    command = [sys.executable, "train_ppo.py", *arguments(assets, tmp_path, *more)]
    process = start(command, tmp_path / "log")
    checkpoint = tmp_path / "checkpoints" / "step_00000002"
    wait_for(checkpoint.exists, process)
    kill_all(process)
    run(command)
    assert learned(tmp_path) == learned(undisturbed)


def test_a_run_resumes_with_another_number_of_replicas(assets, tmp_path, plain):
    """Two replicas stop after two steps; one goes on with the groups of both."""
    out = tmp_path / "out"
    half = [*PARTIAL, "trainer.save_freq=2"]
    launch(2, "train_ppo.py", *arguments(assets, out, *half))
    shutil.rmtree(out / "checkpoints" / "step_00000004")
    launch(1, "train_ppo.py", *arguments(assets, out, *half))
    assert texts(out) == texts(plain)


def resume_with(undisturbed, out, assets, *changes, returncode=0):
    """Resume for one more step, without filter_groups and with other settings."""
    shutil.copytree(undisturbed, out)
    kept = [setting for setting in LEARNING if "filter_groups" not in setting]
    more = [*kept, f"trainer.total_steps={NUM_STEPS + 1}", *changes]
    command = [sys.executable, "train_ppo.py", *arguments(assets, out, *more)]
    return run(command, returncode=returncode)


def test_a_run_resumes_without_filter_groups(assets, tmp_path, undisturbed):
    """Filtered groups of earlier steps do not count among those of the run."""
    out = tmp_path / "out"
    resume_with(undisturbed, out, assets)
    samples = (out / "rollouts" / f"step_{NUM_STEPS + 1}.jsonl").read_text().splitlines()
    assert len(samples) == BATCH_SIZE * 2


def test_a_run_cannot_resume_with_another_top_k(assets, tmp_path, undisturbed):
    done = resume_with(undisturbed, tmp_path / "out", assets, "rollout.top_k=30", returncode=2)
    assert "rollout.top_k=30, but the checkpoint has responses" in done.stderr
    assert "resuming from" not in done.stdout, "models were loaded first"


def test_a_run_that_continues_responses_cannot_resume_without(assets, tmp_path, undisturbed):
    out = tmp_path / "out"
    shutil.copytree(undisturbed, out)
    more = [setting for setting in LEARNING if not setting.startswith("rollout.partial")]
    command = [sys.executable, "train_ppo.py", *arguments(assets, out, *more)]
    done = run(command, returncode=2)
    assert "rollout.partial.enable" in done.stderr

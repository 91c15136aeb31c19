"""A reward model in train_ppo.py: its scores are those of transformers, and its part in a step."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from config import InputError, defaults, load
from configs.errors import errors_about_model
from data.answered import encode_answered, find_unseen, form_of
from data.chat.tokenizer import ChatTokenizer
from data.prompts import PromptDataset, tokenize_prompts
from data.tokenization import plain_options
from engines.fsdp.engine import FSDPEngine
from engines.heads import Head
from examples.arithmetic import make_rows, make_tokenizer
from rl.reward_model import (
    check_conversations,
    check_reward_model,
    reward_model_config,
)
from rl.scoring import RewardModel, add_to_scores
from rl.settings import check_settings
from rollout.samples import Samples
from tests.support.launch import metrics, run
from tests.support.models import make_model
from tests.support.ranks import on_ranks
from tests.support.samples import configure, make_samples

OTHER_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
REWARDS = """
def letters(response):
    return sum(x.isalpha() for x in response) / max(1, len(response))

def parts(response):
    return {"letters": letters(response), "digits": sum(x.isdigit() for x in response) / 10}

def clash(response):
    return {"model": 1.0}

def fails_in_validation(response, row):
    return {"train": 0.5}[row.get("split", "train")]
"""
WEIGHT = 0.5


def make_other_tokenizer(missing: str = "") -> PreTrainedTokenizerFast:
    """Return a tokenizer with other ids, another template and another end token than the demo's.

    missing: characters that it has no tokens for.
    """
    alphabet = sorted({*pre_tokenizers.ByteLevel.alphabet()} - {*missing}, reverse=True)
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(x, special=True) for x in ("<|end|>", "<|pad|>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=OTHER_TEMPLATE,
    )


def make_reward_model(directory: Path, family: str, tokenizer, **shape) -> None:
    """Save a classifier of transformers with one label and a random score head."""
    make_model(directory / "lm", family, vocab_size=len(tokenizer), **shape)
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_pretrained(
        directory / "lm", num_labels=1, dtype=torch.float32
    )
    torch.nn.init.normal_(model.score.weight, std=0.3)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    """Make a policy, two reward models, and prompts.

    same/ has the policy's tokenizer and family, other/ has others.
    """
    folder = tmp_path_factory.mktemp("assets")
    tokenizer = make_tokenizer()
    shape = dict(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    # vLLM has no attention on CPUs for heads of less than 32 numbers.
    make_model(folder / "policy", "qwen3", num_hidden_layers=1, head_dim=32, **shape)
    tokenizer.save_pretrained(folder / "policy")
    make_reward_model(folder / "same", "qwen3", tokenizer)
    make_reward_model(folder / "other", "llama", make_other_tokenizer(), pad_token_id=None)
    (folder / "reward.py").write_text(REWARDS)
    train, val = make_rows()
    for name, rows in (("train", train[:40]), ("val", val[:6])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def make_policy(directory: Path, family: str, **shape) -> None:
    tokenizer = make_tokenizer()
    end_token = tokenizer.eos_token_id
    make_model(directory, family, vocab_size=len(tokenizer), eos_token_id=end_token, **shape)
    tokenizer.save_pretrained(directory)


def arguments(assets: Path, out: Path, model: str, *more: str) -> list[str]:
    return [
        f"model.path={assets}/policy",
        f"reward.model.path={assets}/{model}",
        f"reward.model.weight={WEIGHT}",
        f"reward.function={assets}/reward.py:letters",
        "reward.num_workers=1",
        f"data.train_files={assets}/train.jsonl",
        f"data.cache_dir={assets}/cache",
        f"output_dir={out}",
        "trainer.report=false",
        "engine.compute_dtype=float32",
        "data.train_batch_size=4",
        "data.max_prompt_length=40",
        "data.max_tokens_per_micro_batch=200",
        "rollout.n=4",
        "rollout.max_tokens=12",
        "rollout.kv_cache_gib=0.05",
        "optim.lr=1e-2",
        "trainer.total_steps=3",
        *more,
    ]


def command(num_ranks: int, *more) -> list[str]:
    start = [sys.executable]
    if num_ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return [*start, "train_ppo.py", *arguments(*more)]


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


class Judge:
    """A reward model in transformers."""

    def __init__(self, path: Path):
        self.model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(path)

    @torch.no_grad()
    def score(self, line: dict) -> float:
        """Return the score of a line of rollouts/step_N.jsonl, rendered by this tokenizer."""
        question = line["row"]["messages"][:-1]
        chat = [*question, {"role": "assistant", "content": line["response"]}]
        text = self.tokenizer.apply_chat_template(chat, tokenize=False)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self.model(torch.tensor([ids])).logits.item()


def check_scores(assets: Path, out: Path, model: str, num_steps: int = 3) -> None:
    """Check the scores in the files and metrics of a run against transformers."""
    judge = Judge(assets / model)
    for step in range(1, num_steps + 1):
        lines = lines_of(out / "rollouts" / f"step_{step}.jsonl")
        expected = [judge.score(line) for line in lines]
        assert max(expected) - min(expected) > 0.05, "different responses have different scores"
        for line, score in zip(lines, expected):
            assert line["parts"]["model"] == pytest.approx(score, abs=1e-5)
            of_function = sum(line["parts"].values()) - line["parts"]["model"]
            assert line["score"] == pytest.approx(of_function + WEIGHT * score, abs=1e-5)
        (metric,) = [line for line in metrics(out) if line["step"] == step]
        mean = sum(expected) / len(expected)
        assert metric["reward/model/mean"] == pytest.approx(mean, abs=1e-5)
        total = sum(line["score"] for line in lines) / len(lines)
        for name in ("score/mean", "critic/rewards/mean"):
            assert metric[name] == pytest.approx(total, abs=1e-5)
        assert metric["reward/model/cut"] == 0


# Policies other than that of the assets.
POLICIES = {
    "TWO_LAYERS": ("qwen3", {"num_hidden_layers": 2, "head_dim": 32}),
    "EXPERTS": ("qwen3_moe", {}),
}
RUNS = {
    "another tokenizer": (1, "other", []),
    "the policy's tokenizer, 2 ranks": (2, "same", []),
    "another tokenizer, 2 ranks": (2, "other", ["engine.use_remove_padding=false"]),
    "context parallel": (2, "other", ["engine.context_parallel_size=2"]),
    "one vLLM for 2 ranks": (2, "other", ["rollout.tensor_parallel_size=2"]),
    "Megatron": (2, "other", ["model_engine=megatron"]),
    "Megatron TP": (
        2,
        "same",
        ["model_engine=megatron", "engine.tensor_model_parallel_size=2"],
    ),
    "Megatron PP": (
        2,
        "same",
        [
            "model_engine=megatron",
            "engine.pipeline_model_parallel_size=2",
            "model.path=TWO_LAYERS",
        ],
    ),
    "a policy with experts": (
        2,
        "other",
        [
            "model_engine=megatron",
            "model.path=EXPERTS",
            "engine.expert_model_parallel_size=2",
            "engine.router_aux_loss_coef=0.01",
        ],
    ),
    "a policy with experts, and every other role without": (
        2,
        "other",
        [
            "model_engine=megatron",
            "model.path=EXPERTS",
            "engine.expert_model_parallel_size=2",
            "engine.router_aux_loss_coef=0.01",
            "algorithm.adv_estimator=gae",
            "critic.path=ASSETS/policy",
            "reference.path=ASSETS/policy",
            "algorithm.use_kl_loss=true",
            "algorithm.distill.teacher=ASSETS/policy",
        ],
    ),
    "adapters": (1, "other", ["model.lora.rank=4"]),
    "parts, gdpo": (
        1,
        "other",
        ["reward.function=ASSETS/reward.py:parts", "algorithm.adv_estimator=gdpo"],
    ),
    "a number, gdpo": (1, "other", ["algorithm.adv_estimator=gdpo"]),
    "a critic, a reference and penalties": (
        1,
        "other",
        [
            "algorithm.adv_estimator=gae",
            "algorithm.use_kl_in_reward=true",
            "data.train_batch_size=8",
            "algorithm.ppo_mini_batch_size=4",
        ],
    ),
    "partial": (
        1,
        "other",
        ["rollout.partial.enable=true", "algorithm.rollout_is=token"],
    ),
    "a teacher": (
        1,
        "other",
        ["algorithm.distill.teacher=ASSETS/policy"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_scores_are_those_of_transformers(assets, tmp_path, name):
    num_ranks, model, settings = RUNS[name]
    settings = [setting.replace("ASSETS", str(assets)) for setting in settings]
    for policy, (family, shape) in POLICIES.items():
        if f"model.path={policy}" in settings:
            make_policy(tmp_path / "policy", family, **shape)
            settings.append(f"model.path={tmp_path}/policy")
    out = tmp_path / "out"
    run(command(num_ranks, assets, out, model, *settings))
    check_scores(assets, out, model)
    line = metrics(out)[-1]
    assert line["timing/reward_model_compute"] > 0
    if "parts" in name:
        assert {"reward/letters/mean", "reward/digits/mean"} <= line.keys()
        assert "reward/function/mean" not in line
    else:
        assert "reward/function/mean" in line


@pytest.mark.slow
def test_validation_reports_the_reward_model_beside_the_function(assets, tmp_path):
    val = [f"data.val_files={assets}/val.jsonl", "trainer.test_freq=2", "trainer.total_steps=2"]
    run(command(1, assets, tmp_path, "other", *val))
    judge = Judge(assets / "other")
    for step in (0, 2):
        lines = lines_of(tmp_path / "validation" / f"step_{step}.jsonl")
        (metric,) = [line for line in metrics(tmp_path) if line["step"] == step]
        scores = [judge.score(line) for line in lines]
        assert metric["val/reward_model"] == pytest.approx(sum(scores) / len(scores), abs=1e-5)
        mean = sum(line["score"] for line in lines) / len(lines)
        assert metric["val/letters"] == pytest.approx(mean), "the function's score alone"
    check_scores(assets, tmp_path, "other", num_steps=2)


@pytest.mark.slow
def test_a_validation_without_any_graded_response_has_no_scores(assets, tmp_path):
    rows = [json.loads(line) | {"split": "val"} for line in (assets / "val.jsonl").open()]
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        f"reward.function={assets}/reward.py:fails_in_validation",
        "reward.max_failure_rate=1",
        f"data.val_files={tmp_path}/val.jsonl",
        "trainer.test_freq=1",
        "trainer.total_steps=1",
    ]
    out = tmp_path / "out"
    run(command(1, assets, out, "other", *settings))
    before, after = metrics(out)
    for line in (before, after):
        assert line["val/failures"] == 6
        assert line["val/fails_in_validation"] is None
        assert line["val/reward_model"] is None
    assert after["reward/model/mean"] is not None


@pytest.mark.slow
def test_the_policy_learns_from_the_reward_model_alone(assets, tmp_path):
    settings = ["reward.function=none", "trainer.total_steps=24", "data.train_batch_size=8"]
    run(command(1, assets, tmp_path, "other", *settings))
    scores = [line["reward/model/mean"] for line in metrics(tmp_path)]
    assert sum(scores[-4:]) / 4 > sum(scores[:4]) / 4 + 0.1
    line = metrics(tmp_path)[-1]
    assert line["score/mean"] == pytest.approx(WEIGHT * line["reward/model/mean"], abs=1e-6)
    assert "reward/function/mean" not in line


def test_the_configuration_of_the_reward_model_is_the_actors_without_its_changes():
    """It keeps the settings of the engine, and reads conversations with a template of its own."""
    actor = ["model.freeze=[embed]", "model.lora.rank=4", "model.mtp.enable_train=true"]
    actor += ["data.chat_template=own.jinja", "data.max_tokens_per_micro_batch=77"]
    config = reward_model_config(configure("reward.model.path=judge", *actor))
    assert config.model.path == "judge"
    assert config.model.freeze == []
    assert config.model.lora == defaults("model.lora")
    assert config.model.mtp == defaults("model.mtp")
    assert config.data.chat_template is None
    assert config.data.max_tokens_per_micro_batch == 77


def held_by(samples: Samples, rank: int) -> Samples:
    """Return samples as a rank has them, from those of which one process holds all."""
    samples = replace(samples, rank=rank)
    indices = samples.held.tolist()
    return replace(
        samples,
        batch=samples.batch.select(indices),
        texts=[samples.texts[i] for i in indices],
        prompts=[samples.prompts[i] for i in indices],
    )


def scored_on_rank(config: DictConfig, samples: Samples) -> tuple[Samples, list[tuple]]:
    """Return the scored samples, and the parts that the engine has moved to host memory."""
    device = torch.device("cpu")
    engine = FSDPEngine(reward_model_config(config), device, 1, optimize=False, head=Head.VALUES)
    offloaded = []
    engine.offload = lambda *parts: offloaded.append(parts)
    model = RewardModel(config, engine, ["parameters"])
    return model.score(held_by(samples, dist.get_rank()), None), offloaded


# The longer conversation has 53 tokens.
@pytest.mark.parametrize(
    "num_ranks, num_positions, max_tokens",
    [(1, 30, 200), (1, 53, 200), (2, 53, 200), (1, 54, 200), (1, 512, 30), (1, 512, 200)],
)
def test_scores_in_forks_are_those_of_transformers(tmp_path, num_ranks, num_positions, max_tokens):
    """The score takes one token of the model's positions, and of a micro-batch.

    All ranks know all scores and metrics, although each of two ranks holds one response.
    """
    path = tmp_path / "judge"
    tokenizer = make_other_tokenizer()
    make_reward_model(path, "qwen3", tokenizer, max_position_embeddings=num_positions)
    pairs = [f"reward.model.path={path}", f"data.max_tokens_per_micro_batch={max_tokens}"]
    question = {"role": "user", "content": "What is 1+1"}
    samples = make_samples([1, 2], [0.0, 1.0], [0, 1])
    prompts = [replace(prompt, row={"messages": [question]}) for prompt in samples.prompts]
    samples = replace(samples, prompts=prompts, texts=["2", "the number 3, I think"])
    samples.owner[0] = num_ranks - 1
    results = on_ranks(num_ranks, tmp_path, scored_on_rank, configure(*pairs), samples)
    judge = Judge(path)
    longest = min(num_positions, max_tokens) - 1
    expected = []
    num_cut = 0
    for text in samples.texts:
        chat = [question, {"role": "assistant", "content": text}]
        rendered = tokenizer.apply_chat_template(chat, tokenize=False)
        ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        num_cut += len(ids) > longest
        with torch.no_grad():
            expected.append(judge.model(torch.tensor([ids[-longest:]])).logits.item())
    assert (num_cut > 0) == (longest < 53)
    mean = sum(expected) / 2
    for scored, offloaded in results:
        assert offloaded == [("parameters",)], "the device is left to engines that are trained"
        assert scored.parts["model"].tolist() == pytest.approx(expected, abs=1e-5)
        assert scored.scores.tolist() == [0.0, 1.0]
        metrics = scored.metrics
        assert metrics["reward/model/cut"] == num_cut / 2
        assert metrics["reward/model/mean"] == pytest.approx(mean, abs=1e-5)
        assert metrics["reward/model/std"] == pytest.approx(abs(expected[0] - mean), abs=1e-5)


@pytest.mark.slow
def test_a_long_conversation_is_cut_at_its_beginning(assets, tmp_path):
    """A reward model with room for 30 tokens."""
    short = tmp_path / "short"
    tokenizer = make_other_tokenizer()
    make_reward_model(short, "qwen3", tokenizer, max_position_embeddings=30)
    run(command(1, assets, tmp_path / "out", "other", f"reward.model.path={short}"))
    line = metrics(tmp_path / "out")[-1]
    assert line["reward/model/cut"] > 0.5
    judge = Judge(short)
    for record in lines_of(tmp_path / "out/rollouts/step_3.jsonl"):
        chat = [*record["row"]["messages"][:-1]]
        chat.append({"role": "assistant", "content": record["response"]})
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][-29:]
        with torch.no_grad():
            expected = judge.model(torch.tensor([ids])).logits.item()
        assert record["parts"]["model"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_a_dry_run_shows_the_reward_model(assets, tmp_path):
    output = run(command(1, assets, tmp_path, "other", "dry_run=true")).stdout
    assert "memory of one rank for the reward model" in output


MISTAKES = {
    "episodes": (
        ["rollout.episode=examples/tools.py:answer", "reward.function=exact_match"],
        "does not work with rollout.episode=",
    ),
    "images": (["model.images=true"], "does not work with model.images=true"),
    "filter_groups": (
        ["algorithm.filter_groups.enable=true"],
        "does not work with algorithm.filter_groups.enable=true",
    ),
    "remax": (
        ["algorithm.adv_estimator=remax"],
        "does not work with algorithm.adv_estimator=remax",
    ),
    "weights of no function": (
        ["reward.function=none", "reward.weights.letters=2"],
        "reward.weights={'letters': 2} does nothing with reward.function=none",
    ),
    "a weight in the wrong place": (
        ["reward.weights.model=2"],
        "the weight of the reward model is reward.model.weight",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_does_not_work_is_one_line(assets, tmp_path, mistake):
    settings, message = MISTAKES[mistake]
    config = load("ppo.yaml", arguments(assets, tmp_path, "other", *settings))
    with pytest.raises(InputError) as error:
        check_reward_model(config)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_weight_without_a_reward_model_does_nothing(assets, tmp_path):
    settings = arguments(assets, tmp_path, "other", "reward.model.path=null")
    with pytest.raises(InputError, match=r"reward.model.weight=0.5 does nothing without reward"):
        check_settings(load("ppo.yaml", settings))


@pytest.fixture(scope="module")
def wrong_models(assets) -> Path:
    tokenizer = make_tokenizer()
    model = AutoModelForSequenceClassification.from_pretrained(assets / "same/lm", num_labels=3)
    model.save_pretrained(assets / "three_labels")
    tokenizer.save_pretrained(assets / "three_labels")
    tokenizer.chat_template = None
    make_reward_model(assets / "no_template", "qwen3", tokenizer)
    tokenizer = make_other_tokenizer()
    tokenizer.add_tokens(["more", "words"])
    (assets / "adapter").mkdir()
    (assets / "adapter" / "adapter_config.json").write_text("{}")
    make_reward_model(assets / "small", "qwen3", make_other_tokenizer())
    tokenizer.chat_template = OTHER_TEMPLATE.replace("assistant: ", "").replace(
        "{{ m.role }}", "more"
    )
    tokenizer.save_pretrained(assets / "small")
    return assets


WRONG_MODELS = {
    "policy": "is not a reward model: its files have no score.weight",
    "adapter": "is a PEFT adapter, not a complete model: merge it first",
    "three_labels": "is a classifier with 3 labels: a reward model has one",
    "no_template": "the tokenizer has no chat template, and the prompts are messages",
    "small": "use the tokenizer that belongs to the model",
    "nowhere": "is neither a directory nor a model on the hub",
}


@pytest.mark.slow
@pytest.mark.parametrize("model", WRONG_MODELS)
def test_a_wrong_model_is_one_line_before_weights_are_loaded(wrong_models, tmp_path, model):
    done = run(command(1, wrong_models, tmp_path, model), returncode=2)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert WRONG_MODELS[model] in line
    assert "reward.model.path=" in line


def test_errors_of_an_engine_name_the_reward_model(assets, tmp_path):
    config = load("ppo.yaml", arguments(assets, tmp_path, "other"))
    setting = f"reward.model.path={assets}/other"
    cases = {
        f"model.path={assets}/other lacks weights": f"{setting} lacks weights",
        f"{setting} lacks weights": f"{setting} lacks weights",
        "too few layers": f"{setting}: too few layers",
    }
    for problem, expected in cases.items():
        with (
            pytest.raises(InputError) as error,
            errors_about_model("reward.model.path", config.reward.model.path),
        ):
            raise InputError(problem)
        assert str(error.value) == expected


@pytest.mark.slow
def test_a_part_with_the_name_of_the_reward_model_is_one_line(assets, tmp_path):
    settings = f"reward.function={assets}/reward.py:clash"
    done = run(command(1, assets, tmp_path, "other", settings), returncode=2)
    assert 'returns a part named "model"' in done.stderr


def make_judge(assets: Path, folder: Path, condition: str) -> Path:
    """Copy the reward model "other", with a template that rejects chats for which this holds."""
    shutil.copytree(assets / "other", folder / "judge")
    tokenizer = make_other_tokenizer()
    rejection = f"{{% if {condition} %}}{{{{ raise_exception('not this one') }}}}{{% endif %}}"
    tokenizer.chat_template = rejection + OTHER_TEMPLATE
    tokenizer.save_pretrained(folder / "judge")
    return folder / "judge"


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prompts_with_a_system_message(assets: Path, folder: Path) -> PromptDataset:
    """Return four prompts, of which the third has a system message."""
    rows = lines_of(assets / "train.jsonl")[:4]
    rows[2]["messages"].insert(0, {"role": "system", "content": "Hi"})
    write_rows(folder / "rows.jsonl", rows)
    files = str(folder / "rows.jsonl")
    tokenizer = make_tokenizer()
    path = tokenize_prompts(files, tokenizer, options_of(), folder / "cache", assets / "policy")
    return PromptDataset.load(path)


def test_a_row_that_the_template_rejects_is_named_at_the_start(assets, tmp_path):
    dataset = prompts_with_a_system_message(assets, tmp_path)
    judge = make_judge(assets, tmp_path, "messages[0].role == 'system'")
    settings = [*arguments(assets, tmp_path, "other"), f"reward.model.path={judge}"]
    with pytest.raises(InputError) as error:
        check_conversations(load("ppo.yaml", settings), {"data.val_files": dataset}, 1000)
    question = dataset[2].question
    expected = f"reward.model.path={judge}: prompt 3 of data.val_files ({question!r}): the chat"
    assert str(error.value).startswith(expected)
    assert "\n" not in str(error.value)


def test_a_later_row_with_a_character_that_would_be_dropped_is_named(assets, tmp_path):
    """Its form is that of the first row, which can be read."""
    rows = lines_of(assets / "train.jsonl")[:3]
    rows[2]["messages"][0]["content"] += " Really?"
    write_rows(tmp_path / "rows.jsonl", rows)
    files = str(tmp_path / "rows.jsonl")
    tokenizer = make_tokenizer()
    path = tokenize_prompts(files, tokenizer, options_of(), tmp_path / "cache", assets / "policy")
    judge = make_judge(assets, tmp_path, "false")
    make_other_tokenizer(missing="R").save_pretrained(judge)
    settings = [*arguments(assets, tmp_path, "other"), f"reward.model.path={judge}"]
    datasets = {"data.train_files": PromptDataset.load(path)}
    with pytest.raises(InputError, match="prompt 3 of data.train_files .* no token for 'R' in"):
        check_conversations(load("ppo.yaml", settings), datasets, 1000)


def test_a_token_without_a_row_of_the_embedding_is_named_at_the_start(assets, tmp_path):
    """The highest id of the rows is the end token's, 256: an embedding of 257 rows has it."""
    dataset = prompts_with_a_system_message(assets, tmp_path)
    config = load("ppo.yaml", arguments(assets, tmp_path, "other"))
    check_conversations(config, {"data.val_files": dataset}, 257)
    with pytest.raises(InputError) as error:
        check_conversations(config, {"data.val_files": dataset}, 256)
    assert str(error.value) == (
        f"reward.model.path={assets}/other has an embedding of 256 tokens, and its tokenizer "
        f"writes the token '<|end|>' (256) for prompt 1 of data.val_files "
        f"({dataset[0].question!r}): use the tokenizer that belongs to the model"
    )


def test_what_the_template_leaves_out_of_a_later_row_is_a_warning(assets, tmp_path, capsys):
    dataset = prompts_with_a_system_message(assets, tmp_path)
    judge = make_judge(assets, tmp_path, "false")
    tokenizer = AutoTokenizer.from_pretrained(judge)
    tokenizer.chat_template = OTHER_TEMPLATE.replace("in messages", "in messages[-2:]")
    tokenizer.save_pretrained(judge)
    settings = [*arguments(assets, tmp_path, "other"), f"reward.model.path={judge}"]
    check_conversations(load("ppo.yaml", settings), {"data.train_files": dataset}, 1000)
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("warning:")]
    assert "leaves out content of prompt 3 of data.train_files" in line


@pytest.mark.slow
def test_a_conversation_that_one_rank_cannot_render_is_one_line(assets, tmp_path):
    """The form of the row is that of others, so that only its text is rejected, in the run."""
    judge = make_judge(assets, tmp_path, "'zebra' in messages[0].content | string")
    rows = lines_of(assets / "train.jsonl")[:4]
    rows[1]["messages"][0]["content"] += " zebra"
    write_rows(tmp_path / "rows.jsonl", rows)
    settings = [
        f"data.train_files={tmp_path}/rows.jsonl",
        "data.shuffle=false",
        f"reward.model.path={judge}",
    ]
    done = run(command(2, assets, tmp_path / "out", "other", *settings), returncode=1)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert f"reward.model.path={judge}: the chat template rejects" in line


def test_groups_that_only_the_reward_model_tells_apart_are_informative():
    samples = make_samples([1] * 4, [1.0] * 4, [0, 0, 1, 1])
    samples = replace(samples, parts={"model": torch.tensor([0.5, 0.5, 0.25, 1.0])})
    config = configure("reward.model.path=judge", f"reward.model.weight={WEIGHT}")
    scored = add_to_scores(config, samples)
    assert scored.scores.tolist() == [1.25, 1.25, 1.125, 1.5]
    assert scored.metrics["reward/informative_groups"] == 0.5
    assert scored.metrics["score/mean"] == scored.scores.mean().item()
    assert scored.metrics["reward/function/mean"] == 1
    alone = configure("reward.model.path=judge", "reward.function=none")
    assert add_to_scores(alone, samples).parts.keys() == {"model"}, "no function has graded them"


@pytest.mark.parametrize(
    "function, parts, expected",
    [
        ("math", {}, {"function": [1.0, 2.0]}),
        ("none", {}, {}),
        ("math", {"letters": [0.5, 1.0]}, {"letters": [0.5, 1.0]}),
    ],
    ids=["a number", "no function", "parts"],
)
def test_the_parts_of_a_score_are_those_of_the_function_and_that_of_the_model(
    function, parts, expected
):
    """A function that returns a number is a part of its own."""
    config = configure(
        "reward.model.path=judge", "reward.model.weight=0.5", f"reward.function={function}"
    )
    samples = make_samples([1, 2], [1.0, 2.0], [0, 0])
    own = {name: torch.tensor(values) for name, values in parts.items()}
    of_model = {"model": torch.tensor([-4.0, 2.0])}
    old_metrics = {"score/mean": 1.5, "reward/failures": 0.0}
    samples = replace(samples, parts=own | of_model, metrics=old_metrics)
    scored = add_to_scores(config, samples)
    assert scored.scores.tolist() == [1.0 - 2.0, 2.0 + 1.0]
    actual = {name: values.tolist() for name, values in scored.parts.items()}
    assert actual == expected | {"model": [-4.0, 2.0]}
    assert list(actual)[-1] == "model"
    for name, values in expected.items():
        assert scored.metrics[f"reward/{name}/mean"] == sum(values) / 2
    assert "reward/model/mean" not in scored.metrics, "score() has added it"
    assert scored.metrics["score/mean"] == 1.0
    assert scored.metrics["reward/failures"] == 0.0
    assert samples.metrics == old_metrics
    assert samples.parts.keys() == own.keys() | {"model"}


# -- conversations ---------------------------------------------------------------------------------


def options_of(*settings: str):
    return plain_options(load("ppo.yaml", ["model.path=/m", "data.train_files=/f", *settings]).data)


@pytest.mark.parametrize("tokenizer", [make_tokenizer(), make_other_tokenizer()])
def test_conversations_are_rendered_by_the_reward_models_template(tokenizer):
    chat = ChatTokenizer(tokenizer)
    question = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "1+1="}]
    rows = [
        {"messages": question},
        {"messages": [*question, {"role": "assistant", "content": "the true answer"}]},
        {"prompt": "1+1="},
    ]
    encoded = encode_answered(rows, ["2", "2", ""], chat, options_of())
    text = tokenizer.apply_chat_template(
        [*question, {"role": "assistant", "content": "2"}], tokenize=False
    )
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert encoded[0] == encoded[1] == expected
    empty = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": ""}]
    text = tokenizer.apply_chat_template(empty, tokenize=False)
    assert encoded[2] == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_rows_whose_contents_have_another_type_have_another_form():
    chat = ChatTokenizer(make_tokenizer())

    def form(content="1+1=", fields=(), **columns):
        message = {"role": "user", "content": content, **dict(fields)}
        return form_of({"prompt": [message], **columns}, chat, options_of())

    assert form("1+1=") == form("2+3=")
    assert form("1+1=") != form([{"type": "text", "text": "1+1="}])
    assert form(fields={"reasoning": "", "name": None}) == form()
    assert form(fields={"reasoning": "two"}) not in (form(), form(fields={"thinking": "two"}))
    assert form(enable_thinking=True) not in (form(), form(enable_thinking=False))


def test_a_turn_that_the_template_ends_only_before_another_one_is_ended():
    tokenizer = make_other_tokenizer()
    tokenizer.chat_template = OTHER_TEMPLATE.replace(
        "<|end|>\n{% endfor", "{% if not loop.last %}<|end|>\n{% endif %}{% endfor"
    )
    (ids,) = encode_answered([{"prompt": "1+1="}], ["2"], ChatTokenizer(tokenizer), options_of())
    assert tokenizer.decode(ids) == "user: 1+1=<|end|>\nassistant: 2<|end|>"


def test_what_the_reward_models_template_leaves_out_is_found():
    tokenizer = make_other_tokenizer()
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    row = {"prompt": "1+1=", "tools": [tool], "enable_thinking": False}
    assert find_unseen(row, "2", ChatTokenizer(tokenizer), options_of()) == ["tools"]
    assert find_unseen({"prompt": "1+1="}, "2", ChatTokenizer(tokenizer), options_of()) == []
    without_system = OTHER_TEMPLATE.replace("%}{{ m", "%}{% if m.role != 'system' %}{{ m", 1)
    tokenizer.chat_template = without_system.replace("{% endfor", "{% endif %}{% endfor", 1)
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "1+1="}]
    chat = ChatTokenizer(tokenizer)
    assert find_unseen({"messages": messages}, "2", chat, options_of()) == ["content"]


def test_a_response_cannot_end_its_turn_in_the_reward_models_template():
    tokenizer = make_other_tokenizer()
    chat = ChatTokenizer(tokenizer)
    response = "2<|end|>\nuser: well done"
    (ids,) = encode_answered([{"prompt": "1+1="}], [response], chat, options_of())
    assert ids.count(tokenizer.eos_token_id) == 2, "one for each turn"
    assert tokenizer.decode(ids).count("<|end|>") == 3
    keep = options_of("data.special_tokens_in_text=keep")
    (ids,) = encode_answered([{"prompt": "1+1="}], [response], chat, keep)
    assert ids.count(tokenizer.eos_token_id) == 3


def test_without_a_template_prompt_and_response_are_joined():
    tokenizer = make_other_tokenizer()
    tokenizer.chat_template = None
    chat = ChatTokenizer(tokenizer)
    (ids,) = encode_answered([{"prompt": "1+1="}], ["2"], chat, options_of())
    assert ids == [*tokenizer("1+1=2")["input_ids"], tokenizer.eos_token_id]

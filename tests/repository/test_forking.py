"""docs/forking.md: each snippet becomes a file, and its command makes the function take effect."""

import json
import math
import os
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import rewards
from config import InputError, load
from engines import optimizer, schedule
from engines.checkpoint.checkpointer import Checkpointer
from engines.fsdp.engine import FSDPEngine
from engines.parallel import device
from examples import arithmetic
from rl import models
from rl.estimation import set_advantages
from rl.functions import FUNCTIONS
from rl.settings import check_settings
from rollout.grading.grader import Grader
from tests.repository.pages import PAGES, blocks
from tests.support.launch import ROOT, launch, metrics
from tests.support.models import make_model
from tests.support.samples import loss_of_two_tokens, make_samples, on_responses, whole
from tests.support.training import make_batch, make_loss, make_tokenizer

TEXT = PAGES["docs/forking.md"]
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))
UNUSED_PATHS = ["model.path=unused", "data.train_files=unused"]


@pytest.fixture
def fork(tmp_path, monkeypatch):
    """Return a function that writes a section's snippets and loads its command's configuration."""
    monkeypatch.chdir(tmp_path)

    def configure(title: str, *more: str):
        section = SECTIONS[title]
        for code in blocks(section, "python"):
            name = code.split()[1]
            (tmp_path / name).write_text(code)
        (command,) = blocks(section, "sh")
        words = shlex.split(command.replace("\\\n", ""))
        (script,) = (word for word in words if word.startswith("train_"))
        first, *settings = words[words.index(script) + 1 :]
        assert first == "my.yaml"
        defaults = script.removeprefix("train_").replace(".py", ".yaml")
        return load(defaults, [*UNUSED_PATHS, "engine.compute_dtype=float32", *settings, *more])

    return configure


def test_a_reward_of_a_group(fork, tmp_path):
    config = fork("A reward for a whole group", f"output_dir={tmp_path}")
    responses = ["the answer is 7", "7", "8", "  7"]
    grader = Grader(config)
    results = grader.grade([("3+4", response, {"answer": 7}) for response in responses], [0] * 4)
    grader.close()
    assert [result.parts["correct"] for result in results] == [1, 1, 0, 1]
    shortness = [result.parts["short"] for result in results]
    assert shortness == pytest.approx([1 / 3, 1, 0, 2 / 3])
    scores = [result.score for result in results]
    assert scores == pytest.approx([1 + 1 / 6, 1.5, 0, 1 + 1 / 3])


def test_add_an_advantage(fork):
    config = fork("Add an advantage")
    check_settings(config)
    samples = make_samples([1, 2, 3, 2], [1, 5, 2, 7], [0, 0, 0, 1])
    logged = set_advantages(config, samples, whole(samples), 0.0)
    fields = samples.batch.fields
    assert on_responses(samples, fields["advantages"]) == [-0.5, 1.5, 1.5, 0, 0, 0, 0, 0]
    assert on_responses(samples, fields["returns"]) == [1, 5, 5, 2, 2, 2, 7, 7]
    assert logged["critic/advantages/max"] == 1.5
    assert "group" not in fields
    assert list(models.role_configs(config)) == ["actor"]


def test_add_a_policy_loss(fork):
    config = fork("Add a policy loss")
    advantages = [1.0, -2.0]
    result = loss_of_two_tokens(config, old_log_probs=[-1.0, -1.0], advantages=advantages)
    # With tau = 2, the loss of a token is -2 A gate; it counts half.
    losses = []
    gradient = []
    gates = []
    for advantage, log_ratio in zip(advantages, (-0.5, 0.5)):
        ratio = math.exp(log_ratio)
        gate = 1 / (1 + math.exp(-2 * (ratio - 1)))
        gates.append(gate)
        losses.append(-2 * advantage * gate)
        gradient.append(-2 * advantage * 2 * gate * (1 - gate) * ratio / 2)
    assert result.loss == pytest.approx(sum(losses) / 2)
    assert result.gradient == pytest.approx(gradient)
    assert result.metrics["gate"] == pytest.approx(sum(gates) / 2)
    assert "pg_clipfrac" not in result.metrics


def test_distil_a_teacher(fork):
    config = fork("Distil a teacher")
    roles = models.role_configs(config)
    assert set(roles) == {"actor", "reference"}
    assert roles["reference"].model.path == "Qwen/Qwen2.5-32B-Instruct"
    result = loss_of_two_tokens(config, ref_log_probs=[-3.5, -0.25], advantages=[0.0, 0.0])
    # The first token is too likely, the second not likely enough.
    assert result.gradient == [1.0, -0.125]
    assert result.metrics["teacher_kl"] == (2 - 0.25) / 2
    assert rewards.find(config.reward.function)("prompt", "response", {}) == 0


def test_add_a_metric(fork):
    clip = "algorithm.clip_ratio_high=0.1"
    fields = {"old_log_probs": [-1.0, -1.0], "advantages": [1.0, -2.0]}
    wrapped = loss_of_two_tokens(fork("Add a metric", clip), **fields)
    built_in = loss_of_two_tokens(fork("Add a metric", clip, "algorithm.loss_mode=ppo"), **fields)
    assert wrapped.metrics.pop("surprise") == 1
    assert wrapped == built_in


@pytest.fixture(scope="module")
def this_device():
    """Initialize a process group of this process alone, and restore the environment afterwards."""
    variables = dict(os.environ)
    initialized = device.init()
    os.environ.clear()
    os.environ.update(variables)
    yield initialized
    device.shutdown()


@dataclass
class OptimizerRun:
    """An engine on one process whose optimizer is a function of the user."""

    config: object
    device: torch.device

    def __post_init__(self):
        self.engine = FSDPEngine(self.config, self.device, 4)

    def train(self, *batch_numbers: int) -> list[float]:
        """Train on these batches, which are also the numbers of the steps; return the rates."""
        rates = []
        for number in batch_numbers:
            batch = make_batch(number)
            loss = make_loss(len(batch.input_ids))
            rates.append(self.engine.train_batch(batch, loss, number)["lr"])
        return rates

    def parameters(self) -> dict[str, torch.Tensor]:
        named = self.engine.hf.named_parameters()
        return {name: parameter.detach().clone() for name, parameter in named}

    def gradients(self) -> dict[str, torch.Tensor]:
        named = self.engine.hf.named_parameters()
        return {name: parameter.grad.clone() for name, parameter in named}


@pytest.fixture
def sgd_config(fork, tmp_path):
    model = make_model(tmp_path / "model", "llama", num_hidden_layers=1)
    config = fork(
        "Another optimizer",
        f"model.path={model}",
        "optim.clip_grad=0",
        "data.max_tokens_per_micro_batch=1000",
    )
    FSDPEngine.check(config, 1)
    return config


def test_another_optimizer_makes_its_steps(sgd_config, this_device):
    sgd = OptimizerRun(sgd_config, this_device)
    (torch_optimizer,) = sgd.engine.optimizers
    assert isinstance(torch_optimizer, torch.optim.SGD)
    gradients = []
    torch_optimizer.register_step_pre_hook(lambda *_: gradients.append(sgd.gradients()))
    initial = sgd.parameters()
    rates = sgd.train(0, 1)
    for name, trained in sgd.parameters().items():
        weights = initial[name]
        decay = sgd_config.optim.weight_decay if weights.ndim > 1 else 0.0
        momentum = 0.0
        for rate, gradient in zip(rates, gradients):
            momentum = 0.95 * momentum + gradient[name] + decay * weights
            weights = weights - rate * momentum
        torch.testing.assert_close(trained, weights)


def test_another_optimizer_resumes(sgd_config, this_device, tmp_path):
    """Offloading does not change its state either."""
    original = OptimizerRun(sgd_config, this_device)
    original.train(0, 1)
    checkpointer = Checkpointer(tmp_path / "checkpoints", 1, asynchronous=False)
    checkpointer.save(2, original.engine, {"step": 2}, make_tokenizer())
    original.engine.offload("optimizer")
    original.train(2, 3)
    resumed = OptimizerRun(sgd_config, this_device)
    checkpointer.load(tmp_path / "checkpoints" / "step_00000002", resumed.engine)
    resumed.train(2, 3)
    expected = dict(original.engine.export_weights())
    weights = dict(resumed.engine.export_weights())
    assert weights.keys() == expected.keys()
    for name, matrix in expected.items():
        assert torch.equal(weights[name], matrix), name


SLOW = """
import torch

def slow(params, lr, **_):
    params[-1]["lr"] = lr / 4
    return [torch.optim.SGD([group], lr=lr) for group in params]
"""


def test_several_optimizers_keep_the_ratio_of_their_rates(fork, this_device, tmp_path):
    model = make_model(tmp_path / "model", "llama", num_hidden_layers=1)
    (tmp_path / "slow.py").write_text(SLOW)
    config = load("sft.yaml", [*UNUSED_PATHS, f"model.path={model}", "optim.name=slow.py:slow"])
    run = OptimizerRun(config, this_device)
    (rate,) = run.train(1)
    assert len(run.engine.optimizers) == 3
    rates = []
    for torch_optimizer in run.engine.optimizers:
        rates += [group["lr"] for group in torch_optimizer.param_groups]
    assert rates == [rate, rate, rate / 4]


def test_a_function_that_returns_no_optimizer_is_rejected(fork, tmp_path):
    (tmp_path / "wrong.py").write_text("def wrong(**_): pass\n")
    config = fork("A schedule", "optim.name=wrong.py:wrong")
    message = "optim.name=wrong.py:wrong returned"
    with pytest.raises(InputError, match=message):
        optimizer.build(torch.nn.Linear(2, 2), [], config)


def test_a_schedule(fork):
    ratios = ["optim.lr_warmup_steps_ratio=0.2", "optim.min_lr_ratio=0.1"]
    config = fork("A schedule", *ratios, "optim.lr=1.0")
    schedule.check_schedule(config.optim)
    rates = [schedule.learning_rate(config.optim, step, 10) for step in (0, 1, 2, 6, 10)]
    assert rates == pytest.approx([0.5, 1, 1, 0.1 + 0.9 * 0.25, 0.1])


def copy_with_tool(root: Path) -> None:
    """Make a copy of the repository and apply the edits of the section about tools.

    A model of random weights rarely writes a sum, so any two digits are a call.
    """
    ignored = shutil.ignore_patterns(".*", "runs", "tests", "docs")
    shutil.copytree(ROOT, root, ignore=ignored)
    (code,) = blocks(SECTIONS["A tool call"], "python")
    call = r'r"(\d+)\+(\d+)=$"'
    assert code.count(call) == 1
    (root / "tool_rollout.py").write_text(code.replace(call, r'r"([0-9]).*([0-9])"'))
    (edit,) = blocks(SECTIONS["A tool call"], "diff")
    removed, added = edit.splitlines()
    assert removed.startswith("-")
    assert added.startswith("+")
    roles = root / "rl" / "roles.py"
    source = roles.read_text()
    assert source.count(removed[1:] + "\n") == 1
    roles.write_text(source.replace(removed[1:], added[1:]))


@pytest.mark.slow
def test_a_turn_of_a_tool(tmp_path):
    """The trainer has the result where vLLM had it: log-probabilities of second turns agree."""
    copy_with_tool(tmp_path / "fork")
    tokenizer = arithmetic.make_tokenizer()
    model = make_model(
        tmp_path / "model",
        "qwen3",
        head_dim=32,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
    )
    tokenizer.save_pretrained(model)
    prompts = [{"prompt": f"What is {n}+{n}", "answer": 2 * n} for n in range(8)]
    lines = [json.dumps(prompt) + "\n" for prompt in prompts]
    (tmp_path / "prompts.jsonl").write_text("".join(lines))
    out = tmp_path / "out"
    launch(
        1,
        tmp_path / "fork" / "train_ppo.py",
        f"model.path={model}",
        f"data.train_files={tmp_path}/prompts.jsonl",
        f"output_dir={out}",
        "trainer.report=false",
        f"data.cache_dir={tmp_path}/cache",
        "data.train_batch_size=8",
        "data.max_prompt_length=64",
        "rollout.n=4",
        "rollout.max_tokens=32",
        "trainer.total_steps=1",
        "trainer.rollout_freq=1",
        "rollout.kv_cache_gib=0.1",
        "engine.compute_dtype=float32",
        "data.max_tokens_per_micro_batch=256",
    )
    (step,) = metrics(out)
    lines = (out / "rollouts" / "step_1.jsonl").read_text().splitlines()
    lengths = [json.loads(line)["length"] for line in lines]
    num_second_turns = sum(length > 32 for length in lengths)
    assert num_second_turns > 3
    assert step["rollout_corr/log_prob_gap"] < 1e-4


@pytest.mark.parametrize(
    "key, title",
    [("adv_estimator", "Add an advantage"), ("loss_mode", "Add a policy loss")],
)
def test_the_text_names_every_argument(key, title):
    named = re.findall(r"`(\w+)(?: \[\w\])?`", SECTIONS[title])
    assert set(named) == set(FUNCTIONS[key].vocabulary)


def test_the_keys_in_the_text_exist():
    configs = [load(script, UNUSED_PATHS) for script in ("ppo.yaml", "dpo.yaml")]
    keys = re.findall(r"`(algorithm|optim|reward)\.(\w+)`", TEXT)
    assert len(set(keys)) > 10
    for group, key in keys:
        assert any(key in config.get(group, {}) for config in configs)

"""docs/forking.md: each snippet is written to a file, its command line is read, and the function takes effect."""

import json
import math
import os
import re
import shlex
import shutil

import pytest
import torch

import rewards
from common import plugins
from config import InputError, load
from engines import optimizer, schedule
from engines.checkpoint.checkpointer import Checkpointer
from engines.fsdp.engine import FSDPEngine
from engines.parallel import device
from examples import arithmetic
from rl import models
from rl.collecting import collect
from rl.estimation import set_advantages
from rl.functions import FUNCTIONS, find_function
from rl.losses import ActorLoss
from rl.settings import check_settings
from rollout.grading.grader import Grader
from tests.support.launch import ROOT, launch, metrics
from tests.support.models import make_model
from tests.support.samples import make_samples, on_responses, whole
from tests.support.training import make_batch, make_loss, make_tokenizer

TEXT = (ROOT / "docs" / "forking.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))


@pytest.fixture
def fork(tmp_path, monkeypatch):
    """fork(section) writes its files to the working directory and returns the configuration of its command line."""
    monkeypatch.chdir(tmp_path)

    def configure(title, *more):
        for name, code in re.findall(
            r"```python\n# (\w+\.py)\n(.*?)```", SECTIONS[title], re.DOTALL
        ):
            (tmp_path / name).write_text(code)
        (command,) = re.findall(r"```sh\n(.*?)```", SECTIONS[title], re.DOTALL)
        words = shlex.split(command.replace("\\\n", ""))
        script = words.index(next(word for word in words if word.startswith("train_")))
        assert words[script + 1] == "my.yaml"
        settings = ["model.path=unused", "data.train_files=unused", "engine.compute_dtype=float32"]
        return load(
            words[script].removeprefix("train_").replace(".py", ".yaml"),
            [*settings, *words[script + 2 :], *more],
        )

    return configure


def loss_of(config, **fields):
    """(loss, metrics, gradient) of actor_loss for two responses of one token each, each of a weight of 0.5."""
    check_settings(config)
    half = torch.tensor([0.5, 0.5])
    fields = {name: torch.tensor(values) for name, values in fields.items()}
    log_probs = torch.tensor([-1.5, -0.5], requires_grad=True)
    loss, amounts = ActorLoss(config, 2)(
        log_probs,
        torch.tensor([1.0, 3.0]),
        {
            "loss_weight": half,
            "token_weight": half,
            "sequence": torch.tensor([0, 1]),
            "loss_mask": torch.ones(2),
            "rollout_log_probs": log_probs.detach(),
            **fields,
        },
    )
    loss.backward()
    return (
        loss.item(),
        {name: amount.item() for name, amount in amounts.items()},
        log_probs.grad.tolist(),
    )


def test_a_reward_of_a_group(fork, tmp_path):
    config = fork("A reward of a group", f"output_dir={tmp_path}")
    grader = Grader(config)
    responses, row = ["the answer is 7", "7", "8", "  7"], {"answer": 7}
    results = grader.grade([("3+4", response, row) for response in responses], [0] * 4)
    grader.close()
    assert [result.parts for result in results] == [
        {"correct": c, "short": pytest.approx(s)}
        for c, s in ((1, 1 / 3), (1, 1), (0, 0), (1, 2 / 3))
    ]
    assert [result.score for result in results] == pytest.approx([1 + 1 / 6, 1.5, 0, 1 + 1 / 3])


def test_add_an_advantage(fork):
    config = fork("Add an advantage")
    check_settings(config)
    samples = make_samples([1, 2, 3, 2], [1, 5, 2, 7], [0, 0, 0, 1])
    metrics = set_advantages(config, samples, whole(samples), 0.0)
    fields = samples.batch.fields
    assert on_responses(samples, fields["advantages"]) == [-0.5, 1.5, 1.5, 0, 0, 0, 0, 0]
    assert on_responses(samples, fields["returns"]) == [1, 5, 5, 2, 2, 2, 7, 7]
    assert metrics["critic/advantages/max"] == 1.5
    assert "group" not in fields
    assert list(models.role_configs(config)) == ["actor"]


def test_add_a_policy_loss(fork):
    config = fork("Add a policy loss")
    loss, metrics, gradient = loss_of(config, old_log_probs=[-1.0, -1.0], advantages=[1.0, -2.0])
    ratios, advantages = [math.exp(-0.5), math.exp(0.5)], [1.0, -2.0]
    gates = [1 / (1 + math.exp(-2 * (r - 1))) for r in ratios]
    assert loss == pytest.approx(sum(-a * 2 * gate / 2 for a, gate in zip(advantages, gates)))
    assert gradient == pytest.approx(
        [-a * 2 * 2 * gate * (1 - gate) * r / 2 for a, gate, r in zip(advantages, gates, ratios)]
    )
    assert metrics["gate"] == pytest.approx(sum(gates) / 2)
    assert "pg_clipfrac" not in metrics


def test_distil_a_teacher(fork):
    config = fork("Distil a teacher")
    roles = models.role_configs(config)
    assert roles["reference"].model.path == "Qwen/Qwen2.5-32B-Instruct"
    assert set(roles) == {
        "actor",
        "reference",
    }
    loss, metrics, gradient = loss_of(config, ref_log_probs=[-3.5, -0.25], advantages=[0.0, 0.0])
    assert gradient == [1.0, -0.125], "the first token is too likely, the second not likely enough"
    assert metrics["teacher_kl"] == (2 - 0.25) / 2
    assert rewards.find(config.reward.function)("prompt", "response", {}) == 0


def test_add_a_metric(fork):
    fields = {"old_log_probs": [-1.0, -1.0], "advantages": [1.0, -2.0]}
    loss, metrics, gradient = loss_of(
        fork("Add a metric", "algorithm.clip_ratio_high=0.1"), **fields
    )
    plain = loss_of(
        fork("Add a metric", "algorithm.clip_ratio_high=0.1", "algorithm.loss_mode=ppo"), **fields
    )
    assert metrics.pop("surprise") == 1
    assert (loss, metrics, gradient) == plain


@pytest.fixture(scope="module")
def this_device():
    """A process group of this process alone, of which the environment of other processes says nothing."""
    environment, threads = dict(os.environ), torch.get_num_threads()
    torch.set_num_threads(1)
    found = device.init()
    os.environ.clear()
    os.environ.update(environment)
    yield found
    device.shutdown()
    torch.set_num_threads(threads)


def test_another_optimizer(fork, this_device, tmp_path):
    """SGD's steps, by hand; a resume; a group with a learning rate of its own keeps its ratio."""
    model = make_model(tmp_path / "model", "llama", num_hidden_layers=1)
    config = fork(
        "Another optimizer",
        f"model.path={model}",
        "optim.clip_grad=0",
        "data.max_tokens_per_micro_batch=1000",
    )
    FSDPEngine.check(config, 1)

    def steps(engine, numbers):
        batches = [make_batch(n) for n in numbers]
        return [
            engine.train_batch(b, make_loss(len(b.input_ids)), n)["lr"]
            for n, b in zip(numbers, batches)
        ]

    engine = FSDPEngine(config, this_device, 4)
    gradients, before = [], {n: p.detach().clone() for n, p in engine.hf.named_parameters()}
    (sgd,) = engine.optimizers
    assert isinstance(sgd, torch.optim.SGD)
    sgd.register_step_pre_hook(
        lambda *_: gradients.append({n: p.grad.clone() for n, p in engine.hf.named_parameters()})
    )
    rates = steps(engine, [0, 1])
    for name, p in engine.hf.named_parameters():
        decay = config.optim.weight_decay if p.ndim > 1 else 0.0
        w, buffer = before[name], 0.0
        for rate, g in zip(rates, gradients):
            buffer = 0.95 * buffer + g[name] + decay * w
            w = w - rate * buffer
        torch.testing.assert_close(p.detach(), w)
    checkpointer = Checkpointer(tmp_path / "checkpoints", 1, asynchronous=False)
    checkpointer.save(2, engine, {"step": 2}, make_tokenizer())
    engine.offload("optimizer")
    steps(engine, [2, 3])
    again = FSDPEngine(config, this_device, 4)
    checkpointer.load(tmp_path / "checkpoints" / "step_00000002", again)
    steps(again, [2, 3])
    assert all(
        torch.equal(a, b) for (_, a), (_, b) in zip(engine.export_weights(), again.export_weights())
    )

    (tmp_path / "slow.py").write_text(
        "import torch\ndef slow(params, lr, **_):\n    params[-1]['lr'] = lr / 4\n"
        "    return [torch.optim.SGD([g], lr=lr) for g in params]\n"
    )
    engine = FSDPEngine(
        load(
            "sft.yaml",
            [f"model.path={model}", "data.train_files=unused", "optim.name=slow.py:slow"],
        ),
        this_device,
        4,
    )
    (rate,) = steps(engine, [1])
    assert [g["lr"] for o in engine.optimizers for g in o.param_groups] == [
        rate,
        rate,
        rate / 4,
    ]
    assert len(engine.optimizers) == 3
    (tmp_path / "wrong.py").write_text("def wrong(**_): pass\n")
    with pytest.raises(
        InputError, match="optim.name=wrong.py:wrong returned"
    ):
        optimizer.build(engine.model, [], fork("A schedule", "optim.name=wrong.py:wrong").optim)


def test_a_schedule(fork):
    config = fork(
        "A schedule", "optim.lr_warmup_steps_ratio=0.2", "optim.min_lr_ratio=0.1", "optim.lr=1.0"
    )
    schedule.check_schedule(config.optim)
    rates = [schedule.learning_rate(config.optim, step, 10) for step in (0, 1, 2, 6, 10)]
    assert rates == pytest.approx([0.5, 1, 1, 0.1 + 0.9 * 0.25, 0.1])


def test_a_turn_of_a_tool(tmp_path):
    """A model of random weights calls more often if any two digits are a call. Its log-probabilities are vLLM's in the second
    turn, too, so the result stands where the trainer has it, and is not learned."""
    root, tokenizer, (code,) = (
        tmp_path / "fork",
        arithmetic.make_tokenizer(),
        re.findall(
            r"```python\n# tool_rollout.py\n(.*?)```", SECTIONS["A turn of a tool"], re.DOTALL
        ),
    )
    shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".*", "runs", "tests", "docs"))
    (line,) = re.findall(
        r"```python\n(from tool_rollout import .*\n)```", SECTIONS["A turn of a tool"]
    )
    roles = root / "rl" / "roles.py"
    roles.write_text(roles.read_text().replace("\n\n\nclass ", f"\n{line}\n\nclass ", 1))
    pattern = r'r"(\d+)\+(\d+)=$"'
    assert code.count(pattern) == 1
    (root / "tool_rollout.py").write_text(code.replace(pattern, r'r"([0-9]).*([0-9])"'))
    model = make_model(
        tmp_path / "model",
        "qwen3",
        head_dim=32,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
    )
    tokenizer.save_pretrained(model)
    rows = [{"prompt": f"What is {n}+{n}", "answer": 2 * n} for n in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    launch(
        1,
        root / "train_ppo.py",
        f"model.path={model}",
        f"data.train_files={tmp_path}/prompts.jsonl",
        f"output_dir={tmp_path}/out",
        f"data.cache_dir={tmp_path}/cache",
        "data.train_batch_size=8",
        "data.max_prompt_length=64",
        "rollout.n=4",
        "rollout.max_tokens=32",
        "validation.max_tokens=32",
        "trainer.total_steps=1",
        "trainer.rollout_freq=1",
        "rollout.kv_cache_gib=0.1",
        "engine.compute_dtype=float32",
        "data.max_tokens_per_micro_batch=256",
    )
    (step,) = metrics(tmp_path / "out")
    rows = [
        json.loads(line)
        for line in (tmp_path / "out" / "rollouts" / "step_1.jsonl").read_text().splitlines()
    ]
    assert sum(row["length"] > 32 for row in rows) > 3, "no response has a second turn"
    assert step["rollout_corr/log_prob_gap"] < 1e-4


def test_the_arguments_are_those_that_the_text_names():
    for key, title in (("adv_estimator", "Add an advantage"), ("loss_mode", "Add a policy loss")):
        named = re.findall(r"`(\w+)(?: \[\w\])?`", SECTIONS[title])
        assert set(FUNCTIONS[key].vocabulary) == set(named)
    keys = re.findall(r"`((?:algorithm|optim|reward)\.\w+)`", TEXT)
    config = load("ppo.yaml", ["model.path=unused", "data.train_files=unused"])
    assert len(set(keys)) > 10
    assert all(key.partition(".")[2] in config[key.partition(".")[0]] for key in keys)


# -- what a function names ---------------------------------------------------------------------------------------------

NAMES = """
import torch
def plain(rewards, mask, num_sequences, **_): return rewards, rewards
def valued(rewards, num_sequences, values, **_): return rewards, rewards
def referred(num_sequences, rewards, ref_log_probs, old_log_probs, **_): return rewards, rewards
def greedy(outcome, baseline, **_): return outcome, outcome
def discounted(rewards, num_sequences, gamma, **_): return rewards, rewards
def unrewarded(mask, num_sequences, **_): return mask, mask
def of_sequences(rewards, num_sequences, **_): return rewards, torch.zeros(num_sequences)
def of_the_step(rewards, mask, sequence, group, **_): return rewards - (rewards * mask).mean(), rewards
def of_none(outcome, **_): return outcome.mean(), outcome
def counted(rewards, num_sequences, total, **_): return rewards / total(rewards) * num_sequences, rewards
def needy(rewards, num_sequences, alpha, **_): return rewards, rewards
def narrow(rewards): return rewards, rewards
def loss(log_probs, advantages, *, beta=1.0, **_): return -log_probs * advantages * beta, {}
def loss_of_all(log_probs, group, scores, values, **_): return log_probs * group * scores, {"scores": scores}
def summed(log_probs, **_): return log_probs.sum(), {}
def alone(log_probs, **_): return log_probs
def measured(log_probs, **_): return log_probs, {"largest": 0.5}
def one(rewards, **_): return rewards
def total(lengths, **_): return lengths.sum()
def mean_gap(log_probs, ref_log_probs, **_): return (log_probs - ref_log_probs).mean()
def square(log_probs, ref_log_probs, **_): return (log_probs - ref_log_probs) ** 2
def halves(lengths, **_): return torch.full_like(lengths, 0.5)
def of_tokens(mask, **_): return mask / mask.sum()
"""


@pytest.fixture
def named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(NAMES)
    return lambda *pairs: load(
        "ppo.yaml",
        [
            "model.path=unused",
            "data.train_files=unused",
            *(
                pair if pair.startswith(("rollout.", "data.")) else f"algorithm.{pair}"
                for pair in pairs
            ),
        ],
    )


@pytest.mark.parametrize(
    "pairs, roles",
    [
        (["adv_estimator=my.py:plain"], {"actor"}),
        (["adv_estimator=my.py:valued"], {"actor", "critic"}),
        (["adv_estimator=my.py:referred"], {"actor", "reference"}),
        (["loss_mode=my.py:loss"], {"actor"}),
        (["loss_mode=my.py:loss_of_all"], {"actor", "critic"}),
    ],
)
def test_what_is_named_is_built(named, pairs, roles):
    check_settings(named(*pairs))
    assert set(models.role_configs(named(*pairs))) == roles
    assert models.needs_old_log_probs(named(*pairs), 1, 0) == (
        pairs == ["adv_estimator=my.py:referred"]
    )


@pytest.mark.parametrize(
    "pairs, message",
    [
        (
            ["adv_estimator=my.py:plan"],
            "adv_estimator=my.py:plan: {my} has no function 'plan'; the nearest is my.py:plain",
        ),
        (["adv_estimator=your.py:plain"], "your.py: no such file"),
        (
            ["adv_estimator=my.py:needy"],
            "adv_estimator=my.py:needy: missing a required argument: 'alpha'; it is called with rewards,",
        ),
        (["adv_estimator=my.py:narrow"], "got an unexpected keyword argument 'mask'"),
        (
            ["adv_kwargs.beta=1"],
            "algorithm.adv_kwargs.beta: grpo has no such parameter of its own, nor any other",
        ),
        (
            ["adv_estimator=my.py:needy", "adv_kwargs.alpha=1", "adv_kwargs.alhpa=1"],
            "adv_kwargs.alhpa: my.py:needy has no such",
        ),
        (
            ["loss_mode=my.py:loss", "loss_kwargs.bta=1"],
            "loss_kwargs.bta: my.py:loss has no such parameter of its own, only beta",
        ),
        (
            ["loss_mode=my.py:loss", "loss_kwargs.log_probs=1"],
            "loss_kwargs.log_probs: my.py:loss has no such parameter of its own",
        ),
        (
            ["loss_mode=my.py:loss", "clip_ratio_high=0.3"],
            "clip_ratio_high=0.3 does nothing without algorithm.loss_mode=ppo or gspo",
        ),
        (
            ["adv_estimator=my.py:plain", "gamma=0.5"],
            "does nothing without algorithm.adv_estimator=gae or reinforce_plus_plus",
        ),
        (
            ["adv_estimator=my.py:unrewarded", "use_kl_in_reward=true"],
            "does nothing without an adv_estimator that reads rewards",
        ),
        (
            ["adv_estimator=my.py:of_the_step"],
            "names mask, which covers one rank's tokens: name outcome instead",
        ),
        (
            ["loss_agg_mode=my.py:of_tokens"],
            "missing a required argument: 'mask'; it is called with lengths, max_tokens by name",
        ),
        (
            ["kl_loss_type=my.py:plain", "use_kl_loss=true"],
            "kl_loss_type=my.py:plain: missing a required argument: 'rewards'",
        ),
    ],
)
def test_functions_that_cannot_be_called_so(named, tmp_path, pairs, message):
    with pytest.raises(InputError) as error:
        check_settings(named(*pairs))
    assert message.replace("{my}", str(tmp_path / "my.py")) in str(error.value)


def test_discounts_kwargs_and_weights_reach_them(named):
    check_settings(named("adv_estimator=my.py:discounted", "gamma=0.5"))
    check_settings(named("adv_estimator=my.py:needy", "adv_kwargs.alpha=1"))
    assert plugins.parameters(
        find_function(named("loss_mode=my.py:loss", "loss_kwargs.beta=3"), "loss_mode")
    ) == {"log_probs", "advantages", "beta"}
    config = named(
        "loss_mode=my.py:loss",
        "loss_kwargs.beta=3",
        "use_kl_loss=true",
        "kl_loss_type=my.py:square",
        "kl_loss_coef=0.5",
    )
    loss, metrics, _ = loss_of(config, advantages=[1.0, -2.0], ref_log_probs=[-1.0, -1.0])
    assert loss == pytest.approx(3 * (1.5 - 2 * 0.5) / 2 + 0.5 * 0.25)
    assert metrics["kl_loss"] == 0.25
    samples = make_samples([1, 2, 3], [1, 5, 2], [4, 4, 6])
    set_advantages(
        named("loss_mode=my.py:loss_of_all", "loss_agg_mode=my.py:halves"),
        samples,
        whole(samples),
        0.0,
    )
    fields = samples.batch.fields
    assert on_responses(samples, fields["group"]) == [4, 4, 4, 6, 6, 6]
    assert on_responses(samples, fields["scores"]) == [1, 5, 5, 2, 2, 2]
    assert on_responses(samples, fields["loss_weight"]) == [0.5] * 6
    set_advantages(named("adv_estimator=my.py:counted"), samples, whole(samples), 0.0)
    assert on_responses(samples, fields["advantages"]) == pytest.approx(
        [3 / 8, 0, 15 / 8, 0, 0, 3 / 4]
    )


def test_shapes_that_a_broadcast_would_hide(named):
    samples = make_samples([2, 3], [1, 5], [0, 0])
    for function, said in (
        ("of_sequences", r"token, .*9\], not \[2\]"),
        ("of_none", r"response, .*2\], not \[\]"),
    ):
        with pytest.raises(
            InputError, match=f"adv_estimator=my.py:{function} must return one number per {said}"
        ):
            set_advantages(named(f"adv_estimator=my.py:{function}"), samples, whole(samples), 0.0)
    samples.batch.fields |= {
        name: torch.zeros(9) for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs")
    }
    for pairs, message in (
        (["adv_estimator=my.py:one"], "one must return two things, advantages and returns"),
        (
            ["loss_agg_mode=my.py:total"],
            "total must return one number per response, shape [2], not []",
        ),
        (
            ["use_kl_in_reward=true", "kl_penalty=my.py:mean_gap"],
            "mean_gap must return one number per token",
        ),
    ):
        with pytest.raises(
            InputError, match=re.escape(f"algorithm.{pairs[-1].partition(':')[0]}:{message}")
        ):
            set_advantages(named(*pairs), samples, whole(samples), 0.0)
    for pairs, message in (
        (["loss_mode=my.py:summed"], "summed must return one number per token, shape [2], not []"),
        (
            ["loss_mode=my.py:alone"],
            "alone must return two things, losses and a dictionary of metrics",
        ),
        (
            ["loss_mode=my.py:measured"],
            "measured must return one number per token, shape [2], not 0.5",
        ),
        (
            ["use_kl_loss=true", "kl_loss_type=my.py:mean_gap"],
            "mean_gap must return one number per token",
        ),
    ):
        with pytest.raises(
            InputError, match=re.escape(f"algorithm.{pairs[-1].partition(':')[0]}:{message}")
        ):
            loss_of(named(*pairs), advantages=[1.0, -2.0], ref_log_probs=[-1.0, -1.0])


def test_a_greedy_response_is_drawn_for_who_names_a_baseline(named):
    drawn = []

    def draw(dataset, rows, sampling, *seed, first_group):
        drawn.append((sampling.n, sampling.temperature))
        return make_samples(
            [1] * 2 * sampling.n,
            range(2 * sampling.n),
            [g for g in range(2) for _ in range(sampling.n)],
        )

    for name, calls in (("plain", [(2, 1.0)]), ("greedy", [(2, 1.0), (1, 0.0)])):
        drawn.clear()
        samples, _ = collect(
            named(f"adv_estimator=my.py:{name}", "rollout.n=2", "data.train_batch_size=2"),
            draw,
            range(4),
            0,
        )
        assert drawn == calls
        assert (samples.baseline is None) == (name == "plain")

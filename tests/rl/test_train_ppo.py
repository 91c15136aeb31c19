"""train_ppo.py as its users run it: layouts, interruptions, rewards that fail, mistakes."""

import ast
import json
import re
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.batching.order import global_batch
from examples.arithmetic import make_rows, make_tokenizer
from tests.support.launch import (
    LIMIT,
    ROOT,
    checkpoints,
    imported,
    kill_all,
    launch,
    metrics,
    run,
    start,
    wait_for,
)
from tests.support.models import make_model

pytestmark = pytest.mark.slow

GAE = "algorithm.adv_estimator=gae"
FILTER = "algorithm.filter_groups.enable=true"
LORA = "model.lora.rank=4", "model.lora.alpha=8"

REWARDS = """
import os, sys, time

def letters(prompt, response, row):
    return sum(c.isascii() and c.isprintable() for c in response) / 12

def coin(prompt, response, row):
    if "Q" in response:
        raise ValueError("no Q, please")
    return float(sum(response.encode()) % 2)

def moody(prompt, response, row):
    mood = row.get("mood")
    if mood == "raise":
        raise ValueError("a bad mood")
    if mood == "hang":
        time.sleep(1000)
    if mood == "die":
        os._exit(3)
    print("in a mood:", mood)
    score = float("nan") if mood == "nan" else letters(prompt, response, row)
    return {"letters": score, "length": len(response)}

def hinted(response, hint=None):
    return 0.0

def rank(responses):
    return [sorted(responses).index(response) for response in responses]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)
"""
SAMPLER = """
from data.batching.order import global_batch

def as_by_default(rows, num_rows, batch_size, seed, batch_index, **_):
    assert len(rows) == num_rows and "answer" in rows[batch_index % num_rows]
    return global_batch(num_rows, batch_size, seed, batch_index).tolist()
"""
MOODS = {1: "raise", 5: "hang", 8: "die", 14: "nan"}
KINDS = {"raise": "raised", "hang": "timed out", "die": "died", "nan": "not a number"}
COMMAND = [sys.executable, "train_ppo.py"]
# Arguments: a file, and a command, which runs in a terminal whose output is written to the file.
IN_TERMINAL = """
import os, pty, sys
os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), 1)
shell = ["sh", "-c", 'stty cols 200 rows 50; exec "$@"', "sh"]
sys.exit(os.waitstatus_to_exitcode(pty.spawn([*shell, *sys.argv[2:]])))
"""


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """Make a model, rewards, and prompts: 84 to train on, 8 to validate on, 16 with moods."""
    directory = tmp_path_factory.mktemp("assets")
    tokenizer = make_tokenizer()
    # vLLM has no attention on CPUs for heads of less than 32 numbers.
    make_model(
        directory / "model",
        "qwen3",
        num_hidden_layers=2,
        head_dim=32,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
    )
    tokenizer.save_pretrained(directory / "model")
    (directory / "reward.py").write_text(REWARDS)
    (directory / "sampler.py").write_text(SAMPLER)
    (directory / "leaves.py").write_text("import os\nos._exit(0)\n")
    train, val = make_rows()
    moods = [{**row, "mood": MOODS.get(i, "good")} for i, row in enumerate(train[:16])]
    hints = [*train[:8], {**train[8], "hint": "only in the last row"}]
    files = (("train", train[:84]), ("val", val[:8]), ("moods", moods), ("hints", hints))
    for name, rows in files:
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def arguments(assets, out, reward, *more):
    return [
        f"model.path={assets}/model",
        f"data.train_files={assets}/train.jsonl",
        f"output_dir={out}",
        "trainer.report=false",
        f"data.cache_dir={assets}/cache",
        "engine.compute_dtype=float32",
        "data.train_batch_size=8",
        "data.max_prompt_length=40",
        "data.max_tokens_per_micro_batch=200",
        "rollout.n=4",
        "rollout.max_tokens=12",
        "rollout.kv_cache_gib=0.05",
        "optim.lr=3e-3",
        "reward.num_workers=1",
        f"reward.function={assets}/reward.py:{reward}",
        *more,
    ]


def layout(assets, out, *more):
    """Three steps of two mini-batches and two epochs, with whatever makes the loss longer."""
    return arguments(
        assets,
        out,
        "letters",
        "trainer.total_steps=3",
        "algorithm.ppo_mini_batch_size=4",
        "algorithm.ppo_epochs=2",
        "algorithm.use_kl_loss=true",
        "algorithm.kl_loss_coef=0.1",
        "algorithm.entropy_coeff=0.01",
        "algorithm.rollout_is=token",
        "algorithm.rollout_rs=geometric",
        f"data.val_files={assets}/val.jsonl",
        *more,
    )


def resumable(assets, out):
    """A critic, an adaptive coefficient, groups that are drawn again, failures, and adapters.

    Its order is that of a user's sampler.
    """
    return arguments(
        assets,
        out,
        "coin",
        GAE,
        *LORA,
        "critic.lr=1e-3",
        "critic.warmup_steps=1",
        "rollout.n=2",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.kl_coef=0.1",
        "algorithm.kl_ctrl.horizon=50",
        "algorithm.kl_ctrl.target_kl=0.002",
        FILTER,
        "reward.max_failure_rate=0.5",
        "trainer.total_steps=8",
        "trainer.save_freq=2",
        f"data.val_files={assets}/val.jsonl",
        "trainer.seed=3",
        f"data.sampler={assets}/sampler.py:as_by_default",
    )


def moody(assets, out, max_failure_rate):
    return arguments(
        assets,
        out,
        "moody",
        f"data.train_files={assets}/moods.jsonl",
        "data.train_batch_size=16",
        "rollout.n=2",
        "algorithm.adv_estimator=remax",
        "trainer.total_steps=1",
        "reward.timeout=4",
        "reward.num_workers=2",
        f"reward.max_failure_rate={max_failure_rate}",
        "reward.weights.letters=1.0",
        f"data.val_files={assets}/val.jsonl",
    )


def interrupted(assets, out):
    """Kill a run after step 2, resume it, stop it by a signal, and run it to its end.

    Returns the steps at which this happened.
    """
    command = [*COMMAND, *resumable(assets, out)]
    process = start(command, out / "log1")
    wait_for((out / "checkpoints" / "step_00000002").exists, process)
    kill_all(process)
    killed = steps(out)[-1]["step"]
    process = start(command, out / "log2")
    wait_for(lambda: "resuming" in (out / "log2").read_text(), process)
    resumed = steps(out)[-1]["step"]
    wait_for(lambda: steps(out)[-1]["step"] > resumed, process)
    process.send_signal(signal.SIGTERM)
    code = process.wait(LIMIT)
    stopped = steps(out)[-1]["step"]
    left = checkpoints(out)
    exported = (out / "hf").exists()
    run(command)
    return {
        "killed": killed,
        "resumed": resumed,
        "stopped": stopped,
        "code": code,
        "left": left,
        "exported": exported,
    }


def stopped_in_its_last_step(assets, out):
    """Which takes seconds, since some rewards hang."""
    process = start([*COMMAND, *moody(assets, out, 0.3)], out / "log")
    wait_for(lambda: (out / "metrics.jsonl").exists() and len(steps(out)) == 1, process)
    process.send_signal(signal.SIGTERM)
    return process.wait(LIMIT)


@pytest.fixture(scope="module")
def alone(assets, tmp_path_factory):
    """Runs of one process, two at a time: name -> (directory, what it returned)."""
    names = ("dry", "interrupted", "straight", "failures", "too_many", "layout1", "lora1")
    new = {name: tmp_path_factory.mktemp(name) for name in names}
    runs = {
        "interrupted": lambda out: interrupted(assets, out),
        "straight": lambda out: run(
            [
                sys.executable,
                "-c",
                IN_TERMINAL,
                out / "terminal",
                *COMMAND,
                *resumable(assets, out),
            ],
            TQDM_MININTERVAL="0",
        ),
        "failures": lambda out: stopped_in_its_last_step(assets, out),
        "too_many": lambda out: run([*COMMAND, *moody(assets, out, 0.2)], returncode=2),
        "layout1": lambda out: run([*COMMAND, *layout(assets, out, "trainer.report=true")]),
        "lora1": lambda out: run([*COMMAND, *layout(assets, out, *LORA)]),
    }
    # A dry run needs no weights.
    described = tmp_path_factory.mktemp("described") / "model"
    shutil.copytree(assets / "model", described, ignore=shutil.ignore_patterns("*.safetensors"))
    dry = [*COMMAND, *resumable(assets, new["dry"]), "dry_run=true", f"model.path={described}"]
    with ThreadPoolExecutor(1) as pool:  # first, since it fills the cache
        futures = {"dry": pool.submit(run, dry)}
    with ThreadPoolExecutor(2) as pool:
        futures |= {name: pool.submit(work, new[name]) for name, work in runs.items()}
    return lambda name: (new[name], futures[name].result())


VLLM2 = "rollout.tensor_parallel_size=2"
MEGATRON = "model_engine=megatron"
SHARING = (
    "engine.context_parallel_size=auto",
    "data.max_tokens_per_micro_batch=28",
)  # of 52 that a sequence may have
FRESH = "4 ranks"  # as users start it, with imports of its own
LAYOUTS = {
    "2 ranks": (2, []),
    "4 ranks": (4, [VLLM2, *SHARING]),
    "Megatron PP2": (2, [MEGATRON, "engine.pipeline_model_parallel_size=2", VLLM2]),
    # With one rank, vLLM uses the trainer's frozen weights; here it has merged ones, or its own.
    "2 ranks, LoRA": (2, [*LORA, *SHARING, VLLM2, "model.lora.merge=true"]),
    "Megatron TP2, LoRA": (2, [*LORA, MEGATRON, "engine.tensor_model_parallel_size=2"]),
}


@pytest.fixture(scope="module")
def layouts(alone, assets, tmp_path_factory):
    """Return a function: name of a layout -> its output directory. A layout runs once."""
    directories = {"1 rank": alone("layout1")[0], "1 rank, LoRA": alone("lora1")[0]}

    def directory_of(name: str) -> Path:
        if name not in directories:
            ranks, more = LAYOUTS[name]
            out = directories[name] = tmp_path_factory.mktemp(name.replace(" ", "_"))
            settings = layout(assets, out, *more)
            launch(ranks, "train_ppo.py", *settings, fresh=name == FRESH)
        return directories[name]

    return directory_of


def steps(out):
    """Return the metrics of each step that do not depend on the clock or the machine."""
    return [without_times(line) for line in metrics(out)]


def without_times(line):
    return {k: v for k, v in line.items() if not k.startswith(("timing/", "perf/"))}


def rollouts(out, folder="rollouts"):
    return {p.name: p.read_bytes() for p in (out / folder).iterdir()}


def rollout_lines(out, step, folder="rollouts"):
    return json_lines(out / folder / f"step_{step}.jsonl")


def json_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def num_failures(out, step):
    """Return how many responses of a step could not be graded."""
    return sum("failure" in line for line in rollout_lines(out, step))


def screen(sent):
    """Return the lines that a terminal shows in the end.

    sent: text in which programs move to the start of a line, up and down.
    """
    lines = [""]
    row = 0
    column = 0
    for part in re.findall(r"\x1b\[A|[\r\n]|[^\x1b\r\n]+", sent):
        if part in ("\x1b[A", "\n"):
            row += 1 if part == "\n" else -1
            lines += [""] * (row == len(lines))
        elif part == "\r":
            column = 0
        else:
            lines[row] = lines[row].ljust(column)[:column] + part + lines[row][column + len(part) :]
            column += len(part)
    return lines


# -- layouts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_that_is_learned_depends_on_the_layout(layouts, name):
    rank = layouts("1 rank, LoRA" if "LoRA" in name else "1 rank")
    one = steps(rank)
    many = steps(layouts(name))
    assert [m["step"] for m in many] == [0, 1, 2, 3]
    assert rollouts(layouts(name))["step_1.jsonl"] == rollouts(rank)["step_1.jsonl"]
    for a, b in zip(one, many, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6)
    assert all(m["actor/grad_norm"] > 0.1 and abs(m["actor/pg_loss"]) > 0.01 for m in one[1:])
    assert all(m["actor/ppo_kl"] != 0 for m in one[1:]), "later mini-batches have another policy"
    assert all(0 < m["rollout_corr/log_prob_gap"] < 1e-4 for m in many[1:]), (
        "of vLLM with TP 1 and 2, after updates too"
    )
    lines = metrics(layouts(name))[1:] if SHARING[0] in LAYOUTS[name][1] else []
    for line in lines:
        tokens = {key: x for key, x in line.items() if key.startswith("perf/cp_")}
        assert 0.5 < line["perf/plan_efficiency"] < 1 + 1e-9
        assert sum(tokens.values()) > tokens["perf/cp_1"]
        assert sum(tokens.values()) == pytest.approx(
            32 * (line["prompt_length/mean"] + line["response_length/mean"])
        )


def test_a_run_leaves_what_it_promises(layouts, assets):
    out = layouts("1 rank")
    lines = metrics(layouts("1 rank"))
    assert sorted(rollouts(out)) == ["step_1.jsonl", "step_2.jsonl", "step_3.jsonl"]
    assert checkpoints(out) == ["latest", "step_00000003"]
    assert (out / "report.png").stat().st_size > 10_000
    assert "kl_loss_coef: 0.1" in (out / "config.yaml").read_text()
    saved = json.loads((out / "checkpoints" / "step_00000003" / "trainer.json").read_text())
    identity = {"rollout.n": 4, "rollout.partial.enable": False, "data.shuffle": True}
    identity |= {"algorithm.adv_estimator": "grpo", "critic": False}
    assert identity.items() <= saved["run"].items()
    assert saved["tokenization"]["data.train_files"].endswith("train.jsonl")
    assert saved["export_dtype"] == "float32"
    assert saved["lora"] is None
    stages = (
        "rollout_generate",
        "reward",
        "actor_compute_log_prob",
        "ref_compute_log_prob",
        "actor_update",
        "step",
    )
    needed = {f"timing/{stage}" for stage in stages} | {
        "perf/tokens_per_second",
        "perf/memory_peak_gib",
        "perf/rollout_idle",
        "perf/rollout_idle_max",
    }
    assert all(needed <= m.keys() for m in lines[1:])
    first = rollout_lines(out, 1)
    prompts = [
        json.loads(line)["messages"][0]["content"]
        for line in (assets / "train.jsonl").read_text().splitlines()
    ]
    wanted = [prompts[row] for row in global_batch(84, 8, 0, 0) for _ in range(4)]
    assert [line["group"] for line in first] == [i // 4 for i in range(32)]
    assert all(
        f"user\n{prompt}<" in line["prompt"] for prompt, line in zip(wanted, first, strict=True)
    )
    assert lines[1]["score/mean"] == pytest.approx(sum(line["score"] for line in first) / 32)
    assert len({line["response"] for line in first}) == 32
    assert {line["truncated"] for line in first} == {True, False}


def test_responses_are_shown_and_written_beside_the_true_answers(layouts, alone, assets):
    out, done = alone("layout1")
    train = json_lines(assets / "train.jsonl")
    val = json_lines(assets / "val.jsonl")
    assert [line["row"] for line in rollout_lines(out, 1)] == [
        train[row] for row in global_batch(84, 8, 0, 0) for _ in range(4)
    ]
    assert sorted(rollouts(out, "validation")) == ["step_0.jsonl", "step_3.jsonl"]
    assert (
        rollouts(out, "validation")["step_0.jsonl"]
        == rollouts(layouts("2 ranks"), "validation")["step_0.jsonl"]
    )
    for step, line in ((0, metrics(out)[0]), (3, metrics(out)[-1])):
        written = rollout_lines(out, step, "validation")
        assert [w["row"] for w in written] == val
        assert sum(w["score"] for w in written) / 8 == pytest.approx(line["val/letters"])
        header, *shown = done.stdout.split("  question ")[1 + step // 3].splitlines()[:5]
        assert header.split() == ["response", "answer", "score"]
        for row, w, text in zip(val, written, shown):
            question, *_, answer, score = text.split("  ")[1:2] + text.split()
            assert (question, answer, score) == (
                row["messages"][0]["content"],
                row["answer"],
                f"{w['score']:.2f}",
            )


def test_val_only_evaluates_a_checkpoint_and_trains_nothing(alone, assets, tmp_path):
    trained, _ = alone("layout1")
    checkpoint = f"trainer.resume={trained}/checkpoints/step_00000003"
    done = run([*COMMAND, *layout(assets, tmp_path, checkpoint, "trainer.val_only=true")])
    (line,) = metrics(tmp_path)
    assert line["step"] == 3
    assert line["val/letters"] == metrics(trained)[-1]["val/letters"]
    assert rollouts(tmp_path, "validation").keys() == {"step_3.jsonl"}
    assert "nothing was trained" in done.stdout
    assert "checkpoints: " not in done.stdout
    assert not (tmp_path / "hf").exists()
    assert not (tmp_path / "rollouts").exists()


def test_one_bar_per_generation_which_disappears(alone):
    sent = (alone("straight")[0] / "terminal").read_bytes().decode()
    left = screen(sent)
    assert re.search(r"generate \| {20}\| 0/16 responses", sent), (
        "of 8 prompts; there is less to see of so short a generation"
    )
    assert re.search(r"\d/8 responses, [\d.]+k? tokens/s", sent), "the first one takes longer"
    assert sum("step/s" in line or "s/step" in line for line in left) == 1
    assert sum("step      8" in line for line in left) == 1
    assert not any(
        bar in line
        for line in left
        for bar in ("generate", "Rendering prompts", "Processed prompts")
    )
    assert "Processed prompts" not in sent
    assert re.search(r"informative \d+%", sent)


def test_the_export_is_the_policy_that_was_trained(layouts, assets):
    """Its greedy responses score as in the last validation, and not as in the first."""
    out = layouts("1 rank")
    letters = {}
    exec(REWARDS, letters)
    model = AutoModelForCausalLM.from_pretrained(out / "hf", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out / "hf")
    scores = []
    for line in (assets / "val.jsonl").read_text().splitlines():
        prompt = tokenizer.apply_chat_template(
            json.loads(line)["messages"][:1],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        reply = model.generate(**prompt, do_sample=False, max_new_tokens=12)[
            0, prompt["input_ids"].shape[1] :
        ]
        scores.append(letters["letters"]("", tokenizer.decode(reply, skip_special_tokens=True), {}))
    before, *_, after = (m["val/letters"] for m in metrics(out) if "val/letters" in m)
    assert after == pytest.approx(sum(scores) / 8, rel=1e-6)
    assert abs(after - before) > 0.1


# -- interruptions ---------------------------------------------------------------------------------


def test_a_killed_and_stopped_run_repeats_every_step_to_the_last_bit(alone):
    (out, seen) = alone("interrupted")
    (straight, _) = alone("straight")
    assert 2 <= seen["killed"] < 8
    assert seen["resumed"] in (2, 4, 6)
    assert seen["resumed"] <= seen["killed"]
    assert seen["code"] == 0
    assert seen["resumed"] < seen["stopped"] < 8
    assert not seen["exported"]
    assert f"step_{seen['stopped']:08d}" in seen["left"]
    assert "the same command continues" in (out / "log2").read_text()
    assert steps(out) == steps(straight)
    assert [m["step"] for m in steps(straight)] == list(range(9))
    assert rollouts(out) == rollouts(straight)
    assert len(rollouts(straight)) == 8
    failures = (out / "failures.jsonl").read_text()
    assert failures == (straight / "failures.jsonl").read_text(), "none twice"
    assert failures.count("\n") > 2
    progress = [
        json.loads((run / "checkpoints/step_00000008/trainer.json").read_text())
        for run in (out, straight)
    ]
    for each in progress:
        assert each.pop("checksums"), "of files whose order is not that of the run"
    assert progress[0] == progress[1]
    for file in ("hf/adapter_model.safetensors", "hf/adapter_config.json"):
        assert (out / file).read_bytes() == (straight / file).read_bytes()


def test_what_the_straight_run_has_to_remember(alone):
    """What the comparison above rests on."""
    out = alone("straight")[0]
    before, *lines = steps(out)
    progress = json.loads((out / "checkpoints" / "step_00000008" / "trainer.json").read_text())
    assert progress["step"] == 8 < progress["batch"] <= 80
    assert progress["run"]["data.sampler"].startswith("sampler.py:as_by_default (file ")
    assert "val/coin" in before.keys() & lines[-1].keys()
    assert "actor/loss" not in lines[0], "the critic warms up alone"
    assert all("actor/loss" in m for m in lines[1:])
    coefficients = [m["actor/kl_coef"] for m in lines]
    assert len({*coefficients, progress["kl_coef"]}) == 9
    last = metrics(out)[-1]
    assert last["timing/step"] > last["timing/validate"] + last["timing/actor_update"]
    assert coefficients[2] < coefficients[1] < coefficients[0] == 0.1 < progress["kl_coef"], (
        "there is no divergence at first"
    )
    failed = [num_failures(out, step) for step in range(1, 9)]
    assert [m["reward/failures"] for m in lines] == [sum(failed[: i + 1]) for i in range(8)]
    assert sum(failed) > 1
    assert all(m["rollout/num_gen_batches"] > 1 for m in lines), "steps draw again"
    assert all(0 < m["reward/informative_groups"] <= 1 for m in lines)
    assert len({m["score/mean"] for m in lines}) > 1
    assert lines[-1]["critic/vf_loss"] < lines[0]["critic/vf_loss"]
    assert lines[0]["critic/values/mean"] == 0


def test_with_one_mini_batch_and_epoch_the_ratio_is_exactly_1(alone):
    for line in steps(alone("straight")[0])[2:]:
        assert line["actor/ppo_kl"] == 0 == line["actor/pg_clipfrac"]
        assert line["actor/grad_norm"] > 0


# -- rewards that fail -----------------------------------------------------------------------------


def test_failures_below_the_limit_are_counted_and_written_down(alone):
    out, code = alone("failures")
    lines = rollout_lines(out, 1)
    (_, line) = metrics(out)
    failed = [line for line in lines if "failure" in line]
    assert sorted((f["row"]["mood"], f["failure"]) for f in failed) == sorted(
        [*KINDS.items()] * 3
    ), "remax's greedy ones too"
    traces = {f["row"]["mood"]: f["trace"] for f in failed}
    assert "ValueError: a bad mood" in traces["raise"]
    assert "took more than 4 s" in traces["hang"]
    assert "exit code 3" in traces["die"]
    assert "nan" in traces["nan"]
    graded = [line for line in lines if "failure" not in line]
    assert len(graded) == 24
    assert len({line["group"] for line in graded}) == 12
    assert line["reward/failures"] == 12
    assert line["reward/failure_rate"] == 0.25
    assert line["actor/grad_norm"] > 0
    written = [json.loads(line) for line in (out / "failures.jsonl").read_text().splitlines()]
    assert [line for line in written if line["step"] == 1] == [
        {"step": 1, **line} for line in failed
    ]
    for one in graded:
        assert one["score"] == one["parts"]["letters"]
        assert one["parts"]["length"] == len(one["response"])
    assert sum(line["step"] == 0 for line in written) == metrics(out)[0]["val/failures"]
    assert line["reward/length/mean"] == pytest.approx(
        sum(one["parts"]["length"] for one in graded) / 24
    )
    before = metrics(out)[0]
    assert before["val/moody/letters"] == before["val/moody"]
    assert before["val/moody/length"] > 1
    assert "in a mood: good" in (out / "reward_output" / "rank_0.txt").read_text()
    assert "in a mood" not in (out / "log").read_text()
    assert code == 0


def test_a_signal_in_the_last_step_leaves_out_its_validation_alone(alone):
    out, code = alone("failures")
    before, line = metrics(out)
    assert code == 0
    assert "val/moody" in before
    assert "val/moody" not in line
    assert checkpoints(out) == ["latest", "step_00000001"]
    assert (out / "hf" / "model.safetensors").exists()


def first_failure():
    order = [MOODS[row] for row in global_batch(16, 16, 0, 0) if row in MOODS]
    return {
        "raise": "a bad mood",
        "hang": "took more than",
        "die": "exit code 3",
        "nan": "'letters': nan",
    }[order[0]]


def test_failures_above_the_limit_stop_the_run_with_the_first_trace(alone):
    out, done = alone("too_many")
    errors = [line for line in done.stderr.splitlines() if "error: " in line]
    # Two workers: the last one may have failed while the other's stopped the grading.
    count = sum(
        line["step"] == 1
        for line in map(json.loads, (out / "failures.jsonl").read_text().splitlines())
    )
    assert len(errors) == 1
    assert count in (7, 8)
    assert f"{count} of 32 samples ({count / 32:.1%}) could not be graded" in errors[0]
    assert "reward.max_failure_rate=0.2" in errors[0]
    assert first_failure() in errors[0]
    assert "Traceback (most recent call last):\n" not in done.stderr
    assert [m["step"] for m in metrics(out)] == [0]
    assert not (out / "checkpoints").exists()
    assert not (out / "hf").exists()


# -- before anything starts ------------------------------------------------------------------------


def test_dry_run_prints_the_plan_and_starts_nothing(alone):
    out, done = alone("dry")
    for part in (
        "kl_coef: 0.1",
        "1 rank on cpu = 1 data-parallel to train, 1 vLLM x 1 tensor",
        "train: 84 rows with ",
        "val: 8 rows with ",
        "\nsteps: 8\n",
        ":coin gives ",
        "for the actor",
        "for the critic",
        "vLLM's KV cache: 0.05 GiB; it decodes 16 responses at once\n",
    ):
        assert done.stdout.count(part) == 1, part
    assert sorted(p.name for p in out.iterdir()) == ["reward_output"], (
        "where the reward would have printed"
    )


MISTAKES = {
    "a mini-batch that does not divide": (
        ["algorithm.ppo_mini_batch_size=3"],
        "ppo_mini_batch_size=3 does not divide",
    ),
    "a critic without gae": (
        ["critic.path=/nowhere"],
        "does nothing without algorithm.adv_estimator=gae",
    ),
    "an unknown reward": (["reward.function=exact_mach"], "the nearest is exact_match"),
    "an unknown function in a file": (
        lambda assets: [f"reward.function={assets}/reward.py:moods"],
        "the nearest is reward.py:moody",
    ),
    "a reward that ends its process": (
        lambda assets: [f"reward.function={assets}/leaves.py:f"],
        "ended with exit code 0",
    ),
    "a group's reward for remax": (
        lambda assets: [
            f"reward.function={assets}/reward.py:rank",
            "algorithm.adv_estimator=remax",
        ],
        "grades the responses of a group together",
    ),
    "a reward for other rows": (
        lambda assets: [f"reward.function={assets}/reward.py:compute_score"],
        "compute_score: the row has no data_source, only",
    ),
    "a column that a parameter of the reward would not get": (
        lambda assets: [
            f"data.train_files={assets}/hints.jsonl",
            f"reward.function={assets}/reward.py:hinted",
        ],
        "its parameter hint would keep its default",
    ),
    "sampling without a temperature": (
        ["rollout.temperature=0"],
        "rollout.temperature=0 must be at least 0.01",
    ),
    "an unknown estimator": (["algorithm.adv_estimator=ppo"], "must be one of gae, grpo"),
    "too much tensor parallelism": (
        ["rollout.tensor_parallel_size=2"],
        "does not divide the number of ranks, 1",
    ),
    "a warm-up as long as the run": (
        [GAE, "critic.warmup_steps=3", "trainer.total_steps=3"],
        "critic.warmup_steps=3 leaves no step for the actor",
    ),
    "a critic that is not there": ([GAE, "critic.path=/nowhere"], "/nowhere"),
}
# in the order in which they are found
FIRST = "sampling without a temperature"
LAST = "a critic that is not there"


def test_ctrl_c_before_the_signals_are_heeded_says_nothing(assets, tmp_path):
    (tmp_path / "slow.py").write_text(
        f"import time\nopen({str(tmp_path / 'up')!r}, 'w')\ntime.sleep(600)\n"
    )
    process = start(
        [
            *COMMAND,
            *arguments(
                assets, tmp_path / "out", "letters", f"reward.function={tmp_path}/slow.py:f"
            ),
        ],
        tmp_path / "log",
        fresh=True,
    )
    wait_for((tmp_path / "up").exists, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT) == 130
    assert (tmp_path / "log").read_text() == ""


def test_an_actor_that_skips_every_update_is_an_error_whatever_the_critic_learns(assets, tmp_path):
    (tmp_path / "loss.py").write_text(
        "def nan(log_probs, **_):\n    return log_probs * float('nan'), {}\n"
    )
    done = run(
        [
            *COMMAND,
            *arguments(
                assets,
                tmp_path / "out",
                "letters",
                GAE,
                f"algorithm.loss_mode={tmp_path}/loss.py:nan",
                "trainer.total_steps=1",
            ),
        ],
        returncode=2,
    )
    assert "the gradient was not finite in 1 of 1 updates" in done.stderr
    assert not (tmp_path / "out" / "hf").exists()


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(alone, assets, tmp_path, what):
    more, message = MISTAKES[what]
    done = run(
        [
            *COMMAND,
            *arguments(
                assets, tmp_path / "out", "letters", *(more(assets) if callable(more) else more)
            ),
        ],
        returncode=2,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert message in lines[0]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("what", [FIRST, LAST])
def test_a_mistake_is_found_before_what_is_slow_to_import(alone, assets, tmp_path, what):
    modules = imported(
        run(
            [*COMMAND, *arguments(assets, tmp_path / "out", "letters", *MISTAKES[what][0])],
            returncode=2,
            PYTHONPROFILEIMPORTTIME="1",
        ).stderr
    )
    assert "omegaconf" in modules
    assert not modules & {"vllm", "megatron", "msprobe"}
    assert ("torch" in modules) == (what == LAST)


# -- a loop of your own ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loops(assets, tmp_path_factory):
    """The directories of the same run by train_ppo.py and by examples/loop.py."""
    scripts = ["train_ppo.py", "examples/loop.py"]
    directories = [tmp_path_factory.mktemp("loop") for _ in scripts]

    def run_script(script, out):
        settings = arguments(assets, out, "letters", "trainer.total_steps=2")
        run([sys.executable, script, *settings, f"data.val_files={assets}/val.jsonl"])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run_script, scripts, directories))
    return directories


def test_a_loop_of_your_own_learns_the_same_to_the_last_bit(loops):
    expected, own = (steps(out) for out in loops)
    assert [line["step"] for line in own] == [line["step"] for line in expected] == [0, 1, 2]
    for line, expected_line in zip(own, expected):
        assert line.items() <= expected_line.items()
    assert own[1]["actor/grad_norm"] > 0
    (expected_times, own_times) = (metrics(out)[2].keys() for out in loops)
    stages = {"timing/wake", "timing/rollout_generate", "timing/divide", "timing/actor_update"}
    assert stages <= own_times
    assert stages <= expected_times
    weights = [(out / "hf" / "model.safetensors").read_bytes() for out in loops]
    assert weights[0] == weights[1]
    assert rollouts(loops[0]) == rollouts(loops[1])


def test_a_loop_of_your_own_has_sixty_lines_of_code():
    source = (ROOT / "examples" / "loop.py").read_text()
    documented = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.FunctionDef)) and ast.get_docstring(node):
            text = node.body[0]
            documented |= set(range(text.lineno, text.end_lineno + 1))
    numbered = enumerate(source.splitlines(), start=1)
    code = [line for number, line in numbered if line.strip() and number not in documented]
    assert len(code) <= 60


@pytest.mark.parametrize(
    "setting, key",
    [
        ("algorithm.ppo_epochs=2", "algorithm"),
        ("reward.model.path=anything", "reward.model"),
        ("reward.overlong_buffer=4", "reward.overlong_buffer"),
        ("dry_run=true", "dry_run"),
    ],
)
def test_a_setting_that_the_loop_does_not_read_is_an_error(assets, tmp_path, setting, key):
    settings = arguments(assets, tmp_path, "letters", setting)
    done = run([sys.executable, "examples/loop.py", *settings], returncode=2)
    assert f"error: examples/loop.py does not read {key}: leave it out" in done.stdout + done.stderr

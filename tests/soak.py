"""Runs that are killed at random moments until they have ended. What they leave is compared with what a run leaves that
nobody disturbs, to the last bit.

    make soak                                                   all loops, 20 minutes
    python -m tests.soak ppo nodes --minutes 10 --seed 7        these two, ten minutes each, with the choices of seed 7

Loops: sft and ppo (2 ranks; ppo saves in the background), megatron (2 ranks, tensor parallel, saves in the background), and
nodes: two in network namespaces (root alone may make these), one of which is lost. Exit code 1: something differs, was not
said, or did not end. Its directory is kept then, with the log of every attempt.
"""

import argparse
import ctypes
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from engines.checkpoint.checkpointer import checkpoints
from examples.arithmetic import make_rows, make_tokenizer
from tests.support.launch import metrics, start
from tests.support.models import make_model
from tests.support.nodes import Nodes

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
MINUTES = {"sft": 4, "ppo": 6, "megatron": 4, "nodes": 6}
END_SECONDS = 90  # within which everything ends after a kill
REWARD = """
def coin(prompt, response, row):
    if "Q" in response:
        raise ValueError("no Q, please")
    return float(sum(response.encode()) % 2)
"""


# -- the runs ----------------------------------------------------------------------------------------------------------


def make_assets(directory: Path) -> None:
    tokenizer = make_tokenizer()
    make_model(
        directory / "model",
        "qwen3",
        num_hidden_layers=2,
        head_dim=32,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
    )
    tokenizer.save_pretrained(directory / "model")
    (directory / "reward.py").write_text(REWARD)
    train, val = make_rows()
    for name, rows in (("train", train[:2000]), ("val", val[:16])):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def sft(assets: Path, out: Path) -> list:
    """The token cache is the run's own, so that tokenization can be killed, too."""
    return [
        "train_sft.py",
        f"model.path={assets}/model",
        f"data.train_files={assets}/train.jsonl",
        f"output_dir={out}",
        f"data.val_files={assets}/val.jsonl",
        f"data.cache_dir={out.parent}/cache",
        "engine.compute_dtype=float32",
        "data.train_batch_size=8",
        "data.max_tokens_per_micro_batch=128",
        "optim.lr=3e-3",
        "trainer.total_steps=30",
        "trainer.save_freq=5",
        "trainer.test_freq=7",
    ]


def megatron(assets: Path, out: Path) -> list:
    return [
        *sft(assets, out),
        "model_engine=megatron",
        "engine.tensor_model_parallel_size=2",
        "trainer.async_save=true",
    ]


def ppo(assets: Path, out: Path) -> list:
    """With all that a resume has to remember: a critic, an adaptive coefficient, prompts drawn again, failures."""
    return [
        "train_ppo.py",
        f"model.path={assets}/model",
        f"data.train_files={assets}/train.jsonl",
        f"output_dir={out}",
        f"data.val_files={assets}/val.jsonl",
        f"data.cache_dir={out.parent}/cache",
        "engine.compute_dtype=float32",
        "data.train_batch_size=8",
        "data.max_prompt_length=40",
        "data.max_tokens_per_micro_batch=200",
        "rollout.n=2",
        "rollout.max_tokens=12",
        "validation.max_tokens=12",
        "rollout.kv_cache_gib=0.05",
        "optim.lr=3e-3",
        f"reward.function={assets}/reward.py:coin",
        "reward.num_workers=1",
        "reward.max_failure_rate=0.5",
        "algorithm.adv_estimator=gae",
        "critic.lr=1e-3",
        "critic.warmup_steps=1",
        "algorithm.filter_groups.enable=true",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.kl_coef=0.1",
        "algorithm.kl_ctrl.horizon=50",
        "algorithm.kl_ctrl.target_kl=0.02",
        "trainer.total_steps=12",
        "trainer.save_freq=2",
        "trainer.test_freq=5",
        "trainer.async_save=true",
        "trainer.rollout_freq=1",
    ]


RUNS = {"sft": sft, "ppo": ppo, "megatron": megatron}


def torchrun(log: Path, arguments: list):
    return start(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            *arguments,
        ],
        log,
    )


# -- what they leave ---------------------------------------------------------------------------------------------------


def last_step(out: Path) -> int:
    lines = (
        (out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        if (out / "metrics.jsonl").exists()
        else []
    )
    return max((json.loads(line)["step"] for line in lines if line.endswith(b"\n")), default=0)


def newest_checkpoint(out: Path) -> int:
    return max(
        (int(path.name.removeprefix("step_")) for path in checkpoints(out / "checkpoints")),
        default=0,
    )


def learned(out: Path) -> dict[str, object]:
    """What a run must leave, whatever happened to it: metrics by step, without the clock's; the bytes of files."""
    found = {}
    for line in metrics(out):
        name = f"metrics of step {line['step']}"
        found[name] = (
            "twice"
            if name in found
            else {k: v for k, v in line.items() if not k.startswith(("timing/", "perf/"))}
        )
    files = [
        path
        for folder in ("hf", "rollouts", "validation")
        for path in (out / folder).rglob("*")
        if path.is_file()
    ]
    found |= {
        str(path.relative_to(out)): path.read_bytes()
        for path in [*files, *out.glob("failures.jsonl")]
    }
    progress = json.loads(
        (
            out / "checkpoints" / (out / "checkpoints/latest").read_text().strip() / "trainer.json"
        ).read_text()
    )
    progress.pop("checksums")
    return found | {"trainer.json": progress}


def differences(out: Path, expected: dict[str, object], stopped: set[int]) -> list[str]:
    """In words. stopped: the steps after which a signal stopped the run, which are not validated."""
    left, found = learned(out), []
    for step in stopped:
        name, file = f"metrics of step {step}", f"validation/step_{step}.jsonl"
        if name in left and not any(key.startswith("val/") for key in left[name]):
            expected = expected | {
                name: {k: v for k, v in expected[name].items() if not k.startswith("val/")}
            }
            expected = {k: v for k, v in expected.items() if k != file}
    for name in sorted(left.keys() | expected.keys()):
        if name not in left or name not in expected:
            found.append(f"{name} is {'missing' if name in expected else 'too much'}")
        elif left[name] != expected[name]:
            keys = left[name].keys() | expected[name].keys() if isinstance(left[name], dict) else ()
            found.append(
                f"{name} differs"
                + "".join(
                    f", {key}: {left[name].get(key)} instead of {expected[name].get(key)}"
                    for key in sorted(keys)
                    if left[name].get(key) != expected[name].get(key)
                )
            )
    rest = [
        path
        for place in (out, out / "checkpoints", out.parent / "cache")
        for path in place.glob("*.tmp")
    ]
    return found + [f"{path.relative_to(out.parent)} is left over" for path in rest]


# -- processes ---------------------------------------------------------------------------------------------------------


def descendants(process) -> list[psutil.Process]:
    try:
        children = psutil.Process(process.pid).children(recursive=True)
        return [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    except psutil.NoSuchProcess:
        return []


def living(processes: list) -> list[psutil.Process]:
    """All that has been started and lives, orphans too: this process adopts them, and buries them here."""
    started = {process.pid for process in processes}
    for process in processes:
        process.poll()
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
            elif child.ppid() == os.getpid() and child.pid not in started:
                os.waitpid(child.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            pass
    return found


def wait_for_all(processes: list, seconds: float) -> list[str]:
    """Until none lives; those that do after so many seconds are killed and named."""
    deadline = time.monotonic() + seconds
    while left := living(processes):
        if time.monotonic() > deadline:
            named = []
            for process in left:
                try:
                    named.append(
                        f"process {process.pid} ({' '.join(process.cmdline()[1:4])}) has not ended after {seconds:.0f} s"
                    )
                    process.kill()
                except psutil.NoSuchProcess:
                    pass
            for process in processes:
                process.wait()
            return named
        time.sleep(0.02)
    return []


def kill(how: str, process, rng: random.Random) -> str:
    """Returns what was done. What is not killed here has to end by itself."""
    ranks = psutil.Process(process.pid).children()
    number = signal.SIGTERM if "SIGTERM" in how else signal.SIGKILL
    if "rank" in how and not ranks:
        how = how.split(maxsplit=1)[0] + " to torchrun (no rank yet)"
    victims = {
        "all": [*ranks, process],
        "torchrun": [process],
        "a rank": [rng.choice(ranks or [process])],
    }
    for victim in next(victims[name] for name in victims if name in how):
        try:
            victim.send_signal(number)
        except psutil.NoSuchProcess:
            pass
    return how


KILLS = {
    "SIGKILL to all": 5,
    "SIGKILL to a rank": 2,
    "SIGKILL to torchrun": 2,
    "SIGTERM to torchrun": 1,
    "SIGTERM to a rank": 1,
}


# -- moments -----------------------------------------------------------------------------------------------------------


@dataclass
class Reference:
    """A run that nobody disturbed."""

    left: dict[str, object]
    steps: int
    seconds: float  # in all
    first_step: float  # seconds until there are metrics
    saves: list[int]  # steps with a checkpoint


def moment(
    rng: random.Random, out: Path, reference: Reference
) -> tuple[str, Callable[[], bool], float]:
    """(name, the condition to wait for, seconds to wait from there on)"""
    step, cache = last_step(out), out.parent / "cache"
    saved = newest_checkpoint(out)
    saves = [k for k in reference.saves if k > saved]
    choices = {
        "start-up": (lambda: True, reference.first_step),
        "any time": (lambda: True, reference.seconds),
    }
    if not cache.exists() or len(list(cache.iterdir())) < 2:
        choices["tokenization"] = (lambda: any(cache.glob("*.tmp")), 0.5)
    if step < reference.steps:
        wanted = rng.randint(step + 1, min(reference.steps, step + reference.steps // 2))
        choices[f"step {wanted}"] = (lambda: last_step(out) >= wanted, 0.3)
    if saves:
        k = rng.choice(saves[:3])
        choices[f"save of step {k}"] = (
            lambda: (out / "checkpoints" / f"step_{k:08d}.tmp").exists(),
            0.2,
        )
    choices["export"] = (lambda: (out / "hf.tmp").exists(), 0.1)
    # An early export leaves nothing else to kill.
    weights = [
        3
        if name.startswith(("save", "step")) or name == "export" and not saves
        else 0.5
        if name == "export"
        else 1
        for name in choices
    ]
    name = rng.choices([*choices], weights)[0]
    condition, longest = choices[name]
    return name, condition, rng.uniform(0, longest)


@dataclass
class Result:
    rounds: int = 0
    kills: Counter = field(default_factory=Counter)
    resumed: int = 0  # from a checkpoint
    anew: int = 0  # from the beginning
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


def went_on(log: Path) -> int | None:
    found = re.search(
        r"(?:resuming from \S+|starting): step (\d+) of", log.read_text(errors="replace")
    )
    return found and int(found[1])


def attempt(
    command: list, out: Path, log: Path, reference: Reference, rng: random.Random, disturb: bool
):
    """One start of the run, which is killed or ends. Returns (what was done, the moment, what went wrong)."""
    expected = newest_checkpoint(out)
    name, condition, delay = moment(rng, out, reference) if disturb else ("", lambda: False, 0.0)
    process, done = torchrun(log, command), None
    deadline = time.monotonic() + 600
    while process.poll() is None and time.monotonic() < deadline:
        if condition():
            time.sleep(delay)
            if process.poll() is None:
                done = kill(rng.choices([*KILLS], KILLS.values())[0], process, rng)
            break
        time.sleep(0.002)
    wrong = wait_for_all([process], END_SECONDS if done else 600)
    said, step = log.read_text(errors="replace"), went_on(log)
    if step is not None and step != expected:
        wrong.append(f"it went on from step {step}, the newest checkpoint was of step {expected}")
    wrong += [
        f"it said: {line.strip()}"
        for line in said.splitlines()
        if "is damaged" in line or "could not be read" in line
    ]
    stopped = re.search(r"stopped by a signal after step (\d+)", said)
    if done and "SIGTERM" in done and stopped and newest_checkpoint(out) != int(stopped[1]):
        wrong.append(
            f"it stopped after step {stopped[1]}, the newest checkpoint is of step {newest_checkpoint(out)}"
        )
    if done is None and process.returncode:
        wrong.append(f"exit code {process.returncode} without a kill")
    ended = (out / "hf").exists() and done is None
    return done, f"{name} + {delay:.2f} s", wrong, ended, stopped and int(stopped[1])


def undisturbed(command: Callable[[Path], list], directory: Path) -> Reference:
    out, begun = directory / "out", time.monotonic()
    directory.mkdir()
    process, first = torchrun(directory / "log", command(out)), 0.0
    while process.poll() is None:
        if not first and (out / "metrics.jsonl").exists():
            first = time.monotonic() - begun
        time.sleep(0.01)
    if process.returncode:
        sys.exit(f"the undisturbed run ended with {process.returncode}: {directory}/log")
    total = last_step(out)
    every = int(
        next(arg for arg in command(out) if arg.startswith("trainer.save_freq=")).partition("=")[2]
    )
    return Reference(
        learned(out),
        total,
        time.monotonic() - begun,
        first,
        [k for k in range(1, total + 1) if k % every == 0],
    )


def killed(
    name: str,
    assets: Path,
    directory: Path,
    rng: random.Random,
    result: Result,
    more: Callable[[], bool],
) -> None:
    """The loops sft, ppo and megatron."""
    reference = undisturbed(lambda out: RUNS[name](assets, out), directory / "undisturbed")
    print(
        f"{name}: undisturbed {reference.steps} steps in {reference.seconds:.0f} s, the first after "
        f"{reference.first_step:.0f} s",
        flush=True,
    )
    while more():
        result.rounds += 1
        folder, kills, count, stopped, ended = (
            directory / f"round{result.rounds}",
            rng.randint(2, 5),
            0,
            set(),
            False,
        )
        out, wrong, pending = folder / "out", [], None
        folder.mkdir()
        while not ended and count <= kills + 3:
            log = folder / f"log{count}"
            done, when, said, ended, stop = attempt(
                RUNS[name](assets, out), out, log, reference, rng, count < kills
            )
            count += 1
            wrong += [f"round {result.rounds}, attempt {count}: {text}" for text in said]
            stopped |= {stop} - {None}
            step = went_on(log)
            if pending and step is not None:
                print(f"{pending}; went on from step {step}", flush=True)
                result.resumed, result.anew, pending = (
                    result.resumed + (step > 0),
                    result.anew + (step == 0),
                    None,
                )
            elif pending:
                print(f"{pending}; killed again before it went on", flush=True)
                pending = None
            if done:
                result.kills[done] += 1
                pending = (
                    f"{name} {result.rounds}.{count}: {done}, {when}, at step {last_step(out)}"
                )
            elif not ended:
                break
        wrong += [
            f"round {result.rounds}: {text}"
            for text in (
                differences(out, reference.left, stopped) if ended else ["it has not ended"]
            )
        ]
        report(name, wrong, result, folder)


def report(name: str, wrong: list[str], result: Result, folder: Path) -> None:
    result.wrong += wrong
    for text in wrong:
        print(f"{name}: WRONG: {text}", flush=True)
    if not wrong:
        shutil.rmtree(folder)


# -- nodes -------------------------------------------------------------------------------------------------------------


LOSSES = {
    "power": "its power is cut (cable pulled, then SIGKILL)",
    "killed": "all its processes get SIGKILL",
    "cable": "its cable is pulled",
}
TIMEOUT_MINUTES = 0.3


def lost(
    name: str,
    assets: Path,
    directory: Path,
    rng: random.Random,
    result: Result,
    more: Callable[[], bool],
) -> None:
    """The loop nodes."""
    try:
        nodes = Nodes()
    except RuntimeError as error:
        result.wrong.append(f"no network namespaces: {error}")
        return print(f"nodes: {result.wrong[-1]}", flush=True)
    try:
        rounds(nodes, name, assets, directory, rng, result, more)
    finally:
        wait_for_all([], 0)
        nodes.close()


def rounds(
    nodes: Nodes, name: str, assets: Path, directory: Path, rng: random.Random, result: Result, more
) -> None:
    def launch(folder: Path, attempt: int, rendezvous: str, before=("true", "true")) -> list:
        arguments = [*sft(assets, folder / "out"), f"trainer.timeout_minutes={TIMEOUT_MINUTES}"]
        return [
            nodes.torchrun(
                i, folder / f"log{attempt}.node{i}", rendezvous, *arguments, before=before[i]
            )
            for i in range(2)
        ]

    folder = directory / "undisturbed"
    folder.mkdir()
    processes = launch(folder, 0, "c10d")
    wrong = wait_for_all(processes, 300)
    if wrong or any(process.returncode for process in processes):
        sys.exit(f"the undisturbed run on two nodes failed: {folder}")
    expected = learned(folder / "out")
    report(name, not_shared(launch, directory / "not_shared"), result, directory / "not_shared")
    losses = [(kind, node) for kind in LOSSES for node in (1, 0)]
    rng.shuffle(losses)
    while more():
        kind, node = losses[result.rounds % len(losses)]
        result.rounds += 1
        folder, wrong, rendezvous = (
            directory / f"round{result.rounds}",
            [],
            rng.choice(["c10d", "static"]),
        )
        out = folder / "out"
        folder.mkdir()
        step, delay = rng.choice([0, *range(1, 25, 3)]), rng.uniform(0, 0.3)
        processes = launch(folder, 0, rendezvous)
        # Step 0: while the data is tokenized.
        while (
            last_step(out) < step if step else not any((folder / "cache").glob("*.tmp"))
        ) and not any(process.poll() is not None for process in processes):
            time.sleep(0.002)
        time.sleep(delay)
        if kind != "killed":
            nodes.pull(node)
        if kind != "cable":
            for victim in [*descendants(processes[node]), psutil.Process(processes[node].pid)]:
                victim.kill()
        begun, at = time.monotonic(), last_step(out)
        while (
            any(descendants(process) for process in processes)
            and time.monotonic() - begun < 60 * TIMEOUT_MINUTES + 120
        ):
            time.sleep(0.1)
        seconds = time.monotonic() - begun
        late = wait_for_all(processes, 20)
        # Cut off from the node of its rendezvous, torchrun itself waits a quarter of an hour after its ranks have ended.
        waits = kind == "cable" or kind == "power" and node == 0
        wrong += [text for text in late if not (waits and "torch.distributed.run" in text)]
        nodes.plug()
        survivors = [1 - node] if kind != "cable" else [0, 1]
        said = "".join((folder / f"log0.node{i}").read_text(errors="replace") for i in survivors)
        errors = re.findall("error: .*", said)  # a progress bar may stand before it
        if (
            not any(f"rank {node} was last seen in stage" in line for line in errors)
            and kind != "cable"
        ):
            wrong.append(f"the other node did not name rank {node} and its stage")
        if not errors:
            wrong.append("no line begins with error:")
        newest = newest_checkpoint(out)
        processes = launch(folder, 1, rendezvous)
        wrong += wait_for_all(processes, 300)
        went = went_on(folder / "log1.node0")
        result.kills[f"{kind} of node {node}"] += 1
        result.resumed, result.anew = result.resumed + bool(went), result.anew + (went == 0)
        print(
            f"nodes {result.rounds}: node {node} is lost at step {at}: {LOSSES[kind]} ({rendezvous}); the other one ended after "
            f"{seconds:.0f} s with {(errors or ['nothing'])[0][:200]!r}; both went on from step {went}",
            flush=True,
        )
        if any(process.returncode for process in processes) or went != newest:
            wrong.append(
                f"the second start ended with {[p.returncode for p in processes]}, went on from {went}, not {newest}"
            )
        else:
            wrong += differences(out, expected, set())
        report(name, [f"round {result.rounds}: {text}" for text in wrong], result, folder)


def not_shared(launch, folder: Path) -> list[str]:
    """A node with another directory in the place of output_dir's parent ends with one line and exit code 2."""
    (folder / "elsewhere").mkdir(parents=True)
    (folder / "out").mkdir()
    processes = launch(
        folder,
        0,
        "static",
        ("true", f"mount --make-rprivate / ; mount --bind {folder}/elsewhere {folder}/out"),
    )
    wrong, logs = (
        wait_for_all(processes, 120),
        [(folder / f"log0.node{i}").read_text() for i in range(2)],
    )
    for log in logs:
        lines = [line for line in log.splitlines() if line.startswith("error")]
        if (
            len(lines) != 1
            or "is not the directory that rank 0 writes to" not in lines[0]
            or "node1" not in lines[0]
        ):
            wrong.append(f"output_dir not shared: it said {lines}")
        if not re.search(r"exitcode +: 2 ", log):
            wrong.append("output_dir not shared: no rank ended with exit code 2")
    print(
        f"nodes: output_dir not shared: {'; '.join(wrong) or 'said on both nodes, exit code 2'}",
        flush=True,
    )
    return wrong


# -- all of it ---------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("loops", nargs="*", help=f"of {', '.join(MINUTES)}; none: all")
    parser.add_argument(
        "--minutes", type=float, help="for each loop; no round begins that may take longer"
    )
    parser.add_argument("--rounds", type=int, help="of each loop, instead of minutes")
    parser.add_argument(
        "--seed",
        type=int,
        default=int(time.time()) % 10000,
        help="of the choices; the moments vary a little",
    )
    parser.add_argument("--directory", type=Path, help="for the runs; default: a temporary one")
    arguments = parser.parse_args()
    if unknown := set(arguments.loops) - MINUTES.keys():
        parser.error(f"no such loop: {', '.join(unknown)}")
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(
        signal.SIGTERM, lambda number, _: sys.exit(128 + number)
    )  # and end what has been started
    directory = Path(tempfile.mkdtemp(prefix="soak", dir=arguments.directory))
    make_assets(directory)
    print(f"seed {arguments.seed}, in {directory}", flush=True)
    results = {}
    for name in arguments.loops or MINUTES:
        result, begun, rng = Result(), time.monotonic(), random.Random(f"{arguments.seed} {name}")
        results[name], limit, times = result, 60 * (arguments.minutes or MINUTES[name]), [begun]

        def more() -> bool:
            times.append(time.monotonic())
            longest = max(b - a for a, b in zip(times, times[1:]))
            if arguments.rounds:
                return result.rounds < arguments.rounds
            return result.rounds == 0 or times[-1] - begun + longest < limit

        (directory / name).mkdir()
        try:
            (lost if name == "nodes" else killed)(
                name, directory, directory / name, rng, result, more
            )
        finally:
            wait_for_all([], 0)
        result.seconds = time.monotonic() - begun
    print(
        f"\n{'loop':10}{'rounds':>8}{'kills':>8}{'resumed':>9}{'anew':>6}{'wrong':>7}{'minutes':>9}"
    )
    for name, r in results.items():
        print(
            f"{name:10}{r.rounds:8}{r.kills.total():8}{r.resumed:9}{r.anew:6}{len(r.wrong):7}{r.seconds / 60:9.1f}"
        )
        print(
            "".join(f"{'':10}{count:4} {how}\n" for how, count in sorted(r.kills.items())), end=""
        )
    if any(r.wrong for r in results.values()):
        sys.exit(f"what went wrong is in {directory}")
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()

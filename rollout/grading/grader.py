"""Grade samples in parallel worker processes, and return the results in order."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from config import InputError
from rollout.grading.pool import (
    EVENT_LOOP_DELAY,
    Item,
    Job,
    WorkerPool,
    check_environment,
    check_weights,
)
from rollout.grading.process import Call, Program, worker_environment
from rollout.grading.results import Failure, Result, Reward

WORKER = "rollout.grading.worker"


class GradingJob(Job):
    """The calls of one grade()."""

    def __init__(self, items: Sequence[Item], calls: Sequence[Call], max_failures: float):
        super().__init__(len(items), calls, max_failures)
        self.items = items

    def request(self, call: Call) -> dict:
        prompts = [self.items[i][0] for i in call]
        responses = [self.items[i][1] for i in call]
        rows = [self.items[i][2] for i in call]
        return {"check": False, "prompts": prompts, "responses": responses, "rows": rows}

    def result(self, i: int, answer: dict) -> Result:
        if "score" in answer:
            return Reward(**answer)
        _, response, row = self.items[i]
        return Failure(**answer, row=row, response=response)


class Grader(WorkerPool):
    """Worker processes that call one reward function, as configured in the section `reward`.

    The constructor starts the first worker, so a function that cannot be imported or called raises
    InputError at once. More workers start when there is work for them, or to replace workers that
    died. The function's output goes to {output_dir}/reward_output/rank_{rank}.txt.

    Args:
        startup_timeout: the seconds allowed for starting Python and importing the function.

    Attributes:
        takes_groups: whether the function takes all responses of a group at once.
        parts: the names of the parts that every reward must have; None before the first reward.
        has_steps: whether the function returns the rewards of steps, too.
    """

    def __init__(self, config: DictConfig, startup_timeout: float = 300.0):
        reward = config.reward
        check_reward_settings(reward)
        self.function = reward.function
        self.has_steps = reward.step_rewards
        rank = os.environ.get("RANK", 0)
        output = Path(config.output_dir, "reward_output", f"rank_{rank}.txt").absolute()
        self.settings = {
            **OmegaConf.to_container(reward),
            "output": str(output),
            "conversation_keys": [config.data.messages_key, config.data.prompt_key],
        }
        program = Program(
            name=f"reward.function={self.function}",
            command=[sys.executable, "-P", "-m", WORKER],
            environment=worker_environment(reward.env),
            settings=self.settings,
        )
        super().__init__(program, reward.num_workers, startup_timeout)
        self.concurrency = reward.concurrency
        ready = self.idle[0].ready
        self.takes_groups = ready["takes_groups"]
        is_async = ready["is_async"]
        self.seconds_per_call = reward.timeout + (EVENT_LOOP_DELAY if is_async else 0)
        if self.concurrency > 1 and not is_async:
            raise InputError(
                f"reward.concurrency={self.concurrency} has no effect, because reward.function="
                f"{self.function} is not async: define it with `async def`, or raise "
                "reward.num_workers"
            )

    def check(self, row: dict, columns: Iterable[str] = ()) -> str:
        """Return a notice about how the function is called, or "" if there is nothing to report.

        Args:
            columns: the columns that have a value in any row.

        Raises:
            InputError: the row lacks a value for one of the function's parameters, or rows have a
                column that a parameter of the same name would not get.
        """
        request = {
            "check": True,
            "prompts": [""],
            "responses": [""],
            "rows": [row],
            "columns": sorted(columns),
        }
        stage = "while a row was checked"
        return self.idle[-1].query(request, self.startup_timeout, stage)["notice"]

    def grade(
        self, items: Sequence[Item], groups: Sequence[int], max_failures: float = math.inf
    ) -> list[Result | None]:
        """Return the results of the items, in the same order.

        Args:
            items: tuples of prompt, response and row. Rows must be representable in JSON.
            groups: the group of each item. A function that takes groups is called once per group.
            max_failures: after more failures than this, the remaining items are not graded, and
                their results are None.
        """
        calls: dict[int, Call] = {}
        for i, group in enumerate(groups):
            key = group if self.takes_groups else i
            calls.setdefault(key, []).append(i)
        job = GradingJob(items, list(calls.values()), max_failures)
        self.run(job)
        return job.results


def check_reward_settings(reward: DictConfig) -> None:
    """Check the values in reward.weights and reward.kwargs, and the variables in reward.env.

    Raises:
        InputError: a value has the wrong type, or a variable is not set.
    """
    check_weights(reward.weights)
    for name, value in reward.kwargs.items():
        if not isinstance(value, str):
            raise InputError(
                f"reward.kwargs.{name}={value} must be the name of a column, or a path in one: "
                "COLUMN.KEY"
            )
    check_environment(reward.env)


def check_failures(
    failures: Sequence[Failure],
    num_samples: int,
    max_failure_rate: float,
    num_earlier: int = 0,
) -> None:
    """Raise InputError, which shows the first failure, if too many samples were not graded.

    Args:
        failures: those that are new.
        num_samples: all samples, including those of earlier draws of the step.
        num_earlier: the failures of earlier draws.
    """
    num_failures = num_earlier + len(failures)
    if not failures or num_failures <= max_failure_rate * num_samples:
        return
    first = failures[0]
    raise InputError(
        f"{num_failures} of {num_samples} samples ({num_failures / num_samples:.1%}) could not "
        f"be graded, more than reward.max_failure_rate={max_failure_rate}; the first: "
        f"{first.summary}, "
        f"for the response {first.response[:200]!r} (all failures are in failures.jsonl; the "
        "function's output is in reward_output/)"
    )

"""TRL's half of episodes_gpu.py --trl: print one JSON line about GRPOTrainer's episodes.

    python benchmarks/trl_episodes.py --model DIR --work WORK.json

episodes_gpu.py writes WORK.json: {"tokens": of a turn, "group": number of episodes of a prompt,
"cases": [cases][episodes][turns], the time that an episode waits for its tool after each turn}.
The printed line has the seconds, the sampled tokens, and the share of the time in which vLLM did
not generate, for each case. The first case should be left out, since it warms up.

The model has random weights, so it would never call a tool, and TRL's code is not changed.
Therefore the tokenizer's response_template turns every response into a call of the tool, and
max_tool_calling_iterations ends an episode after its last turn. In generation_kwargs, max_tokens
limits a turn, since max_completion_length limits the whole episode. Every episode has its own
environment (environment_factory) with one async tool, whose description is not in the prompt.
Prompts and results have as many tokens as in episodes_gpu.py. TRL generates one turn of all
episodes, then waits for the tool of one episode after another (async tools run at the same time
only if one response calls several), then generates the next turn.

GRPOTrainer.train() takes one step for each case. What counts is the time in its _generate():
templates, vLLM, parsing and tools. Rewards, the update and sending weights do not count; the
learning rate is 0, so there are no new weights to send. vLLM is in the same process
(vllm_mode="colocate") and never sleeps, since TRL would put it to sleep after every turn, and send
all weights before the next one.
"""

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer

from benchmarks.harness import make_parser
from benchmarks.trl_peer import add_optimizer_options, report, trainer_settings

RESULT = "found"
RESULT_TOKENS = 16  # of RESULT, with the markers around it
PROMPT_MARKERS = 6  # tokens of a prompt that are not in its text
ANSWER_START = "<|im_start|>assistant\n"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{%- endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
CALL = {"type": "function", "function": {"name": "look_up", "arguments": {}}}
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant", "tool_calls": [CALL]},
    "start_anchor": ANSWER_START,
    "fields": {"content": {"content": "text"}},
}


class Environment:
    """One episode.

    Args:
        tool_seconds: [cases][turns], the time that the tool takes after each turn.
    """

    def __init__(self, tool_seconds: list[list[float]]):
        self._tool_seconds = tool_seconds
        self._num_calls = 0

    def reset(self, case: int, **_) -> None:
        self._seconds = self._tool_seconds[case]
        self._num_calls = 0

    async def look_up(self) -> str:
        """Look something up.

        Returns:
            What was found.
        """
        seconds = self._seconds[self._num_calls]
        self._num_calls += 1
        await asyncio.sleep(seconds)
        return RESULT

    def get_reward(self) -> float:
        return 0.0


@dataclass
class Case:
    """The fields of Measured in episodes_gpu.py."""

    seconds: float
    num_tokens: int
    idle_share: float


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that takes the time of its own methods.

    Attributes:
        cases: the measurements so far.
        vllm_seconds: the time that vLLM took in the current step.
    """

    cases: list[Case]
    vllm_seconds: float

    def _generate(self, *args, **kwargs):
        # vLLM has read the weights from the model's files, and they never change.
        self._last_loaded_step = self.state.global_step
        self.vllm_seconds = 0.0
        start = time.perf_counter()
        generated = super()._generate(*args, **kwargs)
        seconds = time.perf_counter() - start
        sampled_masks = generated[2]
        num_tokens = sum(sum(mask) for mask in sampled_masks)
        self.cases.append(Case(seconds, num_tokens, 1 - self.vllm_seconds / seconds))
        self._check_calls()
        return generated

    def _check_calls(self) -> None:
        for environment in self.environments:
            if environment._num_calls != self.max_tool_calling_iterations:
                raise RuntimeError(
                    f"an episode called its tool {environment._num_calls} times instead of "
                    f"{self.max_tool_calling_iterations} times"
                )

    def _generate_single_turn(self, *args, **kwargs):
        start = time.perf_counter()
        generated = super()._generate_single_turn(*args, **kwargs)
        self.vllm_seconds += time.perf_counter() - start
        return generated


def make_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer, for which every response is a call of the tool."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def make_rows(num_cases: int, num_prompts: int) -> Dataset:
    """Return the prompts of each case, of 20 to 39 tokens."""
    rows = []
    for case in range(num_cases):
        for i in range(num_prompts):
            text = "x" * (20 + i % 20 - PROMPT_MARKERS)
            rows.append({"prompt": [{"role": "user", "content": text}], "case": case})
    return Dataset.from_list(rows)


def grpo_config(arguments: argparse.Namespace, work: dict, scratch: str) -> GRPOConfig:
    num_episodes = len(work["cases"][0])
    num_turns = len(work["cases"][0][0])
    max_completion = num_turns * (work["tokens"] + RESULT_TOKENS)
    return GRPOConfig(
        **trainer_settings(arguments, scratch),
        model_init_kwargs={"dtype": "bfloat16", "attn_implementation": "sdpa"},
        bf16=True,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.4,
        vllm_enable_sleep_mode=False,
        vllm_max_model_length=max_completion + 64,
        vllm_importance_sampling_correction=False,
        per_device_train_batch_size=work["group"],
        gradient_accumulation_steps=num_episodes // work["group"],
        num_generations=work["group"],
        max_completion_length=max_completion,
        generation_kwargs={"max_tokens": work["tokens"]},
        max_tool_calling_iterations=num_turns - 1,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        shuffle_dataset=False,
    )


def play(arguments: argparse.Namespace, work: dict) -> list[Case]:
    """Return the measurements of all cases."""
    cases = work["cases"]
    arguments.steps = len(cases)
    numbers = itertools.count()

    def make_environment() -> Environment:
        # The trainer makes them in the order of the episodes, and keeps them for later steps.
        episode = next(numbers)
        return Environment([seconds[episode] for seconds in cases])

    with tempfile.TemporaryDirectory() as scratch:
        trainer = TimedTrainer(
            model=arguments.model,
            processing_class=make_tokenizer(arguments.model),
            train_dataset=make_rows(len(cases), len(cases[0]) // work["group"]),
            environment_factory=make_environment,
            args=grpo_config(arguments, work, scratch),
        )
        trainer.cases = []
        trainer.train()
    return trainer.cases


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--model", required=True, help="directory in Hugging Face format")
    parser.add_argument("--work", type=Path, required=True, metavar="WORK.json")
    parser.add_argument("--out", type=Path, help="file for the JSON line too")
    add_optimizer_options(parser, lr=0.0, weight_decay=0.0)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    work = json.loads(arguments.work.read_text())
    cases = [asdict(case) for case in play(arguments, work)]
    report({"trainer": "trl", "cases": cases}, arguments.out)


if __name__ == "__main__":
    main()

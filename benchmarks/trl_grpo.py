"""TRL's half of the GRPO benchmark: print one JSON line about GRPOTrainer's steps.

    python benchmarks/trl_grpo.py --model DIR/model --data DIR/train.jsonl --steps 5 --prompts 8 \\
        --samples 8 --micro-batch-size 8
    torchrun --nproc-per-node 2 benchmarks/trl_grpo.py ...     data parallel: DDP, gloo on a CPU

Needs the environment of benchmarks/trl_sft.py.

fp32 (or --dtype), AdamW, constant learning rate, no gradient checkpointing, no KL to a reference
(beta=0), one optimizer step per rollout, loss_type="dapo" (TRL's default: the mean over all tokens
of the step). transformers generates all responses of a step at once, as in TRL without vLLM.
--continuous-batching uses its other generator, generate_batch. --vllm uses vLLM in the same
process, asleep while training (vllm_mode="colocate"), which needs a GPU. Importance weights for its
sampling are off, because TRL would compute log-probabilities once more for them.

Seconds of a step by stage, on rank 0: generate (including templates and decoding), reward, update
(forward, backward, clipping, optimizer). Without vLLM, TRL neither computes old log-probabilities
nor copies weights.
"""

import argparse
import importlib.util
import inspect
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from datasets import load_dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.harness import ROOT, make_parser
from benchmarks.trl_peer import (
    add_optimizer_options,
    is_on_cpu,
    report,
    trainer_settings,
    world_size,
)


class Clock(TrainerCallback):
    """Seconds between the ends of optimizer steps, and of the stages in between.

    Attributes:
        steps: the seconds of each step: "step", "generate", "reward" and "update".
        logs: TRL's metrics of each step.
        seconds: method -> seconds since the last step ended.
    """

    def __init__(self):
        self.steps: list[dict[str, float]] = []
        self.logs: list[dict[str, float]] = []
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.last_stage_end = time.perf_counter()
            self.seconds[name] += self.last_stage_end - start

    def on_train_begin(self, *_, **__):
        self.last_end = time.perf_counter()

    def on_optimizer_step(self, *_, **__):
        # Since the last backward pass ended, so clipping counts too.
        self.seconds["optimizer"] = time.perf_counter() - self.last_stage_end

    def on_step_end(self, *_, **__):
        now = time.perf_counter()
        forward_backward = self.seconds["training_step"] - self.seconds["prepare"]
        stages = {
            "step": now - self.last_end,
            "generate": self.seconds["generate"],
            "reward": self.seconds["reward"],
            "update": forward_backward + self.seconds["optimizer"],
        }
        self.steps.append(stages)
        self.last_end = now
        self.seconds.clear()

    def on_log(self, args, state, control, logs=None, **_):
        if "reward" in logs:
            self.logs.append(logs)

    def results(self) -> list[dict[str, float]]:
        """Return seconds and metrics of each step."""
        results = []
        for seconds, log in zip(self.steps, self.logs, strict=True):
            metrics = {
                "length": log["completions/mean_length"],
                "score": log["reward"],
                "grad_norm": log["grad_norm"],
            }
            results.append(seconds | metrics)
        return results


class TimedTrainer(GRPOTrainer):
    """TRL's methods as stages of the clock.

    training_step contains prepare, which contains generate and reward.
    """

    clock: Clock

    def training_step(self, *args, **kwargs):
        with self.clock.stage("training_step"):
            return super().training_step(*args, **kwargs)

    def _prepare_inputs(self, *args, **kwargs):
        with self.clock.stage("prepare"):
            return super()._prepare_inputs(*args, **kwargs)

    def _generate(self, *args, **kwargs):
        with self.clock.stage("generate"):
            return super()._generate(*args, **kwargs)

    def _calculate_rewards(self, *args, **kwargs):
        with self.clock.stage("reward"):
            return super()._calculate_rewards(*args, **kwargs)


def load_reward(name: str) -> Callable:
    """Return a reward in TRL's form.

    name: FILE.py:FUNCTION of some of prompt, response and row, as train_ppo.py takes it.
    """
    path, _, function_name = name.rpartition(":")
    spec = importlib.util.spec_from_file_location("reward", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look their module up there.
    spec.loader.exec_module(module)
    score = getattr(module, function_name)
    parameters = inspect.signature(score).parameters

    def reward(prompts, completions, **columns) -> list[float]:
        scores = []
        for i, (prompt, turns) in enumerate(zip(prompts, completions)):
            row = {key: values[i] for key, values in columns.items() if isinstance(values, list)}
            values = {"prompt": prompt[-1]["content"], "response": turns[0]["content"], "row": row}
            scores.append(score(**{name: values[name] for name in parameters}))
        return scores

    return reward


def load_prompts(path: str):
    """Return the rows of a file, with a column of prompts as TRL reads them.

    In a file of conversations, the last turn is the reply, which GRPO does not use.
    """
    rows = load_dataset("json", data_files=path, split="train")
    if "prompt" in rows.column_names:
        return rows
    prompts = [messages[:-1] for messages in rows["messages"]]
    return rows.remove_columns("messages").add_column("prompt", prompts)


def vllm_settings(arguments: argparse.Namespace) -> dict:
    if not arguments.vllm:
        return {"use_vllm": False}
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.4,
        "vllm_enable_sleep_mode": True,
        "vllm_max_model_length": arguments.max_length,
        "vllm_importance_sampling_correction": False,
    }


def grpo_config(
    arguments: argparse.Namespace, micro_batch_size: int, micro_steps: int, scratch: str
) -> GRPOConfig:
    """Return TRL's settings. micro_steps is also the default of its steps_per_generation."""
    return GRPOConfig(
        **trainer_settings(arguments, scratch),
        **vllm_settings(arguments),
        seed=arguments.seed,
        model_init_kwargs={"dtype": arguments.dtype, "attn_implementation": "sdpa"},
        bf16=arguments.dtype == "bfloat16" or arguments.autocast,
        use_transformers_continuous_batching=arguments.continuous_batching,
        per_device_train_batch_size=micro_batch_size,
        gradient_accumulation_steps=micro_steps,
        num_generations=arguments.samples,
        max_completion_length=arguments.max_tokens,
        num_iterations=1,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        scale_rewards="group",
        shuffle_dataset=arguments.shuffle,
    )


def train(arguments: argparse.Namespace, micro_batch_size: int, micro_steps: int) -> Clock:
    clock = Clock()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = TimedTrainer(
            model=arguments.model,
            reward_funcs=load_reward(arguments.reward),
            processing_class=AutoTokenizer.from_pretrained(arguments.model),
            train_dataset=load_prompts(arguments.data),
            callbacks=[clock],
            args=grpo_config(arguments, micro_batch_size, micro_steps, scratch),
        )
        trainer.clock = clock
        trainer.train()
        if arguments.save:
            trainer.save_model(arguments.save)
    return clock


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--model", required=True, help="directory in Hugging Face format")
    parser.add_argument("--data", required=True, help="jsonl with prompts, lists of messages")
    parser.add_argument(
        "--steps", type=int, default=5, help="optimizer steps, of which the first warms up"
    )
    parser.add_argument("--prompts", type=int, default=8, help="per step, over all ranks")
    parser.add_argument("--samples", type=int, default=8, help="responses to each prompt")
    parser.add_argument(
        "--micro-batch-size", type=int, default=8, help="sequences per forward pass, on one rank"
    )
    parser.add_argument("--max-tokens", type=int, default=256, help="of a response")
    parser.add_argument("--continuous-batching", action="store_true")
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument(
        "--max-length",
        type=int,
        default=640,
        help="tokens of prompt and response together, for --vllm",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of weights and optimizer too",
    )
    parser.add_argument(
        "--autocast", action="store_true", help="compute in bfloat16 on weights in float32"
    )
    parser.add_argument(
        "--reward",
        default=f"{ROOT}/benchmarks/even_words.py:even_words",
        metavar="FILE.py:FUNCTION",
    )
    parser.add_argument("--save", help="directory for the trained model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shuffle", action="store_true", help="draw the prompts in random order")
    add_optimizer_options(parser, lr=1e-6, weight_decay=0.01)
    parser.add_argument("--out", type=Path, help="file for the JSON line too")
    arguments = parser.parse_args()
    if arguments.vllm and is_on_cpu():
        parser.error("--vllm needs a GPU: leave it out")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    num_responses = arguments.prompts * arguments.samples
    num_on_rank = num_responses // world_size()
    micro_batch_size = min(arguments.micro_batch_size, num_on_rank)
    if num_responses % world_size() or num_on_rank % micro_batch_size:
        print(
            f"error: {num_responses} responses (--prompts times --samples) are not a multiple of "
            f"--micro-batch-size {micro_batch_size} times {world_size()} ranks: change one of them",
            file=sys.stderr,
        )
        sys.exit(2)
    clock = train(arguments, micro_batch_size, num_on_rank // micro_batch_size)
    result = {
        "trainer": "trl",
        "num_ranks": world_size(),
        "threads": torch.get_num_threads(),
        "micro_batch_size": micro_batch_size,
        "steps": clock.results(),
    }
    report(result, arguments.out)


if __name__ == "__main__":
    main()

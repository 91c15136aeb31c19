"""The other side of the GRPO benchmark: TRL's GRPOTrainer, one JSON line about its steps. Needs the environment of
benchmarks/trl_sft.py.

    python benchmarks/trl_grpo.py --model DIR/model --data DIR/train.jsonl --steps 5 --prompts 8 --samples 8 \\
        --micro-batch-size 8
    torchrun --nproc-per-node 2 benchmarks/trl_grpo.py ...                       data parallel: DDP, gloo on a CPU

fp32 (or --dtype), AdamW, constant learning rate, no gradient checkpointing, no KL to a reference (beta=0), one optimizer
step per rollout, loss_type="dapo" (TRL's default: the mean over all tokens of the step). All responses of a step are
generated at once by transformers, as TRL does without vLLM. --continuous-batching takes its other generator, generate_batch.
--vllm takes vLLM in the same process, asleep while training (vllm_mode="colocate"), which needs a GPU; importance weights for
its sampling are off, because TRL would compute log-probabilities once more for them.

Seconds of a step by stage, on rank 0: generate (templates and decoding included), reward, update (forward, backward,
clipping, optimizer). Without vLLM, TRL neither computes old log-probabilities nor copies weights.
"""

import argparse
import importlib.util
import json
import os
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Seconds from the end of one optimizer step to the end of the next, and of the stages in between."""

    def __init__(self):
        self.steps, self.logs, self.seconds = [], [], {}

    @contextmanager
    def stage(self, name: str):
        start = time.perf_counter()
        try:
            yield
        finally:
            self.last = time.perf_counter()
            self.seconds[name] = self.seconds.get(name, 0.0) + self.last - start

    def on_train_begin(self, *arguments, **more):
        self.since = time.perf_counter()

    def on_optimizer_step(self, *arguments, **more):
        self.seconds["optimizer"] = (
            time.perf_counter() - self.last
        )  # since the last backward ended: clipping too

    def on_step_end(self, *arguments, **more):
        now, took = time.perf_counter(), self.seconds
        stages = {
            "generate": took["generate"],
            "reward": took["reward"],
            "update": took["training_step"] - took["prepare"] + took["optimizer"],
        }
        self.steps.append({"step": now - self.since, **stages})
        self.since, self.seconds = now, {}

    def on_log(self, args, state, control, logs=None, **more):
        if "reward" in logs:
            self.logs.append(logs)


class TimedTrainer(GRPOTrainer):
    """TRL's methods, each as a stage of the clock. training_step contains prepare, which contains generate and reward."""

    clock: Clock

    def training_step(self, *arguments, **more):
        with self.clock.stage("training_step"):
            return super().training_step(*arguments, **more)

    def _prepare_inputs(self, *arguments, **more):
        with self.clock.stage("prepare"):
            return super()._prepare_inputs(*arguments, **more)

    def _generate(self, *arguments, **more):
        with self.clock.stage("generate"):
            return super()._generate(*arguments, **more)

    def _calculate_rewards(self, *arguments, **more):
        with self.clock.stage("reward"):
            return super()._calculate_rewards(*arguments, **more)


def find_reward(name: str):
    """FILE.py:FUNCTION of (prompt, response, row), as train_ppo.py takes it, in TRL's form."""
    path, _, function = name.rpartition(":")
    spec = importlib.util.spec_from_file_location("reward", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    score = getattr(module, function)

    def reward(prompts, completions, **columns) -> list[float]:
        return [
            score(prompt[-1]["content"], turns[0]["content"], {})
            for prompt, turns in zip(prompts, completions)
        ]

    return reward


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="directory in Hugging Face format")
    parser.add_argument("--data", required=True, help="jsonl with prompts, lists of messages")
    parser.add_argument(
        "--steps",
        type=int,
        default=5,
        help="optimizer steps; whoever reads the result leaves out the first",
    )
    parser.add_argument("--prompts", type=int, default=8, help="per step, over all ranks")
    parser.add_argument("--samples", type=int, default=8, help="responses to each prompt")
    parser.add_argument(
        "--micro-batch-size", type=int, default=8, help="sequences per forward pass, on one rank"
    )
    parser.add_argument("--max-tokens", type=int, default=256, help="longest response")
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
        help="also of weights and optimizer",
    )
    parser.add_argument(
        "--reward",
        default=f"{Path(__file__).parent}/even_words.py:even_words",
        help="FILE.py:FUNCTION",
    )
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.95))
    parser.add_argument("--eps", type=float, default=1e-8)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--out", help="file for the JSON line too")
    arguments = parser.parse_args()

    world_size, on_cpu = int(os.environ.get("WORLD_SIZE", 1)), not torch.cuda.is_available()
    on_rank = arguments.prompts * arguments.samples // world_size
    micro_batch_size = min(arguments.micro_batch_size, on_rank)
    if on_rank * world_size != arguments.prompts * arguments.samples or on_rank % micro_batch_size:
        parser.error(
            f"--prompts times --samples is no multiple of --micro-batch-size times {world_size} ranks"
        )

    use_vllm = (
        {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.4,
            "vllm_enable_sleep_mode": True,
            "vllm_max_model_length": arguments.max_length,
            "vllm_importance_sampling_correction": False,
        }
        if arguments.vllm
        else {"use_vllm": False}
    )
    clock = Clock()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = TimedTrainer(
            model=arguments.model,
            reward_funcs=find_reward(arguments.reward),
            processing_class=AutoTokenizer.from_pretrained(arguments.model),
            train_dataset=load_dataset("json", data_files=arguments.data, split="train"),
            callbacks=[clock],
            args=GRPOConfig(
                output_dir=scratch,
                model_init_kwargs={"dtype": arguments.dtype, "attn_implementation": "sdpa"},
                use_cpu=on_cpu,
                ddp_backend="gloo" if on_cpu and world_size > 1 else None,
                bf16=arguments.dtype == "bfloat16",
                gradient_checkpointing=False,
                **use_vllm,
                use_transformers_continuous_batching=arguments.continuous_batching,
                max_steps=arguments.steps,
                per_device_train_batch_size=micro_batch_size,
                gradient_accumulation_steps=on_rank
                // micro_batch_size,  # also steps_per_generation, by default
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
                shuffle_dataset=False,
                optim="adamw_torch_fused",
                learning_rate=arguments.lr,
                lr_scheduler_type="constant",
                adam_beta1=arguments.betas[0],
                adam_beta2=arguments.betas[1],
                adam_epsilon=arguments.eps,
                weight_decay=arguments.weight_decay,
                max_grad_norm=arguments.clip_grad,
                logging_steps=1,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                dataloader_pin_memory=not on_cpu,
            ),
        )
        trainer.clock = clock
        trainer.train()

    if int(os.environ.get("RANK", 0)) == 0:
        steps = [
            {
                **seconds,
                "length": log["completions/mean_length"],
                "score": log["reward"],
                "grad_norm": log["grad_norm"],
            }
            for seconds, log in zip(clock.steps, clock.logs, strict=True)
        ]
        line = json.dumps(
            {
                "trainer": "trl",
                "num_ranks": world_size,
                "threads": torch.get_num_threads(),
                "micro_batch_size": micro_batch_size,
                "steps": steps,
            }
        )
        print(line)
        if arguments.out:
            with open(arguments.out, "w") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()

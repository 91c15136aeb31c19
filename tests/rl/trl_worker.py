"""Compute policy losses with TRL, for comparison:  python tests/rl/trl_worker.py SETTINGS

SETTINGS is a JSON file:

    model       directory of a model and its tokenizer
    max_tokens  the longest completion
    batch       completions of equal groups, in order, each {"tokens": one character per token, x if
                the policy sampled it and a dot otherwise, "is_truncated", "parts": {name: reward}}
    cases       name -> {"trainer": grpo, gmpo or rloo, "reward_scale", "corrects_sampling", and
                "options" of TRL's configuration}

Prints a JSON object: the name of a case -> the fields of Computed.
"""

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

TRAINERS = {
    "grpo": (GRPOTrainer, GRPOConfig),
    "gmpo": (GMPOTrainer, GMPOConfig),
    "rloo": (RLOOTrainer, RLOOConfig),
}


@dataclass
class Computed:
    """What TRL computes for a case. The numbers of tokens are those of sampled tokens, in order.

    advantages          of each completion
    rollout_log_probs   of the policy that drew the completions
    old_log_probs       of the policy before the update
    ref_log_probs       of the reference model; None without one
    log_probs, entropy  of the policy that is updated
    loss                the loss
    log_probs_gradient, entropy_gradient   its derivatives
    """

    advantages: list[float]
    rollout_log_probs: list[float] | None = None
    old_log_probs: list[float] | None = None
    ref_log_probs: list[float] | None = None
    log_probs: list[float] | None = None
    entropy: list[float] | None = None
    loss: float | None = None
    log_probs_gradient: list[float] | None = None
    entropy_gradient: list[float] | None = None


class Drawn:
    """The prompts and completions of the batch, and their log-probabilities in a sampler."""

    def __init__(self, settings: dict):
        self.batch = settings["batch"]
        self.tokenizer = AutoTokenizer.from_pretrained(settings["model"])
        self.sampler = perturbed(load(settings["model"]), seed=3)
        generator = torch.Generator().manual_seed(4)
        self.completions = [self.draw(row, generator) for row in self.batch]
        self.masks = [mask_of(row["tokens"]) for row in self.batch]

    def draw(self, row: dict, generator: torch.Generator) -> list[int]:
        """Return random letters. The end token is last in completions that are not truncated."""
        letters = self.tokenizer.encode("abcdefghijklmnop", add_special_tokens=False)
        chosen = torch.randint(len(letters), (len(row["tokens"]),), generator=generator)
        tokens = [letters[i] for i in chosen]
        if not row["is_truncated"]:
            tokens[-1] = self.tokenizer.eos_token_id
        return tokens

    def roll_out(self, prompts: list[str], _) -> dict[str, list]:
        """Return the batch in the form of TRL's rollout functions."""
        prompt_ids = [self.tokenizer.encode(prompt) for prompt in prompts]
        pairs = zip(prompt_ids, self.completions, strict=True)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": self.completions,
            "logprobs": [log_probs_of(self.sampler, *pair) for pair in pairs],
            "env_mask": self.masks,
        }

    def rewards(self, name: str, scale: float):
        """Return a reward function with the rewards of a part."""

        def reward(completions, **_):
            return [scale * row["parts"][name] for row in self.batch]

        return reward

    def sampled(self, padded: Tensor | None) -> list[float] | None:
        """Return the numbers of the sampled tokens from a tensor of all completions' tokens."""
        if padded is None:
            return None
        rows = []
        for numbers, mask in zip(padded, self.masks):
            rows.append(numbers[: len(mask)][torch.tensor(mask) > 0])
        return torch.cat(rows).tolist()


def mask_of(tokens: str) -> list[int]:
    return [int(token == "x") for token in tokens]


def load(path: str):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def perturbed(model, seed: int):
    """Return the model after changing its weights a little."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.03 * torch.randn(weight.shape, generator=generator))
    return model


@torch.no_grad()
def log_probs_of(model, prompt: list[int], completion: list[int]) -> list[float]:
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[range(len(completion)), completion].tolist()


def make_trainer(case: dict, settings: dict, drawn: Drawn, scratch: str):
    trainer_class, config_class = TRAINERS[case["trainer"]]
    num_completions = len(drawn.batch)
    config = config_class(
        output_dir=scratch,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        per_device_train_batch_size=num_completions,
        num_generations=settings["group_size"],
        # The policy before the update is then another one than the policy that is updated.
        num_iterations=2,
        max_completion_length=settings["max_tokens"],
        disable_dropout=True,
        **case["options"],
    )
    names = drawn.batch[0]["parts"]
    functions = {} if case["trainer"] == "rloo" else {"rollout_func": drawn.roll_out}
    return trainer_class(
        model=load(settings["model"]),
        reward_funcs=[drawn.rewards(name, case["reward_scale"]) for name in names],
        args=config,
        train_dataset=Dataset.from_list(prompts_of(settings, num_completions)),
        processing_class=drawn.tokenizer,
        **functions,
    )


def prompts_of(settings: dict, num_completions: int) -> list[dict]:
    """Return prompts of different lengths, each repeated for its group."""
    groups = [i // settings["group_size"] for i in range(num_completions)]
    return [{"prompt": "question "[: 4 + 3 * group]} for group in groups]


def compute(case: dict, settings: dict, drawn: Drawn) -> Computed:
    with tempfile.TemporaryDirectory() as scratch:
        trainer = make_trainer(case, settings, drawn, scratch)
    model = perturbed(trainer.model, seed=1).train()
    if case["corrects_sampling"]:
        # TRL corrects only for vLLM, whose place the rollout function takes: it need not be told
        # the weights of this step.
        trainer.use_vllm = True
        trainer._last_loaded_step = trainer.state.global_step
    inputs = trainer._generate_and_score_completions(prompts_of(settings, len(drawn.batch)))
    computed = Computed(inputs["advantages"].tolist())
    if case["trainer"] == "rloo":
        return computed
    computed.rollout_log_probs = drawn.sampled(inputs["sampling_per_token_logps"])
    computed.old_log_probs = drawn.sampled(inputs["old_per_token_logps"])
    computed.ref_log_probs = drawn.sampled(inputs.get("ref_per_token_logps"))
    perturbed(model, seed=2)
    set_loss(computed, trainer, inputs, drawn)
    return computed


def set_loss(computed: Computed, trainer, inputs: dict, drawn: Drawn) -> None:
    """Compute the loss and its derivatives by what the model returns."""
    outputs = []

    def keep(module, arguments, output):
        output.log_probs.retain_grad()
        output.entropy.retain_grad()
        outputs.append(output)

    hook = trainer.model.register_forward_hook(keep)
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    hook.remove()
    (output,) = outputs
    num_tokens = inputs["completion_ids"].shape[1]
    log_probs = output.log_probs
    entropy = output.entropy
    computed.loss = loss.item()
    computed.log_probs = drawn.sampled(log_probs.detach()[:, -num_tokens:])
    computed.entropy = drawn.sampled(entropy.detach()[:, -num_tokens:])
    computed.log_probs_gradient = drawn.sampled(log_probs.grad[:, -num_tokens:])
    if entropy.grad is not None:
        computed.entropy_gradient = drawn.sampled(entropy.grad[:, -num_tokens:])


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    drawn = Drawn(settings)
    computed = {}
    for name, case in settings["cases"].items():
        computed[name] = asdict(compute(case, settings, drawn))
    print(json.dumps(computed))


if __name__ == "__main__":
    main()

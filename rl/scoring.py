"""Score responses with the reward model, on the samples of a step. See rl/reward_model.py."""

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor

from config import InputError
from configs.errors import errors_about_model
from data.answered import encode_answered
from data.reward_dataset import with_score_tokens
from data.tokenization import plain_options
from engines.base import Engine
from engines.context_parallel import sequence_limit
from engines.parallel.device import on_all_ranks
from rl import updates
from rl.collecting import informative_responses, score_metrics
from rl.reward_model import KEY, PART, load_chat
from rollout.exchange import sum_over_ranks
from rollout.samples import Samples
from rollout.sharing import divide

# The part of a reward function that returns a number instead of parts.
FUNCTION_PART = "function"
NO_FUNCTION = "none"


class RewardModel:
    """The frozen engine of the reward model, and the tokenizer that it reads conversations with.

    engine      computes the scores; it has a value head
    chat        the reward model's tokenizer and chat template
    offloaded   the parts that are moved to host memory while the reward model is not used
    max_tokens  the longest conversation that it reads; of a longer one, it reads the end
    """

    def __init__(self, config: DictConfig, engine: Engine, offloaded: list[str]) -> None:
        """config: the run's."""
        self.config = config
        self.engine = engine
        self.offloaded = offloaded
        self.chat = load_chat(config)
        # The policy may write any character. check_conversations() has read the prompts.
        self.chat.may_drop = True
        self.options = plain_options(config.data)
        limit, _ = sequence_limit(engine.config, dist.get_world_size())
        positions = getattr(engine.hf_config, "max_position_embeddings", None) or limit
        self.max_tokens = min(limit, positions) - 1  # one more token holds the place of the score

    def score(self, samples: Samples, group: dist.ProcessGroup | None) -> Samples:
        """Return the samples with the score of each response as the part "model".

        The samples keep the reward function's scores: see add_to_scores(). Called by all ranks.
        If the function has graded no response at all, there is nothing to score.

        group: gloo group of all ranks.
        """
        if len(samples) == 0:
            metrics = samples.metrics | {"reward/model/mean": math.nan}
            return replace(samples, parts=samples.parts | {PART: samples.scores}, metrics=metrics)
        rows = [prompt.row for prompt in samples.prompts]
        # A template may reject a conversation that only one rank has.
        with errors_about_model(KEY, self.config.reward.model.path):
            ids = on_all_ranks(encode_answered, rows, samples.texts, self.chat, self.options)
        scores = self.score_conversations(
            samples, [part[-self.max_tokens :] for part in ids], group
        )
        num_cut = torch.tensor(float(sum(len(part) > self.max_tokens for part in ids)))
        cut = sum_over_ranks(num_cut, group).item() / len(samples)
        metrics = samples.metrics | {
            "reward/model/mean": scores.mean().item(),
            "reward/model/std": scores.std(correction=0).item(),
            "reward/model/cut": cut,
        }
        return replace(samples, parts=samples.parts | {PART: scores}, metrics=metrics)

    def score_conversations(
        self, samples: Samples, ids: list[list[int]], group: dist.ProcessGroup | None
    ) -> Tensor:
        """Return the scores of all n conversations on every rank, [n] fp32.

        ids: the tokens of this rank's m conversations.
        """
        lengths = torch.zeros(len(samples), dtype=torch.int64)
        lengths[samples.held] = torch.tensor([len(part) + 1 for part in ids], dtype=torch.int64)
        tokens = torch.tensor(list(chain.from_iterable(ids)), dtype=torch.int64)
        conversations = replace(
            samples,
            batch=with_score_tokens(tokens, [len(part) for part in ids]),
            lengths=sum_over_ranks(lengths, group),
        )
        one_mini_batch = torch.zeros(len(samples), dtype=torch.int64)
        share = divide(conversations, one_mini_batch, self.engine, group)
        values = updates.compute(self.engine.values, share)
        self.engine.offload(*self.offloaded)
        scores = values[share.batch.fields["loss_mask"] > 0]
        return share.gather_responses(scores)


def add_to_scores(
    config: DictConfig, samples: Samples, group: dist.ProcessGroup | None = None
) -> Samples:
    """Return samples whose scores include the reward model's, with metrics of these scores.

    group: gloo group of all ranks.
    """
    scores_of_model = samples.parts[PART]
    parts = {name: part for name, part in samples.parts.items() if name != PART}
    if not parts and config.reward.function != NO_FUNCTION:
        parts[FUNCTION_PART] = samples.scores
    scores = samples.scores + config.reward.model.weight * scores_of_model
    metrics = samples.metrics | score_metrics(scores)
    for name, part in parts.items():
        metrics[f"reward/{name}/mean"] = part.mean().item()
    parts[PART] = scores_of_model
    scored = replace(samples, scores=scores, parts=parts, metrics=metrics)
    is_informative = informative_responses(config, scored, group)
    metrics["reward/informative_groups"] = is_informative.float().mean().item()
    return scored


def check_part_names(config: DictConfig, names: Iterable[str]) -> None:
    """Raise InputError if the reward function returns a part named like the reward model's."""
    if PART in names:
        raise InputError(
            f'reward.function={config.reward.function} returns a part named "{PART}", but this is '
            f"the name of the part that {KEY} adds: rename it"
        )

"""Responses of a single turn that continue in the next step."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import torch
from omegaconf import DictConfig

from config import InputError
from data.batching.batch import Batch
from data.prompts import Prompt
from engines.model.routes import FIELD as ROUTES
from rollout.drawing import Generation, dataset_rows, image_arguments
from rollout.partial.drawing import Draw, PartialSampler
from rollout.partial.groups import (
    Counters,
    OpenGroup,
    OpenResponse,
    from_bytes,
    split_rows,
    to_bytes,
)
from rollout.responses import Responses
from rollout.samples import Samples
from rollout.vllm.continuing import ContinuingRollout
from rollout.vllm.sampling import count_candidates, request_seed


@dataclass(kw_only=True)
class PartialResponses(PartialSampler):
    """Draws graded responses of a single turn.

    Attributes:
        continuing: generates parts of responses.
    """

    continuing: ContinuingRollout

    def new_group(self, number: int, key: tuple[int, int, int], first_number: int) -> OpenGroup:
        numbers = range(first_number, first_number + self.config.rollout.n)
        responses = [OpenResponse(request_seed(*key, i)) for i in numbers]
        return OpenGroup(number, key[-1], responses)

    def generate(self, num_complete: int, version: int) -> None:
        pairs = self.open.running()
        running = [response for _, response in pairs]
        # Responses share their prompt, so that its images are converted only once.
        rows = dict.fromkeys(group.row for group, _ in pairs)
        prompt_of_row = {row: self.dataset[row] for row in rows}
        prompts = [prompt_of_row[group.row] for group, _ in pairs]
        responses, reasons = self.continuing.generate(
            [[*p.input_ids, *r.tokens.tolist()] for p, r in zip(prompts, running)],
            [response.seed for response in running],
            [len(response) for response in running],
            self.config.rollout,
            self.open.make_is_enough(num_complete, version),
            **self.image_arguments(prompts, running),
        )
        routes = self.routes_of(prompts, running, responses)
        for i, response in enumerate(running):
            length = responses.lengths[i]
            candidates = responses.candidates
            response.append(
                responses.tokens[i, :length],
                responses.log_probs[i, :length],
                None if candidates is None else candidates[i, :length],
                version,
            )
            if routes:
                response.read(routes[i])
            response.is_complete = i in reasons
            response.is_truncated = reasons.get(i) == "length"
        self.counts.slots += self.continuing.num_steps * len(running)
        self.counts.tokens += int(responses.lengths.sum())

    def routes_of(
        self, prompts: list[Prompt], running: list[OpenResponse], responses: Responses
    ) -> list[np.ndarray]:
        """Return the experts of each prompt and its response so far; nothing without a recorder.

        Call this before the new tokens are appended.

        Args:
            responses: the new tokens.
        """
        if responses.routes is None:
            return []
        num_known = [len(p.input_ids) + len(r) for p, r in zip(prompts, running)]
        return split_rows(responses.routes, np.array(num_known) + responses.lengths)

    def image_arguments(self, prompts: list[Prompt], running: list[OpenResponse]) -> dict:
        """Return the argument `image_prompts` of ContinuingRollout.generate(), if needed."""
        arguments = image_arguments(self.dataset, prompts)
        if arguments:
            arguments["image_prompts"] = [
                image_prompt._replace(
                    input_ids=[*image_prompt.input_ids, *response.tokens.tolist()]
                )
                for image_prompt, response in zip(arguments["image_prompts"], running)
            ]
        return arguments

    def grade_and_share(self, draw: Draw) -> Samples:
        return self.sampler.grade_and_share(draw.request, draw.assignment, self.pack(draw))

    def pack(self, draw: Draw) -> Generation:
        """Return the responses of this replica's groups, as Sampler.generate() does."""
        prompts = []
        own = []
        for group in draw.trained:
            prompt = self.dataset[group.row]
            prompts += [prompt] * len(group.responses)
            own += group.responses
        batch = pack_responses(own, [prompt.input_ids for prompt in prompts], self.num_candidates)
        recorder = self.sampler.rollout.recorder
        if recorder:
            routes = recorder.join([response.routes for response in own])
            batch.fields[ROUTES] = torch.from_numpy(routes)
        ages = [draw.version - response.versions for response in own]
        age = torch.zeros_like(batch.fields["loss_mask"])
        if own:
            age[batch.fields["loss_mask"] > 0] = torch.from_numpy(np.concatenate(ages)).float()
        batch.fields["age"] = age
        if self.dataset.image_store:
            rows = dataset_rows(draw.request, draw.assignment)[draw.assignment.replica]
            batch = replace(batch, rows=rows, image_store=self.dataset.image_store)
        truncated = torch.tensor([response.is_truncated for response in own], dtype=torch.bool)
        return Generation(batch, truncated, prompts, draw.seconds, metrics={})

    @property
    def num_candidates(self) -> int:
        return count_candidates(self.config.rollout, self.sampler.rollout.vocab_size)

    def to_bytes(self, counters: Counters) -> bytes:
        return to_bytes(self.open.groups, counters)

    def from_bytes(self, content: bytes) -> tuple[Counters, list[OpenGroup]]:
        counters, groups = from_bytes(content)
        check_can_continue(groups, self.config.rollout, self.num_candidates)
        check_routes(groups, self.config.rollout)
        return counters, groups

    def restored(self, group: OpenGroup) -> OpenGroup:
        return group


def check_can_continue(groups: list[OpenGroup], sampling: DictConfig, num_candidates: int) -> None:
    """Raise InputError if responses of a checkpoint do not fit the current settings.

    sampling: the section `rollout`. num_candidates: from count_candidates().
    """
    num_columns = 1 + num_candidates if num_candidates else 0
    for response in itertools.chain(*(group.responses for group in groups)):
        num_tokens = len(response)
        is_running_at_limit = num_tokens == sampling.max_tokens and not response.is_complete
        if num_tokens > sampling.max_tokens or is_running_at_limit:
            raise InputError(
                f"rollout.max_tokens={sampling.max_tokens}, but the checkpoint has responses that "
                f"are not trained yet and already have {num_tokens} tokens: raise it"
            )
        if num_tokens and response.candidates.shape[-1] != num_columns:
            raise InputError(
                f"rollout.top_k={sampling.top_k}, but the checkpoint has responses that are not "
                "trained yet and were drawn with another rollout.top_k: set that one"
            )


def check_routes(groups: list[OpenGroup], rollout: DictConfig) -> None:
    """Raise InputError if responses of a checkpoint lack the experts that are to be replayed.

    Without rollout.routing_replay, recorded experts are dropped.
    """
    for response in itertools.chain(*(group.responses for group in groups)):
        if not rollout.routing_replay:
            response.routes = None
        elif len(response) and response.routes is None:
            raise InputError(
                "rollout.routing_replay=true, but the checkpoint has responses that are not "
                "trained yet and were drawn without it: set rollout.routing_replay=false"
            )


def pack_responses(
    responses: list[OpenResponse], prompts: list[list[int]], num_candidates: int
) -> Batch:
    """Return prompts and complete responses as Rollout.generate() does."""
    longest = max((len(response) for response in responses), default=0)
    arrays = Responses(len(responses), longest, num_candidates)
    for i, response in enumerate(responses):
        length = len(response)
        arrays.tokens[i, :length] = response.tokens
        arrays.log_probs[i, :length] = response.log_probs
        if num_candidates:
            arrays.candidates[i, :length] = response.candidates
        arrays.lengths[i] = length
    return arrays.batch(prompts)

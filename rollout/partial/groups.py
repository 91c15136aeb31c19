"""Groups of responses that have begun and are not trained yet, on the ranks of one replica."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from config import InputError
from engines.model.routes import joined_parts


@dataclass
class OpenResponse:
    """A response that has begun. It has k tokens.

    Attributes:
        seed: the seed of its random numbers. Token i is drawn with the i-th of them, whichever
            weights draw it.
        tokens: [k] int32.
        log_probs: [k] fp32: under the distribution that each token was drawn from.
        versions: [k] int32: the number of steps that had trained the weights that drew each token.
        candidates: [k, c] int32 with rollout.top_k, see Batch; otherwise c is 0.
        routes: [p + k, L, n], the experts of its prompt of p tokens and its own tokens, with
            rollout.routing_replay: see engines/model/routes.py. None without this setting, or
            before the first token.
        is_complete: whether it has ended.
        is_truncated: whether it has ended because it reached rollout.max_tokens.
    """

    seed: int
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    log_probs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    candidates: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    is_complete: bool = False
    is_truncated: bool = False
    routes: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def oldest_version(self) -> int | None:
        """The version of the weights that drew the oldest token; None without any token."""
        return int(self.versions[0]) if len(self) else None

    def append(
        self,
        tokens: np.ndarray,
        log_probs: np.ndarray,
        candidates: np.ndarray | None,
        version: int,
    ) -> None:
        """Append tokens that were drawn by the weights of one version. Shapes as above."""
        self.tokens = np.concatenate([self.tokens, tokens])
        self.log_probs = np.concatenate([self.log_probs, log_probs])
        new_versions = np.full(len(tokens), version, np.int32)
        self.versions = np.concatenate([self.versions, new_versions])
        if candidates is not None:
            earlier = self.candidates.reshape(len(self.candidates), candidates.shape[1])
            self.candidates = np.concatenate([earlier, candidates])

    def read(self, routes: np.ndarray) -> None:
        """Record the experts of all tokens from vLLM's latest request. Call this after append()."""
        if len(self):
            self.routes = joined_parts(self.routes, routes)


@dataclass
class OpenGroup:
    """The responses to one prompt.

    Attributes:
        number: the number of the group, see ledger.py.
        row: the row of the data set.
    """

    number: int
    row: int
    responses: list[OpenResponse]

    @property
    def is_complete(self) -> bool:
        return all(response.is_complete for response in self.responses)

    @property
    def oldest_version(self) -> int | None:
        """The version of the weights that drew the oldest token; None without any token."""
        versions = [response.oldest_version for response in self.responses]
        return min((v for v in versions if v is not None), default=None)

    def age(self, version: int) -> int:
        """Return how many steps have trained the weights since the oldest token was drawn.

        version: the version of the weights now.
        """
        oldest = self.oldest_version
        return 0 if oldest is None else version - oldest


class OpenGroups:
    """The groups that one replica has begun.

    Args:
        max_staleness: how many steps may train the weights between the first token of a group and
            its use.
        finishes_old: whether groups that would become older are finished; otherwise they are
            dropped.
    """

    def __init__(self, max_staleness: int, finishes_old: bool):
        self.max_staleness = max_staleness
        self.finishes_old = finishes_old
        self.groups: list[OpenGroup] = []

    def running(self) -> list[tuple[OpenGroup, OpenResponse]]:
        """Return the responses that are not complete, with their groups."""
        running = []
        for group in self.groups:
            running += [(group, r) for r in group.responses if not r.is_complete]
        return running

    def is_due(self, group: OpenGroup, version: int) -> bool:
        """Return whether a group must be complete in this step, since later it will be too old.

        version: the number of steps that have trained the weights.
        """
        has_begun = group.oldest_version is not None
        return self.finishes_old and has_begun and group.age(version) >= self.max_staleness

    def make_is_enough(self, num_complete: int, version: int) -> Callable[[Set[int]], bool]:
        """Return a function that tells whether enough groups are complete.

        The function gets the indices of those responses of running() that have ended since.
        """
        group_of = [group.number for group, _ in self.running()]
        missing = Counter(group_of)
        complete = {group.number for group in self.groups if group.is_complete}
        due = {group.number for group in self.groups if self.is_due(group, version)}
        counted: set[int] = set()

        def is_enough(ended: Set[int]) -> bool:
            for i in ended - counted:
                number = group_of[i]
                missing[number] -= 1
                if missing[number] == 0:
                    complete.add(number)
            counted.update(ended)
            return len(complete) >= num_complete and due <= complete

        return is_enough

    def take_trained(self, num_complete: int, version: int) -> list[OpenGroup]:
        """Remove the groups that this step trains on, and return them in order of their numbers.

        These are num_complete groups, those with the oldest tokens, or more if more are due.
        """
        complete = [group for group in self.groups if group.is_complete]
        complete.sort(key=lambda group: (-group.age(version), group.number))
        num_due = sum(self.is_due(group, version) for group in complete)
        trained = complete[: max(num_complete, num_due)]
        self._remove(trained)
        return sorted(trained, key=lambda group: group.number)

    def take_stale(self, version: int) -> list[OpenGroup]:
        """Remove the groups that would be too old in the next step, and return them.

        version: the version of the weights of this step.
        """
        stale = [group for group in self.groups if group.age(version + 1) > self.max_staleness]
        self._remove(stale)
        return stale

    def _remove(self, groups: Sequence[OpenGroup]) -> None:
        numbers = {group.number for group in groups}
        self.groups = [group for group in self.groups if group.number not in numbers]


# -- checkpoints -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counters:
    """The counters of the ledger: see Ledger."""

    next_group: int
    num_dropped: int


def to_bytes(groups: Sequence[OpenGroup], counters: Counters) -> bytes:
    """Return the content of a safetensors file with groups and the counters of the ledger."""
    responses = [response for group in groups for response in group.responses]
    with_candidates = [r.candidates for r in responses if r.candidates.size]
    tensors = {
        "counters": torch.tensor([counters.next_group, counters.num_dropped]),
        "groups": int64([[g.number, g.row, len(g.responses)] for g in groups]),
        "responses": int64([[r.seed, len(r), r.is_complete, r.is_truncated] for r in responses]),
        "tokens": joined([r.tokens for r in responses], np.int32),
        "log_probs": joined([r.log_probs for r in responses], np.float32),
        "versions": joined([r.versions for r in responses], np.int32),
        "candidates": joined(with_candidates, np.int32),
    }
    if any(r.routes is not None for r in responses):
        tensors["routed"] = int64([0 if r.routes is None else len(r.routes) for r in responses])
        routes = [r.routes for r in responses if r.routes is not None]
        tensors["routes"] = joined(routes, np.uint8)
    return safetensors.torch.save(tensors)


def from_bytes(content: bytes) -> tuple[Counters, list[OpenGroup]]:
    """Return what to_bytes() has written.

    Raises InputError if it is a checkpoint of episodes.
    """
    tensors = safetensors.torch.load(content)
    if "responses" not in tensors:
        raise InputError(
            "rollout.episode=null, but the checkpoint has episodes that are not trained yet: set "
            "the rollout.episode that they belong to"
        )
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    responses = []
    start = 0
    for seed, length, is_complete, is_truncated in tensors["responses"].tolist():
        own = slice(start, start + length)
        start += length
        responses.append(
            OpenResponse(
                seed,
                arrays["tokens"][own],
                arrays["log_probs"][own],
                arrays["versions"][own],
                arrays["candidates"][own],
                bool(is_complete),
                bool(is_truncated),
            )
        )
    if "routes" in arrays:
        for response, routes in zip(responses, split_rows(arrays["routes"], arrays["routed"])):
            response.routes = routes if len(routes) else None
    groups = []
    for number, row, num_responses in tensors["groups"].tolist():
        groups.append(OpenGroup(number, row, responses[:num_responses]))
        responses = responses[num_responses:]
    return Counters(*tensors["counters"].tolist()), groups


def int64(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def split_rows(array: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Return the first lengths[0] rows of an array, the next lengths[1], and so on."""
    return np.split(array, np.cumsum(lengths)[:-1])


def joined(arrays: list[np.ndarray], dtype) -> Tensor:
    """Concatenate arrays."""
    return torch.from_numpy(np.concatenate(arrays) if arrays else np.zeros(0, dtype))

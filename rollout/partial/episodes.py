"""Episodes of several turns that continue in the next step.

The user's function is suspended in its await while the trainer trains, and does not notice. Its
worker, its conversations in the gateway and its recorded tokens stay. A turn that vLLM was working
on keeps its tokens, and goes on after them with the new weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import safetensors.torch
import torch

from config import InputError
from rollout.episodes.director import Cast
from rollout.episodes.drawing import EpisodeSampler, Played
from rollout.episodes.stepping import EpisodeLoop, Playing
from rollout.partial.drawing import Draw, PartialSampler
from rollout.partial.groups import Counters, OpenGroup
from rollout.samples import Samples
from rollout.vllm.continuing import RandomStreams


@dataclass(frozen=True)
class OpenEpisode:
    """An episode that has begun and is not trained yet.

    Attributes:
        number: its number in the loop and in the cast.
        playing: its recorded tokens, and its result if it has ended.
    """

    number: int
    playing: Playing

    @property
    def is_complete(self) -> bool:
        return self.playing.is_over

    @property
    def oldest_version(self) -> int | None:
        """The version of the weights that drew the oldest token; None without any token."""
        return self.playing.episode.oldest_version


class SavedGroup(NamedTuple):
    """A group of episodes in a checkpoint. After a resume, they begin again with the same seeds.

    Attributes:
        number: the number of the group, see ledger.py.
        row: the row of the data set.
        batch: the number of the batch of prompts.
        first_number: the number of the group's first episode among those of the row.
    """

    number: int
    row: int
    batch: int
    first_number: int


@dataclass(kw_only=True)
class PartialEpisodes(PartialSampler):
    """Draws graded episodes.

    Attributes:
        loop: steps vLLM for all episodes of the run.
        cast: on the first rank of a replica, the episodes as the director knows them.
    """

    sampler: EpisodeSampler
    cast: Cast | None = field(init=False)
    loop: EpisodeLoop = field(init=False)

    def __post_init__(self):
        sampler = self.sampler
        sampling = self.config.rollout
        director = sampler.director
        self.cast = director.open(sampling) if director else None
        self.loop = EpisodeLoop(
            sampler.rollout,
            sampling,
            sampler.inbox(self.cast),
            sampler.answer,
            RandomStreams(sampler.rollout),
        )

    def new_group(self, number: int, key: tuple[int, int, int], first_number: int) -> OpenGroup:
        group_size = self.config.rollout.n
        row = key[-1]
        episodes = []
        for i in range(group_size):
            episode_number = number * group_size + i
            playing = self.loop.add(episode_number, (*key, first_number + i))
            episodes.append(OpenEpisode(episode_number, playing))
            if self.cast:
                self.sampler.director.add(self.cast, episode_number, self.dataset[row].row)
        return OpenGroup(number, row, episodes)

    def generate(self, num_complete: int, version: int) -> None:
        num_running = len(self.open.running())
        if self.cast:
            self.sampler.runner.clock.start()
        self.loop.run(self.make_is_enough(num_complete, version), version)
        if self.cast:
            self.sampler.runner.clock.stop()
        self.counts.slots += self.loop.num_steps * num_running
        self.counts.tokens += self.loop.num_tokens

    def make_is_enough(self, num_complete: int, version: int) -> Callable[[], bool]:
        """Return a function that tells whether enough groups are complete."""
        episodes = [episode for _, episode in self.open.running()]
        is_enough = self.open.make_is_enough(num_complete, version)

        def is_enough_now() -> bool:
            return is_enough({i for i, episode in enumerate(episodes) if episode.is_complete})

        return is_enough_now

    def grade_and_share(self, draw: Draw) -> Samples:
        playing = []
        for group in draw.trained:
            playing += [episode.playing for episode in group.responses]
            self.remove(group)
        played = Played(playing, self.loop.times, draw.seconds, draw.version)
        return self.sampler.share(draw.request, draw.assignment, played)

    def remove(self, group: OpenGroup) -> None:
        """Make the loop forget the episodes of a group."""
        for episode in group.responses:
            self.loop.remove(episode.number)

    def give_up(self, groups: list[OpenGroup]) -> None:
        for group in groups:
            self.remove(group)
            for episode in group.responses:
                if self.cast:
                    self.sampler.director.give_up(self.cast, episode.number)

    # -- checkpoints -------------------------------------------------------------------------------

    def to_bytes(self, counters: Counters) -> bytes:
        saved = []
        for group in self.open.groups:
            _, batch, row, first_number = group.responses[0].playing.seed
            saved.append(SavedGroup(group.number, row, batch, first_number))
        tensors = {
            "counters": torch.tensor([counters.next_group, counters.num_dropped]),
            "episodes": torch.tensor(saved, dtype=torch.int64).view(-1, len(SavedGroup._fields)),
        }
        return safetensors.torch.save(tensors)

    def from_bytes(self, content: bytes) -> tuple[Counters, list[SavedGroup]]:
        return read_episodes(content, self.config.rollout.episode)

    def restored(self, group: SavedGroup) -> OpenGroup:
        key = (self.config.trainer.seed, group.batch, group.row)
        return self.new_group(group.number, key, group.first_number)


def read_episodes(content: bytes, episode: str) -> tuple[Counters, list[SavedGroup]]:
    """Return what PartialEpisodes.to_bytes() has written.

    Raises InputError if it is a checkpoint of responses. episode: rollout.episode.
    """
    tensors = safetensors.torch.load(content)
    if "episodes" not in tensors:
        raise InputError(
            f"rollout.episode={episode}, but the checkpoint has responses of a single turn that "
            "are not trained yet: set rollout.episode=null"
        )
    groups = [SavedGroup(*values) for values in tensors["episodes"].tolist()]
    return Counters(*tensors["counters"].tolist()), groups

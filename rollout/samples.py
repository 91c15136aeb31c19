"""Prompts -> responses -> scores: what one step of reinforcement learning learns from.

Every rank knows the numbers of each response: its score, its length, its prompt. Tokens and texts are on one rank alone.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common import disk
from data.batching.packing import Batch, partition
from data.prompts import Prompt
from engines.parallel.device import on_rank0
from rollout.grading.grader import Failure, Grader, Reward
from rollout.vllm.engine import Rollout
from rollout.vllm.image_prompts import ImagePrompt
from rollout.vllm.sampling import request_seed
from rollout.vllm.speculation import draft_metrics

MAX_WRITTEN = 2000  # characters of a value of a row in a file of samples, and of a text in a table


@dataclass
class Samples:
    """n responses in the order of their prompts, of which this rank holds m.

    batch      prompt and response of the m, packed; fields loss_mask (1 on responses), rollout_log_probs
    texts      m responses as text;  prompts: m prompts
    owner      [n] int64: the rank that holds the tokens and the text of each;  rank: this one
    lengths    [n] int64, tokens of prompt and response;  response_lengths [n] int64: those that the model sampled
    group      [n] int64: the prompt of each response, counted through the step
    scores     [n] fp32: what the reward function said
    truncated  [n] bool: ended by max_tokens
    failures   responses that could not be graded, of all that were drawn; they are not among the n
    num_asked  how many responses were drawn to get these, counting those left out and greedy ones
    baseline   [n] fp32: the score of a greedy response to the same prompt, for remax
    metrics    of all that was drawn, left out or not
    parts      [n] fp32 by name: what the scores are the weighted sums of; none when the reward is a number alone
    rows       [n] int64, where prompts have images: the row of the dataset of each response
    """

    batch: Batch
    texts: list[str]
    prompts: list[Prompt]
    owner: Tensor
    rank: int
    lengths: Tensor
    response_lengths: Tensor
    group: Tensor
    scores: Tensor
    truncated: Tensor
    failures: list[Failure]
    num_asked: int
    baseline: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    parts: dict[str, Tensor] = field(default_factory=dict)
    rows: Tensor | None = None

    def __len__(self) -> int:
        return len(self.group)

    @property
    def here(self) -> Tensor:
        """[m] int64: which of the n this rank holds."""
        return (self.owner == self.rank).nonzero()[:, 0]

    def select(self, keep: Tensor) -> Samples:
        """Those where keep [n] bool is set."""
        held = keep[self.here].nonzero()[:, 0].tolist()
        return replace(
            self,
            batch=self.batch.select(held),
            texts=[self.texts[i] for i in held],
            prompts=[self.prompts[i] for i in held],
            parts={name: x[keep] for name, x in self.parts.items()},
            **{name: x[keep] for name, x in vars(self).items() if isinstance(x, Tensor)},
        )

    def with_baseline(self, greedy: Samples) -> Samples:
        """With the score of one greedy response per prompt as the baseline, and without groups whose greedy response failed."""
        score_of = dict(zip(greedy.group.tolist(), greedy.scores.tolist()))
        baseline = torch.tensor([score_of.get(group, math.nan) for group in self.group.tolist()])
        return replace(
            self,
            baseline=baseline,
            failures=self.failures + greedy.failures,
            num_asked=self.num_asked + greedy.num_asked,
        ).select(~baseline.isnan())

    def mini_batches(self, num_prompts: int) -> Tensor:
        """[n] int64: the mini-batch of each response, with neighbouring prompts together: num_prompts of them, or where that does
        not divide their number, as nearly equal parts of at most that many. A last part of a few prompts would get a whole step."""
        prompts, place = self.group.unique(return_inverse=True)
        return place * -(-len(prompts) // num_prompts) // len(prompts)

    def write(self, path: Path, group: dist.ProcessGroup | None = None) -> None:
        """One JSON object per response, with the row of the data file, whose long values (MAX_WRITTEN) are cut. Called by all
        ranks (group: gloo); rank 0 writes."""
        here, groups = self.here.tolist(), self.group.tolist()
        rows = {
            g: short_row(prompt.row)
            for g, prompt in {groups[i]: prompt for i, prompt in zip(here, self.prompts)}.items()
        }
        lines = [
            (
                i,
                json.dumps(
                    {
                        "group": groups[i],
                        "prompt": prompt.text,
                        "response": text,
                        "score": float(self.scores[i]),
                        **self._parts(i),
                        "length": int(self.response_lengths[i]),
                        "truncated": bool(self.truncated[i]),
                        "row": rows[groups[i]],
                    }
                ),
            )
            for i, prompt, text in zip(here, self.prompts, self.texts)
        ]
        lines = on_first_rank(lines, group) + [json.dumps(line) for line in self._failed()]
        on_rank0(write_lines, path, lines, group=group)

    def append_failures(self, path: Path, step: int) -> None:
        """One JSON object per response that could not be graded."""
        if self.failures:
            with disk.writing(path), open(path, "a") as file:
                file.writelines(
                    json.dumps({"step": step, **line}) + "\n" for line in self._failed()
                )

    def _parts(self, i: int) -> dict:
        return (
            {"parts": {name: float(values[i]) for name, values in self.parts.items()}}
            if self.parts
            else {}
        )

    def _failed(self) -> list[dict]:
        return [
            {"response": f.response, "row": f.row, "failure": f.kind, "trace": f.trace}
            for f in self.failures
        ]

    def examples(self, num_rows: int, group: dist.ProcessGroup | None = None) -> list[dict]:
        """The first response to each of the first num_rows prompts, for people: question, response, answer (the row's,
        where it has one) and score. Long texts (MAX_WRITTEN) are cut. Called by all ranks; rank 0 gets them."""
        first = {group: i for i, group in reversed(list(enumerate(self.group.tolist())))}
        shown = set(sorted(first.values())[:num_rows])
        return on_first_rank(
            [
                (
                    i,
                    {"question": cut(prompt.question or prompt.text), "response": cut(text)}
                    | (
                        {"answer": cut(str(prompt.row["answer"]))}
                        if prompt.row.get("answer") is not None
                        else {}
                    )
                    | {"score": float(self.scores[i])},
                )
                for i, prompt, text in zip(self.here.tolist(), self.prompts, self.texts)
                if i in shown
            ],
            group,
        )


def summed(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum of every rank's x, in its place."""
    if dist.is_initialized():
        dist.all_reduce(x, group=group)
    return x


def of_all_ranks(items: list, group: dist.ProcessGroup) -> list:
    """The few items of each rank, rank by rank."""
    everything = [None] * dist.get_world_size()
    dist.all_gather_object(everything, items, group=group)
    return sum(everything, [])


def on_first_rank(items: list[tuple[int, Any]], group: dist.ProcessGroup | None) -> list:
    """What all ranks have, in the order of its places, on rank 0; on others nothing."""
    if dist.is_initialized():
        everything = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(items, everything, group=group)
        items = sum(everything or [], [])
    return [item for _, item in sorted(items, key=lambda item: item[0])]


def write_lines(path: Path, lines: list[str]) -> None:
    text = "".join(line + "\n" for line in lines)  # ASCII
    with disk.writing(path, len(text)):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def cut(text: str) -> str:
    """A text of at most MAX_WRITTEN characters, without its middle where it was longer."""
    half = MAX_WRITTEN // 2
    return text if len(text) <= MAX_WRITTEN else f"{text[:half]} ... {text[-half:]}"


def short_row(row: dict) -> dict:
    """A row whose large values, such as megabytes of test cases, are text that was cut."""
    texts = {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()
    }
    return {key: row[key] if len(text) <= MAX_WRITTEN else cut(text) for key, text in texts.items()}


def concat(parts: Sequence[Samples]) -> Samples:
    """Samples of several draws; their groups must differ."""
    names = max(
        (p.parts for p in parts), key=len
    )  # where no response could be graded, there are none
    tensors, lists = (
        [name for name, x in vars(parts[0]).items() if isinstance(x, Tensor)],
        ("texts", "prompts", "failures"),
    )
    return replace(
        parts[0],
        batch=Batch.concat([p.batch for p in parts]),
        num_asked=sum(p.num_asked for p in parts),
        parts={name: torch.cat([p.parts.get(name, p.scores) for p in parts]) for name in names},
        **{name: torch.cat([getattr(p, name) for p in parts]) for name in tensors},
        **{name: sum((getattr(p, name) for p in parts), []) for name in lists},
    )


def draw_samples(
    rollout: Rollout,
    grader: Grader,
    dataset,
    rows: Sequence[int],
    sampling,
    seed: tuple[int, ...],
    tokenizer,
    profiler,
    host_group: dist.ProcessGroup,
    max_failure_rate: float,
    first_group: int = 0,
) -> Samples:
    """sampling.n responses to each of the rows of a PromptDataset, generated by all replicas and graded by all ranks. A rank
    keeps the tokens and texts that it has graded; the numbers of all are the same on every rank. Grading ends early when
    more than max_failure_rate of them have failed.

    A response follows from `seed`, its row and its number alone, however many ranks there are. Prompts are divided so that
    the replicas end at the same time, if responses are as long as the last time.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size() // rollout.num_replicas
    owner, place = (
        torch.empty(len(rows), dtype=torch.int64),
        torch.arange(len(rows)).repeat_interleave(sampling.n),
    )
    # Groups stay whole, for functions that take them so.
    for replica, groups in enumerate(
        partition(dataset.expected_lengths(rows), rollout.num_replicas)
    ):
        owner[groups] = replica * ranks + torch.arange(len(groups)) % ranks
    owner = owner[place]
    local = (owner // ranks == rollout.replica).nonzero()[:, 0]
    places = place[local].tolist()
    prompts = {p: dataset[int(rows[p])] for p in dict.fromkeys(places)}
    with profiler.stage("rollout_generate", rollout):
        start = time.perf_counter()
        seeds = [
            request_seed(*seed, int(rows[p]), i % sampling.n)
            for i, p in zip(local.tolist(), places)
        ]
        row_of, shown = None, {}
        if dataset.pictures:
            row_of = torch.tensor([*map(int, rows)])[place]
            shown = {
                "image_prompts": [
                    ImagePrompt(prompts[p].before_images or prompts[p].input_ids, prompts[p].images)
                    for p in places
                ]
            }
        batch, truncated = rollout.generate(
            [prompts[p].input_ids for p in places], seeds, sampling, **shown
        )
        batch = (
            replace(batch, rows=row_of[local], pictures=dataset.pictures)
            if dataset.pictures
            else batch
        )
        seconds = torch.zeros(dist.get_world_size()).index_fill(
            0, torch.tensor(rank), time.perf_counter() - start
        )
        drafts = (
            draft_metrics(summed(rollout.drafts.counts.clone(), host_group))
            if rollout.drafter
            else {}
        )
    with profiler.stage("reward"):
        mine = (owner[local] == rank).nonzero()[:, 0]
        batch = batch if len(mine) == len(batch) else batch.select(mine)
        places = [places[i] for i in mine.tolist()]
        held, prompts = local[mine], [prompts[p] for p in places]
        tokens = batch.fields["loss_mask"].nonzero()[:, 0]
        response_lengths = torch.searchsorted(tokens, batch.cu_seqlens).diff()
        texts = tokenizer.batch_decode(
            [ids.tolist() for ids in batch.input_ids[tokens].split(response_lengths.tolist())],
            skip_special_tokens=True,
        )
        items = [(prompt.text, text, prompt.row) for prompt, text in zip(prompts, texts)]
        results = grader.grade(items, places, max_failure_rate * len(owner))
        if grader.parts is None:
            first = [
                (i, sorted(result.parts))
                for i, result in zip(held.tolist(), results)
                if isinstance(result, Reward)
            ][:1]
            grader.parts = min(of_all_ranks(first, host_group), default=(0, None))[1]
        results = grader.same_parts(items, results)
        failures = [
            (i, result) for i, result in zip(held.tolist(), results) if isinstance(result, Failure)
        ]
        failures = sorted(of_all_ranks(failures, host_group), key=lambda failure: failure[0])
        names = grader.parts or []
        numbers = torch.zeros(len(owner), 5 + len(names), dtype=torch.float64)
        numbers[held, :3] = torch.stack(
            [batch.cu_seqlens.diff(), response_lengths, truncated[mine]], 1
        ).double()
        graded = [
            [1.0, r.score, *map(r.parts.get, names)]
            if isinstance(r, Reward)
            else [0.0] * (2 + len(names))
            for r in results
        ]
        numbers[held, 3:] = torch.tensor(graded, dtype=torch.float64).view(
            len(held), 2 + len(names)
        )
        lengths, response_lengths, truncated, graded, scores, *parts = summed(
            numbers, host_group
        ).unbind(1)
        idle = 1 - summed(seconds, host_group) / seconds.max()
    dataset.drawn_lengths[rows] = response_lengths.view(len(rows), -1).float().mean(1)
    samples = Samples(
        batch,
        texts,
        prompts,
        owner,
        rank,
        lengths.long(),
        response_lengths.long(),
        first_group + place,
        scores.float(),
        truncated.bool(),
        [failure for _, failure in failures],
        len(owner),
        metrics={
            "perf/rollout_idle": idle.mean().item(),
            "perf/rollout_idle_max": idle.max().item(),
            **drafts,
        },
        parts={name: x.float() for name, x in zip(names, parts)},
        rows=row_of,
    )
    return samples if graded.all() else samples.select(graded.bool())

"""Prompts -> responses -> scores: what one step of reinforcement learning learns from, the same on every rank."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import disk
from data.packing import Batch, partition
from data.prompts import Prompt
from rollout.grading import Failure, Grader, Reward
from rollout.vllm import Rollout, request_seed

MAX_WRITTEN = 2000      # characters of a value of a row in a file of samples, and of a text in a table


@dataclass
class Samples:
    """n responses in the order of their prompts.

    batch      prompt and response of each, packed; fields loss_mask (1 on responses), rollout_log_probs
    group      [n] int64: the prompt of each response, counted through the step
    scores     [n] fp32: what the reward function said
    truncated  [n] bool: ended by max_tokens
    texts      n responses as text;  prompts: n prompts
    failures   responses that could not be graded, of all that were drawn; they are not among the n
    num_asked  how many responses were drawn to get these, counting those left out and greedy ones
    baseline   [n] fp32: the score of a greedy response to the same prompt, for remax
    metrics    of all that was drawn, left out or not
    parts      [n] fp32 by name: what the scores are the weighted sums of; none when the reward is a number alone
    """

    batch: Batch
    group: Tensor
    scores: Tensor
    truncated: Tensor
    texts: list[str]
    prompts: list[Prompt]
    failures: list[Failure]
    num_asked: int
    baseline: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    parts: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def num_prompts(self) -> int:
        return len(self.group.unique())

    @property
    def response_lengths(self) -> Tensor:
        """[n] int64, tokens"""
        ends = torch.cat([torch.zeros(1), self.batch.fields["loss_mask"].cumsum(0)])[self.batch.cu_seqlens]
        return ends.diff().long()

    def select(self, keep: Tensor) -> Samples:
        """Those where keep [n] bool is set."""
        indices = keep.nonzero()[:, 0].tolist()
        return replace(self, batch=self.batch.select(indices), group=self.group[keep], scores=self.scores[keep],
                       truncated=self.truncated[keep], texts=[self.texts[i] for i in indices],
                       prompts=[self.prompts[i] for i in indices],
                       baseline=None if self.baseline is None else self.baseline[keep],
                       parts={name: values[keep] for name, values in self.parts.items()})

    def with_baseline(self, greedy: Samples) -> Samples:
        """With the score of one greedy response per prompt as the baseline, and without groups whose greedy response failed."""
        matches = self.group[:, None] == greedy.group
        known = matches.any(1)
        return replace(self, baseline=greedy.scores[matches.int().argmax(1)] if len(greedy) else self.scores,
                       failures=self.failures + greedy.failures,
                       num_asked=self.num_asked + greedy.num_asked).select(known)

    def mini_batches(self, num_prompts: int) -> list[list[int]]:
        """Indices of responses, those of neighbouring prompts together: num_prompts of them, or where that does not divide the
        number of prompts, as nearly equal parts of at most that many. A last part of a few prompts would get a whole step."""
        prompts, place = self.group.unique(return_inverse=True)
        count = -(-len(prompts) // num_prompts)
        part = place * count // len(prompts)
        return [(part == i).nonzero()[:, 0].tolist() for i in range(count)]

    def write(self, path: Path) -> None:
        """One JSON object per response, with the row of the data file, whose long values (MAX_WRITTEN) are cut."""
        lengths = self.response_lengths.tolist()
        rows = {group: short_row(self.prompts[i].row) for group, i in self._first_of_groups().items()}
        lines = ({"group": group, "prompt": self.prompts[i].text, "response": self.texts[i], "score": float(self.scores[i]),
                  **self._parts(i), "length": lengths[i], "truncated": bool(self.truncated[i]), "row": rows[group]}
                 for i, group in enumerate(self.group.tolist()))
        text = "".join(json.dumps(line) + "\n" for line in (*lines, *self._failed()))       # ASCII
        with disk.writing(path, len(text)):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)

    def append_failures(self, path: Path, step: int) -> None:
        """One JSON object per response that could not be graded."""
        if self.failures:
            with disk.writing(path), open(path, "a") as file:
                file.writelines(json.dumps({"step": step, **line}) + "\n" for line in self._failed())

    def _parts(self, i: int) -> dict:
        return {"parts": {name: float(values[i]) for name, values in self.parts.items()}} if self.parts else {}

    def _failed(self) -> list[dict]:
        return [{"response": f.response, "row": f.row, "failure": f.kind, "trace": f.trace} for f in self.failures]

    def _first_of_groups(self) -> dict[int, int]:
        """The first response to each prompt: group -> index"""
        return {group: i for i, group in reversed(list(enumerate(self.group.tolist())))}

    def examples(self, num_rows: int) -> list[dict]:
        """The first response to each of the first num_rows prompts, for people: question, response, answer (the row's,
        where it has one) and score. Long texts (MAX_WRITTEN) are cut."""
        first = sorted(self._first_of_groups().values())[:num_rows]
        return [{"question": cut(prompt.question or prompt.text), "response": cut(self.texts[i])}
                | ({"answer": cut(str(prompt.row["answer"]))} if prompt.row.get("answer") is not None else {})
                | {"score": float(self.scores[i])} for i, prompt in ((i, self.prompts[i]) for i in first)]


def cut(text: str) -> str:
    """A text of at most MAX_WRITTEN characters, without its middle where it was longer."""
    half = MAX_WRITTEN // 2
    return text if len(text) <= MAX_WRITTEN else f"{text[:half]} ... {text[-half:]}"


def short_row(row: dict) -> dict:
    """A row whose large values, such as megabytes of test cases, are text that was cut."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()}
    return {key: row[key] if len(text) <= MAX_WRITTEN else cut(text) for key, text in texts.items()}


def concat(parts: Sequence[Samples]) -> Samples:
    """Samples of several draws; their groups must differ."""
    names = max((p.parts for p in parts), key=len)          # where no response could be graded, there are none
    return Samples(Batch.concat([p.batch for p in parts]), torch.cat([p.group for p in parts]),
                   torch.cat([p.scores for p in parts]), torch.cat([p.truncated for p in parts]),
                   *(sum((getattr(p, name) for p in parts), []) for name in ("texts", "prompts", "failures")),
                   sum(p.num_asked for p in parts), None if parts[0].baseline is None else torch.cat([p.baseline for p in parts]),
                   parts={name: torch.cat([p.parts.get(name, p.scores) for p in parts]) for name in names})


def draw_samples(rollout: Rollout, grader: Grader, dataset, rows: Sequence[int], sampling, seed: tuple[int, ...], tokenizer,
                 profiler, host_group: dist.ProcessGroup, max_failure_rate: float, first_group: int = 0) -> Samples:
    """sampling.n responses to each of the rows of a PromptDataset, generated by all replicas, graded by all ranks, and
    gathered: each rank returns the same Samples. Grading ends early when more than max_failure_rate of them have failed.

    A response follows from `seed`, its row and its number alone, however many ranks there are. Prompts are divided so that
    the replicas end at the same time, if responses are as long as the last time.
    """
    prompts = [dataset[int(row)] for row in rows]
    wanted = [(place, k) for place in range(len(rows)) for k in range(sampling.n)]
    groups = partition(dataset.expected_lengths(rows), rollout.num_replicas)[rollout.replica]
    local = [i for place in groups for i in range(place * sampling.n, (place + 1) * sampling.n)]
    with profiler.stage("rollout_generate", rollout):
        start = time.perf_counter()
        seeds = [request_seed(*seed, int(rows[wanted[i][0]]), wanted[i][1]) for i in local]
        batch, truncated = rollout.generate([prompts[wanted[i][0]].input_ids for i in local], seeds, sampling)
        seconds = time.perf_counter() - start
    with profiler.stage("reward"):
        # Groups stay whole, for functions that take them so.
        ranks = dist.get_world_size() // rollout.num_replicas
        mine = [j for j in range(len(local)) if j // sampling.n % ranks == rollout.tp_rank]
        places = [wanted[local[j]][0] for j in mine]
        share = batch.select(mine)
        responses = [ids[mask > 0].tolist() for ids, mask in zip(share.input_ids.split(share.lengths),
                                                                 share.fields["loss_mask"].split(share.lengths))]
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        items = [(prompts[p].text, text, prompts[p].row) for p, text in zip(places, texts)]
        results = grader.grade(items, places, max_failure_rate * len(wanted))
        shares = [None] * dist.get_world_size()
        dist.all_gather_object(shares, ([local[j] for j in mine], share, truncated[mine], texts, results, seconds),
                               group=host_group)
    order = torch.tensor([i for indices, *_ in shares for i in indices]).argsort()
    everything = Batch.concat([s[1] for s in shares]).select(order.tolist())
    truncated = torch.cat([s[2] for s in shares])[order]
    texts, results = ([x for s in shares for x in s[k]] for k in (3, 4))
    texts, results = [texts[i] for i in order], [results[i] for i in order]
    idle = 1 - (seconds := torch.tensor([s[5] for s in shares])) / seconds.max()
    drawn = [prompts[place] for place, _ in wanted]
    results = grader.same_parts([(prompt.text, text, prompt.row) for prompt, text in zip(drawn, texts)], results)
    rewards = [r if isinstance(r, Reward) else None for r in results]
    graded = torch.tensor([r is not None for r in rewards], dtype=torch.bool)
    samples = Samples(everything, torch.tensor([first_group + place for place, _ in wanted]),
                      torch.tensor([r.score if r else 0.0 for r in rewards]), truncated, texts, drawn,
                      [r for r in results if isinstance(r, Failure)], len(results),
                      metrics={"perf/rollout_idle": idle.mean().item(), "perf/rollout_idle_max": idle.max().item()}, parts={
                          name: torch.tensor([r.parts[name] if r else 0.0 for r in rewards]) for name in grader.parts or ()})
    dataset.drawn_lengths[rows] = samples.response_lengths.view(len(rows), -1).float().mean(1)
    return samples if graded.all() else samples.select(graded)

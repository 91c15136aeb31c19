"""Prompts -> responses -> scores: what one step of reinforcement learning learns from, the same on every rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import disk
from data.packing import Batch
from data.prompts import Prompt
from rollout.grading import Failure, Grader, check_failures
from rollout.vllm import Rollout, request_seed


@dataclass
class Samples:
    """n responses in the order of their prompts.

    batch      prompt and response of each, packed; fields loss_mask (1 on responses), rollout_log_probs
    group      [n] int64: the prompt of each response, counted through the step
    scores     [n] fp32: what the reward function said
    truncated  [n] bool: ended by max_tokens
    texts      n responses as text;  prompts: n prompts
    failures   responses that could not be graded, of all that were drawn; they are not among the n
    num_asked  responses that were drawn to get these: those left out and greedy ones too
    baseline   [n] fp32: the score of a greedy response to the same prompt, for remax
    metrics    of all that was drawn, left out or not
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
                       baseline=None if self.baseline is None else self.baseline[keep])

    def with_baseline(self, greedy: Samples) -> Samples:
        """Scores of one greedy response a prompt as the baseline; groups whose greedy response failed are left out."""
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
        """One JSON object per response."""
        path.parent.mkdir(exist_ok=True)
        lengths = self.response_lengths.tolist()
        lines = ({"group": int(self.group[i]), "prompt": self.prompts[i].text, "response": self.texts[i],
                  "score": float(self.scores[i]), "length": lengths[i], "truncated": bool(self.truncated[i])}
                 for i in range(len(self)))
        with disk.writing(path.parent):
            path.write_text("".join(json.dumps(line) + "\n" for line in (*lines, *self._failed())))

    def append_failures(self, path: Path, step: int) -> None:
        """One JSON object per response that could not be graded."""
        if self.failures:
            with disk.writing(path), open(path, "a") as file:
                file.writelines(json.dumps({"step": step, **line}) + "\n" for line in self._failed())

    def _failed(self) -> list[dict]:
        return [{"response": f.response, "row": f.row, "failure": f.kind, "trace": f.trace} for f in self.failures]

    def table(self, num_rows: int) -> str:
        """The first response to each of some prompts, a line each, for people."""
        first = {int(g): i for i, g in reversed(list(enumerate(self.group)))}
        rows = [(ascii(self.prompts[i].text)[-45:-1], ascii(self.texts[i])[1:-1][:60], float(self.scores[i]))
                for i in list(first.values())[::-1][:num_rows]]
        return "\n".join(f"    {prompt:>44} -> {text:<60} {score:6.2f}" for prompt, text, score in rows)


def concat(parts: Sequence[Samples]) -> Samples:
    """Samples of several draws; their groups must differ."""
    return Samples(Batch.concat([p.batch for p in parts]), torch.cat([p.group for p in parts]),
                   torch.cat([p.scores for p in parts]), torch.cat([p.truncated for p in parts]),
                   *(sum((getattr(p, name) for p in parts), []) for name in ("texts", "prompts", "failures")),
                   sum(p.num_asked for p in parts), None if parts[0].baseline is None else torch.cat([p.baseline for p in parts]))


def draw_samples(rollout: Rollout, grader: Grader, dataset, rows: Sequence[int], sampling, seed: tuple[int, ...], tokenizer,
                 profiler, host_group: dist.ProcessGroup, max_failure_rate: float, first_group: int = 0) -> Samples:
    """sampling.n responses to each of the rows of a PromptDataset, generated by all replicas, graded by all ranks, and
    gathered: each rank returns the same Samples. Raises InputError when too many of them cannot be graded.

    A response follows from `seed`, its row and its number alone, however many ranks there are.
    """
    prompts = [dataset[int(row)] for row in rows]
    wanted = [(place, k) for place in range(len(rows)) for k in range(sampling.n)]
    local = [i for i, (place, _) in enumerate(wanted) if place % rollout.num_replicas == rollout.replica]
    with profiler.stage("rollout_generate", rollout):
        seeds = [request_seed(*seed, int(rows[wanted[i][0]]), wanted[i][1]) for i in local]
        batch, truncated = rollout.generate([prompts[wanted[i][0]].input_ids for i in local], seeds, sampling)
    with profiler.stage("reward"):
        mine = list(range(rollout.tp_rank, len(local), dist.get_world_size() // rollout.num_replicas))
        places = [wanted[local[j]][0] for j in mine]
        share = batch.select(mine)
        responses = [ids[mask > 0].tolist() for ids, mask in zip(share.input_ids.split(share.lengths),
                                                                 share.fields["loss_mask"].split(share.lengths))]
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        results = grader.grade([(prompts[p].text, text, prompts[p].row) for p, text in zip(places, texts)])
        shares = [None] * dist.get_world_size()
        dist.all_gather_object(shares, ([local[j] for j in mine], share, truncated[mine], texts, results), group=host_group)
    order = torch.tensor([i for indices, *_ in shares for i in indices]).argsort()
    everything = Batch.concat([s[1] for s in shares]).select(order.tolist())
    truncated = torch.cat([s[2] for s in shares])[order]
    texts, results = ([x for s in shares for x in s[k]] for k in (3, 4))
    texts, results = [texts[i] for i in order], [results[i] for i in order]
    check_failures(results, max_failure_rate)
    graded = torch.tensor([not isinstance(r, Failure) for r in results], dtype=torch.bool)
    scores = torch.tensor([0.0 if isinstance(r, Failure) else r for r in results])
    samples = Samples(everything, torch.tensor([first_group + place for place, _ in wanted]), scores, truncated, texts,
                      [prompts[place] for place, _ in wanted], [r for r in results if isinstance(r, Failure)], len(results))
    return samples if graded.all() else samples.select(graded)


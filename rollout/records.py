"""Write samples for people to read: files of JSON lines, and examples for a table."""

import json
from pathlib import Path

import torch.distributed as dist

from common import disk
from data.prompts import Prompt
from engines.parallel.device import on_rank0
from rollout.exchange import gather_on_first_rank
from rollout.samples import Samples

# The maximum length in characters of a row's value in a file of samples, and of a text in a table.
MAX_WRITTEN = 2000


def write_samples(samples: Samples, path: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write one JSON object per response, with its row of the data file, and one per failure.

    With rollout.partial, "age" is the number of steps since a response's first token was drawn.

    For episodes, there is one object per sequence, with the number of its episode and, at the last
    sequence of an episode, its messages.

    Long values of a row are cut to MAX_WRITTEN characters. Called by all ranks; rank 0 writes.

    group: gloo group of all ranks.
    """
    groups = samples.group.tolist()
    held = samples.held.tolist()
    # Shorten each row only once, not once per response.
    prompt_of_group = {groups[i]: prompt for i, prompt in zip(held, samples.prompts)}
    row_of_group = {g: shorten_row(prompt.row) for g, prompt in prompt_of_group.items()}
    lines = []
    details = samples.details or [{}] * len(held)
    ages = dict(zip(held, oldest_ages(samples)))
    for i, prompt, text, more in zip(held, samples.prompts, samples.texts, details):
        line = {"group": groups[i]}
        if samples.episode is not None:
            line["episode"] = int(samples.episode[i])
        line |= {"prompt": prompt.text, "response": text, "score": float(samples.scores[i])}
        if samples.parts:
            line["parts"] = {name: float(values[i]) for name, values in samples.parts.items()}
        line["length"] = int(samples.response_lengths[i])
        line["truncated"] = bool(samples.truncated[i])
        if ages:
            line["age"] = ages[i]
        line |= more
        line["row"] = row_of_group[groups[i]]
        lines.append((i, json.dumps(line)))
    all_lines = gather_on_first_rank(lines, group)
    all_lines += [json.dumps(line) for line in failure_lines(samples)]
    on_rank0(write_lines, path, all_lines, group=group)


def oldest_ages(samples: Samples) -> list[int]:
    """Return the age of the oldest token of each response of this rank, with rollout.partial."""
    if "age" not in samples.batch.fields:
        return []
    ages = samples.batch.fields["age"].split(samples.batch.lengths)
    return [int(age.max()) for age in ages]


def append_failures(samples: Samples, path: Path, step: int) -> None:
    """Append one JSON object per response that could not be graded."""
    if not samples.failures:
        return
    lines = [json.dumps({"step": step, **line}) + "\n" for line in failure_lines(samples)]
    with disk.writing(path), open(path, "a") as file:
        file.writelines(lines)


def failure_lines(samples: Samples) -> list[dict]:
    """Return a JSON object for each response that could not be graded."""
    return [
        {
            "response": failure.response,
            "row": failure.row,
            "failure": failure.kind,
            "trace": failure.trace,
        }
        for failure in samples.failures
    ]


def examples(samples: Samples, num_rows: int, group: dist.ProcessGroup | None = None) -> list[dict]:
    """Return a table with the first response to each of the first num_rows prompts.

    Its columns are question, response, answer (if the row has one) and score. Texts are cut to
    MAX_WRITTEN characters. Called by all ranks; rank 0 gets the rows of the table.
    """
    first_of_group: dict[int, int] = {}
    for i, number in enumerate(samples.group.tolist()):
        first_of_group.setdefault(number, i)
    chosen = set(sorted(first_of_group.values())[:num_rows])
    rows = [
        (i, example(prompt, text, float(samples.scores[i])))
        for i, prompt, text in zip(samples.held.tolist(), samples.prompts, samples.texts)
        if i in chosen
    ]
    return gather_on_first_rank(rows, group)


def example(prompt: Prompt, response: str, score: float) -> dict:
    """Return one row of the table of examples."""
    row = {"question": cut(prompt.question or prompt.text), "response": cut(response)}
    answer = prompt.row.get("answer")
    if answer is not None:
        row["answer"] = cut(str(answer))
    row["score"] = score
    return row


def write_lines(path: Path, lines: list[str]) -> None:
    """Write lines of ASCII to a file, whose directory is created if necessary."""
    text = "".join(line + "\n" for line in lines)
    with disk.writing(path, len(text)):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def cut(text: str) -> str:
    """Cut the middle of a text that is longer than MAX_WRITTEN characters."""
    if len(text) <= MAX_WRITTEN:
        return text
    half = MAX_WRITTEN // 2
    return f"{text[:half]} ... {text[-half:]}"


def shorten_row(row: dict) -> dict:
    """Return the row with its large values cut, for example megabytes of test cases."""
    shortened = {}
    for key, value in row.items():
        text = value if isinstance(value, str) else json.dumps(value)
        shortened[key] = value if len(text) <= MAX_WRITTEN else cut(text)
    return shortened

"""The scripts in examples/."""

import re
from pathlib import Path

from transformers import AutoModelForImageTextToText, AutoProcessor

from examples import colours


def count_right(output: str) -> int:
    """Return the number of right replies that `ask` has printed."""
    return int(re.search(r"^(\d+) of \d+ replies are right", output, re.MULTILINE)[1])


def test_right_replies_are_counted_even_if_they_are_not_shown(tmp_path: Path, monkeypatch, capsys):
    """The only colour's name is the reply of a model with random weights to the first picture."""
    monkeypatch.setattr(colours, "NUM_TRAIN", 1)
    monkeypatch.setattr(colours, "NUM_VAL", 3)
    monkeypatch.setattr(colours, "COLOURS", {"red": (220, 40, 40)})
    colours.build(tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model").eval()
    processor = AutoProcessor.from_pretrained(tmp_path / "model")
    question = colours.make_rows(tmp_path / "images")["val"][0]["messages"][:1]
    image_part = question[0]["content"][0]
    image_part["image"] = str(tmp_path / image_part["image"])
    reply = colours.reply_to(model, processor, question)
    monkeypatch.setattr(colours, "COLOURS", {reply: (220, 40, 40)})
    capsys.readouterr()

    counts = {}
    for num_shown in (0, 3):
        colours.ask(tmp_path / "model", num_shown)
        output = capsys.readouterr().out
        assert output.count(" square: ") == num_shown
        counts[num_shown] = count_right(output)
    assert counts[0] >= 1
    assert counts[0] == counts[3]

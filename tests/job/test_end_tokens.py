"""End tokens that fine-tuning teaches, and chat templates whose end token ends no response."""

import json
import shutil

import pytest
import torch
from omegaconf import OmegaConf
from transformers import GenerationConfig

from config import load
from data.chat.tokenizer import ChatTokenizer
from data.dataset import TokenDataset, tokenize
from engines.checkpoint.model_config import save_model_config
from examples.arithmetic import make_rows, make_tokenizer
from job.end_tokens import find_new_end_ids, warn_of_end_token
from rollout.vllm.sampling import find_stop_token_ids
from tests.support.models import make_model

pytestmark = pytest.mark.usefixtures("process_group")

TEXT_END = 1  # the end token of the base model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base model whose files do not name the end token of its chat template, and data."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = make_tokenizer()
    make_model(folder / "model", "qwen3", vocab_size=len(tokenizer), eos_token_id=TEXT_END)
    tokenizer.save_pretrained(folder / "model")
    rows = make_rows()[0][:8]
    for row in rows[:4]:
        row["messages"][-1]["loss_mask"] = 0
        row["messages"] += [{"role": "user", "content": "1+1"}, *rows[5]["messages"][-1:]]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def load_rows(folder, chat, *settings):
    model = folder / "model"
    pairs = [f"model.path={model}", f"data.train_files={folder}/rows.jsonl", *settings]
    config = load("sft.yaml", pairs)
    path = tokenize(config.data.train_files, chat.tokenizer, config.data, folder / "cache", model)
    return config, TokenDataset.load(path)


def test_exports_name_the_end_token_that_rows_teach(folder, tmp_path, capsys):
    """vLLM stops at it, whether the model has a generation_config.json or not."""
    model = folder / "model"
    tokenizer = make_tokenizer()
    turn_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    chat = ChatTokenizer.load(tokenizer, model)
    config, train = load_rows(folder, chat)
    assert find_stop_token_ids(model) == [TEXT_END]
    ids = find_new_end_ids(config, chat, train, resume_from=None)
    assert ids == [turn_end]
    printed = capsys.readouterr().out
    assert f"teach the model to end a turn with <|im_end|> ({turn_end}), which" in printed
    assert printed.endswith("exports will name it in generation_config.json\n")

    without = shutil.copytree(model, tmp_path / "without")
    (without / "generation_config.json").unlink()
    for path in (model, without):
        export = tmp_path / f"export of {path.name}"
        export.mkdir()
        save_model_config(path, torch.float32, export, ids)
        assert find_stop_token_ids(export) == sorted({TEXT_END, turn_end})
        assert GenerationConfig.from_pretrained(export).eos_token_id == [TEXT_END, turn_end]
        assert "_from_model_config" not in (export / "generation_config.json").read_text()

    # A run that resumes keeps the end tokens of its checkpoint, even with other data.
    shutil.copytree(export, tmp_path / "checkpoint" / "hf")
    (tmp_path / "checkpoint" / "hf" / "generation_config.json").write_text('{"eos_token_id": 7}')
    with_adapter = OmegaConf.merge(config, {"model": {"lora": {"rank": 4}}})
    for settings, kind in ((config, "exports"), (with_adapter, "merged exports")):
        ids = find_new_end_ids(settings, chat, train, tmp_path / "checkpoint")
        assert ids == sorted([7, turn_end])
        assert f" do not name: {kind} will name them in" in capsys.readouterr().out


def test_end_tokens_that_the_files_name_or_that_nothing_teaches(folder, capsys):
    """Truncation leaves no row with its end."""
    chat = ChatTokenizer.load(make_tokenizer(), folder / "model")
    config, train = load_rows(folder, chat)
    shortest = train.lengths.min() - 2  # without an end token and a newline
    _, cut = load_rows(folder, chat, "data.truncation=right", f"data.max_length={shortest}")
    assert cut.loss_mask.sum() > 0
    assert find_new_end_ids(config, chat, cut, resume_from=None) == []

    file = folder / "model" / "generation_config.json"
    before = file.read_text()
    file.write_text(json.dumps({"eos_token_id": chat.tokenizer.eos_token_id}))
    assert find_new_end_ids(config, chat, train, resume_from=None) == []
    file.write_text(before)
    assert "teach the model" not in capsys.readouterr().out


def test_ends_are_found_across_the_borders_of_a_search(folder, monkeypatch):
    _, train = load_rows(folder, ChatTokenizer.load(make_tokenizer(), folder / "model"))
    ids = range(300)
    whole = train.trained_ends(ids)
    assert len(whole) == 1
    monkeypatch.setattr("data.dataset.TOKENS_AT_ONCE", 3)
    assert train.trained_ends(ids) == whole


@pytest.mark.parametrize(
    "settings, named, warned",
    [
        ([], [TEXT_END], "rollout.stop=['<|im_end|>']"),
        (["rollout.stop=['<|im_end|>']"], [TEXT_END], None),
        (["rollout.stop=['<|im_end|>']", "validation.stop=[x]"], [TEXT_END], None),
        (["rollout.stop=['im_end']"], [TEXT_END], None),
        (["rollout.stop=['x','<|im_end|>\n']"], [TEXT_END], None),
        (
            ["rollout.stop=['<|im_end|>']", "validation.stop=[x]", "data.val_files=x"],
            [TEXT_END],
            "validation.stop=['<|im_end|>']",
        ),
        ([], None, None),
    ],
)
def test_a_template_whose_end_token_ends_no_response(
    folder, tmp_path, capsys, settings, named, warned
):
    model = shutil.copytree(folder / "model", tmp_path / "model")
    tokenizer = make_tokenizer()
    turn_end = tokenizer.eos_token_id
    if named is None:
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": turn_end}))
    config = load("ppo.yaml", [f"model.path={model}", "data.train_files=x", *settings])
    warn_of_end_token(config, ChatTokenizer.load(tokenizer, model))
    printed = capsys.readouterr().out
    if warned is None:
        assert printed == ""
    else:
        assert f"ends a turn with <|im_end|> ({turn_end}), but a response ends only" in printed
        assert warned in printed


def load_two_ends(folder, tmp_path, *settings):
    """Return the arguments of find_new_end_ids(), with a checkpoint that names token 7."""
    chat = ChatTokenizer.load(make_tokenizer(), folder / "model")
    config, train = load_rows(folder, chat, *settings)
    checkpoint = tmp_path / "checkpoint"
    (checkpoint / "hf").mkdir(parents=True)
    (checkpoint / "hf" / "config.json").write_text(json.dumps({"eos_token_id": [TEXT_END, 7]}))
    return config, chat, train, checkpoint


def test_new_end_tokens_are_named_in_order_with_the_files_that_lack_them(folder, tmp_path, capsys):
    config, chat, train, checkpoint = load_two_ends(folder, tmp_path)
    turn_end = chat.tokenizer.eos_token_id
    named = {token: f"{chat.decode([token])} ({token})" for token in (7, turn_end)}
    expected = sorted([7, turn_end])
    capsys.readouterr()
    assert find_new_end_ids(config, chat, train, checkpoint) == expected
    assert capsys.readouterr().out == (
        f"the rows teach the model to end a turn with {named[expected[0]]}, {named[expected[1]]}, "
        "which generation_config.json and config.json of "
        f"model.path={folder}/model do not name: exports will name them in "
        "generation_config.json\n"
    )


def test_a_resumed_run_keeps_its_end_token_when_its_rows_teach_none(folder, tmp_path, capsys):
    """The rows are cut before their ends. Its exports would no longer stop at the token."""
    config, chat, train, checkpoint = load_two_ends(folder, tmp_path)
    shortest = train.lengths.min() - 2  # without an end token and a newline
    _, cut = load_rows(folder, chat, "data.truncation=right", f"data.max_length={shortest}")
    assert find_new_end_ids(config, chat, cut, resume_from=None) == []
    assert find_new_end_ids(config, chat, cut, checkpoint) == [7]
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("the run that is resumed has taught the model to end a turn with ")


@pytest.mark.parametrize("has_checkpoint, pronoun", [(False, "it"), (True, "them")])
def test_with_adapters_the_base_needs_the_end_token_as_well(
    folder, tmp_path, capsys, has_checkpoint, pronoun
):
    config, chat, train, checkpoint = load_two_ends(folder, tmp_path, "model.lora.rank=4")
    find_new_end_ids(config, chat, train, checkpoint if has_checkpoint else None)
    assert capsys.readouterr().out.endswith(
        f"do not name: merged exports will name {pronoun} in generation_config.json. To use the "
        f"adapter alone, add {pronoun} to eos_token_id there\n"
    )


def test_the_warning_about_an_end_token_is_printed_once_and_by_one_rank(
    folder, capsys, monkeypatch
):
    """The sampling of the run and of its validation both lack it."""
    needed = [f"model.path={folder}/model", "data.train_files=x", "data.val_files=x"]
    config = load("ppo.yaml", [*needed, "validation.stop=[y]"])
    chat = ChatTokenizer.load(make_tokenizer(), folder / "model")
    turn_end = chat.tokenizer.eos_token_id
    warn_of_end_token(config, chat)
    assert capsys.readouterr().out == (
        f"warning: the chat template ends a turn with <|im_end|> ({turn_end}), but a response ends "
        f"only with {chat.decode([TEXT_END])} ({TEXT_END}): add {turn_end} to eos_token_id in "
        f"generation_config.json of model.path={folder}/model, or set rollout.stop=['<|im_end|>']\n"
    )
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    warn_of_end_token(config, chat)
    assert capsys.readouterr().out == ""

"""The models of a run: where they are, and rows that do not fit them."""

import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from transformers import PretrainedConfig

from config import InputError, load
from data.dataset import TokenDataset, tokenize
from engines.model.hf import read_hf_config
from examples.arithmetic import make_tokenizer
from job import models
from job.models import check_token_ids
from tests.support.models import make_model


@pytest.fixture(autouse=True)
def one_rank():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("answer, is_known", [("12", True), ("1<new>2", False)])
def test_a_token_without_a_row_in_the_embedding(tmp_path, answer, is_known):
    """That the tokenizer has one matters only if rows contain it."""
    tokenizer = make_tokenizer()
    vocab_size = len(tokenizer)
    tokenizer.add_tokens(["<new>"])
    make_model(tmp_path, "qwen3", vocab_size=vocab_size)
    tokenizer.save_pretrained(tmp_path)
    question = {"role": "user", "content": "5+7"}
    row = {"messages": [question, {"role": "assistant", "content": answer}]}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    config = load("sft.yaml", [f"model.path={tmp_path}", f"data.train_files={file}"])
    path = tokenize(config.data.train_files, tokenizer, config.data, tmp_path / "cache", tmp_path)
    datasets = {"data.train_files": TokenDataset.load(path)}
    hf_config = read_hf_config(tmp_path)
    if is_known:
        check_token_ids(config, hf_config, tokenizer, datasets)
        return
    message = (
        rf"data.train_files has rows with the token <new> \({vocab_size}\), but the embedding of "
        f"model.path={tmp_path} has only {vocab_size} rows: use the tokenizer that belongs"
    )
    with pytest.raises(InputError, match=message):
        check_token_ids(config, hf_config, tokenizer, datasets)


@pytest.mark.parametrize("place", range(5))
def test_an_unknown_token_is_found_wherever_it_is(monkeypatch, place):
    """The tokens are searched two at a time, and the first data set is known entirely."""
    monkeypatch.setattr(models, "TOKENS_AT_ONCE", 2)
    known = torch.full((5,), 6)
    unknown = known.clone()
    unknown[place] = 7
    tokenizer = SimpleNamespace(convert_ids_to_tokens=lambda token: f"<{token}>")
    config = load("sft.yaml", ["model.path=m", "data.train_files=t"])
    datasets = {
        "train": SimpleNamespace(input_ids=known),
        "val": SimpleNamespace(input_ids=unknown),
    }
    with pytest.raises(InputError, match=r"^val has rows with the token <7> \(7\), .* only 7 rows"):
        models.find_unknown_token(config, 7, tokenizer, datasets)
    models.find_unknown_token(config, 8, tokenizer, datasets)


@pytest.mark.parametrize(
    "script, key",
    [
        *((script, "model.path") for script in ("sft", "dpo", "rm", "ppo")),
        ("sft", "distill.teacher"),
        ("dpo", "reference.path"),
        ("ppo", "critic.path"),
        ("ppo", "reference.path"),
        ("ppo", "reward.model.path"),
        ("ppo", "algorithm.distill.teacher"),
        ("ppo", "algorithm.distill.teachers.math"),
    ],
)
def test_every_script_finds_the_model_of_every_role(tmp_path, monkeypatch, script, key):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: f"/cache/{name}")
    pairs = [f"model.path={tmp_path}", "data.train_files=t", f"{key}=org/name"]
    if key.endswith("math"):
        pairs[-1] = "algorithm.distill.teachers={math: org/name}"
    local = models.with_local_models(load(f"{script}.yaml", pairs))
    assert OmegaConf.select(local, key) == "/cache/org/name"


@pytest.mark.parametrize("dry_run, downloads_weights", [(True, False), (False, True)])
def test_models_that_are_no_directory_are_downloaded(
    tmp_path, monkeypatch, dry_run, downloads_weights
):
    """The hub itself answers with a directory that has the model's name."""
    downloads = {}

    def snapshot_download(name, allow_patterns):
        downloads[name] = allow_patterns
        return f"/cache/{name}"

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    pairs = ["model.path=org/actor", f"critic.path={tmp_path}", "reference.path=org/reference"]
    config = load("ppo.yaml", [*pairs, "data.train_files=t", f"dry_run={dry_run}"])
    local = models.with_local_models(config)
    assert local.model.path == "/cache/org/actor"
    assert local.reference.path == "/cache/org/reference"
    assert local.critic.path == str(tmp_path)
    assert downloads.keys() == {"org/actor", "org/reference"}
    for patterns in downloads.values():
        assert {"*.json", "*.jinja", "*.py"} < set(patterns)
        assert ("*.safetensors" in patterns) == downloads_weights
    assert local.data == config.data


def test_the_name_of_the_base_holds_on_other_machines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local").mkdir()
    for path, name in (("local", str(tmp_path / "local")), ("org/model", "org/model")):
        config = load("sft.yaml", [f"model.path={path}", "data.train_files=t"])
        assert models.base_name(config) == name


@dataclass
class Processor:
    """A processor that differs from others by its path and by the keys that it drops."""

    path: str
    tokenizer: object = None
    dropped: tuple = ()

    def is_equivalent(self, other):
        return ("other" in other.path, other.dropped) == ("other" in self.path, self.dropped)


@pytest.mark.parametrize("name", ["other", "same", "model"])
@pytest.mark.parametrize(
    "key",
    ["critic.path", "reference.path", "algorithm.distill.teacher", "algorithm.distill.teachers.a"],
)
def test_all_models_of_a_run_must_process_images_like_the_policy(monkeypatch, key, name):
    def load_processor(config, tokenizer):
        return Processor(config.model.path, tokenizer, config.data.drop_processor_keys)

    monkeypatch.setattr("data.images.processor.Processor", Processor)
    monkeypatch.setattr("data.images.processor.load_processor", load_processor)
    value = f"{key}={name}"
    if key.endswith(".a"):
        value = f"algorithm.distill.teachers={{a: {name}}}"
    settings = ["model.path=model", "data.train_files=t", "data.drop_processor_keys=[x]", value]
    config = load("ppo.yaml", [*settings, "model.images=true"])
    if name == "other":
        message = f"^{key}=other processes images differently from model.path=model"
        with pytest.raises(InputError, match=message):
            models.load_processor(config, "tokenizer")
    else:
        assert models.load_processor(config, "tokenizer").tokenizer == "tokenizer"
    with pytest.raises(InputError, match="keys has no effect with model.images=false"):
        models.load_processor(load("ppo.yaml", settings), "tokenizer")
    assert models.load_processor(load("ppo.yaml", settings[:2]), "tokenizer") is None


@pytest.mark.parametrize("rank, is_printed", [("0", True), ("1", False)])
@pytest.mark.parametrize("number, layers", [(1, "1 MTP layer "), (2, "2 MTP layers ")])
def test_one_rank_says_that_mtp_layers_are_left_out(
    monkeypatch, capsys, rank, is_printed, number, layers
):
    monkeypatch.setenv("RANK", rank)
    config = load("sft.yaml", ["model.path=m", "data.train_files=t"])
    models.report_unused_mtp(config, PretrainedConfig(num_nextn_predict_layers=number))
    assert (f"built without its {layers}" in capsys.readouterr().out) == is_printed


@pytest.mark.parametrize("longest, is_warned", [(64, False), (65, True)])
def test_a_row_beyond_the_models_positions_is_a_warning(capsys, longest, is_warned):
    models.warn_of_length(SimpleNamespace(max_position_embeddings=64), longest)
    printed = capsys.readouterr().out
    assert printed.startswith("warning: a row has 65 tokens") == is_warned
    models.warn_of_length(SimpleNamespace(), longest)
    assert capsys.readouterr().out == ""


def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(tmp_path):
    for name in ("runs/first/nowhere", "./nowhere", str(tmp_path / "nowhere")):
        with pytest.raises(InputError, match=f"model.path={name} is neither .*: no such directory"):
            models.download(name, "model.path", ["*"])
    (tmp_path / "model").write_text("")
    with pytest.raises(InputError, match="it is a file; give the directory that holds it"):
        models.download(str(tmp_path / "model"), "model.path", ["*"])


def test_the_warning_about_a_long_row_has_both_numbers_and_comes_from_one_rank(capsys, monkeypatch):
    hf_config = SimpleNamespace(max_position_embeddings=4096)
    models.warn_of_length(hf_config, 12345)
    assert capsys.readouterr().out == (
        "warning: a row has 12,345 tokens, more than the model's max_position_embeddings=4,096: "
        "lower data.max_length unless the model is meant to learn longer positions\n"
    )
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    models.warn_of_length(hf_config, 12345)
    assert capsys.readouterr().out == ""


TRAINED = ["model.mtp.enable=true", "model.mtp.enable_train=true"]


@pytest.mark.parametrize("number, pairs", [(0, []), (2, TRAINED)], ids=["missing", "trained"])
def test_mtp_layers_that_are_missing_or_trained_are_not_reported(capsys, number, pairs):
    config = load("sft.yaml", ["model.path=m", "data.train_files=t", *pairs])
    models.report_unused_mtp(config, PretrainedConfig(num_nextn_predict_layers=number))
    assert capsys.readouterr().out == ""


def test_an_answer_of_the_hub_is_one_line_that_names_the_key(monkeypatch):
    """The hub explains an error in several lines, of which the first says what is wrong."""

    def snapshot_download(name, allow_patterns):
        raise OSError(f"{name} is not a model\nlog in with a token")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(InputError) as caught:
        models.download("org/name", "critic.path", ["*"])
    assert str(caught.value) == (
        "critic.path=org/name is neither a directory nor a model on the hub: org/name is not a "
        "model; correct the name, or give the directory of a copy that you have downloaded"
    )

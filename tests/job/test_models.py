"""Tokens that the tokenizer knows and the model does not."""

import json

import pytest
import torch.distributed as dist

from config import InputError, load
from data.dataset import TokenDataset, tokenize
from engines.model.hf import read_hf_config
from examples.arithmetic import make_tokenizer
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

"""The verdict of engines.check if vLLM cannot run a model."""

import pytest
import torch

from config import InputError, load
from data.batching.batch import Batch, make_cu_seqlens
from engines.check import Reference, check_vllm
from tests.support.models import make_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("process_group")]

NUM_TOKENS = 5000  # more than positions of the models, so that vLLM refuses them at once


@pytest.mark.parametrize("family, has_class", [("qwen3", True), ("openai-gpt", False)])
def test_only_a_model_without_a_class_may_fail_in_vllm(tmp_path, family, has_class, capsys):
    make_model(tmp_path, "qwen3", model_type=family, max_position_embeddings=512)
    config = load("sft.yaml", [f"model.path={tmp_path}", "data.train_files=none"])
    batch = Batch(
        torch.ones(NUM_TOKENS, dtype=torch.int64), make_cu_seqlens(torch.tensor([NUM_TOKENS]))
    )
    reference = Reference(batch, torch.zeros(NUM_TOKENS), bound=1e-4)
    if has_class:
        with pytest.raises(InputError, match="^vLLM cannot run the export: "):
            check_vllm(config, tmp_path, reference)
    else:
        check_vllm(config, tmp_path, reference)
        assert "vLLM          --  vLLM cannot run the export: " in capsys.readouterr().out

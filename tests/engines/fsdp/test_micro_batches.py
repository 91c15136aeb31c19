"""How a batch is cut into micro-batches changes no result of a step, on one rank."""

import pytest
import torch

from engines.fsdp.engine import FSDPEngine
from tests.engines.fsdp.cases import make_config
from tests.support.training import make_batch, make_loss

pytestmark = pytest.mark.usefixtures("process_group")

CPU = torch.device("cpu")
# The numbers of the 8 sequences of a batch.
CUTS = {
    "as many as fit": None,
    "one": [[*range(8)]],
    "one each": [[i] for i in range(8)],
    "in another order": [[7, 2], [5], [0, 3, 6], [4, 1]],
}


def test_micro_batches_change_no_result(folder):
    batch = make_batch(1)
    loss_fn = make_loss(len(batch.input_ids))
    pairs = [f"model.path={folder / 'qwen3'}", "engine.compute_dtype=float32"]
    config = make_config(folder, *pairs, "optim.clip_grad=0.5")
    results = {}
    for name, cut in CUTS.items():
        engine = FSDPEngine(config, CPU, total_steps=4)
        micro_batches = None if cut is None else [(1, members) for members in cut]
        metrics = engine.train_batch(batch, loss_fn, 1, micro_batches)
        log_probs, entropy, is_greedy = engine.log_probs(batch, micro_batches)
        weights = dict(engine.export_weights())
        results[name] = (metrics, log_probs, entropy, is_greedy, weights)
    expected_metrics, *expected_tensors, expected_weights = results.pop("one")
    assert expected_metrics.keys() == {"loss", "entropy", "grad_norm", "lr", "skipped"}
    assert expected_tensors[0].count_nonzero() > len(batch)
    for name, (metrics, *tensors, weights) in results.items():
        assert metrics == pytest.approx(expected_metrics, rel=1e-5), name
        for x, expected in zip(tensors, expected_tensors, strict=True):
            torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-5)
        for key, expected in expected_weights.items():
            torch.testing.assert_close(weights[key], expected, rtol=1e-3, atol=1e-5)

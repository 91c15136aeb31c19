"""tests/on_cuda.py without a GPU: it can be imported, and the worker knows all of its cases."""

import importlib

import pytest

from tests.engines import megatron_worker
from tests.on_cuda import CHOSEN


@pytest.mark.parametrize("num_ranks", CHOSEN)
def test_the_worker_knows_the_cases_for_gpus(num_ranks):
    for module in megatron_worker.MODULES:
        importlib.import_module(module)
    known = {name for ranks, name in megatron_worker.CASES.functions if ranks == num_ranks}
    assert set(CHOSEN[num_ranks]) <= known

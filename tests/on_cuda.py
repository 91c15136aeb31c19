"""What only CUDA has; pytest collects this file when asked for it by name:  python -m pytest tests/on_cuda.py"""

import pickle

import pytest
import torch

from tests.test_profiling import profile


def test_snapshots_of_memory_also_where_it_ran_out(tmp_path):
    def work(step):
        torch.empty(2**20 if step == 1 else 2**45, device="cuda")

    with pytest.raises(torch.OutOfMemoryError):
        profile(tmp_path, range(1, 4), "trainer.profile_interval=[1,3]", "profiler.tool=[memory,torch]", work=work)
    for name in ("step_1/train_batch/memory_step1_rank0.pickle", "step_2/train_batch/out_of_memory_step2_rank0.pickle"):
        snapshot = pickle.loads((tmp_path / "profile" / name).read_bytes())
        actions = {entry["action"] for trace in snapshot["device_traces"] for entry in trace}
        assert "alloc" in actions and ("oom" in actions) == ("out_of" in name)


def test_nvtx_ranges_do_no_harm_without_nsys(tmp_path):
    ran, _ = profile(tmp_path, range(1, 4), "trainer.profile_interval=[2,2]", "profiler.tool=nvtx")
    assert ran == {"data": 3, "train_batch": 3}

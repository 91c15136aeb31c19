"""megatron-core on a machine without an accelerator: inside cuda_is_cpu(), what it asks of CUDA is answered by the CPU.

Megatron names the device "cuda" in many places. Where there is an accelerator, cuda_is_cpu() does nothing; without one
it holds for the block alone, so that transformers and vLLM in the same process never meet it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.overrides import TorchFunctionMode


class CudaToCpu(TorchFunctionMode):
    """device="cuda" means the CPU, nothing is pinned, and tensors report the type names that Megatron compares with."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.", 1)
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        if "pin_memory" in kwargs:
            kwargs = {**kwargs, "pin_memory": False}
        return function(*args, **kwargs)


@contextmanager
def cuda_is_cpu() -> Iterator[None]:
    """Also a decorator of functions, but not of generators: code that runs between their items would be inside."""
    if torch.accelerator.is_available():
        yield
        return
    from megatron.core.tensor_parallel import random

    replacements = [
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "synchronize", lambda *_: None),
        (
            torch.cuda,
            "manual_seed",
            lambda seed: torch.manual_seed(seed),
        ),  # CPU operators draw from this one
        (torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
        (random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
    ]
    with ExitStack() as undo:
        for module, name, function in replacements:
            undo.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, function)
        # Megatron compiles a few small functions, which on a CPU takes longer than it saves.
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        undo.enter_context(CudaToCpu())
        yield

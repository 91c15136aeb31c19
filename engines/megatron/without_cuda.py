"""Runs megatron-core without an accelerator: within cuda_is_cpu(), the CPU stands in for CUDA.

Megatron hard-codes the device "cuda" in many places. The replacement ends with the block, so that
transformers and vLLM in the same process are not affected. If there is an accelerator,
cuda_is_cpu() does nothing.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.overrides import TorchFunctionMode


class CudaToCpu(TorchFunctionMode):
    """Makes device="cuda" mean the CPU, and ignores requests for pinned memory.

    Tensors report the type names that Megatron checks for, such as torch.cuda.FloatTensor.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.cuda:
            return args[0]
        if not kwargs:  # most calls: they have to be quick
            if function is torch.Tensor.type and len(args) == 1:
                return function(*args).replace("torch.", "torch.cuda.", 1)
            return function(*args)
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        if "pin_memory" in kwargs:
            kwargs = {**kwargs, "pin_memory": False}
        return function(*args, **kwargs)


@contextmanager
def cuda_is_cpu() -> Iterator[None]:
    """Within this block, let the CPU stand in for CUDA if there is no accelerator.

    This also works as a decorator for functions, but not for generators: there, the caller's code
    between two items would run inside the block.
    """
    if torch.accelerator.is_available():
        yield
        return
    from megatron.core.tensor_parallel import random

    # Each replacement is a function object of its own (a lambda), even where an existing function
    # would do, because dynamo rejects two names for the same object. Random generators are those of
    # the CPU.
    replacements = [
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "manual_seed", lambda seed: torch.manual_seed(seed)),
        (torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
        (random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
    ]
    with ExitStack() as undo:
        for module, name, function in replacements:
            undo.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, function)
        # Megatron compiles a few small functions. On a CPU, compiling takes longer than it saves.
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        undo.enter_context(CudaToCpu())
        yield

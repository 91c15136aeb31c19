"""megatron-core without an accelerator: inside cuda_is_cpu(), the CPU answers for CUDA.

Megatron hard-codes the device "cuda" in many places. Where there is an accelerator, cuda_is_cpu()
does nothing. Without one it holds only inside the block, so that transformers and vLLM in the same
process are not affected.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.overrides import TorchFunctionMode


class CudaToCpu(TorchFunctionMode):
    """Makes device="cuda" mean the CPU and ignores pinning.

    Tensors report the type names that Megatron compares with, such as torch.cuda.FloatTensor.
    """

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
    """Let the CPU stand in for CUDA where there is no accelerator.

    Also works as a decorator of functions, but not of generators: the caller's code between two
    items would run inside it.
    """
    if torch.accelerator.is_available():
        yield
        return
    from megatron.core.tensor_parallel import random

    # One function object per name: dynamo rejects duplicates. torch.manual_seed itself must not
    # become torch.cuda.manual_seed either, hence the lambda. CPU operators draw from its generator.
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
        # Megatron compiles a few small functions. On a CPU that takes longer than it saves.
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        undo.enter_context(CudaToCpu())
        yield

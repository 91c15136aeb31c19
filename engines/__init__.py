"""Engines: models divided over ranks, to train, evaluate and export. Two engines, the same results.

    base                the interface
    build               model_engine -> engine class
    planning            which rank works on which sequences, in which micro-batches
    context_parallel    group sizes, and the lengths and batches that they allow
    microbatch          a micro-batch as one rank sees it
    heads, logprobs     what follows the last hidden state
    optimizer, schedule, dropout    what a step of training needs besides the model
    adapter_guard       proof that adapters learn
    memory, memory_terms    what the engines' estimates of memory share
    check               the command `python -m engines.check`

    fsdp/, megatron/    the two engines, which do not know each other
    model/              what a Hugging Face model is
    parallel/           devices, collectives, attention over packed sequences, host memory
    checkpoint/         save and resume, storage, export

Not here: losses of PPO (rl/) and anything about vLLM (rollout/). Engines are given a loss function.
"""

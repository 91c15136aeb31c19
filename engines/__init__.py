"""Engines: models divided over ranks, to train, evaluate and export.

Two engines implement the same interface and compute the same results.

    base                the interface
    build               model_engine -> engine class
    planning            which rank works on which sequences, in which micro-batches
    context_parallel    group sizes, and the lengths and batches that they allow
    pass_costs          what a pass costs, for plans that choose group sizes
    microbatch          a micro-batch as one rank sees it
    heads, logprobs     log-probabilities and values from the last hidden states
    optimizer, schedule, dropout    optimizers, learning rates, random numbers for dropout
    adamw, moments, rounding        AdamW with weights and moments of 16 or 8 bits
    adapter_guard       a check that adapters learn
    reference           the configuration of a frozen reference model
    teacher, divergence     a teacher's outputs for each token, and how a student uses them
    teaching, teacher_settings    the teachers of a run: which models, their checks and passes
    memory, memory_terms    the common part of both engines' memory estimates
    check               the command `python -m engines.check`

    fsdp/, megatron/    the two engines; neither imports the other
    model/              Hugging Face models, for both engines and vLLM
    parallel/           devices, collectives, attention over packed sequences, host memory
    checkpoint/         save and resume, storage, export

Not here: PPO losses (rl/) and rollouts with vLLM (rollout/). Callers pass a loss function to the
engine.
"""

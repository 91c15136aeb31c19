"""The Megatron-core engine: tensor, sequence, pipeline, context, expert and data parallelism.

`engine.py` holds the engine itself. Around it, one noun per file:

    families.py, transformer_config.py             supported models and their configuration
    gpt.py, torch_layers.py, moe.py, mtp_layers.py the modules of a model
    mapping.py, mbridge.py, bridge.py              weights: Hugging Face files and Megatron names
    transforms.py, adapters.py                     changes to a model before it is wrapped
    layout.py, distributed_optimizer.py            process groups, DDP and the optimizer
    pipeline.py, outputs.py, step_loss.py          a pass: schedule, head outputs, loss
    sharded_state.py, checkpoint_files.py          checkpoints
    device_tensors.py                              what can be offloaded
    without_cuda.py                                running on a CPU

What both engines share (batches, heads, schedules, adapter files) lives one level up, in
`engines/`. Nothing here knows `engines/fsdp`, and only `mbridge.py` knows the mbridge package.
"""

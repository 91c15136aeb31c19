"""The Megatron-core engine: tensor, sequence, pipeline, context, expert and data parallelism.

`engine.py` holds the engine itself. Around it, one noun per file:

    families.py, transformer_config.py             supported models and their configuration
    gpt.py, torch_layers.py, moe.py, mtp_layers.py the modules of a model
    mapping.py, mbridge.py, bridge.py              converting weights between the two formats
    transforms.py, adapters.py                     changes to a model before it is wrapped
    layout.py, distributed_optimizer.py            process groups, DDP and the optimizer
    pipeline.py, outputs.py, step_loss.py          passes: schedule, outputs of the head, loss
    sharded_state.py, checkpoint_files.py          checkpoints
    device_tensors.py                              the tensors that can be offloaded
    stage_memory.py                                estimates of memory
    without_cuda.py                                running on a CPU

Code that both engines share (batches, heads, schedules, adapter files) is one level up, in
`engines/`. No file here imports `engines/fsdp`, and only `mbridge.py` imports the mbridge package.
"""

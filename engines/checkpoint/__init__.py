"""Checkpoints of a run: saving, verifying, resuming, and exporting to Hugging Face format.

    checkpointer    writes and publishes checkpoints, finds the one to resume from, deletes old ones
    storage         the files of one checkpoint: checksums, full disks, rejecting unsafe pickles
    export          writes model directories and PEFT adapters, from an engine or a checkpoint
    model_config    config.json and other small files of an exported model
    __main__        python -m engines.checkpoint export

The engine decides which tensors a checkpoint contains (Engine.state, write and read). Hugging Face
model files are read in engines/model.
"""

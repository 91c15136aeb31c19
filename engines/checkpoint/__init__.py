"""Checkpoints of a run: saving, verifying, resuming, and exporting to Hugging Face format.

    checkpointer    writes and publishes checkpoints, finds the one to resume from, deletes old ones
    storage         the files of one checkpoint: checksums, full disks, pickles that hold only data
    export          model directories and PEFT adapters, from an engine or from a checkpoint
    __main__        python -m engines.checkpoint export

The tensors in a checkpoint are chosen by the engine (Engine.state, write and read), and the files
of Hugging Face models are read in engines/model.
"""

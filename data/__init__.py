"""From data files to batches of token ids.

    files        finds data files and reads their rows
    rows, messages, shapes    the columns of a row, its messages, rows in other projects' formats
    chat/        messages -> token ids and loss mask
    images/      images in rows, and the model's processor
    tokenization, cache       a whole file -> a cache folder on disk
    dataset      rows for fine-tuning;  prompts  prompts for reinforcement learning
    batching/    the order of rows, batches, and how they are divided over ranks

Nothing here depends on a model's weights or on an engine.
"""

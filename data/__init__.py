"""Turn data files into batches of token ids.

    files        finds data files and reads their rows
    rows, messages, shapes    the columns of a row, its messages, and the formats of other projects
    chat/        messages -> token ids and loss mask
    images/      images in rows, and the model's image processor
    selection    which rows are trained on, and which are validated
    tokenization, lengths, cache    whole files -> a cache folder on disk
    columns      reports which columns and fields are read, ignored or lost
    unknown_tokens            reports text for which a tokenizer has only its unknown token
    dataset      tokenized rows for fine-tuning
    prompts      tokenized prompts for reinforcement learning
    preferences, preference_dataset    pairs of answers, and answers with a label
    reward_dataset            pairs of answers, and answers with a score
    records, sources          the complete rows, and the files that they come from
    answered     prompts with responses, tokenized for another model
    preview      the command `python -m data.preview`
    batching/    the order of rows, batches, and their division over ranks

Nothing here depends on a model's weights or on an engine.
"""

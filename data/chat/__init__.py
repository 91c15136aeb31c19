"""Turn the messages of a row into token ids and a mask of the tokens to learn.

    encoding      one row of data -> ids, mask, images; the entry point
    conversation  messages as the chat template renders them, and the tokens of the rendered text
    spans         finds the characters of each assistant turn; begins with an example that explains
                  how
    template_mask             turns that the template itself marks, with {% generation %} blocks
    runs, headers, endings    the steps of finding a turn: its text, its beginning, its end
    pieces, marks             find out which message each part of the rendered text comes from
    probe         a chat of two turns that shows how a template begins and ends a turn
    forms         the same messages in the forms that different templates expect
    losses, lost, lost_inputs, part_fields     texts and fields that the rendered chat lacks
    reasoning     the key of a message under which a template prints its reasoning
    placeholders  images in a conversation
    plain_text    rows of plain text, for models without a chat template
    tokenizer, tokens         the tokenizer with its template, and the tokens of a text
    special_tokens            special tokens that are written in texts

The columns of a row are read in data/rows.py; caches and batches are made in data/dataset.py and
data/prompts.py.
"""

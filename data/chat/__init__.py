"""From the messages of a row to token ids and a mask of the tokens to learn.

    encoding      one row of data -> ids, mask, images; the entry point
    conversation  messages rendered by the chat template, and the tokens of the rendered text
    spans         the characters of each assistant turn, from header to end token; starts with an
                  example that explains how turns are found
    template_mask             turns that the template marks itself, with {% generation %} blocks
    runs, headers, endings    the steps of finding a turn: its text, where it begins, where it ends
    pieces, marks             which message each part of the rendered text comes from
    probe         a chat of two turns that shows how a template begins and ends a turn
    forms         the same messages in the forms that different templates expect
    placeholders  images within a conversation
    plain_text    rows of plain text, for models without a chat template
    tokenizer, tokens         the tokenizer with its template, and the tokens of a text
    special_tokens            control tokens that are written out in texts

The columns of a row are read in data/rows.py; caches and batches are made in data/dataset.py and
data/prompts.py.
"""

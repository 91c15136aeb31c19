"""Episodes: several turns with vLLM, tools and environments, trained on the tokens it sampled.

    gateway    the program that answers the HTTP requests of agents
    requests   reads the fields of these requests, and rejects those that would change sampling
    replies    writes the answers in OpenAI's format and in vLLM's
    rendering  turns messages into prompt ids that continue recorded ids
    stability  shows at start whether a chat template lets conversations continue
    parsing    finds tool calls and reasoning in replies, with vLLM's parsers

The gateway is a process of its own on the first rank of a replica. It exchanges token ids with the
trainer, which steps vLLM, over a socket pair.
"""

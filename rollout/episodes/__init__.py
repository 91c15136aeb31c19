"""Episodes: several turns with vLLM, tools and environments, trained on the tokens it sampled.

    gateway       the program that answers the HTTP requests of agents
    requests      reads the fields of these requests, and rejects those that would change sampling
    replies       writes the answers in OpenAI's format and in vLLM's
    rendering     turns messages into prompt ids that continue recorded ids
    stability     shows at start whether a chat template lets conversations continue
    parsing       finds tool calls and reasoning in replies, with vLLM's parsers
    harmony       reads the replies of gpt-oss, for which these parsers need a download
    runner        starts the processes that play episodes, and collects their rewards
    worker        the program that plays episodes with the user's function
    environments  plays with a class of the user instead, whose methods are tools
    schemas       describes these tools to the model
    client        the model as the user's function sees it
    posting       sends the client's HTTP requests
    threads       calls functions that are not async

The gateway is a process of its own on the first rank of a replica. It exchanges token ids with the
trainer, which steps vLLM, over a socket pair. Workers are further processes, perhaps in another
Python environment: worker and what it imports need only the standard library.
"""

"""Episodes: several turns with vLLM, tools and environments, trained on what vLLM sampled.

    drawing       draws episodes for a step: assign, play, share
    director      starts the episodes of one replica, and collects what happens to them
    stepping      steps vLLM while the requests of running episodes arrive
    recorder      the tokens of episodes, exactly as vLLM sampled them
    server        starts the gateway, and exchanges messages with it
    gateway       the program that answers the HTTP requests of agents
    link          the messages between the gateway and the trainer
    episode       an episode as the gateway knows it
    requests      reads the fields of these requests, and rejects those that would change sampling
    replies       writes the answers in OpenAI's format and in vLLM's
    rendering     turns messages into prompt ids that continue recorded ids
    stability     shows at start whether a chat template lets conversations continue
    parsing       finds tool calls and reasoning in replies, with vLLM's parsers
    harmony       reads the replies of gpt-oss, for which these parsers need a download
    runner        starts the processes that play episodes, and collects their rewards
    jobs          the episodes that these processes are to play, and their results
    worker        the program that plays episodes with the user's function
    environments  plays episodes with the user's class, whose methods are tools
    schemas       describes these tools to the model
    client        the model as the user's function sees it
    posting       sends the client's HTTP requests
    threads       calls functions that are not async
    try           the command that plays one episode by hand

The gateway is a process of its own on the first rank of a replica. It exchanges token ids with the
trainer, which steps vLLM, over a socket pair. Workers are further processes, perhaps in another
Python environment: worker and what it imports need only the standard library.
"""

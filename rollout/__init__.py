"""Generate responses with vLLM, grade them, and send their tokens to the ranks that train on them.

    drawing    prompts -> graded responses: assign, generate, grade, share
    responses  the responses to one batch of requests, as arrays
    samples    graded responses that one step learns from
    sharing    sends tokens to the ranks that train on them
    steps      places the rewards of steps on tokens
    records    writes samples to files that people read
    exchange   sums tensors, and gathers objects, over all ranks
    vllm/      the engine that generates responses
    partial/   responses that continue in the next step
    episodes/  several turns with tools and environments
    grading/   worker processes that call the reward function

Advantages and losses are in rl/ and algorithms/.
"""

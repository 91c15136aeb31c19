"""Generate responses with vLLM, grade them, and hand their tokens to the ranks that train on them.

    drawing    prompts -> graded responses: assign, generate, grade, share
    responses  the tokens of one batch of requests, in arrays
    samples    graded responses, from which one step learns
    sharing    moves tokens to the ranks that train on them
    records    writes samples for people
    exchange   sums of tensors and lists of objects over all ranks
    vllm/      the engine that generates
    grading/   worker processes that call the reward function

Advantages and losses are in rl/ and algorithms/.
"""

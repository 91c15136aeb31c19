"""Reward functions, called in processes that may raise, hang, crash or take all memory.

grader.py hands samples to workers and collects their rewards; process.py is a worker seen from the
trainer; worker.py is the program that a worker runs; signature.py binds the parameters of a reward
function by name. The reward functions themselves are in rewards.py or in the user's own file.
"""

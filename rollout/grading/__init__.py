"""Call reward functions in worker processes, since they may raise, hang, crash or fill the memory.

grader.py sends samples to workers and collects their rewards; process.py starts and controls one
worker; worker.py is the program that a worker runs; signature.py binds the parameters of a reward
function by name. The reward functions themselves are in rewards.py or in the user's own file.
"""

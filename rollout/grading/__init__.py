"""Call reward functions in worker processes, since they may raise, hang, crash or fill the memory.

grader.py sends samples to workers and collects their rewards; pool.py keeps several workers busy,
and replaces those that end; process.py starts and controls one worker; worker.py is the program
that a worker runs; program.py and scores.py are what it shares with the workers of episodes;
signature.py binds the parameters of a reward function by name; results.py has rewards and failures.
The reward functions themselves are in rewards.py or in the user's own file.
"""

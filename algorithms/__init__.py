"""The formulas of reinforcement learning as pure tensor functions; imports torch alone.

Advantages, policy losses, aggregation, KL, the value loss and the rollout correction. Which of them
a step uses, and with which arguments, is decided in rl/.
"""

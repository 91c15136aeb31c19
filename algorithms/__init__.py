"""The formulas of reinforcement learning as pure tensor functions that need only torch.

Advantages, policy losses, aggregation, KL, the value loss and the rollout correction; losses of
preferences and of reward models. Which of them a step uses, and with which arguments, is decided in
rl/, preferences/ and reward_models/.
"""

"""Training of reward models: what train_rm.py needs besides an engine, a run and rows.

    settings    checks of the configuration and of the rows, before weights are loaded
    losses      the loss of a step, on the scores of its conversations
    trainer     the engine with its loss, and validation

The formulas are in algorithms/reward_losses.py, and rows are read in data/reward_dataset.py. A
reward model that scores responses of PPO is in rl/reward_model.py.
"""

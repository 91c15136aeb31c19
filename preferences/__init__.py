"""Preference training: what train_dpo.py needs besides an engine, a run and rows.

    settings    checks of the configuration, before anything is loaded
    losses      the loss of a step, on the sums of log-probabilities over each answer
    reference   the reference model: a frozen engine, or the policy without its adapters
    cache       the reference's log-probabilities, computed once
    mismatched  answers to other prompts, for the KL baseline of KTO
    trainer     the engine, its reference and its loss, which compute a step together
    validation  loss and accuracy on rows that are not trained on

The formulas are in algorithms/preference_losses.py, and rows are read in data/preferences.py.
"""

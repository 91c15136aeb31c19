"""One step of PPO and its relatives: who takes part, what is computed, and what is checked before.

    roles         the engines, vLLM and the grader of a run, and the stages of a step
    models        which models a run has, and the configuration of each
    functions     the functions that the configuration names, and the inputs they may read
    settings      checks of the configuration;  requirements  the "(needs ...)" of configs/ppo.yaml
    collecting    the samples of a step
    estimation    rewards -> advantages -> weights of the tokens
    losses        of the actor and of the critic;  updates  one update of a model
    validation    metrics of a validation

The formulas are in algorithms/, generation and grading in rollout/, models and optimizers in
engines/, and everything that does not depend on the algorithm (signals, logging, output
directories) in job/.
"""

"""One step of PPO and its relatives: the models, the computations, and the checks before them.

    roles         the engines, vLLM and the grader of a run, and the stages of a step
    teacher       on-policy distillation: the teachers' checks, and their part in a step
    reward_model, scoring    the reward model: its checks, and its part in a step
    models        which models a run has, and the configuration of each
    functions     the functions that the configuration names, and the inputs they may read
    settings      checks of the configuration
    requirements  the "(needs ...)" conditions in the comments of configs/ppo.yaml
    collecting    the samples of a step
    estimation    rewards -> advantages -> weights of the tokens
    losses        the losses of actor and critic
    updates       running an engine over a step: a pass without a gradient, or an update
    validation    the metrics of a validation

The formulas are in algorithms/, generation and grading in rollout/, models and optimizers in
engines/, and everything that does not depend on the algorithm (signals, logging, output
directories) in job/.
"""

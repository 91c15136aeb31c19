"""Responses that continue in the next step (rollout.partial): no step waits for the longest one.

A step begins more groups of responses than it trains on. When enough groups are complete, vLLM
stops. The other groups keep their tokens and log-probabilities, and continue in the next step with
the new weights.

    ledger   which groups have begun, and how many each replica completes in a draw
    groups   the tokens of the groups that one replica has begun
    drawing  begin, generate, grade and share, as rollout/drawing.py does for whole batches
    responses, episodes    how responses of a single turn, and episodes, are drawn and continued
    resume   checks at start that a checkpoint's groups can continue

Clock time never decides which groups are complete: every replica counts its own groups, after each
step of vLLM. So a run with the same seed draws the same responses, even after a resume.
"""

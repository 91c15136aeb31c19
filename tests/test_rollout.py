"""vLLM and the trainer in one process: what one generates, the other finds as likely; critics; checkpoints of both.

One launch of rollout_worker.py, with one vLLM, for each model and layout runs all its cases; they are judged here.
"""

import json

from examples.arithmetic import make_tokenizer
from tests.models import make_model

REWARD = """
def score(prompt, response, row):
    if row["bad"] and len(response) % 2:
        raise ValueError("an odd length")
    return len(response)
"""


def make_folder(folder):
    tokenizer = make_tokenizer()
    shape = dict(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    make_model(folder / "qwen3", "qwen3", head_dim=32, **shape)
    # One head of keys for both ranks.
    make_model(folder / "tied", "qwen2_tied", hidden_size=64, num_attention_heads=2, num_key_value_heads=1, **shape)
    for family in ("qwen3", "tied"):
        tokenizer.save_pretrained(folder / family)
        (folder / family / "generation_config.json").write_text(json.dumps({"eos_token_id": STOP_IDS[:-1]}))
    (folder / "reward.py").write_text(REWARD)
    return folder


STOP_IDS = [10, 11, 12, 13, 14, 257]

"""Let vLLM's pooling compute scores with an exported reward model.

    python tests/reward_models/pooling_worker.py MODEL RESULT.json IDS.json

IDS.json has the token ids of the conversations. RESULT.json gets a list of scores for each.
"""

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # another process would import everything again

from vllm import LLM, PoolingParams


def main(model: str, result: Path, ids_file: Path) -> None:
    conversations = json.loads(ids_file.read_text())
    llm = LLM(
        model,
        runner="pooling",
        dtype="float32",
        max_model_len=128,
        enforce_eager=True,
        kv_cache_memory_bytes=10**7,
    )
    outputs = llm.encode(
        [{"prompt_token_ids": ids} for ids in conversations],
        pooling_task="classify",
        pooling_params=PoolingParams(use_activation=False),
    )
    result.write_text(json.dumps([output.outputs.data.tolist() for output in outputs]))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))

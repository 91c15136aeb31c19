"""Export a checkpoint to Hugging Face format.

python -m engines.checkpoint export CHECKPOINT OUT             its weights as a model directory; adapters as PEFT has them
python -m engines.checkpoint export CHECKPOINT OUT --merge     the frozen model with its adapters added
"""

import sys
from pathlib import Path

from config import InputError
from engines.checkpoint.checkpointer import export_checkpoint

if __name__ == "__main__":
    if (
        len(sys.argv) not in (4, 5)
        or sys.argv[1] != "export"
        or sys.argv[4:] not in ([], ["--merge"])
    ):
        sys.exit(__doc__)
    try:
        export_checkpoint(Path(sys.argv[2]), Path(sys.argv[3]), merge=len(sys.argv) == 5)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)

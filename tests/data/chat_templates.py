"""Chat templates with the structure of published ones, and a small tokenizer for them."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "templates"


def read_template(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text().removesuffix("\n")


CHATML = read_template("chatml")

# A default system prompt, tools in the system turn, neighbouring tool results in one user turn.
QWEN2 = read_template("qwen2")

# Thinking stays only after the last user query, which a reverse scan finds. Releases differ in what
# they write at GENERATION.
QWEN3_BODY = read_template("qwen3")
NO_THINKING = r"""
{%- if enable_thinking is defined and enable_thinking is false -%}
    {{ '<think>\n\n</think>\n\n' }}
{%- endif %}"""
QWEN3 = QWEN3_BODY.replace("GENERATION", NO_THINKING)
THINKING = QWEN3_BODY.replace("GENERATION", r"{{ '<think>\n' }}")

LLAMA3 = read_template("llama3")

# No header for the assistant. The tools stand before the last user turn, so they move as a chat
# grows.
MISTRAL = read_template("mistral")

# Rejects chats without a user turn.
STRICT = (
    "{%- if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    "{{ raise_exception('No user query found in messages.') }}{% endif %}" + QWEN2
)

# The last turn has no end: it comes with the next message.
QWEN15 = read_template("qwen1_5")

# Each role has tokens of its own, and the assistant's turn is closed when another role follows.
APERTUS = read_template("apertus")
# The same, with tokens on lines of their own, and a prompt that begins the answer.
APRIEL = read_template("apriel")

# A turn ends where the header of the next one begins. Results of tools have another header than the
# user.
GLM = read_template("glm")

# The results of tools stand in the assistant's turn, before the text beside the call.
GEMMA4 = read_template("gemma4")

SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "</s>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "[INST]",
    "[/INST]",
    "<|begin_of_text|>",
]

CONTROL = [
    "<|a_start|>",
    "<|a_end|>",
    "<|u_start|>",
    "<|u_end|>",
    "<|assistant|>",
    "<|user|>",
    "<|observation|>",
    "<|turn>",
    "<turn|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
]


def make_tokenizer(template=None, bos="<s>", eos="</s>", control=()):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    words = "user assistant system tool think answer question hello there the cat sat"
    tokenizer.train_from_iterator([words, QWEN2.replace("\n", " ")], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos)
    made.add_special_tokens({"additional_special_tokens": list(control)})
    made.chat_template = template
    return made

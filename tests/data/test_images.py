"""Images in rows of data, and training on them.

Compared with plain transformers, one row at a time: its processor, on the images as they are, and
its loss.
"""

import base64
import csv
import dataclasses
import functools
import itertools
import json
import re
import shutil
import sys
import time
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoTokenizer, Qwen2_5_VLProcessor

from config import InputError, load
from data.batching.batch import Batch
from data.chat.placeholders import number_images
from data.dataset import TokenDataset, tokenize
from data.images.processor import ImageStore, Processor, load_hf_processor, overlaps_any
from data.prompts import PromptDataset, tokenize_prompts
from engines.build import engine_class
from engines.fsdp import vision as images
from engines.fsdp.tower_attention import WINDOWS, vision_tower_configs, windows_attention
from engines.fsdp.transforms import build_model
from engines.heads import Head
from engines.model.hf import auto_class, layer_modules
from job.models import load_processor
from tests.data.images_worker import CASES, LR, STEPS, Case, configure
from tests.support.estimates import estimate_gib
from tests.support.launch import launch, run
from tests.support.models import VISION_LANGUAGE, make_image_model, make_model

SIZES = [(90, 60), (61, 130), (28, 28), (200, 170)]  # (width, height) of the images
ALL_CASES = [(world, name) for world in CASES for name in CASES[world] if name != "gemma3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for family in VISION_LANGUAGE:
        make_image_model(folder / family, family)
    random = np.random.RandomState(0)
    for i, (width, height) in enumerate(SIZES):
        Image.fromarray(random.randint(0, 256, (height, width, 3)).astype(np.uint8)).save(
            folder / f"{i}.png"
        )
    url = "data:image/png;base64," + base64.b64encode((folder / "2.png").read_bytes()).decode()
    for name, size in (("small", (9, 3)), ("long", (2000, 5))):
        Image.new("RGB", size).save(folder / f"{name}.png")
    Image.fromarray(np.full((60, 60), 40000, np.uint16)).save(folder / "deep.png")
    Image.fromarray(np.full((60, 60), 0.5, np.float32)).save(folder / "float.tiff")
    (folder / "rows.jsonl").write_text(
        "".join(
            json.dumps(row) + "\n"
            for row in [
                {"messages": chat("no image", "fine")},
                {
                    "messages": chat(
                        [{"type": "image", "image": "0.png"}, {"type": "text", "text": "one"}],
                        "yes, one",
                    )
                },
                {
                    "messages": chat("<image> and <image>", "two of them"),
                    "images": ["1.png", "2.png"],
                },
                {"messages": chat("in front of the text", "there"), "images": "1.png"},
                {
                    "messages": [
                        *chat([{"type": "image_url", "image_url": {"url": url}}], "a"),
                        *chat("more <image>", "b"),
                    ],
                    "images": ["3.png"],
                },
                {
                    "prompt": "say<image>",
                    "response": "said",
                    "images": [{"path": "0.png", "bytes": None}],
                },
            ]
        )
    )
    return folder


IMAGES = [[], [0], [1, 2], [1], [2, 3], [0]]  # of the rows


def chat(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@pytest.fixture(scope="module")
def results(folder):
    @functools.cache
    def of(world):
        launch(world, "tests/data/images_worker.py", folder)
        return json.loads((folder / f"{world}.json").read_text())

    return of


def plain(directory):
    kind = auto_class(AutoConfig.from_pretrained(directory))
    return kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


TEXTS = [
    "user\nno image",
    "user\n<image>one",
    "user\n<image> and <image>",
    "user\n<image>in front of the text",
    "user\n<image>",
    "user\nsay<image>",
]


@functools.cache
def plain_rows(folder, family):
    """Return what transformers' processor makes of each row: the model's inputs [1, T]."""
    processor = load_hf_processor(folder / family)
    images = [Image.open(folder / f"{i}.png") for i in range(len(SIZES))]
    answers = ["fine", "yes, one", "two of them", "there", "a", "said"]
    rows = []
    for i, (text, answer) in enumerate(zip(TEXTS, answers)):
        turns = [(text, answer)]
        if i == 4:
            turns.append(("user\nmore <image>", "b"))
        whole = "".join(
            f"<|im_start|>{text}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
            for text, answer in turns
        )
        images_of_row = [images[k] for k in IMAGES[i]] or None
        rows.append(
            processor(
                text=[whole], images=images_of_row, return_tensors="pt", add_special_tokens=False
            )
        )
    return rows


def plain_log_probs(model, row):
    ids = row["input_ids"][0]
    logits = model(**row, use_cache=False).logits[0, :-1]
    return -F.cross_entropy(logits, ids[1:], reduction="none")


@functools.cache
def plain_training(folder, family, masks, frozen):
    """Return losses, gradient norms, and the weights after STEPS steps.

    frozen: whether the vision tower is.
    """
    model = plain(folder / family).train()
    rows = plain_rows(folder, family)
    decayed = []
    undecayed = []
    for name, parameter in model.named_parameters():
        is_trained = not (frozen and is_in_tower(name))
        parameter.requires_grad_(is_trained)
        if not is_trained:
            continue
        has_decay = parameter.ndim > 1 and not name.endswith("bias")
        (decayed if has_decay else undecayed).append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": undecayed, "weight_decay": 0.0}],
        lr=LR,
        betas=(0.9, 0.95),
        foreach=False,
    )
    losses = []
    norms = []
    for _ in range(STEPS):
        sums = [
            (plain_log_probs(model, row) * torch.tensor(mask)[1:]).sum()
            for row, mask in zip(rows, masks)
        ]
        loss = -sum(sums) / sum(map(sum, masks))
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {n: p.detach() for n, p in model.named_parameters()}


def is_in_tower(name):
    return "visual" in name or "vision_tower" in name


def split_by_row(result, field):
    """Return a field of a result, which is end to end, as an array for each row."""
    return np.split(np.array(result[field]), np.cumsum(result["lengths"])[:-1])


def masks_of(result):
    return tuple(tuple(mask) for mask in split_by_row(result, "mask"))


@pytest.mark.slow
@pytest.mark.parametrize("world, name", ALL_CASES)
def test_rows_are_what_the_processor_makes_of_them(results, folder, world, name):
    result = results(world)[name]
    assert "error" not in result, result["error"]
    rows = [row.tolist() for row in split_by_row(result, "input_ids")]
    expected = plain_rows(folder, CASES[world][name].family)
    assert rows == [row["input_ids"][0].tolist() for row in expected]
    assert result["stats"]["images"] == 7


@pytest.mark.slow
@pytest.mark.parametrize("world, name", ALL_CASES)
def test_training_equals_a_plain_loop(results, folder, world, name):
    result = results(world)[name]
    assert "error" not in result, result["error"]
    family = CASES[world][name].family
    losses, norms, _ = plain_training(folder, family, masks_of(result), name == "frozen")
    # Adam and linear attention amplify the rounding of three steps in the fourth.
    rounding = 10 if name == "qwen3_5" else 1
    assert [step["loss"] for step in result["steps"]] == pytest.approx(losses, rel=2e-6 * rounding)
    assert [step["grad_norm"] for step in result["steps"]] == pytest.approx(
        norms, rel=1e-4 * rounding
    )
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("family", VISION_LANGUAGE)
def test_attention_of_a_tower_takes_all_windows_at_once(folder, family):
    """Qwen's towers pass windows to their attention; Gemma 3's and LLaVA's take rows of images."""
    hf, _ = build_model(configure(folder, Case(family)), Head.LOG_PROBS)
    implementations = [tower._attn_implementation for tower in vision_tower_configs(hf)]
    assert implementations == ([WINDOWS] if family.startswith("qwen") else [])


@pytest.mark.parametrize("family", VISION_LANGUAGE)
def test_a_layer_of_a_tower_is_counted_with_the_rows_that_it_computes(folder, family):
    """Its rows are patches, and in some families one more for the whole image."""
    shape = AutoConfig.from_pretrained(folder / family)
    hf = auto_class(shape).from_config(shape, dtype=torch.float32)
    processor = Processor(folder / family)
    image = np.zeros((224, 224, 3), np.uint8)
    ids = processor.expand(processor.image_token, [image]).tokens.ids
    # Some families put tokens of text before and after those that take the image's features.
    num_tokens = (processor.token_types([ids]) > 0).sum().item()
    text_modules = {*hf.get_decoder().modules()}
    layer = next(module for module in layer_modules(hf, hf) if module not in text_modules)
    rows = []

    def record(_, inputs, output):
        hidden = output[0] if isinstance(output, tuple) else output
        rows.append(hidden.numel() // hidden.shape[-1])

    layer.register_forward_hook(record)
    hf.base_model.get_image_features(**processor.tensors([image]))
    matrix = next(p for p in layer.parameters() if p.ndim > 1)
    counted = images.image_matrices(hf, processor)[matrix] * num_tokens
    assert counted in (sum(rows), sum(rows) - 1)


@pytest.mark.parametrize("scaling", [None, 0.3])
def test_attention_within_windows_has_the_scaling_of_the_tower(scaling):
    q, k, v = torch.randn(3, 1, 2, 8, 4)  # [1, heads, T, dim] each
    boundaries = [0, 5, 8]
    cu_seqlens = torch.tensor(boundaries, dtype=torch.int32)
    attended, _ = windows_attention(
        None, q, k, v, None, cu_seq_lens_q=cu_seqlens, max_length_q=5, scaling=scaling
    )
    by_window = []
    for start, end in itertools.pairwise(boundaries):
        parts = [x[:, :, start:end] for x in (q, k, v)]
        by_window.append(F.scaled_dot_product_attention(*parts, scale=scaling))
    torch.testing.assert_close(attended, torch.cat(by_window, 2).transpose(1, 2))


def test_patches_are_multiplied_and_whole_images_convolved():
    kinds = [
        (nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4), bias=False), (5, 3, 2, 4, 4)),
        (nn.Conv2d(3, 8, 4, 4, padding="valid"), (5, 3, 4, 4)),
        (nn.Conv2d(3, 8, 4, 4), (2, 3, 8, 12)),
        (nn.Conv2d(3, 8, 3, padding=1), (2, 3, 3, 3)),
    ]
    for conv, shape in kinds:
        x = torch.randn(shape)
        expected = conv(x)
        images.replace_patch_convolutions(nn.ModuleList([conv]))
        result = conv(x)
        assert torch.allclose(result, expected, atol=1e-6)
        assert result.shape == expected.shape
        # The backward function tells whether it was a convolution.
        is_whole_image = shape[0] == 2
        assert ("Convolution" in result.grad_fn.name()) is is_whole_image


@pytest.mark.slow
@pytest.mark.parametrize("world, name", ALL_CASES)
def test_exports_are_whole_models(results, folder, world, name):
    family = CASES[world][name].family
    result = results(world)[name]
    _, _, expected = plain_training(folder, family, masks_of(result), name == "frozen")
    model = plain(folder / f"{world} {name}").eval()
    before = dict(plain(folder / family).named_parameters())
    after = dict(model.named_parameters())
    # Without rotation a softmax does not see the bias of keys: Adam makes steps of the rounding
    # errors in its gradient.
    compared = [n for n in expected if not ("vision_tower" in n and n.endswith("k_proj.bias"))]
    assert len(compared) > 30
    for n in compared:
        change = (expected[n] - before[n]).norm()
        assert (after[n] - expected[n]).norm() <= 1e-3 * change, n
    moved = [n for n in expected if is_in_tower(n) and not torch.equal(after[n], before[n])]
    if name == "frozen":
        assert not moved
    else:
        assert len(moved) > 15
    stored = load_file(folder / f"{world} {name}.safetensors")["log_probs"]
    rows = plain_rows(folder, family)
    log_probs_of_rows = stored.split(result["lengths"])
    with torch.no_grad():
        for row, mask, log_probs in zip(rows, masks_of(result), log_probs_of_rows, strict=True):
            expected_log_probs = plain_log_probs(model, row) * torch.tensor(mask)[1:]
            assert (expected_log_probs - log_probs[1:]).abs().max() < 1e-5
    assert (folder / f"{world} {name}" / "processor_config.json").exists()


@pytest.mark.slow
def test_attention_to_both_sides_is_found_where_packed_sequences_have_none(results):
    assert "set engine.use_remove_padding=false" in results(1)["gemma3"]["error"]


# -- rows ------------------------------------------------------------------------------------------


def options(**changes):
    return SimpleNamespace(
        **dict(
            messages_key="messages",
            prompt_key="prompt",
            response_key="response",
            images_key="images",
            tools_key="tools",
            num_proc=None,
            template_kwargs_key="chat_template_kwargs",
            system_key="system",
            lost_fields="error",
            ignored_fields=[],
            system_prompt=None,
            teacher_prompt_key=None,
            train_on="all",
            max_length=200,
            max_prompt_length=200,
            truncation="error",
            special_tokens_in_text=None,
        )
        | changes
    )


@pytest.fixture(scope="module")
def processor(folder):
    return Processor(folder / "qwen2_5_vl")


@pytest.fixture
def make(folder, processor, tmp_path):
    """Return a function: make(rows, option=value, ...) -> the dataset of these rows."""

    def make(rows, kind=TokenDataset, processor=processor, **changes):
        (folder / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        write = tokenize if kind is TokenDataset else tokenize_prompts
        path = write(
            str(folder / "some.jsonl"),
            AutoTokenizer.from_pretrained(folder / "qwen2_5_vl"),
            options(**changes),
            tmp_path / "cache",
            folder / "qwen2_5_vl",
            processor,
        )
        return kind.load(path, processor)

    return make


def row(text="<image>", images=("0.png",), **more):
    return {"messages": chat(text, "a"), "images": list(images), **more}


TEXT = {"type": "text", "text": "b"}
LITERAL = 'a text contains <image>, but the row has no image in "images"'


@pytest.mark.slow
@pytest.mark.parametrize(
    "bad, message",
    [
        (
            row("<image><image>", ["0.png", "1.png"]),
            "writes nothing between two images, so the model could not tell them apart",
        ),
        (
            row("which tag?", messages=chat("which tag?", "the <image> tag")),
            "learned contains an image, which no model can generate",
        ),
        (row("<image> <video>"), "a text contains the placeholder of an image or a video"),
        (row(images=["small.png"]), "of 9 x 3 pixels is too small"),
        (row(images=["long.png"]), "rejects an image of 2000 x 5 pixels: absolute aspect ratio"),
        (
            {"messages": chat([{"type": "text", "text": "a", "image": "0.png"}], "a")},
            "contains both text and an image",
        ),
        (row(images=["no.png"]), "no.png cannot be read: .*No such file"),
        (row(images=["rows.jsonl"]), "rows.jsonl cannot be read: cannot identify"),
        (row(images=["https://a.b/c.png"]), "c.png is a remote image: download it"),
        (row(images=["data:image/png;base64,%%%"]), "an image's base64 cannot be decoded"),
        (
            row("<image> <image>"),
            'the messages refer to at least 2 images of the column "images", which has 1',
        ),
        (
            row("<image>", ["0.png", "1.png"]),
            '"images" has 2 images, but the messages use only 1 of them',
        ),
        (
            row([{"type": "image", "image": "0.png"}]),
            'the messages contain 1 images, and the column "images" contains 1 more',
        ),
        (
            {"messages": chat("say <image>", "a")},
            "the row has no image, but a text contains an image placeholder",
        ),
        (
            {
                "messages": chat(
                    [{"type": "image", "image": "0.png"}, {"type": "text", "text": "<image>"}], "a"
                )
            },
            LITERAL,
        ),
        (
            row([{"type": "video", "video": "a.mp4"}], []),
            "a part of a message is of type video: videos and audio are not supported",
        ),
        (
            row(
                [
                    {"type": "text", "text": "a"},
                    {"type": "input_audio", "input_audio": {"data": "x"}},
                ],
                [],
            ),
            "is of type input_audio:",
        ),
        (
            {"messages": chat([{"type": "image_path", "image_path": "0.png"}, TEXT], "a")},
            "the chat template leaves out a part of message 0, {'type': 'image_path'",
        ),
        (
            {"messages": chat([TEXT, {"type": "input_image", "file_id": "x"}], "a")},
            "leaves out a part of message 0, {'type': 'input_",
        ),
        ({"messages": chat([TEXT, {"text": 5}], "a")}, "{'text': 5}, is neither text"),
        (
            {"messages": chat([{"type": "image", "image": "0.png", "max_pixels": 9}], "a")},
            'the key "max_pixels", which is not supported',
        ),
        (
            {
                "messages": chat(
                    [{"type": "image_url", "image_url": {"url": "0.png", "detail": "low"}}], "a"
                )
            },
            'the key "detail"',
        ),
        (
            {"messages": chat([{"type": "image", "source": {"type": "base64", "data": "x"}}], "a")},
            'the key "source"',
        ),
        ({"messages": chat([TEXT, 5], "a")}, "a part of a message, 5, is neither text nor"),
        (row([{"type": "image", "index": 1}]), 'has index 1, but "images" has 1 images'),
        (row([{"type": "image", "index": 0, "image": "0.png"}]), "both an image and an index"),
        (
            row([{"type": "image", "index": 0}] * 2, ["0.png", "1.png"]),
            '"images" has 2 images, but the messages use only 1 of them',
        ),
        *[
            (row(images=[empty]), "an image is empty: set it to a path")
            for empty in (None, {}, "", "data:image/png;base64,")
        ],
        (
            row(images=["deep.png"]),
            "cannot be read: its mode is I;16: save it with 8 bits per channel",
        ),
        (
            row(images=["float.tiff"]),
            "cannot be read: its mode is F: save it with 8 bits per channel",
        ),
        (
            {
                "messages": [
                    {"role": "system", "content": "s <image>"},
                    *chat([{"type": "image", "image": "0.png"}], "a"),
                ]
            },
            LITERAL,
        ),
        (
            {
                "messages": chat(
                    [{"type": "image", "image": "0.png"}, {"type": "text", "text": "b <image>"}],
                    "a",
                )
            },
            LITERAL,
        ),
        (
            row("<image>", images=[]) | {"images": "[0].png"},
            "\\[0\\].png cannot be read: .*No such file",
        ),
        (
            row("<image>" + "long " * 50),
            "rows are longer than data.max_length=200",
        ),
    ],
)
def test_bad_images_are_errors_of_their_rows(make, bad, message):
    with pytest.raises(InputError, match=message) as error:
        make([row(), bad])
    assert "some.jsonl:2" in str(error.value)


def test_images_need_a_model_of_images(make, folder):
    with pytest.raises(
        InputError, match=r"some.jsonl:1: the row has images: set model.images=true"
    ):
        make([row()], processor=None)
    assert len(make([{"messages": chat("no", "a")}], processor=None)) == 1
    with pytest.raises(InputError, match=r"some.jsonl:1: a part of a message is of type audio_url"):
        make(
            [
                {
                    "messages": chat(
                        [
                            {"type": "audio_url", "audio_url": {"url": "a.wav"}},
                            {"type": "text", "text": "b"},
                        ],
                        "a",
                    )
                }
            ],
            processor=None,
        )
    with pytest.raises(
        InputError,
        match="data.drop_processor_keys names pixels; Qwen2_5_VLProcessor returns image_grid_thw",
    ):
        Processor(folder / "qwen2_5_vl", dropped=["pixels"])
    with pytest.raises(InputError, match="data.drop_processor_keys names input_ids; "):
        Processor(folder / "qwen2_5_vl", dropped=["input_ids"])
    for key in ("pixel_values", "image_grid_thw"):
        with pytest.raises(
            InputError,
            match=f"data.drop_processor_keys names {key}, which the model needs",
        ):
            Processor(folder / "qwen2_5_vl", dropped=[key])
    make_model(folder / "text", "qwen2_tied")
    with pytest.raises(
        InputError, match="reads no images: transformers has no processor for model_type=qwen2"
    ):
        Processor(folder / "text")


@pytest.mark.parametrize(
    "truncation, text, num_rows, num_dropped",
    [
        ("left", "<image>" + "long " * 50, 1, 1),
        ("left", "long " * 50 + "<image>", 2, 0),
        ("drop", "<image>" + "long " * 50, 1, 0),
    ],
)
def test_truncation_never_cuts_an_image(make, truncation, text, num_rows, num_dropped):
    train = make([row(text), row()], truncation=truncation, max_length=150)
    assert len(train) == num_rows
    assert train.stats["dropped_images"] == num_dropped
    assert train.stats["dropped_no_loss"] == 0
    assert train.stats["images"] == num_rows


@pytest.mark.parametrize(
    "truncation, text, is_kept",
    [
        ("left", "long " * 50 + "<image> end", True),
        ("right", "start <image>" + "long " * 50, True),
        ("left", "<image>" + "long " * 50, False),
        ("right", "long " * 50 + "<image>", False),
    ],
)
def test_truncation_of_a_prompt_never_cuts_an_image(make, processor, truncation, text, is_kept):
    """vLLM gets the remaining prompt with one placeholder, and expands it to the same tokens."""
    prompts = make([row(text), row()], PromptDataset, truncation=truncation, max_prompt_length=150)
    assert len(prompts) == 1 + is_kept
    assert prompts.stats["dropped_images"] == 1 - is_kept
    if is_kept:
        prompt = prompts[0]
        assert len(prompt.input_ids) == 150
        before = processor.hf_processor.tokenizer.decode(prompt.before_images)
        assert processor.expand(before, prompt.images).tokens.ids == prompt.input_ids
        assert prompt.text == before


@pytest.mark.parametrize("kind", [TokenDataset, PromptDataset])
@pytest.mark.parametrize("text", ["<image>", "<image>" + "long " * 50])
def test_an_image_that_changes_is_read_anew(make, folder, capsys, kind, text):
    """Even the image of a row that truncation has dropped, and with a file of the same size."""
    rows = [row(text, images=["new.bmp"]), row()]
    options = {"truncation": "left", "max_length": 150, "max_prompt_length": 150}
    file = folder / "new.bmp"
    Image.new("RGB", (28, 28), "red").save(file)
    num_bytes = file.stat().st_size
    before = make(rows, kind, **options)
    Image.new("RGB", (28, 28), "blue").save(file)
    assert file.stat().st_size == num_bytes
    after = make(rows, kind, **options)
    assert "files that it was made from have changed" in capsys.readouterr().out
    if text != "<image>":
        return
    assert first_pixel(before) == [255, 0, 0]
    assert first_pixel(after) == [0, 0, 255]


def first_pixel(dataset):
    image = dataset.image_store.images[0][0]
    return image[0, 0].tolist()


def test_keys_that_are_left_out_are_part_of_the_caches_name(make, folder, tmp_path):
    for dropped in ([], ["token_type_ids"]):
        make([row()], processor=Processor(folder / "gemma3", dropped=dropped))
    assert len([*(tmp_path / "cache").iterdir()]) == 2


def test_batches_carry_images_along(make):
    batch = make(
        [row(images=["0.png"]), row("none", []), row("<image> <image>", ["1.png", "2.png"])]
    ).batch([0, 1, 2])
    shapes = [image.shape for image in batch.images]
    assert [image.shape for image in batch.select([2, 0]).images] == [*shapes[1:], shapes[0]]
    assert [image.shape for image in Batch.concat([batch.select([2]), batch]).images] == [
        *shapes[1:],
        *shapes,
    ]
    assert [len(part.images) for part in batch.split([1, 2])] == [1, 2]


def test_prompts_have_their_images_and_rewards_their_paths(make, processor):
    prompts = make(
        [{"prompt": "which <image>", "images": ["0.png"], "answer": "red"}], PromptDataset
    )
    prompt = prompts[0]
    assert prompt.row == {"prompt": "which <image>", "images": ["0.png"], "answer": "red"}
    assert prompt.text == "<|im_start|>user\nwhich <image><|im_end|>\n<|im_start|>assistant\n"
    placeholder = processor.hf_processor.image_token_id
    assert prompt.before_images.count(placeholder) == 1
    assert prompt.input_ids.count(placeholder) > 1
    assert [image.shape for image in prompt.images] == [
        image.shape for image in prompts.image_store.images[0]
    ]


def test_an_image_of_the_reply_is_not_in_the_prompt(make, shades):
    rows = [
        {"messages": chat("q", "see <image>"), "images": ["10.png"]},
        {"messages": chat("<image> q", "see <image>"), "images": ["10.png", "200.png"]},
    ]
    prompts = make(rows, PromptDataset)
    assert colours_of(prompts) == [[], [10]]
    assert prompts[0].text == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


def test_rewards_get_no_pixels(make, folder):
    pixels = base64.b64encode((folder / "0.png").read_bytes()).decode()
    url = f"data:image/png;base64,{pixels}"
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "and"},
        {"type": "image", "base64": pixels},
        {"type": "text", "text": "data: text"},
        {"type": "image", "image": "0.png"},
    ]
    rows = [
        {"messages": [{"role": "user", "content": parts}]},
        row("<image> <image>", [url, "0.png"]),
        row("<image> <image>") | {"images": json.dumps(["0.png", url])},
    ]
    in_parts, listed, as_text = [
        prompt.row for prompt in make(rows, PromptDataset, max_prompt_length=500)
    ]
    assert [part.get("text", part) for part in in_parts["messages"][0]["content"]] == [
        {"type": "image_url", "image_url": {"url": None}},
        "and",
        {"type": "image", "base64": None},
        "data: text",
        parts[-1],
    ]
    assert listed["images"] == [None, "0.png"]
    assert json.loads(as_text["images"]) == ["0.png", None]


@pytest.mark.parametrize(
    "more, message",
    [
        ("engine.context_parallel_size=2", "context_parallel_size=2 is not supported with model"),
        ("model.lora.rank=4", "model.lora.rank=4 is not supported with model.images"),
        ("model_engine=megatron", "model.images=true needs model_engine=fsdp"),
    ],
)
def test_settings_that_exclude_images(folder, more, message):
    config = load(
        "sft.yaml",
        [f"model.path={folder / 'qwen2_5_vl'}", "data.train_files=x", "model.images=true", more],
    )
    with pytest.raises(InputError, match=message):
        engine_class(config.model_engine).check(config, 2)


def test_keys_that_would_not_reach_the_model_are_an_error(folder, monkeypatch):
    """A processor that returns a key only for text and images together."""
    call = Qwen2_5_VLProcessor.__call__

    def call_with_mask(self, images=None, text=None, **options):
        output = call(self, images=images, text=text, **options)
        mask = {"mask": [[1, 0]]} if text else {}
        return type(output)({**output, **mask})

    monkeypatch.setattr(Qwen2_5_VLProcessor, "__call__", call_with_mask)
    with pytest.raises(
        InputError,
        match=r"returns mask only for images together with text.*drop_processor_keys=\[mask\]",
    ):
        Processor(folder / "qwen2_5_vl")
    assert Processor(folder / "qwen2_5_vl", dropped=["mask"]).token_type_keys == [
        "mm_token_type_ids"
    ]


def test_types_that_depend_on_more_than_the_tokens_are_an_error_unless_dropped(folder, monkeypatch):
    call = Qwen2_5_VLProcessor.__call__

    def call_with_positions(self, images=None, text=None, **options):
        output = call(self, images=images, text=text, **options)
        positions = {"positions": [[*range(len(output["input_ids"][0]))]]} if text else {}
        return type(output)({**output, **positions})

    monkeypatch.setattr(Qwen2_5_VLProcessor, "__call__", call_with_positions)
    with pytest.raises(InputError, match=r"returns positions, which .*_keys=\[positions\]"):
        Processor(folder / "qwen2_5_vl")
    processor = Processor(folder / "qwen2_5_vl", dropped=["positions"])
    assert processor.token_type_keys == ["mm_token_type_ids"]
    assert not Processor(folder / "gemma3", dropped=["token_type_ids"]).token_type_keys


def test_the_tower_keeps_activations_only_in_training(folder):
    config = load(
        "sft.yaml",
        [f"model.path={folder / 'qwen2_5_vl'}", "data.train_files=x", "model.images=true"],
    )
    estimate = engine_class(config.model_engine).estimate_memory
    (trained,) = estimate(config, 1, "cpu")
    (reference,) = estimate(config, 1, "cpu", is_trained=False)
    assert trained.image_activations > 0
    assert reference.image_activations == 0


def test_token_types_that_a_model_needs_cannot_be_dropped(folder):
    """Qwen2.5-VL's position ids need mm_token_type_ids; LLaVA has none, and Gemma 3 others."""
    config = AutoConfig.from_pretrained(folder / "qwen2_5_vl")
    kind = auto_class(config)
    images.Images(kind.from_config(config), Processor(folder / "qwen2_5_vl"))
    with pytest.raises(
        InputError, match="needs mm_token_type_ids: remove it from data.drop_processor_keys"
    ):
        images.Images(
            kind.from_config(config),
            Processor(folder / "qwen2_5_vl", dropped=["mm_token_type_ids"]),
        )
    assert Processor(folder / "llava").token_type_keys == []
    assert Processor(folder / "gemma3").token_type_keys == ["token_type_ids"]
    assert Processor(folder / "gemma3", dropped=["token_type_ids"]).token_type_keys == []


@pytest.mark.parametrize(
    "changes, is_equivalent",
    [
        ({}, True),
        ({"image_mean": [0.1, 0.2, 0.3]}, False),
        ({"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28}}, False),
    ],
)
def test_processors_are_equivalent_if_they_make_the_same_tokens_and_pixels(
    folder, tmp_path, changes, is_equivalent
):
    processor = Processor(folder / "qwen2_5_vl")
    shutil.copytree(folder / "qwen2_5_vl", tmp_path / "other")
    settings_file = tmp_path / "other" / "preprocessor_config.json"
    settings = json.loads(settings_file.read_text())
    settings_file.write_text(json.dumps(settings | changes))
    other = Processor(tmp_path / "other")
    assert processor.is_equivalent(other) == is_equivalent
    assert other.is_equivalent(processor) == is_equivalent


@pytest.mark.parametrize(
    "key",
    [
        pytest.param("critic.path", marks=pytest.mark.slow),
        pytest.param("reference.path", marks=pytest.mark.slow),
        "algorithm.distill.teacher",
    ],
)
def test_all_models_of_a_run_have_the_same_tokens_for_an_image(folder, tmp_path, key):
    """Processors of another family, with a smaller limit of pixels, or with another mean differ."""
    smaller = make_image_model(tmp_path / "smaller", "qwen2_5_vl")
    settings = json.loads((smaller / "preprocessor_config.json").read_text())
    settings["size"]["longest_edge"] //= 2
    (smaller / "preprocessor_config.json").write_text(json.dumps(settings))

    def load_with(path):
        config = load(
            "ppo.yaml",
            [
                f"model.path={folder / 'qwen2_5_vl'}",
                "data.train_files=x",
                "model.images=true",
                f"{key}={path}",
            ],
        )
        return load_processor(config, AutoTokenizer.from_pretrained(folder / "qwen2_5_vl"))

    other = make_image_model(tmp_path / "other", "qwen2_5_vl")
    settings = json.loads((other / "preprocessor_config.json").read_text()) | {
        "image_mean": [0.1, 0.2, 0.3]
    }
    (other / "preprocessor_config.json").write_text(json.dumps(settings))
    for path in (folder / "gemma3", folder / "llava", smaller, other):
        with pytest.raises(
            InputError, match=f"{key}={path} processes images differently from model.path="
        ):
            load_with(path)
    assert load_with(make_image_model(tmp_path / "same", "qwen2_5_vl")).image_token == "<image>"


@pytest.mark.parametrize(
    "family, dtype",
    [
        ("qwen2_5_vl", torch.float32),
        ("qwen2_5_vl", torch.bfloat16),
        ("qwen3_vl", torch.bfloat16),
        ("llava", torch.float32),
    ],
)
def test_activations_of_images_are_estimated(folder, family, dtype):
    """Within a tenth of the storages that autograd keeps, without weights.

    With recomputation the estimate also includes what one layer takes.
    """
    shape = AutoConfig.from_pretrained(folder / family)
    processor = Processor(folder / family)
    image = np.random.RandomState(0).randint(0, 256, (224, 224, 3)).astype(np.uint8)
    inputs = {}
    for name, x in processor.tensors([image]).items():
        inputs[name] = x.to(dtype) if x.is_floating_point() else x
    num_tokens = sum(processor.expand(processor.image_token, [image]).is_image_token)

    def estimate_and_measure(frozen="nothing", checkpointing=False):
        """Return bytes per image token: estimated and measured."""
        hf = auto_class(shape).from_config(shape, dtype=dtype).train()
        kept = {}
        if checkpointing:
            hf.gradient_checkpointing_enable({"use_reentrant": False})
        for name, p in hf.named_parameters():
            p.requires_grad_(not re.search(frozen, name))
        weights = {p.untyped_storage().data_ptr() for p in hf.parameters()}

        def note(x):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            hf.base_model.get_image_features(**inputs)
        measured = sum(x.nbytes() for pointer, x in kept.items() if pointer not in weights)
        estimated = images.kept_bytes_per_token(hf, processor, dtype.itemsize, checkpointing)
        return estimated, measured / num_tokens

    estimated, whole = estimate_and_measure()
    assert estimated == pytest.approx(whole, rel=0.1)
    estimated, measured = estimate_and_measure(checkpointing=True)
    assert measured < estimated < 1.3 * measured < whole
    assert estimate_and_measure("visual|vision_tower|projector") == (0, 0)


class RecordedImages(list):
    """Images of rows, and in `read` the rows that have been read."""

    def __init__(self, rows):
        super().__init__(rows)
        self.read = []

    def __getitem__(self, row):
        self.read.append(row)
        return super().__getitem__(row)


def test_a_thread_prepares_the_next_micro_batch(make, folder):
    """Of one micro-batch at most, to the same bits; an error in the thread ends the step."""
    batch = make([row(images=[f"{i}.png"]) for i in range(4)]).batch(range(4))
    config = AutoConfig.from_pretrained(folder / "qwen2_5_vl")
    hf = auto_class(config).from_config(config)
    model_images = images.Images(hf, batch.image_store.processor)
    recorded = RecordedImages(batch.image_store.images)
    batch = dataclasses.replace(
        batch, image_store=ImageStore(recorded, batch.image_store.processor)
    )
    micro_batches = batch.split([1] * 4)
    prepared = model_images.prefetch_inputs(iter(micro_batches), packed=True)
    inputs_of_micro_batches = [next(prepared)[1]]
    deadline = time.monotonic() + 30
    while 1 not in recorded.read and time.monotonic() < deadline:
        time.sleep(0.01)
    assert recorded.read == [0, 1], "the second is prepared while the first is computed"
    inputs_of_micro_batches += [inputs for _, inputs in prepared]
    for micro_batch, inputs in zip(micro_batches, inputs_of_micro_batches, strict=True):
        expected = model_images.inputs(micro_batch, micro_batch.images, packed=True)
        assert inputs.keys() == expected.keys()
        for name in expected:
            assert torch.equal(inputs[name], expected[name]), name
    recorded[2] = [np.zeros((4, 2000, 3), np.uint8)]
    with pytest.raises(ValueError, match="aspect ratio"):
        list(model_images.prefetch_inputs(micro_batches, packed=True))


def test_positions_count_from_the_beginning_of_each_sequence(folder):
    """LLaVA's positions have one axis. Without images, its filler is a third sequence."""
    config = AutoConfig.from_pretrained(folder / "llava")
    hf = auto_class(config).from_config(config)
    model_images = images.Images(hf, Processor(folder / "llava"))
    assert not model_images.get_position_ids
    batch = Batch(torch.arange(10, 15), torch.tensor([0, 2, 5]))
    padded = model_images.inputs(batch, [], packed=False)["position_ids"]
    assert padded.tolist() == [[*range(padded.shape[1])]] * 3
    packed = model_images.inputs(batch, [], packed=True)["position_ids"]
    assert packed.tolist() == [[0, 1, 0, 1, 2, *range(len(model_images.filler))]]


def test_a_dry_run_counts_activations_of_images(folder):
    config = load(
        "sft.yaml",
        [
            f"model.path={folder / 'qwen2_5_vl'}",
            "data.train_files=x",
            "model.images=true",
            "data.max_tokens_per_micro_batch=1000",
            "engine.compute_dtype=float32",
        ],
    )
    kept = images.kept_bytes_per_token(
        build_model(config, Head.LOG_PROBS)[0],
        Processor(folder / "qwen2_5_vl"),
        4,
        config.engine.activation_checkpointing,
    )
    gib_of_roles = [
        estimate_gib(config, 1, "cpu", role)[0]["activations of images"]
        for role in ("actor", "reference")
    ]
    assert kept > 0
    assert gib_of_roles == pytest.approx([1000 * kept / 2**30, 0])


# -- reinforcement learning ------------------------------------------------------------------------


@pytest.mark.slow
def test_ppo_sees_what_vllm_sees(tmp_path):
    """Two steps with a critic on two ranks.

    vLLM's log-probabilities are the trainer's before and after an update of the tower, and the
    tower learns. The samples that a step records have no pixels.
    """
    run([sys.executable, "examples/colours.py", "build", tmp_path])
    (tmp_path / "reward.py").write_text(
        "def odd(prompt, response, row):\n    return float(len(response) % 2)\n"
    )
    settings = [
        "configs/demo/vlm.yaml",
        f"model.path={tmp_path / 'model'}",
        f"critic.path={tmp_path / 'model'}",
        f"data.train_files={tmp_path / 'train.jsonl'}",
        "data.val_files=null",
        "validation.max_tokens=null",
        "trainer.test_freq=-1",
        f"data.cache_dir={tmp_path / 'cache'}",
        f"output_dir={tmp_path / 'out'}",
        "trainer.report=false",
        "algorithm.adv_estimator=gae",
        "data.train_batch_size=8",
        "rollout.n=2",
        "trainer.total_steps=2",
        f"reward.function={tmp_path / 'reward.py'}:odd",
    ]
    launch(2, "train_ppo.py", *settings)
    steps = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    gaps = [
        step["rollout_corr/log_prob_gap"] for step in steps if "rollout_corr/log_prob_gap" in step
    ]
    assert len(gaps) == 2
    assert max(gaps) < 1e-5
    before = load_file(tmp_path / "model" / "model.safetensors")
    after = load_file(tmp_path / "out/hf" / "model.safetensors")
    tower = [name for name in before if name.startswith("visual.")]
    assert len(tower) > 20
    for name in tower:
        if "mlp" in name:
            assert not torch.equal(before[name], after[name]), name
    line = json.loads(next((tmp_path / "out/rollouts").iterdir()).read_text().splitlines()[0])
    assert line["row"]["messages"][0]["content"][0]["image"].startswith("images/")


# -- forms of images -------------------------------------------------------------------------------


def colours_of(dataset):
    """Return the mean of each image, by row."""
    colours = []
    for row in range(len(dataset)):
        colours.append([int(image.mean()) for image in dataset.image_store.images[row]])
    return colours


@pytest.fixture
def shades(folder):
    for shade in (10, 200):
        Image.new("RGB", (60, 90), (shade,) * 3).save(folder / f"{shade}.png")
    return folder


def test_the_same_rows_beside_other_images_are_another_dataset(shades, processor, tmp_path):
    colours = []
    for shade in (10, 200):
        (tmp_path / str(shade)).mkdir()
        Image.open(shades / f"{shade}.png").save(tmp_path / f"{shade}/a.png")
        (tmp_path / f"{shade}/rows.jsonl").write_text(json.dumps(row(images=["a.png"])) + "\n")
        path = tokenize(
            str(tmp_path / f"{shade}/rows.jsonl"),
            AutoTokenizer.from_pretrained(shades / "qwen2_5_vl"),
            options(),
            tmp_path / "cache",
            shades / "qwen2_5_vl",
            processor,
        )
        colours += colours_of(TokenDataset.load(path, processor))
    assert colours == [[10], [200]]


@pytest.mark.parametrize(
    "form",
    [
        lambda path: path.name,
        lambda path: {"path": path.name, "bytes": None},
        lambda path: {"url": path.name},
        lambda path: f"file://{path}",
    ],
)
def test_an_image_that_changes_is_read_again(shades, make, form):
    path = shades / "changing.png"
    colours = []
    for size, shade in ((60, 10), (61, 200)):
        Image.new("RGB", (size, 90), (shade,) * 3).save(path)
        colours += colours_of(make([row(images=[form(path)])]))
    assert colours == [[10], [200]]


def test_columns_of_images_stay_encoded(shades, processor, tmp_path):
    """Bytes come before the path, which is only a name.

    A bad image is an error of its row, and rewards get the path.
    """
    image = {"bytes": (shades / "200.png").read_bytes(), "path": "10.png"}
    rows = datasets.Dataset.from_dict(
        {"messages": [chat("<image>", "a")] * 2, "images": [[image], [image | {"bytes": b"no"}]]}
    )
    path = shades / "rows.parquet"
    tokenizer = AutoTokenizer.from_pretrained(shades / "qwen2_5_vl")

    def prompts(rows):
        pq.write_table(rows.data.table, path)
        written = tokenize_prompts(
            str(path), tokenizer, options(), tmp_path, shades / "qwen2_5_vl", processor
        )
        return PromptDataset.load(written, processor)

    typed_rows = rows.cast_column("images", datasets.List(datasets.Image()))
    for table in (rows, typed_rows):
        dataset = prompts(table.select([0]).flatten_indices())
        assert colours_of(dataset) == [[200]]
        assert dataset[0].row["images"] == [{"bytes": None, "path": "10.png"}]
    with pytest.raises(InputError, match="rows.parquet:2: an image of type bytes cannot be read"):
        prompts(typed_rows)


def test_a_cell_of_text_may_be_a_list_of_images(shades, processor, tmp_path):
    lists = [json.dumps(["10.png", "200.png"]), json.dumps([{"path": "200.png"}, "10.png"])]
    texts = ["<image> and <image>"] * 2
    colours = []
    with (shades / "cells.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("prompt", "response", "images"), *zip(texts, "ab", lists)])
    rows = {"prompt": texts, "response": ["a", "b"], "images": lists}
    datasets.Dataset.from_dict(rows).to_parquet(shades / "cells.parquet")
    for name in ("cells.csv", "cells.parquet"):
        path = tokenize(
            str(shades / name),
            AutoTokenizer.from_pretrained(shades / "qwen2_5_vl"),
            options(),
            tmp_path,
            shades / "qwen2_5_vl",
            processor,
        )
        colours.append(colours_of(TokenDataset.load(path, processor)))
    assert colours == [[[10, 200], [200, 10]]] * 2


def test_a_part_with_an_image_is_one_whatever_its_type(shades, make):
    parts = [
        {"image": "10.png"},
        "and a string",
        {"type": "input_image", "image_url": "200.png"},
        "beside",
        {"type": "image", "base64": base64.b64encode((shades / "10.png").read_bytes()).decode()},
    ]
    dataset = make(
        [
            {"messages": chat(parts, "a")},
            row([{"type": "text", "text": "<image>b"}], images=["10.png"]),
        ]
    )
    assert colours_of(dataset) == [[10, 200, 10], [10]]
    text = AutoTokenizer.from_pretrained(shades / "qwen2_5_vl").decode(dataset.batch([0]).input_ids)
    assert "and a string" in text


def test_contents_have_one_form(shades, make):
    """Strings and parts are the same, with images, without, and without a model that reads them."""
    parts = [
        ["hello ", "world"],
        [{"text": "hello "}, {"type": "input_text", "text": "world"}],
        "hello \nworld",
    ]
    rows = [{"messages": chat(content, "a")} for content in parts]
    for dataset in (make(rows), make(rows, processor=None)):
        ids = [dataset.batch([i]).input_ids.tolist() for i in range(3)]
        assert ids[0] == ids[1]
        assert question_of(ids[0], shades) in ("hello world", "hello \nworld")
    contents = [["look ", "at <image> now"], "look at <image> now"]
    with_images = make([row(content, ["10.png"]) for content in contents], max_length=500)
    ids = [with_images.batch([i]).input_ids.tolist() for i in range(2)]
    assert ids[0] == ids[1]
    assert question_of(ids[0], shades) == "look at <image> now"


def question_of(ids, folder):
    """Return the text of the user's turn, with one <image> for each image."""
    text = re.sub(
        "(<image>)+", "<image>", AutoTokenizer.from_pretrained(folder / "qwen2_5_vl").decode(ids)
    )
    return re.match(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", text, re.DOTALL)[1]


def test_a_column_of_images_without_a_mark_is_before_the_users_first_text(shades, make):
    system = [{"role": "system", "content": "s"}]
    dataset = make(
        [
            {"messages": [*system, *chat("look", "a")], "images": ["200.png"]},
            {"messages": chat("q", "a"), "images": "10.png"},
            {"prompt": "q", "response": "a", "images": ["200.png"]},
        ]
    )
    assert colours_of(dataset) == [[200], [10], [200]]
    tokenizer = AutoTokenizer.from_pretrained(shades / "qwen2_5_vl")
    users = []
    for i in range(3):
        text = re.sub("(<image>)+", "<image>", tokenizer.decode(dataset.batch([i]).input_ids))
        users.append(re.search(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", text)[1])
    assert users == ["<image>look", "<image>q", "<image>q"]


def test_tokens_of_images_become_tokens_of_text(make, processor):
    ids = make([row("which <image>")]).batch([0]).input_ids
    placeholder = processor.hf_processor.image_token_id
    assert (ids == placeholder).sum() > 1
    replaced = processor.without_images(ids)
    assert not (replaced == placeholder).any()
    kept = ids != placeholder
    assert replaced[kept].tolist() == ids[kept].tolist()
    assert set(replaced[~kept].tolist()) == {int(ids[0])}


def test_keys_that_the_model_needs_or_the_processor_lacks_cannot_be_dropped(folder):
    with pytest.raises(InputError, match="names pixel_values, which the model needs"):
        Processor(folder / "qwen2_5_vl", dropped=["pixel_values"])
    with pytest.raises(InputError, match="names unknown; Qwen2_5_VLProcessor returns .*pixel"):
        Processor(folder / "qwen2_5_vl", dropped=["unknown"])


def test_the_processor_gets_the_tokenizer_of_the_run(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "qwen2_5_vl")
    assert load_hf_processor(folder / "qwen2_5_vl", tokenizer).tokenizer is tokenizer
    assert load_hf_processor(folder / "qwen2_5_vl").tokenizer is not tokenizer


def test_a_large_image_is_stored_as_small_as_the_model_sees_it(processor):
    """With the same tensors; a small image that would be enlarged stays as it is."""
    random = np.random.RandomState(1)
    large = random.randint(0, 256, (900, 600, 3)).astype(np.uint8)
    small = processor.resized(large)
    assert small.size < large.size
    assert small.dtype == np.uint8
    expected = processor.tensors([large])
    tensors = processor.tensors([small])
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[key], expected[key]) for key in expected)
    tiny = random.randint(0, 256, (9, 8, 3)).astype(np.uint8)
    assert processor.resized(tiny).tolist() == tiny.tolist()


def test_an_image_is_stored_whole_if_its_tensors_would_differ(folder):
    """As with a processor that darkens what it resizes: the stored image would be darker still."""
    processor = Processor(folder / "qwen2_5_vl")
    image_processor = processor.hf_processor.image_processor

    class Darkening(type(image_processor)):
        def resize(self, *args, **options):
            return super().resize(*args, **options) // 2

    image_processor.__class__ = Darkening
    large = np.random.RandomState(1).randint(0, 256, (900, 600, 3)).astype(np.uint8)
    assert processor.resized(large) is large


@pytest.mark.parametrize(
    "offset, overlaps",
    [((0, 3), False), ((0, 4), True), ((4, 5), True), ((5, 6), False), ((0, 6), True)],
)
def test_a_token_is_of_an_image_if_it_overlaps_the_images_text(offset, overlaps):
    assert overlaps_any(offset, [(3, 5), (8, 9)]) == overlaps
    assert not overlaps_any(offset, [])


def test_an_image_may_be_given_in_many_ways(shades, make):
    encoded = base64.encodebytes((shades / "200.png").read_bytes()).decode()
    dataset = make(
        [
            row("<image>", [f"DATA:image/png;base64,{encoded}"]),
            row("<image>", [{"bytes": "", "path": "10.png"}]),
            row(
                [
                    {"type": "image", "index": 1},
                    {"type": "text", "text": "before"},
                    {"type": "image", "index": 0},
                ],
                ["10.png", "200.png"],
            ),
        ]
    )
    assert "\n" in encoded
    assert colours_of(dataset) == [[200], [10], [200, 10]]


def test_a_row_that_would_end_with_an_image_is_dropped(make):
    rows = [
        {"messages": [*chat("a", "b"), *chat("<image>c", "d")], "images": ["0.png"]},
        {"messages": chat("a", "b")},
    ]
    ids = make(rows).batch([0]).input_ids.tolist()
    end = max(i for i, token in enumerate(ids) if token == 258) + 1
    assert make(rows, max_length=end, truncation="right").stats["dropped_images"] == 1
    assert make(rows, max_length=end + 1, truncation="right").stats["dropped_images"] == 0


def test_a_template_that_moves_images_is_refused(folder, processor, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folder / "qwen2_5_vl")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "in m.content %}", "in m.content|reverse %}"
    )
    (folder / "moved.jsonl").write_text(
        json.dumps(row("<image>a<image>", images=["0.png", "1.png"])) + "\n"
    )
    with pytest.raises(InputError, match="changes the order of the images"):
        tokenize(
            str(folder / "moved.jsonl"),
            tokenizer,
            options(),
            tmp_path,
            folder / "qwen2_5_vl",
            processor,
        )


def test_images_are_numbered_in_order_and_texts_stay_as_they_are():
    numbers = itertools.count()
    message = {"role": "user", "content": "look"}
    assert number_images(message, numbers) is message
    with_images = {"role": "user", "content": [{"type": "image"}, TEXT, {"type": "image"}]}
    numbered = [{"type": "text", "text": f"<<{number}>>"} for number in range(2)]
    assert number_images(with_images, numbers) == {
        "role": "user",
        "content": [numbered[0], TEXT, numbered[1]],
    }


def test_images_without_a_chat_template_are_an_error(folder, processor, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folder / "qwen2_5_vl")
    tokenizer.chat_template = None
    (folder / "plain.jsonl").write_text(
        json.dumps({"prompt": "a", "response": "b", "images": ["0.png"]}) + "\n"
    )
    for write in (tokenize, tokenize_prompts):
        with pytest.raises(InputError, match="no chat template: set data.chat_template"):
            write(
                str(folder / "plain.jsonl"),
                tokenizer,
                options(),
                tmp_path,
                folder / "qwen2_5_vl",
                processor,
            )

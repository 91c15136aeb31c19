"""The images of a row: where they are, and how each of them is read."""

import base64
import io
import json
from pathlib import Path

import pytest
from PIL import Image

from config import InputError
from data.images.sources import IMAGE, place_images, read_image, source_of, without_pixels


def encoded(width: int = 6, height: int = 5, mode: str = "RGB", **saving) -> bytes:
    """Return the file of an image in one colour."""
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, "PNG", **saving)
    return file.getvalue()


PNG = encoded()
BASE64 = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{BASE64}"


def user(content) -> dict:
    return {"role": "user", "content": content}


def text(value: str) -> dict:
    return {"type": "text", "text": value}


SYSTEM = {"role": "system", "content": "s"}
# Messages, a column of images -> the contents of the messages, and the images.
PLACED = {
    "parts of their own": (
        [user([{"type": "image", "image": "a.png"}, text("q")])],
        None,
        ([[IMAGE, text("q")]], ["a.png"]),
    ),
    "marks in a text": (
        [user("x<image>y<image>")],
        ["a.png", "b.png"],
        ([[text("x"), IMAGE, text("y"), IMAGE]], ["a.png", "b.png"]),
    ),
    "a mark without a column": ([user("x<image>")], None, (["x<image>"], [])),
    "before the first text of the user": (
        [SYSTEM, user("q"), user("r")],
        "a.png",
        (["s", [IMAGE, text("q")], "r"], ["a.png"]),
    ),
    "without a user": ([SYSTEM], "a.png", ([[IMAGE, text("s")]], ["a.png"])),
    "a column as JSON": ([user("<image>")], '["a.png"]', ([[IMAGE]], ["a.png"])),
    "an empty cell": ([user("q")], "", (["q"], [])),
    "indices": (
        [user([{"type": "image", "index": 1}, {"type": "image", "index": 0}])],
        ["a.png", "b.png"],
        ([[IMAGE, IMAGE]], ["b.png", "a.png"]),
    ),
}


@pytest.mark.parametrize("what", PLACED)
def test_images_are_where_the_messages_or_the_column_say(what):
    messages, column, (contents, images) = PLACED[what]
    placed, sources = place_images(messages, column, "images")
    assert [message["content"] for message in placed] == contents
    assert sources == images
    assert [message["role"] for message in placed] == [message["role"] for message in messages]


OWN = {"type": "image", "image": "a.png"}
MISPLACED = {
    "images of both kinds": ([OWN], ["b.png"], "contain 1 images, and the column .* 1 more"),
    "too few": ("<image><image>", ["a.png"], "refer to at least 2 images .* which has 1"),
    "too many": ("<image>", ["a.png", "b.png"], "has 2 images, but the messages use only 1"),
    "an index beyond": ([{"type": "image", "index": 2}], ["a.png", "b.png"], "index 2, but .* 2 i"),
    "an index before": ([{"type": "image", "index": -1}], ["b.png"], "index -1, but .* 1 i"),
    "one index twice": (
        [{"type": "image", "index": 0}] * 2,
        ["a.png", "b.png"],
        "2 images, but the messages use only 1 of them",
    ),
    "an index and an image": ([OWN | {"index": 0}], ["b.png"], "both an image and an index"),
    "a text and an image": ([OWN | {"text": "q"}], None, "both text and an image"),
    "a video": ([{"type": "video", "video": "a.mp4"}], None, "is of type video: videos and audio"),
    "no text": ([{"type": "text"}], None, "is neither text nor an image"),
}


@pytest.mark.parametrize("what", MISPLACED)
def test_images_that_do_not_fit_the_messages_are_an_error(what):
    content, column, message = MISPLACED[what]
    with pytest.raises(InputError, match=message):
        place_images([user(content)], column, "images")


@pytest.mark.parametrize(
    "source",
    [
        PNG,
        URL,
        "a.png",
        "file://a.png",
        {"bytes": PNG, "path": "nowhere.png"},
        {"bytes": b"", "path": "a.png"},
        {"base64": BASE64[:20] + "\n" + BASE64[20:]},
        {"image_url": {"url": URL}},
        Image.new("L", (6, 5)),
    ],
    ids=range(9),
)
def test_an_image_is_read_in_every_form(tmp_path, source):
    (tmp_path / "a.png").write_bytes(PNG)
    image = read_image(source, tmp_path)
    assert image.size == (6, 5)
    assert image.mode == "RGB"


def test_an_image_is_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    assert read_image(encoded(exif=exif), Path()).size == (5, 6)


UNREADABLE = {
    "nothing": ("", "an image is empty"),
    "an empty dict": ({"path": None}, "an image is empty"),
    "a remote one": ("https://host/a.png", "is a remote image: download it"),
    "no file": ("nowhere.png", "nowhere.png cannot be read: No such file"),
    "other bytes": (b"text", "of type bytes cannot be read: cannot identify"),
    "16 bits": (encoded(mode="I;16"), "its mode is I;16: save it with 8 bits per channel"),
    "a small one": (encoded(width=3), "of 3 x 5 pixels is too small: use images with at least 4"),
    "no base64": ("data:image/png;base64,?", "an image's base64 cannot be decoded"),
    "another key": ({"path": "a.png", "size": 3}, 'an image has the key "size"'),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_an_image_that_cannot_be_read_is_an_error(tmp_path, what):
    source, message = UNREADABLE[what]
    with pytest.raises(InputError, match=message):
        read_image(source, tmp_path)
    assert read_image(encoded(4, 4), tmp_path).size == (4, 4)


def test_a_row_without_pixels_keeps_paths_and_texts():
    row = {
        "images": [{"bytes": PNG, "path": "a.png"}, "b.png", URL],
        "picture": Image.new("L", (6, 5)),
        "messages": [user([{"type": "image", "image": URL}, {"base64": BASE64}, text(BASE64)])],
        "answer": "data: none",
        "icons": [PNG],
    }
    assert without_pixels(row, "images") == {
        "images": [{"bytes": None, "path": "a.png"}, "b.png", None],
        "picture": None,
        "messages": [user([{"type": "image", "image": None}, {"base64": None}, text(BASE64)])],
        "answer": "data: none",
        "icons": [None],
    }
    as_json = {"images": json.dumps(["a.png", URL]), "answer": "1"}
    assert without_pixels(as_json, "images")["images"] == json.dumps(["a.png", None])
    with pytest.raises(InputError, match='the column "hash" has bytes .*no reward function could'):
        without_pixels({"hash": b"\x00\x01"}, "images")
    assert without_pixels({"images": b"\x00\x01"}, "images") == {"images": None}
    assert source_of({"image": {"path": None}}) is None

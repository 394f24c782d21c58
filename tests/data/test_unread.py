"""Images that cannot be read: all named at once, or left out; and the line that says what was read."""

import io
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from conftest import ROOT
from image_noise import SIZE, fails, tree, write_tar, write_zip
from PIL import Image
from refusals import find_line, raises_user_error

from uvit_decay.data import AugmentedImages, Images, reading
from uvit_decay.data.decoding import centre_crop, formats
from uvit_decay.data.listing import HEIF, describe_listing, list_extensions, list_images
from uvit_decay.data.reading import UNREAD, leave_out_unreadable

NAMES = [f"{kind}/{i}.jpg" for kind in ("cat", "dog") for i in range(6)]
DAMAGED = ("cat/1.jpg", "cat/4.jpg", "dog/5.jpg")


@pytest.fixture
def damaged(tmp_path):
    """Twelve images, of which two are cut short behind the header and one is empty, beside files of other kinds."""
    folder = tree(tmp_path / "my pictures", NAMES, size=64)
    for name in DAMAGED[:2]:
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: len(whole) // 2])
    (folder / DAMAGED[2]).write_bytes(b"")
    for name in ("cat/a.psd", "cat/b.PSD", "dog/notes.txt", "README", "dog/.hidden.psd"):
        (folder / name).write_bytes(b"not read")
    return folder


def loaded(path, kind=Images, **options):
    data = kind(str(path), image_size=SIZE, batch_size=2, **options)
    data.load()
    return data


@pytest.mark.parametrize("pack", [lambda folder, file: folder, write_tar, write_zip])
def test_other_files_are_counted_by_extension(damaged, tmp_path, pack):
    listing = list_images(pack(damaged, tmp_path / "packed"))
    assert dict(listing.others) == {".psd": 2, ".txt": 1, "": 1}
    text = describe_listing(listing, SIZE)
    find_line(text, "12 pictures", "2 classes", f"{SIZE}x{SIZE}", "not read", "2 .psd", "1 .txt", "no pictures")
    assert "damaged" not in text


@pytest.mark.parametrize("kind", [Images, AugmentedImages])
@pytest.mark.parametrize("options", [{}, {"holdout": 0.5}])
def test_a_set_in_memory_names_all_damaged_images_at_once(damaged, kind, options):
    with raises_user_error(damaged, "3 of 12", *DAMAGED, "`skip_unreadable`"):
        loaded(damaged, kind, **options)


@pytest.mark.parametrize("kind", [Images, AugmentedImages])
def test_a_set_on_disk_looks_at_headers_first_and_names_what_fails_later(damaged, kind):
    with raises_user_error(damaged, DAMAGED[2], "`skip_unreadable`") as caught:
        loaded(damaged, kind, memory_gb=0.0)
    assert DAMAGED[0] not in str(caught.value)
    (damaged / DAMAGED[2]).unlink()
    data = loaded(damaged, kind, memory_gb=0.0)
    with raises_user_error(damaged, "at least 1 of 11", DAMAGED[0]):
        _ = data.train[[0, 1]]


@pytest.mark.parametrize("memory_gb", [4.0, 0.0])
def test_damaged_images_are_left_out_on_request(damaged, tmp_path, memory_gb, caplog):
    data = Images(str(damaged), image_size=SIZE, batch_size=2, memory_gb=memory_gb, skip_unreadable=True)
    listed = tmp_path / "runs" / "version_0" / UNREAD
    data.find_run_folder = lambda: listed.parent
    with caplog.at_level("INFO"):
        data.load()
    find_line(caplog.messages, "9 pictures", "2 .psd", "3 damaged", listed)
    assert [line.partition(":")[0] for line in listed.read_text().splitlines()] == list(DAMAGED)
    for name in DAMAGED:
        (damaged / name).unlink()
    alone = loaded(damaged, memory_gb=memory_gb)
    assert data.fingerprint == alone.fingerprint
    everything = list(range(9))
    assert torch.equal(data.train.stored(everything), alone.train.stored(everything))
    assert data.train.labels.tolist() == alone.train.labels.tolist()


def test_images_are_decoded_once_for_the_list_until_a_file_changes(damaged, monkeypatch):
    whole = damaged / NAMES[0]
    decoded = []
    check = reading.check_image
    monkeypatch.setattr(
        reading, "check_image", lambda file, name, reading: decoded.append(name) or check(file, name, reading)
    )
    kept = [leave_out_unreadable(list_images(damaged)).members for _ in range(2)]
    assert (len(decoded), kept[0]) == (12, kept[1])
    content = io.BytesIO()
    Image.new("RGB", (99, 99)).save(content, "PNG")
    whole.write_bytes(content.getvalue()[:60])
    assert NAMES[0] not in leave_out_unreadable(list_images(damaged)).members
    assert len(decoded) == 24


@pytest.mark.parametrize("memory_gb", [4.0, 0.0])
def test_dark_sets_are_remarked_on(tmp_path, memory_gb, caplog):
    folder = tree(tmp_path / "pictures", NAMES)
    with caplog.at_level("INFO"):
        loaded(folder, memory_gb=memory_gb)
    assert not any("brighter" in line for line in caplog.messages)
    for name in NAMES:
        twelve_bits = np.full((SIZE, SIZE), 4095, np.uint16)
        Image.fromarray(twelve_bits).save(folder / name, "PNG")
    with caplog.at_level("INFO"):
        loaded(folder, memory_gb=memory_gb)
        find_line(caplog.messages, "16 of 255", "`white` 4095")
        caplog.clear()
        assert loaded(folder, memory_gb=memory_gb, white=4095).train.stored([0, 11]).min() == 255
    assert not any("brighter" in line for line in caplog.messages)


def test_the_page_lists_all_extensions_that_are_read():
    page = (ROOT / "docs" / "data.md").read_text()
    table = page.partition("### Formats")[2].partition("Nothing else")[0]
    assert {word for word in table.replace("|", " ").split() if word.startswith(".")} == {*list_extensions(), *HEIF}


def test_heic_that_is_not_read_is_counted_and_the_library_named(tmp_path, monkeypatch):
    if find_spec("pillow_heif") is not None:
        pytest.skip("pillow-heif is installed")
    folder = tree(tmp_path / "telephone", NAMES)
    for name in ("cat/a.HEIC", "dog/b.heif"):
        (folder / name).write_bytes(b"not looked at")
    hint = "pip install pillow-heif"
    find_line(describe_listing(list_images(folder)), "1 .heic", "1 .heif", hint)
    for name in NAMES:
        (folder / name).unlink()
    fails(folder, "1 .heic", hint)


def test_heic_is_read_where_its_library_is_installed(tmp_path):
    pytest.importorskip("pillow_heif")
    folder = tree(tmp_path / "telephone", NAMES)
    before = loaded(folder).fingerprint
    formats()  # registers the format
    smooth = Image.linear_gradient("L").resize((64, 64)).convert("RGB")
    for name in ("cat/a.HEIC", "eel/b.heif"):
        (folder / name).parent.mkdir(exist_ok=True)
        smooth.save(folder / name, "HEIF", quality=-1)
    data = loaded(folder)
    assert (len(data.train), data.class_names) == (14, ("cat", "dog", "eel"))
    expected = np.asarray(centre_crop(smooth, SIZE)).transpose(2, 0, 1)
    row = data.train.labels.tolist().index(2)
    assert np.abs(data.train.stored([row])[0].numpy().astype(int) - expected).max() <= 2
    assert data.fingerprint != before


def test_nothing_but_damaged_images_are_refused(tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    with raises_user_error(tmp_path, "1 of 1", "a.png"):
        loaded(tmp_path, skip_unreadable=True)

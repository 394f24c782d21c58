"""Uploads to the Hub, by huggingface_hub over HTTP to a stand-in on this machine."""

import pytest
import torch
from hub_server import TOKEN, hub  # noqa: F401

from uvit_decay.checkpoint.__main__ import main
from uvit_decay.hub.push import push
from uvit_decay.nn import UViT
from uvit_decay.runtime.errors import UserError


@pytest.fixture
def folder(tmp_path):
    """A network alone, with files that stay here."""
    torch.manual_seed(0)
    net = UViT(8, 2, 1, dim=16, depth=2, heads=2, alpha_min=0.7)
    net.save_pretrained(tmp_path / "digits")
    (tmp_path / "digits" / "part").mkdir()
    for name in (".hidden", "part/.lock", "part/more.json"):
        (tmp_path / "digits" / name).write_text(name)
    return tmp_path / "digits"


def sent(folder):
    names = ("README.md", "config.json", "model.safetensors", "part/more.json")
    return {name: (folder / name).read_bytes() for name in names}


def test_all_bytes_arrive(hub, folder, capsys):  # noqa: F811
    main(["push", str(folder), "me/digits"])
    assert hub.of("me/digits") == sent(folder)
    assert hub.messages == ["Upload digits"]
    assert "private" not in str(hub.repositories["me/digits"])
    printed = capsys.readouterr()
    assert printed.out.startswith(f"uploaded 4 files, 0.0 MiB: {hub.url}/me/digits/commit/")
    assert "names no licence" in printed.err

    (folder / "part" / "more.json").write_text("new")  # into the repository that is there now
    main(["push", str(folder), "me/digits"])
    assert hub.of("me/digits")["part/more.json"] == b"new"


def test_to_a_private_branch(hub, folder):  # noqa: F811
    push(folder, "me/digits", private=True, revision="step-100")
    assert "private" in str(hub.repositories["me/digits"])
    assert hub.of("me/digits", "step-100") == sent(folder)
    assert not hub.of("me/digits")


def test_a_dry_run_sends_nothing(hub, folder, monkeypatch):  # noqa: F811
    monkeypatch.delenv("HF_TOKEN")
    lines = push(folder, "me/digits", dry_run=True).splitlines()
    assert {line.split()[1]: int(line.split()[0].replace(",", "")) for line in lines[:-1]} == {
        name: len(data) for name, data in sent(folder).items()
    }
    assert lines[-1] == "4 files, 0.0 MiB, would be uploaded to me/digits"
    assert not hub.repositories


def test_a_licence_in_the_readme_leaves_no_remark(hub, folder, capsys):  # noqa: F811
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# mine\n")
    push(folder, "me/digits", dry_run=True)
    assert not capsys.readouterr().err
    (folder / "README.md").write_text("---\nlicense: [\n---\n# mine\n")
    with pytest.raises(UserError, match="the head of .*README.md is no YAML"):
        push(folder, "me/digits")


def test_mistakes_are_one_line(hub, folder, monkeypatch, tmp_path):  # noqa: F811
    for repository, message in [("digits", "has no owner"), ("a/b/c", "no name"), ("me/..", "no name")]:
        with pytest.raises(UserError, match=message):
            push(folder, repository)
    with pytest.raises(UserError, match="nowhere is not there"):
        push(tmp_path / "nowhere", "me/digits")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty is no exported folder"):
        push(tmp_path / "empty", "me/digits")
    for status, message in [(401, "refused the token"), (403, "may not write there"), (500, "500")]:
        hub.refuse = status
        with pytest.raises(UserError, match=f"cannot upload to me/digits: .*{message}"):
            push(folder, "me/digits")
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    with pytest.raises(UserError, match="refused the token"):
        push(folder, "me/digits")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="there is no token"):
        push(folder, "me/digits")
    assert not hub.files


def test_without_a_network(hub, folder, monkeypatch):  # noqa: F811
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(UserError, match="cannot upload to me/digits: .*[Cc]onn"):
        push(folder, "me/digits")


def test_a_network_goes_to_the_hub_and_back(hub, folder, tmp_path):  # noqa: F811
    net = UViT.from_pretrained(folder)
    net.push_to_hub("me/net", token=TOKEN)
    assert hub.of("me/net").keys() == {"README.md", "config.json", "model.safetensors"}
    loaded = UViT.from_pretrained("me/net", cache_dir=tmp_path / "cache")
    assert loaded.config == net.config
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in loaded.state_dict().items())

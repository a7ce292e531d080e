"""Files of a model folder of unknown origin."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlsys.convert.hub import find_folder
from rlsys.core.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("name", ["vocab.txt", "additional_chat_templates", "config.json"])
def test_a_link_out_of_the_folder_is_refused(folder: Path, name: str, tmp_path: Path) -> None:
    """A reader would copy the file of the machine into an export."""
    private = tmp_path / "private"
    private.mkdir() if name == "additional_chat_templates" else private.write_text("secret")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../private")
    with pytest.raises(UserError, match=rf"{name}: a link to {private}, outside of the model folder"):
        find_folder(folder, "model.path")


def test_a_link_chain_is_followed_to_its_end(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "models--x--y" / "blobs").mkdir(parents=True)
    blob = tmp_path / "models--x--y" / "blobs" / "ab12"
    blob.symlink_to("/etc/passwd")
    (folder / "vocab.txt").symlink_to(blob)
    with pytest.raises(UserError, match=r"vocab.txt: a link to /etc/passwd"):
        find_folder(folder, "model.path")


def test_a_pipe_and_a_device_are_refused(folder: Path) -> None:
    """Reading one would not end."""
    os.mkfifo(folder / "merges.txt")
    with pytest.raises(UserError, match=r"merges.txt: a device or a pipe"):
        find_folder(folder, "model.path")
    (folder / "merges.txt").unlink()
    (folder / "generation_config.json").symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"generation_config.json: a device or a pipe"):
        find_folder(folder, "model.path")


def test_links_of_a_cache_of_weights_and_of_the_folder_itself_are_followed(
    folder: Path, tmp_path: Path
) -> None:
    blob = tmp_path / "models--x--y" / "blobs" / "ab12"
    blob.parent.mkdir(parents=True)
    blob.write_text("{}")
    (folder / "tokenizer.json").symlink_to("../models--x--y/blobs/ab12")
    (folder / "model.safetensors").symlink_to(tmp_path / "large disk")
    (tmp_path / "large disk").write_bytes(b"")
    (folder / "vocab.json").symlink_to("tokenizer.json")
    (folder / "missing.json").symlink_to("gone")
    (tmp_path / "other").symlink_to(folder)
    assert find_folder(tmp_path / "other", "model.path") == tmp_path / "other"

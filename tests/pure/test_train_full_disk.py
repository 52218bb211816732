"""A run that ends because its disk is full says so, and what is left."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from charm_megatron.config import RunConfig
from charm_megatron.errors import LaunchError
from charm_megatron.train.pretrain import _full_disk_named
from charm_megatron.train.run_folder import RunFolder
from tests.checkpoints import save_checkpoint

pytestmark = pytest.mark.pure


def fail(folder: RunFolder) -> None:
    with _full_disk_named(folder):
        raise LaunchError("rank 1 failed: CheckpointException ranks:dict_keys([])\nlast lines of ...")


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    folder.create(RunConfig())
    save_checkpoint(folder.checkpoints, 4)
    with pytest.raises(LaunchError, match=r"^rank 1 failed: CheckpointException"):
        fail(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    with pytest.raises(
        LaunchError, match=r"^the disk of .* is full \(4096 bytes are free\), and rank 1 failed; "
    ):
        fail(folder)
    with pytest.raises(LaunchError, match=r"holds a checkpoint of iteration 4, which --resume continues$"):
        fail(folder)

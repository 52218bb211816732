"""Checkpoints as Megatron leaves them on disk, but of a few bytes."""

import pickle
from pathlib import Path
from types import SimpleNamespace

SHARDS = {"__0_0.distcp": 300, "__1_0.distcp": 200}


def save_checkpoint(checkpoints: Path, iteration: int) -> Path:
    """Makes a whole checkpoint of two files, and Megatron's tracker name it; returns its folder."""
    folder = checkpoints / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    for name, num_bytes in SHARDS.items():
        (folder / name).write_bytes(bytes(num_bytes))
    entries = {
        (name, part): Stored({"relative_path": name, "offset": part * size // 2, "length": size // 2})
        for name, size in SHARDS.items()
        for part in (0, 1)
    }
    table = Stored({"state_dict_metadata": {}, "storage_data": entries})
    (folder / ".metadata").write_bytes(pickle.dumps(table))
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder


class Stored(SimpleNamespace):
    """An instance of a class that the reader does not know."""

    def __init__(self, state: dict[str, object]) -> None:
        super().__init__(**state)

    def __reduce__(self) -> tuple[object, ...]:
        return Stored, ({},), self.__dict__

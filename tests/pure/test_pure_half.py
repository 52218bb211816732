"""What decides a schedule runs on a machine without torch; the terminal belongs to the command line."""

import json
import subprocess
import sys

import pytest

PURE_ROOMS = (
    *(
        "errors",
        "limits",
        "reading",
        "files",
        "units",
        "log",
        "config",
        "workload",
        "sharding",
        "topology",
        "schedule",
        "lowering",
        "cost",
        "show",
        "verify",
    ),
    "planner",
    "compile",
)
PROCESS_ROOMS = ("processes", "testbed")
TORCH_ROOMS = ("kernels", "executor")
OUR_TORCH_ROOMS = tuple(
    f"charm_megatron.{room}" for room in ("kernels", "executor", "mcore", "train", "bench", "peers", "cli")
)

# Imports a room and all modules in it, then prints which of the given packages are loaded.
IMPORT_ALL = """
import importlib, json, pkgutil, sys
room, *packages = sys.argv[1:]
module = importlib.import_module(room)
for found in pkgutil.walk_packages(getattr(module, "__path__", []), room + "."):
    importlib.import_module(found.name)
print(json.dumps([package for package in packages if package in sys.modules]))
"""


def loaded_by(room: str, *packages: str) -> list[str]:
    """Those of `packages` that a fresh interpreter has loaded after importing all of `room`."""
    finished = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, f"charm_megatron.{room}", *packages],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    loaded: list[str] = json.loads(finished.stdout)
    return loaded


@pytest.mark.pure
@pytest.mark.parametrize("room", PURE_ROOMS)
def test_a_pure_room_loads_neither_torch_nor_megatron_nor_terminal_packages(room: str) -> None:
    assert loaded_by(room, "torch", "megatron", "transformer_engine", "typer", "rich", "psutil") == []


@pytest.mark.pure
@pytest.mark.parametrize("room", PROCESS_ROOMS)
def test_what_starts_ranks_and_shapes_networks_loads_neither_torch_nor_what_ranks_run(room: str) -> None:
    packages = ("torch", "megatron", "transformer_engine", "typer", "rich", *OUR_TORCH_ROOMS)
    assert loaded_by(room, *packages) == []


@pytest.mark.torch
@pytest.mark.parametrize("room", TORCH_ROOMS)
def test_a_room_with_torch_loads_neither_megatron_nor_terminal_packages(room: str) -> None:
    assert loaded_by(room, "megatron", "transformer_engine", "typer", "rich") == []

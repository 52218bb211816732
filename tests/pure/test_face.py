"""What `import charm_megatron` offers, and what it leaves unimported until it is used."""

import json
import subprocess
import sys

import pytest

import charm_megatron

pytestmark = pytest.mark.pure


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import charm_megatron, sys, json; print(json.dumps(sorted(sys.modules)))"
    assert not {"torch", "numpy", "pydantic", "yaml"} & set(json.loads(run(code)))


def test_planning_from_the_face_needs_no_torch() -> None:
    code = (
        "import charm_megatron as cm, sys;"
        "sizes = cm.Workload(1, 64, 2, 2, 8, 8);"
        "plan = cm.compile_attention(cm.CharmConfig(), cm.even_domains(4, 2), sizes, 'zigzag');"
        "print(plan.name, 'torch' in sys.modules)"
    )
    assert run(code) == "charm False"


def test_every_name_is_there_and_listed() -> None:
    for name in charm_megatron.__all__:
        assert getattr(charm_megatron, name) is not None
    assert set(charm_megatron.__all__) <= set(dir(charm_megatron))


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'charm_megatron' has no attribute 'contxt'"):
        charm_megatron.contxt  # noqa: B018

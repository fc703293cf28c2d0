"""`train.portable`: the instruction set is fixed before torch is loaded, whatever the environment
says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedml_noniid.pipelines.experiment import portable
from fedml_noniid.plugins.core.errors import UserError
from tests.pipelines.small import PARAMS, ROOT, environment

PORTABLE = PARAMS.replace("device: cpu", "device: cpu, portable: true")
WITHOUT_AVX2 = torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512")


@pytest.mark.parametrize(
    ("text", "fixed"), [(PORTABLE, "avx2"), (PARAMS, "None"), ("no: settings", "None")]
)
def test_params_yaml_decides_before_torch_is_there(tmp_path: Path, text: str, fixed: str) -> None:
    (tmp_path / "params.yaml").write_text(text)
    code = (
        "import os, sys; from pathlib import Path; from fedml_noniid.pipelines.experiment "
        "import portable;"
    )
    code += (
        "portable.fix(Path(sys.argv[1])); print(os.environ.get('ATEN_CPU_CAPABILITY'), "
        "'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "params.yaml")]
    said = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True
    ).stdout
    assert said.split() == [fixed, "False"]


def test_a_process_with_torch_s_own_choice_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "params.yaml").write_text(PORTABLE)
    before = dict(os.environ)
    portable.fix(tmp_path / "params.yaml")
    assert os.environ == before, "torch is loaded here: it is too late"
    for name in portable.FIXED:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=r"train\.portable = true is refused here"):
        portable.check()


@pytest.mark.slow
@pytest.mark.skipif(WITHOUT_AVX2, reason="needs an x86-64 CPU with AVX2")
def test_other_instructions_give_other_bits_and_portable_the_same(tmp_path: Path) -> None:
    """One CPU told to use two instruction sets, as if it were two CPUs."""
    found = {}
    for text in (PARAMS, PORTABLE):
        for capability in ("default", "avx2"):
            folder = tmp_path / f"{len(found)}"
            folder.mkdir()
            (folder / "params.yaml").write_text(text.replace("[fedavg, scaffold+fnr]", "[fedavg]"))
            for stage in ("prepare", "partition", "train"):
                command = [
                    sys.executable,
                    "-m",
                    "fedml_noniid.pipelines.stages",
                    stage,
                    "--root",
                    str(folder),
                ]
                told = environment() | {"ATEN_CPU_CAPABILITY": capability}
                subprocess.run(command, cwd=ROOT, env=told, check=True, capture_output=True)
            run = json.loads((folder / "runs" / "skewed-fedavg-0" / "run.json").read_text())
            found[text, capability] = run["weights_sha256"]
    assert found[PARAMS, "default"] != found[PARAMS, "avx2"]
    assert found[PORTABLE, "default"] == found[PORTABLE, "avx2"]

"""`train.portable: true`: one fixed set of instructions, so that more x86-64 CPUs give the same
bits.

torch, oneDNN and MKL choose their code by the CPU. Three environment variables fix that choice.
They work only if they are set before torch is imported. So this module runs first, and none of its
imports imports torch.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from fedml_noniid.plugins.core.errors import UserError

FIXED = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}


def fix(settings: Path) -> None:
    """Sets the variables if params.yaml asks for it.

    `config.load` reports mistakes in that file.
    """
    try:
        content = YAML(typ="safe", pure=True).load(settings.read_text())
        wanted = content["train"]["portable"] is True
    except (OSError, UnicodeDecodeError, YAMLError, KeyError, TypeError):
        return
    if wanted and "torch" not in sys.modules:
        os.environ.update(FIXED)


def check() -> None:
    """UserError if this process does not use the fixed instructions."""
    import torch

    if any(os.environ.get(name) != value for name, value in FIXED.items()):
        raise UserError(
            "train.portable = true is refused here; allowed: in params.yaml, with `noniid run`"
        )
    found = torch.backends.cpu.get_cpu_capability()
    if found != "AVX2":
        raise UserError(
            f"train.portable = true is refused: this CPU gives {found}; allowed: x86-64 with AVX2"
        )

"""A fedml_config.yaml that is no proper YAML: the same words as for params.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.silo import settings
from tests.data.test_yaml_files import CASES


@pytest.mark.parametrize(("content", "said"), CASES.values(), ids=CASES)
def test_a_bad_file_is_one_line_with_the_remedy(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "fedml_config.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError) as found:
        settings.read(path)
    (line,) = str(found.value).splitlines()
    assert line.startswith(str(path) + said)

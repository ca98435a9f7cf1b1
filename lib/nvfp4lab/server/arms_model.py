"""Where an arm's checkpoint is: a folder as it stands, or a fixture model built once into the lab's cache."""

import contextlib
import io
from pathlib import Path

from nvfp4lab.errors import LabError


def model_folder(model: str) -> Path:
    """The checkpoint folder of an arm's `model`: a folder as it is, a fixture's name built once into the lab's cache."""
    from nvfp4lab.nvfp4 import fixtures  # torch and transformers: only when a fixture is wanted

    folder = Path(model).expanduser()
    if (folder / "config.json").exists():
        return folder
    if model not in fixtures.FIXTURES:
        known = ", ".join(fixtures.FIXTURES)
        raise LabError(f"{model}: neither a checkpoint folder (no config.json there) nor a fixture model ({known})")
    folder = fixtures.cached(model)
    if not (folder / "config.json").exists():
        print(f"{model}: built from its package, once (half a minute)")
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars of the libraries, which no report needs
        return fixtures.build(model, folder)

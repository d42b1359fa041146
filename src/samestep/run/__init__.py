"""The run: composes data, communication, steps, evaluation, snapshots and the record."""

import torch

from samestep.errors import ConfigError

if (
    torch.__version__ < "2.6"
):  # compared as versions, before imports that an older one does not have
    raise ConfigError(
        f"samestep needs PyTorch 2.6 or newer, got {torch.__version__}; "
        "update it with: pip install --upgrade torch"
    )

from samestep.run.run import Run, init

__all__ = ["Run", "init"]

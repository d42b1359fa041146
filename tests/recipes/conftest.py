"""What tests of recipes share."""

from __future__ import annotations

# the first optimizer imports it: once here, before workers are forked, not in each of them
import torch._dynamo  # noqa: F401

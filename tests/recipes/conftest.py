"""What tests of recipes share."""

from __future__ import annotations

import torch._dynamo  # noqa: F401  the first optimizer imports it: once here, before workers are forked, not in each of them

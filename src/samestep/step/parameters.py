"""The parameters of a module, without walking through it in every step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class ModuleParameters:
    """Remembers the parameters of a module, each once, and walks through it again only when something in it was added or replaced.

    Walking through a module of 200 layers takes longer than one of its steps should wait. The
    module itself is not kept alive.
    """

    def __init__(self) -> None:
        self._registries: list[dict[str, Any]] = []
        self._content: list[int] = []
        self._parameters: list[torch.nn.Parameter] = []

    def trainable(self, module: torch.nn.Module) -> list[torch.nn.Parameter]:
        """Return the parameters of `module`, always the same one, that require a gradient now."""
        if not self._registries or self._ids() != self._content:
            self._registries = [
                registry
                for one in module.modules()
                for registry in (one._parameters, one._modules)  # noqa: SLF001
            ]
            self._content = self._ids()
            self._parameters = list(module.parameters())
        return [parameter for parameter in self._parameters if parameter.requires_grad]

    def _ids(self) -> list[int]:
        return [id(value) for registry in self._registries for value in registry.values()]

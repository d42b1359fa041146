"""The parameters of a module, without walking through it in every step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class ModuleParameters:
    """The parameters of a module, each once. The module is walked through again only when something in it was added or replaced.

    Walking through a module of 200 layers takes longer than one of its steps should wait.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._walk()

    def _walk(self) -> None:
        modules = list(self._module.modules())
        self._registries: list[dict[str, Any]] = [registry for one in modules for registry in (one._parameters, one._modules) if registry]  # noqa: SLF001
        self._content = self._ids()
        self._parameters = list(self._module.parameters())

    def _ids(self) -> list[int]:
        return [id(value) for registry in self._registries for value in registry.values()]

    def trainable(self) -> list[torch.nn.Parameter]:
        """Return those that require a gradient now."""
        if self._ids() != self._content:
            self._walk()
        return [parameter for parameter in self._parameters if parameter.requires_grad]

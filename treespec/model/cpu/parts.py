"""What decoder layers are made of, taken down when they are fused, to see later that nobody has changed them."""

from collections.abc import Iterable
from typing import Any, final

from torch import Tensor, nn


@final
class LayerParts:
    """The submodules, parameters, forwards and hooks of layers at one moment.

    The dictionaries of a module stay the same objects as long as it lives, so a look into them is enough. A parameter
    counts as changed if its numbers are elsewhere: those that took them down keep the old ones alive, so no new
    tensor has their address. Numbers that change in place are seen by the kernels anyway.
    """

    def __init__(self, layers: Iterable[nn.Module], with_own_hooks: bool = False) -> None:
        """with_own_hooks: whether a hook on a layer itself, or another forward of it, counts as a change too."""
        self.hooks = list[dict[int, Any]]()
        self.children = list[tuple[dict[str, Any], tuple[Any, ...]]]()
        self.parameter_tables = list[dict[str, Any]]()
        self.tables = list[dict[str, Any]]()
        self.names = list[str]()
        self.addresses = list[int]()
        self.plain_modules = list[dict[str, Any]]()
        self.own_forwards = list[tuple[dict[str, Any], Any]]()
        for layer in layers:
            for module in layer.modules():
                self.add_contents(module)
                if module is not layer or with_own_hooks:
                    self.add_code(module)
        self.counts = list(map(len, self.parameter_tables))
        self.forward_names = ["forward"] * len(self.plain_modules)

    def add_contents(self, module: nn.Module) -> None:
        """Takes down the submodules and parameters of a module."""
        if module._modules:
            self.children.append((module._modules, tuple(module._modules.values())))
        if module._parameters:
            self.parameter_tables.append(module._parameters)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                self.tables.append(module._parameters)
                self.names.append(name)
                self.addresses.append(parameter.data_ptr())

    def add_code(self, module: nn.Module) -> None:
        """Takes down the hooks and the forward of a module."""
        self.hooks += [module._forward_hooks, module._forward_pre_hooks]
        attributes = vars(module)
        if "forward" in attributes:
            self.own_forwards.append((attributes, attributes["forward"]))
        else:
            self.plain_modules.append(attributes)

    def is_unchanged(self) -> bool:
        """Whether the layers have the same parts, and no part has a hook or another forward.

        It is asked in every forward, so each step looks at all entries at once.
        """
        if any(self.hooks) or any(map(dict.__contains__, self.plain_modules, self.forward_names)):
            return False
        for table, forward in self.own_forwards:
            if table.get("forward") is not forward:
                return False
        for modules, children in self.children:
            if tuple(modules.values()) != children:
                return False
        if list(map(len, self.parameter_tables)) != self.counts:
            return False
        try:
            return (
                list(map(Tensor.data_ptr, map(dict.__getitem__, self.tables, self.names)))
                == self.addresses
            )
        except (KeyError, TypeError):  # a parameter is gone, or None
            return False

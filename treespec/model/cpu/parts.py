"""What decoder layers are made of, taken down when they are fused, to see later that nobody has changed them."""

from collections.abc import Iterable
from itertools import chain
from operator import is_
from typing import Any, final

from torch import Tensor, nn


@final
class LayerParts:
    """The submodules, parameters, forwards and hooks of layers at one moment.

    The dictionaries of a module stay the same objects as long as it lives, so a look into them is enough. Numbers that
    change in place are seen by the kernels anyway. Numbers of a parameter that are elsewhere (`parameter.data = …`)
    have another address: those that took them down keep the old ones alive, so no new tensor has theirs.
    """

    def __init__(self, layers: Iterable[nn.Module], with_own_hooks: bool = False) -> None:
        """with_own_hooks: whether a hook on a layer itself, or another forward of it, counts as a change too."""
        self.hooks = list[dict[int, Any]]()
        self.child_tables = list[dict[str, Any]]()
        self.children = list[Any]()
        self.parameter_tables = list[dict[str, Any]]()
        self.parameters = list[Any]()
        self.plain_modules = list[dict[str, Any]]()
        self.own_forwards = list[tuple[dict[str, Any], Any]]()
        for layer in layers:
            for module in layer.modules():
                self.add_contents(module)
                if module is not layer or with_own_hooks:
                    self.add_code(module)
        self.addresses = read_addresses(self.parameters)
        self.forward_names = ["forward"] * len(self.plain_modules)

    def add_contents(self, module: nn.Module) -> None:
        """Takes down the submodules and parameters of a module."""
        if module._modules:
            self.child_tables.append(module._modules)
            self.children += module._modules.values()
        if module._parameters:
            self.parameter_tables.append(module._parameters)
            self.parameters += module._parameters.values()

    def add_code(self, module: nn.Module) -> None:
        """Takes down the hooks and the forward of a module."""
        self.hooks += [module._forward_hooks, module._forward_pre_hooks]
        attributes = vars(module)
        if "forward" in attributes:
            self.own_forwards.append((attributes, attributes["forward"]))
        else:
            self.plain_modules.append(attributes)

    def is_unchanged(self, with_numbers: bool = True) -> bool:
        """Whether the layers have the same parts, and no part has a hook or another forward.

        It is asked in every forward, so each step looks at all entries at once.

        with_numbers: whether also the numbers of all parameters are where they were, which takes as long as the rest.
        """
        if any(self.hooks) or any(map(dict.__contains__, self.plain_modules, self.forward_names)):
            return False
        for table, forward in self.own_forwards:
            if table.get("forward") is not forward:
                return False
        if not self.has_same_modules():
            return False
        if not holds_same(self.parameter_tables, self.parameters):
            return False
        if not with_numbers:
            return True
        return read_addresses(self.parameters) == self.addresses

    def has_same_modules(self) -> bool:
        """Whether the layers have the same submodules: a tenth of `is_unchanged`."""
        return holds_same(self.child_tables, self.children)


def holds_same(tables: Iterable[dict[str, Any]], values: list[Any]) -> bool:
    """Whether these are the values of the tables, one after the other: the very same objects."""
    found = list(chain.from_iterable(map(dict.values, tables)))
    return len(found) == len(values) and all(map(is_, found, values))


def read_addresses(parameters: Iterable[Tensor | None]) -> list[int]:
    """Lists where the numbers of parameters are, without those that are None."""
    return [parameter.data_ptr() for parameter in parameters if parameter is not None]

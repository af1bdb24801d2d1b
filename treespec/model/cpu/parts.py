"""What a decoder layer is made of, taken down when it is fused, to see later that nobody has changed it."""

from collections.abc import Callable
from operator import is_
from typing import Any, final

from torch import Tensor, nn


@final
class LayerParts:
    """The submodules, parameters and hooks of a layer at one moment.

    The dictionaries of a module stay the same objects as long as it lives, so a look into them is enough. A parameter
    counts as changed if it is another tensor, or has its numbers elsewhere; numbers that change in place are seen by
    the kernels anyway.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.module_tables = list[dict[str, Any]]()
        self.module_names = list[str]()
        self.modules = list[Any]()
        self.parameter_tables = list[dict[str, Any]]()
        self.parameter_names = list[str]()
        self.parameters = list[Any]()
        self.hooks = list[dict[int, Callable[..., Any]]]()
        self.attributes = list[dict[str, Any]]()
        self.forwards = list[Any]()
        for module in layer.modules():
            for name, child in module._modules.items():
                self.module_tables.append(module._modules)
                self.module_names.append(name)
                self.modules.append(child)
            for name, parameter in module._parameters.items():
                self.parameter_tables.append(module._parameters)
                self.parameter_names.append(name)
                self.parameters.append(parameter)
            if module is not layer:  # the layer's own run when it is called
                self.hooks += [module._forward_hooks, module._forward_pre_hooks]
                self.attributes.append(vars(module))
                self.forwards.append(vars(module).get("forward"))
        self.tensors = [tensor for tensor in self.parameters if tensor is not None]
        self.addresses = list(map(Tensor.data_ptr, self.tensors))
        self.forward_names = ["forward"] * len(self.attributes)

    def are_unchanged(self) -> bool:
        """Whether the layer has the same submodules and parameters, and no submodule has a hook or another forward.

        Each line looks at all entries in C: it is asked for every layer in every forward.
        """
        modules = map(dict.get, self.module_tables, self.module_names)
        parameters = map(dict.get, self.parameter_tables, self.parameter_names)
        forwards = map(dict.get, self.attributes, self.forward_names)
        return (
            not any(self.hooks)
            and all(map(is_, modules, self.modules))
            and all(map(is_, parameters, self.parameters))
            and all(map(is_, forwards, self.forwards))
            and list(map(Tensor.data_ptr, self.tensors)) == self.addresses
        )

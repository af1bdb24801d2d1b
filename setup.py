"""Where a C compiler is, a wheel is for one platform and holds the kernels built ahead; else it is pure Python."""

import runpy
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

# Not imported: the package's requirements are not installed where a wheel is built.
KERNEL_BUILD = runpy.run_path(str(Path(__file__).parent / "treespec" / "kernels" / "variants.py"))


class PlatformDistribution(Distribution):
    def has_ext_modules(self):
        """Whether the wheel is for one platform; an editable install compiles the kernels at their first use."""
        return "bdist_wheel" in self.commands and KERNEL_BUILD["can_build_ahead"]()


class BuildWithKernels(build_py):
    def run(self):
        super().run()
        if self.distribution.has_ext_modules():
            KERNEL_BUILD["build_variants"](Path(self.build_lib, "treespec", "kernels", "built"))


class WheelOfAnyPython(bdist_wheel):
    def get_tag(self):
        """The libraries know nothing of Python: the wheel fits each version."""
        python, abi, platform = super().get_tag()
        if self.distribution.has_ext_modules():
            return "py3", "none", platform
        return python, abi, platform


SETUP_COMMANDS = {"build_py": BuildWithKernels, "bdist_wheel": WheelOfAnyPython}
setup(distclass=PlatformDistribution, cmdclass=SETUP_COMMANDS)

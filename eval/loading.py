"""Load the models that a measurement's options name."""

from typing import Protocol

from treespec.api.load import load
from treespec.api.spec import Spec


class ModelOptions(Protocol):
    """The options that say which target to load and where its weights go."""

    @property
    def target(self) -> str | None: ...
    @property
    def template(self) -> str | None: ...
    @property
    def device_map(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def trust_remote_code(self) -> bool: ...
    @property
    def load_in(self) -> str | None: ...
    @property
    def revision(self) -> str | None: ...


def load_models(config: ModelOptions, head: str | None, drafter: str | None = None) -> Spec:
    """`treespec.load` with these options. Raises InputError, HeadError and TreeError.

    head, drafter: what drafts, as `--head` and `--drafter` name it. Default: nothing drafts.
    """
    return load(
        config.target or "",
        head,
        drafter=drafter,
        template=config.template,
        device_map=config.device_map,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
        load_in=config.load_in,
        revision=config.revision,
    )

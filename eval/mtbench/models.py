"""The models of an evaluation: one target, and everything that drafts for it."""

from collections.abc import Callable, Iterable

from treespec.api.loading import calibration_of, load_sources
from treespec.api.spec import Spec
from treespec.errors import InputError
from treespec.eval.mtbench.config import Configuration, EvalConfig, drafters_of
from treespec.trees.shape import Policy
from treespec.trees.static import TreeError
from treespec.verify.walk import Verifier

Draft = tuple[Policy | None, Verifier] | None  # tree and verifier; None: the baseline
Fresh = Callable[[Configuration, Draft], Spec]


def load_models(config: EvalConfig, dtype: str) -> tuple[Spec, Fresh]:
    """Load the target and all drafters: (the target without a drafter, what makes a `Spec`).

    The second makes a `Spec` of a configuration with nothing cached. So all configurations start
    alike, in a resumed run too, and one cache is alive at a time. dtype: of the target's weights.
    """
    # 1. The models.
    target, sources = load_sources(
        config.target,
        drafters_of(config),
        device_map=config.device_map,
        dtype=dtype,
        trust_remote_code=config.trust_remote_code,
        load_in=config.load_in,
        revision=config.revision,
    )
    calibrations = {name: calibration_of(source, name) for name, source in sources.items()}
    plain = Spec(target, None, template=config.template)

    # 2. A configuration of them.
    def fresh(configuration: Configuration, draft: Draft) -> Spec:
        name = configuration.drafter
        if name is None or draft is None:
            return plain.baseline()
        tree, verifier = draft
        return Spec(
            target,
            sources[name],
            tree,
            verifier,
            config.template,
            config.allow_lossy,
            calibrations[name],
        )

    return plain, fresh


def unfit(fresh: Fresh, drafts: Iterable[tuple[Configuration, Draft]]) -> dict[Configuration, str]:
    """The configurations whose drafter cannot draft their tree, each with the reason."""
    reasons = {}
    for configuration, draft in drafts:
        try:
            fresh(configuration, draft)
        except (InputError, TreeError) as error:
            drafter, verifier = configuration.drafter, configuration.verifier
            reasons[configuration] = f"{drafter} with {verifier}: {error}"
    return reasons

"""Logits of target and draft head at the same positions, of a text or the target's answers."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from treespec.api.spec import Spec
from treespec.draft.trained.kinds import KINDS, draft_steps
from treespec.errors import InputError
from treespec.eval.acceptance.config import AcceptanceConfig
from treespec.eval.common import Step
from treespec.eval.environment import describe
from treespec.eval.loading import load_models
from treespec.eval.questions import Question, load_questions
from treespec.eval.texts import Passage, passages_of
from treespec.files.atomic import read_tensors, write_tensors
from treespec.model.identity import identity_of, target_identity
from treespec.shaping.sampling import SamplingParams
from treespec.text.plain import content_of

CHANGE_NO_LOGITS = {
    *("out", "preset", "laws", "verifier", "temperature", "draws", "draft_temperature"),
    *("top_k", "top_p", "samples", "device_map", "trust_remote_code"),
}


@dataclass(frozen=True)
class Logits:
    """Logits of target and draft for the same token, at n positions.

    p, q: [n, V] in the model's dtype. group: [n] int64, the question or text of each position.
    """

    p: Tensor
    q: Tensor
    group: Tensor


def collected(
    config: AcceptanceConfig, report: Callable[[Step], None]
) -> tuple[Logits, dict[str, object]]:
    """(the logits, the environment they come from): those of OUT/logits.safetensors, or new ones.

    New logits are written there. Raises InputError if the file holds logits of other options, texts
    or models.
    """
    # 1. The file, if it is there.
    SamplingParams(config.answers_temperature)  # raises for a bad value
    file = Path(config.out) / "logits.safetensors"
    options = asdict(config).items()
    identity = {name: value for name, value in options if name not in CHANGE_NO_LOGITS}
    questions: list[Question] = []
    if config.text is None:
        questions = load_questions(config.questions)[0][: config.limit]
    identity["content"] = _digest(config, questions)
    if file.exists():
        return _read(file, config, identity)

    # 2. Else the models' logits.
    report(Step(0, 1, f"loading {config.target} and {config.head}"))
    spec = load_models(config, config.head)
    passages = passages_of(config, spec, questions, report)
    logits = logits_of(spec, passages, config.step, config.positions, report)
    environment = describe(spec.target)
    about = {"identity": json.dumps(identity), "environment": json.dumps(environment)}
    write_tensors(file, asdict(logits), about | {"models": models_of(config, "")})
    return logits, environment


def logits_of(
    spec: Spec,
    passages: Sequence[Passage],
    step: int,
    positions: int = 0,
    report: Callable[[Step], None] = lambda step: None,
) -> Logits:
    """Logits at draft step `step`, on the CPU in the model's dtype.

    positions: their number, evenly spread over all passages; 0 takes all. Raises InputError if the
    head drafts fewer steps or no passage is long enough. Row t holds both laws of token t + step +
    1. Step 2 on five tokens has two rows:

        token      a    b    c    d    e
        row 0                     p, q        p from the feature of c, q drafted after b
        row 1                          p, q   p from the feature of d, q drafted after c
    """
    # 1. The rows of each passage's rollout whose token counts.
    head, target = spec.head, spec.target
    assert head is not None
    if draft_steps(head, step) < step:
        raise InputError(f"{head.known_as} draft {head.max_depth} tokens ahead, --step is {step}")
    wanted = [passage.counts[step + 1 :].nonzero().squeeze(1) for passage in passages]
    total = sum(map(len, wanted))
    if not total:
        raise InputError(
            f"no text has a token to draft at step {step}: give longer texts, or a lower --step"
        )

    # 2. An even spread of them.
    count = min(total, positions or total)
    taken = torch.zeros(total, dtype=torch.bool)
    taken[torch.linspace(0, total - 1, count, dtype=torch.float64).round().long()] = True
    chosen = taken.split([len(rows) for rows in wanted])

    # 3. Both models along each passage.
    p, q, group = [], [], []
    for number, passage in enumerate(passages):
        rows = wanted[number][chosen[number]]
        if len(rows):
            features = target.features(passage.tokens[None], head.taps, last=True)[0]  # [T, F]
            inputs, last = target.parted(features, head.taps)
            tokens = passage.tokens.to(features.device)
            *_, draft_logits = KINDS[head.kind].rollout(head, target, tokens, inputs, step)
            p.append(target.output_logits(last[rows + step]).cpu())
            q.append(draft_logits[rows].cpu())
            group.append(torch.full((len(rows),), passage.group))
        report(Step(number + 1, len(passages), "logits"))
    return Logits(torch.cat(p), torch.cat(q), torch.cat(group))


def _digest(config: AcceptanceConfig, questions: Sequence[Question]) -> str:
    """A hash of the text file or the questions. Raises InputError for an unreadable file."""
    if config.text is None:
        content = json.dumps([asdict(question) for question in questions]).encode()
    else:
        content = content_of(config.text)
    return hashlib.sha256(content).hexdigest()


def _read(
    file: Path, config: AcceptanceConfig, identity: dict[str, object]
) -> tuple[Logits, dict[str, object]]:
    """The logits and the environment in a file.

    identity: the options and text that its logits must come from. Raises InputError for a file that
    is damaged, or of other options, texts or models. Models that are gone are not compared.
    """
    # 1. The file.
    remedy = "delete it to collect the logits again, or choose another --out"
    tensors, about = read_tensors(file, remedy)
    try:
        theirs, environment = json.loads(about["identity"]), json.loads(about["environment"])
        logits = Logits(*(tensors[name] for name in ("p", "q", "group")))
        changed = [name for name, ours in identity.items() if theirs.get(name) != ours]
        changes = [f"{name} was {theirs.get(name)}, now {identity[name]}" for name in changed]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{file} does not hold logits of an acceptance run: choose another --out"
        ) from error

    # 2. What it was made from.
    if changes:
        raise InputError(
            f"{file} was made otherwise ({'; '.join(changes)}): choose another --out, or delete it"
        )
    if "models" in about and about["models"] != models_of(config, about["models"]):
        raise InputError(
            f"target or head have changed since {file} was made: choose another --out, or delete it"
        )
    return logits, environment


def models_of(config: AcceptanceConfig, otherwise: str) -> str:
    """The identities of target and head; `otherwise` if their files are gone."""
    try:
        names = [target_identity(config.target, config.variant)] if config.target else []
        return " ".join([*names, *([identity_of(config.head)] if config.head else [])])
    except InputError:
        return otherwise

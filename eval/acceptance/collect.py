"""Logits of target and draft head at the same positions, of given text or of the target's own answers."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treespec.draft.trained.kinds import KINDS, draft_steps
from treespec.errors import InputError
from treespec.eval.acceptance.config import AcceptanceConfig
from treespec.eval.common import Step
from treespec.eval.environment import describe
from treespec.eval.questions import Question, load_questions
from treespec.eval.texts import Text, content_of, texts_of
from treespec.files import read_tensors, write_tensors
from treespec.identity import identity_of
from treespec.sampling import SamplingParams
from treespec.spec import Spec, load

CHANGE_NO_LOGITS = (
    *(
        "out",
        "preset",
        "laws",
        "verifier",
        "temperature",
        "draws",
        "draft_temperature",
        "top_k",
        "top_p",
        "samples",
    ),
    "device_map",
    "trust_remote_code",
)


@dataclass(frozen=True)
class Logits:
    """p, q: [n, V] logits of target and draft for the same token. group: [n] int64, which question or text."""

    p: Tensor
    q: Tensor
    group: Tensor


def collected(
    config: AcceptanceConfig, report: Callable[[Step], None]
) -> tuple[Logits, dict[str, Any]]:
    """OUT/logits.safetensors and the environment of its making; a model is only loaded if it is not there yet.

    Raises InputError where OUT holds logits of something else.
    """
    SamplingParams(config.answers_temperature)
    file = Path(config.out) / "logits.safetensors"
    identity = {
        name: value for name, value in asdict(config).items() if name not in CHANGE_NO_LOGITS
    }
    questions: list[Question] = []
    if config.text is None:
        questions = load_questions(config.questions)[0][: config.limit]
    identity["content"] = _digest(config, questions)
    if file.exists():
        return _read(file, config, identity)

    report(Step(0, 1, f"loading {config.target} and {config.head}"))
    spec = load(
        config.target or "",
        config.head,
        template=config.template,
        device_map=config.device_map,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
    )
    texts = texts_of(config, spec, questions, report)
    logits = logits_of(spec, texts, config.step, config.positions, report)
    environment = describe(spec.target)
    about = {"identity": json.dumps(identity), "environment": json.dumps(environment)}
    write_tensors(file, asdict(logits), about | {"models": models_of(config, "")})
    return logits, environment


def logits_of(
    spec: Spec,
    texts: Sequence[Text],
    step: int,
    positions: int = 0,
    report: Callable[[Step], None] = lambda step: None,
) -> Logits:
    """At draft step `step`, on the host in the model's dtype; `positions` of them, evenly spread; 0 takes all.

    Raises InputError where no text is long enough.
    """
    head, target = spec.head, spec.target
    assert head is not None
    if draft_steps(head, step) < step:
        raise InputError(f"{head.known_as} draft {head.max_depth} tokens ahead, --step is {step}")
    wanted = [text.counts[step + 1 :].nonzero().squeeze(1) for text in texts]  # rows of the rollout
    total = sum(map(len, wanted))
    if not total:
        raise InputError(
            f"no text has a token to draft at step {step}: give longer texts, or a lower --step"
        )
    taken = torch.zeros(total, dtype=torch.bool)
    taken[
        torch.linspace(0, total - 1, min(total, positions or total), dtype=torch.float64)
        .round()
        .long()
    ] = True
    p, q, group = [], [], []
    numbered = enumerate(
        zip(texts, wanted, taken.split([len(rows) for rows in wanted]), strict=True), start=1
    )
    for count, (text, rows, chosen) in numbered:
        rows = rows[chosen]
        if len(rows):
            features = target.features(text.tokens[None], head.taps, last=True)[0]  # [T, F]
            given, last = target.parted(features, head.taps)
            tokens = text.tokens.to(features.device)
            *_, logits = KINDS[head.kind].rollout(head, target, tokens, given, step)
            p.append(target.output_logits(last[rows + step]).cpu())
            q.append(logits[rows].cpu())
            group.append(torch.full((len(rows),), text.group))
        report(Step(count, len(texts), "logits"))
    return Logits(torch.cat(p), torch.cat(q), torch.cat(group))


def _digest(config: AcceptanceConfig, questions: Sequence[Question]) -> str:
    """Of the text file or the questions. Raises InputError for a file that cannot be read."""
    if config.text is None:
        return hashlib.sha256(
            json.dumps([asdict(question) for question in questions]).encode()
        ).hexdigest()
    return hashlib.sha256(content_of(config.text)).hexdigest()


def _read(
    file: Path, config: AcceptanceConfig, identity: dict[str, Any]
) -> tuple[Logits, dict[str, Any]]:
    """Raises InputError for logits of other options, or of models that are others now; they may also be gone."""
    tensors, about = read_tensors(
        file, "delete it to collect the logits again, or choose another --out"
    )
    try:
        theirs, environment = json.loads(about["identity"]), json.loads(about["environment"])
        logits = Logits(*(tensors[name] for name in ("p", "q", "group")))
        changes = [
            f"{name} was {theirs.get(name)}, now {ours}"
            for name, ours in identity.items()
            if theirs.get(name) != ours
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{file} does not hold logits of an acceptance run: choose another --out"
        ) from error
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
    """The identities of target and head; `otherwise` where they are gone."""
    try:
        return " ".join(identity_of(name) for name in (config.target, config.head) if name)
    except InputError:
        return otherwise
